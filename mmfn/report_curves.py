"""The curves of a report: SVG in place, stretched to any width, with its text as HTML beside it.

Everything is drawn in a square of 1000 units that the page stretches; strokes and text do not
stretch. What the script needs to read values out stands as JSON in each figure.
"""

import html
import json
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import attrs

from mmfn.log_text import number

Value: TypeAlias = int | float | None
Span: TypeAlias = tuple[int | float, int | float]

POINTS = 400
"""Points of a curve in the page; longer curves show the range of each stretch, and its mean."""
CHOICE = 4.0
"""Ratio of largest to smallest value from which a logarithmic axis is offered."""
LOG = 25.0
"""Ratio from which it is the one shown first."""


@attrs.frozen
class Line:
    """Values over steps; `None` where there is none."""

    name: str
    steps: Sequence[int]
    values: Sequence[Value]
    smooth: bool = False
    """Whether a running mean is drawn, with the values themselves faint behind it."""
    marks: bool = False
    """Whether each value has a dot."""


@attrs.frozen
class Chart:
    """Up to four lines in one frame."""

    title: str
    unit: str
    lines: Sequence[Line]
    zero: bool = False
    """Whether the axis starts at zero."""
    lost: Sequence[int] = ()
    """Steps marked below, where a value was not finite."""


def figure(chart: Chart, name: str) -> str:
    """Draw a chart as an HTML figure; `name` is its id in the page. Nothing without any value.

    Raises:
        ValueError: there are more lines than colours; names the chart.
    """
    if len(chart.lines) > 4:
        raise ValueError(
            f"chart {chart.title!r} has {len(chart.lines)} lines, and there are 4 colours"
        )
    lines = [line for line in chart.lines if any(v is not None for v in line.values)]
    if not lines:
        return ""
    steps = [s for line in lines for s in line.steps] + list(chart.lost)
    across = (
        (min(steps), max(steps)) if min(steps) < max(steps) else (min(steps) - 1, max(steps) + 1)
    )
    values = [v for line in lines for v in line.values if v is not None]
    choice = min(values) > 0 and max(values) / min(values) >= CHOICE and not chart.zero
    first_log = choice and max(values) / min(values) >= LOG
    plots = [_plot(chart, lines, across, _nice(min(values), max(values), chart.zero), log=False)]
    if choice:
        plots.append(_plot(chart, lines, across, (min(values), max(values)), log=True))
    data = [_read_out(line) for line in lines]
    unit = f" <small>{html.escape(chart.unit)}</small>" if chart.unit else ""
    keys = "".join(
        f'<span class="key c{i}"><i></i>{html.escape(line.name)} '
        f"<output>{html.escape(_last(line))}</output></span>"
        for i, line in enumerate(lines)
    )
    return (
        f'<figure class="chart" id="{html.escape(name)}">'
        f"<figcaption><h3>{html.escape(chart.title)}{unit}</h3>"
        f'<span class="at"></span>{_switch(name, first_log) if choice else ""}'
        f'<p class="keys">{keys}</p></figcaption>'
        f'{"".join(plots)}<script type="application/json">{_json(data)}</script></figure>'
    )


