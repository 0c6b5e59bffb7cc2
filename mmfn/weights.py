"""Published weights: from a folder of safetensors files to a tree of tensors.

Only safetensors and JSON files are read, never pickles (`.bin`, `.pt`) and never code. Files are
named by `model.safetensors.index.json`, or, without one, are all `*.safetensors` of the folder.
A file may be a link to elsewhere, as in the caches of model hubs; an entry of an index may only be
a plain name.

Source: the safetensors format, version 0.4 and later; the index of Hugging Face's checkpoints.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmfn import files as disk
from mmfn import param, tree
from mmfn.param import Param, Part, Place

INDEX = "model.safetensors.index.json"

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Names of dtypes in safetensors files, of those that weights are read from and written in."""


@attrs.frozen
class Entry:
    """A tensor in a file: what the header says of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it: `BF16`."""


@attrs.frozen
class Found:
    """A leaf, and the keys under which a folder holds it."""

    path: str
    param: Param
    keys: tuple[str, ...]
    """Keys under which the folder holds it: the one that is read, then its copies."""


def load(
    abstract: Any, folder: Path, *, dtype: torch.dtype = torch.float32, place: Place = param.whole
) -> Any:
    """Read published weights into a tree like `abstract`, each leaf in `dtype`.

    `place` says which part of a leaf is read here and how it is wrapped. One tensor is held in
    the dtype of the file at a time. Where a leaf's own key is absent, one of its copies is read;
    where both are there, they must be equal.

    Raises:
        ValueError: no such folder or no safetensors in it, a damaged file, an index that points
            elsewhere; keys that are missing, unexpected or in two files, shapes and dtypes that
            do not fit, all of them in one message, before any tensor is read; unequal copies;
            values that are not finite.
    """
    found, leaves = match(abstract, folder)
    _check_copies(found, leaves, dtype, place)
    values: list[Any] = [None] * len(leaves)
    for file in dict.fromkeys(found[leaf.keys[0]].file for leaf in leaves):
        with _reading(file) as reader:
            for index, leaf in enumerate(leaves):
                if found[leaf.keys[0]].file == file:
                    part, wrap = place(leaf.path, leaf.param)
                    value = _read(reader, leaf.keys[0], leaf.param, part, dtype)
                    if not bool(value.isfinite().all()):
                        raise ValueError(f"{file}: {leaf.keys[0]} has values that are not finite")
                    values[index] = wrap(value)
    return tree.unflatten(abstract, values)


def match(abstract: Any, folder: Path) -> tuple[dict[str, Entry], list[Found]]:
    """Find the tensors of a tree in a folder: what is in it by key, and where each leaf is.

    Raises:
        ValueError: as `load`, before any tensor is read.
    """
    found, problems = _scan(folder)
    missing, shapes, dtypes = [], [], []
    leaves = []
    owner: dict[str, str] = {}
    for path, leaf in tree.items(abstract):
        for key in (leaf.key, *leaf.copies):
            if key in owner:
                raise ValueError(f"leaves {owner[key]} and {path} have one published key, {key}")
            owner[key] = path
        keys = tuple(key for key in (leaf.key, *leaf.copies) if key in found)
        if not keys:
            missing.append(leaf.key)
        for key in keys:
            if found[key].shape != leaf.published:
                shapes.append(f"{key} is {found[key].shape}, needed {leaf.published}")
            if found[key].dtype not in DTYPES:
                dtypes.append(f"{key} is {found[key].dtype}")
        leaves.append(Found(path, leaf, keys))
    unexpected = [f"{key} in {entry.file.name}" for key, entry in found.items() if key not in owner]
    problems |= {
        "missing": missing,
        "unexpected": unexpected,
        "of the wrong shape": shapes,
        f"of a dtype that is none of {', '.join(DTYPES)}": dtypes,
    }
    _refuse(folder, problems)
    return found, leaves


def _refuse(folder: Path, problems: Mapping[str, Sequence[str]]) -> None:
    parts = []
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            parts.append(f"{len(names)} {kind} ({', '.join(names[:10])}{more})")
    if parts:
        raise ValueError(f"{folder} does not hold these weights: {'; '.join(parts)}")


