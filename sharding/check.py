"""A debug mode for collectives: all ranks of an axis must make the same calls in the same order.

Pass `checker(...)` as the `note` of `mesh.make`. Each call is first compared over the ranks through
a store, on the host, so a wrong order is an error that names the axis and the calls instead of a
hang. It is slow, and works where the code is not compiled.
"""

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mmfn.sharding.axes import Axis

_HERE = Path(__file__).resolve().parent


def checker(store: Any, *, seconds: int = 60) -> Callable[[str, Axis, Tensor], None]:
    """Make a note that compares each call over the ranks of its axis.

    Raises, when it is called:
        RuntimeError: ranks make different calls, or one makes none in time; names axis, ranks and
            calls.
    """
    calls: dict[str, int] = {}

    def note(name: str, axis: Axis, x: Tensor) -> None:
        number = calls[axis.group] = calls.get(axis.group, 0) + 1
        call = f"{name} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        key = f"call/{axis.group}/{number}"
        store.set(f"{key}/{axis.index}", f"{call}\n{_where()}")
        for other in range(axis.size):
            try:
                store.wait([f"{key}/{other}"], timedelta(seconds=seconds))
            except (dist.DistStoreError, RuntimeError) as error:
                raise RuntimeError(
                    f"axis {axis.name}: rank {axis.index} makes call {number}, {call} at "
                    f"{_where()}; rank {other} makes none within {seconds} s"
                ) from error
            theirs, place = store.get(f"{key}/{other}").decode().split("\n")
            if theirs != call:
                raise RuntimeError(
                    f"axis {axis.name}, call {number}: rank {axis.index} makes {call} at "
                    f"{_where()}, rank {other} makes {theirs} at {place}"
                )

    return note


def _where() -> str:
    """Name the line outside of this folder, and of libraries, that led here."""
    frame = sys._getframe()
    while frame.f_back is not None:
        file = Path(frame.f_code.co_filename).resolve()
        if file.is_file() and file.parent != _HERE and "site-packages" not in file.parts:
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
