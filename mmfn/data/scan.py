"""Measure all samples once, and leave out those that cannot be used."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, Literal

import attrs
import numpy as np
from jaxtyping import Bool, Int

from mmfn.data.ahead import ordered
from mmfn.data.sample import BadSample, TooLong

CHUNK = 64
"""Samples that a worker measures at a time, between two reports of progress."""


def _share(policy: "Policy", field: "attrs.Attribute[float]", value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{field.name}={value} is no share between 0 and 1")


@attrs.frozen
class Policy:
    """What becomes of samples that cannot be used."""

    on_long: Literal["raise", "drop"] = "raise"
    """What to do about a sample of more tokens than a row."""
    on_bad: Literal["raise", "skip"] = "raise"
    """What to do about a sample that is not understood or whose media cannot be read."""
    max_bad: float = attrs.field(default=0.01, validator=_share)
    """Share of all samples that may be skipped as bad; a run that meets more in an epoch ends."""


@attrs.frozen(eq=False)
class Scan:
    """The samples that are read, and how long they are."""

    kept: Int[np.ndarray, " samples"]
    """Their indices, int64."""
    tokens: Int[np.ndarray, " samples"]
    """Tokens of each of them."""
    patches: Int[np.ndarray, " samples"]
    """Patches of each of them."""
    supervised: Int[np.ndarray, " samples"]
    """Supervised tokens of each of them."""
    long: tuple[str, ...]
    """What was dropped as too long, a message each."""
    bad: tuple[str, ...]
    """What was skipped as bad, a message each."""
    unwanted: int = 0
    """Samples that could be read and were left out by `only`."""

    def only(self, wanted: Bool[np.ndarray, " samples"]) -> "Scan":
        """Give the scan without the kept samples that are not wanted."""
        names = ("kept", "tokens", "patches", "supervised")
        return attrs.evolve(
            self,
            unwanted=self.unwanted + int((~wanted).sum()),
            **{name: getattr(self, name)[wanted] for name in names},
        )

    @property
    def total(self) -> int:
        """Samples that there were."""
        return len(self.kept) + len(self.long) + len(self.bad) + self.unwanted


@attrs.frozen
class _Measurer:
    samples: Sequence[Any]
    measure: Callable[[Any], Any]
    tokens: int

    def __call__(self, chunk: int) -> list[tuple[int, int, int] | BadSample]:
        found: list[tuple[int, int, int] | BadSample] = []
        for index in range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(self.samples))):
            try:
                sample = self.samples[index]
                length = self.measure(sample)
                if length.tokens > self.tokens:
                    cause = f"{length.tokens} tokens are more than max_tokens={self.tokens}"
                    raise TooLong(sample.name, sample.where, cause)
                found.append((length.tokens, length.patches, length.supervised))
            except BadSample as error:
                found.append(error)
        return found


def scan(
    samples: Sequence[Any],
    measure: Callable[[Any], Any],
    *,
    tokens: int,
    policy: Policy,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Scan:
    """Measure every sample, and leave out those that cannot be used as `policy` says.

    A sample has a `name` and says `where` it stands, `measure` gives its `tokens`, `patches` and
    `supervised`; both may raise `BadSample`. `progress(done, samples)` is called now and then.

    Raises:
        BadSample: a sample is bad or longer than `tokens`, and `policy` says raise.
        ValueError: more samples are bad than `policy.max_bad`, or none is left.
    """
    lengths: list[tuple[int, int, int]] = []
    kept: list[int] = []
    long: list[str] = []
    bad: list[str] = []
    index = 0
    chunks = range(-(-len(samples) // CHUNK))
    measurer = _Measurer(samples, measure, tokens)
    with closing(ordered(measurer, chunks, workers=workers)) as results:
        for found in results:
            for entry in found:
                if not isinstance(entry, BadSample):
                    kept.append(index)
                    lengths.append(entry)
                elif isinstance(entry, TooLong):
                    if policy.on_long == "raise":
                        raise entry
                    long.append(str(entry))
                else:
                    if policy.on_bad == "raise":
                        raise entry
                    bad.append(str(entry))
                    check_bad(len(bad), len(samples), policy, str(entry))
                index += 1
            if progress is not None:
                progress(index, len(samples))
    if not kept:
        raise ValueError(f"no sample is left: {len(long)} are too long, {len(bad)} are bad")
    token_counts, patches, supervised = np.array(lengths, dtype=np.int64).T
    return Scan(np.array(kept), token_counts, patches, supervised, tuple(long), tuple(bad))


def check_bad(bad: int, total: int, policy: Policy, last: str) -> None:
    """Refuse to go on when too many samples are bad.

    Raises:
        ValueError: names both numbers, the limit and the last of them.
    """
    if bad > policy.max_bad * total:
        raise ValueError(
            f"{bad} of {total} samples are bad, more than max_bad={policy.max_bad}; last {last}"
        )
