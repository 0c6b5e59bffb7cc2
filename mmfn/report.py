"""What a run leaves behind: one page with its curves, answers and config, which loads nothing."""

import base64
import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import attrs
from PIL import Image

from mmfn import files, log
from mmfn.log_text import number, share, size, span
from mmfn.report_curves import Chart, Line, figure
from mmfn.report_page import page

SIDE = 512
"""Longest side of a picture in the page, in pixels; larger ones are reduced."""
PICTURES = 8
"""Pictures of a sample that are shown; the others are counted."""


@attrs.frozen(eq=False)
class Shown:
    """A held-out sample and what the model made of it."""

    pictures: Sequence[Image.Image | bytes]
    """Pictures or frames; bytes are a file in any format that Pillow reads."""
    question: str
    expected: str
    answer: str
    """What the model said."""
    right: bool


def write(
    folder: Path,
    *,
    config: Mapping[str, Any],
    summary: Mapping[str, str | int | float],
    samples: Sequence[Shown] = (),
    title: str | None = None,
) -> Path:
    """Write `report.html` into a run folder from its `metrics.jsonl`, complete or not at all.

    Numbers of the summary become tiles, the first one stressed; texts follow in small. A name's
    ending is the unit: `_s`, `_bytes`, `_per_s`; `accuracy`, `share` and `mfu` are shares of one.
    Mappings within the config become groups. All text is shown as it is, never as markup.

    Raises:
        ValueError: there is no `metrics.jsonl`, or it is broken (names the line); a picture cannot
            be read (names the sample and the picture, from 0).
    """
    steps, evaluations = log.read(folder)
    name = title if title is not None else folder.resolve().name
    drawn = [figure(chart, f"chart-{i}") for i, chart in enumerate(charts(steps, evaluations))]
    curves = "".join(drawn) or '<p class="none">No step was logged.</p>'
    body = "\n".join(
        [
            f'<header><p class="kind">Training run</p><h1 dir="auto">{html.escape(name)}</h1>',
            f"{_summary(summary)}</header>",
            f'<section><h2>Curves</h2><div class="charts">{curves}</div></section>',
            _samples(samples),
            f'<section><h2>Config</h2><div class="config">{_config(config)}</div></section>',
        ]
    )
    path = folder / "report.html"
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    # A lone surrogate, as a broken file name gives, has no UTF-8.
    partial.write_bytes(page(name, body).encode("utf-8", "replace"))
    files.sync(partial)
    os.replace(partial, path)
    files.sync(folder)
    return path


def charts(
    steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]
) -> list[Chart]:
    """Choose the charts of a run: loss and held-out shares first, then what else was measured."""

    def line(name: str, key: str, scale: int | float = 1, *, smooth: bool = False) -> Line:
        values = [None if s[key] is None else s[key] / scale for s in steps]
        return Line(name, [s["step"] for s in steps], values, smooth=smooth)

    def measured(key: str, scale: int | float = 1) -> Line:
        at = [e for e in evaluations if key in e]
        values = [None if e[key] is None else e[key] / scale for e in at]
        name = key.removeprefix("eval/").replace("_", " ")
        return Line(name, [e["step"] for e in at], values, marks=len(at) <= 40)

    lost = [s["step"] for s in steps if "non_finite" in s]
    keys = list(dict.fromkeys(k for e in evaluations for k in e if k.startswith("eval/")))
    shares = [k for k in keys if k != "eval/loss" and _is_share(k, evaluations)]
    held_out = [attrs.evolve(measured(k), name="held-out") for k in keys if k == "eval/loss"]
    peak = max((s["memory_bytes"] or 0 for s in steps), default=0)
    memory, unit = (2**30, "GiB") if peak >= 2**30 else (2**20, "MiB")
    experts = []
    if any("load_max" in step for step in steps):
        experts = [
            Chart("Fullest expert", "x the mean", [line("worst layer", "load_max", smooth=True)]),
            Chart("Balance loss", "", [line("before its weight", "balance", smooth=True)]),
        ]
    return [
        Chart(
            "Loss", "nats a token", [line("training", "loss", smooth=True), *held_out], lost=lost
        ),
        *(
            Chart("Held-out", "%", [measured(key, 0.01) for key in some], zero=True)
            for some in (shares[i : i + 4] for i in range(0, len(shares), 4))
        ),
        *(
            Chart(f"Held-out {measured(key).name}", "", [measured(key)])
            for key in keys
            if key not in shares and key != "eval/loss"
        ),
        Chart("Learning rate", "", [line("rate", "lr")], zero=True),
        Chart("Gradient norm", "", [line("before clipping", "grad_norm", smooth=True)], lost=lost),
        Chart("Throughput", "tokens/s", [line("rate", "tokens_per_s", smooth=True)], zero=True),
        Chart(
            "Time of a step",
            "s",
            [line("all", "step_s", smooth=True), line("waiting for data", "data_wait_s")],
            zero=True,
        ),
        Chart("Memory", unit, [line("in use", "memory_bytes", memory)], zero=True),
        Chart("Model FLOPs utilisation", "%", [line("mfu", "mfu", 0.01, smooth=True)], zero=True),
        *experts,
    ]


