"""Checkpoints: complete or absent, bit-equal, refused by the name of the file or the leaf."""

import hashlib
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from mmfn import checkpoint, tree
from mmfn.tree import pytree


@pytree
class State:
    """What a run carries, of all kinds of leaves."""

    params: Any
    moments: Any
    step: Any
    rng: Any


def example(seed: int = 0, step: int = 2) -> State:
    """Make a state; floats are random bits, NaNs among them."""
    random = torch.Generator().manual_seed(seed)

    def bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        size = (*shape[:-1], shape[-1] * dtype.itemsize)
        return torch.randint(0, 256, size, dtype=torch.uint8, generator=random).view(dtype)

    return State(
        params={"layers": (bits(3, 5, dtype=torch.float32), bits(4, dtype=torch.bfloat16))},
        moments=[torch.empty(0, 3), bits(2, dtype=torch.float64), None],
        step=torch.tensor(step),
        rng={"key": bits(2, dtype=torch.int64), "on": torch.tensor([True, False])},
    )


def blank(state: Any) -> Any:
    """Keep shapes and dtypes only."""
    return tree.map(torch.zeros_like, state)


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare two trees to the last bit."""
    assert tree.paths(ours) == tree.paths(theirs)
    for a, b in zip(tree.leaves(ours), tree.leaves(theirs), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.reshape(-1).view(torch.uint8).tolist() == b.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("file_bytes", [1, 64, 2**30])
def test_restore_gives_what_was_saved_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int
) -> None:
    """Floats of three widths, integers, booleans, 0-d and empty leaves; one file or many."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", file_bytes)
    state = example()
    meta = {"rate": 0.1, "config": {"layers": 3, "names": ["a", "ä"], "none": None}}
    folder = checkpoint.save(tmp_path, 2, state, meta, keep=1)
    assert folder == tmp_path / "checkpoints" / "step-00000002"
    restored, restored_meta = checkpoint.restore(tmp_path, 2, blank(state))
    assert_same(restored, state)
    assert restored_meta == meta
    assert type(restored) is State
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (file_bytes < 100)


def test_leaves_may_be_views_or_share_memory(tmp_path: Path) -> None:
    """Transposed, expanded, parts of one buffer, one tensor twice, one that needs gradients."""
    flat = torch.arange(12.0)
    state = {
        "transposed": flat.view(3, 4).T,
        "expanded": torch.ones(1).expand(4),
        "part": flat[3:7],
        "once": flat,
        "again": flat,
        "grad": torch.ones(2, requires_grad=True),
    }
    checkpoint.save(tmp_path, 0, state, {}, keep=1)
    restored, _ = checkpoint.restore(tmp_path, 0, {k: v.detach().clone() for k, v in state.items()})
    assert all(torch.equal(restored[key], value) for key, value in state.items())


def test_a_saved_state_may_be_overwritten(tmp_path: Path) -> None:
    """The next step writes to donated memory as soon as `save` returns."""
    state, saved = example(), example()
    checkpoint.save(tmp_path, 1, state, {}, keep=1)
    for leaf in tree.leaves(state):
        leaf.zero_()
    restored, _ = checkpoint.restore(tmp_path, 1, state)
    assert_same(restored, saved)
    assert not any(leaf.count_nonzero() for leaf in tree.leaves(state))


def test_a_donated_state_is_overwritten(tmp_path: Path) -> None:
    """No second copy: the leaves are those that were given."""
    checkpoint.save(tmp_path, 1, example(), {}, keep=1)
    like = blank(example())
    restored, _ = checkpoint.restore(tmp_path, 1, like, donate=True)
    assert all(a is b for a, b in zip(tree.leaves(like), tree.leaves(restored), strict=True))
    assert_same(restored, example())


def test_a_run_keeps_the_newest_and_what_is_later(tmp_path: Path) -> None:
    """Also the one just written when later ones are there: a run taken up again at an older one."""
    steps = lambda: sorted(path.name[-1] for path in (tmp_path / "checkpoints").iterdir())  # noqa: E731
    for step in range(1, 6):
        checkpoint.save(tmp_path, step, example(step), {}, keep=3)
    assert steps() == ["3", "4", "5"]
    checkpoint.save(tmp_path, 2, example(2), {}, keep=1)
    assert steps() == ["2", "3", "4", "5"]
    checkpoint.save(tmp_path, 7, example(7), {}, keep=1)
    assert steps() == ["7"]
    assert checkpoint.latest(tmp_path) == 7
    assert checkpoint.latest(tmp_path / "other") is None


def damage(folder: Path, how: str) -> str:
    """Damage a checkpoint; gives the name of the file that an error should name."""
    shard = next(folder.glob("*.safetensors"))
    match how:
        case "no shard":
            shard.unlink()
        case "short shard":
            shard.write_bytes(shard.read_bytes()[:-1])
        case "no manifest":
            shard = folder / "manifest.json"
            shard.unlink()
        case "no meta":
            shard = folder / "meta.json"
            shard.unlink()
        case "one more":
            shard = folder / "shard-00002-model-00001-of-00001.safetensors"
            shard.write_bytes(b"")
    return shard.name


