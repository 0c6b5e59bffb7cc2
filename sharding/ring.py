"""Attention over the keys of all ranks of a ring, which come round one after the other.

Scores are made a block of queries at a time and never kept: backward they are made again from the
log-sums, while keys and values go round once more, and their gradients with them.

Source: Liu et al. 2023, arXiv:2310.01889; Dao 2023, arXiv:2307.08691 (the backward pass).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mmfn.batch import Segments
from mmfn.ops import wide
from mmfn.phase import in_backward
from mmfn.sharding.axes import Axis, ppermute

_ROWS = 256
"""Fewest queries of a block."""

_MOST = 8
"""Most blocks of a piece: a compiler writes them out one by one."""


def _parts(length: int, source: int, index: int) -> tuple[slice, slice]:
    """Give the queries that see some of a rank's keys, and those keys.

    A rank holds an early piece of the row and a late one. Of ranks before it in order all queries
    see the early piece; of those after it the late queries see both.
    """
    half = length // 2
    rows = slice(half, length) if source > index else slice(0, length)
    keys = slice(0, half) if source < index else slice(0, length)
    return rows, keys


def _blocks(rows: slice) -> Iterator[slice]:
    size = max(_ROWS, -(-(rows.stop - rows.start) // _MOST))
    for start in range(rows.start, rows.stop, size):
        yield slice(start, min(start + size, rows.stop))


def _scores(
    q: Tensor, k: Tensor, numbers: tuple[Tensor, Tensor], places: tuple[Tensor, Tensor]
) -> Tensor:
    """Give `[queries, kv_heads, groups, keys]`, -inf where a key is not seen."""
    visible = (numbers[0][:, None] == numbers[1]) & (places[0][:, None] >= places[1])
    scores = wide(torch.einsum("skgc,tkc->skgt", q, k)) * q.shape[-1] ** -0.5
    seen: Tensor = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
    return seen


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, number: Tensor, place: Tensor, ring: Axis
    ) -> Tensor:
        mine, both = place[ring.index], torch.stack((k, v))
        # Three sums of each query: the largest score, the weights, and the weighted values.
        peak = wide(q.new_full(q.shape[:3], -1e30))
        total = torch.zeros_like(peak)
        result = wide(torch.zeros_like(q))
        for step in range(ring.size):
            if step:
                both = ppermute(both, ring)
            source = (ring.index - step) % ring.size
            rows, keys = _parts(len(q), source, ring.index)
            there = place[source][keys]
            for block in _blocks(rows):
                at = mine[block]
                scores = _scores(q[block], both[0][keys], (number[at], number[there]), (at, there))
                high = torch.maximum(peak[block], scores.amax(-1))
                weights = (scores - high[..., None]).exp()
                shrink = (peak[block] - high).exp()
                more = torch.einsum("skgt,tkc->skgc", weights.to(v.dtype), both[1][keys])
                peak[block] = high
                total[block] = total[block] * shrink + weights.sum(-1)
                result[block] = result[block] * shrink[..., None] + more
        out = (result / total[..., None]).to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, peak + total.log(), number, place)
        return out

    @staticmethod
    @in_backward
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, level, number, place = ctx.saved_tensors
        ring, scale = ctx.ring, q.shape[-1] ** -0.5
        mine, both = place[ring.index], torch.stack((k, v))
        grad, dq = wide(grads[0]), wide(torch.zeros_like(q))
        row = (grad * wide(out)).sum(-1)
        # The gradients of keys and values go round with them, and come home at the end.
        dboth = wide(torch.zeros_like(both))
        for step in range(ring.size):
            if step:
                both, dboth = ppermute(both, ring), ppermute(dboth, ring)
            source = (ring.index - step) % ring.size
            rows, keys = _parts(len(q), source, ring.index)
            there = place[source][keys]
            wide_keys, wide_values = wide(both[0][keys]), wide(both[1][keys])
            for block in _blocks(rows):
                at = mine[block]
                scores = _scores(q[block], both[0][keys], (number[at], number[there]), (at, there))
                weights = (scores - level[block][..., None]).exp()
                dweights = torch.einsum("skgc,tkc->skgt", grad[block], wide_values)
                dscores = weights * (dweights - row[block][..., None]) * scale
                dq[block] += torch.einsum("skgt,tkc->skgc", dscores, wide_keys)
                dboth[0, keys] += torch.einsum("skgt,skgc->tkc", dscores, wide(q[block]))
                dboth[1, keys] += torch.einsum("skgt,skgc->tkc", weights, grad[block])
        dboth = ppermute(dboth, ring).to(k.dtype)
        return dq.to(q.dtype), dboth[0], dboth[1], None, None, None


def around(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    causal: bool,
    ring: Axis,
    place: Tensor,
) -> Tensor:
    """Attend over the keys of all places of the ring.

    q is `[tokens, kv_heads, groups, head_dim]`, k and v `[tokens, kv_heads, head_dim]`; `place[r]`
    lists which tokens of the row rank `r` of the ring holds.

    Raises:
        ValueError: attention is not causal; the pieces of a ring are cut for that.
    """
    if not causal:
        raise ValueError("a ring is cut for causal attention")
    apply: Callable[..., Tensor] = _Ring.apply
    return apply(q, k, v, segments.number, place.to(q.device), ring)
