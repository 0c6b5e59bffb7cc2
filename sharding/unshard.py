"""Fully sharded weights as a function: gather those of a block right before use.

A block's weights are one flat bucket: one all-gather forward, in the dtype that is computed in,
and one reduce-scatter of the gradients backward, in float32 at least. Weights that are whole on
every rank share one all-reduce. The transpose of a gather is derived, not written.

Source: Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO); Zhao et al. 2023, arXiv:2304.11277 (FSDP).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import attrs
import torch
from torch import Tensor

from mmfn import tree
from mmfn.compute import Stack
from mmfn.phase import in_backward
from mmfn.sharding import axes
from mmfn.sharding.axes import Axis
from mmfn.sharding.layout import Stored
from mmfn.sharding.mesh import Mesh
from mmfn.transforms import forgetting


@attrs.define(eq=False)
class _Traffic:
    """Gradients on their way in one backward pass: at most two, then the older is waited for."""

    sent: list[Tensor] = attrs.field(factory=list)

    def send(self, x: Tensor, axis: Axis) -> Tensor:
        if not self.sent:
            # Autograd hands the results out as it goes; they must be there when it ends.
            torch.autograd.Variable._execution_engine.queue_callback(self.land)
        if len(self.sent) > 1:
            axes.wait(self.sent.pop(0))
        self.sent.append(axes.start_scatter(x, axis))
        return self.sent[-1]

    def land(self) -> None:
        for sent in self.sent:
            axes.wait(sent)
        self.sent.clear()


class _Unshard(torch.autograd.Function):
    """From a rank's flat part to the parts of all, `[ranks, part]`; cast before, widened after."""

    @staticmethod
    def forward(
        flat: Tensor, started: Tensor | None, dtype: torch.dtype, axis: Axis, traffic: Any
    ) -> Tensor:
        whole = axes.start_gather(flat.to(dtype), axis) if started is None else started
        return axes.wait(whole).view(axis.size, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        flat, _, _, ctx.axis, ctx.traffic = inputs
        ctx.dtype = flat.dtype

    @staticmethod
    @in_backward
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].flatten().to(ctx.dtype)
        if ctx.traffic is None:
            return axes.wait(axes.start_scatter(grad, ctx.axis)), None, None, None, None
        return ctx.traffic.send(grad, ctx.axis), None, None, None, None


@dataclass(frozen=True, eq=False)
class _Bucket:
    """What of a tree is gathered together: places of its leaves, and their flat parts."""

    axis: Axis
    places: tuple[int, ...]
    leaves: tuple[Stored, ...]
    flat: Tensor
    started: Tensor | None = None


def _pack(leaves: Sequence[Any], mesh: Mesh) -> list[_Bucket]:
    """Flatten the leaves that are cut over one axis; trained ones, and frozen ones apart."""
    found: dict[tuple[str, bool], list[int]] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Stored):
            name = leaf.spec.gathered
            if leaf.spec.dim(name) is not None and mesh.axes[name].size > 1:
                found.setdefault((name, leaf.value.requires_grad), []).append(place)
    buckets = []
    for (name, _), places in found.items():
        chosen = tuple(leaves[place] for place in places)
        flat = torch.cat([_filled(leaf, mesh).reshape(-1) for leaf in chosen])
        buckets.append(_Bucket(mesh.axes[name], tuple(places), chosen, flat))
    return buckets


def _cut(leaf: Stored) -> int:
    """Give the dim that is gathered."""
    dim = leaf.spec.dim(leaf.spec.gathered)
    assert dim is not None
    return dim


def _filled(leaf: Stored, mesh: Mesh) -> Tensor:
    """Give a rank's part as large as that of the rank where it is fullest."""
    value, dim = leaf.value, _cut(leaf)
    shape = list(_padded(leaf, mesh))
    shape[dim] -= value.shape[dim]
    return torch.cat((value, value.new_zeros(shape)), dim) if shape[dim] else value


def _padded(leaf: Stored, mesh: Mesh) -> tuple[int, ...]:
    """Shape of a rank's part where it is fullest."""
    name, dim = leaf.spec.gathered, _cut(leaf)
    shape = list(leaf.spec.local(mesh, whole=name))
    shape[dim] = mesh.axes[name].chunk(shape[dim])
    return tuple(shape)


