"""Collectives by mesh axis, in transposed pairs; on an axis of one they are the identity.

| forward | backward |
|---|---|
| `psum`: sum over ranks | identity |
| `vary`: identity | sum over ranks |
| `all_gather` | `reduce_scatter` |
| `reduce_scatter` | `all_gather` |
| `all_to_all` | `all_to_all`, the other way |
| `ppermute` | `ppermute`, the other way |
| `send_rows` | `send_rows`, the other way |

A value is *whole* on an axis where all its ranks hold the same, *varying* where they hold different
parts of a sum or a tensor. The gradient of a whole value is whole. So what is whole passes `vary`
before it meets what varies, and a partial sum passes `psum` before it counts as whole. That is not
what torch's own functional collectives do: their all-reduce sums again in the backward pass.

They can be differentiated once; forward mode through an axis larger than one is an error.
"""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from mmfn.phase import in_backward

_collectives = torch.ops._c10d_functional


def silent(name: str, axis: "Axis", x: Tensor) -> None:
    """Do nothing about a call."""


@attrs.frozen
class Axis:
    """Ranks that differ in one coordinate of the mesh, as this rank sees them."""

    name: str
    size: int = 1
    index: int = 0
    """Which of them this rank is."""
    group: str = ""
    """Name of their process group."""
    note: Callable[[str, "Axis", Tensor], None] = attrs.field(default=silent, eq=False)
    """Is told of each collective before it starts: (its name, this axis, what is sent)."""

    def chunk(self, length: int) -> int:
        """Give how many of `length` entries a rank holds; the last ranks hold fewer or none."""
        return -(-length // self.size)

    def part(self, length: int) -> slice:
        """Give which of `length` entries this rank holds."""
        chunk = self.chunk(length)
        start = min(self.index * chunk, length)
        return slice(start, min(start + chunk, length))


def wait(x: Tensor) -> Tensor:
    """Wait for the collective that writes x."""
    done: Tensor = _collectives.wait_tensor(x)
    return done


def reduce(x: Tensor, axis: Axis, how: str = "sum") -> Tensor:
    """Sum (or `max`) over the ranks; has no gradient."""
    if axis.size == 1:
        return x
    axis.note(f"all_reduce {how}", axis, x)
    return wait(_collectives.all_reduce(x.contiguous(), how, axis.group))


def start_gather(x: Tensor, axis: Axis) -> Tensor:
    """Begin to join the tensors of all ranks along dim 0; `wait` ends it. Has no gradient."""
    axis.note("all_gather", axis, x)
    started: Tensor = _collectives.all_gather_into_tensor(x.contiguous(), axis.size, axis.group)
    return started


def start_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Begin to sum over ranks and keep a part of dim 0; `wait` ends it. Has no gradient."""
    axis.note("reduce_scatter", axis, x)
    started: Tensor = _collectives.reduce_scatter_tensor(
        x.contiguous(), "sum", axis.size, axis.group
    )
    return started


def _gather(x: Tensor, axis: Axis, dim: int, length: int) -> Tensor:
    """Join parts along a dim; parts of the last ranks may be short."""
    first = _filled(x.movedim(dim, 0), axis.chunk(length))
    joined = wait(start_gather(first, axis))
    return joined[:length].movedim(0, dim).contiguous()


def _scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum over ranks and keep this rank's part of a dim."""
    length = x.shape[dim]
    first = _filled(x.movedim(dim, 0), axis.chunk(length) * axis.size)
    own = axis.part(length)
    return wait(start_scatter(first, axis))[: own.stop - own.start].movedim(0, dim).contiguous()


def _filled(x: Tensor, length: int) -> Tensor:
    """Add zeros at the end of dim 0."""
    if len(x) == length:
        return x
    return torch.cat((x, x.new_zeros(length - len(x), *x.shape[1:])))


def _exchange(x: Tensor, axis: Axis, split: int, join: int) -> Tensor:
    """Cut a dim in a part for each rank, and join what comes along another dim."""
    axis.note("all_to_all", axis, x)
    parts = torch.stack(x.chunk(axis.size, split))
    sizes = [1] * axis.size
    got = wait(_collectives.all_to_all_single(parts, sizes, sizes, axis.group))
    return torch.cat(got.unbind(0), join)


def _shift(x: Tensor, axis: Axis, by: int) -> Tensor:
    """Send x to the rank `by` further on, and give what comes."""
    axis.note("ppermute", axis, x)
    to, source = (axis.index + by) % axis.size, (axis.index - by) % axis.size
    sent, got = [0] * axis.size, [0] * axis.size
    sent[to] = got[source] = 1
    result = wait(_collectives.all_to_all_single(x[None].contiguous(), got, sent, axis.group))
    return result[0]


def _send(x: Tensor, axis: Axis, sent: Sequence[int], got: Sequence[int]) -> Tensor:
    """Begin to send rows to each rank; `wait` ends it."""
    axis.note("all_to_all of rows", axis, x[:0])
    started: Tensor = _collectives.all_to_all_single(
        x.contiguous(), list(got), list(sent), axis.group
    )
    return started


class _Land(torch.autograd.Function):
    """The identity; its gradient is on its way, and is waited for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @in_backward
    def backward(ctx: Any, *grads: Any) -> Any:
        return wait(grads[0])


class _Receive(torch.autograd.Function):
    """Waits for rows that were sent; backward it begins to send their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, started: Tensor, axis: Axis, sent: Any, got: Any) -> Tensor:
        ctx.axis, ctx.sent, ctx.got = axis, sent, got
        return wait(started)

    @staticmethod
    @in_backward
    def backward(ctx: Any, *grads: Any) -> Any:
        return _send(grads[0], ctx.axis, ctx.got, ctx.sent), None, None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, axis: Axis) -> Tensor:
        return reduce(x, axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    @in_backward
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Vary(torch.autograd.Function):
    @staticmethod
    def forward(axis: Axis, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.axis = inputs[0]

    @staticmethod
    @in_backward
    def backward(ctx: Any, *grads: Any) -> Any:
        axis, flat = ctx.axis, [grad.flatten() for grad in grads]
        if len(flat) == 1:
            return None, reduce(flat[0], axis).view_as(grads[0])
        joined = reduce(torch.cat(flat), axis).split([part.numel() for part in flat])
        return None, *(part.view_as(grad) for part, grad in zip(joined, grads, strict=True))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, axis: Axis, dim: int, length: int) -> Tensor:
        return _gather(x, axis, dim, length)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.axis, ctx.dim, _ = inputs

    @staticmethod
    @in_backward
    def backward(ctx: Any, *grads: Any) -> Any:
        return _scatter(grads[0], ctx.axis, ctx.dim), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, axis: Axis, dim: int) -> Tensor:
        return _scatter(x, axis, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.axis, ctx.dim = inputs
        ctx.length = x.shape[ctx.dim]

    @staticmethod
    @in_backward
    def backward(ctx: Any, *grads: Any) -> Any:
        return _gather(grads[0], ctx.axis, ctx.dim, ctx.length), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, axis: Axis, split: int, join: int) -> Tensor:
        return _exchange(x, axis, split, join)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.axis, ctx.split, ctx.join = inputs

    @staticmethod
    @in_backward
    def backward(ctx: Any, *grads: Any) -> Any:
        return _exchange(grads[0], ctx.axis, ctx.join, ctx.split), None, None, None


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, axis: Axis, by: int) -> Tensor:
        return _shift(x, axis, by)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.axis, ctx.by = inputs

    @staticmethod
    @in_backward
    def backward(ctx: Any, *grads: Any) -> Any:
        return _shift(grads[0], ctx.axis, -ctx.by), None, None


