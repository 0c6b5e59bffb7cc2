"""A parameter before it has values, and what follows from a tree of them.

`models.X.abstract(config)` gives a tree with a `Param` at each leaf. It holds no memory; initial
weights, published weights, placements, plans and tables are derived from it.
"""

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
    "gate_up": "the gate (0) and the value (1) of a gated layer",
    "vision_embed": "width of the vision tower",
    "vision_heads": "heads of the vision tower",
    "vision_head_dim": "width of a head of the vision tower",
    "vision_mlp": "inner width of a feed-forward layer of the tower",
    "qkv": "query (0), key (1) and value (2)",
    "merged": "width of the patches that become one token",
    "merged_mlp": "inner width of a merger",
    "places": "entries of the learned table of patch positions",
    "channels": "colour channels",
    "patch_time": "frames in a patch",
    "patch_height": "rows of pixels in a patch",
    "patch_width": "columns of pixels in a patch",
}
"""The one vocabulary of axes: in abstract trees, sharding tables, errors and docs."""

Part: TypeAlias = tuple[slice, ...]
Place: TypeAlias = Callable[[str, "Param"], tuple[Part, Callable[[Tensor], Any]]]
"""What a leaf holds here: of (path, param), the part to make and how to wrap it."""


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
        return tuple(self.layout.replace("(", " ").replace(")", " ").split())

    @property
    def size(self) -> int:
        """Number of values."""
        return torch.Size(self.shape).numel()

    @property
    def fused(self) -> tuple[tuple[int, ...], ...]:
        """Dimensions of the leaf that make each dimension of the published tensor."""
        groups: list[tuple[int, ...]] = []
        open_group: list[int] | None = None
        dim = 0
        for word in self.layout.replace("(", " ( ").replace(")", " ) ").split():
            if word == "(":
                open_group = []
            elif word == ")":
                groups.append(tuple(open_group or ()))
                open_group = None
            else:
                if open_group is None:
                    groups.append((dim,))
                else:
                    open_group.append(dim)
                dim += 1
        return tuple(groups)

    @property
    def published(self) -> tuple[int, ...]:
        """Shape of the published tensor."""
        return tuple(torch.Size([self.shape[d] for d in dims]).numel() for dims in self.fused)


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
    # A row at a time would be slow for small rows, the whole would triple the memory.
    rows = max(1, 2**20 // max(1, value[0].numel()))
    first = range(*part[0].indices(param.shape[0]))
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        index = rng.flat_index(
            param.shape, (slice(first[start], first[stop - 1] + 1, first.step), *part[1:])
        )
        value[start:stop] += param.spread * rng.normal(seed, index)
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
