"""Fused operations for the CPU, as custom ops that a compiled step holds as single nodes."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmfn import ops as op
from mmfn.batch import Segments
from mmfn.kernels.loss import cross_entropy
from mmfn.kernels.routing import permute, unpermute

_ROWS = 128
"""Query tokens a block. Measured forward and backward, 2 segments of 512, 8 heads of 64, bfloat16:
26 ms with 128 or 192, 27 with 64, 28 with 256, 39 in one block."""

_KEPT = 5
"""Weights kept for the backward pass, in times the queries, where values have two bytes: 22 ms in
place of 26 in the case above. Of four bytes none are: it would save 1 % and take twice as much."""


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    """Start and end of each segment that has tokens; reads the host only."""
    spans, start = [], 0
    for end in ends.tolist():
        if end > start:
            spans.append((start, end))
            start = end
    return spans


def _heads_first(x: Tensor) -> Tensor:
    """From `[tokens, kv_heads, ..., head_dim]` to `[kv_heads, tokens · ..., head_dim]`."""
    return x.movedim(1, 0).flatten(1, -2)


def _blocks(length: int, causal: bool) -> list[tuple[int, int, int]]:
    """Cut a segment's queries: first and last of a block, and how many keys they can see."""
    return [
        (first, min(first + _ROWS, length), min(first + _ROWS, length) if causal else length)
        for first in range(0, length, _ROWS)
    ]


def _weights(q: Tensor, k: Tensor, groups: int, causal: bool, place: Tensor | None) -> Tensor:
    """Soft-max weights `[kv_heads, queries · groups, keys]` of one block, in the dtype of q.

    They are written to `place` if it is given.
    """
    scores = torch.bmm(q * q.shape[-1] ** -0.5, k.transpose(1, 2))
    if causal:
        rows, keys = q.shape[1] // groups, k.shape[1]
        # Only the square on the diagonal, the last `rows` keys, has anything to hide.
        hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1).repeat_interleave(groups, 0)
        scores[:, :, keys - rows :].masked_fill_(hidden, -torch.inf)
    # The kernel of softmax sums in float32 whatever its input is.
    return torch.softmax(scores, -1) if place is None else torch.softmax(scores, -1, out=place)


def _buffer(q: Tensor) -> Tensor:
    return q.new_empty(_KEPT * q.numel() if q.dtype.itemsize <= 2 else 0)


def _room(kept: Tensor, used: int, shape: tuple[int, int, int]) -> tuple[Tensor | None, int]:
    """Give the next place in a flat buffer for weights of this shape, if it fits, and the use."""
    size = math.prod(shape)
    if used + size > len(kept):
        return None, used
    return kept[used : used + size].view(shape), used + size


@torch.library.custom_op("mmfn::cpu_attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    groups, out, kept = q.shape[2], torch.empty_like(q), _buffer(q)
    used = 0
    for start, stop in _spans(ends):
        keys, values = _heads_first(k[start:stop]), _heads_first(v[start:stop])
        for first, last, seen in _blocks(stop - start, causal):
            rows = slice(start + first, start + last)
            query = _heads_first(q[rows])
            place, used = _room(kept, used, (*query.shape[:2], seen))
            weights = _weights(query, keys[:, :seen], groups, causal, place)
            result = torch.bmm(weights, values[:, :seen])
            out[rows] = result.unflatten(1, (last - first, groups)).movedim(0, 1)
    return out, kept


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), _buffer(q)


@torch.library.custom_op("mmfn::cpu_attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    kept: Tensor,
    ends: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    groups, scale = q.shape[2], q.shape[-1] ** -0.5
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    used = 0
    for start, stop in _spans(ends):
        whole = slice(start, stop)
        keys, values = _heads_first(k[whole]), _heads_first(v[whole])
        # Sums over blocks, in float32 at least.
        dkeys, dvalues = op.wide(torch.zeros_like(keys)), op.wide(torch.zeros_like(values))
        for first, last, seen in _blocks(stop - start, causal):
            rows = slice(start + first, start + last)
            query, dresult = _heads_first(q[rows]), _heads_first(grad[rows])
            weights, used = _room(kept, used, (*query.shape[:2], seen))
            if weights is None:
                weights = _weights(query, keys[:, :seen], groups, causal, None)
            dvalues[:, :seen] += torch.bmm(weights.transpose(1, 2), dresult)
            dweights = torch.bmm(dresult, values[:, :seen].transpose(1, 2))
            # The row sums of weights · dweights are those of result · dresult, which are shorter.
            row = (op.wide(_heads_first(out[rows])) * op.wide(dresult)).sum(-1, keepdim=True)
            dscores = dweights.sub_(row.to(dweights.dtype)).mul_(weights).mul_(scale)
            dquery = torch.bmm(dscores, keys[:, :seen])
            dq[rows] = dquery.unflatten(1, (last - first, groups)).movedim(0, 1)
            dkeys[:, :seen] += torch.bmm(dscores.transpose(1, 2), query)
        dk[whole], dv[whole] = dkeys.movedim(0, 1), dvalues.movedim(0, 1)
    return dq, dk, dv


@_attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    kept: Tensor,
    ends: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ends, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output, ends)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, kept, ends = ctx.saved_tensors
    grads = _attention_backward(grad.contiguous(), q, k, v, out, kept, ends, ctx.causal)
    return (*grads, None, None)


