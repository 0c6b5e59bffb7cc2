"""Tensor, sequence and context parallelism: how a part of a model is cut over ranks."""

from collections.abc import Callable
from functools import partial

import attrs
import torch
from torch import Tensor

from mmfn.ops import Pieces
from mmfn.sharding import axes
from mmfn.sharding.axes import Axis
from mmfn.sharding.context import attend_over
from mmfn.sharding.mesh import Mesh


@attrs.frozen
class Cut:
    """A part of a model whose heads, channels and vocabulary are cut over an axis.

    With `sequence` the tokens outside of attention and feed-forward layers are cut over it too:
    a gather and a scatter stand where a copy and a sum stood. Without, and for a tower whose
    weights are whole, the same code runs with axes of one.

    Source: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.
    """

    tensor: Axis
    sequence: bool = False
    """Whether tokens are cut over it outside of layers."""
    ring: Axis = Axis("ring")
    ulysses: Axis = Axis("ulysses")
    context: Axis = Axis("cp")
    """Tokens of a row are cut over it before the model sees them."""

    def join(self, x: Tensor, tokens: int) -> Tensor:
        """Give all rows of which x is this rank's part."""
        return axes.all_gather(x, self.tensor, 0, tokens) if self.sequence else x

    def fan(self, x: Tensor) -> Tensor:
        """Take what is whole to where ranks compute different things."""
        return x if self.sequence else axes.vary(self.tensor, x)[0]

    def leave(self, x: Tensor) -> Tensor:
        """Sum what ranks computed; gives this rank's part of the rows."""
        if self.sequence:
            return axes.reduce_scatter(x, self.tensor, 0)
        return axes.psum(x, self.tensor)

    def own(self, x: Tensor) -> Tensor:
        """Give this rank's part of the rows."""
        return x[self.tensor.part(len(x))] if self.sequence else x

    def inside(self, *weights: Tensor) -> tuple[Tensor, ...]:
        """Sum these weights' gradients over the ranks."""
        return axes.vary(self.tensor, *weights)

    def outside(self, *weights: Tensor) -> tuple[Tensor, ...]:
        """Sum these weights' gradients over the ranks where tokens are cut."""
        return axes.vary(self.tensor, *weights) if self.sequence else weights

    def attend(self, attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Make attention over whole rows."""
        return attend_over(attention, self.ring, self.ulysses)

    def share(self, features: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Give the features of all context ranks."""
        if self.context.size > 1:
            length = len(features[0]) * self.context.size
            joined = axes.all_gather(torch.cat(features, 1), self.context, 0, length)
            features = joined.split([x.shape[1] for x in features], 1)
        return axes.vary(self.tensor, *features) if self.sequence else features

    def alike(self, x: Tensor) -> Tensor:
        """Give x, and to each rank its share of the gradient, which a sum makes whole again."""
        share = x / self.tensor.size
        return share + (x - share).detach() if self.tensor.size > 1 else x

    def pieces(self, entries: int) -> Pieces | None:
        """Say which entries of the vocabulary are here."""
        if self.tensor.size == 1:
            return None
        return Pieces(
            self.tensor.part(entries).start,
            partial(axes.psum, axis=self.tensor),
            partial(axes.pmax, axis=self.tensor),
        )

    def logits(self, x: Tensor, entries: int) -> Tensor:
        """Join the logits of all entries."""
        if self.tensor.size == 1:
            return x
        # A sum, not a gather: what comes out is whole, so each rank takes its part of the gradient.
        start = self.tensor.part(entries).start
        apart = torch.nn.functional.pad(x, (start, entries - start - x.shape[-1]))
        return axes.psum(apart, self.tensor)


def text(mesh: Mesh, *, sequence: bool) -> Cut:
    """Cut the decoder as the mesh says."""
    return Cut(
        mesh.tp,
        sequence=sequence and mesh.tp.size > 1,
        ring=mesh.ring,
        ulysses=mesh.ulysses,
        context=mesh.cp,
    )


def tower(mesh: Mesh, *, cut: bool) -> Cut:
    """Cut the tower over tp, or let each of its ranks compute the whole."""
    return Cut(mesh.tp if cut else Axis("tp"))
