"""How tokens come to their experts: here, where all experts are on one device.

`mmfn.sharding.experts` has the others. A layer says what an expert computes, as a function of
weights, rows in the order of their experts, and how many rows each expert has.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from mmfn import ops as op

Apply = Callable[[Any, Tensor, Tensor], Tensor]
"""`apply(weights, rows, counts)`: `counts[e]` rows of each expert, one expert after the other."""


@runtime_checkable
class Experts(Protocol):
    """Brings tokens to the experts that they chose, and back."""

    def __call__(
        self,
        apply: Apply,
        weights: Any,
        x: Float[Tensor, "tokens embed"],
        expert: Int[Tensor, "tokens choices"],
        weight: Float[Tensor, "tokens choices"],
        *,
        experts: int,
        ops: op.Ops,
    ) -> tuple[Float[Tensor, "tokens embed"], Tensor | None]:
        """Sum the weighted results of each token's choices; gives also how many were left out.

        `experts` are those of all ranks; `weights` are a tree whose leaves have the experts that
        are here along dim 0. A choice of the expert numbered `experts` is none. The second result
        is `None` where nothing is ever left out.
        """
        ...


def here(
    apply: Apply,
    weights: Any,
    x: Float[Tensor, "tokens embed"],
    expert: Int[Tensor, "tokens choices"],
    weight: Float[Tensor, "tokens choices"],
    *,
    experts: int,
    ops: op.Ops,
) -> tuple[Float[Tensor, "tokens embed"], Tensor | None]:
    """Apply all experts on this device."""
    order, counts = op.by_expert(expert, experts)
    rows = apply(weights, ops.permute(x, order, expert.shape[1]), counts)
    return ops.unpermute(rows, order, weight), None