_attention.register_autograd(_backward, setup_context=_setup)


def attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, causal: bool) -> Tensor:
    """Attend block by block within each segment.

    Some weights may be kept for the backward pass, those of the first segments, in a buffer that is
    in proportion to the queries; the others are made again.
    """
    out, _ = _attention(q.contiguous(), k.contiguous(), v.contiguous(), segments.ends, causal)
    result: Tensor = out
    return result


def _groups(counts: Tensor) -> list[tuple[int, int, int]]:
    """Number, first and last row of each group that has rows; reads the host only."""
    groups, start = [], 0
    for number, count in enumerate(counts.tolist()):
        if count:
            groups.append((number, start, start + count))
        start += count
    return groups


@torch.library.custom_op("mmfn::cpu_grouped_linear", mutates_args=())
def _grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    out, used = x.new_empty(len(x), weight.shape[2]), 0
    for number, start, used in _groups(counts):
        torch.mm(x[start:used], weight[number], out=out[start:used])
    out[used:] = 0
    return out


@_grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[2])


@torch.library.custom_op("mmfn::cpu_grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    dx, dweight, used = torch.empty_like(x), torch.zeros_like(weight), 0
    for number, start, used in _groups(counts):
        torch.mm(grad[start:used], weight[number].T, out=dx[start:used])
        torch.mm(x[start:used].T, grad[start:used], out=dweight[number])
    dx[used:] = 0
    return dx, dweight


@_grouped_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _grouped_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_grouped_linear_backward(grad.contiguous(), *ctx.saved_tensors), None


_grouped_linear.register_autograd(_grouped_backward, setup_context=_grouped_setup)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply the rows of each expert with its matrix, one product after the other."""
    result: Tensor = _grouped_linear(x.contiguous(), weight.contiguous(), counts)
    return result


@torch.library.custom_op("mmfn::adamw_", mutates_args=("params", "grads", "means", "squares"))
def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    count: Tensor,
    rate: Tensor,
    factor: Tensor,
    skip: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    """Do what `optim.adamw_` does with torch's fused kernel; gradients are spoiled."""
    # torch divides by `grad_scale`, and writes the scaled gradients back.
    torch._fused_adamw_(
        list(params),
        list(grads),
        list(means),
        list(squares),
        [],
        [count] * len(params),
        lr=rate,
        beta1=beta1,
        beta2=beta2,
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=1.0 / factor,
        found_inf=skip,
    )


@torch.library.custom_op("mmfn::once", mutates_args=())
def _once(x: Tensor) -> Tensor:
    return x.clone()


@_once.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def once(x: Tensor) -> Tensor:
    """Keep the compiler from computing x, which takes no gradient, in each loop that reads it.

    Inductor would take cosines and sines of rotary positions again for each head of each layer:
    measured 90 of 1,900 ms of a step.
    """
    result: Tensor = _once(x)
    return result


@torch.library.custom_op("mmfn::cast", mutates_args=())
def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True)


@_cast.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _cast_setup(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


_cast.register_autograd(lambda ctx, grad: (_cast(grad, ctx.dtype), None), setup_context=_cast_setup)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a weight, and its gradient as soon as it is made, while it is in the cache.

    Inductor would cast all gradients in one loop at the end of a step: by then they have left the
    cache, and the narrow ones take memory beside the wide ones.
    """
    if x.dtype == dtype:
        return x
    result: Tensor = _cast(x, dtype)
    return result


OPS = op.Ops(
    attention=attention,
    permute=permute,
    unpermute=unpermute,
    grouped_linear=grouped_linear,
    cross_entropy=cross_entropy,
    cast=cast,
    once=once,
)
"""The table of operations for the CPU. What it leaves as defined, a compiler fuses well."""
