"""Cross entropy with its gradient written out; serves every device, differentiable once.

Derived by autograd, the gradient of the gather is a scatter over all logits, and whole float32
copies of them are made. As written, a compiler makes one loop of each pass.

`cross_entropy` keeps the logits for the backward pass, and goes over pieces of the vocabulary,
whose products fit the cache. `in_chunks` makes the gradient with the value, some targets at a time:
the logits of one chunk exist at once, and none are kept.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmfn.ops import Pieces, wide
from mmfn.ops import cross_entropy as definition
from mmfn.phase import in_backward

_PIECE = 8192
"""Entries of the vocabulary at a time. Measured on a CPU, forward and backward of 1,024 rows of 512
over 32,768 entries in bfloat16: 602 ms; 611 and 619 with 2,048 and 4,096; 643 in one piece."""


def _level(
    x: Tensor, head: Tensor, targets: Tensor, pieces: Pieces | None
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Give the logits by piece, the logarithms of their sums `[rows, 1]`, and the targets' own."""
    logits = [x @ piece.T for piece in head.split(_PIECE)]
    peak = wide(torch.stack([piece.amax(-1) for piece in logits]).amax(0))
    peak = (peak if pieces is None else pieces.pmax(peak))[:, None]
    total = torch.stack([(wide(piece) - peak).exp().sum(-1) for piece in logits]).sum(0)
    # From the rows of the head rather than from the logits: they are not rounded here.
    if pieces is None:
        picked = (wide(x) * wide(head[targets])).sum(-1)
    else:
        place, found = pieces.here(targets, len(head))
        own = torch.where(found, (wide(x) * wide(head[place])).sum(-1), 0.0)
        total, picked = pieces.psum(torch.stack((total, own))).unbind(0)
    return logits, total.log()[:, None] + peak, picked


def _slope(logits: Tensor, level: Tensor, targets: Tensor, scale: Tensor, first: int) -> Tensor:
    """Give the gradient by the logits of entries from `first` on, in their dtype."""
    entries = torch.arange(first, first + logits.shape[1], dtype=torch.int32, device=logits.device)
    hit = (entries == targets.to(torch.int32)[:, None]).to(level.dtype)
    return (((wide(logits) - level).exp() - hit) * scale[:, None]).to(logits.dtype)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head: Tensor, targets: Tensor, weights: Tensor, pieces: Any
    ) -> Tensor:
        logits, level, picked = _level(x, head, targets, pieces)
        ctx.save_for_backward(x, head, targets, weights, level, *logits)
        ctx.start = 0 if pieces is None else pieces.start
        return ((level.squeeze(-1) - picked) * weights).sum()

    @staticmethod
    @in_backward
    def backward(ctx: Any, *grads: Any) -> Any:
        x, head, targets, weights, level, *logits = ctx.saved_tensors
        # A number without axes would not widen it.
        scale = weights.to(level.dtype) * grads[0]
        dx, dhead, first = wide(torch.zeros_like(x)), [], ctx.start
        for own, piece in zip(logits, head.split(_PIECE), strict=True):
            slope = _slope(own, level, targets, scale, first)
            dx = dx + slope @ piece
            dhead.append(slope.T @ x)
            first += len(piece)
        return dx.to(x.dtype), torch.cat(dhead), None, None, None


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        head: Tensor,
        targets: Tensor,
        weights: Tensor,
        pieces: Any,
        rows: int,
        trained: bool,
    ) -> Tensor:
        start = 0 if pieces is None else pieces.start
        values, dx = [], []
        dhead: list[Tensor | None] = [None] * len(head.split(_PIECE))
        parts = zip(*(each.split(rows) for each in (x, targets, weights)), strict=True)
        for chunk, wanted, scale in parts:
            logits, level, picked = _level(chunk, head, wanted, pieces)
            values.append(((level.squeeze(-1) - picked) * scale).sum())
            into, first = wide(torch.zeros_like(chunk)), start
            for number, piece in enumerate(head.split(_PIECE)):
                slope = _slope(logits[number], level, wanted, scale, first)
                into = into + slope @ piece
                if trained:
                    # Sums of many chunks: in float32 at least.
                    before, more = dhead[number], slope.T @ chunk
                    dhead[number] = wide(more) if before is None else before + more
                first += len(piece)
            dx.append(into.to(x.dtype))
        ctx.save_for_backward(torch.cat(dx), *(each for each in dhead if each is not None))
        ctx.dtype = head.dtype
        return torch.stack(values).sum()

    @staticmethod
    @in_backward
    def backward(ctx: Any, *grads: Any) -> Any:
        dx, *dhead = ctx.saved_tensors
        own = torch.cat([(each * grads[0]).to(ctx.dtype) for each in dhead]) if dhead else None
        return (dx * grads[0]).to(dx.dtype), own, None, None, None, None, None


def cross_entropy(
    x: Tensor, head: Tensor, targets: Tensor, weights: Tensor, pieces: Pieces | None = None
) -> Tensor:
    """Do what `ops.cross_entropy` does; values `[supervised, embed]`, head `[vocab, embed]`."""
    if len(head) == 0:
        return definition(x, head, targets, weights, pieces)
    apply: Callable[..., Tensor] = _CrossEntropy.apply
    return apply(x, head, targets, weights, pieces)


def in_chunks(rows: int) -> Callable[..., Tensor]:
    """Make the cross entropy that holds the logits of `rows` targets at a time, and keeps none.

    Where no gradient is taken none is made; of a frozen head none either.
    """

    def chunked(
        x: Tensor, head: Tensor, targets: Tensor, weights: Tensor, pieces: Pieces | None = None
    ) -> Tensor:
        if len(head) == 0 or len(x) == 0:
            return definition(x, head, targets, weights, pieces)
        if torch.is_grad_enabled() and (x.requires_grad or head.requires_grad):
            apply: Callable[..., Tensor] = _InChunks.apply
            return apply(x, head, targets, weights, pieces, rows, head.requires_grad)
        values = []
        parts = zip(*(each.split(rows) for each in (x, targets, weights)), strict=True)
        for chunk, wanted, scale in parts:
            _, level, picked = _level(chunk, head, wanted, pieces)
            values.append(((level.squeeze(-1) - picked) * scale).sum())
        return torch.stack(values).sum()

    return chunked
