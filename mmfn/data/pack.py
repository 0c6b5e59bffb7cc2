"""Samples to batches: packing in one row, positions, targets and their weights.

Padding stands at the tail only, and lengths are rounded up to a few sizes, so that a compiled step
sees few shapes.
"""

from collections.abc import Sequence
from functools import lru_cache

import attrs
import numpy as np
import torch

from mmfn import losses, tree
from mmfn.batch import Batch, Media, Segments
from mmfn.data import grids
from mmfn.data.encoded import Encoded, Geometry
from mmfn.losses import Normalise


@attrs.frozen
class Counts:
    """What is in a batch, without padding."""

    tokens: int = 0
    supervised: int = 0
    """Targets."""
    samples: int = 0
    patches: int = 0
    answered: int = 0
    """Samples that have a target."""
    rows: int = 0
    """Rows that have a target."""

    def __add__(self, other: "Counts") -> "Counts":
        names = [field.name for field in attrs.fields(Counts)]
        return Counts(*(getattr(self, name) + getattr(other, name) for name in names))

    def divisor(self, normalise: Normalise) -> int:
        """Give what the sum of weighted losses is divided by: 1 where nothing is supervised."""
        return losses.divisor(
            normalise, targets=self.supervised, samples=self.answered, rows=self.rows
        )


