"""The log of a run: its file, its events, its display."""

import io
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mmfn import log, report


def metrics(step: int, **changes: Any) -> dict[str, Any]:
    """Metrics of a step whose loss is 1 / step."""
    return {
        "step": step,
        "loss": 1 / step,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens": 1000,
        "supervised": 100,
        "samples": 8,
        "tokens_per_s": 4000.0,
        "mfu": None,
        "data_wait_s": 0.05,
        "step_s": 0.25,
        "memory_bytes": 3 * 2**30,
        **changes,
    }


def silent(**options: Any) -> Console:
    """Make a console that writes to a text of its own."""
    return Console(file=io.StringIO(), **options)


def printed(console: Console) -> str:
    """Give what a silent console was told."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def run(folder: Path, steps: int, start: int = 0, stop: int | None = None, **options: Any) -> None:
    """Log steps after `start` up to `stop`, evaluating after each fifth."""
    options.setdefault("console", silent())
    with log.open_log(folder, steps, start, **options) as it:
        for step in range(start + 1, (stop or steps) + 1):
            it.step(metrics(step))
            if step % 5 == 0:
                it.evaluation(step, {"eval/accuracy": step / steps})


def test_a_step_is_one_line_with_exactly_the_twelve_keys(tmp_path: Path) -> None:
    """In the order of the table, written as they were given."""
    run(tmp_path, 4)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [metrics(step) for step in range(1, 5)]
    assert list(lines[0]) == list(log.METRICS)
    assert len(log.METRICS) == 12


def test_a_resumed_run_leaves_the_file_of_one_that_never_stopped(tmp_path: Path) -> None:
    """Stopped at 8 after a checkpoint at 5, with a line cut short by the crash."""
    run(tmp_path / "whole", 10)
    run(tmp_path / "parts", 10, stop=8)
    path = tmp_path / "parts" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 9, "lo')
    run(tmp_path / "parts", 10, start=5)
    assert path.read_text() == (tmp_path / "whole" / "metrics.jsonl").read_text()
    assert [p.name for p in path.parent.iterdir() if p.suffix == ".partial"] == []


def test_a_run_from_the_start_begins_with_an_empty_file(tmp_path: Path) -> None:
    """Even the evaluation before the first step is gone: it will be done again."""
    with log.open_log(tmp_path, 3, console=silent()) as it:
        it.evaluation(0, {"eval/accuracy": 0.1})
        it.step(metrics(1))
    run(tmp_path, 3)
    steps, evaluations = log.read(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert evaluations == []


def test_lines_are_on_disk_before_the_run_ends(tmp_path: Path) -> None:
    """A reader beside the run sees each step."""
    with log.open_log(tmp_path, 3, console=silent()) as it:
        it.step(metrics(1))
        assert [line["step"] for line in log.read(tmp_path)[0]] == [1]


def test_what_is_not_finite_is_null_and_said_beside_it(tmp_path: Path) -> None:
    """The file stays strict JSON."""
    with log.open_log(tmp_path, 2, console=silent()) as it:
        it.step(metrics(1, loss=math.nan, grad_norm=math.inf))
        it.evaluation(1, {"eval/loss": -math.inf})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    (step,), (evaluation,) = log.read(tmp_path)
    assert step["loss"] is None
    assert step["non_finite"] == {"loss": "nan", "grad_norm": "inf"}
    assert evaluation == {"step": 1, "eval/loss": None, "non_finite": {"eval/loss": "-inf"}}


def test_of_two_evaluations_at_a_step_the_later_counts(tmp_path: Path) -> None:
    """A checkpoint after 5 steps, the crash while or after evaluating them: it is done again."""
    run(tmp_path, 10, stop=5)
    with log.open_log(tmp_path, 10, 5, console=silent()) as it:
        it.evaluation(5, {"eval/accuracy": 0.75})
    assert log.read(tmp_path)[1] == [{"step": 5, "eval/accuracy": 0.75}]


def test_tensorboard_reads_each_step_once_after_a_resume(tmp_path: Path) -> None:
    """Read with TensorBoard's own reader; metrics that are absent have no curve."""
    run(tmp_path, 10, stop=8)
    run(tmp_path, 10, start=5)
    events = EventAccumulator(str(tmp_path)).Reload()
    losses = events.Scalars("train/loss")
    assert [e.step for e in losses] == list(range(1, 11))
    assert [e.value for e in losses] == pytest.approx([1 / s for s in range(1, 11)])
    assert [e.step for e in events.Scalars("eval/accuracy")] == [5, 10]
    assert "train/mfu" not in events.Tags()["scalars"]


