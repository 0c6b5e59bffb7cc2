"""Learning rates as functions of the number of updates so far, in float32 on the device."""

import math

import torch
from torch import Tensor

from mmfn.optim import Schedule


def constant(peak: float, warmup: int = 0) -> Schedule:
    """Rise linearly from 0 over `warmup` updates, then stay at `peak`."""
    return _warm(peak, warmup, lambda after: torch.ones_like(after))


def linear(peak: float, steps: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """Rise as `constant`, then fall on a line that reaches `floor · peak` at update `steps`."""
    span = _span(steps, warmup)
    return _warm(peak, warmup, lambda after: 1 - (1 - floor) * (after / span).clamp(max=1))


def cosine(peak: float, steps: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """Rise as `constant`, then fall on half a cosine that reaches `floor · peak` at `steps`.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts.
    """
    span = _span(steps, warmup)

    def fall(after: Tensor) -> Tensor:
        wave = torch.cos((after / span).clamp(max=1) * math.pi)
        return floor + (1 - floor) * 0.5 * (1 + wave)

    return _warm(peak, warmup, fall)


def _span(steps: int, warmup: int) -> int:
    if not 0 <= warmup < steps:
        raise ValueError(f"warmup={warmup} must be less than steps={steps}")
    return steps - warmup


def _warm(peak: float, warmup: int, rest: Schedule) -> Schedule:
    def rate(count: Tensor) -> Tensor:
        count = count.to(torch.float32)
        later = rest((count - warmup).clamp(min=0))
        factor = torch.where(count < warmup, count / warmup, later) if warmup else later
        return peak * factor

    return rate
