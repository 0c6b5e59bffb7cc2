"""How a model is computed, as one value: kernels, dtype, gathering, and what is done around blocks.

A model says what is computed and takes a `Compute`; a recipe composes one. Nothing in it changes
what the function is, only where values are rounded.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from mmfn import ops as op
from mmfn import tree


@runtime_checkable
class Stack(Protocol):
    """Runs blocks one after the other: `x = block(layer, x, *args, each[i])` for each layer.

    Gives the last x and those after the layers in `keep`. Recompute, offload, compiling a block
    and gathering ahead are stacks, or functions from stack to stack.
    """

    def __call__(
        self,
        block: Callable[..., Tensor],
        layers: Sequence[Any],
        x: Tensor,
        *args: Any,
        each: Sequence[Any],
        keep: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the blocks."""
        ...


def sequential(
    block: Callable[..., Tensor],
    layers: Sequence[Any],
    x: Tensor,
    *args: Any,
    each: Sequence[Any],
    keep: Sequence[int] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Run the blocks in a plain loop."""
    kept = []
    for index, (layer, own) in enumerate(zip(layers, each, strict=True)):
        x = block(layer, x, *args, own)
        if index in keep:
            kept.append(x)
    return x, kept


def identity(params: Any) -> Any:
    """Give the parameters as they are."""
    return params


@attrs.frozen
class Compute:
    """How a model is computed; the default is the plain one that `torch.func` can differentiate."""

    ops: op.Ops = op.definition
    """Which version of each operation runs."""
    dtype: torch.dtype | None = None
    """What weights are cast to before use; None leaves them as they are stored."""
    gather: Callable[[Any], Any] = identity
    """Makes the part of some parameters that this rank computes with, from the part it stores."""
    stack: Stack = sequential
    """What is done around the blocks."""

    def ready(self, params: Any) -> Any:
        """Cast parameters, then gather them."""
        dtype = self.dtype
        if dtype is not None:
            params = tree.map(lambda leaf: self.ops.cast(leaf, dtype), params)
        return self.gather(params)


plain = Compute()
