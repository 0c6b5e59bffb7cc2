"""The tiny model on a mesh of forked ranks, compared with one device."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import attrs
import tiny
import torch
from torch import Tensor

from mmfn import lora, optim, tree
from mmfn.batch import Batch
from mmfn.compute import Compute, sequential
from mmfn.data import pack
from mmfn.kernels import cpu
from mmfn.models import moe, qwen3_vl
from mmfn.sharding import context, parallel, simulate
from mmfn.sharding import mesh as meshes
from mmfn.sharding import rules as tables
from mmfn.sharding.experts import balanced, bounded, exchanged, gathered
from mmfn.sharding.parallel import Parallel
from mmfn.transforms import (
    compile_blocks,
    compile_step,
    keep_choices,
    keep_choices_in_graph,
    remat,
    value_and_grad,
)

SMALL = attrs.evolve(
    tiny.CONFIG, layers=2, vision=attrs.evolve(tiny.CONFIG.vision, layers=2, deepstack=(0,))
)
"""One layer with deep features and one without: eight ranks on two cores take their time."""

SHARED_KEYS = attrs.evolve(SMALL, kv_heads=1)
"""One key head for four query heads: tp=4 cuts the query heads only."""

DATA = {
    "text": ["TC", "T", "C", "TT", "C", "T", "CT", "T"],
    "pictures": ["A", "B", "AB", "B", "A", "A", "B", "A"],
    "mixed": ["A", "T", "CB", "T", "A", "TT", "AT", "C"],
    "packed": ["ATB", "BC", "AA", "TTA", "A", "B", "CA", "TB"],
}
"""Samples of each data rank. Mixed has ranks of text only beside ranks with pictures."""


@attrs.frozen
class Cell:
    """One way to compute on a mesh."""

    mesh: str
    sequence: bool = False
    rules: str = "fsdp"
    form: str = "eager"
    """eager, regather, remat, blocks, blocks regather, blocks remat, step or step remat."""
    backend: str = "aot_eager"
    fused: bool = False
    experts: str = ""
    """How tokens come to experts; a model without any where this is empty."""
    adapters: bool = False
    """Whether only adapters of all matrices are trained."""

    @property
    def name(self) -> str:
        """Say in words what is cut, and how."""
        extra = {"fsdp_tp_text": ", tower whole"}.get(self.rules, "")
        way = f", experts {self.experts}" if self.experts else ""
        ours = ", adapters" if self.adapters else ""
        return f"{self.mesh}{' sp' if self.sequence else ''}{extra}{way}{ours}"


@attrs.frozen
class Result:
    """How far a cell was from one device."""

    loss: float
    """Difference of the losses."""
    grads: float
    """Largest difference of a gradient, in parts of the largest value of its leaf."""
    where: str
    """That leaf; for a leaf of zeros that is not one, its value."""
    norm: float
    """Relative difference of the gradient norms."""

    @property
    def worst(self) -> float:
        """The largest of them."""
        return max(self.loss, self.grads, self.norm)


EXPERTS = {
    "": exchanged,
    "exchanged": exchanged,
    "in two parts": partial(exchanged, chunks=2),
    "balanced": partial(balanced, slots=2),
    "gathered": gathered,
    "bounded": partial(bounded, room=4.0),
    "half": partial(bounded, room=0.5),
}
BALANCE = 0.05
"""Weight of the balance loss, far above a usual one."""


def config(cell: Cell) -> qwen3_vl.Config:
    """Choose the config of a cell."""
    cfg = SHARED_KEYS if "tp=4" in cell.mesh else SMALL
    return attrs.evolve(cfg, experts=moe.Config(8, 2, 24), dense=(1,)) if cell.experts else cfg


ADAPTERS = lora.Config(targets=("linear", "head"), rank=3)


def abstract(cfg: qwen3_vl.Config, *, adapters: bool = False) -> Any:
    """Describe the weights."""
    plain = qwen3_vl.abstract(cfg)
    return lora.adapt(plain, ADAPTERS, qwen3_vl.GROUPS) if adapters else plain


@cache
def whole(cfg: qwen3_vl.Config, *, adapters: bool = False) -> tuple[Any, Any]:
    """Make what is trained, in float64, and the rest: nothing, but for adapters."""
    params = tiny.params(cfg, torch.float64)
    if not adapters:
        return params, None
    mine, rest = lora.split(abstract(cfg, adapters=True))
    generator = torch.Generator().manual_seed(0)
    some = tree.map(
        lambda leaf: 0.2 * torch.randn(leaf.shape, generator=generator, dtype=torch.float64), mine
    )
    return some, tree.unflatten(rest, tree.leaves(params))


def together(mine: Any, rest: Any) -> Any:
    """Put what is trained and the rest together."""
    return mine if rest is None else tree.combine(mine, rest)


def loss(
    params: Any, batch: Batch, cfg: qwen3_vl.Config, compute: Compute, load: Any = None
) -> Tensor:
    """Give the loss, with the balance of experts if there are any."""
    return qwen3_vl.losses_of(params, batch, cfg, compute, balance=BALANCE, load=load)[0]


@cache
def on_mesh(
    text: str,
    world: int,
    cfg: qwen3_vl.Config,
    table: str = "fsdp",
    *,
    sequence: bool = False,
    experts: str = "",
    adapters: bool = False,
) -> Parallel:
    """Put a model on a mesh; every rank calls it."""
    sizes = meshes.parse(text, world)
    rules = tables.for_heads(
        tables.parse((table,)),
        sizes,
        kv_heads=cfg.kv_heads,
        groups=cfg.heads // cfg.kv_heads,
    )
    return parallel.make(
        abstract(cfg, adapters=adapters),
        made(sizes),
        rules,
        sequence=sequence,
        experts=EXPERTS[experts],
    )


@cache
def made(sizes: meshes.Sizes) -> meshes.Mesh:
    """Make a mesh once: its groups cost time."""
    return meshes.make(sizes)


def local(on: Parallel, values: Any) -> Any:
    """Give this rank's parts of whole weights, or of some of them."""
    specs = dict(tree.items(on.layout.specs))
    return tree.map_with_path(
        lambda path, value: value[specs[path].part(on.mesh)].contiguous(), values
    )


