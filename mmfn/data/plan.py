"""Which samples each optimizer step reads, as a function of the lengths, a seed and the step.

An epoch is a permutation of the samples, packed in rows; rows are dealt to steps, micro-batches and
data ranks. Nothing is drawn while a run goes on, so a reader has no state but its step, and every
rank knows the rows of all without asking.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import attrs
import numpy as np
import torch
from jaxtyping import Int

from mmfn import rng


def _positive(plan: "Plan", field: attrs.Attribute, value: int) -> None:
    if value < 1:
        raise ValueError(f"{field.name}={value} is not at least 1")


@attrs.frozen
class Plan:
    """How samples become rows, and rows become steps."""

    tokens: int = attrs.field(validator=_positive)
    """Tokens in a row."""
    rows: int = attrs.field(validator=_positive)
    """Rows in a micro-batch of one data rank."""
    accumulate: int = attrs.field(validator=_positive)
    """Micro-batches in a step; the last step of an epoch may have fewer."""
    ranks: int = attrs.field(validator=_positive)
    """Data ranks: those that read different samples."""
    epochs: int = attrs.field(validator=_positive)
    """How often each sample is read."""
    seed: int
    """Seed of the order of samples."""
    shuffle: bool = True
    """Read each epoch in an order of its own, not in the order of the samples."""
    window: int = attrs.field(default=64, validator=_positive)
    """Rows that may be open while packing: more fill rows better and move samples further."""

    @property
    def rows_per_step(self) -> int:
        """Rows of a full step, all ranks together."""
        return self.rows * self.accumulate * self.ranks


@attrs.frozen(eq=False)
class Rows:
    """The rows of an epoch: row `r` holds `samples[ends[r - 1] : ends[r]]`."""

    samples: Int[np.ndarray, " samples"]
    """Indices of samples, each once, int64."""
    ends: Int[np.ndarray, " rows"]
    """Where each row ends, int64."""

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.ends)

    def __getitem__(self, row: int) -> tuple[int, ...]:
        """List the samples of a row; rows after the last are empty."""
        if row >= len(self.ends):
            return ()
        start = self.ends[row - 1] if row else 0
        return tuple(self.samples[start : self.ends[row]].tolist())


@attrs.frozen(eq=False)
class Schedule:
    """All epochs of a run."""

    epochs: tuple[Rows, ...]
    ends: tuple[int, ...]
    """The step after the last one of each epoch; the last entry is the number of steps."""


def permutation(count: int, seed: int, epoch: int) -> Int[np.ndarray, " samples"]:
    """Order the samples of an epoch, by a hash of their index: no other library can change it."""
    keys = rng.bits(rng.derive(seed, "order", epoch), torch.arange(count))
    return keys.argsort(stable=True).numpy()


def pack(
    lengths: Sequence[int], order: Sequence[int], *, tokens: int, window: int
) -> tuple[tuple[int, ...], ...]:
    """Place each sample whole in one row of at most `tokens`.

    Samples come in `order`, and each goes to the open row that it fills best; when more than
    `window` rows are open, the fullest is closed. Rows are listed by their first sample, so the
    order is roughly kept.

    Raises:
        ValueError: a sample is longer than a row, or empty; names its index and length.

    Source: Johnson 1974, doi:10.1137/0203025 (best fit), with a bound on open rows.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row) of the open rows, least room first
    for sample in order:
        length = lengths[sample]
        if not 1 <= length <= tokens:
            raise ValueError(f"sample {sample} of {length} tokens does not fit a row of {tokens}")
        found = bisect_left(room, (length, -1))
        if found < len(room):
            left, row = room.pop(found)
        else:
            left, row = tokens, len(rows)
            rows.append([])
        rows[row].append(sample)
        if left > length:
            insort(room, (left - length, row))
            if len(room) > window:
                room.pop(0)
    return tuple(map(tuple, rows))


def epoch_rows(lengths: Int[np.ndarray, " samples"], plan: Plan, epoch: int) -> Rows:
    """Order and pack the samples of an epoch."""
    count = len(lengths)
    order = permutation(count, plan.seed, epoch) if plan.shuffle else np.arange(count)
    rows = pack(lengths.tolist(), order.tolist(), tokens=plan.tokens, window=plan.window)
    return Rows(
        samples=np.array([sample for row in rows for sample in row], dtype=np.int64),
        ends=np.cumsum([len(row) for row in rows], dtype=np.int64),
    )


def schedule(lengths: Int[np.ndarray, " samples"], plan: Plan) -> Schedule:
    """Lay out all epochs; each ends with a step of what is left, which may be short.

    Raises:
        ValueError: there is no sample, or one does not fit a row.
    """
    if len(lengths) == 0:
        raise ValueError("there is no sample to read")
    epochs = [epoch_rows(lengths, plan, epoch) for epoch in range(plan.epochs)]
    steps = [-(-len(rows) // plan.rows_per_step) for rows in epochs]
    return Schedule(tuple(epochs), tuple(np.cumsum(steps).tolist()))


def step_rows(
    schedule: Schedule, plan: Plan, step: int, rank: int
) -> tuple[int, tuple[tuple[tuple[int, ...], ...], ...]]:
    """Give the epoch of a step, and the samples of each row of each micro-batch of a rank.

    All ranks have the same number of micro-batches and each of them has `plan.rows` rows; where
    the rows of an epoch run out they are empty. What a step reads depends on the product
    `rows * accumulate * ranks` only, not on how it is split.

    Raises:
        ValueError: there is no such step or rank.
    """
    if not 0 <= step < schedule.ends[-1]:
        raise ValueError(f"there is no step {step}; the plan has {schedule.ends[-1]}")
    if not 0 <= rank < plan.ranks:
        raise ValueError(f"there is no data rank {rank}; the plan has ranks={plan.ranks}")
    epoch = int(np.searchsorted(schedule.ends, step, side="right"))
    rows = schedule.epochs[epoch]
    first = (step - (schedule.ends[epoch - 1] if epoch else 0)) * plan.rows_per_step
    batches = min(plan.accumulate, -(-(len(rows) - first) // (plan.rows * plan.ranks)))
    starts = (first + (batch * plan.ranks + rank) * plan.rows for batch in range(batches))
    return epoch, tuple(
        tuple(rows[row] for row in range(start, start + plan.rows)) for start in starts
    )


def fill(rows: Rows, lengths: Int[np.ndarray, " samples"], tokens: int) -> float:
    """Share of the tokens of an epoch's rows that are not padding."""
    return float(lengths[rows.samples].sum() / (len(rows) * tokens))
