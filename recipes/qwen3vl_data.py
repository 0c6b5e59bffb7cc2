"""What a run of the recipe reads: samples measured, packed, and dealt to its ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from mmfn import evaluate
from mmfn.data import chat as chats
from mmfn.data import plan as plans
from mmfn.data import scan
from mmfn.data.loader import Loader, alone
from mmfn.data.sample import Sample
from mmfn.recipes.qwen3vl_config import Config
from mmfn.recipes.qwen3vl_job import Job
from mmfn.sharding.launch import Ranks
from mmfn.sharding.mesh import Mesh


@attrs.frozen(eq=False)
class Reading:
    """Which share of the data a rank reads."""

    ranks: int = 1
    """Ranks that read different samples."""
    rank: int = 0
    """Which of them this is."""
    psum: Callable[[tuple[int, ...]], tuple[int, ...]] = alone
    """Sums integers over them."""


def reading(mesh: Mesh, ranks: Ranks) -> Reading:
    """Say what this rank of a mesh reads: those that differ in cp and tp only read the same."""
    same = mesh.sizes.cp * mesh.sizes.tp

    def psum(numbers: tuple[int, ...]) -> tuple[int, ...]:
        # Over all ranks, so that one that failed alone is noticed by all: upward, it counts.
        return tuple(-(-number // same) for number in ranks.sum(numbers))

    return Reading(mesh.sizes.data, mesh.data_index, psum)


def training(
    cfg: Config, job: Job, note: Callable[[str], None], read: Reading = Reading()
) -> tuple[Loader, int]:
    """Measure the training samples and plan their steps; gives the loader and how many."""
    found = _scan(cfg, job, job.train, job.root, cfg.data.on_long, note)
    asked = found.supervised > 0
    if not asked.any():
        raise ValueError(f"none of {len(found.kept)} samples has an answer to train on")
    if not asked.all():
        note(f"left out {int((~asked).sum())} of {found.total} that have no answer to train on")
        found = found.only(asked)
    assert cfg.data.row_tokens is not None
    plan = plans.Plan(
        tokens=cfg.data.row_tokens,
        rows=cfg.data.rows,
        accumulate=cfg.train.accumulate,
        ranks=read.ranks,
        epochs=cfg.train.epochs or 1,
        seed=cfg.run.seed,
        shuffle=cfg.data.shuffle,
    )
    make = partial(_loader, cfg, job, job.train, job.root, found, read=read)
    steps = cfg.train.steps
    if steps is not None:
        # Epochs enough for the steps: each has the same number but for how rows happen to fill.
        while len(loader := make(plan)) < steps:
            more = -(-steps * plan.epochs // len(loader))
            plan = attrs.evolve(plan, epochs=max(plan.epochs + 1, more))
        return loader, steps
    loader = make(plan)
    return loader, len(loader)


@attrs.frozen(eq=False)
class HeldOut:
    """What is measured on: samples that can be read."""

    loader: Loader
    """One pass over them."""
    asked: Sequence[Sample]
    """Those that end with an answer."""


def evaluation(
    cfg: Config, job: Job, note: Callable[[str], None], read: Reading = Reading()
) -> HeldOut | None:
    """Plan one pass over the held-out samples; a sample too long for a row is left out.

    Raises:
        ValueError: none of them has an answer, so that nothing could be measured.
    """
    if cfg.data.eval is None and not len(job.held_out):
        return None
    found = _scan(cfg, job, job.held_out, job.held_out_root, "drop", note)
    asked = evaluate.answered(job.held_out[int(index)] for index in found.kept)
    if not asked or not found.supervised.any():
        raise ValueError(f"--data.eval={cfg.data.eval} has no sample with an answer")
    assert cfg.data.row_tokens is not None
    plan = plans.Plan(
        tokens=cfg.data.row_tokens, rows=cfg.data.rows, accumulate=1, ranks=read.ranks, epochs=1,
        seed=0, shuffle=False,
    )  # fmt: skip
    loader = _loader(cfg, job, job.held_out, job.held_out_root, found, plan, read)
    return HeldOut(attrs.evolve(loader, workers=0), asked)


def _scan(
    cfg: Config,
    job: Job,
    samples: Sequence[Sample],
    root: Path,
    on_long: Any,
    note: Callable[[str], None],
) -> scan.Scan:
    assert cfg.data.max_tokens is not None
    many = len(samples) > 10_000
    found = scan.scan(
        samples,
        partial(chats.measure, chat=job.chat, root=root),
        tokens=cfg.data.max_tokens,
        policy=_policy(cfg, on_long),
        workers=cfg.data.workers if many else 0,
    )
    for message in (*found.long[:5], *found.bad[:5]):
        note(f"left out {message}")
    if found.long or found.bad:
        note(f"left out {len(found.long)} too long and {len(found.bad)} bad of {found.total}")
    return found


def _policy(cfg: Config, on_long: Any) -> scan.Policy:
    return scan.Policy(on_long=on_long, on_bad=cfg.data.on_bad, max_bad=cfg.data.max_bad)


def _loader(
    cfg: Config,
    job: Job,
    samples: Sequence[Sample],
    root: Path,
    found: scan.Scan,
    plan: plans.Plan,
    read: Reading,
) -> Loader:
    return Loader(
        samples=samples,
        encode=partial(chats.encode, chat=job.chat, root=root),
        scan=found,
        plan=plan,
        geometry=job.geometry,
        policy=_policy(cfg, cfg.data.on_long),
        normalise=cfg.train.normalise,
        rank=read.rank,
        psum=read.psum,
        workers=cfg.data.workers,
    )
