"""Show that computing hides the exchange of tokens: experts over two ranks, on a link made slow.

    python tests/bench/exchange.py

Four layers of 8 experts with 2 choices, 2,048 tokens of 256 a rank, forward and backward. A
transfer takes a time in proportion to its bytes, one after the other, in the background. With one
part a layer waits for all of its tokens; with more, one part is computed while the next is on its
way, and backward the other way round. The last line is one JSON object.
"""

import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import torch
from link import Link
from torch import Tensor

from mmfn import param
from mmfn.compute import Compute
from mmfn.kernels import cpu
from mmfn.models import moe
from mmfn.sharding import axes, parallel, simulate
from mmfn.sharding import mesh as meshes
from mmfn.sharding.experts import exchanged
from mmfn.sharding.layout import local
from mmfn.sharding.rules import FSDP
from mmfn.transforms import value_and_grad

CONFIG = moe.Config(experts=8, choices=2, mlp=256)
EMBED, TOKENS, LAYERS, RANKS = 256, 2048, 4, 2


def race(rank: int, rate: float, parts: Sequence[int]) -> dict[str, float]:
    """Time a step with each number of parts, the least of five, in turn; milliseconds."""
    mesh = meshes.make(meshes.parse("fsdp=2 ep=2", RANKS))
    abstract = tuple(moe.abstract(CONFIG, EMBED, f"layers.{i}") for i in range(LAYERS))
    on = parallel.make(abstract, mesh, FSDP)
    params = local(param.init(abstract, 0, place=on.layout.place))
    x = torch.randn(TOKENS, EMBED, generator=torch.Generator().manual_seed(rank))

    def loss(layers: Any, compute: Compute) -> Tensor:
        y = x
        for layer in layers:
            y = y + moe.feed_forward(compute.whole(layer), y, None, CONFIG, compute)[0]
        return y.square().mean()

    steps = {}
    for number in parts:
        here = attrs.evolve(on, experts=partial(exchanged, chunks=number))
        compute = here.whole_step(Compute(ops=cpu.OPS))
        total = value_and_grad(here.loss(partial(loss, compute=compute)))
        steps[f"parts_{number}"] = partial(total, params)

    link = Link(lambda x: x.numel() * x.element_size() / rate)
    kept = axes._send, axes.wait
    axes._send, axes.wait = partial(link.start, kept[0]), partial(link.wait, kept[1])
    best = dict.fromkeys(steps, float("inf"))
    try:
        for turn in range(6):
            for name, step in steps.items():
                torch.distributed.barrier()
                link.spent, start = 0.0, time.perf_counter()
                step()
                if turn:
                    best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
        best["link"] = 1e3 * link.spent
    finally:
        axes._send, axes.wait = kept
    return best


def main() -> None:
    """Run on links of several rates, print."""
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    parts = (1, 2, 4)
    print("link ms  " + "  ".join(f"{n} part{'s'[: n > 1]} ms" for n in parts))
    for rate in (1e12, 4e8, 2e8):
        found = simulate.run(RANKS, race, rate, parts)
        row = {key: max(each[key] for each in found) for key in found[0]}
        print(f"{row['link']:7.0f}  " + "  ".join(f"{row[f'parts_{n}']:9.0f}" for n in parts))
        report[f"link_{row['link']:.0f}ms"] = {key: round(value, 1) for key, value in row.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
