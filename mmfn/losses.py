"""Losses as sums over a global count: they do not depend on how a step is split.

A target has a weight, known when its batch is made, and the weighted sum is divided by a count of
the whole optimizer step, on all ranks, known before its first backward. Gradients are summed.
"""

from collections.abc import Callable
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from mmfn import ops as op

Normalise = Literal["token", "sample", "row"]
"""What a loss is the mean of: all targets, samples' own means, or rows' own means. The last depends
on how samples are packed in rows; it is what dividing each micro-batch by its own count gives."""


def weight(normalise: Normalise, *, sample: int, row: int) -> float:
    """Weigh each target of a sample, of which there are `sample`, and `row` in its row."""
    # Python floats: the reciprocal is rounded once.
    return 1.0 / {"token": 1, "sample": sample, "row": row}[normalise] if sample else 0.0


def divisor(normalise: Normalise, *, targets: int, samples: int, rows: int) -> int:
    """Give what a step's weighted sum is divided by, counting samples and rows that have a target.

    It is 1 where there is none, so that a step without targets has loss zero.
    """
    return max(1, {"token": targets, "sample": samples, "row": rows}[normalise])


def next_token(
    x: Float[Tensor, "supervised embed"],
    head: Float[Tensor, "vocab embed"],
    targets: Int[Tensor, " supervised"],
    weights: Float[Tensor, " supervised"],
    count: Float[Tensor, ""],
    *,
    pieces: op.Pieces | None = None,
    cross_entropy: Callable[..., Tensor] = op.cross_entropy,
) -> Float[Tensor, ""]:
    """Sum the weighted cross entropy of `softmax(x @ head.T)`, divided by `count`.

    With `pieces`, the head has some entries of the vocabulary, and the ranks sum.
    """
    return cross_entropy(x, head, targets, weights, pieces) / count
