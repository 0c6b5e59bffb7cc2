"""Which samples a step reads: rows, steps and ranks."""

from collections.abc import Sequence
from itertools import pairwise

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmfn.data import plan as plans
from mmfn.data.plan import Plan

PLAN = Plan(tokens=64, rows=2, accumulate=3, ranks=2, epochs=2, seed=5)

lengths_of_samples = st.lists(st.integers(1, 64), min_size=1, max_size=120)
splits = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))


def read(lengths: Sequence[int], plan: Plan) -> list[list[tuple[tuple[int, ...], ...]]]:
    """List the micro-batches of each step, those of rank 0 first and then in turn."""
    found = plans.schedule(np.array(lengths), plan)
    steps = []
    for step in range(found.ends[-1]):
        of_ranks = [plans.step_rows(found, plan, step, rank)[1] for rank in range(plan.ranks)]
        steps.append([batch for batches in zip(*of_ranks, strict=True) for batch in batches])
    return steps


@given(lengths_of_samples, st.integers(1, 8))
def test_every_sample_stands_whole_in_one_row(lengths: list[int], window: int) -> None:
    """And no row is empty or too long, whatever the window is."""
    rows = plans.pack(lengths, range(len(lengths)), tokens=64, window=window)
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert all(1 <= sum(lengths[sample] for sample in row) <= 64 for row in rows)
    assert all(a[0] < b[0] for a, b in pairwise(rows)), "rows are not listed by their first sample"


def test_a_sample_goes_to_the_row_that_it_fills_best() -> None:
    """Rows of 10: after 6 and 7 there are 4 and 3 left; 3 fills the second, 4 the first."""
    assert plans.pack([6, 7, 3, 4, 10], range(5), tokens=10, window=4) == ((0, 3), (1, 2), (4,))


def test_the_fullest_row_is_closed_when_too_many_are_open() -> None:
    """Of rows with 4, 3 and 5 left a window of 2 closes the one with 3, so 3 goes to the 4."""
    assert plans.pack([6, 7, 5, 3], range(4), tokens=10, window=2) == ((0, 3), (1,), (2,))
    assert plans.pack([6, 7, 5, 3], range(4), tokens=10, window=3) == ((0,), (1, 3), (2,))


@pytest.mark.parametrize("tokens", [2048, 4096, 16384])
def test_rows_are_nearly_full(tokens: int) -> None:
    """Lengths as chats with pictures have them: log-normal, a median of 400, up to a row."""
    random = np.random.default_rng(0)
    drawn = np.exp(random.normal(np.log(400), 0.9, 4000)).astype(np.int64)
    lengths = drawn.clip(16, tokens)
    rows = plans.epoch_rows(lengths, attrs.evolve(PLAN, tokens=tokens), 0)
    assert plans.fill(rows, lengths, tokens) >= 0.97


def test_the_order_of_samples_is_roughly_kept() -> None:
    """Half of the samples stand within 1 % of their place, for a set of 20,000."""
    lengths = np.random.default_rng(1).integers(16, 1500, 20_000)
    rows = plans.epoch_rows(lengths, attrs.evolve(PLAN, tokens=4096, shuffle=False), 0)
    moved = np.abs(np.argsort(rows.samples) - np.arange(len(lengths)))
    assert np.median(moved) < 200


@pytest.mark.parametrize("length", [0, 65])
def test_a_sample_that_fits_no_row_is_refused(length: int) -> None:
    """Names its index, its length and the row's."""
    with pytest.raises(ValueError, match=f"sample 1 of {length} tokens does not fit a row of 64"):
        plans.schedule(np.array([3, length]), PLAN)


def test_epochs_have_orders_of_their_own_that_follow_from_the_seed() -> None:
    """The first numbers are fixed: a changed order would break runs that go on."""
    assert plans.permutation(6, 5, 0).tolist() == [1, 4, 2, 5, 3, 0]
    orders = [tuple(plans.permutation(50, seed, e).tolist()) for seed in (5, 6) for e in range(3)]
    assert len(set(orders)) == 6
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_without_shuffling_all_epochs_are_in_the_order_of_the_samples() -> None:
    """As evaluation wants it."""
    plan = attrs.evolve(PLAN, shuffle=False)
    found = plans.schedule(np.full(5, 64), plan)
    assert [rows.samples.tolist() for rows in found.epochs] == [[0, 1, 2, 3, 4]] * 2


