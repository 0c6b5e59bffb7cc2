"""Published weights: from a tree of tensors to a folder of safetensors files.

Source: the safetensors format, version 0.4 and later; the index of Hugging Face's checkpoints.
"""

import json
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from mmfn import files as disk
from mmfn import tree
from mmfn.param import Piece
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
    form: str = "",
    source_form: str = "",
    shard_bytes: int = 5_000_000_000,
    name: str = "model",
    fetch: Callable[[Tensor], Tensor] = lambda value: value,
    write: bool = True,
) -> None:
    """Write weights as a published folder that `load` and `transformers` read.

    With a `source` checkpoint the keys, their form, their copies and the dtype of each tensor are
    its own, and its `COMPANIONS` are copied; without, keys are those of `abstract` and values keep
    their dtype. An explicit `dtype` comes before both (a config's own `dtype` entry stays as it
    is), and so does the `form` of leaves that have several; `source_form` is for a source whose
    form cannot be told. `files` are written beside the weights, in place of copies of the same
    name. No file holds more than `shard_bytes` of tensors, unless it holds one; they are called by
    `name`. The folder appears when it is complete.

    Weights that are cut over ranks are made whole by `fetch`, one at a time. All ranks call this,
    and one of them does `write`.

    Raises:
        ValueError: the folder exists and is not empty, a leaf has another shape than its `Param`,
            the source holds other weights, a name in `files` is no plain name or is that of
            weights, a value is not finite, or is not in the dtype written; names them.
    """
    texts = files or {}
    for text in texts:
        if not disk.plain_name(text) or text == INDEX or text.endswith(".safetensors"):
            raise ValueError(f"files: {text!r} is not a plain file name, or is one of weights")
    values = _values(params, abstract)
    checked = _checked(values, fetch)
    tensors = [
        _Tensor(piece.key, piece.published, kind, partial(checked, path, piece, kind))
        for path, piece, kind in _written(values, abstract, source, source_form, form, dtype)
    ]
    if not write:
        for shard in _shards(tensors, shard_bytes):
            for tensor in _ordered(shard):
                tensor.make()
        return
    with disk.new_folder(Path(folder)) as unfinished:
        if source is not None:
            for path in _companions(source):
                shutil.copyfile(path, unfinished / path.name)
        for file, content in texts.items():
            data = content.encode() if isinstance(content, str) else content
            (unfinished / file).write_bytes(data)
        _write_shards(tensors, unfinished, shard_bytes, name)


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


def _written(
    values: Mapping[str, Tensor],
    abstract: Any,
    source: Path | None,
    source_form: str,
    form: str,
    dtype: torch.dtype | None,
) -> list[tuple[str, Piece, torch.dtype]]:
    """List the tensors to write: path of the leaf, which of its pieces, dtype."""
    if source is None:
        rows = [
            (path, piece, dtype or values[path].dtype)
            for path, leaf in tree.items(abstract)
            for piece in leaf.pieces(form)
        ]
    else:
        found, leaves = match(abstract, source, source_form)
        rows = []
        for leaf in leaves:
            own = (*leaf.pieces, *leaf.copies)
            kinds = [dtype or DTYPES[found[piece.key].dtype] for piece in own]
            if form and leaf.param.forms:
                own = leaf.param.pieces(form)
                kinds = [kinds[0]] * len(own)
            rows += [(leaf.path, *row) for row in zip(own, kinds, strict=True)]
    for path, _, kind in rows:
        if kind not in DTYPES.values():
            raise ValueError(f"{path} would be written as {kind}; there are {', '.join(DTYPES)}")
    return rows


def _checked(
    values: Mapping[str, Tensor], fetch: Callable[[Tensor], Tensor]
) -> Callable[[str, Piece, torch.dtype], Tensor]:
    """Make the function that gives a published tensor; it holds one whole leaf at a time."""
    held: dict[str, Tensor] = {}

    def make(path: str, piece: Piece, dtype: torch.dtype) -> Tensor:
        if path not in held:
            held.clear()
            held[path] = fetch(values[path].detach())
            if not bool(held[path].isfinite().all()):
                lost = int((~held[path].isfinite()).sum())
                raise ValueError(f"{path}: {lost} of {held[path].numel()} values are not finite")
        part = piece.view(held[path])
        made = part.to(dtype)
        if made.dtype != part.dtype:
            lost = int((part.isfinite() & ~made.isfinite()).sum())
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


def _write_shards(tensors: Sequence[_Tensor], folder: Path, shard_bytes: int, name: str) -> None:
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        _write(shards[0], folder / f"{name}.safetensors")
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"{name}-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(shard, folder / file)
        index |= {tensor.key: file for tensor in shard}
    total = sum(tensor.bytes for tensor in tensors)
    disk.write_json(
        folder / f"{name}.safetensors.index.json",
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
