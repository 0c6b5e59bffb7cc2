"""The plan of expert-parallel balance: which experts get a copy on which rank, for one layer.

Integers in, integers out: every rank makes the same plan from the same counts. The rank with most
gives tokens of its largest expert to the rank with least, which is filled up to the mean; so each
copy finishes a rank, and a rank that gave too much is filled by another in turn.

Source: the idea of copies for a step, Nie et al. 2023, arXiv:2304.03946 (FlexMoE); filling one at a
time, Walker 1977, doi:10.1145/355744.355749 (the alias method).
"""

import heapq
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]


@attrs.frozen(eq=False)
class Plan:
    """Copies of experts, and whose tokens go to them."""

    rank: Ints
    """Rank of each copy, in increasing order."""
    expert: Ints
    """Expert that it is a copy of."""
    moved: Ints
    """`[copies, ranks]`: tokens of each rank that go to the copy.

    Of a rank's tokens for an expert the first go to its first copy, the next to the second, and
    what is left to the owner."""


def plan(counts: Ints, slots: int) -> Plan:
    """Plan copies for `counts[rank, expert]` tokens of each rank, `slots` copies on a rank at most.

    Expert `e` belongs to rank `e // (experts / ranks)`. No rank gets a copy of its own expert, or
    two of one; every copy has tokens; the largest load is never larger than without.

    Raises:
        ValueError: the ranks do not divide the experts; names both numbers.
    """
    ranks, experts = counts.shape
    if experts % ranks:
        raise ValueError(f"experts={experts} are not a multiple of ranks={ranks}")
    local = experts // ranks
    tokens: list[int] = counts.sum(0).tolist()
    loads = [sum(tokens[rank * local : (rank + 1) * local]) for rank in range(ranks)]
    level = -(-sum(loads) // ranks)
    # Heaps with outdated entries: one counts if it says what is now.
    most = [(-load, rank) for rank, load in enumerate(loads)]
    least = [(load, rank) for rank, load in enumerate(loads)] if slots else []
    heapq.heapify(most)
    heapq.heapify(least)
    free = [slots] * ranks
    copies: dict[tuple[int, int], int] = {}
    while most and -most[0][0] > level:
        load, source = heapq.heappop(most)
        if -load != loads[source]:
            continue
        here = range(source * local, (source + 1) * local)
        expert = max(here, key=tokens.__getitem__)
        taken = {rank for rank, other in copies if other == expert}
        rank = _least(least, loads, free, level, taken)
        if rank is None:
            break
        amount = min(level - loads[rank], tokens[expert])
        if free[rank] > 1:
            # There is another slot to fill it up: no more is moved than is too much.
            amount = min(amount, loads[source] - level)
        copies[rank, expert] = amount
        tokens[expert] -= amount
        loads[source] -= amount
        loads[rank] += amount
        free[rank] -= 1
        for changed in (source, rank):
            heapq.heappush(most, (-loads[changed], changed))
            heapq.heappush(least, (loads[changed], changed))
    return _whose(counts, sorted((*place, amount) for place, amount in copies.items()))


def _least(
    least: list[tuple[int, int]],
    loads: list[int],
    free: list[int],
    level: int,
    refused: set[int],
) -> int | None:
    """Take the rank with least that has a slot and is not refused out of the heap, if there is one
    below the level."""
    kept, found = [], None
    while least and found is None:
        load, rank = heapq.heappop(least)
        if load >= level:
            break
        if load != loads[rank] or not free[rank]:
            continue
        if rank in refused:
            kept.append((load, rank))
        else:
            found = rank
    for entry in kept:
        heapq.heappush(least, entry)
    return found


def _whose(counts: Ints, copies: list[tuple[int, int, int]]) -> Plan:
    """Say whose tokens go to each copy: first those of its own rank, which do not move then, then
    those of the ranks that have most."""
    left = counts.copy()
    moved = np.zeros((len(copies), len(counts)), dtype=np.int64)
    for number, (rank, expert, amount) in enumerate(copies):
        have = left[:, expert]
        order = np.argsort(-have, kind="stable")
        order = np.concatenate(([rank], order[order != rank]))
        taken = np.minimum(np.cumsum(have[order]), amount)
        moved[number, order] = np.diff(taken, prepend=0)
        left[:, expert] -= moved[number]
    table = np.array(copies, dtype=np.int64).reshape(-1, 3)
    return Plan(table[:, 0], table[:, 1], moved)


def loads(made: Plan, counts: Ints) -> Ints:
    """Count the tokens that each rank computes."""
    ranks = len(counts)
    owner = np.arange(counts.shape[1]) // (counts.shape[1] // ranks)
    result = np.bincount(owner, counts.sum(0), ranks).astype(np.int64)
    amount = made.moved.sum(1)
    np.add.at(result, made.rank, amount)
    np.subtract.at(result, owner[made.expert], amount)
    return result


@attrs.frozen(eq=False)
class Route:
    """What one rank does under a plan."""

    rows: Ints
    """Its rows in the order in which they are sent, as places in the order of experts."""
    sent: list[int]
    """Rows to each rank: for its experts in order, then for its copies in order."""
    theirs: Ints
    """`[ranks, experts + copies here]`: rows that come from each rank for each."""
    lent: Ints
    """Experts of this rank, from 0, whose weights are sent, in order."""
    lent_to: list[int]
    """How many of them go to each rank."""
    borrowed_from: list[int]
    """How many copies come from each rank."""
    borrowed: Ints
    """Place of each copy here among those that come."""


def route(made: Plan, counts: Ints, index: int) -> Route:
    """Say what rank `index` sends, and what comes, under a plan."""
    ranks, experts = counts.shape
    local = experts // ranks
    owner = made.expert // local
    own = counts[index]
    first = np.cumsum(own) - own
    used = np.zeros(experts, dtype=np.int64)
    starts = np.empty(len(made.rank), dtype=np.int64)
    for number, expert in enumerate(made.expert):
        starts[number] = first[expert] + used[expert]
        used[expert] += made.moved[number, index]
    pieces, sent = [], []
    for rank in range(ranks):
        here = slice(rank * local, (rank + 1) * local)
        copies = made.rank == rank
        begin = np.concatenate(((first + used)[here], starts[copies]))
        size = np.concatenate(((own - used)[here], made.moved[copies, index]))
        pieces += [np.arange(b, b + n) for b, n in zip(begin, size, strict=True)]
        sent.append(int(size.sum()))
    mine = made.rank == index
    left = counts.copy()
    np.subtract.at(left.T, made.expert, made.moved)
    theirs = np.concatenate(
        (left[:, index * local : (index + 1) * local], made.moved[mine].T), axis=1
    )
    lent = owner == index
    order = np.argsort(owner[mine], kind="stable")
    return Route(
        rows=np.concatenate(pieces),
        sent=sent,
        theirs=theirs,
        lent=made.expert[lent] - index * local,
        lent_to=np.bincount(made.rank[lent], minlength=ranks).tolist(),
        borrowed_from=np.bincount(owner[mine], minlength=ranks).tolist(),
        borrowed=np.argsort(order, kind="stable"),
    )
