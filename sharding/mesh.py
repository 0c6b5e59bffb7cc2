"""Meshes of ranks: from "fsdp=4 tp=2" to axes with their process groups.

World = dp · fsdp · cp · tp, the last changing fastest. Data is split over dp · fsdp, the tokens of
a row over cp, heads, channels and vocabulary over tp. Weights are stored in parts over the
flattened fsdp · cp, called `fsdp` in tables of rules, and in copies over dp.

cp is itself ring · ulysses: heads are exchanged within `ulysses` ranks, keys go round `ring`.

ep adds no ranks: experts are cut over ep of the fsdp · cp ranks, and their weights further over
the others, called `efsdp`.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mmfn.sharding.axes import Axis, silent

NAMES = ("dp", "fsdp", "cp", "tp")
"""Axes of a mesh, slowest first."""

STORED = ("dp", "fsdp", "tp")
"""Axes of the mesh of stored tensors; its fsdp is fsdp · cp."""


@attrs.frozen
class Sizes:
    """Sizes of the axes."""

    dp: int = 1
    """Copies of everything; data is split over them."""
    fsdp: int = 1
    """Weights are cut over these, data too."""
    cp: int = 1
    """Tokens of a row are cut over these, and weights."""
    tp: int = 1
    """Heads, channels and vocabulary are cut over these."""
    ulysses: int = 1
    """How many of cp exchange heads; the others pass keys round a ring."""
    ep: int = 1
    """Experts are cut over these, of the ranks of fsdp · cp."""

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(Sizes):
            if getattr(self, field.name) < 1:
                raise ValueError(f"mesh axis {field.name}={getattr(self, field.name)} is below 1")
        if self.cp % self.ulysses:
            raise ValueError(f"cp={self.cp} is not a multiple of ulysses={self.ulysses}")
        if self.fsdp * self.cp % self.ep:
            raise ValueError(
                f"fsdp={self.fsdp} · cp={self.cp} is not a multiple of ep={self.ep}, whose ranks "
                f"are some of theirs"
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.fsdp * self.cp * self.tp

    @property
    def data(self) -> int:
        """Number of ranks that read different samples."""
        return self.dp * self.fsdp

    def __str__(self) -> str:
        """Write the sizes as `parse` reads them."""
        words = [f"{name}={getattr(self, name)}" for name in NAMES if getattr(self, name) > 1]
        if self.cp > 1:
            words.append(f"ulysses={self.ulysses}")
        if self.ep > 1:
            words.append(f"ep={self.ep}")
        return " ".join(words) or "fsdp=1"


def parse(text: str, world: int) -> Sizes:
    """Read sizes such as `fsdp=4 tp=2`; one may be left as `fsdp=` to fill the world.

    Without any size left open, and where none is named, `fsdp` fills the world. `ulysses` is that
    of `cp` unless it is given.

    Raises:
        ValueError: an axis is unknown or named twice, a size is no number, or they do not make
            the world; says which and both numbers.
    """
    found: dict[str, int | None] = {}
    for word in re.split(r"[\s,]+", text.strip()):
        if not word:
            continue
        name, equals, size = word.partition("=")
        if name not in (*NAMES, "ulysses", "ep") or not equals:
            names = ", ".join((*NAMES, "ulysses", "ep"))
            raise ValueError(f"mesh {text!r}: {word!r} is none of {names} with =SIZE")
        if name in found:
            raise ValueError(f"mesh {text!r} names {name} twice")
        if size and not size.isdecimal():
            raise ValueError(f"mesh {text!r}: the size of {name} is {size!r}, not a whole number")
        found[name] = int(size) if size else None
    inner: dict[str, int] = {}
    for name in ("ulysses", "ep"):
        if name in found:
            size = found.pop(name)
            if size is None:
                raise ValueError(f"mesh {text!r} gives {name} no size; it adds no ranks to fill")
            inner[name] = size
    if not found:
        found["fsdp"] = None
    open_axes = [name for name, size in found.items() if size is None]
    if len(open_axes) > 1:
        raise ValueError(f"mesh {text!r} leaves {' and '.join(open_axes)} open; one can be")
    known = {name: size for name, size in found.items() if size is not None}
    product = 1
    for name, size in known.items():
        if size < 1:
            raise ValueError(f"mesh {text!r}: {name}={size} is below 1")
        product *= size
    if open_axes:
        if world % product:
            raise ValueError(f"mesh {text!r}: {product} does not divide the {world} ranks")
        known[open_axes[0]] = world // product
    elif product != world:
        raise ValueError(f"mesh {text!r} has {product} ranks; there are {world}")
    return Sizes(**(known | {"ulysses": known.get("cp", 1)} | inner))


@attrs.frozen(eq=False)
class Mesh:
    """The axes as this rank sees them, and what tensors are stored on."""

    sizes: Sizes
    dp: Axis
    shard: Axis
    """fsdp and cp flattened: weights are cut over it."""
    tp: Axis
    ring: Axis
    ulysses: Axis
    cp: Axis
    """ring and ulysses flattened: the tokens of a row are cut over it."""
    ep: Axis
    """Experts are cut over it."""
    efsdp: Axis
    """The other ranks of `shard`: weights of experts are cut over it."""
    all: Axis
    """All ranks."""
    stored: DeviceMesh | None
    """The mesh of stored tensors: dp, fsdp and tp, as far as they have more than one rank; `None`
    for a single process."""
    experts: DeviceMesh | None
    """That of experts, whose fsdp is efsdp and ep; `None` where ep is 1."""
    device: torch.device
    """Where stored tensors are."""

    @property
    def data_index(self) -> int:
        """Which samples this rank reads, of `sizes.data`."""
        return self.dp.index * self.sizes.fsdp + self.shard.index // self.sizes.cp

    @property
    def axes(self) -> Mapping[str, Axis]:
        """The axes that weights are stored on, by their names in rules."""
        return {"fsdp": self.shard, "tp": self.tp, "efsdp": self.efsdp, "ep": self.ep}


def single(device: str = "cpu") -> Mesh:
    """Make the mesh of a single process."""
    names = ("dp", "shard", "tp", "ring", "ulysses", "cp", "ep", "efsdp", "all")
    alone = {name: Axis(name) for name in names}
    return Mesh(Sizes(), **alone, stored=None, experts=None, device=torch.device(device))


def make(
    sizes: Sizes, device: str = "cpu", note: Callable[[str, Axis, Tensor], None] = silent
) -> Mesh:
    """Make a mesh of all ranks of the process group that is there; every rank calls it.

    Raises:
        ValueError: the sizes do not make the world; says both numbers.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if sizes.world != world:
        raise ValueError(f"mesh {sizes} has {sizes.world} ranks; there are {world}")
    if world == 1:
        return single(device)
    shard = sizes.fsdp * sizes.cp
    # Axes of one are left out: torch would make a group for each rank.
    cut = {
        name: size
        for name, size in zip(STORED, (sizes.dp, shard, sizes.tp), strict=True)
        if size > 1
    }
    stored = init_device_mesh(device, tuple(cut.values()), mesh_dim_names=tuple(cut))

    def axis(name: str, group: dist.ProcessGroup) -> Axis:
        size, index = dist.get_world_size(group), dist.get_rank(group)
        return Axis(name, size, index, group.group_name, note)

    def on(name: str) -> Axis:
        return axis(name, stored.get_group(name)) if name in cut else Axis(name)

    def along(name: str, size: int, *, others: Sequence[int]) -> Axis:
        """Make the groups of an axis that weights are not stored on."""
        if size == 1:
            return Axis(name)
        table = ranks.permute(*others, *(d for d in range(5) if d not in others)).reshape(-1, size)
        group, _ = dist.new_subgroups_by_enumeration(table.tolist())
        assert group is not None
        return axis(name, group)

    ring = sizes.cp // sizes.ulysses
    ranks = torch.arange(world).view(sizes.dp, sizes.fsdp, ring, sizes.ulysses, sizes.tp)
    flat = on("fsdp")
    # An axis that is the whole of another has its group: each costs buffers on a device.
    context = (
        attrs.evolve(flat, name="cp")
        if sizes.fsdp == 1
        else along("cp", sizes.cp, others=(0, 1, 4))
    )
    everyone = dist.group.WORLD
    assert everyone is not None
    others = shard // sizes.ep
    experts = None
    if sizes.ep > 1 and others > 1:
        place = list(cut).index("fsdp")
        experts = stored._unflatten(place, (others, sizes.ep), ("efsdp", "ep"))
    return Mesh(
        sizes,
        dp=on("dp"),
        shard=flat,
        tp=on("tp"),
        ring=attrs.evolve(context, name="ring")
        if sizes.ulysses == 1
        else along("ring", ring, others=(0, 1, 3, 4)),
        ulysses=attrs.evolve(context, name="ulysses")
        if ring == 1
        else along("ulysses", sizes.ulysses, others=(0, 1, 2, 4)),
        cp=context,
        ep=Axis("ep")
        if sizes.ep == 1
        else attrs.evolve(flat, name="ep")
        if experts is None
        else axis("ep", experts.get_group("ep")),
        efsdp=Axis("efsdp") if experts is None else axis("efsdp", experts.get_group("efsdp")),
        all=axis("all", everyone),
        stored=stored,
        experts=experts,
        device=torch.device(device),
    )
