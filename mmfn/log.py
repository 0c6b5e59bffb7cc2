"""What a run says of itself: a line a step to the screen, to JSONL and to TensorBoard.

A run folder gets `metrics.jsonl`, `events.out.tfevents.*` and, if there are any, `notes.txt`. Lines
are JSON objects, one a step with the keys of `METRICS`, one an evaluation with `step` and keys that
start with `eval/`. JSON has no NaN: such a value is `null`, and its line then has the further key
`non_finite`, an object of the values that were meant: `{"loss": "nan"}`.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import attrs
from rich.console import Console

from mmfn import files, log_events, log_screen

Number: TypeAlias = int | float | None
"""A metric; `None` where there is nothing to say (no known peak, so no share of it)."""

METRICS: Mapping[str, str] = {
    "step": "steps done, this one included",
    "loss": "mean loss of the supervised tokens",
    "grad_norm": "global norm of the gradient before clipping",
    "lr": "learning rate",
    "tokens": "tokens read, padding left out",
    "supervised": "tokens with a target",
    "samples": "samples read",
    "tokens_per_s": "tokens / step_s",
    "mfu": "model FLOPs utilisation: share of the device's peak, recompute not counted",
    "data_wait_s": "seconds in which the step waited for its batch; part of step_s",
    "step_s": "seconds from the end of the step before to the end of this one",
    "memory_bytes": "bytes in use at its end",
}
"""The keys of a line of a step, in order, each of this step alone."""

EXPERTS: Mapping[str, str] = {
    "balance": "balance loss of the experts, before its weight: choices a token if all are equal",
    "load_max": "most tokens of an expert over the mean, in the layer where that is most",
    "load_idle": "experts without a token, in all layers",
    "left_out": "choices for which there was no room",
    "load": "tokens of each expert, all layers together",
}
"""Further keys of a model with experts; `load` is a list."""

FILE = "metrics.jsonl"


@attrs.frozen
class Log:
    """The three things that a run says."""

    step: Callable[[Mapping[str, Any]], None]
    """Write the metrics of a step: the keys of `METRICS`, and of `EXPERTS` if there are any; steps
    in increasing order."""
    evaluation: Callable[[int, Mapping[str, Number]], None]
    """Write metrics measured after so many steps, each called `eval/...`."""
    note: Callable[[str], None]
    """Say something of the run as a whole: to the screen, and with its time to `notes.txt`."""


@contextmanager
def open_log(
    folder: Path,
    total_steps: int,
    start: int = 0,
    *,
    main: bool = True,
    console: Console | None = None,
    every_s: int | float = 10.0,
    clock: Callable[[], int | float] = time.monotonic,
) -> Iterator[Log]:
    """Open the log of a run that goes on after `start` steps, and close it at the end.

    What the folder holds of later steps is cut off first (all of it at 0), so that a step has one
    line. On a terminal the display is live; elsewhere a line is printed every `every_s` seconds,
    and for the first and the last step. Where `main` is false metrics are checked, and nothing is
    written or shown.

    Raises:
        ValueError: `start` is not in [0, total_steps]; a line of `metrics.jsonl` is not what this
            module writes (names file and line); a metric is missing, unknown or no number, or its
            step is not after the last one (names the key, both steps).
    """
    if not 0 <= start <= total_steps:
        raise ValueError(f"start={start} is not in [0, total_steps={total_steps}]")
    last = start

    def checked(metrics: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal last
        line = step_line(metrics)
        if not last < line["step"] <= total_steps:
            raise ValueError(
                f"step {line['step']} does not follow step {last} of total_steps={total_steps}"
            )
        last = line["step"]
        return line

    if not main:
        yield Log(
            step=lambda metrics: _nothing(checked(metrics)),
            evaluation=lambda step, metrics: _nothing(evaluation_line(step, metrics)),
            note=_nothing,
        )
        return

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    cut(path, start)
    with ExitStack() as stack:
        lines = stack.enter_context(open(path, "a", encoding="utf-8"))
        events = stack.enter_context(log_events.open_events(folder, start))
        screen = stack.enter_context(
            log_screen.open_screen(total_steps, start, console or Console(), every_s, clock)
        )

        def write(line: dict[str, Any]) -> None:
            lines.write(json.dumps(line, allow_nan=False) + "\n")
            lines.flush()

        def step(metrics: Mapping[str, Any]) -> None:
            line = checked(metrics)
            write(line)
            curves = {k: v for k, v in metrics.items() if k != "step" and not isinstance(v, list)}
            events(line["step"], {f"train/{key}": value for key, value in curves.items()})
            screen.step(metrics)

        def evaluation(at: int, metrics: Mapping[str, Any]) -> None:
            write(evaluation_line(at, metrics))
            events(at, metrics)
            screen.evaluation(at, metrics)

        def note(text: str) -> None:
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            with open(folder / "notes.txt", "a", encoding="utf-8") as file:
                file.write(f"{now} step {last}: {text}\n")
            screen.note(text)

        yield Log(step=step, evaluation=evaluation, note=note)


def step_line(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Make the line of a step.

    Raises:
        ValueError: a key of `METRICS` is missing, another is there, or a value is no number.
    """
    if missing := [key for key in METRICS if key not in metrics]:
        raise ValueError(f"the metrics of a step lack {missing[0]!r}")
    if unknown := sorted(metrics.keys() - METRICS.keys() - EXPERTS.keys()):
        raise ValueError(
            f"no metric of a step is called {unknown[0]!r}; they are {', '.join(METRICS)}"
        )
    more = [key for key in EXPERTS if key in metrics]
    if type(metrics["step"]) is not int:
        raise ValueError(f"metric 'step' is {metrics['step']!r}, not a whole number")
    return _strict({key: metrics[key] for key in (*METRICS, *more)})