def _size(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _unpack(bucket: _Bucket, whole: Tensor, mesh: Mesh) -> list[Tensor]:
    """From `[ranks, part]` to the leaves, each whole over the data ranks."""
    shapes = [_padded(leaf, mesh) for leaf in bucket.leaves]
    values = []
    for leaf, shape, part in zip(
        bucket.leaves, shapes, whole.split([_size(s) for s in shapes], 1), strict=True
    ):
        dim = _cut(leaf)
        joined = part.unflatten(1, shape).movedim(0, dim).flatten(dim, dim + 1)
        values.append(joined.narrow(dim, 0, leaf.spec.shape[dim]).contiguous())
    return values


def _finish(
    leaves: Sequence[Any],
    buckets: Sequence[_Bucket],
    dtype: torch.dtype | None,
    mesh: Mesh,
    traffic: _Traffic | None,
) -> list[Tensor]:
    values = list(leaves)
    apply: Callable[..., Tensor] = _Unshard.apply
    for bucket in buckets:
        whole = apply(bucket.flat, bucket.started, dtype or bucket.flat.dtype, bucket.axis, traffic)
        for place, value in zip(bucket.places, _unpack(bucket, whole, mesh), strict=True):
            values[place] = value
    # What is whole on every rank: nothing to gather, its gradients are summed together.
    rest = [place for place, value in enumerate(values) if isinstance(value, Stored)]
    whole_values: dict[int, Tensor] = {}
    for name in dict.fromkeys(values[place].spec.gathered for place in rest):
        trained = [
            place
            for place in rest
            if values[place].spec.gathered == name and values[place].value.requires_grad
        ]
        varied = axes.vary(mesh.axes[name], *(values[place].value for place in trained))
        whole_values |= zip(trained, varied, strict=True)
    for place in rest:
        value = whole_values.get(place, values[place].value)
        values[place] = value if dtype is None else value.to(dtype)
    return values


def gather(mesh: Mesh) -> Callable[[Any, torch.dtype | None], Any]:
    """Make the function that gathers a tree of `Stored` weights; other leaves stay as they are."""

    def run(params: Any, dtype: torch.dtype | None) -> Any:
        leaves = tree.leaves(params)
        if not any(isinstance(leaf, Stored) for leaf in leaves):
            return params
        return tree.unflatten(params, _finish(leaves, _pack(leaves, mesh), dtype, mesh, None))

    return run


@attrs.define(eq=False)
class _Ahead:
    """The gathers of one run over a stack of layers: the next is started before one is used.

    Layers are taken in order forward and, where blocks are run again or weights were not kept, in
    the other order backward.
    """

    layers: Sequence[Any]
    dtype: torch.dtype | None
    mesh: Mesh
    prefetch: bool
    traffic: _Traffic = attrs.field(factory=_Traffic)
    started: dict[int, list[_Bucket]] = attrs.field(factory=dict)
    taken: set[int] = attrs.field(factory=set)
    again: dict[int, list[Tensor]] = attrs.field(factory=dict)

    def start(self, index: int) -> list[_Bucket]:
        buckets = _pack(tree.leaves(self.layers[index]), self.mesh)
        with torch.no_grad():
            return [
                replace(
                    bucket,
                    started=axes.start_gather(
                        bucket.flat.to(self.dtype or bucket.flat.dtype), bucket.axis
                    ),
                )
                for bucket in buckets
            ]

    def buckets(self, index: int, step: int) -> list[_Bucket]:
        now = self.started.pop(index, None) or self.start(index)
        other = index + step
        if self.prefetch and 0 <= other < len(self.layers) and other not in self.started:
            self.started[other] = self.start(other)
        return now

    def take(self, index: int) -> Any:
        """Give the layer's weights, and start the next gather."""
        backward = index in self.taken
        self.taken.add(index)
        layer = self.layers[index]
        values = _finish(
            tree.leaves(layer),
            self.buckets(index, -1 if backward else 1),
            self.dtype,
            self.mesh,
            self.traffic,
        )
        return tree.unflatten(layer, values)

    def retake(self, index: int) -> list[Tensor]:
        """Give the leaves again in the backward pass, without a gradient."""
        if index not in self.again:
            self.again.clear()
            with torch.no_grad():
                self.again[index] = _finish(
                    tree.leaves(self.layers[index]),
                    self.buckets(index, -1),
                    self.dtype,
                    self.mesh,
                    None,
                )
            if index == 0:
                self.started.clear()
        return self.again[index]


def gathering(
    stack: Stack,
    mesh: Mesh,
    dtype: torch.dtype | None,
    *,
    prefetch: bool = True,
    again: bool = False,
) -> Stack:
    """Make a stack whose blocks get gathered weights, the next layer's on their way meanwhile.

    Over `remat` they are gathered again in the block that is run again. Else they are kept for the
    backward pass (ZeRO-2), or with `again` gathered where a saved weight is read (ZeRO-3).
    Compiled whole, a step takes `gather` in the block instead: its compiler orders the calls.
    """

    def run(
        block: Callable[..., Any],
        layers: Sequence[Any],
        x: Tensor,
        *args: Any,
        each: Sequence[Any],
        keep: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor], list[Any]]:
        ahead = _Ahead(layers, dtype, mesh, prefetch)

        def one(index: int, *rest: Any) -> Any:
            layer = ahead.take(index)
            if not again or not torch.is_grad_enabled():
                return block(layer, *rest)
            with forgetting(tree.leaves(layer), lambda: ahead.retake(index)):
                return block(layer, *rest)

        return stack(one, range(len(layers)), x, *args, each=each, keep=keep)

    return run