def own_batch(on: Parallel, batches: Sequence[Batch]) -> Batch:
    """Give what this rank reads of the data ranks' batches."""
    mesh = on.mesh
    return context.split(
        batches[mesh.data_index],
        mesh.cp.index,
        ring=mesh.ring.size,
        ulysses=mesh.ulysses.size,
        merge=tiny.GEOMETRY.merge,
    )


def composed(on: Parallel, cell: Cell) -> Compute:
    """Compose how a cell is computed."""
    plain = Compute(ops=cpu.OPS if cell.fused else Compute().ops)
    if "remat" in cell.form:
        keep = keep_choices_in_graph if "step" in cell.form else keep_choices
        policy = keep if cell.experts else None
        plain = attrs.evolve(plain, stack=remat(sequential, policy))
    if "step" in cell.form:
        return on.whole_step(plain)

    def compiled(stack: Any) -> Any:
        return compile_blocks(stack, backend=cell.backend) if "blocks" in cell.form else stack

    return on.compute(plain, compiled, again="regather" in cell.form)


@cache
def batches(kind: str, ranks: int) -> tuple[Batch, ...]:
    """Pack the samples of each data rank in a row of 97 tokens: no mesh divides it."""
    rows = [[tiny.encoded(name, "all") for name in names] for names in DATA[kind][:ranks]]
    made = [pack.collate([row], geometry=tiny.GEOMETRY, tokens=97) for row in rows]
    count = pack.total([counts for _, counts in made]).divisor("token")
    return tuple(doubled(batch) for batch in pack.with_count([b for b, _ in made], count))


def doubled(batch: Batch) -> Batch:
    """Give a batch in float64."""
    return tree.map(lambda x: x.double() if x.is_floating_point() else x, batch)


@cache
def wanted(
    cfg: qwen3_vl.Config, kind: str, ranks: int, *, adapters: bool = False
) -> tuple[Tensor, Any]:
    """Compute loss and gradients on one device."""
    mine, rest = whole(cfg, adapters=adapters)

    def total(trained: Any) -> Tensor:
        params = together(trained, rest)
        losses = [loss(params, batch, cfg, Compute(), load) for batch in batches(kind, ranks)]
        return torch.stack(losses).sum()

    load = None
    if cfg.experts is not None:
        params = together(mine, rest)
        found = [qwen3_vl.hidden(params, batch, cfg)[1] for batch in batches(kind, ranks)]
        load = torch.stack([routing.load for routing in found if routing is not None]).sum(0)
    return value_and_grad(total)(mine)


