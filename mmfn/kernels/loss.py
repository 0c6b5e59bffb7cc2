"""Cross entropy with its gradient written out: one read of the logits forward, one backward.

Derived by autograd, the gradient of the gather is a scatter over all logits, and the head's weight
is read from memory twice as often. As written, a compiler makes one loop of each pass; it serves
every device. It can be differentiated once.
"""

from typing import Any

import torch
from torch import Tensor

from mmfn.ops import wide


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        logits = x @ head.T
        peak = wide(logits).amax(-1, keepdim=True)
        sums = (wide(logits) - peak).exp().sum(-1, keepdim=True)
        level = sums.log() + peak
        ctx.save_for_backward(x, head, targets, weights, logits, level)
        # From the rows of the head rather than from the logits: they are not rounded here.
        picked = (wide(x) * wide(head[targets])).sum(-1)
        return ((level.squeeze(-1) - picked) * weights).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, head, targets, weights, logits, level = ctx.saved_tensors
        scale = (weights * grads[0])[:, None]
        entries = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        hit = (entries == targets.to(torch.int32)[:, None]).to(level.dtype)
        slope = (((wide(logits) - level).exp() - hit) * scale).to(logits.dtype)
        return slope @ head, slope.T @ x, None, None


def cross_entropy(x: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Do what `ops.cross_entropy` does; values `[supervised, embed]`, head `[vocab, embed]`."""
    loss: Tensor = _CrossEntropy.apply(x, head, targets, weights)
    return loss
