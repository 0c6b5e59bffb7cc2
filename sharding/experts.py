"""Expert parallelism: tokens go to the ranks that hold the experts they chose, and come back.

Each is made for an axis, and is an `mmfn.experts.Experts`. `exchanged` sends each token to the
ranks that need it, as many rows as there are; `balanced` does so after copies of the experts that
have most were sent to ranks that have least; `gathered` gives every rank all tokens; `bounded`
sends as many rows to each rank whatever is routed, so that shapes are static.

Gradients are exact as they are: an expert sees the tokens of all ranks of the axis, losses are
sums, and so is the gradient of what it computes; nothing is divided by the number of ranks.

Source: Lepikhin et al. 2020, arXiv:2006.16668 (all-to-all); Gale et al. 2022, arXiv:2211.15841
(dropless).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from mmfn import ops as op
from mmfn import tree
from mmfn.experts import Apply, Experts, here
from mmfn.sharding import axes, balance
from mmfn.sharding.axes import Axis


@attrs.frozen(eq=False)
class _Sent:
    """Rows on their way: some tokens, and where their rows stand."""

    order: Tensor
    rows: Callable[[], Tensor]
    sent: list[int]
    got: list[int]
    number: Tensor
    """Which of the experts that are here each row that comes is for."""
    counts: Tensor
    """Rows of each expert that is here."""


def exchanged(axis: Axis, *, chunks: int = 1) -> Experts:
    """Send each token to the ranks of its experts; dropless.

    The numbers of rows are waited for on the host, once a layer. Tokens are taken in `chunks`
    parts: while one is computed the next is on its way.
    """
    if chunks < 1:
        raise ValueError(f"chunks={chunks} is below 1")
    return partial(_exchanged, axis=axis, chunks=chunks) if axis.size > 1 else here


def _exchanged(
    apply: Apply,
    weights: Any,
    x: Tensor,
    expert: Tensor,
    weight: Tensor,
    *,
    experts: int,
    ops: op.Ops,
    axis: Axis,
    chunks: int,
) -> tuple[Tensor, None]:
    parts = [torch.tensor_split(each, chunks) for each in (x, expert, weight)]
    sorts = [op.by_expert(part, experts) for part in parts[1]]
    table = torch.stack([counts for _, counts in sorts], 1).view(axis.size, -1, len(sorts))
    theirs = axes.all_to_all_plain(table, axis)
    # The one wait for the device: rows to and from each rank, of each part.
    sizes: Any = torch.stack((table.sum(1), theirs.sum(1))).permute(2, 0, 1).tolist()

    def start(n: int) -> _Sent:
        return _send(
            ops, parts[0][n], sorts[n][0], expert.shape[1], axis, theirs[..., n], *sizes[n]
        )

    ways, back = [start(0)], []
    for n in range(len(sorts)):
        if n + 1 < len(sorts):
            ways.append(start(n + 1))
        back.append(_compute(apply, weights, ways[n], ops, axis))
    results = [
        _receive(way, rows(), own, ops) for way, rows, own in zip(ways, back, parts[2], strict=True)
    ]
    return torch.cat(results), None


def _compute(
    apply: Apply, weights: Any, way: _Sent, ops: op.Ops, axis: Axis
) -> Callable[[], Tensor]:
    """Apply the experts that are here to the rows that came, and begin to send the results."""
    by = way.number.argsort(stable=True)
    y = apply(weights, ops.permute(way.rows(), by, 1), way.counts)
    return axes.send_rows(ops.permute(y, by.argsort(), 1), axis, way.got, way.sent)


def _receive(way: _Sent, y: Tensor, weight: Tensor, ops: op.Ops) -> Tensor:
    """Sum the results of each token's choices; those that are none were sent nowhere."""
    filled = torch.cat((y, y.new_zeros(len(way.order) - len(y), y.shape[1])))
    return ops.unpermute(filled, way.order, weight)


def _send(
    ops: op.Ops,
    x: Tensor,
    order: Tensor,
    choices: int,
    axis: Axis,
    theirs: Tensor,
    sent: list[int],
    got: list[int],
) -> _Sent:
    """Begin to send some tokens; `theirs[rank, expert]` rows come."""
    rows = ops.permute(x, order, choices)[: sum(sent)]
    number = torch.arange(theirs.shape[1], device=x.device).repeat(axis.size)
    return _Sent(
        order,
        axes.send_rows(rows, axis, sent, got),
        sent,
        got,
        number.repeat_interleave(theirs.flatten(), output_size=sum(got)),
        theirs.sum(0),
    )


def balanced(axis: Axis, *, slots: int) -> Experts:
    """Send each token as `exchanged` does, some of them to copies of experts on other ranks.

    Up to `slots` copies on a rank, planned anew in each layer by `mmfn.sharding.balance`. Their
    weights are sent before the tokens, and their gradients come back. The counts of all ranks are
    waited for on the host, once a layer.
    """
    if slots < 1:
        raise ValueError(f"slots={slots} is below 1")
    return partial(_balanced, axis=axis, slots=slots) if axis.size > 1 else here


