"""Export: what is written is what `load` and `transformers` read, and nothing else."""

import json
import math
from pathlib import Path
from typing import Any

import attrs
import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

from mmfn import checkpoint, param, tree, weights
from mmfn.models import hub, qwen3_vl
from mmfn.param import Param
from mmfn.weights_export import export

SMALL = {
    "q": Param((2, 3, 4, 6), "(kv_heads groups head_dim) embed", "q.weight", spread=1.0),
    "experts": Param((2, 6, 2, 3), "expert embed (gate_up mlp)", "experts.gate_up", spread=1.0),
    "table": Param((8, 6), "vocab embed", "embed.weight", spread=1.0, copies=("head.weight",)),
    "norm": Param((6,), "embed", "norm.weight", spread=1.0),
}


@pytest.mark.parametrize("shard_bytes", [1, 700, 10**9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exported_tree_is_loaded_bit_for_bit(
    tmp_path: Path, shard_bytes: int, dtype: torch.dtype
) -> None:
    """Through one file a tensor, a few files, or one file."""
    params = param.init(SMALL, 0, dtype=dtype)
    export(params, SMALL, tmp_path / "a", shard_bytes=shard_bytes)
    loaded = weights.load(SMALL, tmp_path / "a", dtype=dtype)
    assert tree.paths(loaded) == tree.paths(params)
    for ours, theirs in zip(tree.leaves(params), tree.leaves(loaded), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    files = list((tmp_path / "a").glob("*.safetensors"))
    assert len(files) == {1: 4, 700: 2 if dtype == torch.float32 else 1, 10**9: 1}[shard_bytes]


def test_every_tensor_is_aligned_to_its_width(tmp_path: Path) -> None:
    """An odd number of two-byte values stands before none of four bytes."""
    abstract = {name: Param((3,), "embed", name) for name in "ab"}
    params = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(3)}
    export(params, abstract, tmp_path / "a")
    data = (tmp_path / "a" / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert size % 8 == 0
    assert header["b"]["data_offsets"] == [0, 12]
    assert header["a"]["data_offsets"] == [12, 18]


def test_shards_hold_what_the_index_says(tmp_path: Path) -> None:
    """At most `shard_bytes` a file, or one tensor; the library's own reader finds them whole."""
    params = param.init(SMALL, 0)
    export(params, SMALL, tmp_path / "a", shard_bytes=700)
    index = json.loads((tmp_path / "a" / weights.INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * param.count(SMALL)
    assert sorted(index["weight_map"]) == sorted(leaf.key for leaf in SMALL.values())
    names = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    assert names == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name in names:
        held = load_file(tmp_path / "a" / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == held.keys()
        assert sum(value.nbytes for value in held.values()) <= 700 or len(held) == 1
        with safe_open(tmp_path / "a" / name, framework="pt") as reader:
            assert reader.metadata() == {"format": "pt"}


def test_an_export_has_the_keys_and_dtypes_of_its_source(tmp_path: Path) -> None:
    """Mixed dtypes, a copy of the tied table, and the files that travel along, but no code."""
    values = {
        leaf.key: value.bfloat16().reshape(leaf.published)
        for leaf, value in zip(SMALL.values(), param.init(SMALL, 0).values(), strict=True)
    }
    values["norm.weight"] = values["norm.weight"].float()
    values["head.weight"] = values["embed.weight"].clone()
    source = tmp_path / "source"
    source.mkdir()
    save_file(values, source / "model.safetensors")
    travels = ["config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", "spiece.model"]
    for name in [*travels, "evil.py", "pytorch_model.bin", "pytorch_model.bin.index.json"]:
        (source / name).write_text(name)
    params = weights.load(SMALL, source)
    export(params, SMALL, tmp_path / "a", source=source, files={"config.json": "{}"})
    written = load_file(tmp_path / "a" / "model.safetensors")
    assert written.keys() == values.keys()
    for key, value in values.items():
        assert written[key].dtype == value.dtype
        assert torch.equal(written[key], value)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(["model.safetensors", *travels])
    assert (tmp_path / "a" / "config.json").read_text() == "{}"
    assert (tmp_path / "a" / "merges.txt").read_text() == "merges.txt"


def test_master_weights_are_rounded_once_on_export(tmp_path: Path) -> None:
    """What 500 steps of 1e-5 leave of 1.0 is 0.994993; in bfloat16 that is 0.99609375."""
    abstract = {"w": Param((1,), "embed", "w")}
    export({"w": torch.tensor([0.994993])}, abstract, tmp_path / "a", dtype=torch.bfloat16)
    written = load_file(tmp_path / "a" / "model.safetensors")["w"]
    assert written.dtype == torch.bfloat16
    assert written.item() == 0.99609375


def test_what_cannot_be_exported_is_named(tmp_path: Path) -> None:
    """Values out of range, shapes, leaves, names and dtypes; nothing is left behind."""
    abstract = {"w": Param((2,), "embed", "w")}
    params = {"w": torch.tensor([1e6, 1.0])}
    out = tmp_path / "a"
    with pytest.raises(ValueError, match=r"w: 1 finite values are not finite in torch\.float16"):
        export(params, abstract, out, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"w would be written as torch\.int8; there are F64, F32"):
        export(params, abstract, out, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"w is \(3,\), needed \(2,\)"):
        export({"w": torch.ones(3)}, abstract, out)
    with pytest.raises(ValueError, match="params and abstract differ in 2 leaves, first v"):
        export({"v": torch.ones(2)}, abstract, out)
    for name in ["../x.json", "model.safetensors", weights.INDEX]:
        with pytest.raises(ValueError, match=f"files: '{name}' is not a plain file name"):
            export(params, abstract, out, files={name: "x"})
    assert list(tmp_path.iterdir()) == []


def test_an_export_never_adds_to_a_folder(tmp_path: Path) -> None:
    """An empty folder is fine, any other is refused and left as it is."""
    abstract, params = {"w": Param((2,), "embed", "w")}, {"w": torch.ones(2)}
    (tmp_path / "a").mkdir()
    export(params, abstract, tmp_path / "a")
    with pytest.raises(ValueError, match="a exists and is not an empty folder"):
        export({"w": torch.zeros(2)}, abstract, tmp_path / "a")
    assert torch.equal(weights.load(abstract, tmp_path / "a")["w"], torch.ones(2))


def read_by_transformers(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a folder with `transformers`: its tensors, and what it says of keys."""
    model, report = Qwen3VLForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True
    )
    return model.state_dict(), report


@pytest.mark.parametrize(
    ("tied", "count", "size", "loss"),
    [(False, 105, 277_696, 5.303901), (True, 104, 261_312, 5.417253)],
)
def test_a_published_model_passes_through_unchanged(
    tmp_path: Path, tied: bool, count: int, size: int, loss: float
) -> None:
    """The keys, shapes and values that `transformers` wrote, in shards of 100 kB; it reads them.

    The loss of what was loaded, exported, loaded, saved and restored is that of the reference.
    """
    cfg = attrs.evolve(tiny.CONFIG, tied=tied)
    tiny.reference(cfg, exact=False).save_pretrained(tmp_path / "source")
    values = load_file(tmp_path / "source" / "model.safetensors")
    abstract = qwen3_vl.abstract(cfg)
    params = weights.load(abstract, tmp_path / "source")
    for leaf, value in zip(tree.leaves(abstract), tree.leaves(params), strict=True):
        assert torch.equal(value, values[leaf.key].reshape(leaf.shape))

    out = tmp_path / "out"
    export(params, abstract, out, source=tmp_path / "source", shard_bytes=100_000)
    index = json.loads((out / weights.INDEX).read_text())
    assert index["metadata"]["total_size"] == size
    assert len(index["weight_map"]) == count
    assert index["weight_map"].keys() == values.keys()
    assert len(set(index["weight_map"].values())) > 1
    assert (out / "config.json").read_bytes() == (tmp_path / "source/config.json").read_bytes()
    for file in set(index["weight_map"].values()):
        for key, value in load_file(out / file).items():
            assert torch.equal(value, values[key])
            assert value.dtype == values[key].dtype

    found, report = read_by_transformers(out)
    assert not any(report.values()), report
    assert all(torch.equal(found[key], value) for key, value in values.items())

    checkpoint.save(tmp_path, 1, weights.load(abstract, out), {}, keep=1)
    restored, _ = checkpoint.restore(tmp_path, 1, params)
    batch = tiny.batch(tiny.encoded("A", "last4"))
    assert qwen3_vl.loss(restored, batch, cfg).item() == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_our_own_is_read_by_transformers(tmp_path: Path, tied: bool) -> None:
    """Without a source: the config is written beside the weights, in the dtype asked for."""
    cfg = attrs.evolve(tiny.CONFIG, tied=tied)
    abstract = qwen3_vl.abstract(cfg)
    params = param.init(abstract, 0)
    config = json.dumps(hub.to_hub(cfg))
    export(params, abstract, tmp_path / "a", files={"config.json": config}, dtype=torch.bfloat16)
    found, report = read_by_transformers(tmp_path / "a")
    assert not any(report.values()), report
    for leaf, value in zip(tree.leaves(abstract), tree.leaves(params), strict=True):
        assert torch.equal(found[leaf.key].bfloat16(), value.bfloat16().reshape(leaf.published))
    head, embedding = found["lm_head.weight"], found["model.language_model.embed_tokens.weight"]
    assert (head.data_ptr() == embedding.data_ptr()) == tied


def test_weights_that_are_not_finite_are_neither_written_nor_read(tmp_path: Path) -> None:
    """The leaf or the file and key are named."""
    abstract = {"w": Param((3,), "embed", "w")}
    params = {"w": torch.tensor([1.0, math.nan, math.inf])}
    with pytest.raises(ValueError, match="w: 2 of 3 values are not finite"):
        export(params, abstract, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").mkdir()
    save_file(params, tmp_path / "b" / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors: w has values that are not finite"):
        weights.load(abstract, tmp_path / "b")
