"""Cross entropy with its gradient written out, over pieces of the vocabulary.

Derived by autograd, the gradient of the gather is a scatter over all logits, and whole float32
copies of them are made. As written, a compiler makes one loop of each pass over a piece, and the
products of a piece fit the cache. It serves every device, and can be differentiated once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmfn.ops import Pieces, wide
from mmfn.ops import cross_entropy as definition

_PIECE = 8192
"""Entries of the vocabulary at a time. Measured on a CPU, forward and backward of 1,024 rows of 512
over 32,768 entries in bfloat16: 602 ms; 611 and 619 with 2,048 and 4,096; 643 in one piece."""


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head: Tensor, targets: Tensor, weights: Tensor, pieces: Any
    ) -> Tensor:
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
        level = total.log()[:, None] + peak
        ctx.save_for_backward(x, head, targets, weights, level, *logits)
        ctx.start = 0 if pieces is None else pieces.start
        return ((level.squeeze(-1) - picked) * weights).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, head, targets, weights, level, *logits = ctx.saved_tensors
        scale = (weights * grads[0])[:, None]
        dx, dhead, first = wide(torch.zeros_like(x)), [], ctx.start
        for own, piece in zip(logits, head.split(_PIECE), strict=True):
            entries = torch.arange(first, first + len(piece), dtype=torch.int32, device=x.device)
            hit = (entries == targets.to(torch.int32)[:, None]).to(level.dtype)
            slope = (((wide(own) - level).exp() - hit) * scale).to(own.dtype)
            dx = dx + slope @ piece
            dhead.append(slope.T @ x)
            first += len(piece)
        return dx.to(x.dtype), torch.cat(dhead), None, None, None


def cross_entropy(
    x: Tensor, head: Tensor, targets: Tensor, weights: Tensor, pieces: Pieces | None = None
) -> Tensor:
    """Do what `ops.cross_entropy` does; values `[supervised, embed]`, head `[vocab, embed]`."""
    if len(head) == 0:
        return definition(x, head, targets, weights, pieces)
    apply: Callable[..., Tensor] = _CrossEntropy.apply
    return apply(x, head, targets, weights, pieces)
