"""The plan of balance: nothing is lost, no slot is overfilled, no load grows, near the optimum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from optimum import optimum

from mmfn.sharding.balance import Plan, loads, plan, route

COUNTS = st.integers(1, 6).flatmap(
    lambda ranks: st.integers(1, 4).flatmap(
        lambda local: arrays(
            np.int64, (ranks, ranks * local), elements=st.sampled_from([0, 0, 1, 2, 7, 30, 500])
        )
    )
)
"""Few values, so that there are ties, idle experts and hot ones."""

HARD = np.array([0, 0, 0, 0, 0, 67, 54, 1, 67, 8, 43, 39, 43, 39, 38])
"""Tokens of five experts on each of three ranks; found by changing numbers to widen the gap."""


def on_ranks(random: np.random.Generator, ranks: int, local: int, skew: float) -> np.ndarray:
    """Draw a routing in which ranks are hot by Zipf's law, all their experts about equally."""
    share = random.permutation(1 / np.arange(1, ranks + 1) ** skew).repeat(local)
    share *= random.uniform(0.5, 1.5, ranks * local)
    return random.multinomial(random.integers(20, 400), share / share.sum(), ranks).astype(np.int64)


def same(one: Plan, two: Plan) -> bool:
    """Whether two plans are equal."""
    return all(
        np.array_equal(getattr(one, name), getattr(two, name))
        for name in ("rank", "expert", "moved")
    )