def _balanced(
    apply: Apply,
    weights: Any,
    x: Tensor,
    expert: Tensor,
    weight: Tensor,
    *,
    experts: int,
    ops: op.Ops,
    axis: Axis,
    slots: int,
) -> tuple[Tensor, None]:
    order, counts = op.by_expert(expert, experts)
    # The one wait for the device: the counts of all ranks.
    every = axes.wait(axes.start_gather(counts, axis)).view(axis.size, experts).cpu().numpy()
    way = balance.route(balance.plan(every, slots), every, axis.index)

    def on_device(values: balance.Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(x.device)

    own, lent = tree.leaves(weights), on_device(way.lent)
    borrow = [
        axes.send_rows(leaf.flatten(1)[lent], axis, way.lent_to, way.borrowed_from) for leaf in own
    ]
    order = torch.cat((order[on_device(way.rows)], order[len(way.rows) :]))
    got = way.theirs.sum(1).tolist()
    sent = _send(ops, x, order, expert.shape[1], axis, on_device(way.theirs), way.sent, got)
    place = on_device(way.borrowed)
    both = [
        torch.cat((leaf, rows()[place].unflatten(1, leaf.shape[1:])))
        for leaf, rows in zip(own, borrow, strict=True)
    ]
    back = _compute(apply, tree.unflatten(weights, both), sent, ops, axis)
    return _receive(sent, back(), weight, ops), None


def gathered(axis: Axis) -> Experts:
    """Give every rank all tokens; each computes its experts, and the results are summed.

    Shapes are static and nothing is waited for; all ranks have as many tokens. It moves less than
    `exchanged` where a token has more choices than there are ranks.
    """
    return partial(_gathered, axis=axis) if axis.size > 1 else here


def _gathered(
    apply: Apply,
    weights: Any,
    x: Tensor,
    expert: Tensor,
    weight: Tensor,
    *,
    experts: int,
    ops: op.Ops,
    axis: Axis,
) -> tuple[Tensor, None]:
    length, local = len(x) * axis.size, experts // axis.size
    x = axes.all_gather(x, axis, 0, length)
    weight = axes.all_gather(weight, axis, 0, length)
    chosen = axes.all_gather(expert, axis, 0, length) - axis.index * local
    chosen = torch.where((chosen >= 0) & (chosen < local), chosen, local)
    # Those that are here come first: a token has no more of them than there are experts.
    chosen, place = chosen.sort(dim=1, stable=True)
    most = min(local, expert.shape[1])
    weight = weight.gather(1, place)[:, :most]
    y, _ = here(apply, weights, x, chosen[:, :most], weight, experts=local, ops=ops)
    return axes.reduce_scatter(y, axis, 0), None


def bounded(axis: Axis, *, room: float) -> Experts:
    """Send `room` times as many rows to each rank as an even routing would; static shapes.

    Choices beyond that are left out, and counted: whoever takes the step must not use it then. All
    ranks have as many tokens.
    """
    if not room > 0:
        raise ValueError(f"room={room} is not above 0")
    return partial(_bounded, axis=axis, room=room) if axis.size > 1 else here


def _bounded(
    apply: Apply,
    weights: Any,
    x: Tensor,
    expert: Tensor,
    weight: Tensor,
    *,
    experts: int,
    ops: op.Ops,
    axis: Axis,
    room: float,
) -> tuple[Tensor, Tensor]:
    order, counts = op.by_expert(expert, experts)
    size, local = math.ceil(room * len(order) / axis.size), experts // axis.size
    table = counts.view(axis.size, local)
    # Of each rank's rows the first `size` are sent; so of each expert's, what is left of them.
    before = table.cumsum(1) - table
    kept = (size - before).clamp(min=0).minimum(table)
    starts = table.sum(1).cumsum(0) - table.sum(1)
    place = torch.arange(size, device=x.device)
    at = starts[:, None] + place
    there = (place < kept.sum(1)[:, None]).flatten()
    rows = ops.permute(x, order, expert.shape[1])
    sent = torch.where(there[:, None], rows[at.flatten().clamp(max=len(order) - 1)], 0.0)

    theirs = axes.all_to_all_plain(kept, axis)
    got = axes.all_to_all(sent.unflatten(0, (axis.size, size)), axis, split=0, join=0).flatten(0, 1)
    number = (place[:, None] >= theirs.cumsum(1)[:, None]).sum(-1).flatten()
    by = number.argsort(stable=True)
    y = apply(weights, ops.permute(got, by, 1), theirs.sum(0))
    y = ops.permute(y, by.argsort(), 1).unflatten(0, (axis.size, size))
    y = axes.all_to_all(y, axis, split=0, join=0).flatten(0, 1)

    # Back from (rank, place) to rows in the order of experts.
    row = torch.arange(len(order), device=x.device)
    rank = (row[:, None] >= table.sum(1).cumsum(0)).sum(1).clamp(max=axis.size - 1)
    offset = row - starts[rank]
    valid = (offset < size) & (row < counts.sum())
    source = (rank * size + offset).clamp(max=len(y) - 1)
    y = torch.where(valid[:, None], y[source], 0.0)
    return ops.unpermute(y, order, weight), counts.sum() - kept.sum()
