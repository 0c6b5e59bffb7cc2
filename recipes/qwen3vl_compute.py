"""How the recipe computes: the loss, and what is composed around it from the flags."""

from typing import Any

import attrs
import torch

from mmfn import lora
from mmfn.compute import Compute, sequential
from mmfn.device import Device
from mmfn.kernels.loss import in_chunks
from mmfn.models import qwen3_vl
from mmfn.recipes import qwen3vl_job as jobs
from mmfn.recipes.qwen3vl_config import Config
from mmfn.sharding.parallel import Parallel
from mmfn.transforms import (
    compile_blocks,
    compile_loss,
    keep_choices,
    keep_choices_in_graph,
    remat,
)


def loss(
    params: Any,
    batch: Any,
    load: torch.Tensor | None = None,
    *,
    cfg: qwen3_vl.Config,
    compute: Compute,
    balance: float,
    on: Parallel,
    key: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Any]:
    """Give the loss that is trained, next-token cross entropy over the count of the step, with the
    balance loss of experts; and their routing. `key` says what adapters leave out."""
    if key is not None:
        params = lora.keyed(params, on.key(key))
    return qwen3_vl.losses_of(params, batch, cfg, compute, balance=balance, load=load)


def prepare(cfg: Config, job: jobs.Job, compute: Compute, on: Parallel) -> Any:
    """Make what counts the loads of a step before it: each micro-batch is balanced over all."""
    if not cfg.train.balance or cfg.train.accumulate == 1:
        return None

    def load(params: Any, batches: Any) -> torch.Tensor:
        bound = on.layout.bind(params)
        found = [qwen3_vl.hidden(bound, batch, job.config, compute)[1] for batch in batches]
        loads = [routing.load for routing in found if routing is not None]
        total: torch.Tensor = on.total(torch.stack(loads).sum(0))
        return total

    return load


def compose(cfg: Config, job: jobs.Job, device: Device, on: Parallel) -> Compute:
    """Compose how the model is computed from the flags."""
    blocks = cfg.run.compile == "blocks"
    # What routers chose is kept, or a block that is run again could choose otherwise.
    keep = keep_choices_in_graph if cfg.run.compile == "step" else keep_choices
    policy = keep if job.config.experts else None
    ops = device.ops
    if cfg.train.loss_rows:
        ops = attrs.evolve(ops, cross_entropy=in_chunks(cfg.train.loss_rows))
    plain = Compute(
        ops=compile_loss(ops) if blocks else ops,
        dtype=torch.bfloat16 if cfg.train.precision == "bfloat16" else None,
        stack=remat(sequential, policy) if cfg.train.remat else sequential,
    )
    if cfg.run.compile == "step":
        return on.whole_step(plain)
    return on.compute(
        plain,
        compile_blocks if blocks else lambda stack: stack,
        prefetch=cfg.sharding.prefetch,
        again=cfg.sharding.regather and not cfg.train.remat,
    )
