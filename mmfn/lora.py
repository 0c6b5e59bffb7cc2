"""LoRA as a function of a tree: beside a weight that stays, a low-rank change of it is trained.

`adapt` puts an `Adapted` node where a weight is, in the tree of `Param`s; initial values, places on
a mesh, files and the optimizer follow from it as for any other tree. A model knows of none of it:
`ops.linear` asks the node.

Source: Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732 (rsLoRA); Liu et al.
2024, arXiv:2402.09353 (DoRA).
"""

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from mmfn import ops as op
from mmfn import rng, tree
from mmfn.param import Form, Param
from mmfn.tree import Leaf, pytree, static


@attrs.frozen
class Config:
    """What is adapted, and how."""

    targets: tuple[str, ...] = ("linear",)
    """Which weights: `linear` is every matrix of blocks and mergers, with those of experts; a group
    of the model (`text`, `tower`, `mergers`, `head`); a published name (`q_proj`), exactly; or a
    pattern of paths (`text.layers.[0-3].*`)."""
    rank: int = 8
    alpha: float = 16.0
    """The change is `alpha / rank` times the product of the two matrices."""
    root: bool = False
    """Whether it is `alpha / sqrt(rank)` times (rsLoRA)."""
    dropout: float = 0.0
    """Share of the inputs of adapters that are left out in training."""
    magnitude: bool = False
    """Whether the length of each row is trained apart from its direction (DoRA)."""
    initial: Literal["kaiming", "gaussian"] = "kaiming"
    """Spread of the first matrix: that of Kaiming's rule, or 1/rank. The second begins at zero."""

    def __attrs_post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} is less than 1")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha={self.alpha} is not positive and finite")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is not in [0, 1)")
        if self.magnitude and self.dropout:
            raise ValueError(f"magnitude (DoRA) takes no dropout={self.dropout}")
        if not self.targets:
            raise ValueError("targets names nothing to adapt")

    @property
    def scale(self) -> float:
        """Factor on the change."""
        return self.alpha / (math.sqrt(self.rank) if self.root else self.rank)