def compare(cell: Cell, kind: str, world: int) -> Result:
    """Compute a cell on this rank, and hold its parts against one device."""
    if cell.form not in ("eager", "regather", "remat"):
        torch._dynamo.reset()
    cfg = config(cell)
    own = {"adapters": cell.adapters}
    on = on_mesh(
        cell.mesh, world, cfg, cell.rules, sequence=cell.sequence, experts=cell.experts, **own
    )
    compute = composed(on, cell)
    part = on.loss(lambda p, b: loss(p, b, cfg, compute))
    total = value_and_grad(lambda mine, rest, batch: part(together(mine, rest), batch))
    if "step" in cell.form:
        total = compile_step(total, backend=cell.backend)
    ranks = on.mesh.sizes.data
    mine, rest = (local(on, values) for values in whole(cfg, **own))
    value, grads = on.reduce(*total(mine, rest, own_batch(on, batches(kind, ranks))))
    want, reference = wanted(cfg, kind, ranks, **own)
    trained, _ = tree.partition(lambda path, spec: path in set(tree.paths(grads)), on.layout.specs)
    worst, where = 0.0, ""
    for (path, grad), spec, every in zip(
        tree.items(grads), tree.leaves(trained), tree.leaves(reference), strict=True
    ):
        scale = every.abs().max().item() or 1.0
        far = (grad - every[spec.part(on.mesh)]).abs().max().item() / scale if grad.numel() else 0.0
        # What is exactly zero on one device is on all.
        if scale == 1.0 and not every.any() and far:
            far = torch.inf
        if not far <= worst:
            worst, where = far, path
    size = optim.global_norm(reference)
    norm = (on.norm(trained)(grads) - size).abs() / size
    return Result(abs(value - want).item(), worst, where, norm.item())


def walk(rank: int, world: int, cells: Sequence[tuple[Cell, str]]) -> list[Result]:
    """Compare many cells in one start of the ranks."""
    return [compare(cell, kind, world) for cell, kind in cells]


def worst(results: Sequence[Sequence[Result]]) -> list[Result]:
    """Of all ranks' results, give the farthest for each cell."""
    return [max(each, key=lambda result: result.worst) for each in zip(*results, strict=True)]


def loss_and_norm(
    text: str,
    world: int,
    cfg: qwen3_vl.Config,
    rows: Sequence[Batch],
    *,
    table: str = "fsdp",
    sequence: bool = False,
    experts: str = "",
    pick: Callable[[Any], Any] | None = None,
) -> tuple[float, float, float]:
    """Give loss and gradient norm of float32 batches, one a data rank, and the norm of one part."""
    on = on_mesh(text, world, cfg, table, sequence=sequence, experts=experts)
    compute = on.compute(Compute())
    total = value_and_grad(on.loss(lambda p, b: qwen3_vl.loss(p, b, cfg, compute)))
    value, grads = on.reduce(*total(local(on, tiny.params(cfg)), own_batch(on, rows)))
    own = 0.0
    if pick is not None:
        own = on.norm(pick(on.layout.specs))(pick(grads)).item()
    return value.item(), on.norm(on.layout.specs)(grads).item(), own


def apart(ranks: int, cells: Sequence[tuple[Cell, str]], seconds: float = 280.0) -> list[Result]:
    """Walk through cells in another process, where no checks of annotations stand in the way.

    They cannot be compiled: not in autograd functions, and not in what is made inside a step.
    """
    words = json.dumps([ranks, [[attrs.asdict(cell), kind] for cell, kind in cells]])
    done = subprocess.run(
        [sys.executable, __file__, words],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Result(**result) for result in json.loads(done.stdout.splitlines()[-1])]


if __name__ == "__main__":
    torch.set_num_threads(1)
    number, listed = json.loads(sys.argv[1])
    chosen = [(Cell(**cell), kind) for cell, kind in listed]
    found = worst(simulate.run(number, walk, number, chosen, seconds=3600))
    print(json.dumps([attrs.asdict(result) for result in found]))
