"""Reading the steps of a run: resume, workers, counts, and samples that cannot be used."""

from functools import partial
from typing import Any

import attrs
import pytest
import torch
from toys import PLAN, TOYS, Toy, encode, load, numbers, on_ranks

from mmfn import tree
from mmfn.data.encoded import Encoded
from mmfn.data.loader import Loader, Step
from mmfn.data.sample import BadSample
from mmfn.data.scan import Policy

TWO = attrs.evolve(PLAN, ranks=2)
BROKEN = (*TOYS[:-1], Toy(29, 6, bad="encode"))


def assert_same(ours: list[Step], theirs: list[Step]) -> None:
    """Compare steps to the last bit."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.index, a.epoch, a.counts, a.problems) == (b.index, b.epoch, b.counts, b.problems)
        flat = zip(tree.items(a.batches), tree.items(b.batches), strict=True)
        assert all(x[0] == y[0] and torch.equal(x[1], y[1]) for x, y in flat)


def test_a_run_that_goes_on_reads_what_it_would_have_read() -> None:
    """From every step, in the first and in the second epoch, to the last bit."""
    loader = load()
    whole = list(loader.steps())
    assert len(whole) == len(loader) > 6
    for start in range(len(loader) + 1):
        assert_same(list(loader.steps(start)), whole[start:])
    assert_same(list(loader.steps(2, 5)), whole[2:5])


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers: int) -> None:
    """The same steps in order, to the last bit."""
    assert_same(list(load(workers=workers).steps(1)), list(load().steps(1)))


def test_each_epoch_reads_every_sample_once_in_its_own_order() -> None:
    """And steps are numbered on over the epochs."""
    steps = list(load().steps())
    assert [step.index for step in steps] == list(range(len(steps)))
    orders = [[n for s in steps if s.epoch == epoch for n in numbers(s)] for epoch in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(30))
    assert orders[0] != orders[1]


def test_the_count_is_that_of_the_whole_step() -> None:
    """Every sample has one target."""
    for step in load().steps():
        assert step.counts.supervised == step.counts.samples == len(numbers(step))
        assert {batch.count.item() for batch in step.batches} == {step.counts.supervised}


def test_what_is_left_of_an_epoch_is_a_step_with_its_own_count() -> None:
    """Ten samples of a row each by four: steps of 4, 4 and 2, twice."""
    toys = tuple(Toy(n, 32) for n in range(10))
    steps = list(load(toys, plan=attrs.evolve(PLAN, accumulate=4)).steps())
    assert [len(step.batches) for step in steps] == [4, 4, 2, 4, 4, 2]
    assert [step.batches[0].count.item() for step in steps] == [4, 4, 2, 4, 4, 2]


def test_ranks_read_disjoint_samples_and_divide_by_one_count() -> None:
    """Two ranks make the same number of steps; together they read each epoch."""
    first, second = on_ranks(load, plan=TWO)
    assert len(first) == len(second)
    for epoch in range(2):
        a, b = ([n for s in of if s.epoch == epoch for n in numbers(s)] for of in (first, second))
        assert sorted(a + b) == list(range(30))
    for a, b in zip(first, second, strict=True):
        assert a.counts == b.counts
        assert a.counts.samples == len(numbers(a)) + len(numbers(b))
        assert len(a.batches) == len(b.batches)
        assert {x.count.item() for x in (*a.batches, *b.batches)} == {a.counts.supervised}


def test_a_bad_sample_is_skipped_and_counted_on_all_ranks() -> None:
    """One rank finds it; both know, in both epochs."""
    first, second = on_ranks(partial(load, BROKEN), plan=TWO)
    for epoch in range(2):
        a, b = ([step for step in of if step.epoch == epoch] for of in (first, second))
        assert sum(step.dropped for step in a) == sum(step.dropped for step in b) == 1
        problems = [text for step in (*a, *b) for text in step.problems]
        assert problems == ["toys.json, id 'toy29': its pixels are broken"]
        assert sum(step.counts.samples for step in a) == 29


def test_a_rank_that_fails_makes_all_fail_at_the_same_step() -> None:
    """The one says why, the other that it was not the one; none waits."""
    texts = sorted(map(str, on_ranks(partial(load, BROKEN, Policy()), plan=TWO)))
    assert texts[0].startswith("another data rank failed at step ")
    assert texts[1] == "toys.json, id 'toy29': its pixels are broken"


def test_ranks_with_different_plans_are_refused() -> None:
    """They would read the same samples, or wait for each other."""

    def make(rank: int, **changes: Any) -> Loader:
        return load(plan=attrs.evolve(TWO, seed=rank), rank=rank, **changes)

    assert [str(error) for error in on_ranks(make)] == [
        f"rank {rank} has another plan, data or start than the others" for rank in range(2)
    ]


def test_a_sum_over_other_ranks_than_the_plan_has_is_refused() -> None:
    """Else the loss would be divided by the count of one rank."""
    with pytest.raises(ValueError, match="psum is over 1 data ranks; the plan has 2"):
        next(load(plan=TWO).steps())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_named_as_it_is_met(workers: int) -> None:
    """Under workers too the error is the sample's own, not a traceback."""
    with pytest.raises(BadSample) as caught:
        list(load(BROKEN, Policy(), workers=workers).steps())
    assert str(caught.value) == "toys.json, id 'toy29': its pixels are broken"


@pytest.mark.parametrize("bad", ["measure", "encode"])
def test_a_run_gives_up_above_the_limit(bad: str) -> None:
    """Three of thirty are more than 5 %, found early or late; 10 % are allowed to be."""
    toys = tuple(attrs.evolve(toy, bad=bad if toy.number < 3 else "") for toy in TOYS)
    message = r"2 of 30 samples are bad, more than max_bad=0.05; last toys.json, id 'toy\d'"
    with pytest.raises(ValueError, match=message):
        list(load(toys, Policy(on_bad="skip", max_bad=0.05)).steps())
    steps = list(load(toys, Policy(on_bad="skip", max_bad=0.1)).steps())
    assert sum(step.counts.samples for step in steps) == 2 * 27
    assert sum(step.dropped for step in steps) == (6 if bad == "encode" else 0)


def test_bad_samples_of_another_epoch_are_not_counted_again() -> None:
    """Three in each of two epochs are three of thirty, not six."""
    toys = tuple(attrs.evolve(toy, bad="encode" if toy.number < 3 else "") for toy in TOYS)
    list(load(toys, Policy(on_bad="skip", max_bad=0.15)).steps())


def test_a_sample_that_is_not_as_measured_is_refused() -> None:
    """The plan would not hold; this is no bad sample but a wrong `measure`."""

    def longer(toy: Toy) -> Encoded:
        return encode(attrs.evolve(toy, tokens=toy.tokens + 1))

    with pytest.raises(ValueError, match=r"sample toy\d+ has \d+ tokens, but was measured with"):
        list(load(encode=longer).steps())


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 99)])
def test_steps_that_do_not_exist_are_refused(start: int, stop: int) -> None:
    """At the call, not at the first step."""
    loader = load()
    message = f"there are no steps {start} to {stop}; the plan has {len(loader)}"
    with pytest.raises(ValueError, match=message):
        loader.steps(start, stop)


@pytest.mark.parametrize(("name", "value", "least"), [("workers", -1, 0), ("prefetch", 0, 1)])
def test_settings_that_read_nothing_are_refused(name: str, value: int, least: int) -> None:
    """Names the setting."""
    with pytest.raises(ValueError, match=f"{name}={value} is not at least {least}"):
        attrs.evolve(load(), **{name: value})