@pytest.mark.parametrize("how", ["no shard", "short shard", "no manifest", "no meta", "one more"])
def test_a_damaged_checkpoint_is_passed_over_and_refused_by_name(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`latest` falls back to the one before and says why; `restore` names the file."""
    for step in (2, 4):
        checkpoint.save(tmp_path, step, example(step), {}, keep=2)
    name = damage(tmp_path / "checkpoints" / "step-00000004", how)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.latest(tmp_path) == 2
    assert f"step-00000004/{name}" in caplog.text
    with pytest.raises(ValueError, match=f"step-00000004/{name}"):
        checkpoint.restore(tmp_path, 4, example())
    checkpoint.save(tmp_path, 4, example(5), {}, keep=2)
    restored, _ = checkpoint.restore(tmp_path, checkpoint.latest(tmp_path) or 0, example())
    assert_same(restored, example(5))


def test_one_changed_bit_is_found(tmp_path: Path) -> None:
    """In the tensors, in their header, in the meta data: sizes stay as they were."""
    for step, part in enumerate(["shard-00001-model-00001-of-00001.safetensors", "meta.json"]):
        folder = checkpoint.save(tmp_path, step, example(), {"rate": 0.5}, keep=9)
        for place in (-3, 9):
            data = bytearray((folder / part).read_bytes())
            data[place] ^= 1
            (folder / part).write_bytes(data)
            assert checkpoint.latest(tmp_path) == step
            with pytest.raises(ValueError, match=f"{part} is not what was written"):
                checkpoint.restore(tmp_path, step, example())
            data[place] ^= 1
            (folder / part).write_bytes(data)


class _Evil:
    """An object that leaves a file behind when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("listed", [False, True])
def test_no_file_of_a_checkpoint_is_unpickled(tmp_path: Path, listed: bool) -> None:
    """Each file in turn becomes a pickle, which the manifest may list as if it were written so."""
    marker = tmp_path / "marker"
    first = checkpoint.save(tmp_path, 1, example(), {}, keep=9)
    for step, name in enumerate([path.name for path in first.iterdir()], start=2):
        folder = checkpoint.save(tmp_path, step, example(), {}, keep=9)
        torch.save(_Evil(marker), folder / name)
        if listed and name != "manifest.json":
            manifest = json.loads((folder / "manifest.json").read_text())
            data = (folder / name).read_bytes()
            manifest["files"][name] = [len(data), hashlib.sha256(data).hexdigest()]
            (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=f"{folder.name}/{name}"):
            checkpoint.restore(tmp_path, step, example())
    (first / ".metadata").write_bytes(pickle.dumps(_Evil(marker)))
    restored, _ = checkpoint.restore(tmp_path, 1, example(1))
    assert_same(restored, example())
    assert not marker.exists()


def test_a_manifest_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    """Paths, another step, another format, nothing of what it should hold."""
    folder = checkpoint.save(tmp_path, 1, example(), {}, keep=1)
    whole = json.loads((folder / "manifest.json").read_text())
    outside = {"../outside.safetensors": [0, ""]}
    for change, message in [
        ({"files": whole["files"] | outside}, r"'\.\./outside\.safetensors', .* not a plain"),
        ({"step": 3}, "manifest.json is of step 3, not of step-00000001"),
        ({"format": 9}, "manifest.json has format 9; this version reads 1"),
        ({"leaves": 5}, "manifest.json is not a manifest"),
        ({"files": {}}, "manifest.json does not list meta.json"),
    ]:
        (folder / "manifest.json").write_text(json.dumps(whole | change))
        with pytest.raises(ValueError, match=message):
            checkpoint.restore(tmp_path, 1, example())


def test_leaves_that_do_not_fit_are_all_named(tmp_path: Path) -> None:
    """Missing, unexpected, of another shape, of another dtype: with both values."""
    saved = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "d": torch.ones(2)}
    checkpoint.save(tmp_path, 3, saved, {}, keep=1)
    like = {"a": torch.ones(2), "b": torch.ones(2, 1), "c": torch.ones(2).int(), "e": torch.ones(2)}
    with pytest.raises(ValueError, match="step-00000003 and this run differ in 4 leaves") as caught:
        checkpoint.restore(tmp_path, 3, like)
    for part in [
        "b is (2,) float32 there and (2, 1) float32 here",
        "c is (2,) float32 there and (2,) int32 here",
        "d is only there",
        "e is missing there",
    ]:
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="step-00000004 does not exist; there are steps 3 in"):
        checkpoint.restore(tmp_path, 4, saved)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    """Before anything is written under the name of a step."""
    state: dict[str, Any] = {"a": torch.ones(2)}
    for bad, message in [
        ({"a": 3}, "a is a int, not a tensor"),
        ({"a": torch.ones(2, device="meta")}, "a is on the meta device"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, r"two leaves have the path a\.b"),
        ({}, "the state has no leaves"),
    ]:
        with pytest.raises(ValueError, match=message):
            checkpoint.save(tmp_path, 1, bad, {}, keep=1)
    with pytest.raises(ValueError, match=r"meta\.json\.loss is nan, which JSON cannot hold"):
        checkpoint.save(tmp_path, 1, state, {"loss": float("nan")}, keep=1)
    with pytest.raises(ValueError, match="step=1 and keep=0 should be at least 0 and 1"):
        checkpoint.save(tmp_path, 1, state, {}, keep=0)
    assert checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path, 1, state, {}, keep=1)
    with pytest.raises(ValueError, match="step-00000001 exists and is complete"):
        checkpoint.save(tmp_path, 1, state, {}, keep=1)


def test_a_full_disk_is_an_error_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an ordinary exception, and the checkpoint before is still there."""
    checkpoint.save(tmp_path, 1, example(), {}, keep=1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.HuggingFaceStorageWriter, "write_data", full)
        with pytest.raises(OSError, match=r"step-00000002\.partial cannot .* No space left"):
            checkpoint.save(tmp_path, 2, example(), {}, keep=1)
    assert checkpoint.latest(tmp_path) == 1
    checkpoint.save(tmp_path, 3, example(), {}, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