def _is_share(key: str, evaluations: Sequence[Mapping[str, Any]]) -> bool:
    values = [e[key] for e in evaluations if e.get(key) is not None]
    return all(0 <= v <= 1 for v in values)


def _summary(summary: Mapping[str, str | int | float]) -> str:
    tiles = [(k, v) for k, v in summary.items() if not isinstance(v, str)]
    facts = [(k, v) for k, v in summary.items() if isinstance(v, str)]
    shown = "".join(
        f'<div><dt>{html.escape(_name(key))}</dt><dd title="{html.escape(str(value))}">'
        f"{html.escape(_tile(key, value))}</dd></div>"
        for key, value in tiles
    )
    said = "".join(
        f'<div><dt>{html.escape(_name(key))}</dt><dd dir="auto">{html.escape(value)}</dd></div>'
        for key, value in facts
    )
    rows = math.ceil(len(tiles) / 8) or 1
    columns = math.ceil(len(tiles) / rows) or 1
    return (
        f'<dl class="tiles" style="--columns: {columns}">{shown}</dl><dl class="facts">{said}</dl>'
    )


def _name(key: str) -> str:
    if key.endswith("_per_s"):
        return key.removesuffix("_per_s").replace("_", " ") + "/s"
    return key.removesuffix("_s").removesuffix("_bytes").replace("_", " ")


def _tile(key: str, value: int | float) -> str:
    if key.endswith(("accuracy", "share", "mfu")):
        return share(value)
    if key.endswith("_s") and not key.endswith("_per_s"):
        return span(value)
    if key.endswith("_bytes"):
        return size(value)
    for power, letter in ((10**9, "B"), (10**6, "M")):
        if abs(value) >= power:
            return f"{value / power:.2f} {letter}"
    return number(value)


def _samples(samples: Sequence[Shown]) -> str:
    if not samples:
        return ""
    wrong = sum(not sample.right for sample in samples)
    counts = {"all": len(samples), "right": len(samples) - wrong, "wrong": wrong}
    radios = "".join(
        f'<label><input type="radio" name="samples" class="{kind}"'
        f"{' checked' if kind == 'all' else ''}>{kind} {count}</label>"
        for kind, count in counts.items()
    )
    cards = "".join(card(sample, f"sample {i}") for i, sample in enumerate(samples))
    return (
        '<section class="shown"><div class="head"><h2>Held-out samples</h2>'
        f'<span class="switch" role="radiogroup" aria-label="samples shown">{radios}</span></div>'
        f'<div class="samples">{cards}</div></section>'
    )


def card(sample: Shown, where: str) -> str:
    """Draw one sample: pictures, question, both answers and the verdict; `where` names it."""
    pictures = "".join(
        _picture(picture, f"{where}, picture {i}")
        for i, picture in enumerate(sample.pictures[:PICTURES])
    )
    more = len(sample.pictures) - PICTURES
    pictures += f"<span>and {more} more</span>" if more > 0 else ""
    question, expected, answer = map(html.escape, (sample.question, sample.expected, sample.answer))
    verdict = "✓ right" if sample.right else "✗ wrong"
    return (
        f'<article class="sample {"is-right" if sample.right else "is-wrong"}">'
        f'<div class="pictures">{pictures}</div><div class="text">'
        f'<p class="question" dir="auto">{question}</p><dl>'
        f'<dt>Expected</dt><dd dir="auto">{expected}</dd>'
        f'<dt>Model</dt><dd dir="auto">{answer}</dd></dl>'
        f'<p class="verdict">{verdict}</p></div></article>'
    )


def _picture(picture: Image.Image | bytes, where: str) -> str:
    """Encode a picture anew, which leaves out what a file says besides (place, camera, author)."""
    try:
        image = Image.open(BytesIO(picture)) if isinstance(picture, bytes) else picture
        has_alpha = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
        image = image.convert("RGBA" if has_alpha else "RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{where} cannot be read: {error}") from error
    image.info.clear()
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    small = max(image.size) <= 96
    kind = "png" if small or has_alpha else "jpeg"
    file = BytesIO()
    image.save(file, kind, **({"quality": 88} if kind == "jpeg" else {"optimize": True}))
    data = base64.b64encode(file.getvalue()).decode()
    width, height = image.size
    style = ' class="small"' if small else ""
    return (
        f'<img{style} alt="{html.escape(where)}" width="{width}" height="{height}" loading="lazy"'
        f' src="data:image/{kind};base64,{data}">'
    )


def _config(config: Mapping[str, Any]) -> str:
    own = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    groups = [("run", own)] if own else []
    groups += [
        (key, dict(_flat(value))) for key, value in config.items() if isinstance(value, Mapping)
    ]
    return "".join(
        f"<section><h3>{html.escape(str(group))}</h3><dl>"
        + "".join(
            f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(_value(value))}</dd></div>"
            for key, value in values.items()
        )
        + "</dl></section>"
        for group, values in groups
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    return json.dumps(value) if isinstance(value, bool | None) else str(value)
