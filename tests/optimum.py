"""The smallest largest load that copies of experts can reach, by integer programming."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp


def optimum(counts: np.ndarray, slots: int) -> int:
    """Solve for copies `y[expert, rank]` (0 or 1) and tokens `t[expert, rank]` that move there."""
    ranks, experts = counts.shape
    local, tokens = experts // ranks, counts.sum(0)
    size = experts * ranks
    owner = np.arange(experts) // local
    native = np.bincount(owner, tokens, ranks)
    rows, least, most = [], [], []

    def bound(row: np.ndarray, low: float, high: float) -> None:
        rows.append(row)
        least.append(low)
        most.append(high)

    for expert in range(experts):
        total = np.zeros(2 * size + 1)
        for rank in range(ranks):
            place = expert * ranks + rank
            row = np.zeros(2 * size + 1)
            row[size + place], row[place] = 1, -int(tokens[expert])
            bound(row, -np.inf, 0)  # Tokens go where a copy is.
            total[size + place] = 1
        bound(total, 0, int(tokens[expert]))
    for rank in range(ranks):
        row = np.zeros(2 * size + 1)
        row[rank:size:ranks] = 1
        bound(row, 0, slots)
        row = np.zeros(2 * size + 1)
        row[size + rank : 2 * size : ranks] += 1
        for expert in np.flatnonzero(owner == rank):
            row[size + expert * ranks : size + (expert + 1) * ranks] -= 1
        row[-1] = -1
        bound(row, -np.inf, -native[rank])
    high = np.ones(2 * size + 1)
    high[size:] = tokens.sum()
    for expert in range(experts):
        high[expert * ranks + owner[expert]] = 0  # No copy beside the original.
    cost = np.zeros(2 * size + 1)
    cost[-1] = 1
    found = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), least, most),
        bounds=Bounds(0, high),
        integrality=np.ones(2 * size + 1),
        options={"time_limit": 20.0},
    )
    assert found.success, found.message
    return round(found.fun)
