"""A link between ranks that is made slow: what a transfer costs, in the background, one by one."""

import time
from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor


@attrs.define
class Link:
    """A link on which a transfer takes `cost(x)` seconds, each after the one before."""

    cost: Callable[[Tensor], float]
    free: float = 0.0
    ends: dict[int, float] = attrs.field(factory=dict)
    spent: float = 0.0
    """Seconds of all transfers."""

    def start(self, call: Callable[..., Tensor], x: Tensor, *rest: Any) -> Tensor:
        """Begin a transfer by `call(x, ...)`."""
        out, seconds = call(x, *rest), self.cost(x)
        self.free = max(time.perf_counter(), self.free) + seconds
        self.ends[out.data_ptr()] = self.free
        self.spent += seconds
        return out

    def wait(self, call: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Wait for its end."""
        done = call(x)
        left = self.ends.pop(done.data_ptr(), 0.0) - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return done