@settings(deadline=None, max_examples=200)
@given(COUNTS, st.integers(0, 3))
def test_a_plan_keeps_what_it_promises(counts: np.ndarray, slots: int) -> None:
    """Conserved tokens, slots respected, copies elsewhere, once and in use; the same each time."""
    ranks, experts = counts.shape
    made = plan(counts, slots)
    before = counts.sum(0).reshape(ranks, -1).sum(1)
    after = loads(made, counts)
    assert after.sum() == before.sum()
    assert (after >= 0).all()
    assert after.max() <= before.max()
    assert (made.moved >= 0).all()
    assert (made.moved.sum(1) > 0).all()
    left = counts.copy()
    np.subtract.at(left.T, made.expert, made.moved)
    assert (left >= 0).all()
    assert (np.bincount(made.rank, minlength=ranks) <= slots).all()
    assert (made.expert // (experts // ranks) != made.rank).all()
    assert len(set(zip(made.rank.tolist(), made.expert.tolist(), strict=True))) == len(made.rank)
    assert (np.diff(made.rank) >= 0).all()
    assert same(made, plan(counts.copy(), slots))


@settings(deadline=None, max_examples=100)
@given(COUNTS, st.integers(0, 3))
def test_tokens_stay_on_their_rank_where_they_can(counts: np.ndarray, slots: int) -> None:
    """A copy has its rank's own tokens first, and the owner's only where all others have gone."""
    ranks, experts = counts.shape
    made = plan(counts, slots)
    owner = made.expert // (experts // ranks)
    left = counts.copy()
    np.subtract.at(left.T, made.expert, made.moved)
    for number, (rank, expert) in enumerate(zip(made.rank, made.expert, strict=True)):
        amount = made.moved[number].sum()
        assert made.moved[number, rank] == min(counts[rank, expert], amount)
        kept = left[:, expert].sum()
        assert left[owner[number], expert] == min(counts[owner[number], expert], kept)


@settings(deadline=None, max_examples=100)
@given(COUNTS, st.integers(0, 3))
def test_what_ranks_send_is_what_ranks_expect(counts: np.ndarray, slots: int) -> None:
    """Every row is sent once, in the order of experts; weights lent are weights borrowed."""
    ranks, experts = counts.shape
    local = experts // ranks
    made = plan(counts, slots)
    ways = [route(made, counts, rank) for rank in range(ranks)]
    for source, way in enumerate(ways):
        assert np.array_equal(np.sort(way.rows), np.arange(counts[source].sum()))
        assert way.sent == [int(other.theirs[source].sum()) for other in ways]
        # What arrives where: rows of one expert, for the expert that is there or its copy.
        number = np.repeat(np.arange(experts), counts[source])[way.rows]
        parts = np.split(number, np.cumsum(way.sent)[:-1])
        for rank, part in enumerate(parts):
            copies = made.expert[made.rank == rank]
            names = np.concatenate((np.arange(rank * local, (rank + 1) * local), copies))
            assert np.array_equal(part, np.repeat(names, ways[rank].theirs[source]))
        assert way.lent_to == [other.borrowed_from[source] for other in ways]
    for rank, way in enumerate(ways):
        came = []
        for owner, other in enumerate(ways):
            start = sum(other.lent_to[:rank])
            lent = other.lent[start : start + other.lent_to[rank]]
            came += (lent + owner * local).tolist()
        found = [came[place] for place in way.borrowed]
        assert found == made.expert[made.rank == rank].tolist()


def test_one_hot_expert_is_shared_evenly() -> None:
    """All tokens to one expert of four ranks: a quarter each, a rank's own tokens stay with it."""
    counts = np.zeros((4, 8), dtype=np.int64)
    counts[:, 2] = [100, 100, 100, 100]
    made = plan(counts, 1)
    assert loads(made, counts).tolist() == [100] * 4
    assert made.rank.tolist() == [0, 2, 3]
    assert np.array_equal(made.moved, np.diag([100] * 4)[[0, 2, 3]])


def test_nothing_moves_where_nothing_is_gained() -> None:
    """Equal loads, one rank, no slots, no tokens."""
    for counts, slots in (
        (np.full((4, 8), 3), 2),
        (np.full((1, 4), 3), 2),
        (np.arange(32).reshape(4, 8), 0),
        (np.zeros((4, 8), dtype=np.int64), 2),
    ):
        assert len(plan(counts.astype(np.int64), slots).rank) == 0


def test_what_cannot_be_planned_is_refused() -> None:
    """Says the numbers; more ranks than experts are of that kind."""
    for ranks, experts in ((4, 6), (4, 2)):
        match = f"experts={experts} are not a multiple of ranks={ranks}"
        with pytest.raises(ValueError, match=match):
            plan(np.zeros((ranks, experts), dtype=np.int64), 1)
    with pytest.raises(ValueError, match="slots=-1 is below 0"):
        plan(np.zeros((4, 8), dtype=np.int64), -1)


def test_no_more_is_moved_than_is_too_much_where_slots_are_free() -> None:
    """Three ranks of 8, one of 40 in four experts: 24 are above the mean, and 24 move."""
    counts = np.zeros((4, 16), dtype=np.int64)
    counts[0] = [10] * 4 + [2] * 12
    made = plan(counts, 3)
    assert loads(made, counts).tolist() == [16] * 4
    assert made.moved.sum() == 24


def test_many_equal_experts_are_evened_out() -> None:
    """512 experts of Zipf's law in order on 64 ranks: from 25 times the mean to 0.1 % above it."""
    share = 1 / np.arange(1, 513)
    counts = np.random.default_rng(0).multinomial(32768, share / share.sum(), 64).astype(np.int64)
    assert loads(plan(counts, 0), counts).max() > 25 * 32768
    assert loads(plan(counts, 2), counts).max() <= 1.001 * 32768


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(("ranks", "local"), [(4, 2), (3, 4), (6, 1), (4, 4)])
def test_plans_reach_the_optimum(ranks: int, local: int, slots: int) -> None:
    """Of integer programming; single experts are hot by Zipf's law, or whole ranks are.

    Not always: of 34,052 drawn cases of up to 18 experts 2 were above it, by 1.2 % at most.
    """
    random = np.random.default_rng(0)
    for skew in (0.3, 0.7, 1.0, 1.5, 3.0):
        share = random.permutation(1 / np.arange(1, ranks * local + 1) ** skew)
        tokens = random.integers(20, 400)
        single = random.multinomial(tokens, share / share.sum(), ranks).astype(np.int64)
        for counts in (single, on_ranks(random, ranks, local, skew)):
            assert loads(plan(counts, slots), counts).max() == optimum(counts, slots)


def test_the_worst_plan_known_is_a_tenth_above_the_optimum() -> None:
    """What minutes of search for a wide gap found: 145 tokens where 133 are possible."""
    counts = np.zeros((3, 15), dtype=np.int64)
    counts[0] = HARD
    found, best = loads(plan(counts, 2), counts).max(), optimum(counts, 2)
    assert best < found <= 1.1 * best