def psum(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks: what comes out is whole."""
    if axis.size == 1:
        return x
    apply: Callable[..., Tensor] = _Sum.apply
    return apply(x, axis)


def pmax(x: Tensor, axis: Axis) -> Tensor:
    """Give the largest over the ranks; no gradient passes."""
    return reduce(x.detach(), axis, "max")


def vary(axis: Axis, *values: Tensor) -> tuple[Tensor, ...]:
    """Take whole values to where each rank computes something else; one sum backward for all.

    What takes no gradient stays as it is: it must be the same values on every rank.
    """
    trained = [value for value in values if value.requires_grad]
    if axis.size == 1 or not trained:
        return values
    apply: Callable[..., tuple[Tensor, ...]] = _Vary.apply
    varied = iter(apply(axis, *trained))
    return tuple(next(varied) if value.requires_grad else value for value in values)


def all_gather(x: Tensor, axis: Axis, dim: int, length: int) -> Tensor:
    """Join the ranks' parts of a dim of `length` entries, cut as `Axis.part` says."""
    if axis.size == 1:
        return x
    apply: Callable[..., Tensor] = _Gather.apply
    return apply(x, axis, dim, length)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum over the ranks and keep this rank's part of a dim."""
    if axis.size == 1:
        return x
    apply: Callable[..., Tensor] = _Scatter.apply
    return apply(x, axis, dim)


def all_to_all(x: Tensor, axis: Axis, *, split: int, join: int) -> Tensor:
    """Cut one dim, a part for each rank, and join what the ranks send along another.

    Raises:
        ValueError: the dim is not a multiple of the axis; names both sizes.
    """
    if axis.size == 1:
        return x
    if x.shape[split] % axis.size:
        raise ValueError(
            f"dim {split} of size {x.shape[split]} is not a multiple of {axis.name}={axis.size}"
        )
    apply: Callable[..., Tensor] = _Exchange.apply
    return apply(x, axis, split, join)


def ppermute(x: Tensor, axis: Axis, by: int = 1) -> Tensor:
    """Send x to the rank `by` further on, round the axis, and give what comes."""
    if axis.size == 1:
        return x
    apply: Callable[..., Tensor] = _Shift.apply
    return apply(x, axis, by)


def send_rows(
    x: Tensor, axis: Axis, sent: Sequence[int], got: Sequence[int]
) -> Callable[[], Tensor]:
    """Begin to send rows, `sent[r]` to rank r in order; what is given waits for those that come.

    What is done between the two goes on meanwhile, and backward the other way round. `got[r]` rows
    come from rank r.
    """
    if axis.size == 1:
        return lambda: x
    land: Callable[..., Tensor] = _Land.apply
    receive: Callable[..., Tensor] = _Receive.apply
    x = land(x)
    with torch.no_grad():
        started = _send(x, axis, sent, got)
    return lambda: receive(x, started, axis, sent, got)


def all_to_all_plain(x: Tensor, axis: Axis) -> Tensor:
    """Send entry r of dim 0 to rank r, and give what the ranks send; has no gradient."""
    if axis.size == 1:
        return x
    return _exchange(x, axis, 0, 0)
