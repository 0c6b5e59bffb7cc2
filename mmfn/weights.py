"""Published weights: from a folder of safetensors files to a tree of tensors.

Only safetensors and JSON files are read, never pickles (`.bin`, `.pt`) and never code. Files are
named by `model.safetensors.index.json`, or, without one, are all `*.safetensors` of the folder.
A file may be a link to elsewhere, as in the caches of model hubs; an entry of an index may only be
a plain name.

Source: the safetensors format, version 0.4 and later; the index of Hugging Face's checkpoints.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmfn import files as disk
from mmfn import param, tree
from mmfn.param import Param, Part, Piece, Place

INDEX = "model.safetensors.index.json"

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Names of dtypes in safetensors files, of those that weights are read from and written in."""


READ_VALUES = 2**24
"""Values of a tensor that are read at a time."""


@attrs.frozen
class Entry:
    """A tensor in a file: what the header says of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it: `BF16`."""


@attrs.frozen
class Found:
    """A leaf, and the tensors of a folder that hold it."""

    path: str
    param: Param
    pieces: tuple[Piece, ...]
    """Those that are read, which together hold it once."""
    copies: tuple[Piece, ...] = ()
    """Those that hold the same again."""


def load(
    abstract: Any,
    folder: Path,
    *,
    dtype: torch.dtype | Callable[[str, torch.dtype], torch.dtype] = torch.float32,
    place: Place = param.whole,
    form: str = "",
) -> Any:
    """Read published weights into a tree like `abstract`, each leaf in `dtype`.

    A function of (path, dtype of the file) may say in which.
    `place` says which part of a leaf is read here and how it is wrapped. Some rows of one tensor
    are held in the dtype of the file at a time. Where a leaf's own key is absent, one of its copies
    is read; where both are there, they must be equal. Leaves that have several forms are read in
    the one that all of the folder are in, or in `form`.

    Raises:
        ValueError: no such folder or no safetensors in it, a damaged file, an index that points
            elsewhere; keys that are missing, unexpected or in two files, shapes and dtypes that
            do not fit, all of them in one message, before any tensor is read; forms of which
            none or several fit; unequal copies; values that are not finite.
    """
    found, leaves = match(abstract, folder, form)
    kinds = [
        dtype if isinstance(dtype, torch.dtype)
        else dtype(leaf.path, DTYPES[found[leaf.pieces[0].key].dtype])
        for leaf in leaves
    ]  # fmt: skip
    _check_copies(found, leaves, kinds, place)
    places = [place(leaf.path, leaf.param) for leaf in leaves]
    values: list[Any] = [None] * len(leaves)
    left = [len(leaf.pieces) for leaf in leaves]
    by_file: dict[Path, list[tuple[int, Piece]]] = {}
    for index, leaf in enumerate(leaves):
        for piece in leaf.pieces:
            by_file.setdefault(found[piece.key].file, []).append((index, piece))
    for file, held in by_file.items():
        with _reading(file) as reader:
            for index, piece in held:
                part, wrap = places[index]
                if values[index] is None:
                    values[index] = _room(leaves[index].param, part, kinds[index])
                if not _fill(values[index], reader, leaves[index].param, piece, part):
                    raise ValueError(f"{file}: {piece.key} has values that are not finite")
                left[index] -= 1
                if not left[index]:
                    values[index] = wrap(values[index])
    return tree.unflatten(abstract, values)


def match(abstract: Any, folder: Path, form: str = "") -> tuple[dict[str, Entry], list[Found]]:
    """Find the tensors of a tree in a folder: what is in it by key, and where each leaf is.

    Raises:
        ValueError: as `load`, before any tensor is read.
    """
    found, problems = _scan(folder)
    form = form or _form(abstract, folder, found)
    missing, shapes, dtypes = [], [], []
    leaves = []
    owner: dict[str, str] = {}
    for path, leaf in tree.items(abstract):
        pieces = leaf.pieces(form)
        copies = [attrs.evolve(pieces[0], key=key) for key in leaf.copies]
        for piece in (*pieces, *copies):
            if piece.key in owner:
                raise ValueError(
                    f"leaves {owner[piece.key]} and {path} have one published key, {piece.key}"
                )
            owner[piece.key] = path
        there = [piece for piece in (*pieces, *copies) if piece.key in found]
        if not there or (len(pieces) > 1 and len(there) < len(pieces)):
            keys = {piece.key for piece in there}
            missing += [piece.key for piece in pieces if piece.key not in keys]
        for piece in there:
            entry = found[piece.key]
            if entry.shape != piece.published:
                shapes.append(f"{piece.key} is {entry.shape}, needed {piece.published}")
            if entry.dtype not in DTYPES:
                dtypes.append(f"{piece.key} is {entry.dtype}")
        once = len(pieces)
        leaves.append(Found(path, leaf, tuple(there[:once]), tuple(there[once:])))
    unexpected = [f"{key} in {entry.file.name}" for key, entry in found.items() if key not in owner]
    problems |= {
        "missing": missing,
        "unexpected": unexpected,
        "of the wrong shape": shapes,
        f"of a dtype that is none of {', '.join(DTYPES)}": dtypes,
    }
    _refuse(folder, problems)
    return found, leaves