def test_tensorboard_forgets_a_run_that_starts_anew(tmp_path: Path) -> None:
    """Steps of the longer run before do not show behind the shorter one."""
    run(tmp_path, 8)
    run(tmp_path, 3)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2, 3]


def test_no_tensorflow_is_imported(tmp_path: Path) -> None:
    """Where there is one: here, one that cannot be imported."""
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow was imported')")
    code = f"""
from pathlib import Path
from mmfn import log, report
with log.open_log(Path({str(tmp_path / "run")!r}), 1) as it:
    it.evaluation(0, {{"eval/loss": 1.0}})
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=60)


def test_only_the_main_rank_writes_and_all_check(tmp_path: Path) -> None:
    """A wrong metric stops every rank, not one that the others then wait for."""
    console = silent()
    run(tmp_path / "run", 4, main=False, console=console)
    assert not (tmp_path / "run").exists()
    assert printed(console) == ""
    with (
        pytest.raises(ValueError, match=r"metrics of a step lack 'loss'"),
        log.open_log(tmp_path, 4, main=False) as it,
    ):
        it.step({"step": 1})


def test_without_a_terminal_a_line_is_printed_every_so_often(tmp_path: Path) -> None:
    """Steps of 4 s, a line every 10 s: the first, those at 12 and 24 s, and the last."""
    now, console = [0.0], silent()

    with log.open_log(tmp_path, 8, console=console, clock=lambda: now[0]) as it:
        for step in range(1, 9):
            now[0] += 4.0
            it.step(metrics(step))
        it.evaluation(8, {"eval/accuracy": 0.987654})
        it.note("done [/] with [bold]it[/bold]")
    lines = printed(console).splitlines()
    assert [line.split("  ")[0] for line in lines[:-2]] == [f"step {s}/8" for s in (1, 4, 7, 8)]
    assert lines[0] == (
        "step 1/8  loss 1  lr 0.001  grad 0.5  tokens/s 4,000  data wait 20 %  memory 3 GiB"
        "  left 28.0 s"
    )
    assert lines[-2:] == ["step 8  eval/accuracy 0.9877", "done [/] with [bold]it[/bold]"]
    assert "\x1b" not in printed(console)


@pytest.mark.parametrize("width", [40, 80, 140])
def test_a_terminal_shows_the_last_step_live(tmp_path: Path, width: int) -> None:
    """At every width, nothing is cut off."""
    console = silent(force_terminal=True, width=width)
    run(tmp_path, 10, console=console)
    text = printed(console)
    for word in ("step 10/10", "loss 0.1", "lr 0.001", "4,000", "20 %", "3 GiB", "left", "█▄▃"):
        assert word in text
    assert "eval/accuracy" in text


def test_a_live_display_starts_no_thread(tmp_path: Path) -> None:
    """Loaders fork; a lock that a thread of the display holds would never open in the child."""
    import threading

    before = threading.active_count()
    with log.open_log(tmp_path, 3, console=silent(force_terminal=True)) as it:
        it.step(metrics(1))
        assert threading.active_count() == before


def test_notes_are_kept_with_time_and_step(tmp_path: Path) -> None:
    """In UTC."""
    with log.open_log(tmp_path, 3, console=silent()) as it:
        it.step(metrics(1))
        it.note("the update was skipped: the gradient is not finite")
    (line,) = (tmp_path / "notes.txt").read_text().splitlines()
    assert line.startswith(time.strftime("%Y-"))
    assert line.endswith(" step 1: the update was skipped: the gradient is not finite")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            metrics(1) | {"speed": 1.0},
            r"no metric of a step is called 'speed'; they are step, loss",
        ),
        (metrics(1) | {"step": 1.0}, r"metric 'step' is 1\.0, not a whole number"),
        (metrics(1, loss="low"), r"metric 'loss' is a str, not a number"),
        (metrics(1, loss=True), r"metric 'loss' is a bool, not a number"),
        (metrics(2), r"step 2 does not follow step 2 of total_steps=5"),
        (metrics(6), r"step 6 does not follow step 2 of total_steps=5"),
    ],
)
def test_wrong_metrics_are_refused_by_name(
    tmp_path: Path, given: Mapping[str, Any], message: str
) -> None:
    """And nothing is written of them."""
    with log.open_log(tmp_path, 5, console=silent()) as it:
        it.step(metrics(2))
        with pytest.raises(ValueError, match=message):
            it.step(given)
        it.step(metrics(3))
    assert [line["step"] for line in log.read(tmp_path)[0]] == [2, 3]


def test_wrong_evaluations_are_refused_by_name(tmp_path: Path) -> None:
    """Without the prefix they could be taken for those of a step."""
    with log.open_log(tmp_path, 5, console=silent()) as it:
        with pytest.raises(ValueError, match=r"'accuracy' of an evaluation does not start with"):
            it.evaluation(1, {"accuracy": 1.0})
        with pytest.raises(ValueError, match=r"the evaluation at step 1 has no metric"):
            it.evaluation(1, {})


@pytest.mark.parametrize("start", [-1, 6])
def test_a_start_outside_the_run_is_refused(tmp_path: Path, start: int) -> None:
    """Before anything is written."""
    with (
        pytest.raises(ValueError, match=rf"start={start} is not in \[0, total_steps=5\]"),
        log.open_log(tmp_path, 5, start),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{]\n", r"metrics\.jsonl, line 2, is not JSON"),
        ('{"step": 2, "loss": NaN}\n', r"metrics\.jsonl, line 2, is not JSON: JSON has no NaN"),
        ('{"loss": 1.0}\n', r"metrics\.jsonl, line 2, has no step"),
        ("[2]\n", r"metrics\.jsonl, line 2, has no step"),
    ],
)
def test_a_broken_file_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    """And is left as it is."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(metrics(1)) + "\n" + text)
    with pytest.raises(ValueError, match=message):
        run(tmp_path, 5, start=2)
    with pytest.raises(ValueError, match=message):
        log.read(tmp_path)
    assert path.read_text().endswith(text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """As when a report is asked for before the run."""
    with pytest.raises(ValueError, match=r"metrics\.jsonl is missing"):
        log.read(tmp_path)


def test_experts_have_keys_of_their_own(tmp_path: Path) -> None:
    """All in the file, numbers as curves, the fullest one on the screen and in the report."""
    more = {"balance": 2.1, "load_max": 1.75, "load_idle": 1, "left_out": 0.0, "load": [3.0, 7.0]}
    console = silent(width=200)
    with log.open_log(tmp_path, 2, console=console) as it:
        for step in (1, 2):
            it.step(metrics(step, **more))
    steps, _ = log.read(tmp_path)
    assert list(steps[0]) == [*log.METRICS, *log.EXPERTS]
    assert steps[0]["load"] == [3.0, 7.0]
    assert "fullest expert 1.75 x the mean" in printed(console)
    names = [chart.title for chart in report.charts(steps, [])]
    assert names[-2:] == ["Fullest expert", "Balance loss"]
    assert "Fullest expert" not in [c.title for c in report.charts([metrics(1)], [])]
    with pytest.raises(ValueError, match="no metric of a step is called 'loads'"):
        log.step_line(metrics(1, loads=[1.0]))
