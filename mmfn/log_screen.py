"""The progress of a run on the screen: live on a terminal, plain lines elsewhere."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mmfn.log_text import BARS, number, share, size, span

RECENT = 50
"""Steps over which the time left is estimated."""
REFRESH_S = 0.1
"""Shortest time between two frames of the live display, in seconds."""


@attrs.frozen
class Screen:
    """Where a run shows its progress."""

    step: Callable[[Mapping[str, Any]], None]
    evaluation: Callable[[int, Mapping[str, Any]], None]
    note: Callable[[str], None]


@contextmanager
def open_screen(
    total_steps: int,
    start: int,
    console: Console,
    every_s: int | float,
    clock: Callable[[], int | float],
) -> Iterator[Screen]:
    """Show progress on a console until the end, in the form that suits it."""
    recent: deque[tuple[int, int | float]] = deque([(start, clock())], maxlen=RECENT + 1)

    def left(step: int) -> int | float:
        """Estimate the seconds left, evaluations and checkpoints of late included."""
        recent.append((step, clock()))
        (first, then), (last, now) = recent[0], recent[-1]
        return (total_steps - step) * (now - then) / max(1, last - first)

    if console.is_terminal:
        with _live(total_steps, start, console, clock, left) as screen:
            yield screen
    else:
        yield _plain(total_steps, console, every_s, clock, left)


def _plain(
    total_steps: int,
    console: Console,
    every_s: int | float,
    clock: Callable[[], int | float],
    left: Callable[[int], int | float],
) -> Screen:
    printed: int | float | None = None

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(metrics: Mapping[str, Any]) -> None:
        nonlocal printed
        seconds, now, at = left(metrics["step"]), clock(), metrics["step"]
        if printed is None or now - printed >= every_s or at == total_steps:
            printed = now
            words = [f"step {at}/{total_steps}"]
            words += [f"{name} {value}" for name, value in facts(metrics)]
            say("  ".join([*words, f"left {span(seconds)}"]))

    return Screen(step, lambda at, metrics: say(evaluated(at, metrics)), say)


@contextmanager
def _live(
    total_steps: int,
    start: int,
    console: Console,
    clock: Callable[[], int | float],
    left: Callable[[int], int | float],
) -> Iterator[Screen]:
    losses: deque[int | float] = deque(maxlen=24)
    drawn: int | float = float("-inf")
    empty = Text(f"step {start}/{total_steps}: the first step is on its way", style="dim")
    # Drawn by the caller's thread: a thread of its own would be in the way of a fork.
    with Live(empty, console=console, auto_refresh=False) as live:

        def step(metrics: Mapping[str, Any]) -> None:
            nonlocal drawn
            seconds, now, at = left(metrics["step"]), clock(), metrics["step"]
            if metrics["loss"] is not None:
                losses.append(metrics["loss"])
            if now - drawn >= REFRESH_S or at == total_steps:
                drawn = now
                live.update(frame(metrics, total_steps, seconds, list(losses)), refresh=True)

        def say(text: str) -> None:
            live.console.print(text, markup=False, highlight=False)

        yield Screen(step, lambda at, metrics: say(evaluated(at, metrics)), say)


def frame(
    metrics: Mapping[str, Any],
    total_steps: int,
    seconds_left: int | float,
    losses: list[int | float],
) -> RenderableType:
    """Draw one frame of the live display: a bar, and what was measured last."""
    at = metrics["step"]
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(
        Text(f"step {at:,}/{total_steps:,}", style="bold"),
        ProgressBar(total=total_steps, completed=at),
        Text(f"{span(seconds_left)} left"),
    )
    values = [Text(f"{name} {value}", no_wrap=True) for name, value in facts(metrics)]
    return Group(bar, Columns([Text(sparkline(losses), style="cyan"), *values], padding=(0, 2)))


def facts(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and write what the screen says of a step."""
    waited = metrics["data_wait_s"], metrics["step_s"]
    known = None not in waited and waited[1] > 0
    said = [
        ("loss", number(metrics["loss"])),
        ("lr", number(metrics["lr"])),
        ("grad", number(metrics["grad_norm"])),
        ("tokens/s", number(metrics["tokens_per_s"])),
        ("mfu", share(metrics["mfu"])),
        ("data wait", share(waited[0] / waited[1]) if known else ""),
        ("memory", size(metrics["memory_bytes"])),
    ]
    if "load_max" in metrics:
        said.append(("fullest expert", f"{number(metrics['load_max'])} x the mean"))
    return [(name, value) for name, value in said if value]


def evaluated(step: int, metrics: Mapping[str, Any]) -> str:
    """Write an evaluation as one line."""
    return "  ".join([f"step {step}", *(f"{k} {number(v)}" for k, v in metrics.items())])


def sparkline(values: list[int | float]) -> str:
    """Draw finite values as bars of a text, the lowest as the lowest bar."""
    known = [v for v in values if abs(v) < float("inf")]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] for v in known)
