"""A model on a mesh: everything that follows from mesh, rules and options, put together."""

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from mmfn import rng, tree
from mmfn.compute import Compute, Stack
from mmfn.experts import Experts
from mmfn.sharding import axes, layout, regions, unshard
from mmfn.sharding.axes import Axis
from mmfn.sharding.experts import exchanged
from mmfn.sharding.layout import Layout
from mmfn.sharding.mesh import Mesh
from mmfn.sharding.rules import Rules

TEXT = ("kv_heads", "mlp", "vocab")
"""Axes of the decoder that are cut over tp together: its blocks sum over the ranks."""

TOWER = ("vision_heads", "vision_mlp", "merged_mlp")
"""Axes of the tower that are, or none of them."""

HEADS = ("kv_heads", "groups", "vision_heads")
"""Axes that tp has to divide; others may be cut in uneven parts."""


@attrs.frozen(eq=False)
class Parallel:
    """A mesh, where weights live on it, and how blocks are cut."""

    mesh: Mesh
    layout: Layout
    rules: Rules
    sequence: bool = False
    """Whether tokens are cut over tp between blocks."""
    experts: Callable[[Axis], Experts] = exchanged
    """How tokens come to experts that are cut over an axis."""
    dropless: Callable[[Axis], Experts] = exchanged
    """How they do where nothing may be left out and nobody would see it: in evaluations."""

    def compute(
        self,
        plain: Compute,
        wrap: Callable[[Stack], Stack] = lambda stack: stack,
        *,
        prefetch: bool = True,
        again: bool = False,
    ) -> Compute:
        """Make of a `Compute` for one device that of this mesh.

        Its stack is what is done within a block's gathered weights (`remat`), `wrap` what is done
        to the block (`compile_blocks`). `again` gathers weights again backward, where `remat` does
        not anyway.
        """
        if self.mesh.sizes.world == 1:
            return attrs.evolve(plain, stack=wrap(plain.stack))
        stack = unshard.gathering(
            plain.stack, self.mesh, plain.dtype, prefetch=prefetch, again=again
        )
        return attrs.evolve(self.whole_step(plain), stack=wrap(stack))

    def whole_step(self, plain: Compute) -> Compute:
        """Make that for a step which is compiled whole: blocks gather their own weights."""
        if self.mesh.sizes.world == 1:
            return plain
        return attrs.evolve(
            plain,
            gather=unshard.gather(self.mesh),
            text=regions.text(self.mesh, sequence=self.sequence),
            tower=regions.tower(self.mesh, cut="vision_heads" in self.rules),
            experts=self.experts(self.mesh.ep),
            total=self.total,
        )

    def measuring(self, compute: Compute) -> Compute:
        """Make that for evaluations: nothing is left out."""
        if self.mesh.sizes.world == 1:
            return compute
        return attrs.evolve(compute, experts=self.dropless(self.mesh.ep))

    def answering(self, compute: Compute) -> Compute:
        """Make that for decoding: each rank reads whole rows, and nothing is left out."""
        if self.mesh.sizes.world == 1:
            return compute
        return attrs.evolve(self.measuring(compute), text=regions.Cut(self.mesh.tp))

    def loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Let a loss of (params, batch, ...) take the local tensors of a rank."""
        return lambda params, *rest, **more: loss(self.layout.bind(params), *rest, **more)

    def key(self, key: Tensor) -> Tensor:
        """Make of a random key one for this rank: another where other tokens are."""
        if self.mesh.sizes.world == 1:
            return key
        place = self.mesh.data_index * self.mesh.sizes.cp + self.mesh.cp.index
        return rng.bits(key, torch.full((), place, device=key.device))

    def norm(self, trained: Any) -> Callable[[Any], Tensor]:
        """Make the norm of a tree of local gradients; `trained` has the specs of its leaves."""
        return partial(self.layout.norm, trained=trained)

    def total(self, values: Any) -> Any:
        """Sum a loss, or a tree of numbers, over all ranks that read something else."""
        flat = tree.leaves(values)
        joined = torch.cat([x.flatten() for x in flat])
        # Ranks of tp have the same: all ranks have a sum, and divide it.
        joined = axes.reduce(joined, self.mesh.all) / self.mesh.sizes.tp
        parts = joined.split([x.numel() for x in flat])
        return tree.unflatten(
            values, [part.view_as(x).to(x.dtype) for part, x in zip(parts, flat, strict=True)]
        )

    def reduce(self, values: Any, grads: Any) -> tuple[Any, Any]:
        """Make of this rank's loss and local gradients those of all ranks; for `make_step`."""
        # Those of uneven parts are pieces of what was padded.
        grads = tree.map(lambda grad: grad.contiguous(), grads)
        return self.total(values), self.layout.sum_copies(grads)


def make(
    abstract: Any,
    mesh: Mesh,
    rules: Rules,
    *,
    sequence: bool = False,
    experts: Callable[[Axis], Experts] = exchanged,
    dropless: Callable[[Axis], Experts] | None = None,
) -> Parallel:
    """Put a model on a mesh.

    Raises:
        ValueError: the rules do not go with the mesh, cannot be computed with, or cut heads that
            tp does not divide, or experts that ep does not; names them.
    """
    check(rules, mesh)
    ep, mixed = mesh.ep.size, False
    for path, param in tree.items(abstract):
        for axis, size in zip(param.axes, param.shape, strict=True):
            if axis in HEADS and rules.get(axis) == "tp" and size % mesh.tp.size:
                raise ValueError(f"{path}: {axis}={size} is not a multiple of tp={mesh.tp.size}")
            if axis == "expert":
                mixed = True
                if size % ep:
                    raise ValueError(f"{path}: num_experts={size} is not a multiple of ep={ep}")
    if ep > 1 and not mixed:
        raise ValueError(f"the mesh has ep={ep}, but the model has no experts")
    if ep > 1 and rules.get("expert") != "ep":
        raise ValueError(
            f"the mesh has ep={ep}, but the rules give experts to {rules.get('expert')!r}"
        )
    where = layout.make(abstract, mesh, rules)
    return Parallel(mesh, where, rules, sequence, experts, dropless or experts)


def check(rules: Rules, mesh: Mesh) -> None:
    """Refuse tables whose tp the blocks cannot compute with.

    Raises:
        ValueError: names the axes.
    """
    for axis, target in rules.items():
        if axis != "expert" and "ep" in ((target,) if isinstance(target, str) else target):
            raise ValueError(f"axis {axis!r} goes to ep; expert can")
    cut = {axis for axis, target in rules.items() if target == "tp"}
    heads = {"groups" if axis == "kv_heads" and "groups" in cut else axis for axis in TEXT}
    if unknown := sorted(cut - heads - set(TOWER)):
        raise ValueError(f"axis {unknown[0]!r} goes to tp; {', '.join((*TEXT, *TOWER))} can")
    for part, axes_of_part in (("decoder", heads), ("tower", set(TOWER))):
        if (some := cut & axes_of_part) and some != axes_of_part:
            left = sorted(axes_of_part - some)
            raise ValueError(
                f"{', '.join(sorted(some))} of the {part} go to tp, but not {', '.join(left)}"
            )
    if mesh.tp.size > 1 and not heads <= cut:
        raise ValueError(f"the mesh has tp={mesh.tp.size}, but the rules cut nothing over tp")
