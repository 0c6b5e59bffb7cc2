"""The recipe under torchrun: the same numbers, the same files, and an end together."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmfn import log

RECIPE = Path(__file__).parent.parent / "recipes" / "qwen3vl.py"
SMALL = ["--data.row-tokens", "256", "--data.workers", "0", "--data.answer-tokens", "1"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(ranks: int, *words: str) -> list[str]:
    """Write the command of a run on so many ranks."""
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    return [*start, "--master_port=0", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0",
            str(RECIPE), *words]  # fmt: skip


def run(ranks: int, *words: str, code: int = 0) -> str:
    """Run to the end; gives what was said.

    A run is repeated once, from the same folder, where glibc found the heap of a rank broken: seen
    in 2 of some 40 runs of two ranks on two busy cores, in gloo or below.
    """
    out = Path(words[words.index("--run.out") + 1])
    kept = out.with_name(f"{out.name}.before")
    if out.exists():
        shutil.copytree(out, kept)
    command = torchrun(ranks, *words)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENV)
    if "Signal 6 (SIGABRT)" in done.stderr:
        shutil.rmtree(out, ignore_errors=True)
        if kept.exists():
            shutil.copytree(kept, out)
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENV)
    shutil.rmtree(kept, ignore_errors=True)
    assert (done.returncode == 0) == (code == 0), done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a run folder of two steps on one device, whose export others go on from."""
    folder = tmp_path_factory.mktemp("one") / "run"
    words = [*SMALL, "--train.steps", "2", "--run.out", str(folder), "--run.seed", "3"]
    subprocess.run([sys.executable, str(RECIPE), *words], check=True, capture_output=True, env=ENV)
    return folder


def losses(folder: Path) -> list[float]:
    """Read the losses of a run."""
    return [line["loss"] for line in log.read(folder)[0]]


def test_ranks_that_share_their_samples_train_as_one_device(model: Path, tmp_path: Path) -> None:
    """Tokens cut in two: losses, norms and exported weights are those of one device."""
    words = [*SMALL, "--train.steps", "2", "--run.seed", "3"]
    said = run(2, *words, "--mesh", "cp=2", "--run.out", str(tmp_path / "two"))
    assert said.count("held-out exact answers") == 1
    assert losses(tmp_path / "two") == pytest.approx(losses(model), rel=1e-5)
    ours = load_file(tmp_path / "two" / "export" / "model.safetensors")
    theirs = load_file(model / "export" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, atol=2e-4, rtol=0)
    about = json.loads((tmp_path / "two" / "about.json").read_text())
    assert about["mesh"] == "cp=2 ulysses=2"


