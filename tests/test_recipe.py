"""The recipe: from flags to a run folder, stopped and gone on, from a folder to a folder."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from mmfn import checkpoint, cli, log, tree, weights
from mmfn.data import chat as chats
from mmfn.data import digits, pack
from mmfn.data.encoded import Geometry
from mmfn.models import hub, qwen3_vl
from mmfn.recipes import qwen3vl
from mmfn.recipes.qwen3vl_config import Config
from mmfn.recipes.qwen3vl_resolve import resolve
from mmfn.train import TrainState

SCRIPT = Path(__file__).parents[1] / "recipes" / "qwen3vl.py"
SMALL = ["--data.row-tokens", "256", "--data.workers", "0", "--data.eval-samples", "8"]


def run(*words: str) -> TrainState:
    """Run the recipe in this process."""
    return qwen3vl.main(cli.read(Config, words))


def command(*words: str, **options: Any) -> subprocess.Popen[str]:
    """Start the recipe as a user does."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **options,
    )


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    """Read what a run logged of its steps, but for times and memory."""
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "supervised", "samples")
    return [tuple(line[key] for key in keys) for line in log.read(folder)[0]]


@pytest.fixture(scope="module", autouse=True)
def few_questions(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Hold out 12 samples of the digits only, so that evaluations are short."""
    patch = pytest.MonkeyPatch()
    held_out = digits.held_out()
    patch.setattr(digits, "held_out", lambda *, dark=False: (*held_out[:6], *held_out[-6:]))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainState]:
    """Train the embedded job for six steps, saving every two."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    state = run(*SMALL, "--train.steps", "6", "--run.save-every", "2", "--run.out", str(out))
    return out, state


def test_a_run_leaves_what_it_promises(trained: tuple[Path, TrainState]) -> None:
    """Config, metrics, events, report, checkpoints, exported folder; and the loss falls."""
    out, _ = trained
    names = {path.name.split(".")[0] for path in out.iterdir()}
    assert {"config", "about", "metrics", "events", "report", "checkpoints", "export"} <= names
    config = json.loads((out / "config.json").read_text())
    assert config["train"]["steps"] == 6
    assert config["optimizer"]["lr"] == 2e-3
    assert json.loads((out / "about.json").read_text())["commit"]
    steps, evaluations = log.read(out)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert all(set(line) == set(log.METRICS) for line in steps)
    assert 0 < steps[-1]["mfu"] < 1.2
    assert evaluations[-1]["step"] == 6
    assert 0 <= evaluations[-1]["eval/exact"] <= 1
    assert "Which" in (out / "report.html").read_text("utf-8")
    assert checkpoint.latest(out) == 6


def test_stopped_and_gone_on_is_not_stopped_bit_for_bit(
    trained: tuple[Path, TrainState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed in its fourth step; the newest whole checkpoint is that of step two."""
    out, whole = trained
    flags = [
        *SMALL,
        "--train.steps",
        "6",
        "--run.save-every",
        "2",
        "--run.out",
        str(tmp_path / "r"),
    ]
    make = qwen3vl.make_step

    def dying(*args: Any, **options: Any) -> Any:
        step = make(*args, **options)

        def run_step(state: TrainState, batches: Any) -> Any:
            if int(state.step) == 3:
                raise RuntimeError("killed")
            return step(state, batches)

        return run_step

    with monkeypatch.context() as patch:
        patch.setattr(qwen3vl, "make_step", dying)
        with pytest.raises(RuntimeError, match="killed"):
            run(*flags)
    assert checkpoint.latest(tmp_path / "r") == 2
    state = run(*flags, "--run.resume")
    for (path, a), b in zip(tree.items(state), tree.leaves(whole), strict=True):
        assert torch.equal(a, b), path
    assert numbers(tmp_path / "r") == numbers(out)


def test_a_folder_that_holds_a_run_is_refused(trained: tuple[Path, TrainState]) -> None:
    """Without --run.resume; and with it, if anything that matters differs or nothing is there."""
    out, _ = trained
    flags = [*SMALL, "--run.out", str(out)]
    with pytest.raises(ValueError, match=r"holds a checkpoint of step 6; --run\.resume goes on"):
        run(*flags, "--train.steps", "6")
    with pytest.raises(
        ValueError,
        match=r"--train\.steps was 6, is 8.*--run\.seed was 0, is 1|"
        r"--run\.seed was 0, is 1.*--train\.steps was 6, is 8|--train\.steps was 6, is 8",
    ):
        run(
            *flags, "--train.steps", "8", "--run.seed", "1", "--run.save-every", "2", "--run.resume"
        )
    run(*flags, "--train.steps", "6", "--run.save-every", "2", "--run.resume")
    assert [line[0] for line in numbers(out)] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="there is no whole checkpoint"):
        run(*SMALL, "--run.out", str(out / "none"), "--run.resume")


def test_the_exported_folder_is_what_transformers_loads(
    trained: tuple[Path, TrainState], recwarn: pytest.WarningsRecorder
) -> None:
    """No key missing or unexpected, the same logits to 1e-5, and loaded back bit for bit."""
    out, state = trained
    folder = out / "export"
    model, info = Qwen3VLForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True, local_files_only=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    cfg = hub.read_config(folder)
    chat = chats.load(folder, 1024)
    sample = chats.encode(digits.held_out()[-1], chat, Path())
    geometry = Geometry(cfg.vision.merge, cfg.vision.side, cfg.vision.patch_dim)
    batch, _ = pack.collate([[sample]], geometry=geometry, tokens=len(sample.tokens))
    ids = torch.from_numpy(sample.tokens)[None]
    grids = torch.tensor([[1, run.height, run.width] for run in sample.runs])
    with torch.no_grad():
        theirs = model.eval()(
            input_ids=ids,
            mm_token_type_ids=(ids == cfg.image_token).int(),
            pixel_values=torch.from_numpy(sample.patches),
            image_grid_thw=grids,
        ).logits[0]
        ours = qwen3_vl.forward(state.params, batch, cfg)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    again = weights.load(qwen3_vl.abstract(cfg), folder)
    for (path, a), b in zip(tree.items(again), tree.leaves(state.params), strict=True):
        assert torch.equal(a, b), path
    text = AutoTokenizer.from_pretrained(folder, local_files_only=True).apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Which?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_own_checkpoint_and_own_data(trained: tuple[Path, TrainState], tmp_path: Path) -> None:
    """Fine-tune the exported folder on files in LLaVA form, the tower frozen, by epochs."""
    out, before = trained
    digits.write(tmp_path / "data", count=24)
    words = [
        *SMALL, "--model.path", str(out / "export"),
        "--data.train", str(tmp_path / "data/train.json"),
        "--data.eval", str(tmp_path / "data/held_out.json"), "--train.epochs", "2",
        "--train.freeze", "vision.*", "--train.accumulate", "2", "--data.answer-tokens", "3",
        "--run.out", str(tmp_path / "run"), "--optimizer.lr", "1e-3",
    ]  # fmt: skip
    state = run(*words)
    assert numbers(tmp_path / "run")[-1][0] == int(state.step) == 4
    assert sum(line[-1] for line in numbers(tmp_path / "run")) == 48
    after = weights.load(
        qwen3_vl.abstract(hub.read_config(out / "export")), tmp_path / "run" / "export"
    )
    for (path, a), b in zip(tree.items(after), tree.leaves(before.params), strict=True):
        assert torch.equal(a, b) == path.startswith("vision."), path
    for name in ("config.json", "tokenizer.json", "preprocessor_config.json"):
        source = (out / "export" / name).read_bytes()
        assert (tmp_path / "run" / "export" / name).read_bytes() == source


def test_a_tail_of_an_epoch_is_a_step_of_its_own(tmp_path: Path) -> None:
    """Ten samples, a row each, accumulation 4, two epochs: six steps, three an epoch."""
    cfg = resolve(cli.read(Config, ["--run.out", str(tmp_path)]))
    assert cfg.train.steps == 450
    samples = [
        {
            "id": i,
            "messages": [
                {"role": "user", "content": "a" * 40},
                {"role": "assistant", "content": str(i)},
            ],
        }
        for i in range(10)
    ]
    (tmp_path / "t.json").write_text(json.dumps(samples))
    run(*SMALL, "--train.steps", "1", "--run.out", str(tmp_path / "first"))
    run(
        "--model.path", str(tmp_path / "first/export"), "--data.train", str(tmp_path / "t.json"),
        "--data.row-tokens", "64", "--data.workers", "0", "--train.accumulate", "4",
        "--train.epochs", "2", "--run.out", str(tmp_path / "run"), "--optimizer.lr", "1e-3",
    )  # fmt: skip
    assert [line[-1] for line in numbers(tmp_path / "run")] == [4, 4, 2, 4, 4, 2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step(number: signal.Signals, tmp_path: Path) -> None:
    """The step is finished and saved, the command to go on is said, and it works."""
    words = ["--data.row-tokens", "256", "--train.steps", "400", "--run.out", str(tmp_path / "r")]
    process = command(*words)
    while not (tmp_path / "r" / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, text
    done = checkpoint.latest(tmp_path / "r")
    assert done == len(numbers(tmp_path / "r"))
    assert f"stopped after step {done} of 400" in text.replace("\n", " ")
    assert "--run.resume" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train.setps", "3"], "--train.steps"),
        (["--optimizer.learning-rate", "1e-4"], "--optimizer.lr"),
        (["--train.steps", "ten"], "--train.steps is 'ten'"),
        (["--train.steps", "0"], "--train.steps=0 is less than 1"),
        (["--train.steps", "3", "--train.epochs", "1"], "exclude each other"),
        (["--model.path", "x"], "--model.path needs --data.train"),
        (["--data.eval", "x.json"], "--data.eval has no effect"),
        (["--run.device", "npu"], "npu"),
        (["--run.resume"], "--run.resume needs --run.out"),
        (["--run.out", __file__], "test_recipe.py"),
        (["--train.freeze", "visoin.*"], "'visoin.*' matches no weight"),
        (["--optimizer.rules", "text.*"], "is not PATTERN:SCALE:DECAY"),
        (["--optimizer.rules", "text.*:nan:0"], "'text.*:nan:0' needs a scale and a decay from 0"),
        (["--optimizer.rules", "text.*:1:-1"], "'text.*:1:-1' needs a scale and a decay from 0"),
        (["--optimizer.eps", "0"], "--optimizer.eps=0.0 is not positive"),
        (["--run.seed", str(2**63)], "--run.seed=9223372036854775808 is not below 2**63"),
        (["--data.row-tokens", "0"], "--data.row-tokens=0 is less than 2"),
        (["--data.min-pixels", "0"], "--data.min-pixels=0 is less than 1"),
        (["--mesh", "fsdp=2"], "mesh 'fsdp=2' has 2 ranks; there are 1"),
        (["--train.balance", "0.1"], "--train.balance=0.1 has no effect without experts"),
        (["--model.form", "hub"], "--model.form=hub has no effect without --model.path"),
        (["--sharding.chunks", "2"], "--sharding.chunks=2 have no effect without ep"),
        (["--sharding.experts", "gathered"], "--sharding.experts=gathered and"),
        (["--sharding.room", "0"], "--sharding.room=0.0 is not positive"),
        (["--model.experts", "-1"], "--model.experts=-1 is less than 0"),
        (["--sharding.check", "--run.compile", "step"], "--sharding.check compares calls"),
        (
            ["--data.max-tokens", "5000"],
            "--data.max-tokens=5000 is more than --data.row-tokens=1024",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message names the flag and the value or the right name; the exit code is not 0."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        qwen3vl.run(words)
    assert ended.value.code in (1, 2)
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_gradient_that_is_not_finite_stops_or_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 has an infinite loss: its update never happens; the state before it is saved."""
    right = qwen3vl.loss
    calls = []

    def broken(params: Any, batch: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        calls.append(1)
        value, routed = right(params, batch, **options)
        return value * (torch.inf if len(calls) == 2 else 1), routed

    monkeypatch.setattr(qwen3vl, "loss", broken)
    flags = [*SMALL, "--train.steps", "3"]
    with pytest.raises(FloatingPointError, match=r"step 2 is not finite.*--train\.on-nonfinite"):
        run(*flags, "--run.out", str(tmp_path / "stop"))
    assert checkpoint.latest(tmp_path / "stop") == 2
    calls.clear()
    state = run(*flags, "--train.on-nonfinite", "skip", "--run.out", str(tmp_path / "skip"))
    assert int(state.step) == 3
    assert all(leaf.isfinite().all() for leaf in tree.leaves(state.params))
    assert int(state.optimizer[1].count) == 2


def test_broken_media_end_the_run_by_name_or_are_skipped(
    trained: tuple[Path, TrainState], tmp_path: Path
) -> None:
    """Case D08: `truncated.jpg` is named and the exit code is not 0; skipping keeps 4 of 8."""
    out, _ = trained
    cases = Path(__file__).parent / "data" / "cases"
    words = [
        "--model.path", str(out / "export"), "--data.train", str(cases / "d08_broken_media.json"),
        "--data.media-root", str(cases), "--data.row-tokens", "512", "--train.epochs", "1",
        "--data.workers", "2", "--data.max-pixels", "4096",
    ]  # fmt: skip
    process = command(*words, "--run.out", str(tmp_path / "raise"))
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "truncated.jpg" in text
    assert "Traceback" not in text
    run(
        *words,
        "--data.on-bad",
        "skip",
        "--data.max-bad",
        "0.5",
        "--run.out",
        str(tmp_path / "skip"),
    )
    assert sum(line[-1] for line in numbers(tmp_path / "skip")) == 4
