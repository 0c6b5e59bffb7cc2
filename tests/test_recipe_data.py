"""The recipe on data of one's own: what is left out, what is refused, how it ends."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from PIL import Image
from test_recipe import SMALL, command, few_questions, numbers, run

from mmfn import checkpoint
from mmfn.train import TrainState

__all__ = ["few_questions"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a run folder with an exported model."""
    folder = tmp_path_factory.mktemp("model") / "run"
    run(*SMALL, "--train.steps", "1", "--run.out", str(folder))
    return folder


def rows(path: Path, answers: list[str], image: str | None = None) -> Path:
    """Write samples with these answers; an empty one is a question only."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        json.dumps(
            [
                {
                    "id": i,
                    **({"image": image} if image else {}),
                    "conversations": [
                        {"from": "human", "value": f"{'<image>' if image else ''}which?"},
                        *([{"from": "gpt", "value": answer}] if answer else []),
                    ],
                }
                for i, answer in enumerate(answers)
            ]
        )
    )
    return path


def own(model: Path, train: Path, *words: str) -> TrainState:
    """Fine-tune on a file of one's own."""
    return run(
        "--model.path", str(model / "export"), "--data.train", str(train), "--data.row-tokens",
        "64", "--data.workers", "0", "--data.answer-tokens", "2", *words,
    )  # fmt: skip


def test_samples_without_an_answer_are_left_out_and_counted(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would make steps that learn nothing; a file of them only is refused."""
    train = rows(tmp_path / "train.json", ["one", "", "two", ""])
    own(model, train, "--train.epochs", "1", "--run.out", str(tmp_path / "run"))
    assert "left out 2 of 4 that have no answer to train on" in capsys.readouterr().out
    assert sum(line[-1] for line in numbers(tmp_path / "run")) == 2
    with pytest.raises(ValueError, match=r"--data\.eval=.*none.json has no sample with an answer"):
        own(
            model, train, "--run.out", str(tmp_path / "other"), "--data.eval",
            str(rows(tmp_path / "none.json", ["", ""])),
        )  # fmt: skip


def test_a_run_does_not_go_on_with_other_data(model: Path, tmp_path: Path) -> None:
    """The file of the samples has changed since: its digest is another."""
    train = rows(tmp_path / "train.json", ["one", "two", "three"])
    words = ["--train.steps", "2", "--run.save-every", "1", "--run.out", str(tmp_path / "run")]
    own(model, train, *words)
    rows(train, ["one", "two", "four"])
    with pytest.raises(ValueError, match=r"train.json is not the file that the run in .* began"):
        own(model, train, *words, "--run.resume")


def test_held_out_samples_have_a_media_root_of_their_own_and_may_be_skipped(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The picture beside the held-out file is found; a row without one is left out by name."""
    train = rows(tmp_path / "train.json", ["one", "two"])
    held = rows(tmp_path / "held" / "held.json", ["a", "b", "c"], "own.png")
    Image.new("RGB", (32, 32)).save(held.parent / "own.png")
    entries = json.loads(held.read_text())
    entries[1]["image"] = "missing.png"
    held.write_text(json.dumps(entries))
    words = ["--train.steps", "1", "--data.eval", str(held), "--data.max-bad", "0.5"]
    with pytest.raises(ValueError, match=r"held.json\[1\].*missing.png"):
        own(model, train, *words, "--run.out", str(tmp_path / "raise"))
    own(model, train, *words, "--data.on-bad", "skip", "--run.out", str(tmp_path / "skip"))
    said = capsys.readouterr().out
    assert "left out 0 too long and 1 bad of 3" in said
    assert "of 2)" in said


def test_a_folder_of_a_run_that_saved_nothing_is_refused(tmp_path: Path) -> None:
    """Its metrics would be cut off without a word."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a run that has saved nothing"):
        run(*SMALL, "--train.steps", "1", "--run.out", str(tmp_path))


def test_a_signal_to_the_whole_group_ends_the_run_as_one_to_it(tmp_path: Path) -> None:
    """A terminal and a scheduler send it to the workers too, who leave it to the main process."""
    words = ["--data.row-tokens", "256", "--train.steps", "400", "--run.out", str(tmp_path / "r")]
    process = command(*words, start_new_session=True)
    while not (tmp_path / "r" / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, text
    assert checkpoint.latest(tmp_path / "r") == len(numbers(tmp_path / "r"))
