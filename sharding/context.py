"""Context parallelism: the tokens of a row cut over ranks, and attention over all of them.

Ulysses: ranks exchange tokens for heads, so that each attends with some heads over whole rows.
Ring: keys and values go round, and partial results are joined by their log-sums. Rank `r` of `n`
holds pieces `r` and `2n - 1 - r` of the row, so that all see equally many pairs. Both together:
the ranks of a ring's place share its two pieces and exchange heads among themselves.

Source: Jacobs et al. 2023, arXiv:2309.14509 (Ulysses); Liu et al. 2023, arXiv:2310.01889 (ring);
Fang and Zhao 2024, arXiv:2405.07719 (both).
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mmfn import tree
from mmfn.batch import Batch, Media, Segments
from mmfn.data.pack import bucket
from mmfn.sharding.axes import Axis, all_to_all
from mmfn.sharding.ring import around


def order(tokens: int, ring: int, ulysses: int) -> Tensor:
    """List which tokens each context rank holds: `[ring · ulysses, tokens / (ring · ulysses)]`.

    Raises:
        ValueError: the row cannot be cut so; says the sizes.
    """
    pieces = 2 * ring if ring > 1 else 1
    if tokens % (pieces * ulysses) or tokens // pieces * min(2, pieces) % ulysses:
        raise ValueError(f"a row of {tokens} tokens cannot be cut in {pieces} · {ulysses} pieces")
    place = torch.arange(tokens).view(pieces, -1)
    if ring == 1:
        return place.view(ulysses, -1)
    rows = [torch.cat((place[r], place[2 * ring - 1 - r])) for r in range(ring)]
    return torch.stack(rows).view(ring * ulysses, -1)


def multiple(ring: int, ulysses: int) -> int:
    """Give what the number of tokens of a row must be a multiple of."""
    return (2 * ring if ring > 1 else 1) * ulysses


def padded(batch: Batch, to: int) -> Batch:
    """Lengthen the tail of a row to a multiple of `to` tokens."""
    tokens = len(batch.tokens)
    more = -tokens % to
    if not more:
        return batch
    ends = batch.segments.ends.clone()
    ends[int(batch.segments.number.max()) :] = tokens + more

    def fill(x: Tensor, value: int = 0) -> Tensor:
        return torch.nn.functional.pad(x, (0, more), value=value)

    return tree.evolve(
        batch,
        tokens=fill(batch.tokens),
        segments=Segments(fill(batch.segments.number), ends),
        positions=fill(batch.positions),
        real=fill(batch.real),
        feature=fill(batch.feature, -1),
    )


def split(
    batch: Batch, index: int, *, ring: int, ulysses: int, merge: int, least: int = 16
) -> Batch:
    """Give the part of a batch that context rank `index` reads; on the host.

    Targets were shifted before, so none is lost at a border. `segments` stays that of the whole
    row, which attention sees; pictures and frames are dealt whole, by cost, and `feature` counts
    in the features of all ranks joined. The row is lengthened where it cannot be cut evenly.
    """
    ranks = ring * ulysses
    if ranks == 1:
        return batch
    batch = padded(batch, multiple(ring, ulysses))
    held = order(len(batch.tokens), ring, ulysses)
    own = held[index]
    place = torch.full((len(batch.tokens),), -1, dtype=torch.int64)
    place[own] = torch.arange(len(own))
    media, moved = _deal(batch.media, index, ranks, merge)
    chosen = torch.nonzero((batch.weights != 0) & (place[batch.at] >= 0)).squeeze(1)
    room = bucket(len(chosen), least)

    def fill(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x[chosen], (0, room - len(chosen)))

    feature = batch.feature[own]
    return Batch(
        tokens=batch.tokens[own],
        segments=batch.segments,
        positions=batch.positions[:, own],
        media=media,
        real=batch.real[own],
        feature=torch.where(feature >= 0, moved[feature.clamp(min=0)], -1),
        at=torch.nn.functional.pad(place[batch.at[chosen]], (0, room - len(chosen))),
        targets=fill(batch.targets),
        weights=fill(batch.weights),
        count=batch.count,
    )


def deal(costs: list[float], ranks: int) -> list[list[int]]:
    """Deal items to ranks, the dearest first, each to the rank that has least; order is kept.

    Source: Graham 1969, doi:10.1137/0117039: at most 4/3 of the best.
    """
    loads, dealt = [0.0] * ranks, [[] for _ in range(ranks)]  # type: list[float], list[list[int]]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        loads[rank] += costs[item]
        dealt[rank].append(item)
    return [sorted(items) for items in dealt]


def _deal(media: Media, index: int, ranks: int, merge: int) -> tuple[Media, Tensor]:
    """Give a rank its frames, and for each feature its place among those of all ranks joined."""
    frames = int(media.segments.number.max())
    ends = [0, *media.segments.ends[:frames].tolist()]
    sizes = [stop - start for start, stop in pairwise(ends)]
    # Attention grows with the square, the rest of a block with the size, about 12 · width of it.
    dealt = deal([size * (12 * 1024.0 + size) for size in sizes], ranks)
    held = [sum(sizes[frame] for frame in items) for items in dealt]
    block = merge**2
    # Every rank has the same room, or their features could not be joined.
    room = bucket(max(held), 4 * block)
    room += -room % block
    moved = torch.zeros(len(media.patches) // block, dtype=torch.int64)
    for rank, items in enumerate(dealt):
        first = rank * (room // block)
        for frame in items:
            here, count = ends[frame] // block, sizes[frame] // block
            moved[here : here + count] = torch.arange(first, first + count)
            first += count
    mine = dealt[index]
    rows = np.concatenate(
        [np.zeros(0, dtype=np.int64), *(np.arange(ends[f], ends[f + 1]) for f in mine)]
    )
    at = torch.from_numpy(rows)

    def take(x: Tensor, dim: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = room
        result = x.new_zeros(shape)
        result.narrow(dim, 0, len(at)).copy_(x.index_select(dim, at))
        return result

    own = np.array([sizes[f] for f in mine], dtype=np.int64)
    number = torch.zeros(room, dtype=torch.int32)
    number[: len(at)] = torch.from_numpy(np.repeat(np.arange(1, len(own) + 1), own)).int()
    stops = torch.full_like(media.segments.ends, room)
    stops[: len(own)] = torch.from_numpy(np.cumsum(own)).int()
    part = Media(
        patches=take(media.patches, 0),
        segments=Segments(number, stops),
        positions=take(media.positions, 1),
        places=take(media.places, 1),
        blend=take(media.blend, 1),
    )
    return part, moved


def attend_over(
    attention: Callable[..., Tensor], ring: Axis, ulysses: Axis
) -> Callable[..., Tensor]:
    """Make attention over whole rows for ranks that hold the tokens that `order` lists.

    `attention(q, k, v, segments, causal=)` is that of one rank; `segments` is that of the whole
    row.
    """
    if ring.size > 1:
        attention = partial(_around, ring=ring)
    if ulysses.size > 1:
        attention = partial(_exchanged, attention=attention, axis=ulysses)
    return attention


def _exchanged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    causal: bool,
    attention: Callable[..., Tensor],
    axis: Axis,
) -> Tensor:
    """Attend with some of the heads over all tokens of the axis."""
    kv_heads, groups = q.shape[1:3]
    ranks = axis.size
    if kv_heads % ranks == 0:
        swap = partial(all_to_all, axis=axis, split=1, join=0)
        y = attention(swap(q), swap(k), swap(v), segments, causal=causal)
        return all_to_all(y, axis, split=0, join=1)
    # Each query head gets a key head of its own; where they do not divide, heads of zeros join.
    heads = kv_heads * groups
    fill = -heads % ranks
    parts = [q.flatten(1, 2), *(x.repeat_interleave(groups, 1) for x in (k, v))]
    swapped = [
        all_to_all(torch.nn.functional.pad(x, (0, 0, 0, fill)), axis, split=1, join=0)
        for x in parts
    ]
    y = attention(swapped[0].unsqueeze(2), swapped[1], swapped[2], segments, causal=causal)
    y = all_to_all(y.squeeze(2), axis, split=0, join=1)
    result: Tensor = y[:, :heads].unflatten(1, (kv_heads, groups))
    return result


def _around(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, causal: bool, ring: Axis
) -> Tensor:
    """Attend over the keys of all places of the ring."""
    place = order(len(segments.number), ring.size, 1)
    return around(q, k, v, segments, causal=causal, ring=ring, place=place)
