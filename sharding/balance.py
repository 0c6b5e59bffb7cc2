"""The plan of expert-parallel balance: which experts get a copy on which rank, for one layer.

Integers in, integers out: every rank makes the same plan from the same counts. To bring all ranks
to a level, those above it give tokens of their experts to the rank with least, which is filled up;
so each copy finishes a rank or an expert, and a rank that gave too much is filled in turn. The
lowest level that is reached is found by bisection.

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
    two of one; every copy has tokens; the largest load is never larger than without, and not
    always the least that is possible: `tests/test_balance.py` has how far from it.

    Raises:
        ValueError: the ranks do not divide the experts, or slots are below 0; says the numbers.
    """
    ranks, experts = counts.shape
    if experts % ranks:
        raise ValueError(f"experts={experts} are not a multiple of ranks={ranks}")
    if slots < 0:
        raise ValueError(f"slots={slots} is below 0")
    tokens = counts.sum(0)
    native = tokens.reshape(ranks, -1).sum(1).tolist()
    return _whose(counts, sorted(_copies(tokens.tolist(), native, slots)))


def _copies(tokens: list[int], native: list[int], slots: int) -> list[tuple[int, int, int]]:
    """List rank, expert and tokens of each copy, for the lowest level that is reached, to 0.1 %."""
    low, high = -(-sum(native) // len(native)), max(native)
    best: list[tuple[int, int, int]] = []
    level = low  # Mostly it is reached at once.
    while high - low > low // 1000:
        copies, most = _fill(tokens, native, slots, level, thrifty=False)
        if most < high:
            best, high = copies, most
        if most > level:
            low = level + 1
        level = (low + high) // 2
    copies, most = _fill(tokens, native, slots, high, thrifty=True)
    return copies if most <= high else best


def _fill(
    tokens: list[int], native: list[int], slots: int, level: int, *, thrifty: bool
) -> tuple[list[tuple[int, int, int]], int]:
    """Fill ranks up to a level until no other is above it, or no slot is left; list the copies
    and give the largest load then.

    The rank that has the largest expert gives first, for it takes the fewest slots, and of its
    experts the smallest that fills the other. The thrifty way moves fewer tokens, and fewer of the
    owner's own, and reaches fewer levels: the fullest rank gives first, of its largest expert, and
    not more than is too much while there is another slot to fill up.
    """
    ranks, local = len(native), len(tokens) // len(native)
    tokens, loads, free = tokens.copy(), native.copy(), [slots] * ranks

    def urgent(rank: int) -> int:
        return loads[rank] if thrifty else max(tokens[rank * local : (rank + 1) * local])

    # A rank is in one heap at most, and is above the level only until it gets its first copy: so
    # none gives what it was given, and none gets an expert twice.
    above = [(-urgent(rank), rank) for rank in range(ranks) if loads[rank] > level]
    below = [(loads[rank], rank) for rank in range(ranks) if loads[rank] < level and slots]
    heapq.heapify(above)
    heapq.heapify(below)
    copies = []
    while above and below:
        source, rank = heapq.heappop(above)[1], heapq.heappop(below)[1]
        room = level - loads[rank]
        own = tokens[source * local : (source + 1) * local]
        size = max(own)
        if size > room and not thrifty:
            size = min([size for size in own if size >= room])
        expert = source * local + own.index(size)
        amount = min(room, size)
        if thrifty and free[rank] > 1:
            amount = min(amount, loads[source] - level)
        copies.append((rank, expert, amount))
        tokens[expert] -= amount
        loads[source] -= amount
        loads[rank] += amount
        free[rank] -= 1
        if loads[source] > level:
            heapq.heappush(above, (-urgent(source), source))
        for changed in (source, rank):
            if loads[changed] < level and free[changed]:
                heapq.heappush(below, (loads[changed], changed))
    return copies, max(loads)


def _whose(counts: Ints, copies: list[tuple[int, int, int]]) -> Plan:
    """Say whose tokens go to each copy: as many as can be stay on their rank, at a copy or at the
    owner; of the others those of the first ranks go to the first copies."""
    rank, expert, amount = np.array(copies, dtype=np.int64).reshape(-1, 3).T
    ranks, experts = counts.shape
    owner = expert // (experts // ranks)
    alike = expert[:, None] == expert
    kept = np.minimum(amount, counts[rank, expert])
    stay = counts.sum(0)[expert] - alike @ amount
    left = counts.copy()
    left[rank, expert] -= kept
    # Assigned, not subtracted: an expert with two copies is listed twice.
    left[owner, expert] = np.maximum(counts[owner, expert] - stay, 0)
    # Of an expert's tokens that are left, in order of ranks, each copy takes the next it lacks.
    stop = left[:, expert].T.cumsum(1)
    start = stop - left[:, expert].T
    first = (np.tril(alike, -1) @ (amount - kept))[:, None]
    last = first + (amount - kept)[:, None]
    moved = np.maximum(np.minimum(stop, last) - np.maximum(start, first), 0)
    moved[np.arange(len(rank)), rank] += kept
    return Plan(rank, expert, moved)


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
