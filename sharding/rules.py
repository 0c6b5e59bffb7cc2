"""Tables of rules: which mesh axis an axis of a weight is cut over. A strategy is a value.

An axis without a rule is whole on every rank. A target may be a tuple: the first mesh axis of it
that stored tensors have counts. `TABLES` names the usual ones; `|` extends them.
"""

from collections.abc import Mapping
from typing import TypeAlias

import attrs

from mmfn.param import AXES, Param
from mmfn.sharding.mesh import Mesh, Sizes

Rules: TypeAlias = Mapping[str, str | tuple[str, ...]]

WEIGHTS = ("fsdp", "tp")
"""Mesh axes that weights are cut over."""

EXPERTS = ("efsdp", "ep", "tp")
"""Those of the weights of experts, where the mesh has ep."""

FSDP: Rules = {
    "embed": ("fsdp", "efsdp"),
    "vision_embed": "fsdp",
    "merged": "fsdp",
    "expert": "ep",
}
"""Every matrix is cut over the data ranks; what is small (biases of heads, norms of heads) is not.
Experts are cut over ep, and over the other data ranks.
"""

FSDP_TP_TEXT: Rules = {**FSDP, "kv_heads": "tp", "mlp": "tp", "vocab": "tp"}
"""Besides, the decoder's heads, channels and vocabulary over tp; the tower is whole there."""

FSDP_TP: Rules = {
    **FSDP_TP_TEXT,
    "vision_heads": "tp",
    "vision_mlp": "tp",
    "merged_mlp": "tp",
}
"""The tower's too."""

TABLES: Mapping[str, Rules] = {"fsdp": FSDP, "fsdp_tp": FSDP_TP, "fsdp_tp_text": FSDP_TP_TEXT}
"""Tables by the name that a command line takes."""


def check(rules: Rules) -> None:
    """Refuse a table that names what does not exist.

    Raises:
        ValueError: an axis or a mesh axis is unknown; misspelt, it would silently mean "whole".
    """
    for axis, target in rules.items():
        if axis not in AXES:
            raise ValueError(f"no axis is called {axis!r}; there are {', '.join(AXES)}")
        for name in _names(target):
            if name not in (*WEIGHTS, *EXPERTS):
                raise ValueError(
                    f"axis {axis!r} goes to mesh axis {name!r}; weights are cut over "
                    f"{' and '.join(WEIGHTS)}, experts over {', '.join(EXPERTS)}"
                )


def parse(words: tuple[str, ...]) -> Rules:
    """Read a table's name and changes to it: `fsdp_tp vocab= mlp=fsdp embed=fsdp,efsdp`.

    Raises:
        ValueError: no such table, a word without `=`, an unknown axis; names it.
    """
    table: dict[str, str | tuple[str, ...]] = {}
    for place, word in enumerate(words):
        axis, equals, target = word.partition("=")
        if not equals:
            if place or word not in TABLES:
                raise ValueError(f"rules: {word!r} is not AXIS=MESH_AXIS or one of {[*TABLES]}")
            table |= TABLES[word]
        elif target:
            names = tuple(target.split(","))
            table[axis] = names if len(names) > 1 else target
        else:
            if axis not in AXES:
                raise ValueError(f"no axis is called {axis!r}; there are {', '.join(AXES)}")
            table.pop(axis, None)
    check(table)
    return table


def for_heads(rules: Rules, sizes: Sizes, *, kv_heads: int, groups: int) -> Rules:
    """Cut what can be cut of the heads: key heads, or else the query heads that share one.

    Raises:
        ValueError: tp divides neither; says the numbers.
    """
    if rules.get("kv_heads") != "tp" or kv_heads % sizes.tp == 0:
        return rules
    if groups % sizes.tp == 0:
        return {axis: target for axis, target in rules.items() if axis != "kv_heads"} | {
            "groups": "tp"
        }
    raise ValueError(
        f"tp={sizes.tp} divides neither kv_heads={kv_heads} nor the groups={groups} of query heads"
    )


@attrs.frozen
class Spec:
    """How a weight is cut: its whole shape, and which dim goes to which mesh axis."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[str, int], ...] = ()
    view: tuple[str, ...] = WEIGHTS
    """The mesh axes that it could be cut over; each of their ranks has a part, or a copy."""

    @property
    def gathered(self) -> str:
        """Name the mesh axis that is gathered before use."""
        return self.view[0]

    def dim(self, axis: str) -> int | None:
        """Give the dim that is cut over a mesh axis; `None` if it is whole there."""
        return dict(self.cuts).get(axis)

    def part(self, mesh: Mesh) -> tuple[slice, ...]:
        """Give the part of the weight that this rank holds."""
        found = [slice(0, size) for size in self.shape]
        for name, dim in self.cuts:
            found[dim] = mesh.axes[name].part(self.shape[dim])
        return tuple(found)

    def local(self, mesh: Mesh, *, whole: str = "") -> tuple[int, ...]:
        """Give the shape of this rank's part; with `whole`, that after a gather over this axis."""
        shape = list(self.shape)
        for name, dim in self.cuts:
            if name != whole:
                part = mesh.axes[name].part(shape[dim])
                shape[dim] = part.stop - part.start
        return tuple(shape)


def spec(param: Param, rules: Rules, path: str = "", *, experts: bool = False) -> Spec:
    """Say how a weight is cut under a table; `experts` is whether the mesh has ep.

    Raises:
        ValueError: two of its axes go to one mesh axis; names them.
    """
    targets = [_names(rules.get(axis, ())) for axis in param.axes]
    view = EXPERTS if experts and any("ep" in names for names in targets) else WEIGHTS
    cuts: dict[str, int] = {}
    for dim, names in enumerate(targets):
        name = next((name for name in names if name in view), None)
        if name is None:
            continue
        if name in cuts:
            raise ValueError(
                f"{path or param.key}: axes {param.axes[cuts[name]]!r} and {param.axes[dim]!r} "
                f"both go to mesh axis {name!r}"
            )
        cuts[name] = dim
    return Spec(param.shape, tuple(cuts.items()), view)


def _names(target: str | tuple[str, ...]) -> tuple[str, ...]:
    return (target,) if isinstance(target, str) else target
