"""Samples that cost nothing to measure and encode, and ranks that are threads."""

from collections.abc import Callable
from functools import partial
from threading import Barrier, Thread
from typing import Any

import attrs
import numpy as np

from mmfn.data.encoded import Encoded, Geometry, Run
from mmfn.data.loader import Loader, Step
from mmfn.data.plan import Plan
from mmfn.data.sample import BadSample
from mmfn.data.scan import Policy, Scan, scan

GEOMETRY = Geometry(merge=2, side=4, patch_dim=3)
PLAN = Plan(tokens=32, rows=1, accumulate=2, ranks=1, epochs=2, seed=3)
SKIP = Policy(on_bad="skip", on_long="drop", max_bad=0.5)


@attrs.frozen
class Toy:
    """A sample of so many tokens; its number is its tokens."""

    number: int
    tokens: int
    bad: str = ""
    """Where it shows to be bad: at `measure` or at `encode`, if anywhere."""

    @property
    def name(self) -> str:
        """Its id."""
        return f"toy{self.number}"

    where = "toys.json"
    patches = 8
    supervised = 1


def measure(toy: Toy) -> Toy:
    """Measure it, which is free."""
    if toy.bad == "measure":
        raise BadSample(toy.name, toy.where, "its header is broken")
    return toy


def encode(toy: Toy) -> Encoded:
    """Make a picture of two tokens, then text."""
    if toy.bad == "encode":
        raise BadSample(toy.name, toy.where, "its pixels are broken")
    return Encoded(
        name=toy.name,
        tokens=np.full(toy.tokens, toy.number),
        supervised=np.arange(toy.tokens) == 3,
        runs=(Run(0, 2, 4),),
        patches=np.full((8, 3), toy.number, dtype=np.float32),
    )


TOYS = tuple(Toy(n, 4 + 5 * n % 17) for n in range(30))


def scanned(toys: tuple[Toy, ...] = TOYS, policy: Policy = SKIP) -> Scan:
    """Measure toys."""
    return scan(toys, measure, tokens=PLAN.tokens, policy=policy)


def load(toys: tuple[Toy, ...] = TOYS, policy: Policy = SKIP, **changes: Any) -> Loader:
    """Read toys with the plan above."""
    settings = {"encode": encode, "plan": PLAN, "geometry": GEOMETRY} | changes
    return Loader(samples=toys, scan=scanned(toys, policy), policy=policy, **settings)


def numbers(step: Step) -> list[int]:
    """List the toys of a step by their tokens."""
    found: list[int] = []
    for batch in step.batches:
        known = batch.segments.number > 0
        found += batch.tokens[known].unique_consecutive().tolist()
    return found


def together(ranks: int) -> list[Callable[[tuple[int, ...]], tuple[int, ...]]]:
    """Make a sum over threads for each rank."""
    barrier = Barrier(ranks, timeout=30)
    given: list[tuple[int, ...]] = [()] * ranks

    def psum(values: tuple[int, ...], rank: int) -> tuple[int, ...]:
        given[rank] = values
        barrier.wait()
        result = tuple(sum(column) for column in zip(*given, strict=True))
        barrier.wait()
        return result

    return [partial(psum, rank=rank) for rank in range(ranks)]


def on_ranks(make: Callable[..., Loader], ranks: int = 2, **changes: Any) -> list[Any]:
    """Read all steps on ranks that are threads; give their steps, or what they raised."""
    # Not a pool of threads: processes forked from one of its threads end with an error.
    results: list[Any] = [None] * ranks

    def read(rank: int, psum: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
        try:
            results[rank] = list(make(rank=rank, psum=psum, **changes).steps())
        except ValueError as error:
            results[rank] = error

    threads = [Thread(target=read, args=given) for given in enumerate(together(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