def bucket(size: int, least: int) -> int:
    """Round up to 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10 … times `least`.

    From twice `least` on that is less than a quarter more.
    """
    if size <= least:
        return least
    step = 2 ** max(0, ((size - 1) // least).bit_length() - 1)
    unit = max(1, step * least // 4) if step > 1 else max(1, least // 2)
    return -(-size // unit) * unit


def targets(sample: Encoded) -> np.ndarray:
    """Give the places of a sample whose next token is supervised. The first token never is one."""
    return np.flatnonzero(sample.supervised[1:])


def collate(
    rows: Sequence[Sequence[Encoded]],
    *,
    geometry: Geometry,
    tokens: int,
    normalise: Normalise = "token",
    least_patches: int = 64,
    least_targets: int = 16,
    least_segments: int = 16,
) -> tuple[Batch, Counts]:
    """Lay samples one after the other: a micro-batch of `len(rows)` rows of `tokens` tokens.

    The batch is one row of `len(rows) * tokens` tokens whose padding is all at its end, a segment
    of its own. Its `count` is 1; `with_count` sets that of the whole step.

    Raises:
        ValueError: a row holds more than `tokens`, or a sample's media and tokens disagree.
    """
    for samples in rows:
        used = sum(len(sample.tokens) for sample in samples)
        if used > tokens:
            names = ", ".join(sample.name for sample in samples[:3])
            raise ValueError(f"a row of {used} tokens ({names}, …) is longer than tokens={tokens}")
    flat = [sample for samples in rows for sample in samples]
    for sample in flat:
        _check(sample, geometry)
    length = len(rows) * tokens
    asked = [[len(targets(sample)) for sample in samples] for samples in rows]
    place = [_positions(sample, geometry.merge) for sample in flat]
    media, features = _media(flat, geometry, least_patches)
    at, wanted, weights = _supervision(rows, asked, normalise, least_targets)
    none = np.zeros(0, dtype=np.int64)
    batch = Batch(
        tokens=_fill(length, 0, [none, *(s.tokens for s in flat)]),
        segments=_segments([len(s.tokens) for s in flat], length, least_segments),
        positions=_fill(length, 0, [np.zeros((3, 0), dtype=np.int64), *place]),
        media=media,
        real=torch.arange(length) < sum(len(s.tokens) for s in flat),
        feature=_fill(length, -1, [none, *features]),
        at=at,
        targets=wanted,
        weights=weights,
        count=torch.ones(()),
    )
    counts = Counts(
        tokens=sum(len(s.tokens) for s in flat),
        supervised=sum(map(sum, asked)),
        samples=len(flat),
        patches=sum(len(s.patches) for s in flat),
        answered=sum(n > 0 for row in asked for n in row),
        rows=sum(any(row) for row in asked),
    )
    return batch, counts


def total(counts: Sequence[Counts]) -> Counts:
    """Add up the counts of micro-batches."""
    return sum(counts, Counts())


def with_count(batches: Sequence[Batch], divisor: int) -> tuple[Batch, ...]:
    """Set what the losses of a step's micro-batches are divided by."""
    count = torch.tensor(float(divisor))
    return tuple(tree.evolve(batch, count=count.clone()) for batch in batches)


def _check(sample: Encoded, geometry: Geometry) -> None:
    if len(sample.tokens) == 0:
        raise ValueError(f"sample {sample.name} has no token")
    if len(sample.supervised) != len(sample.tokens):
        raise ValueError(
            f"sample {sample.name} has {len(sample.tokens)} tokens "
            f"and {len(sample.supervised)} labels"
        )
    for run in sample.runs:
        if run.height % geometry.merge or run.width % geometry.merge:
            raise ValueError(
                f"sample {sample.name} has a grid of {run.height} by {run.width} patches, "
                f"which has no blocks of {geometry.merge}"
            )
    needed = sum(run.height * run.width for run in sample.runs)
    if len(sample.patches) != needed:
        raise ValueError(
            f"sample {sample.name} has {len(sample.patches)} patches; its runs need {needed}"
        )
    if needed and sample.patches.shape[1] != geometry.patch_dim:
        raise ValueError(
            f"sample {sample.name} has patches of {sample.patches.shape[1]} values; "
            f"the model takes {geometry.patch_dim}"
        )


def _positions(sample: Encoded, merge: int) -> np.ndarray:
    try:
        return grids.positions(len(sample.tokens), sample.runs, merge)
    except ValueError as error:
        raise ValueError(f"sample {sample.name}: {error}") from error


def _fill(length: int, value: int, parts: Sequence[np.ndarray]) -> torch.Tensor:
    """Join along the last axis and pad at the tail."""
    joined = np.concatenate(parts, -1)
    result = np.full((*joined.shape[:-1], length), value, dtype=np.int64)
    result[..., : joined.shape[-1]] = joined
    return torch.from_numpy(result)


def _segments(lengths: Sequence[int], total: int, least: int) -> Segments:
    """Number the tokens of each segment, and list where segments end, the tail's last."""
    number = np.zeros(total, dtype=np.int32)
    used = sum(lengths)
    number[:used] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    size = least
    while size < len(lengths) + 1:
        size *= 2
    ends = np.full(size, total, dtype=np.int32)
    ends[: len(lengths)] = np.cumsum(lengths)
    return Segments(torch.from_numpy(number), torch.from_numpy(ends))


@lru_cache(maxsize=512)
def _frame(
    height: int, width: int, side: int, merge: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return grids.patch_positions(height, width, merge), *grids.places(height, width, side, merge)


def _media(
    samples: Sequence[Encoded], geometry: Geometry, least: int
) -> tuple[Media, list[np.ndarray]]:
    """Join all patches; give each sample's tokens the index of their feature, -1 for text."""
    block = geometry.merge**2
    runs = [run for sample in samples for run in sample.runs]
    used = sum(run.height * run.width for run in runs)
    size = bucket(used, least)
    size += -size % block
    patches = np.zeros((size, geometry.patch_dim), dtype=np.float32)
    position = np.zeros((2, size), dtype=np.int64)
    place = np.zeros((4, size), dtype=np.int64)
    blend = np.zeros((4, size), dtype=np.float32)
    if runs:
        patches[:used] = np.concatenate([s.patches for s in samples if len(s.patches)])
        frames = [_frame(r.height, r.width, geometry.side, geometry.merge) for r in runs]
        position[:, :used], place[:, :used], blend[:, :used] = (
            np.concatenate(parts, 1) for parts in zip(*frames, strict=True)
        )
    features, first = [], 0
    for sample in samples:
        own = np.full(len(sample.tokens), -1, dtype=np.int64)
        for run in sample.runs:
            made = run.height * run.width // block
            own[run.start : run.start + made] = np.arange(first, first + made)
            first += made
        if (wrong := np.flatnonzero(sample.supervised & (own >= 0))).size:
            raise ValueError(
                f"sample {sample.name} supervises token {wrong[0]}, which stands for a picture"
            )
        features.append(own)
    media = Media(
        patches=torch.from_numpy(patches),
        segments=_segments([r.height * r.width for r in runs], size, 16),
        positions=torch.from_numpy(position),
        places=torch.from_numpy(place),
        blend=torch.from_numpy(blend),
    )
    return media, features


def _supervision(
    rows: Sequence[Sequence[Encoded]],
    asked: Sequence[Sequence[int]],
    normalise: Normalise,
    least: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """List where the next token is a target, which it is, and its weight in the loss."""
    size = bucket(sum(map(sum, asked)), least)
    at, wanted = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    weights = np.zeros(size, dtype=np.float32)
    start = first = 0
    for samples, counts in zip(rows, asked, strict=True):
        for sample, count in zip(samples, counts, strict=True):
            here, part = targets(sample), slice(first, first + count)
            at[part] = start + here
            wanted[part] = sample.tokens[here + 1]
            weights[part] = losses.weight(normalise, sample=count, row=sum(counts))
            start += len(sample.tokens)
            first += count
    return torch.from_numpy(at), torch.from_numpy(wanted), torch.from_numpy(weights)
