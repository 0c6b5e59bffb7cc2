"""A training step as a pure function: `step(state, batches) -> (state, metrics)`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmfn import optim, tree
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
    loss: Callable[[Any, Any], Tensor],
    optimizer: optim.Optimizer,
    *,
    norm: Callable[[Any], Tensor] = optim.global_norm,
    reduce: Callable[[Tensor, Any], tuple[Tensor, Any]] = lambda value, grads: (value, grads),
    donate: bool = True,
) -> Callable[[TrainState, Sequence[Any]], tuple[TrainState, dict[str, Tensor]]]:
    """Make the step of an optimizer over the micro-batches of `loss(params, batch)`.

    Losses are summed: each is divided already by the count of the whole step. If the gradient
    norm is not finite nothing but `step` changes, and the metric `skipped` is 1: whoever runs the
    loop decides what follows. With `donate` the given state is written into and must not be used
    again. Nothing in a step waits for the device. On a mesh, `reduce` makes of the loss and
    gradients of this rank those of all, once a step, and `norm` counts each value once.
    """

    def objective(params: Any, batch: Any, frozen: Any) -> Tensor:
        return loss(params if frozen is None else tree.combine(params, frozen), batch)

    total = accumulate(value_and_grad(objective))

    def step(state: TrainState, batches: Sequence[Any]) -> tuple[TrainState, dict[str, Tensor]]:
        value, grads = reduce(*total(state.params, batches, state.frozen))
        measured = optim.gradients(grads, norm)
        rate = optimizer.rate(state.optimizer)
        params, own = optimizer.update(measured, state.optimizer, state.params, donate=donate)
        metrics = {
            "loss": value,
            "grad_norm": measured.norm,
            "lr": rate,
            "skipped": measured.skip,
        }
        return tree.evolve(state, params=params, optimizer=own, step=state.step + 1), metrics

    return step
