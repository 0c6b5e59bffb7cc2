"""Tokens to the order of their experts and back, with gradients written out.

Derived by autograd, the gradient of a gather is a scatter that adds row by row. The rows of a token
are as many as its choices, so it is a gather and a sum instead. They serve every device and can be
differentiated once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmfn.ops import wide
from mmfn.phase import in_backward


def _places(order: Tensor) -> Tensor:
    """Give the row of each choice: the inverse of a permutation."""
    rows = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, rows)


def _summed(rows: Tensor, order: Tensor, choices: int) -> Tensor:
    """Sum the rows of each token's choices."""
    return wide(rows[_places(order)].unflatten(0, (-1, choices))).sum(1).to(rows.dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.choices = choices
        return x[order // choices]

    @staticmethod
    @in_backward
    def backward(ctx: Any, *grads: Any) -> Any:
        (order,) = ctx.saved_tensors
        return _summed(grads[0], order, ctx.choices), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(y, order, weight)
        rows = wide(y[_places(order)].unflatten(0, weight.shape))
        return (rows * weight[..., None]).sum(1).to(y.dtype)

    @staticmethod
    @in_backward
    def backward(ctx: Any, *grads: Any) -> Any:
        y, order, weight = ctx.saved_tensors
        spread = wide(grads[0][order // weight.shape[1]])
        dweight = (wide(y) * spread).sum(-1)[_places(order)].view_as(weight)
        dy = (spread * weight.flatten()[order][:, None]).to(y.dtype)
        return dy, None, dweight.to(weight.dtype)


def permute(x: Tensor, order: Tensor, choices: int) -> Tensor:
    """Do what `ops.permute` does."""
    apply: Callable[..., Tensor] = _Permute.apply
    return apply(x, order, choices)


def unpermute(y: Tensor, order: Tensor, weight: Tensor) -> Tensor:
    """Do what `ops.unpermute` does."""
    apply: Callable[..., Tensor] = _Unpermute.apply
    return apply(y, order, weight)
