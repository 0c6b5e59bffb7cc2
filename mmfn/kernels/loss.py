"""Cross entropy whose gradient is made with its value, some targets at a time.

Derived by autograd, the gradient of the gather is a scatter over all logits, whole float32 copies
of them are made, and they are kept until the backward pass. Here a piece is finished before the
next one begins, so the logits of one exist at a time; as written, a compiler makes one loop of each
pass over them. It serves every device, and can be differentiated once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mmfn.ops import Pieces, wide
from mmfn.ops import cross_entropy as definition

_ROWS = 256
"""Fewest targets at a time: their logits over 32,768 entries take 32 MiB in float32."""

_MOST = 16
"""Most pieces: a compiler writes them out one by one."""


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = max(_ROWS, -(-len(tensors[0]) // _MOST))
    return zip(*(x.split(rows) for x in tensors), strict=True)


def _level(
    x: Tensor, head: Tensor, targets: Tensor, vocabulary: Pieces | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Give logits, the logarithms of their sums `[rows, 1]`, and the logits of the targets."""
    logits = x @ head.T
    peak = wide(logits.amax(-1))
    peak = (peak if vocabulary is None else vocabulary.pmax(peak))[:, None]
    total = (wide(logits) - peak).exp().sum(-1)
    # From the rows of the head rather than from the logits: they are not rounded here.
    if vocabulary is None:
        picked = (wide(x) * wide(head[targets])).sum(-1)
    else:
        place, found = vocabulary.here(targets, len(head))
        own = torch.where(found, (wide(x) * wide(head[place])).sum(-1), 0.0)
        total, picked = vocabulary.psum(torch.stack((total, own))).unbind(0)
    return logits, total.log()[:, None] + peak, picked


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        head: Tensor,
        targets: Tensor,
        weights: Tensor,
        vocabulary: Any,
        frozen: bool,
    ) -> Tensor:
        start = 0 if vocabulary is None else vocabulary.start
        entries = torch.arange(start, start + len(head), dtype=torch.int32, device=x.device)
        values, dx, dhead = [], [], None
        for rows, wanted, scale in _pieces(x, targets, weights):
            logits, level, picked = _level(rows, head, wanted, vocabulary)
            values.append(((level.squeeze(-1) - picked) * scale).sum())
            hit = (entries == wanted.to(torch.int32)[:, None]).to(level.dtype)
            slope = (((wide(logits) - level).exp() - hit) * scale[:, None]).to(logits.dtype)
            dx.append(slope @ head)
            if not frozen:
                more = slope.T @ rows
                # Sums of many pieces: in float32 at least.
                dhead = wide(more) if dhead is None else dhead + more
        ctx.save_for_backward(torch.cat(dx), dhead)
        ctx.dtype = head.dtype
        return torch.stack(values).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dx, dhead = ctx.saved_tensors
        own = None if dhead is None else (dhead * grads[0]).to(ctx.dtype)
        return (dx * grads[0]).to(dx.dtype), own, None, None, None, None


def cross_entropy(
    x: Tensor, head: Tensor, targets: Tensor, weights: Tensor, pieces: Pieces | None = None
) -> Tensor:
    """Do what `ops.cross_entropy` does; values `[supervised, embed]`, head `[vocab, embed]`.

    Without a gradient to be taken none is made; of a frozen head none either.
    """
    if len(head) == 0 or len(x) == 0:
        return definition(x, head, targets, weights, pieces)
    if torch.is_grad_enabled() and (x.requires_grad or head.requires_grad):
        apply: Callable[..., Tensor] = _CrossEntropy.apply
        return apply(x, head, targets, weights, pieces, not head.requires_grad)
    values = []
    for rows, wanted, scale in _pieces(x, targets, weights):
        _, level, picked = _level(rows, head, wanted, pieces)
        values.append(((level.squeeze(-1) - picked) * scale).sum())
    return torch.stack(values).sum()
