"""Checkpoints are written behind the steps: of the state as it was, one at a time, errors told."""

import threading
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

from mmfn import checkpoint, optim, schedules, tree
from mmfn.behind import behind
from mmfn.models import qwen3_vl
from mmfn.sharding import layout, simulate
from mmfn.sharding import mesh as meshes
from mmfn.sharding.rules import Spec
from mmfn.train import make_step, start

COPY = layout.to_host


def test_steps_go_on_while_a_state_is_written(tmp_path: Path) -> None:
    """A save that is held up: two more steps write into the state, and what is saved is the old."""
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedules.constant(1e-2)))
    step = make_step(lambda p, b: qwen3_vl.loss(p, b, tiny.CONFIG), optimizer)
    batch = tiny.batch(tiny.encoded("T"))
    state, _ = step(start(tiny.params(), optimizer), (batch,))
    before = [leaf.clone() for leaf in tree.leaves(state)]
    go = threading.Event()

    def save(state, at: int) -> None:
        assert go.wait(60)
        checkpoint.save(tmp_path, at, state, {"at": at}, keep=9)

    with behind(save, COPY) as keep:
        keep(state, 1)
        for _ in range(2):
            state, _ = step(state, (batch,))
        assert not (tmp_path / "checkpoints").exists()
        go.set()
        keep(state, 3)
        assert checkpoint.latest(tmp_path) == 1
    assert checkpoint.latest(tmp_path) == 3
    restored, meta = checkpoint.restore(tmp_path, 1, state)
    assert meta == {"at": 1}
    assert all(map(torch.equal, tree.leaves(restored), before))
    assert not all(map(torch.equal, tree.leaves(state.params), before))


def test_what_goes_wrong_is_raised_once() -> None:
    """At the next save, or at the end; but the run's own error comes first."""

    def fail(state: Tensor, at: int) -> None:
        raise OSError(f"no room for step {at}")

    state = torch.ones(1)
    with behind(fail, COPY) as keep:
        keep(state, 1)
        with pytest.raises(OSError, match="no room for step 1"):
            keep(state, 2)
    with pytest.raises(OSError, match="no room for step 3"), behind(fail, COPY) as keep:
        keep(state, 3)

    def broken() -> None:
        with behind(fail, COPY) as keep:
            keep(state, 4)
            raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        broken()


def written(rank: int, folder: Path) -> bool:
    """Save in parts, on a group of its own, while other calls go on."""
    mesh, own = layout_of_two()
    value = torch.arange(10.0)[own.part(mesh)]
    state = {"w": layout.wrap(value, own, mesh)}
    group = torch.distributed.new_group(backend="gloo")

    def save(state, at: int) -> None:
        checkpoint.save(folder, at, state, {}, keep=1, group=group)

    with behind(save, COPY) as keep:
        keep(state, 1)
        state["w"].to_local().add_(1.0)
        for _ in range(50):
            torch.distributed.all_reduce(torch.ones(3))
    like = {"w": layout.wrap(torch.zeros_like(value), own, mesh)}
    restored, _ = checkpoint.restore(folder, 1, like, group=group)
    return torch.equal(layout.full(restored["w"]), torch.arange(10.0))


def layout_of_two():
    """Give a mesh of two ranks and the spec of a leaf that is cut over it."""

    return meshes.make(meshes.Sizes(fsdp=2)), Spec((10,), (("fsdp", 0),))


def test_ranks_write_their_parts_behind(tmp_path: Path) -> None:
    """Their calls do not meet those of the steps."""
    assert simulate.run(2, written, tmp_path) == [True, True]
