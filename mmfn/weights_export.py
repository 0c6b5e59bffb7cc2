"""Published weights: from a tree of tensors to a folder of safetensors files.

Source: the safetensors format, version 0.4 and later; the index of Hugging Face's checkpoints.
"""

import json
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from mmfn import files as disk
from mmfn import tree
from mmfn.weights import DTYPES, INDEX, match

COMPANIONS = (".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Suffixes of the files that travel with weights: config, generation config, tokenizer, processor
and chat template. Indices of weights do not; code and weights never."""


def export(
    params: Any,
    abstract: Any,
    folder: Path,
    *,
    source: Path | None = None,
    files: Mapping[str, bytes | str] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5_000_000_000,
    fetch: Callable[[Tensor], Tensor] = lambda value: value,
    write: bool = True,
) -> None:
    """Write weights as a published folder that `load` and `transformers` read.

    With a `source` checkpoint the keys, their copies and the dtype of each tensor are its own, and
    its `COMPANIONS` are copied; without, keys are those of `abstract` and values keep their dtype.
    An explicit `dtype` comes before both (a config's own `dtype` entry stays as it is). `files`
    are written beside the weights, in place of copies of the same name. No file holds more than
    `shard_bytes` of tensors, unless it holds one. The folder appears when it is complete.

    Weights that are cut over ranks are made whole by `fetch`, one at a time. All ranks call this,
    and one of them does `write`.

    Raises:
        ValueError: the folder exists and is not empty, a leaf has another shape than its `Param`,
            the source holds other weights, a name in `files` is no plain name or is that of
            weights, a value is not finite, or is not in the dtype written; names them.
    """
    texts = files or {}
    for name in texts:
        if not disk.plain_name(name) or name == INDEX or name.endswith(".safetensors"):
            raise ValueError(f"files: {name!r} is not a plain file name, or is one of weights")
    values = _values(params, abstract)
    if source is None:
        written = [(path, p.key, dtype or values[path].dtype) for path, p in tree.items(abstract)]
    else:
        found, leaves = match(abstract, source)
        written = [
            (leaf.path, key, dtype or DTYPES[found[key].dtype])
            for leaf in leaves
            for key in leaf.keys
        ]
    shapes = {path: p.published for path, p in tree.items(abstract)}
    tensors = [
        _Tensor(key, shapes[path], kind, _source(path, values[path], kind, fetch))
        for path, key, kind in written
    ]
    if not write:
        for shard in _shards(tensors, shard_bytes):
            for tensor in _ordered(shard):
                tensor.make()
        return
    with disk.new_folder(Path(folder)) as partial:
        if source is not None:
            for path in _companions(source):
                shutil.copyfile(path, partial / path.name)
        for name, text in texts.items():
            (partial / name).write_bytes(text.encode() if isinstance(text, str) else text)
        _write_shards(tensors, partial, shard_bytes)


@attrs.frozen
class _Tensor:
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def _values(params: Any, abstract: Any) -> dict[str, Tensor]:
    values = dict(tree.items(params))
    wanted = dict(tree.items(abstract))
    if other := sorted(values.keys() ^ wanted.keys()):
        raise ValueError(f"params and abstract differ in {len(other)} leaves, first {other[0]}")
    for path, leaf in wanted.items():
        if tuple(values[path].shape) != leaf.shape:
            raise ValueError(f"{path} is {tuple(values[path].shape)}, needed {leaf.shape}")
    return values


def _source(
    path: str, value: Tensor, dtype: torch.dtype, fetch: Callable[[Tensor], Tensor]
) -> Callable[[], Tensor]:
    if dtype not in DTYPES.values():
        raise ValueError(f"{path} would be written as {dtype}; there are {', '.join(DTYPES)}")

    def make() -> Tensor:
        whole = fetch(value.detach())
        made = whole.to(dtype)
        if not bool(whole.isfinite().all()):
            lost = int((~whole.isfinite()).sum())
            raise ValueError(f"{path}: {lost} of {whole.numel()} values are not finite")
        if made.dtype != whole.dtype:
            lost = int((whole.isfinite() & ~made.isfinite()).sum())
            if lost:
                raise ValueError(f"{path}: {lost} finite values are not finite in {dtype}")
        return made.cpu().contiguous()

    return make


def _companions(source: Path) -> list[Path]:
    return [
        path
        for path in sorted(Path(source).iterdir())
        if path.suffix in COMPANIONS and not path.name.endswith(".index.json") and path.is_file()
    ]


def _shards(tensors: Sequence[_Tensor], shard_bytes: int) -> list[list[_Tensor]]:
    shards: list[list[_Tensor]] = [[]]
    held = 0
    for tensor in tensors:
        if shards[-1] and held + tensor.bytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.bytes
    return shards


def _ordered(tensors: Sequence[_Tensor]) -> list[_Tensor]:
    """Put wide types first, so that each tensor is aligned to its own width."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def _write_shards(tensors: Sequence[_Tensor], folder: Path, shard_bytes: int) -> None:
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        _write(shards[0], folder / "model.safetensors")
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(shard, folder / name)
        index |= {tensor.key: name for tensor in shard}
    total = sum(tensor.bytes for tensor in tensors)
    disk.write_json(
        folder / INDEX,
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))},
    )


def _write(tensors: Sequence[_Tensor], file: Path) -> None:
    """Write one safetensors file, holding one tensor at a time.

    The library's own writer wants all tensors of a file at once, which doubles the memory when
    they are cast. Layout: length of the header (uint64, little endian), header, tensors.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ordered = _ordered(tensors)
    start = 0
    for tensor in ordered:
        header[tensor.key] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.bytes],
        }
        start += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "xb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in ordered:
            out.write(tensor.make().reshape(-1).view(torch.uint8).numpy().data)
