"""Where the tensors of a tree live: stored as DTensors, computed with as plain local tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from mmfn import lora, tree
from mmfn.param import Param, Part
from mmfn.sharding import axes
from mmfn.sharding.mesh import Mesh
from mmfn.sharding.rules import Rules, Spec, check, spec


@attrs.frozen(eq=False)
class Layout:
    """A tree of specs on a mesh, and what follows from it."""

    mesh: Mesh
    specs: Any
    """A tree like the weights, a `Spec` at each leaf."""

    def place(self, path: str, param: Param) -> tuple[Part, Callable[[Tensor], Tensor]]:
        """Say which part of a leaf is made or read here, and wrap it; for `init` and `load`."""
        own = dict(tree.items(self.specs))[path]
        return own.part(self.mesh), lambda value: wrap(value, own, self.mesh)

    def put(self, path: str, whole: Tensor) -> Tensor:
        """Store this rank's part of a whole tensor that is the leaf at a path."""
        own = dict(tree.items(self.specs))[path]
        return wrap(whole[own.part(self.mesh)], own, self.mesh)

    def merged(self, stored: Any) -> Any:
        """Add the adapters of a tree to its weights, each rank in its own parts."""
        specs = lora.without(self.specs)
        return tree.map(
            lambda value, own: wrap(value, own, self.mesh), lora.merge(local(stored)), specs
        )

    def bind(self, local: Any) -> Any:
        """Join each local tensor of a tree of weights with its spec: what a gather needs.

        Without ranks nothing is to be gathered, and they stay as they are.
        """
        if self.mesh.sizes.world == 1:
            return local
        return tree.map(lambda value, own: Stored(value, own), local, self.specs)

    def norm(self, local: Any, trained: Any) -> Tensor:
        """Give the norm of a tree of gradients over all ranks, each value counted once.

        `trained` are the specs of the leaves of `local`.
        """
        flat = list(zip(tree.leaves(local), tree.leaves(trained), strict=True))
        square = torch.zeros((), dtype=torch.float32, device=self.mesh.device)
        counted = [value for value, own in flat if self._counts(own) and value.numel()]
        if counted:
            norms = torch._foreach_norm(counted, 2.0)
            wide = torch.promote_types(norms[0].dtype, torch.float32)
            square = torch.stack([n.to(wide) for n in norms]).square().sum()
        else:
            square = square.to(
                torch.promote_types(flat[0][0].dtype, torch.float32) if flat else torch.float32
            )
        # Each copy over dp has the same gradients: all ranks have a sum, and divide it.
        return (axes.reduce(square, self.mesh.all) / self.mesh.sizes.dp).sqrt()

    def _counts(self, own: Spec) -> bool:
        """Whether this rank holds a leaf's part first, of those that hold the same."""
        return all(
            own.dim(name) is not None or self.mesh.axes[name].index == 0 for name in own.view
        )

    def sum_copies(self, local: Any, *, bytes_at_once: int = 2**26) -> Any:
        """Sum a tree of gradients over dp, in few large pieces; once a step."""
        axis = self.mesh.dp
        if axis.size == 1:
            return local
        flat = tree.leaves(local)
        done: list[Tensor] = []
        start = 0
        while start < len(flat):
            stop, held = start, 0
            while stop < len(flat) and (stop == start or held < bytes_at_once):
                held += flat[stop].numel() * flat[stop].element_size()
                stop += 1
            piece = flat[start:stop]
            joined = axes.reduce(torch.cat([x.flatten() for x in piece]), axis)
            parts = joined.split([x.numel() for x in piece])
            done += [part.view_as(x) for part, x in zip(parts, piece, strict=True)]
            start = stop
        return tree.unflatten(local, done)


# A dataclass: those of attrs cannot be made inside a compiled step.
@dataclass(frozen=True, eq=False)
class Stored:
    """A weight as a rank stores it, and how it is cut; `unshard` makes it what a block reads."""

    value: Tensor
    spec: Spec


def make(abstract: Any, mesh: Mesh, rules: Rules) -> Layout:
    """Lay a tree of `Param`s out on a mesh.

    Raises:
        ValueError: the table names what does not exist, or cuts two axes of a leaf over one mesh
            axis; names them.
    """
    check(rules)
    experts = mesh.sizes.ep > 1
    specs = tree.map_with_path(
        lambda path, param: spec(param, rules, path, experts=experts), abstract
    )
    return Layout(mesh, specs)


def placements(own: Spec, mesh: Mesh) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Give the mesh that a weight is stored on, and torch's placements of it there."""
    stored = mesh.stored
    if "ep" in own.view and mesh.experts is not None:
        stored = mesh.experts
    assert stored is not None
    names = list(stored.mesh_dim_names or ())
    if "ep" in own.view and mesh.experts is None:
        # All ranks of fsdp are ep: theirs is the same mesh under another name.
        names[names.index("fsdp")] = "ep"
    return stored, tuple(
        Replicate() if (dim := own.dim(name)) is None else Shard(dim) for name in names
    )


def wrap(local: Tensor, own: Spec, mesh: Mesh) -> Tensor:
    """Bring `local` to the device and make the DTensor of which it is this rank's part.

    Without ranks it stays a plain tensor.
    """
    local = local.to(mesh.device)
    if mesh.stored is None:
        return local
    stride = torch.empty(own.shape, device="meta").stride()
    return DTensor.from_local(
        local.contiguous(),
        *placements(own, mesh),
        run_check=False,
        shape=torch.Size(own.shape),
        stride=stride,
    )


def local(stored: Any) -> Any:
    """Give the local tensors of a tree, which share their memory."""
    return tree.map(lambda x: x.to_local() if isinstance(x, DTensor) else x, stored)


def to_host(stored: Any) -> Any:
    """Copy a tree to the host, as what it is: each rank its parts."""

    def copy(x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return x.detach().to("cpu", copy=True)
        mesh = x.device_mesh
        if mesh.device_type != "cpu":
            # The same ranks; no groups are made, as nothing is sent.
            mesh = DeviceMesh(
                "cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False
            )
        return DTensor.from_local(
            x.to_local().detach().to("cpu", copy=True),
            mesh,
            x.placements,
            run_check=False,
            shape=x.shape,
            stride=x.stride(),
        )

    return tree.map(copy, stored)


def on_local(step: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Let `step(state, batches) -> (state, metrics)`, which donates, work on local tensors.

    The state that comes out has the stored tensors that went in, written into; what is no DTensor
    is what `step` gives.
    """

    def run(state: Any, batches: Any) -> tuple[Any, Any]:
        after, metrics = step(local(state), batches)
        return (
            tree.map(lambda old, new: old if isinstance(old, DTensor) else new, state, after),
            metrics,
        )

    return run


def full(x: Tensor) -> Tensor:
    """Give the whole of a stored tensor; every rank calls it."""
    return x.full_tensor() if isinstance(x, DTensor) else x