def evaluation_line(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Make the line of an evaluation after so many steps.

    Raises:
        ValueError: there is no metric, a key does not start with `eval/`, or a value is no number.
    """
    if not metrics:
        raise ValueError(f"the evaluation at step {step} has no metric")
    if wrong := [key for key in metrics if not key.startswith("eval/")]:
        raise ValueError(f"metric {wrong[0]!r} of an evaluation does not start with 'eval/'")
    return _strict({"step": step, **metrics})


def read(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Read `metrics.jsonl`: the lines of steps and the lines of evaluations, each in order.

    A last line that a crash cut short is left out; of two evaluations at one step the later counts.

    Raises:
        ValueError: the file is missing, or another line is not what this module writes.
    """
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    for line in _lines(path):
        (steps if "loss" in line else evaluations)[line["step"]] = line
    return [steps[key] for key in sorted(steps)], [evaluations[key] for key in sorted(evaluations)]


def cut(path: Path, start: int) -> None:
    """Leave the lines up to `start` steps in a file of metrics, and none at 0; no file is made.

    The file is the old or the new one at any time.
    """
    if not path.exists():
        return
    kept = [line for line in _lines(path) if start > 0 and line["step"] <= start]
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
    files.sync(partial)
    os.replace(partial, path)
    files.sync(path.parent)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    # What follows the last line end is empty, or was cut short by a crash.
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            line = json.loads(text, parse_constant=_refuse)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, is not JSON: {error}") from error
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            raise ValueError(f"{path}, line {number}, has no step: {text[:60]!r}")
        yield line


def _refuse(word: str) -> Any:
    raise ValueError(f"JSON has no {word}")


def _strict(line: dict[str, Any]) -> dict[str, Any]:
    """Replace what JSON cannot hold by null, and say it under `non_finite`."""
    lost = {}
    for key, value in line.items():
        if value is None or (key == "load" and isinstance(value, list)):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"metric {key!r} is a {type(value).__name__}, not a number")
        if not math.isfinite(value):
            lost[key] = str(float(value))
    return {**line, **dict.fromkeys(lost), "non_finite": lost} if lost else line


def _nothing(_: object) -> None:
    """Do nothing."""
