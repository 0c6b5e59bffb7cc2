"""Checkpoints of several processes, and of one that is killed while it writes."""

import subprocess
import sys
from pathlib import Path

import torch

from mmfn import checkpoint

KILL = """
import os, shutil, signal, sys
from pathlib import Path
import torch
from mmfn import checkpoint

torch.set_num_threads(1)
root = Path(sys.argv[1])
state = lambda step: {"w": torch.full((50,), float(step)), "step": torch.tensor(step)}
checkpoint.save(root / "base", 1, state(1), {"step": 1}, keep=2)
checkpoint.save(root / "base", 2, state(2), {"step": 2}, keep=2)

def attempt(run, die_at):
    count = 0
    def watch(event, args):
        nonlocal count
        if event in WATCHED and str(run) in str(args[0]):
            count += 1
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)
    checkpoint.save(run, 4, state(4), {"step": 4}, keep=2)
    os._exit(0)

WATCHED = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}
for die_at in range(1, 1000):
    run = root / f"run{die_at}"
    shutil.copytree(root / "base", run)
    child = os.fork()
    if child == 0:
        attempt(run, die_at)
    _, status = os.waitpid(child, 0)
    step = checkpoint.latest(run)
    restored, meta = checkpoint.restore(run, step, state(0))
    assert meta == {"step": step} and torch.equal(restored["w"], state(step)["w"])
    for path in (run / "checkpoints").glob("step-????????"):
        checkpoint.restore(run, int(path.name[5:]), state(0))
    if step == 2:
        checkpoint.save(run, 4, state(4), {"step": 4}, keep=1)
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000004"]
    print("killed" if os.WIFSIGNALED(status) else f"exit {os.waitstatus_to_exitcode(status)}", step)
    shutil.rmtree(run)
    if not os.WIFSIGNALED(status):
        break
"""


def test_a_killed_save_loses_that_save_only(tmp_path: Path) -> None:
    """SIGKILL before each access to the file system in turn, from the first to the last.

    Whatever has the name of a step is whole, and the next save removes what is left over.
    """
    done = subprocess.run(
        [sys.executable, "-c", KILL, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "exit 0 4"
    steps = [line.removeprefix("killed ") for line in lines[:-1]]
    assert steps == sorted(steps)
    assert steps.count("2") > 10
    assert steps.count("4") > 2


RANKS = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from mmfn import checkpoint

def main(rank, root):
    torch.set_num_threads(1)
    store = dist.FileStore(str(root / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh, group = init_device_mesh("cpu", (2,)), dist.group.WORLD
    whole = {"w": torch.arange(15.0).view(3, 5), "b": torch.ones(1), "step": torch.tensor(7)}
    spread = lambda tree, at: {
        k: distribute_tensor(v, mesh, [at]) if v.ndim else v for k, v in tree.items()
    }
    checkpoint.save(root, 1, spread(whole, Shard(0)), {"a": 1}, keep=1, group=group)
    like = {key: torch.zeros_like(value) for key, value in whole.items()}
    for at in (Shard(0), Replicate()):
        found, meta = checkpoint.restore(root, 1, spread(like, at), group=group)
        assert meta == {"a": 1}
        for key, value in found.items():
            value = value.full_tensor() if value.ndim else value
            assert torch.equal(value, whole[key])
    try:
        checkpoint.save(root, 1, whole, {}, keep=1, group=group)
        raise AssertionError("written twice")
    except ValueError as error:
        assert "is complete" in str(error)
    try:
        checkpoint.save(root, 2, whole, {}, keep=1)
        raise AssertionError("each rank alone")
    except ValueError as error:
        assert "2 ranks run" in str(error)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)

root = Path(sys.argv[1])
children = []
for rank in range(2):
    child = os.fork()
    if child == 0:
        main(rank, root)
    children.append(child)
for child in children:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_ranks_write_one_checkpoint_that_one_process_reads(tmp_path: Path) -> None:
    """Uneven and empty shards, a replicated leaf, errors of the first rank on all of them."""
    done = subprocess.run(
        [sys.executable, "-c", RANKS, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    like = {"w": torch.zeros(3, 5), "b": torch.zeros(1), "step": torch.tensor(0)}
    restored, _ = checkpoint.restore(tmp_path, 1, like)
    assert torch.equal(restored["w"], torch.arange(15.0).view(3, 5))
    assert restored["step"] == 7
    names = [path.name[:11] for path in (tmp_path / "checkpoints/step-00000001").glob("*.safe*")]
    assert sorted(names) == ["shard-00001", "shard-00002"]
