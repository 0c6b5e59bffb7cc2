"""How a model is computed, as one value: kernels, dtype, gathering, and what is done around blocks.

A model says what is computed and takes a `Compute`; a recipe composes one. Nothing in it changes
what the function is, only where values are rounded.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from mmfn import ops as op
from mmfn import tree
from mmfn.experts import Experts, here


@runtime_checkable
class Stack(Protocol):
    """Runs blocks one after the other: `x = block(layer, x, *args, each[i])` for each layer.

    A block may give a pair, x and something of its own. The result is the last x, those after the
    layers in `keep`, and what layers gave of their own. Recompute, offload, compiling a block and
    gathering ahead are stacks, or functions from stack to stack.
    """

    def __call__(
        self,
        block: Callable[..., Any],
        layers: Sequence[Any],
        x: Tensor,
        *args: Any,
        each: Sequence[Any],
        keep: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor], list[Any]]:
        """Run the blocks."""
        ...


def sequential(
    block: Callable[..., Any],
    layers: Sequence[Any],
    x: Tensor,
    *args: Any,
    each: Sequence[Any],
    keep: Sequence[int] = (),
) -> tuple[Tensor, list[Tensor], list[Any]]:
    """Run the blocks in a plain loop."""
    kept, given = [], []
    for index, (layer, own) in enumerate(zip(layers, each, strict=True)):
        out = block(layer, x, *args, own)
        if isinstance(out, tuple):
            x, extra = out
            given.append(extra)
        else:
            x = out
        if index in keep:
            kept.append(x)
    return x, kept, given


@runtime_checkable
class Region(Protocol):
    """How a part of a model is cut over ranks; `Whole` is not at all.

    Between `fan` and `leave` a rank computes with its heads, channels or entries of the
    vocabulary. Outside, tokens may be cut over the same ranks.
    """

    def join(self, x: Tensor, tokens: int) -> Tensor:
        """Give all `tokens` rows of which x is this rank's part."""
        ...

    def fan(self, x: Tensor) -> Tensor:
        """Take what is whole, as `join` gives it, to where ranks compute different things."""
        ...

    def leave(self, x: Tensor) -> Tensor:
        """Sum what ranks computed; gives this rank's part of the rows."""
        ...

    def own(self, x: Tensor) -> Tensor:
        """Give this rank's part of the rows of a whole tensor that takes no gradient."""
        ...

    def inside(self, *weights: Tensor) -> tuple[Tensor, ...]:
        """Take weights that every rank has whole to between `fan` and `leave`."""
        ...

    def outside(self, *weights: Tensor) -> tuple[Tensor, ...]:
        """Take weights that every rank has whole to where tokens may be cut."""
        ...

    def attend(self, attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Make attention over whole rows out of that over the tokens that are here."""
        ...

    def share(self, features: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Give the tower's features of all ranks, as the index of the batch counts them."""
        ...

    def alike(self, x: Tensor) -> Tensor:
        """Count the gradient of what every rank computes alike between `fan` and `leave` once."""
        ...

    def pieces(self, entries: int) -> op.Pieces | None:
        """Say which of the vocabulary's entries are here; `None` if all are."""
        ...

    def logits(self, x: Tensor, entries: int) -> Tensor:
        """Give the logits of all entries."""
        ...


@attrs.frozen
class Whole:
    """A part of a model that is not cut."""

    def join(self, x: Tensor, tokens: int) -> Tensor:
        """Give x."""
        return x

    def fan(self, x: Tensor) -> Tensor:
        """Give x."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Give x."""
        return x

    def own(self, x: Tensor) -> Tensor:
        """Give x."""
        return x

    def inside(self, *weights: Tensor) -> tuple[Tensor, ...]:
        """Give the weights."""
        return weights

    def outside(self, *weights: Tensor) -> tuple[Tensor, ...]:
        """Give the weights."""
        return weights

    def attend(self, attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Give the attention."""
        return attention

    def share(self, features: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Give the features."""
        return features

    def alike(self, x: Tensor) -> Tensor:
        """Give x."""
        return x

    def pieces(self, entries: int) -> op.Pieces | None:
        """Say that all are here."""
        return None

    def logits(self, x: Tensor, entries: int) -> Tensor:
        """Give x."""
        return x


def inside(
    region: Region,
    weights: Mapping[str, Any],
    *,
    whole: Collection[str] = (),
    inputs: Collection[str] = (),
) -> dict[str, Any]:
    """Take weights to between `fan` and `leave`: what of them every rank has whole.

    Of those named in `whole` that is all; of the others, whose outputs are cut over ranks, or
    whose `inputs` are, what their node says (`ops.Composed`). Gives all by name.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, weight in weights.items():
        if name in whole:
            found[name] = {str(n): leaf for n, leaf in enumerate(tree.leaves(weight))}
        elif isinstance(weight, op.Composed):
            found[name] = {field: getattr(weight, field) for field in weight.loose[name in inputs]}
    taken = iter(region.inside(*(leaf for part in found.values() for leaf in part.values())))
    made = dict(weights)
    for name, part in found.items():
        values = {field: next(taken) for field in part}
        if name in whole:
            made[name] = tree.unflatten(weights[name], list(values.values()))
        else:
            made[name] = tree.evolve(weights[name], **values)
    return made


def identity(params: Any, dtype: torch.dtype | None) -> Any:
    """Give the parameters as they are."""
    return params


@attrs.frozen
class Compute:
    """How a model is computed; the default is the plain one that `torch.func` can differentiate."""

    ops: op.Ops = op.definition
    """Which version of each operation runs."""
    dtype: torch.dtype | None = None
    """What weights are cast to before use; None leaves them as they are stored."""
    gather: Callable[[Any, torch.dtype | None], Any] = identity
    """Makes of some stored parameters those that this rank computes with, cast to a dtype on the
    way if they are to be; leaves that are no stored ones stay as they are."""
    stack: Stack = sequential
    """What is done around the blocks."""
    text: Region = Whole()
    """How the decoder is cut over ranks."""
    tower: Region = Whole()
    """How the tower is."""
    experts: Experts = here
    """How tokens come to their experts."""
    total: Callable[[Tensor], Tensor] = lambda x: x
    """Sums what has no gradient over all ranks that read other tokens."""

    def whole(self, params: Any) -> Any:
        """Gather parameters in the dtype they are stored in."""
        return self.gather(params, None)

    def ready(self, params: Any) -> Any:
        """Gather parameters and cast them."""
        dtype = self.dtype
        params = self.gather(params, dtype)
        if dtype is None:
            return params
        return tree.map(
            lambda leaf: self.ops.cast(leaf, dtype) if leaf.is_floating_point() else leaf, params
        )


plain = Compute()
