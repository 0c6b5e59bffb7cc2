"""A parameter before it has values, and what follows from a tree of them.

`models.X.abstract(config)` gives a tree with a `Param` at each leaf. It holds no memory; initial
weights, published weights, placements, plans and tables are derived from it.
"""

import itertools
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from mmfn import rng, tree

AXES: Mapping[str, str] = {
    "vocab": "entries of the vocabulary",
    "embed": "width of the decoder",
    "kv_heads": "heads of keys and values",
    "groups": "query heads that share a key head",
    "head_dim": "width of a head",
    "mlp": "inner width of a feed-forward layer",
    "expert": "experts of a mixture",
    "choice": "experts that a router chooses from",
    "gate_up": "the gate (0) and the value (1) of a gated layer",
    "vision_embed": "width of the vision tower",
    "vision_heads": "heads of the vision tower",
    "vision_head_dim": "width of a head of the vision tower",
    "vision_mlp": "inner width of a feed-forward layer of the tower",
    "rank": "width of what an adapter passes through",
    "qkv": "query (0), key (1) and value (2)",
    "merged": "width of the patches that become one token",
    "merged_mlp": "inner width of a merger",
    "places": "entries of the learned table of patch positions",
    "channels": "colour channels",
    "patch_time": "frames in a patch",
    "patch_height": "rows of pixels in a patch",
    "patch_width": "columns of pixels in a patch",
    "columns": "of a matrix that is joined of parts",
}
"""The one vocabulary of axes: in abstract trees, sharding tables, errors and docs."""

Part: TypeAlias = tuple[slice, ...]
Place: TypeAlias = Callable[[str, "Param"], tuple[Part, Callable[[Tensor], Any]]]
"""What a leaf holds here: of (path, param), the part to make and how to wrap it."""


@attrs.frozen
class Form:
    """Another way in which published files hold a leaf."""

    name: str
    """All leaves of a folder that have forms are in those of one name."""
    layout: str
    """Names of axes in the published order, as in a `Param`; without those of `key`."""
    key: str
    """Published key; `{expert}` stands for a number where each expert is a tensor of its own."""
    names: Mapping[str, tuple[str, ...]] = {}
    """Words that stand for the numbers of an axis in keys."""


@attrs.frozen
class Piece:
    """A published tensor that holds a leaf, or some entries of it."""

    key: str
    layout: str
    """Names of axes in the published order."""
    shape: tuple[int, ...]
    """Sizes of these axes."""
    dims: tuple[int, ...]
    """Dimensions of the leaf that they are."""
    at: tuple[tuple[int, int], ...] = ()
    """(dimension of the leaf, entry) of what this tensor is a part of."""

    @property
    def fused(self) -> tuple[tuple[int, ...], ...]:
        """Axes, by number, that make each dimension of the published tensor."""
        groups: list[tuple[int, ...]] = []
        open_group: list[int] | None = None
        axis = 0
        for word in self.layout.replace("(", " ( ").replace(")", " ) ").split():
            if word == "(":
                open_group = []
            elif word == ")":
                groups.append(tuple(open_group or ()))
                open_group = None
            else:
                if open_group is None:
                    groups.append((axis,))
                else:
                    open_group.append(axis)
                axis += 1
        return tuple(groups)

    @property
    def published(self) -> tuple[int, ...]:
        """Shape of the published tensor."""
        return tuple(torch.Size([self.shape[a] for a in group]).numel() for group in self.fused)

    def view(self, leaf: Tensor, at: Mapping[int, int] | None = None) -> Tensor:
        """Give what this tensor holds of a leaf, or of a part of one, in the published order.

        `at` says where its entries are in a part. The axes are apart; the memory is that of `leaf`.
        """
        for dim, entry in sorted((at or dict(self.at)).items(), reverse=True):
            leaf = leaf.select(dim, entry)
        left = [dim for dim in range(len(self.dims) + len(self.at)) if dim not in dict(self.at)]
        return leaf.permute([left.index(dim) for dim in self.dims])


