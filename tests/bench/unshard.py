"""Time the gathers of sharded weights: ours against FSDP2's on the same blocks, two gloo ranks.

    python tests/bench/unshard.py

A step is forward and backward of decoder blocks whose weights are cut over the ranks, gathered for
each block, gathered again backward, and whose gradients are scattered. Both sides run the same
block function in the same processes, in turn; the least time of each counts, and their gradients
must agree. A link is then made slow by letting each transfer end late (one after the other, in the
background): prefetch hides what computing covers. Last, what a rank holds for 1, 2, 4, 8 ranks. The
last line is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from link import Link
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mmfn import param, tree
from mmfn.batch import Batch, Media, Segments
from mmfn.compute import Compute
from mmfn.kernels import cpu
from mmfn.models import qwen3_vl, vision
from mmfn.models.presets import PRESETS
from mmfn.sharding import axes, layout, parallel, simulate
from mmfn.sharding import mesh as meshes
from mmfn.sharding.parallel import Parallel
from mmfn.sharding.rules import FSDP
from mmfn.transforms import compile_blocks, value_and_grad

CONFIG = qwen3_vl.Config(
    vocab=1024, embed=512, layers=8, heads=8, kv_heads=2, head_dim=64, mlp=1536,
    sections=(12, 10, 10),
    vision=vision.Config(layers=1, embed=64, heads=4, mlp=64, places=16, out=512, deepstack=()),
)  # fmt: skip
TOKENS = 512


class Peer(nn.Module):
    """One block whose weights are parameters of a module."""

    def __init__(self, weights: Any, compute: Compute) -> None:
        """Take the weights of a block."""
        super().__init__()
        self.like = weights
        self.values = nn.ParameterList(nn.Parameter(x.clone()) for x in tree.leaves(weights))
        self.compute = compute

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        """Run the block."""
        weights = tree.unflatten(self.like, list(self.values))
        out = qwen3_vl.block(weights, x, cos, sin, batch, None, cfg=CONFIG, compute=self.compute)
        assert isinstance(out, Tensor)
        return out


class Peers(nn.Module):
    """The blocks, one after the other."""

    def __init__(self, blocks: list[Peer]) -> None:
        """Take the blocks."""
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        """Run them."""
        for block in self.blocks:
            x = block(x, cos, sin, batch)
        return x


def read(rank: int) -> tuple[Tensor, Tensor, Tensor, Batch]:
    """Make what the blocks of a rank read."""
    ends = torch.full((16,), TOKENS, dtype=torch.int32)
    segments = Segments(torch.ones(TOKENS, dtype=torch.int32), ends)
    none = torch.zeros(0)
    media = Media(none, segments, none, none, none)
    place = torch.arange(TOKENS)
    every = place.expand(3, -1)
    batch = Batch(place, segments, every, media, place >= 0, place, place, place, none, none)
    cos, sin = qwen3_vl.angles(batch.positions, CONFIG)
    return torch.randn(TOKENS, 512, generator=torch.Generator().manual_seed(rank)), cos, sin, batch


def placed(world: int) -> Parallel:
    """Cut the weights over the ranks."""
    mesh = meshes.make(meshes.Sizes(fsdp=world))
    return parallel.make(qwen3_vl.abstract(CONFIG), mesh, FSDP)


def ours(rank: int, world: int, *, compiled: bool, prefetch: bool = True) -> Callable[[], Any]:
    """Make our step: gradients of the blocks' local weights."""
    on = placed(world)
    made = param.init(qwen3_vl.abstract(CONFIG), 0, place=on.layout.place)
    params = layout.local(made).text.layers
    specs = on.layout.specs.text.layers
    wrap = compile_blocks if compiled else lambda stack: stack
    compute = on.compute(Compute(ops=cpu.OPS), wrap, prefetch=prefetch, again=True)
    x, cos, sin, batch = read(rank)

    def loss(layers: Any) -> Tensor:
        stored = tree.map(layout.Stored, layers, specs) if world > 1 else layers
        block = partial(qwen3_vl.block, cfg=CONFIG, compute=compute)
        none = (None,) * CONFIG.layers
        return compute.stack(block, stored, x, cos, sin, batch, each=none)[0].square().mean()

    grads = value_and_grad(loss)
    return lambda: grads(params)[1]


