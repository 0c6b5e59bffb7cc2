"""Measure the planner of expert-parallel balance: loads before and after, its time, its gap.

    python tests/bench/balance.py

Routings are drawn by Zipf's law, or half of all tokens choose one expert; 64 ranks of 4,096 tokens
with 8 choices each. `greedy` is the known way as others describe it; ours takes from the rank that
has most now, moves no more than is too much while there is another slot, and keeps heaps. `moved`
is the share of all tokens that go to copies. The gap is that to the optimum by integer programming,
on 24 small cases. The last line is one JSON object; `plan_ms` is the longest of the least times, on
one thread.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from mmfn.sharding.balance import loads, plan

sys.path.insert(0, str(Path(__file__).parents[1]))
from optimum import optimum

RANKS, ROWS, SLOTS = 64, 4096 * 8, 2


def draw(kind: float | str, ranks: int, experts: int, rows: int, seed: int) -> np.ndarray:
    """Draw how many rows each rank sends to each expert."""
    random = np.random.default_rng(seed)
    if kind == "hot":
        share = np.full(experts, 0.5 / (experts - 1))
        share[experts // 3] = 0.5
    else:
        share = random.permutation(1 / np.arange(1, experts + 1) ** float(kind))
    return random.multinomial(rows, share / share.sum(), ranks).astype(np.int64)


def greedy(counts: np.ndarray, slots: int) -> int:
    """Give the largest load that the known way reaches."""
    ranks, experts = counts.shape
    local = experts // ranks
    tokens = counts.sum(0).astype(float)
    load = tokens.reshape(ranks, local).sum(1)
    native, free = load.copy(), np.full(ranks, slots)
    mean, there = load.mean(), set()
    while load.max() - load.min() > 1:
        source = int(native.argmax())
        expert = source * local + int(tokens[source * local : (source + 1) * local].argmax())
        open_ranks = np.where(free > 0, load, np.inf)
        open_ranks[source] = np.inf
        to = int(open_ranks.argmin())
        if not np.isfinite(open_ranks[to]):
            break
        amount = min(mean - load[to], tokens[expert])
        if load[to] >= mean:
            amount = min((load[to] + load[source]) / 2 - load[to], tokens[expert])
        amount = int(amount)
        if amount <= 0 or (to, expert) in there:
            break
        there.add((to, expert))
        tokens[expert] -= amount
        native[source] -= amount
        load[source] -= amount
        load[to] += amount
        free[to] -= 1
    return round(load.max())


def gaps(slots: int) -> tuple[list[float], list[float]]:
    """Compare with the optimum on small cases: ours, and the known way's."""
    ours, known = [], []
    for ranks, local in ((4, 2), (3, 4)):
        for seed, power in enumerate((0.5, 1.0, 1.5) * 4):
            counts = draw(power, ranks, ranks * local, 400, seed)
            best = optimum(counts, slots)
            ours.append(loads(plan(counts, slots), counts).max() / best - 1)
            known.append(greedy(counts, slots) / best - 1)
    return ours, known


def main() -> None:
    """Measure, print."""
    report: dict[str, object] = {}
    slowest = 0.0
    print("experts  skew  max/mean  after (greedy)  after (ours)  moved  copies  plan ms")
    for experts in (128, 512):
        for kind in (0.5, 1.0, 1.5, "hot"):
            counts = draw(kind, RANKS, experts, ROWS, 0)
            times = []
            for _ in range(20):
                start = time.perf_counter()
                made = plan(counts, SLOTS)
                times.append(1e3 * (time.perf_counter() - start))
            before = counts.sum(0).reshape(RANKS, -1).sum(1)
            mean = before.mean()
            row = {
                "before": before.max() / mean,
                "greedy": greedy(counts, SLOTS) / mean,
                "after": loads(made, counts).max() / mean,
                "moved": made.moved.sum() / counts.sum(),
                "plan_ms": min(times),
            }
            print(
                f"{experts:7}  {kind!s:>4}  {row['before']:8.3f}  {row['greedy']:14.4f}  "
                f"{row['after']:12.4f}  {row['moved']:5.3f}  {len(made.rank):6}  "
                f"{row['plan_ms']:7.2f}"
            )
            report[f"{experts} {kind}"] = {key: round(float(v), 4) for key, v in row.items()}
            slowest = max(slowest, min(times))
    for slots in (1, 2):
        ours, known = gaps(slots)
        print(
            f"gap to the optimum, {slots} slots: ours {np.mean(ours):.4f} in the mean, "
            f"{max(ours):.4f} at most; greedy {np.mean(known):.4f} and {max(known):.4f}"
        )
        report[f"gap {slots}"] = {
            "mean": round(float(np.mean(ours)), 4),
            "most": round(max(ours), 4),
        }
    report["plan_ms"] = round(slowest, 3)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