@given(lengths_of_samples, splits)
def test_ranks_share_out_each_epoch(lengths: list[int], split: tuple[int, int, int]) -> None:
    """Every sample once an epoch; all ranks have as many micro-batches, of as many rows."""
    rows, accumulate, ranks = split
    plan = attrs.evolve(PLAN, rows=rows, accumulate=accumulate, ranks=ranks)
    found = plans.schedule(np.array(lengths), plan)
    seen: dict[int, list[int]] = {0: [], 1: []}
    for step in range(found.ends[-1]):
        shapes = set()
        for rank in range(ranks):
            epoch, batches = plans.step_rows(found, plan, step, rank)
            shapes.add(tuple(len(batch) for batch in batches))
            seen[epoch] += [sample for batch in batches for row in batch for sample in row]
        (shape,) = shapes
        assert 1 <= len(shape) <= accumulate
        assert set(shape) == {rows}
    assert all(sorted(samples) == list(range(len(lengths))) for samples in seen.values())


@given(lengths_of_samples)
def test_what_a_step_reads_does_not_depend_on_the_split(lengths: list[int]) -> None:
    """Twelve rows a step, as rows, micro-batches or ranks: the same rows, but for empty ones."""

    def rows_of_steps(rows: int, accumulate: int, ranks: int) -> list[list[tuple[int, ...]]]:
        plan = attrs.evolve(PLAN, rows=rows, accumulate=accumulate, ranks=ranks)
        steps = read(lengths, plan)
        return [[row for batch in step for row in batch if row] for step in steps]

    whole = rows_of_steps(12, 1, 1)
    assert all(
        rows_of_steps(*split) == whole for split in [(1, 12, 1), (1, 1, 12), (2, 3, 2), (3, 2, 2)]
    )


def test_two_ranks_read_disjoint_halves_and_both_epochs_differ() -> None:
    """Twelve samples of a row each, two ranks, two epochs; and again the same."""
    plan = Plan(tokens=8, rows=1, accumulate=1, ranks=2, epochs=2, seed=0)
    found = plans.schedule(np.full(12, 8), plan)
    lists = {
        (epoch, rank): [
            plans.step_rows(found, plan, step, rank)[1][0][0][0]
            for step in range(6 * epoch, 6 * epoch + 6)
        ]
        for epoch in range(2)
        for rank in range(2)
    }
    for epoch in range(2):
        assert not set(lists[epoch, 0]) & set(lists[epoch, 1])
        assert set(lists[epoch, 0]) | set(lists[epoch, 1]) == set(range(12))
    assert lists[0, 0] + lists[0, 1] != lists[1, 0] + lists[1, 1]
    assert read([8] * 12, plan) == read([8] * 12, plan)


def test_what_is_left_of_an_epoch_is_a_step_of_its_own() -> None:
    """Ten samples by four, twice: steps of 4, 4 and 2 in each epoch."""
    plan = Plan(tokens=8, rows=1, accumulate=4, ranks=1, epochs=2, seed=0)
    assert plans.schedule(np.full(10, 8), plan).ends == (3, 6)
    assert [len(step) for step in read([8] * 10, plan)] == [4, 4, 2, 4, 4, 2]


def test_ranks_without_rows_at_the_end_of_an_epoch_get_empty_ones() -> None:
    """Three rows for two ranks: the last one of rank 1 is empty, and it has as many steps."""
    plan = Plan(tokens=8, rows=1, accumulate=1, ranks=2, epochs=1, seed=0, shuffle=False)
    assert read([8] * 3, plan) == [[((0,),), ((1,),)], [((2,),), ((),)]]


@pytest.mark.parametrize(
    ("step", "rank", "message"),
    [
        (1, 0, "no step 1; the plan has 1"),
        (-1, 0, "no step -1"),
        (0, 2, "no data rank 2; the plan has ranks=2"),
    ],
)
def test_steps_and_ranks_that_do_not_exist_are_refused(step: int, rank: int, message: str) -> None:
    """Names what there is."""
    plan = attrs.evolve(PLAN, epochs=1)
    with pytest.raises(ValueError, match=message):
        plans.step_rows(plans.schedule(np.array([3]), plan), plan, step, rank)


@pytest.mark.parametrize("name", ["tokens", "rows", "accumulate", "ranks", "epochs", "window"])
def test_a_plan_without_any_of_something_is_refused(name: str) -> None:
    """Names the field."""
    with pytest.raises(ValueError, match=f"{name}=0 is not at least 1"):
        attrs.evolve(PLAN, **{name: 0})


def test_a_plan_for_no_sample_is_refused() -> None:
    """An empty file would else be a run of no step."""
    with pytest.raises(ValueError, match="there is no sample to read"):
        plans.schedule(np.zeros(0, dtype=np.int64), PLAN)