def test_a_run_goes_on_on_another_mesh(tmp_path: Path) -> None:
    """From fsdp=2 to tp=2 with twice the micro-batches: the same steps, losses to rounding."""
    out = tmp_path / "run"
    words = [*SMALL, "--train.steps", "6", "--run.save-every", "3", "--run.out", str(out)]
    run(2, *words, "--train.accumulate", "2", "--mesh", "fsdp=2")
    before = losses(out)
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    said = run(2, *words, "--train.accumulate", "2", "--mesh", "tp=2", "--run.resume", code=1)
    assert "reads 4 rows; --data.rows=1, --train.accumulate=2 and 1 data ranks make 2" in said
    run(2, *words, "--train.accumulate", "4", "--mesh", "tp=2", "--run.resume")
    assert losses(out) == pytest.approx(before, rel=1e-4)
    assert losses(out)[:3] == before[:3]


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    """SIGTERM to one of two: the state is saved once, and the command to go on is said."""
    words = [*SMALL, "--train.steps", "400", "--run.out"]
    out = tmp_path / "run"
    process = subprocess.Popen(
        torchrun(2, *words, str(out), "--mesh", "fsdp=2"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENV,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    metrics = out / log.FILE
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.2)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    )
    os.kill(int(children.stdout.split()[-1]), signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    found = re.search(r"stopped after step (\d+) of 400; go on with: torchrun", said)
    assert found, said
    assert len(losses(out)) == int(found[1])


def test_an_error_of_one_rank_is_said_once_and_ends_all(model: Path, tmp_path: Path) -> None:
    """A picture that one rank cannot read: its name first, in less than a minute."""
    rows = [
        {"id": i, "image": f"{i}.png", "conversations": [
            {"from": "human", "value": "<image>\nWhich digit is this?"},
            {"from": "gpt", "value": "3"}]}
        for i in range(8)
    ]  # fmt: skip
    from PIL import Image

    for i in range(8):
        Image.new("RGB", (32, 32), (30 * i, 20, 10)).save(tmp_path / f"{i}.png")
    (tmp_path / "train.json").write_text(json.dumps(rows))
    words = [*SMALL, "--model.path", str(model / "export"), "--train.epochs", "1",
             "--data.train", str(tmp_path / "train.json"), "--run.no-export"]  # fmt: skip
    said = run(2, *words, "--run.out", str(tmp_path / "good"))
    assert "step 1/" in said

    (tmp_path / "5.png").write_bytes((tmp_path / "5.png").read_bytes()[:40])
    start = time.monotonic()
    said = run(2, *words, "--run.out", str(tmp_path / "bad"), code=1)
    assert time.monotonic() - start < 60
    assert said.count("5.png") == 1
    assert re.search(r"rank \d: .*5\.png", said)
    assert 'qwen3vl.py", line' not in said


def test_broken_media_are_counted_over_ranks(model: Path, tmp_path: Path) -> None:
    """Case D08 on two ranks with workers: 4 of 8 kept, both make the same steps; or an end."""
    cases = Path(__file__).parent / "data" / "cases"
    words = [
        "--model.path", str(model / "export"), "--data.train", str(cases / "d08_broken_media.json"),
        "--data.media-root", str(cases), "--data.row-tokens", "512", "--train.epochs", "1",
        "--data.workers", "2", "--data.max-pixels", "4096", "--run.no-export",
    ]  # fmt: skip
    said = run(2, *words, "--run.out", str(tmp_path / "raise"), code=1)
    assert said.count("truncated.jpg") == 1
    skip = ["--data.on-bad", "skip", "--data.max-bad", "0.5"]
    said = run(2, *words, *skip, "--run.out", str(tmp_path / "skip"))
    assert "left out 0 too long and 4 bad of 8" in said
    assert sum(line["samples"] for line in log.read(tmp_path / "skip")[0]) == 4


def test_a_mesh_that_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    """Before any weight is made: too many ranks, and heads that tp does not divide."""
    said = run(2, *SMALL, "--mesh", "fsdp=3", "--run.out", str(tmp_path / "a"), code=1)
    assert "mesh 'fsdp=3' has 3 ranks; there are 2" in said
    said = run(3, *SMALL, "--mesh", "tp=3", "--run.out", str(tmp_path / "a"), code=1)
    assert "tp=3 divides neither kv_heads=2 nor the groups=2" in said
    assert not (tmp_path / "a").exists()


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    """SIGKILL: torchrun says which, and nobody waits for it."""
    process = subprocess.Popen(
        torchrun(2, *SMALL, "--train.steps", "400", "--run.out", str(tmp_path / "run")),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENV,
    )  # fmt: skip
    metrics, deadline = tmp_path / "run" / log.FILE, time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    )
    os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
    start = time.monotonic()
    said, _ = process.communicate(timeout=120)
    assert time.monotonic() - start < 60
    assert process.returncode != 0
    assert "Signal 9 (SIGKILL)" in said


def test_experts_over_ranks_train_as_experts_on_each(tmp_path: Path) -> None:
    """Gathered, and exchanged on another mesh: losses, loads and balance; what finds no room ends
    the run before it changes a weight."""
    common = [*SMALL, "--model.experts", "4", "--train.balance", "0.05", "--train.steps", "3",
              "--train.accumulate", "2", "--run.no-export"]  # fmt: skip
    run(2, *common, "--run.out", str(tmp_path / "a"), "--run.save-every", "2", "--run.save-behind")
    whole, _ = log.read(tmp_path / "a")
    words = ["--mesh", "fsdp=2 ep=2", "--sharding.experts", "gathered", "--run.out"]
    run(2, *common, *words, str(tmp_path / "g"))
    steps, _ = log.read(tmp_path / "g")
    for key in ("loss", "balance", "load_max"):
        found = [line[key] for line in steps]
        assert found == pytest.approx([line[key] for line in whole], rel=2e-3), key
    assert steps[0]["load"] == whole[0]["load"]
    assert sum(steps[0]["load"]) == steps[0]["tokens"] * 2 * 4

    shutil.rmtree(tmp_path / "a" / "checkpoints" / "step-00000003")
    words = ["--mesh", "cp=2 ep=2", "--data.rows", "2", "--run.out", str(tmp_path / "a")]
    run(2, *common, *words, "--run.resume")
    after, _ = log.read(tmp_path / "a")
    assert [line["loss"] for line in after] == pytest.approx(
        [line["loss"] for line in whole], rel=2e-3
    )

    words = ["--mesh", "fsdp=2 ep=2", "--sharding.experts", "bounded", "--sharding.room", "0.4"]
    said = run(2, *common, *words, "--run.out", str(tmp_path / "b"), code=1)
    assert re.search(r"rank \d: \d+ choices of experts found no room in step 1", said)
