"""A training step as a pure function: `step(state, batches) -> (state, metrics)`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmfn import optim, rng, tree
from mmfn.transforms import accumulate, value_and_grad
from mmfn.tree import pytree


@pytree
class TrainState:
    """Everything that a run carries from step to step."""

    params: Any
    """The weights that are trained."""
    frozen: Any
    """The others, in the same classes; `None` where all are trained."""
    optimizer: Any
    """State of the optimizer."""
    step: Tensor
    """Steps done, int64; a step whose update was skipped counts."""
    seed: Tensor
    """Seed of the random numbers of the run, int64: they are functions of it and the step."""


def start(
    params: Any, optimizer: optim.Optimizer, *, frozen: Any = None, seed: int = 0
) -> TrainState:
    """Make the state before the first step."""
    flat = tree.leaves(params)
    if not flat:
        raise ValueError("there is no weight to train; every one is frozen")
    device = flat[0].device
    return TrainState(
        params=params,
        frozen=frozen,
        optimizer=optimizer.init(params),
        step=torch.zeros((), dtype=torch.int64, device=device),
        seed=torch.tensor(seed, dtype=torch.int64, device=device),
    )


def make_step(
    loss: Callable[..., Any],
    optimizer: optim.Optimizer,
    *,
    norm: Callable[[Any], Tensor] = optim.global_norm,
    reduce: Callable[[Any, Any], tuple[Any, Any]] = lambda value, grads: (value, grads),
    prepare: Callable[[Any, Sequence[Any]], Any] | None = None,
    report: Callable[[Any], dict[str, Tensor]] = lambda more: {},
    random: bool = False,
    donate: bool = True,
) -> Callable[[TrainState, Sequence[Any]], tuple[TrainState, dict[str, Tensor]]]:
    """Make the step of an optimizer over the micro-batches of `loss(params, batch)`.

    Losses are summed: each is divided already by the count of the whole step. If the gradient
    norm is not finite nothing but `step` changes, and the metric `skipped` is 1: whoever runs the
    loop decides what follows. With `donate` the given state is written into and must not be used
    again. Nothing in a step waits for the device. On a mesh, `reduce` makes of the loss and
    gradients of this rank those of all, once a step, and `norm` counts each value once.

    A loss may give a pair, its value and a tree of numbers, which are summed as it is and which
    `report` makes metrics of; the update is skipped too where its `left_out` is not 0. What all
    micro-batches have to know of each other `prepare(params, batches)` says, without gradients:
    `loss` takes it as a third argument. With `random` it takes a `key` too, int64, which is another
    for each micro-batch: a function of seed, step and place.
    """

    def objective(params: Any, read: tuple[Any, Any], frozen: Any, known: tuple[Any, ...]) -> Any:
        batch, key = read
        whole = params if frozen is None else tree.combine(params, frozen)
        out = loss(whole, batch, *known, **({"key": key} if random else {}))
        return out if isinstance(out, tuple) else (out, None)

    total = accumulate(value_and_grad(objective, more=True))

    def step(state: TrainState, batches: Sequence[Any]) -> tuple[TrainState, dict[str, Tensor]]:
        known: tuple[Any, ...] = ()
        if prepare is not None:
            with torch.no_grad():
                own = state.params
                whole = own if state.frozen is None else tree.combine(own, state.frozen)
                known = (prepare(whole, batches),)
        keys = rng.bits(
            rng.bits(state.seed, state.step), torch.arange(len(batches), device=state.step.device)
        )
        reads = list(zip(batches, keys, strict=True))
        (value, more), grads = reduce(*total(state.params, reads, state.frozen, known))
        measured = optim.gradients(grads, norm)
        told = {} if more is None else report(more)
        if "left_out" in told:
            lost = (told["left_out"] > 0).to(measured.skip.dtype)
            measured = tree.evolve(measured, skip=torch.maximum(measured.skip, lost))
        rate = optimizer.rate(state.optimizer)
        params, moments = optimizer.update(measured, state.optimizer, state.params, donate=donate)
        metrics = {
            "loss": value,
            "grad_norm": measured.norm,
            "lr": rate,
            "skipped": measured.skip,
            **told,
        }
        return tree.evolve(state, params=params, optimizer=moments, step=state.step + 1), metrics

    return step
