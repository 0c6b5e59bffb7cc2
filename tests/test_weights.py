"""Published weights: what is read, what is refused, and that a round trip changes nothing."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmfn import tree, weights
from mmfn.param import Param, Part
from mmfn.tree import pytree


@pytree
class Small:
    """Weights of each kind of layout."""

    q: Any
    experts: Any
    table: Any
    norm: Any


SMALL = Small(
    q=Param((2, 3, 4, 6), "(kv_heads groups head_dim) embed", "q.weight"),
    experts=Param((2, 6, 2, 3), "expert embed (gate_up mlp)", "experts.gate_up"),
    table=Param((8, 6), "vocab embed", "embed.weight", copies=("head.weight",)),
    norm=Param((6,), "embed", "norm.weight"),
)
KEYS = ["q.weight", "experts.gate_up", "embed.weight", "norm.weight"]


def published(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Values for SMALL by published key, each of them different."""
    start = itertools.accumulate([leaf.size for leaf in tree.leaves(SMALL)], initial=1)
    return {
        leaf.key: torch.arange(first, first + leaf.size).to(dtype).reshape(leaf.published)
        for leaf, first in zip(tree.leaves(SMALL), start, strict=False)
    }


def write(folder: Path, files: dict[str, dict[str, Tensor]], index: Any = None) -> Path:
    """Write a folder of safetensors files and perhaps an index."""
    folder.mkdir()
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if index is not None:
        (folder / weights.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def assert_small(loaded: Any, dtype: torch.dtype = torch.float32) -> None:
    """Check a whole load of `published()`."""
    expected = published()
    for value, leaf in zip(tree.leaves(loaded), tree.leaves(SMALL), strict=True):
        assert value.dtype == dtype
        assert torch.equal(value, expected[leaf.key].reshape(leaf.shape).to(dtype))


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_leaf_is_a_reshape_of_the_published_tensor(
    tmp_path: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    """The values are integers up to 256, which every one of these dtypes holds."""
    values = {key: value % 256 for key, value in published().items()}
    folder = write(
        tmp_path / "a", {"model.safetensors": {k: v.to(stored) for k, v in values.items()}}
    )
    loaded = weights.load(SMALL, folder, dtype=dtype)
    for value, leaf in zip(tree.leaves(loaded), tree.leaves(SMALL), strict=True):
        assert value.dtype == dtype
        assert torch.equal(value, values[leaf.key].reshape(leaf.shape).to(dtype))


def test_files_may_be_one_or_indexed_or_just_disjoint(tmp_path: Path) -> None:
    """The index decides which files are read: others in the folder are not its weights."""
    values = published()
    first = {key: values[key] for key in KEYS[:2]}
    second = {key: values[key] for key in KEYS[2:]}
    index = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    files = {"a.safetensors": first, "b.safetensors": second}
    other = {"adapter.safetensors": {"lora": torch.ones(2)}}
    assert_small(weights.load(SMALL, write(tmp_path / "1", {"model.safetensors": values})))
    assert_small(weights.load(SMALL, write(tmp_path / "2", files | other, index)))
    assert_small(weights.load(SMALL, write(tmp_path / "3", files)))


def test_each_place_reads_its_part_of_the_whole(tmp_path: Path) -> None:
    """Random cuts of every axis, empty ones and strides among them, also inside fused axes."""
    folder = write(tmp_path / "a", {"model.safetensors": published()})
    whole = dict(tree.items(weights.load(SMALL, folder)))
    draw = random.Random(0)

    def cut(size: int) -> slice:
        start = draw.randint(0, size)
        return slice(start, draw.randint(start, size), draw.choice([1, 1, 2]))

    for _ in range(50):
        parts = {path: tuple(map(cut, p.shape)) for path, p in tree.items(SMALL)}
        loaded = weights.load(SMALL, folder, place=lambda path, _: (parts[path], lambda v: v))  # noqa: B023
        for path, value in tree.items(loaded):
            assert torch.equal(value, whole[path][parts[path]])
            assert value.is_contiguous()


def test_only_the_slices_of_a_place_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts what is asked of the files: outer axes of a fused dimension are cut exactly."""
    folder = write(tmp_path / "a", {"model.safetensors": published()})
    asked: dict[str, tuple[int, ...]] = {}
    monkeypatch.setattr(weights, "safe_open", lambda *args, **kwargs: _Spy(asked, *args, **kwargs))

    def second_head(path: str, leaf: Param) -> tuple[Part, Any]:
        cuts = [slice(0, size) for size in leaf.shape]
        for axis, kept in {"kv_heads": slice(1, 2), "groups": slice(1, 3)}.items():
            if axis in leaf.axes:
                cuts[leaf.axes.index(axis)] = kept
        return tuple(cuts), lambda value: value

    weights.load(SMALL, folder, place=second_head)
    assert asked["q.weight"] == (2 * 4, 6)
    assert asked["norm.weight"] == (6,)


class _Spy:
    """A safetensors reader that notes the shape of each slice read."""

    def __init__(self, asked: dict[str, tuple[int, ...]], *args: Any, **kwargs: Any) -> None:
        self.asked, self.context = asked, safe_open(*args, **kwargs)

    def __enter__(self) -> "_Spy":
        self.reader = self.context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self.reader.keys())

    def get_slice(self, key: str) -> "_SpySlice":
        return _SpySlice(self.asked, key, self.reader.get_slice(key))


class _SpySlice:
    """The slice of a `_Spy`."""

    def __init__(self, asked: dict[str, tuple[int, ...]], key: str, lazy: Any) -> None:
        self.asked, self.key, self.lazy = asked, key, lazy
        self.get_shape, self.get_dtype = lazy.get_shape, lazy.get_dtype

    def __getitem__(self, cuts: tuple[slice, ...]) -> Tensor:
        value: Tensor = self.lazy[cuts]
        self.asked[self.key] = tuple(value.shape)
        return value


def test_all_that_does_not_fit_is_named_before_a_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing, unexpected, wrongly shaped, of an unknown dtype, in two files: one message."""
    values = published()
    del values["q.weight"]
    values["extra.bias"] = torch.ones(2)
    values["norm.weight"] = torch.ones(5)
    values["experts.gate_up"] = values["experts.gate_up"].to(torch.float8_e4m3fn)
    folder = write(
        tmp_path / "a",
        {"a.safetensors": values, "b.safetensors": {"embed.weight": values["embed.weight"]}},
    )
    asked: dict[str, tuple[int, ...]] = {}
    monkeypatch.setattr(weights, "safe_open", lambda *args, **kwargs: _Spy(asked, *args, **kwargs))
    with pytest.raises(ValueError, match="does not hold these weights") as caught:
        weights.load(SMALL, folder)
    message = str(caught.value)
    assert str(folder) in message
    assert "1 missing (q.weight)" in message
    assert "1 unexpected (extra.bias in a.safetensors)" in message
    assert "1 of the wrong shape (norm.weight is (5,), needed (6,))" in message
    assert "(experts.gate_up is F8_E4M3)" in message
    assert "1 in two files (embed.weight in a.safetensors and b.safetensors)" in message
    assert asked == {}


def test_a_long_list_of_keys_is_cut_and_counted(tmp_path: Path) -> None:
    """Ten names and how many more."""
    extra = {f"extra{i:02d}": torch.ones(1) for i in range(13)}
    folder = write(tmp_path / "a", {"model.safetensors": published() | extra})
    with pytest.raises(ValueError, match=r"13 unexpected \(extra00 .*extra09 in .* and 3 more\)"):
        weights.load(SMALL, folder)


def test_a_copy_may_be_there_if_it_is_equal(tmp_path: Path) -> None:
    """A tied head in the files: equal, different, or there in place of the embedding."""
    values = published()
    same = write(
        tmp_path / "same",
        {"model.safetensors": values | {"head.weight": values["embed.weight"].clone()}},
    )
    assert_small(weights.load(SMALL, same))

    other = values["embed.weight"].clone()
    other[3, 2:4] += 1
    differs = write(tmp_path / "differs", {"model.safetensors": values | {"head.weight": other}})
    with pytest.raises(
        ValueError, match=r"head\.weight should be a copy of embed\.weight and .* 2 of 48"
    ):
        weights.load(SMALL, differs)

    values["head.weight"] = values.pop("embed.weight")
    assert_small(weights.load(SMALL, write(tmp_path / "only", {"model.safetensors": values})))


@pytest.mark.parametrize(
    "name", ["../../outside.safetensors", "/etc/outside.safetensors", "..", "", "a\\b.safetensors"]
)
def test_an_index_names_plain_files_of_its_folder(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is opened, neither there nor here."""
    index = {"q.weight": name, "embed.weight": "model.safetensors"}
    folder = write(tmp_path / "a", {"model.safetensors": published()}, index)
    monkeypatch.setattr(weights, "safe_open", lambda *args, **kwargs: pytest.fail("opened"))
    with pytest.raises(ValueError, match="is not a plain file name") as caught:
        weights.load(SMALL, folder)
    assert repr(name) in str(caught.value)
    assert weights.INDEX in str(caught.value)


def test_an_index_that_differs_from_its_files_is_refused(tmp_path: Path) -> None:
    """A key that is in another file, one that is in none, a file that is not there."""
    values = published()
    index = dict.fromkeys(KEYS, "a.safetensors")
    files = {
        "a.safetensors": {k: values[k] for k in KEYS[1:]},
        "b.safetensors": {"q.weight": values["q.weight"]},
    }
    index["norm.weight"] = "b.safetensors"
    folder = write(tmp_path / "a", files, index)
    with pytest.raises(
        ValueError, match=r"2 not where .* says \(q\.weight in a.*, norm\.weight in b"
    ):
        weights.load(SMALL, folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"b\.safetensors is missing"):
        weights.load(SMALL, folder)


def test_a_linked_file_is_read(tmp_path: Path) -> None:
    """The caches of model hubs hold links to files elsewhere."""
    store = write(tmp_path / "store", {"blob": published()})
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.safetensors").symlink_to(store / "blob")
    assert_small(weights.load(SMALL, tmp_path / "a"))


class _Evil:
    """An object that leaves a file behind when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    """A folder of pickles only, a pickle named by an index, a pickle called safetensors."""
    marker = tmp_path / "marker"
    (tmp_path / "a").mkdir()
    torch.save(_Evil(marker), tmp_path / "a" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no safetensors file; pytorch_model\.bin is a pickle"):
        weights.load(SMALL, tmp_path / "a")
    (tmp_path / "a" / weights.INDEX).write_text('{"weight_map": {"q.weight": "pytorch_model.bin"}}')
    with pytest.raises(ValueError, match=r"'pytorch_model\.bin', which is not safetensors"):
        weights.load(SMALL, tmp_path / "a")
    (tmp_path / "b").mkdir()
    torch.save(_Evil(marker), tmp_path / "b" / "model.safetensors")
    with pytest.raises(ValueError, match=r"b/model\.safetensors is not a whole safetensors file"):
        weights.load(SMALL, tmp_path / "b")
    assert not marker.exists()


def test_a_folder_or_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """No folder, an empty one, a file cut short, an index without a map."""
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        weights.load(SMALL, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no safetensors file$"):
        weights.load(SMALL, tmp_path / "empty")
    folder = write(tmp_path / "cut", {"model.safetensors": published()})
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=r"cut/model\.safetensors is not a whole safetensors file"):
        weights.load(SMALL, folder)
    (folder / weights.INDEX).write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        weights.load(SMALL, folder)


def test_loaded_weights_outlive_their_files(tmp_path: Path) -> None:
    """A leaf is memory of its own: steps may write to it, and files may go."""
    folder = write(tmp_path / "a", {"model.safetensors": published()})
    loaded = weights.load(SMALL, folder)
    loaded.norm.zero_()
    with open(folder / "model.safetensors", "r+b") as file:
        file.write(b"\0" * (folder / "model.safetensors").stat().st_size)
    (folder / "model.safetensors").unlink()
    assert torch.equal(loaded.q, published()["q.weight"].reshape(2, 3, 4, 6))


def test_two_leaves_cannot_have_one_key(tmp_path: Path) -> None:
    """Names both."""
    abstract = {"a": Param((2,), "embed", "w"), "b": Param((2,), "embed", "w")}
    folder = write(tmp_path / "x", {"model.safetensors": {"w": torch.ones(2)}})
    with pytest.raises(ValueError, match="leaves a and b have one published key, w"):
        weights.load(abstract, folder)