def _scan(folder: Path) -> tuple[dict[str, Entry], dict[str, list[str]]]:
    files, index = _files(Path(folder))
    found: dict[str, Entry] = {}
    twice = []
    for file in files:
        with _reading(file) as reader:
            for key in reader.keys():  # noqa: SIM118 (not a mapping)
                lazy = reader.get_slice(key)
                if key in found:
                    twice.append(f"{key} in {found[key].file.name} and {file.name}")
                found[key] = Entry(file, tuple(lazy.get_shape()), lazy.get_dtype())
    astray = [
        f"{key} in {name}"
        for key, name in index.items()
        if key not in found or found[key].file.name != name
    ]
    return found, {"in two files": twice, f"not where {INDEX} says": astray}


def _files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if (folder / INDEX).exists():
        index = disk.read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ValueError(f"{folder / INDEX} has no weight_map")
        for name in index.values():
            if not isinstance(name, str) or not disk.plain_name(name):
                raise ValueError(f"{folder / INDEX} names {name!r}, which is not a plain file name")
            if not name.endswith(".safetensors"):
                raise ValueError(f"{folder / INDEX} names {name!r}, which is not safetensors")
        return [folder / name for name in sorted(set(index.values()))], index
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(
            path.name
            for path in folder.iterdir()
            if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl")
        )
        also = f"; {pickles[0]} is a pickle, which is never opened" if pickles else ""
        raise ValueError(f"{folder} has no safetensors file{also}")
    return files, {}


@contextmanager
def _reading(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as reader:
            yield reader
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing") from error
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error


def _read(reader: Any, key: str, leaf: Param, part: Part, dtype: torch.dtype) -> Tensor:
    """Read a part of a leaf, a copy that no longer needs the file."""
    kept = [range(*cut.indices(size)) for cut, size in zip(part, leaf.shape, strict=True)]
    value = torch.empty([len(run) for run in kept], dtype=dtype)
    if value.numel():
        cuts, shape, rest = [], [], []
        for dims in leaf.fused:
            cut, sizes, after = _cut([kept[d] for d in dims], [leaf.shape[d] for d in dims])
            cuts.append(cut)
            shape += sizes
            rest += after
        value.copy_(reader.get_slice(key)[tuple(cuts)].reshape(shape)[tuple(rest)])
    return value


def _cut(kept: list[range], sizes: list[int]) -> tuple[slice, list[int], list[slice]]:
    """Translate a cut of fused axes to a run of the published dimension.

    The run is exact as far as the outer axes are cut to one index and the next to a range; gives
    the run, the sizes of what is read in axes, and what is still to be cut there.
    """
    start, stop = 0, torch.Size(sizes).numel()
    shape = list(sizes)
    rest = [slice(run.start, run.stop, run.step) for run in kept]
    for axis, run in enumerate(kept):
        inner = torch.Size(sizes[axis + 1 :]).numel()
        stop = start + (run[-1] + 1) * inner
        start += run[0] * inner
        shape[axis] = run[-1] + 1 - run[0]
        rest[axis] = slice(0, shape[axis], run.step)
        if shape[axis] > 1:
            break
    return slice(start, stop), shape, rest


def _check_copies(
    found: Mapping[str, Entry], leaves: Sequence[Found], dtype: torch.dtype, place: Place
) -> None:
    for leaf in leaves:
        part, _ = place(leaf.path, leaf.param)
        parts = []
        for key in leaf.keys if len(leaf.keys) > 1 else ():
            with _reading(found[key].file) as reader:
                parts.append(_read(reader, key, leaf.param, part, dtype))
        for key, other in zip(leaf.keys[1:], parts[1:], strict=True):
            if not torch.equal(parts[0], other):
                raise ValueError(
                    f"{found[key].file}: {key} should be a copy of {leaf.keys[0]} and differs in "
                    f"{int((parts[0] != other).sum())} of {other.numel()} values"
                )