def ticks(low: int | float, high: int | float, count: int) -> list[float]:
    """Give round numbers from low to high, about `count` of them, 1, 2 or 5 times a power of ten.

    >>> ticks(0, 1000, 5), ticks(0.0, 0.7, 4)
    ([0.0, 200.0, 400.0, 600.0, 800.0, 1000.0], [0.0, 0.2, 0.4, 0.6])
    """
    step = _round_step((high - low) / count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: int | float, high: int | float) -> list[float]:
    """Give powers of ten from low to high, at most six; over less than two, also 2 and 5 times.

    >>> log_ticks(0.02, 1.0), log_ticks(1e-5, 1e3)
    ([0.02, 0.05, 0.1, 0.2, 0.5, 1.0], [0.0001, 0.01, 1.0, 100.0])
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    inside = math.log10(high / low)
    parts = (1, 2, 5) if inside < 2 else (1,)
    every = max(1, math.ceil(inside / 6))
    powers = [p for p in range(first, last + 1) if p % every == 0]
    found = [float(f"{part}e{power}") for power in powers for part in parts]
    return [t for t in found if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)]


def smoothed(values: Sequence[Value]) -> list[Value]:
    """Average over a window of a thirtieth of the curve around each value, less near the ends.

    The window is centred, so the mean neither lags nor misses the first and the last value.
    """
    total, count = [0.0], [0]
    for value in values:
        total.append(total[-1] + (value or 0.0))
        count.append(count[-1] + (value is not None))
    half, means = len(values) // 60, list[Value]()
    for i, value in enumerate(values):
        reach = min(half, i, len(values) - 1 - i)
        inside = count[i + reach + 1] - count[i - reach]
        sum_inside = total[i + reach + 1] - total[i - reach]
        means.append(sum_inside / inside if value is not None and inside else None)
    return means


def _plot(chart: Chart, lines: Sequence[Line], across: Span, up: Span, *, log: bool) -> str:
    """Draw the lines in one frame: grid, curves, texts of the axes, what the read-out moves."""

    def x(step: int | float) -> float:
        return round(1000 * (step - across[0]) / (across[1] - across[0]), 1)

    def y(value: int | float) -> float:
        if log:
            return round(1000 * math.log(up[1] / value) / math.log(up[1] / up[0]), 1)
        return round(1000 * (up[1] - value) / (up[1] - up[0]), 1)

    marks = log_ticks(*up) if log else ticks(*up, 5)
    grid = "".join(f'<path class="grid" d="M0 {y(t)}H1000"/>' for t in marks)
    curves = "".join(_curve(line, f"c{i}", x, y) for i, line in enumerate(lines))
    texts = "".join(
        f'<span class="y" style="top:{y(t) / 10:.2f}%">{_tick(t)}</span>' for t in marks
    )
    whole = [t for t in ticks(*across, 5) if t == int(t) and across[0] <= t <= across[1]]
    texts += "".join(
        f'<span class="x" style="left:{x(t) / 10:.2f}%">{number(int(t))}</span>' for t in whole
    )
    texts += "".join(
        f'<span class="lost" style="left:{x(s) / 10:.2f}%" title="not finite at step {s}"></span>'
        for s in chart.lost[:: max(1, len(chart.lost) // 100)]
    )
    dots = "".join(f'<b class="dot c{i}" hidden></b>' for i in range(len(lines)))
    return (
        f'<div class="plot {"log" if log else "linear"}" tabindex="0" role="img"'
        f' aria-label="{html.escape(_spoken(chart, lines))}" data-log="{int(log)}"'
        f' data-x="{across[0]} {across[1]}" data-y="{up[0]!r} {up[1]!r}">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{grid}{curves}'
        f'</svg>{texts}<hr class="cursor" hidden>{dots}</div>'
    )


def _curve(line: Line, colour: str, x: Any, y: Any) -> str:
    stretches = _stretches(line)
    drawn = ""
    if line.smooth or len(line.steps) > POINTS:
        faint = "faint" if len(line.steps) <= POINTS else "band"
        for part in _parts(stretches):
            there = " ".join(f"{x(s)} {y(high)}" for s, _, _, high in part)
            back = " ".join(f"{x(s)} {y(low)}" for s, _, low, _ in reversed(part))
            path = f"M{there}" if faint == "faint" else f"M{there} {back}Z"
            drawn += f'<path class="{faint} {colour}" d="{path}"/>'
    for part in _parts(stretches):
        points = " ".join(f"{x(s)} {y(mean)}" for s, mean, _, _ in part)
        drawn += f'<path class="line {colour}" d="M{points}"/>'
        if line.marks or len(part) == 1:
            dots = "".join(f"M{x(s)} {y(mean)}h0" for s, mean, _, _ in part)
            drawn += f'<path class="mark {colour}" d="{dots}"/>'
    return drawn


def _stretches(line: Line) -> list[tuple[int, Value, Value, Value]]:
    """Cut a curve in at most POINTS stretches: last step, mean (or smoothed value), low, high."""
    means = smoothed(line.values) if line.smooth else list(line.values)
    count = len(line.steps)
    found: list[tuple[int, Value, Value, Value]] = []
    for i in range(min(count, POINTS)):
        start, stop = i * count // min(count, POINTS), (i + 1) * count // min(count, POINTS)
        known = [v for v in line.values[start:stop] if v is not None]
        inside = [v for v in means[start:stop] if v is not None]
        if known:
            mean = sum(inside) / len(inside)
            found.append((line.steps[stop - 1], mean, min(known), max(known)))
        else:
            found.append((line.steps[stop - 1], None, None, None))
    return found


def _parts(stretches: list[tuple[int, Value, Value, Value]]) -> list[list[tuple[Any, ...]]]:
    """Cut where there is no value."""
    parts: list[list[tuple[Any, ...]]] = [[]]
    for stretch in stretches:
        if stretch[1] is None:
            parts.append([])
        else:
            parts[-1].append(stretch)
    return [part for part in parts if part]


def _read_out(line: Line) -> dict[str, Any]:
    found = _stretches(line)
    return {
        "steps": [step for step, _, _, _ in found],
        "values": [None if mean is None else float(f"{mean:.6g}") for _, mean, _, _ in found],
        "texts": ["not finite" if mean is None else number(mean) for _, mean, _, _ in found],
    }


def _nice(low: int | float, high: int | float, zero: bool) -> Span:
    """Widen a range to round numbers."""
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    if high == low:
        low, high = (low if zero else low - (abs(low) / 2 or 1)), high + (abs(high) / 2 or 1)
    step = _round_step((high - low) / 5)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(f for f in (1, 2, 5, 10) if f * power >= rough * (1 - 1e-9)) * power


def _tick(value: float) -> str:
    """Write a round number; those from 0.0001 in full, so that one axis has one form."""
    return f"{value:g}" if 1e-4 <= abs(value) < 1000 else number(value)


def _last(line: Line) -> str:
    return next(number(v) for v in reversed(_read_out(line)["values"]) if v is not None)


def _spoken(chart: Chart, lines: Sequence[Line]) -> str:
    """Say a chart for those who do not see it."""
    said = []
    for line in lines:
        known = [(s, v) for s, v in zip(line.steps, line.values, strict=True) if v is not None]
        (first, a), (last, b) = known[0], known[-1]
        said.append(f"{line.name} from {number(a)} at step {first} to {number(b)} at step {last}")
    return f"{chart.title}: " + "; ".join(said)


def _switch(name: str, first_log: bool) -> str:
    radios = "".join(
        f'<label><input type="radio" name="{html.escape(name)}-scale" class="{kind}"'
        f"{' checked' if (kind == 'log') == first_log else ''}>{kind}</label>"
        for kind in ("linear", "log")
    )
    return f'<span class="switch" role="radiogroup" aria-label="scale">{radios}</span>'


def _json(value: Any) -> str:
    """Write JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