def theirs(rank: int, world: int, *, compiled: bool) -> Callable[[], Any]:
    """Make the step with FSDP2; it divides gradients by the ranks."""
    whole = param.init(qwen3_vl.abstract(CONFIG), 0).text.layers
    model = Peers([Peer(layer, Compute(ops=cpu.OPS)) for layer in whole])
    mesh = init_device_mesh("cpu", (world,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    if compiled:
        for block in model.blocks:
            block.compile(dynamic=False)
    x, cos, sin, batch = read(rank)

    def step() -> list[Any]:
        (model(x, cos, sin, batch).square().mean() * world).backward()
        grads = [p.grad for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
        return grads

    return step


def race(rank: int, world: int, rounds: int, *, compiled: bool) -> dict[str, float]:
    """Take turns; gives the least time of each side in ms, after their gradients agree."""
    sides = {
        "ours": ours(rank, world, compiled=compiled),
        "theirs": theirs(rank, world, compiled=compiled),
    }
    mine, others = tree.leaves(sides["ours"]()), sides["theirs"]()
    on = placed(world)
    specs = tree.leaves(on.layout.specs.text.layers)
    for own, spec, other in zip(mine, specs, others, strict=True):
        whole = layout.full(layout.wrap(own, spec, on.mesh))
        torch.testing.assert_close(whole, other.full_tensor(), rtol=1e-3, atol=1e-6)
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, step in sides.items():
            torch.distributed.barrier()
            start = time.perf_counter()
            step()
            torch.distributed.barrier()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def slow(rank: int, world: int, seconds: float) -> dict[str, float]:
    """Time our step on a slow link, with prefetch and without."""
    times = {}
    kept = axes.start_gather, axes.start_scatter, axes.wait
    for name, wait, prefetch in [
        ("compute", 0.0, True), ("hidden", seconds, True), ("in turn", seconds, False)
    ]:  # fmt: skip
        step = ours(rank, world, compiled=False, prefetch=prefetch)
        link = Link(lambda x, wait=wait: wait)
        axes.start_gather = partial(link.start, kept[0])
        axes.start_scatter = partial(link.start, kept[1])
        axes.wait = partial(link.wait, kept[2])
        step()
        link.spent = 0.0
        best = float("inf")
        for _ in range(3):
            torch.distributed.barrier()
            start = time.perf_counter()
            step()
            best = min(best, time.perf_counter() - start)
        times[name] = 1e3 * best
        times["link"] = 1e3 * link.spent / 3
        axes.start_gather, axes.start_scatter, axes.wait = kept
    return times


def held(rank: int, world: int) -> float:
    """Give the MiB of weights, gradients and moments of a rank."""
    abstract = qwen3_vl.abstract(PRESETS["2B"])
    on = parallel.make(abstract, meshes.make(meshes.Sizes(fsdp=world)), FSDP)
    parts = (torch.Size(own.local(on.mesh)).numel() for own in tree.leaves(on.layout.specs))
    return 16 * sum(parts) / 2**20


def main() -> None:
    """Run all, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    for form in ("eager", "compiled"):
        work = partial(race, compiled=form == "compiled")
        found = simulate.run(flags.ranks, work, flags.ranks, flags.rounds, seconds=600)[0]
        print(f"{form:9} ours {found['ours']:7.1f} ms  FSDP2 {found['theirs']:7.1f} ms", flush=True)
        report[f"ratio_{form}"] = round(found["ours"] / found["theirs"], 4)
        report[f"ours_{form}_ms"] = round(found["ours"], 1)
    for seconds in (0.005, 0.02, 0.05):
        found = simulate.run(flags.ranks, slow, flags.ranks, seconds, seconds=600)[0]
        print(
            f"slow link: compute {found['compute']:.0f} ms, link {found['link']:.0f} ms; "
            f"with prefetch {found['hidden']:.0f} ms, without {found['in turn']:.0f} ms",
            flush=True,
        )
        report[f"link_{round(1e3 * seconds)}ms"] = {k: round(v, 1) for k, v in found.items()}
    for world in (1, 2, 4, 8):
        mib = simulate.run(world, held, world)
        print(f"2B on {world} ranks: {min(mib):.0f} to {max(mib):.0f} MiB a rank")
        report[f"mib_{world}"] = round(max(mib))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
