"""The loop of a run: steps, what is said of them, evaluations, checkpoints, and how it ends."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal

import attrs
from torch import Tensor

from mmfn.data.loader import Step
from mmfn.log import EXPERTS, Log


@attrs.frozen
class Every:
    """How often something is done besides steps; 0 is never. The end of a run is not in it."""

    evaluate: int
    save: int


@attrs.frozen
class Actions:
    """What the loop does with a state: functions that a recipe gives."""

    evaluate: Callable[[Any, int], object]
    """Measures after so many steps, and logs it."""
    save: Callable[[Any, int], None]
    """Writes a checkpoint after so many steps."""
    flops: Callable[[Step], float]
    """Floating-point operations of a step's forward and backward, recompute not counted."""
    memory: Callable[[], int]
    """Bytes in use."""


@contextmanager
def interruption() -> Iterator[Callable[[], int]]:
    """Catch Ctrl-C and SIGTERM: gives a function that says which signal came, 0 for none.

    The first asks the run to stop after its step; a second Ctrl-C breaks off at once.
    """
    seen = [0]

    def note(number: int, frame: FrameType | None) -> None:
        if seen[0] and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen[0] = number

    before = {kind: signal.signal(kind, note) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: seen[0]
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def fit(
    step: Callable[[Any, Any], tuple[Any, dict[str, Tensor]]],
    state: Any,
    steps: Iterator[Step],
    *,
    done: int,
    total: int,
    log: Log,
    actions: Actions,
    every: Every,
    on_nonfinite: Literal["stop", "skip"],
    peak: float | None,
    place: Callable[[Any], Any],
    stopping: Callable[[], int],
) -> tuple[Any, int]:
    """Take the steps that are left after `done`; gives the last state and how many are done.

    `peak` is the device's rate in floating-point operations a second, `place` brings a batch to
    it. When `stopping()` is not 0 the loop ends after the step under way. The state is saved at
    the end, however early.

    Raises:
        FloatingPointError: a gradient was not finite and `on_nonfinite` is stop; the state, which
            that step did not touch, is saved first.
        ValueError: choices of experts were left out; so here.
    """
    saved = done
    begin = time.perf_counter()
    for read in steps:
        done = read.index + 1
        waited = time.perf_counter() - begin
        for problem in read.problems:
            log.note(f"skipped {problem}")
        state, metrics = step(state, tuple(place(batch) for batch in read.batches))
        # The one wait for the device: the numbers of the step.
        values = {name: value.tolist() for name, value in metrics.items()}
        end = time.perf_counter()
        seconds, begin = end - begin, end
        log.step(
            {
                "step": done,
                "loss": values["loss"],
                "grad_norm": values["grad_norm"],
                "lr": values["lr"],
                "tokens": read.counts.tokens,
                "supervised": read.counts.supervised,
                "samples": read.counts.samples,
                "tokens_per_s": read.counts.tokens / seconds,
                "mfu": None if peak is None else actions.flops(read) / seconds / peak,
                "data_wait_s": waited,
                "step_s": seconds,
                "memory_bytes": actions.memory(),
                **{key: values[key] for key in EXPERTS if key in values},
            }
        )
        if values.get("left_out"):
            actions.save(state, done)
            raise ValueError(
                f"{values['left_out']:.0f} choices of experts found no room in step {done}; the "
                f"weights are as before it (--sharding.room, or other --sharding.experts)"
            )
        if values["skipped"]:
            text = f"the gradient of step {done} is not finite; the weights are as before it"
            if on_nonfinite == "stop":
                actions.save(state, done)
                raise FloatingPointError(f"{text} (--train.on-nonfinite=skip goes on)")
            log.note(text)
        if every.save and done % every.save == 0 and done < total:
            actions.save(state, done)
            saved = done
        if stopping():
            break
        if every.evaluate and done % every.evaluate == 0 and done < total:
            actions.evaluate(state, done)
        # Saving and measuring are no part of the next step.
        begin = time.perf_counter()
    if saved != done:
        actions.save(state, done)
    return state, done