@attrs.frozen
class Param:
    """A weight without values: sizes, names of axes, spread at the start, published key."""

    shape: tuple[int, ...]
    layout: str
    """Names of axes; those in parentheses are one dimension of the published tensor:
    `(kv_heads groups head_dim) embed`."""
    key: str
    """Key of the published tensor; the leaf is a reshape of it."""
    spread: float = 0.0
    """Standard deviation of the initial values."""
    mean: float = 0.0
    """Mean of the initial values."""
    copies: tuple[str, ...] = ()
    """Keys under which some published files hold the same values again (a tied head)."""
    form: str = ""
    """Name of this form of the leaf in published files, if there are others."""
    forms: tuple[Form, ...] = ()
    """The others."""

    def __attrs_post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{self.key}: axes ({self.layout}) and shape {self.shape} differ")
        if unknown := sorted(set(self.axes) - AXES.keys()):
            raise ValueError(f"no axis is called {unknown[0]!r}; there are {', '.join(AXES)}")
        if empty := [a for a, size in zip(self.axes, self.shape, strict=True) if size < 1]:
            raise ValueError(f"{self.key}: axis {empty[0]!r} has size {self.shape}")

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, one a dimension."""
        return _words(self.layout)

    @property
    def size(self) -> int:
        """Number of values."""
        return torch.Size(self.shape).numel()

    @property
    def published(self) -> tuple[int, ...]:
        """Shape of the published tensor."""
        return self.pieces()[0].published

    def pieces(self, form: str = "") -> tuple[Piece, ...]:
        """Give the published tensors that hold this leaf, in a form, or in its own.

        Raises:
            ValueError: the leaf has forms, and none of this name; names them.
        """
        if not self.forms or form in ("", self.form):
            return (Piece(self.key, self.layout, self.shape, tuple(range(len(self.shape)))),)
        found = next((other for other in self.forms if other.name == form), None)
        if found is None:
            names = ", ".join([self.form, *(other.name for other in self.forms)])
            raise ValueError(f"{self.key} has no form {form!r}; there are {names}")
        dims = tuple(self.axes.index(axis) for axis in _words(found.layout))
        shape = tuple(self.shape[dim] for dim in dims)
        apart = [axis for _, axis, _, _ in string.Formatter().parse(found.key) if axis]
        at = [self.axes.index(axis) for axis in apart]
        pieces = []
        for entries in itertools.product(*(range(self.shape[dim]) for dim in at)):
            words = {
                axis: found.names[axis][entry] if axis in found.names else entry
                for axis, entry in zip(apart, entries, strict=True)
            }
            place = tuple(zip(at, entries, strict=True))
            pieces.append(Piece(found.key.format(**words), found.layout, shape, dims, place))
        return tuple(pieces)


def _words(layout: str) -> tuple[str, ...]:
    return tuple(layout.replace("(", " ").replace(")", " ").split())


def whole(path: str, param: Param) -> tuple[Part, Callable[[Tensor], Tensor]]:
    """Place every leaf whole, as a plain tensor."""
    return tuple(slice(0, size) for size in param.shape), lambda value: value


def init(
    abstract: Any, seed: int, *, dtype: torch.dtype = torch.float32, place: Place = whole
) -> Any:
    """Make the initial weights: element `i` of a leaf is a function of (seed, path, i).

    `place` says which part of a leaf is made here; no other part is ever held.
    """

    def make(path: str, param: Param) -> Any:
        part, wrap = place(path, param)
        return wrap(_values(param, rng.derive(seed, path), part).to(dtype))

    return tree.map_with_path(make, abstract)


def _values(param: Param, seed: int, part: Part) -> Tensor:
    shape = [len(range(*cut.indices(n))) for cut, n in zip(part, param.shape, strict=True)]
    value = torch.full(shape, param.mean)
    if param.spread == 0.0 or value.numel() == 0:
        return value
    # A row at a time would be slow for small rows, the whole would triple the memory. Large pieces
    # leave holes in the heap: 2**20 values took a third more memory than 2**17.
    rows, table = max(1, 2**17 // max(1, value[0].numel())), rng.quantiles()
    first = range(*part[0].indices(param.shape[0]))
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        index = rng.flat_index(
            param.shape, (slice(first[start], first[stop - 1] + 1, first.step), *part[1:])
        )
        value[start:stop] += param.spread * rng.normal(seed, index, table)
    return value


def count(abstract: Any) -> int:
    """Count the values of a tree of `Param`s or tensors."""
    return sum(
        leaf.size if isinstance(leaf, Param) else leaf.numel() for leaf in tree.leaves(abstract)
    )


def table(abstract: Any) -> str:
    """Print a tree: path, shape, axes, published key, number of values; layers alike as one row."""
    rows: dict[tuple[Any, ...], list[str]] = {}
    for path, param in tree.items(abstract):
        words = path.split(".")
        pattern = ".".join("*" if word.isdigit() else word for word in words)
        key = ".".join("*" if word.isdigit() else word for word in param.key.split("."))
        rows.setdefault((pattern, param.shape, param.layout, key), []).append(path)
    cells = [("path", "shape", "axes", "published key", "values")]
    for (pattern, shape, layout, key), found in rows.items():
        number = torch.Size(shape).numel() * len(found)
        cells.append((pattern, "×".join(map(str, shape)), layout, key, f"{number:,}"))
    cells.append(("", "", "", "total", f"{count(abstract):,}"))
    return _align(cells)


def _align(cells: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = (
        "  ".join(
            [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
            + [row[-1].rjust(widths[-1])]
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)
