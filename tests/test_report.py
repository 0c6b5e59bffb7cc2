"""The page that a run leaves behind."""

import base64
import hashlib
import io
import json
import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from mmfn import log, report
from mmfn.report_curves import POINTS, Chart, Line, figure, log_ticks, smoothed, ticks

VOID = {"meta", "img", "input", "hr"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; refuses tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        """Read a whole page or a part of one."""
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag of SVG that closes itself."""
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """Check that the last open tag is closed."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Note a text and the tag it stands in."""
        if self.open:
            self.texts.append((self.open[-1], data))

    def all(self, tag: str, kind: str | None = None) -> list[dict[str, str | None]]:
        """Give the attributes of all tags of a name, or those of a class."""
        found = [attrs for name, attrs in self.tags if name == tag]
        return [a for a in found if kind is None or kind in (a.get("class") or "").split()]

    def text(self, tag: str) -> list[str]:
        """Give the texts that stand directly in tags of a name."""
        return [text for name, text in self.texts if name == tag]


def logged(folder: Path, steps: int, lost: Sequence[int] = ()) -> Path:
    """Log a run of some steps whose loss halves, with an evaluation after each second."""
    with log.open_log(folder, steps, console=Console(file=io.StringIO())) as it:
        for step in range(1, steps + 1):
            it.step(
                {
                    "step": step,
                    "loss": math.nan if step in lost else 2.0 ** (1 - step / 2),
                    "grad_norm": 1.0,
                    "lr": 1e-3,
                    "tokens": 100,
                    "supervised": 10,
                    "samples": 4,
                    "tokens_per_s": 400.0,
                    "mfu": None,
                    "data_wait_s": 0.01,
                    "step_s": 0.25,
                    "memory_bytes": 2**30,
                }
            )
            if step % 2 == 0:
                it.evaluation(step, {"eval/accuracy": step / steps, "eval/loss": 1 / step})
    return folder


def made(folder: Path, **options: Any) -> tuple[str, Page]:
    """Write a report of a run of ten steps, and read it."""
    if not (folder / log.FILE).exists():
        logged(folder, 10)
    path = report.write(folder, **{"config": {}, "summary": {}, **options})
    text = path.read_text("utf-8")
    return text, Page(text)


def picture(side: int = 8, mode: str = "RGB") -> Image.Image:
    """Make a picture that is half dark, half light."""
    image = Image.new(mode, (side, side))
    image.paste(Image.new(mode, (side // 2, side), "white"), (0, 0))
    return image


def shown(**changes: Any) -> report.Shown:
    """Make a sample that was answered rightly."""
    whole = {
        "pictures": [picture()],
        "question": "Which half is light?",
        "expected": "the left",
        "answer": "the left",
        "right": True,
        **changes,
    }
    return report.Shown(**whole)


def test_the_page_loads_nothing_and_runs_its_own_script_only(tmp_path: Path) -> None:
    """By its policy, whatever stands in it; and nothing in it would be stopped by the policy."""
    text, page = made(tmp_path, samples=[shown()])
    policy = next(m["content"] for m in page.all("meta") if "http-equiv" in m) or ""
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert len(scripts) == 1
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; img-src data:")
    assert page.all("link") == page.all("iframe") == page.all("a") == []
    for _, attrs in page.tags:
        assert (attrs.get("src") or "data:image/").startswith("data:image/")
        assert not any(name.startswith("on") for name in attrs)
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text


ATTACK = "</script></title></style>\"'><script>alert(1)</script><img src=x onerror=alert(1)>&lt;"


def test_text_is_shown_and_never_taken_as_markup(tmp_path: Path) -> None:
    """In every place where a caller's text goes."""
    sample = shown(question=ATTACK + "q", expected=ATTACK + "e", answer=ATTACK + "a")
    with log.open_log(tmp_path, 2, console=Console(file=io.StringIO())) as it:
        it.evaluation(1, {f"eval/{ATTACK}": 0.5, f"eval/{ATTACK}2": 7.0})
    text, page = made(
        tmp_path,
        samples=[sample],
        title=ATTACK,
        config={ATTACK: ATTACK, "group": {ATTACK: ATTACK}, ATTACK + "g": {"a": 1}},
        summary={ATTACK: 1, ATTACK + "t": ATTACK},
    )
    _, plain = made(logged(tmp_path / "plain", 2), samples=[shown()])
    assert "<script>alert" not in text
    assert "onerror=alert(1)>" not in text
    assert len(page.all("img")) == len(plain.all("img")) == 1
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in plain.tags} | {"section", "div"}
    assert page.text("h1") == page.text("title") == [ATTACK]
    assert ATTACK + "q" in page.text("p")
    assert {ATTACK + "e", ATTACK + "a"} < set(page.text("dd"))


@given(st.text())
def test_any_text_is_given_back_by_a_parser(text: str) -> None:
    """But for line ends, which HTML makes one kind of, and null, which it cannot hold."""
    clean = re.sub(r"[\r\0]", "", text)
    card = Page(report.card(shown(question=clean, pictures=[]), "sample 0"))
    assert "".join(card.text("p")[:-1]) == clean


def test_text_that_is_no_unicode_is_written_all_the_same(tmp_path: Path) -> None:
    """A lone surrogate stands for a byte in a broken file name."""
    _, page = made(tmp_path, samples=[shown(question="a\udcffb")])
    assert "a?b" in page.text("p")


def test_wrong_answers_are_marked_and_counted(tmp_path: Path) -> None:
    """By a word, not by colour alone."""
    samples = [shown(), shown(answer="the right", right=False), shown()]
    _, page = made(tmp_path, samples=samples)
    cards = [a["class"] for a in page.all("article")]
    assert cards == ["sample is-right", "sample is-wrong", "sample is-right"]
    words = [t for t in page.text("p") if t[:1] in "✓✗"]
    assert words == ["✓ right", "✗ wrong", "✓ right"]
    assert {"all 3", "right 2", "wrong 1"} < set(page.text("label"))


def test_pictures_are_inside_the_page_without_what_their_files_say(tmp_path: Path) -> None:
    """Small ones exactly, large ones reduced, and the place where one was taken is left out."""
    exif = Image.Exif()
    exif[0x010E] = "taken at home"
    file = io.BytesIO()
    picture(2000).save(file, "jpeg", exif=exif, comment=b"by me")
    many = [picture()] * (report.PICTURES + 3)
    _, page = made(
        tmp_path, samples=[shown(pictures=[picture(), file.getvalue()]), shown(pictures=many)]
    )
    images = page.all("img")
    assert len(images) == 2 + report.PICTURES
    assert "and 3 more" in page.text("span")
    small, large = (base64.b64decode((a["src"] or "").split(",")[1]) for a in images[:2])
    assert Image.open(io.BytesIO(small)).tobytes() == picture().tobytes()
    assert Image.open(io.BytesIO(large)).size == (report.SIDE, report.SIDE)
    assert b"taken at home" not in large
    assert b"by me" not in large


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_pictures_of_every_mode_are_shown(tmp_path: Path, mode: str) -> None:
    """Those with transparency keep it."""
    image = Image.new(mode, (4, 4))
    _, page = made(tmp_path, samples=[shown(pictures=[image])])
    (found,) = page.all("img")
    data = base64.b64decode((found["src"] or "").split(",")[1])
    assert Image.open(io.BytesIO(data)).mode == ("RGBA" if mode in ("LA", "RGBA") else "RGB")


def test_a_picture_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """And there is no page rather than half of one."""
    bad = shown(pictures=[picture(), b"no picture"])
    with pytest.raises(ValueError, match=r"sample 1, picture 1 cannot be read"):
        made(tmp_path, samples=[shown(), bad])
    assert not (tmp_path / "report.html").exists()
    assert list(tmp_path.glob(".*")) == []


def test_a_run_without_metrics_is_refused(tmp_path: Path) -> None:
    """The path says where they were looked for."""
    with pytest.raises(ValueError, match=r"metrics\.jsonl is missing"):
        report.write(tmp_path, config={}, summary={})


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    """It was stopped at once."""
    (tmp_path / log.FILE).touch()
    _, page = made(tmp_path)
    assert "No step was logged." in page.text("p")


def test_numbers_are_tiles_and_texts_are_facts(tmp_path: Path) -> None:
    """Written with their units, which the ends of the names tell."""
    summary = {
        "accuracy": 0.98765,
        "steps": 1234,
        "time_s": 93.0,
        "tokens_per_s": 1234.5,
        "peak_memory_bytes": 3 * 2**29,
        "parameters": 8_767_123_696,
        "commit": "0a1b2c3",
    }
    _, page = made(tmp_path, summary=summary)
    values = ["98.8 %", "1,234", "1 min 33 s", "1,234", "1.5 GiB", "8.77 B", "0a1b2c3"]
    names = ["accuracy", "steps", "time", "tokens/s", "peak memory", "parameters", "commit"]
    assert page.text("dd")[: len(values)] == values
    assert page.text("dt")[: len(names)] == names


def test_the_config_is_a_table_in_groups(tmp_path: Path) -> None:
    """Values at the top make a group of their own; deeper ones have dotted names."""
    config = {"seed": 0, "model": {"tied": True, "vision": {"deepstack": (1, 2)}}, "name": "a"}
    _, page = made(tmp_path, config=config)
    assert page.text("h3")[-2:] == ["run", "model"]
    assert page.text("dt") == ["seed", "name", "tied", "vision.deepstack"]
    assert page.text("dd") == ["0", "a", "true", "1, 2"]


def test_every_metric_that_was_measured_has_a_curve(tmp_path: Path) -> None:
    """One that never was has none: here the share of the peak."""
    _, page = made(tmp_path)
    titles = [t.strip() for t in page.text("h3") if t.strip()]
    assert titles == [
        "Loss",
        "Held-out",
        "Learning rate",
        "Gradient norm",
        "Throughput",
        "Time of a step",
        "Memory",
    ]


def test_steps_without_a_finite_loss_are_marked(tmp_path: Path) -> None:
    """In the charts of the loss and of the gradient, in place of a point."""
    logged(tmp_path, 10, lost=[4])
    _, page = made(tmp_path)
    marks = page.all("span", "lost")
    assert {a["title"] for a in marks} == {"not finite at step 4"}


def paths(text: str, kind: str) -> list[list[tuple[float, float]]]:
    """Give the points of the paths of a class."""
    found = [a["d"] or "" for a in Page(text).all("path", kind)]
    return [[(float(a), float(b)) for a, b in re.findall(r"([\d.-]+) ([\d.-]+)", d)] for d in found]


def test_a_curve_goes_through_its_values() -> None:
    """On both axes: 0 to 1000 from left to right and from top to bottom."""
    line = Line("a", [0, 5, 10], [1.0, 10.0, 100.0])
    linear, log_scaled = paths(figure(Chart("t", "", [line]), "f"), "line")
    assert log_scaled == [(0, 1000), (500, 500), (1000, 0)]
    assert linear == [(0, 990), (500, 900), (1000, 0)]


def test_a_curve_is_cut_where_there_is_no_value() -> None:
    """Nothing is drawn across a gap, and a lone value is a dot."""
    line = Line("a", [0, 1, 2, 3, 4], [0.0, 1.0, None, 1.0, None])
    text = figure(Chart("t", "", [line], zero=True), "f")
    assert paths(text, "line") == [[(0, 1000), (250, 0)], [(750, 0)]]
    assert paths(text, "mark") == [[(750, 0)]]


def test_a_long_run_makes_no_long_page() -> None:
    """A spike of one step in a hundred thousand still shows."""
    count = 100_000
    values = [1.0] * count
    values[54_321] = 9.0
    text = figure(Chart("t", "", [Line("a", range(count), values, smooth=True)]), "f")
    (band,) = paths(text, "band")[:1]
    (line,) = paths(text, "line")[:1]
    assert len(line) == POINTS
    assert min(y for _, y in band) < 200 < 800 < min(y for _, y in line)
    assert len(text) < 60_000


def test_read_outs_are_json_that_cannot_end_its_script() -> None:
    """The script finds steps, values and texts of each line."""
    text = figure(Chart("t", "", [Line("</script>", [1, 2], [0.5, None], marks=True)]), "f")
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', text)
    assert json.loads(data) == [
        {"steps": [1, 2], "values": [0.5, None], "texts": ["0.5", "not finite"]}
    ]


def test_a_chart_says_in_words_what_it_shows() -> None:
    """For those who do not see it."""
    line = Line("training", [1, 2, 3], [2.5, None, 0.5])
    (plot, *_) = Page(figure(Chart("Loss", "", [line]), "f")).all("div", "plot")
    assert plot["aria-label"] == "Loss: training from 2.5 at step 1 to 0.5 at step 3"


def test_a_chart_has_no_more_lines_than_colours() -> None:
    """Two lines of one colour cannot be told apart."""
    with pytest.raises(ValueError, match=r"chart 't' has 5 lines, and there are 4 colours"):
        figure(Chart("t", "", [Line("a", [1], [1.0])] * 5), "f")


def test_more_held_out_shares_than_colours_make_more_charts(tmp_path: Path) -> None:
    """Six tasks: four lines, then two."""
    logged(tmp_path, 2)
    with log.open_log(tmp_path, 2, 2, console=Console(file=io.StringIO())) as it:
        it.evaluation(2, {f"eval/task_{i}": i / 10 for i in range(6)})
    _, page = made(tmp_path)
    assert [t.strip() for t in page.text("h3")].count("Held-out") == 2


finite = st.floats(-1e12, 1e12)


@given(finite, finite)
def test_ticks_are_inside_few_and_evenly_spaced(a: float, b: float) -> None:
    """For any range that floats can tell apart."""
    low, high = min(a, b), max(a, b)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
        return
    found = ticks(low, high, 5)
    step = (high - low) / 5
    assert len(found) <= 6
    assert all(low - step / 100 <= t <= high + step / 100 for t in found)
    gaps = [q - p for p, q in pairwise(found)]
    assert gaps == pytest.approx([gaps[0]] * len(gaps), rel=1e-3) if gaps else True


@given(st.floats(1e-12, 1e12), st.floats(4.0, 1e9))
def test_a_logarithmic_axis_has_ticks(low: float, ratio: float) -> None:
    """From ratios on at which one is offered."""
    found = log_ticks(low, low * ratio)
    assert 1 <= len(found) <= 7
    assert all(low * 0.999 <= t <= low * ratio * 1.001 for t in found)


@given(st.lists(finite, min_size=1, max_size=300))
def test_a_running_mean_stays_within_its_values_and_keeps_the_ends(values: list[float]) -> None:
    """It neither lags nor overshoots."""
    means = smoothed(values)
    scale = max(map(abs, values)) * len(values) * 1e-15 + 1e-300
    assert all(m is not None and min(values) - scale <= m <= max(values) + scale for m in means)
    assert means[0] == pytest.approx(values[0], abs=scale)
    assert means[-1] == pytest.approx(values[-1], abs=scale)


def test_a_running_mean_of_a_straight_line_is_the_line() -> None:
    """A window to one side would be late."""
    values = [float(i) for i in range(600)]
    assert smoothed(values) == pytest.approx(values)
