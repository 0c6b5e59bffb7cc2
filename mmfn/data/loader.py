"""Steps of a run, read ahead in order: samples to packed batches.

The plan follows from the lengths of the samples, and a step from the plan. So the state of a reader
is the number of its next step: `loader.steps(k)` gives what `loader.steps()` gives after `k` steps,
bit for bit, however many workers there are.
"""

import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import attrs

from mmfn import losses
from mmfn.batch import Batch
from mmfn.data import pack
from mmfn.data import plan as plans
from mmfn.data.ahead import ordered
from mmfn.data.encoded import Encoded, Geometry
from mmfn.data.sample import BadSample
from mmfn.data.scan import Policy, Scan, check_bad


def _count(owner: object, field: "attrs.Attribute[int]", value: int) -> None:
    least = 1 if field.name == "prefetch" else 0
    if value < least:
        raise ValueError(f"{field.name}={value} is not at least {least}")


def alone(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Sum over the one data rank that there is."""
    return numbers


@attrs.frozen(eq=False)
class Step:
    """What an optimizer step reads on one data rank."""

    index: int
    epoch: int
    batches: tuple[Batch, ...]
    """Its micro-batches; `count` is that of the step on all data ranks."""
    counts: pack.Counts
    """What is in the step, on all data ranks."""
    dropped: int
    """Samples of the step, on all data ranks, that could not be read."""
    problems: tuple[str, ...]
    """What was wrong with those of this rank, a message each."""


@attrs.frozen(eq=False)
class _Read:
    epoch: int
    batches: tuple[Batch, ...]
    counts: pack.Counts
    bad: tuple[str, ...]


@attrs.frozen(eq=False)
class _Reader:
    """What a worker has to know: a function from a step to its batches on one rank."""

    samples: Sequence[Any]
    encode: Callable[[Any], Encoded]
    scan: Scan
    schedule: plans.Schedule
    plan: plans.Plan
    rank: int
    collate: Callable[[Sequence[Sequence[Encoded]]], tuple[Batch, pack.Counts]]
    skip: bool

    def __call__(self, step: int) -> _Read:
        epoch, micro = plans.step_rows(self.schedule, self.plan, step, self.rank)
        bad: list[str] = []
        packed = [
            self.collate([[e for i in row if (e := self._one(i, bad)) is not None] for row in rows])
            for rows in micro
        ]
        counts = pack.total([counts for _, counts in packed])
        return _Read(epoch, tuple(batch for batch, _ in packed), counts, tuple(bad))

    def _one(self, index: int, bad: list[str]) -> Encoded | None:
        try:
            encoded = self.encode(self.samples[int(self.scan.kept[index])])
        except BadSample as error:
            if not self.skip:
                raise
            bad.append(str(error))
            return None
        found, measured = len(encoded.tokens), int(self.scan.tokens[index])
        if found != measured:
            raise ValueError(
                f"sample {encoded.name} has {found} tokens, but was measured with {measured}"
            )
        return encoded


def _attempt(reads: Generator[_Read, None, None]) -> tuple[_Read, Exception | None]:
    """Take the next, or nothing and what was raised."""
    try:
        return next(reads), None
    except Exception as error:
        return _Read(0, (), pack.Counts(), ()), error


def _lay_out(loader: "Loader") -> plans.Schedule:
    return plans.schedule(loader.scan.tokens, loader.plan)


@attrs.frozen(eq=False)
class Loader:
    """Reads the steps of a run on one data rank; has no state."""

    samples: Sequence[Any]
    encode: Callable[[Any], Encoded]
    """Encodes a sample; may raise `BadSample`."""
    scan: Scan
    """What `scan` found; the same on every rank."""
    plan: plans.Plan
    geometry: Geometry
    policy: Policy
    normalise: losses.Normalise = "token"
    rank: int = 0
    """Which of `plan.ranks` this is; ranks that share their data have the same."""
    psum: Callable[[tuple[int, ...]], tuple[int, ...]] = alone
    """Sums integers over the data ranks, on the host; called once at the start and once a step."""
    workers: int = attrs.field(default=0, validator=_count)
    """Processes that read ahead; 0 reads in this one when a step is asked for."""
    prefetch: int = attrs.field(default=2, validator=_count)
    """Steps that each worker holds ready."""
    collate: Callable[..., tuple[Batch, pack.Counts]] = pack.collate
    """`pack.collate`, or `partial` of it with other sizes of padding."""
    schedule: plans.Schedule = attrs.field(
        init=False,
        default=attrs.Factory(_lay_out, takes_self=True),
    )
    """All epochs, laid out."""

    def __len__(self) -> int:
        """Count the steps of all epochs."""
        return self.schedule.ends[-1]

    def steps(self, start: int = 0, stop: int | None = None) -> Iterator[Step]:
        """Yield steps `start` to `stop`, or to the last.

        Bad samples are held against the limit of the policy epoch by epoch, counted from `start`. A
        rank that fails makes all ranks fail at the same step, so that none waits for it.

        Raises:
            BadSample: a sample is bad, and the policy says raise.
            ValueError: there are no such steps, ranks have different plans, a sample is not as it
                was measured, too many are bad, or another rank failed.
        """
        stop = len(self) if stop is None else stop
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"there are no steps {start} to {stop}; the plan has {len(self)}")
        return self._steps(start, stop)

    def _steps(self, start: int, stop: int) -> Iterator[Step]:
        self._agree(start, stop)
        epoch, bad = -1, 0
        reads = ordered(
            self._reader(), range(start, stop), workers=self.workers, prefetch=self.prefetch
        )
        with closing(reads):
            for index in range(start, stop):
                read, error = _attempt(reads)
                numbers = self.psum(
                    (
                        int(error is not None),
                        len(read.bad),
                        *attrs.astuple(read.counts),
                    )
                )
                failed, dropped, *counted = numbers
                if error is not None:
                    raise error
                if failed:
                    raise ValueError(f"another data rank failed at step {index}")
                if read.epoch != epoch:  # In an epoch each sample is read once.
                    epoch, bad = read.epoch, len(self.scan.bad)
                bad += dropped
                if dropped:
                    last = next(iter(read.bad), "on another data rank")
                    check_bad(bad, self.scan.total, self.policy, last)
                counts = pack.Counts(*counted)
                yield Step(
                    index=index,
                    epoch=read.epoch,
                    batches=pack.with_count(read.batches, counts.divisor(self.normalise)),
                    counts=counts,
                    dropped=dropped,
                    problems=read.bad,
                )

    def _reader(self) -> _Reader:
        return _Reader(
            samples=self.samples,
            encode=self.encode,
            scan=self.scan,
            schedule=self.schedule,
            plan=self.plan,
            rank=self.rank,
            collate=partial(
                self.collate,
                geometry=self.geometry,
                tokens=self.plan.tokens,
                normalise=self.normalise,
            ),
            skip=self.policy.on_bad == "skip",
        )

    def _agree(self, start: int, stop: int) -> None:
        """Refuse to start when ranks would read by different plans: they would wait forever."""
        text = repr((self.plan, self.policy, self.normalise, start, stop)).encode()
        digest = zlib.crc32(text + self.scan.kept.tobytes() + self.scan.tokens.tobytes())
        ranks, digests = self.psum((1, digest))
        if ranks != self.plan.ranks:
            raise ValueError(f"psum is over {ranks} data ranks; the plan has {self.plan.ranks}")
        if digests != ranks * digest:
            raise ValueError(f"rank {self.rank} has another plan, data or start than the others")