def _form(abstract: Any, folder: Path, found: Mapping[str, Entry]) -> str:
    """Name the form in which a folder holds the leaves that have several; all are looked at.

    Where none fits it is one that some tensors are in, whose problems are then told.
    """
    leaves = [leaf for leaf in tree.leaves(abstract) if leaf.forms]
    if not leaves:
        return ""
    fits: dict[str, list[str]] = {}
    whole = []
    for name in (leaves[0].form, *(other.name for other in leaves[0].forms)):
        pieces = [piece for leaf in leaves for piece in leaf.pieces(name)]
        fits[name] = [
            piece.key
            for piece in pieces
            if piece.key in found and found[piece.key].shape == piece.published
        ]
        if len(fits[name]) == len(pieces):
            whole.append(name)
    if len(whole) > 1:
        raise ValueError(
            f"{folder} fits the forms {' and '.join(whole)} alike, as sizes of axes coincide; "
            f"say which it is: form=, --model.form"
        )
    some = [name for name, keys in fits.items() if keys]
    if not whole and len(some) > 1:
        told = ", ".join(f"{fits[name][0]} is in form {name}" for name in some)
        raise ValueError(f"{folder} does not hold all weights in one form: {told}")
    return (whole or some or [leaves[0].form])[0]


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


def _room(leaf: Param, part: Part, dtype: torch.dtype) -> Tensor:
    """Make room for a part of a leaf."""
    shape = [len(range(*cut.indices(n))) for cut, n in zip(part, leaf.shape, strict=True)]
    return torch.empty(shape, dtype=dtype)


def _fill(value: Tensor, reader: Any, leaf: Param, piece: Piece, part: Part) -> bool:
    """Copy what a tensor holds of a part of a leaf there; gives whether all of it is finite."""
    kept = [range(*cut.indices(size)) for cut, size in zip(part, leaf.shape, strict=True)]
    if any(entry not in kept[dim] for dim, entry in piece.at):
        return True
    value = piece.view(value, {dim: kept[dim].index(entry) for dim, entry in piece.at})
    if not value.numel():
        return True
    finite, lazy = True, reader.get_slice(piece.key)
    first, *others = (kept[dim] for dim in piece.dims)
    # Rows at a time: what is read is a copy in the dtype of the file.
    rows = max(1, READ_VALUES // value[0].numel())
    for start in range(0, len(first), rows):
        mine = [first[start : start + rows], *others]
        cuts, shape, rest = [], [], []
        for axes in piece.fused:
            cut, sizes, after = _cut([mine[a] for a in axes], [piece.shape[a] for a in axes])
            cuts.append(cut)
            shape += sizes
            rest += after
        here = value[start : start + rows]
        here.copy_(lazy[tuple(cuts)].reshape(shape)[tuple(rest)])
        finite = finite and bool(here.isfinite().all())
    return finite


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
    found: Mapping[str, Entry],
    leaves: Sequence[Found],
    kinds: Sequence[torch.dtype],
    place: Place,
) -> None:
    for leaf, dtype in zip(leaves, kinds, strict=True):
        part, _ = place(leaf.path, leaf.param)
        parts = []
        for piece in (*leaf.pieces, *leaf.copies) if leaf.copies else ():
            with _reading(found[piece.key].file) as reader:
                parts.append(_room(leaf.param, part, dtype))
                _fill(parts[-1], reader, leaf.param, piece, part)
        for piece, other in zip(leaf.copies, parts[1:], strict=True):
            if not torch.equal(parts[0], other):
                raise ValueError(
                    f"{found[piece.key].file}: {piece.key} should be a copy of "
                    f"{leaf.pieces[0].key} and differs in "
                    f"{int((parts[0] != other).sum())} of {other.numel()} values"
                )
