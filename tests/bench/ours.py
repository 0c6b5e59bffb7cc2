"""Our side: the same step as a function, samples packed in one row, float32 weights and moments.

`compiled` is the whole step, gradients and update, as one graph; `blocks` has a graph for each kind
of block and one for the loss; `eager` is the same code as it is. On several ranks weights are cut
over `fsdp` and gathered again backward, as FSDP2 does.
"""

from collections.abc import Callable
from functools import partial

import attrs
import torch
import worker
from shapes import MERGE, PATCH_DIM, Sample, samples

from mmfn import device, optim, schedules, train, transforms, tree, weights
from mmfn.batch import Batch
from mmfn.compute import Compute, sequential
from mmfn.data import pack
from mmfn.data.encoded import Encoded, Geometry, Run
from mmfn.models import hub, qwen3_vl
from mmfn.sharding import layout, parallel
from mmfn.sharding import mesh as meshes
from mmfn.sharding.rules import FSDP

ROW = 64
"""The row of tokens is padded to a multiple of this."""


def packed(made: list[Sample], side: int) -> tuple[Batch, ...]:
    """Pack all samples of a step in one row; `side` is that of the table of learned positions."""
    encoded = [
        Encoded(
            name=str(index),
            tokens=sample.tokens,
            supervised=sample.supervised,
            runs=(Run(1, sample.grid, sample.grid),) if sample.grid else (),
            patches=sample.patches,
        )
        for index, sample in enumerate(made)
    ]
    tokens = sum(len(sample.tokens) for sample in made)
    geometry = Geometry(merge=MERGE, side=side, patch_dim=PATCH_DIM)
    # Every step has this shape, so the sizes of padding are fitted to it.
    batch, counts = pack.collate(
        [encoded],
        geometry=geometry,
        tokens=-(-tokens // ROW) * ROW,
        least_patches=max(MERGE**2, sum(len(sample.patches) for sample in made)),
        least_targets=sum(len(pack.targets(sample)) for sample in encoded),
    )
    return pack.with_count([batch], counts.divisor("token"))


def make(job: worker.Job) -> Callable[[], float]:
    """Read the weights that the other side wrote, and build the step over them."""
    cpu = device.resolve("cpu")
    cpu.prepare()
    cfg = hub.read_config(job.folder)
    abstract = qwen3_vl.abstract(cfg)
    on = parallel.make(abstract, meshes.make(meshes.Sizes(fsdp=job.ranks)), FSDP)
    blocks = job.form == "blocks"
    plain = Compute(
        ops=transforms.compile_loss(cpu.ops) if blocks else cpu.ops,
        # In float32 there is nothing to cast to.
        dtype=None if job.dtype == torch.float32 else job.dtype,
    )
    if job.remat:
        plain = attrs.evolve(plain, stack=transforms.remat(sequential, first=job.remat))
    if job.form == "compiled":
        compute = on.whole_step(plain)
    else:
        wrap = transforms.compile_blocks if blocks else lambda stack: stack
        compute = on.compute(plain, wrap, again=True)
    optimizer = optim.chain(
        optim.clip_by_global_norm(worker.CLIP),
        optim.adamw(
            schedules.constant(worker.LEARNING_RATE),
            betas=worker.BETAS,
            groups=optim.Group(decay=worker.DECAY),
            kernel=cpu.adamw,
        ),
    )
    params = weights.load(abstract, job.folder, place=on.layout.place)
    state = train.start(layout.local(params), optimizer)
    advance = train.make_step(
        on.loss(partial(qwen3_vl.loss, cfg=cfg, compute=compute)),
        optimizer,
        norm=on.norm(on.layout.specs),
        reduce=on.reduce,
    )
    if job.form == "compiled":
        advance = transforms.compile_step(advance)
    batches = packed(samples(job.shape, job.seed), cfg.vision.side)
    # Every rank has as many targets.
    batches = tuple(tree.evolve(batch, count=batch.count * job.ranks) for batch in batches)

    def step() -> float:
        nonlocal state
        state, metrics = advance(state, batches)
        return metrics["loss"].item()

    return step


if __name__ == "__main__":
    worker.serve(make)