@pytree
class Adapted(op.Composed):
    """A weight `[*out, *in]` and its change, `scale · up · down`.

    Of experts the weight is `[expert, *in, *out]`.
    """

    weight: Leaf
    down: Leaf
    """`[rank, *in]`, or `[expert, *in, rank]`."""
    up: Leaf
    """`[*out, rank]`, or `[expert, rank, *out]`."""
    magnitude: Leaf = None
    """Length of each row, `[*out]`; absent unless it is trained."""
    key: Leaf = None
    """Seed of what is left out in this pass, int64; absent where nothing is."""
    scale: float = static(default=1.0)
    dropout: float = static(default=0.0)

    @property
    def shape(self) -> Any:
        """Shape of the weight."""
        return self.weight.shape

    @property
    def loose(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Name what every rank has whole: where outputs are cut, and where inputs are."""
        return ("down",), ("up",)

    def linear(self, x: Tensor, bias: Tensor | None, contract: int) -> Tensor:
        """Contract x with the changed weight, which is never made."""
        y = op.linear(x, self.weight, contract=contract)
        low = op.linear(self._left(x), self.down, contract=contract)
        y = y + self.scale * op.linear(low, self.up)
        if self.magnitude is not None:
            y = y * (self.magnitude / self.length()).to(y.dtype)
        return y if bias is None else y + bias

    def grouped(self, x: Tensor, counts: Tensor, product: Callable[..., Tensor]) -> Tensor:
        """Do the same for the rows of each expert."""
        low = product(self._left(x), self.down, counts)
        return product(x, self.weight, counts) + self.scale * product(low, self.up, counts)

    def joined(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Write the change as more columns of input `[tokens, in + rank]` and weight: a copy."""
        if self.magnitude is not None:
            raise ValueError("magnitude (DoRA) is not for the head")
        low = self.scale * op.linear(self._left(x), self.down)
        return torch.cat((x, low), -1), torch.cat((self.weight, self.up), -1)

    def length(self) -> Tensor:
        """Give the length of each row of the changed weight, `[*out]`, without a gradient."""
        with torch.no_grad():
            contract = self.down.ndim - 1
            weight, down, up = (op.wide(leaf) for leaf in (self.weight, self.down, self.up))
            flat = down.flatten(1)
            # |W + s·B·A|² without the sum: the cross term and the change have rank columns.
            square = weight.flatten(weight.ndim - contract).square().sum(-1)
            cross = (op.linear(weight, down, contract=contract) * up).sum(-1)
            own = ((up @ (flat @ flat.T)) * up).sum(-1)
            return (square + 2 * self.scale * cross + self.scale**2 * own).clamp(min=0).sqrt()

    def merged(self) -> Tensor:
        """Make the changed weight, in the dtype of the weight."""
        weight, down, up = (op.wide(leaf) for leaf in (self.weight, self.down, self.up))
        if down.ndim + up.ndim == weight.ndim + 3:
            change = down.flatten(1, -2) @ up.flatten(2)  # Of experts: in before out.
        else:
            change = up.flatten(0, -2) @ down.flatten(1)
        change = change.view_as(weight)
        made = weight + self.scale * change
        if self.magnitude is not None:
            factor = op.wide(self.magnitude) / self.length()
            made = made * factor.view(*factor.shape, *(1,) * (made.ndim - factor.ndim))
        return made.to(self.weight.dtype)

    def _left(self, x: Tensor) -> Tensor:
        if self.key is None:
            return x
        place = torch.arange(x.numel(), device=x.device).view(x.shape)
        kept = rng.uniform(self.key, place) >= self.dropout
        return torch.where(kept, x, 0.0) / (1 - self.dropout)


def adapt(abstract: Any, cfg: Config, groups: Mapping[str, Sequence[str]]) -> Any:
    """Put an `Adapted` of `Param`s in the place of each weight that the targets name.

    `groups` are those of the model: patterns of paths by name.

    Raises:
        ValueError: a target names no weight, or only some that cannot be adapted; names it.
    """
    leaves = dict(tree.items(abstract))
    chosen: set[str] = set()
    for target in cfg.targets:
        named = _named(target, leaves, groups)
        found = {path for path in named if _kind(path, leaves[path]) != ""}
        if not found:
            raise ValueError(_lacking(target, named, leaves, groups))
        chosen |= found
    if cfg.magnitude and (
        experts := [path for path in chosen if _kind(path, leaves[path]) == "experts"]
    ):
        raise ValueError(f"magnitude (DoRA) is not for experts: {min(experts)}")

    modules = _modules({path: leaf for path, leaf in leaves.items() if path in chosen})

    def make(path: str, param: Param) -> Any:
        if path not in chosen:
            return param
        return _adapted(param, cfg, _kind(path, param), f"base_model.model.{modules[path]}")

    return tree.map_with_path(make, abstract)


def _modules(chosen: Mapping[str, Param]) -> dict[str, str]:
    """Name the modules of adapted weights as PEFT does.

    A linear map is a module. Weights of experts are parameters of one: PEFT wraps it once for each,
    and the first is the innermost.
    """
    found: dict[str, str] = {}
    around: dict[str, int] = {}
    for path, param in reversed(list(chosen.items())):
        if param.key.endswith(".weight"):
            found[path] = param.key.removesuffix(".weight")
            continue
        module = param.key.rpartition(".")[0]
        found[path] = module + ".base_layer" * around.get(module, 0)
        around[module] = around.get(module, 0) + 1
    return found


def _named(
    target: str, leaves: Mapping[str, Param], groups: Mapping[str, Sequence[str]]
) -> list[str]:
    """List the paths that a target names, whether they can be adapted or not."""
    if target == "linear":
        return [path for path, leaf in leaves.items() if _kind(path, leaf) in ("linear", "experts")]
    if target in groups:
        return [p for pattern in groups[target] for p in fnmatch.filter(leaves, pattern)]
    if "." in target or "*" in target:
        return fnmatch.filter(leaves, target)
    return [path for path, leaf in leaves.items() if target in names(leaf)]


def names(param: Param) -> set[str]:
    """Give the names that a weight's module has in published files: `{"q_proj"}`."""
    keys = [
        piece.key for form in ("", *(f.name for f in param.forms)) for piece in param.pieces(form)
    ]
    return {key.removesuffix(".weight").rpartition(".")[2] for key in keys}


def _kind(path: str, param: Param) -> str:
    """Say what can be adapted here: `linear`, `experts`, a `head`, or nothing."""
    if param.axes[0] == "expert":
        return "experts"
    if len(param.published) != 2 or {"places", "choice"} & set(param.axes):
        return ""
    if "vocab" in param.axes:
        return "head" if path.endswith("head.weight") else ""
    return "linear"


def _lacking(
    target: str,
    named: Sequence[str],
    leaves: Mapping[str, Param],
    groups: Mapping[str, Sequence[str]],
) -> str:
    if named:
        tied = " (the head is tied to it)" if target in ("head", "lm_head") else ""
        return f"target {target!r} names {named[0]}{tied}, which takes no adapter"
    known = sorted({n for path, leaf in leaves.items() if _kind(path, leaf) for n in names(leaf)})
    return (
        f"target {target!r} matches no weight; there are linear, {', '.join(groups)}, published "
        f"names ({', '.join(known)}) and patterns of paths like {next(iter(leaves))}"
    )


def _adapted(param: Param, cfg: Config, kind: str, at: str) -> Adapted:
    r = cfg.rank
    *_, outer, inner = (
        tuple(param.axes[dim] for dim in group) for group in param.pieces()[0].fused
    )
    size = dict(zip(param.axes, param.shape, strict=True))
    into, out = (outer, inner) if kind == "experts" else (inner, outer)
    fan = math.prod(size[axis] for axis in into)
    spread = {"kaiming": (3 * fan) ** -0.5, "gaussian": 1 / r}[cfg.initial]
    sizes_in, sizes_out = ([size[axis] for axis in group] for group in (into, out))
    keys = f"{at}.lora_A.weight", f"{at}.lora_B.weight"
    if kind != "experts":
        down = Param((r, *sizes_in), f"rank {_joined(into)}", keys[0], spread)
        up = Param((*sizes_out, r), f"{_joined(out)} rank", keys[1])
    else:
        e = param.shape[0]
        down = Param(
            (e, *sizes_in, r),
            f"expert {_joined(into)} rank",
            keys[0],
            spread,
            form="stacked",
            forms=(Form("peft", f"(expert rank) {_joined(into)}", keys[0]),),
        )
        up = Param(
            (e, r, *sizes_out),
            f"expert rank {_joined(out)}",
            keys[1],
            form="stacked",
            forms=(Form("peft", f"{_joined(out)} (rank expert)", keys[1]),),
        )
    key = f"{at}.lora_magnitude_vector.weight"
    length = Param(tuple(sizes_out), _joined(out), key, mean=1.0) if cfg.magnitude else None
    return Adapted(param, down, up, length, scale=cfg.scale, dropout=cfg.dropout)


def _joined(axes: Sequence[str]) -> str:
    return axes[0] if len(axes) == 1 else f"({' '.join(axes)})"


def paths(adapted: Any) -> frozenset[str]:
    """List the paths of what is trained in adapters."""
    mine = object()
    marked = tree.map_nodes(
        Adapted, lambda node: tree.evolve(tree.map(lambda leaf: mine, node), weight=None), adapted
    )
    return frozenset(path for path, leaf in tree.items(marked) if leaf is mine)


def split(adapted: Any) -> tuple[Any, Any]:
    """Part a tree in its adapters and the rest; `tree.combine` puts them together."""
    found = paths(adapted)
    return tree.partition(lambda path, leaf: path in found, adapted)


def without(adapted: Any) -> Any:
    """Give the tree before `adapt`."""
    return tree.map_nodes(Adapted, lambda node: node.weight, adapted)


def merge(adapted: Any) -> Any:
    """Give a tree of plain weights that computes the same: what a changed weight is, is added up.

    Leaves that are cut over ranks alike can be merged in their parts.
    """
    return tree.map_nodes(Adapted, lambda node: node.merged(), adapted)


def keyed(adapted: Any, key: Tensor) -> Any:
    """Say what adapters leave out of their inputs in this pass: a function of `key`, int64."""
    number = 0

    def mark(node: Adapted) -> Adapted:
        nonlocal number
        number += 1
        if not node.dropout:
            return node
        own = rng.bits(key, torch.full((), number, device=key.device))
        return tree.evolve(node, key=own)

    return tree.map_nodes(Adapted, mark, adapted)


def begin(adapted: Any, fetch: Callable[[Tensor], Tensor] = lambda x: x, wrap: Any = None) -> Any:
    """Let trained lengths of rows (DoRA) begin with those of the weights.

    Weights that are cut over ranks are made whole by `fetch`, one at a time, and `wrap(path,
    value)` makes of a whole length what this rank stores.
    """
    where = {id(leaf): path for path, leaf in tree.items(adapted)}

    def fill(node: Adapted) -> Adapted:
        if node.magnitude is None:
            return node
        whole = tree.map(fetch, tree.evolve(node, magnitude=None))
        made = whole.length().to(node.magnitude.dtype)
        return tree.evolve(
            node, magnitude=made if wrap is None else wrap(where[id(node.magnitude)], made)
        )

    return tree.map_nodes(Adapted, fill, adapted)


def table(adapted: Any, groups: Mapping[str, Sequence[str]]) -> str:
    """Say how much of what is adapted, a line for each group of the model."""
    nodes = dict(tree.nodes(Adapted, adapted))
    lines = []
    for name, patterns in groups.items():
        found = [p for p in nodes if any(fnmatch.fnmatchcase(p, own) for own in patterns)]
        if found:
            size = sum(_size(nodes[path]) for path in found)
            kinds = sorted({p.removesuffix(".weight").rpartition(".")[2] for p in found})
            lines.append(f"{name}: {len(found)} weights, {size:,} values ({', '.join(kinds)})")
    return "\n".join(lines)


def _size(node: Adapted) -> int:
    return sum(
        leaf.size if isinstance(leaf, Param) else leaf.numel()
        for leaf in tree.leaves(tree.evolve(node, weight=None, key=None))
    )
