"""Fine-tune Qwen3-VL on chat with pictures, from a Hugging Face folder to a Hugging Face folder.

Without --model.path and --data.train a small Qwen3-VL is trained from scratch on scikit-learn's
handwritten digits, and asked about those it has not seen.
"""

import random
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mmfn import (
    checkpoint,
    cli,
    config,
    evaluate,
    files,
    flops,
    loop,
    lora,
    lora_files,
    optim,
    param,
    report,
    tree,
    weights,
)
from mmfn import log as logs
from mmfn.batch import to_device
from mmfn.behind import behind
from mmfn.compute import Compute
from mmfn.device import Device
from mmfn.device import resolve as resolve_device
from mmfn.models import decoding, qwen3_vl
from mmfn.models.flops import count, lengths
from mmfn.recipes import qwen3vl_data as data
from mmfn.recipes import qwen3vl_job as jobs
from mmfn.recipes.qwen3vl_compute import compose, loss, prepare
from mmfn.recipes.qwen3vl_config import Config
from mmfn.recipes.qwen3vl_resolve import resolve
from mmfn.recipes.qwen3vl_resume import refuse_other
from mmfn.sharding import mesh as meshes
from mmfn.sharding.axes import silent
from mmfn.sharding.check import checker
from mmfn.sharding.context import split
from mmfn.sharding.launch import ALONE, Ranks
from mmfn.sharding.launch import ranks as joined
from mmfn.sharding.layout import full, local, on_local, to_host
from mmfn.sharding.parallel import Parallel
from mmfn.train import TrainState, make_step, start
from mmfn.transforms import compile_step
from mmfn.weights_export import export


def main(cfg: Config, ranks: Ranks = ALONE) -> TrainState:
    """Train as the config says, on all ranks; gives the last state."""
    cfg = ranks.share(resolve(cfg))
    folder = cfg.run.out
    assert folder is not None
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--run.out={folder} is not a folder")
    device = resolve_device(cfg.run.device)
    device.prepare()
    sizes = meshes.parse(cfg.mesh, ranks.world)
    resumed = ranks.share(checkpoint.latest(folder) if ranks.first else None)
    if resumed is not None and not cfg.run.resume:
        raise ValueError(f"{folder} holds a checkpoint of step {resumed}; --run.resume goes on")
    if cfg.run.resume:
        if resumed is None:
            raise ValueError(f"--run.resume: there is no whole checkpoint in {folder}")
        refuse_other(cfg, folder, sizes.data)
    elif ranks.share((folder / "config.json").exists()):
        raise ValueError(f"{folder} holds a run that has saved nothing; remove it to begin again")
    say = print if ranks.first else _silent

    note = checker(ranks.store, seconds=cfg.sharding.timeout) if cfg.sharding.check else silent
    mesh = meshes.make(sizes, device.name, note)
    job = jobs.load(cfg)
    on = jobs.parallel(cfg, job, mesh)
    say(param.table(job.abstract) if cfg.run.verbose else job.headline)
    if cfg.lora.rank:
        say(lora.table(job.abstract, qwen3_vl.GROUPS))
    read = data.reading(mesh, ranks)
    train, steps = data.training(cfg, job, say, read)
    held_out = data.evaluation(cfg, job, say, read)
    about = jobs.about(cfg, device, mesh)
    if ranks.first:
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(folder / "config.json", config.to_dict(cfg))
        files.write_json(folder / "about.json", about)

    compute = compose(cfg, job, device, on)
    optimizer = make_optimizer(cfg, job, device, steps)
    trained, _ = tree.partition(job.trained, on.layout.specs)
    step = make_step(
        on.loss(partial(loss, cfg=job.config, compute=compute, balance=cfg.train.balance, on=on)),
        optimizer,
        norm=on.norm(trained),
        reduce=on.reduce,
        prepare=prepare(cfg, job, compute, on),
        report=qwen3_vl.report(job.config),
        random=cfg.lora.dropout > 0,
    )
    step = on_local(compile_step(step) if cfg.run.compile == "step" else step)
    state = initial(cfg, job, optimizer, on)
    if resumed is not None:
        state, _ = checkpoint.restore(folder, resumed, state, donate=True, group=ranks.group)
    done = 0 if resumed is None else resumed

    cut = partial(
        split,
        index=mesh.cp.index,
        ring=mesh.ring.size,
        ulysses=mesh.ulysses.size,
        merge=job.geometry.merge,
    )
    place = partial(to_device, device=device.torch)
    peak = flops.peak(device.model, compute.dtype or torch.float32, cfg.run.peak_flops)
    shared = mesh.cp.size * mesh.tp.size
    with (
        logs.open_log(folder, steps, done, main=ranks.first) as log,
        loop.interruption() as stopping,
        saving(cfg, about, ranks) as keep,
    ):
        measure = partial(evaluate_all, cfg, job, held_out, on, compute, cut, place, log)
        state, done = loop.fit(
            step,
            state,
            train.steps(done, steps),
            done=done,
            total=steps,
            log=log,
            actions=loop.Actions(
                evaluate=lambda state, at: measure(state, at, cfg.data.eval_samples),
                save=keep,
                flops=lambda read: (
                    sum(count(job.config, lengths(b)).total for b in read.batches) / shared
                ),
                memory=device.memory,
            ),
            every=loop.Every(cfg.train.eval_every, cfg.run.save_every),
            on_nonfinite=cfg.train.on_nonfinite,
            peak=peak,
            place=lambda batch: place(cut(batch)),
            # A signal may come to one rank only.
            stopping=lambda: ranks.largest(stopping()),
        )
        if done < steps:
            log.note(f"stopped after step {done} of {steps}; go on with: {command(cfg, ranks)}")
            raise SystemExit(128 + ranks.largest(stopping()))
        found = measure(state, done, None)
    finish(cfg, job, state, found, about, on, ranks)
    last: TrainState = state
    return last


def _silent(text: str) -> None:
    """Leave it to the first rank."""


def make_optimizer(cfg: Config, job: jobs.Job, device: Device, steps: int) -> optim.Optimizer:
    """Make AdamW with clipping, a schedule, and what the rules say of single weights."""
    trained, _ = tree.partition(job.trained, job.abstract)
    own = cfg.optimizer
    return optim.chain(
        optim.clip_by_global_norm(own.clip),
        optim.adamw(
            own.make_schedule(steps),
            betas=own.betas,
            eps=own.eps,
            groups=optim.groups(trained, own.weight_decay, own.parsed_rules()),
            kernel=device.adamw,
        ),
    )


def initial(cfg: Config, job: jobs.Job, optimizer: optim.Optimizer, on: Parallel) -> TrainState:
    """Make the state before the first step: weights from the folder, or initial ones.

    Each rank makes or reads its own parts only.
    """
    place = on.layout.place
    adapters, params = lora.split(job.abstract)
    if cfg.model.path is None:
        params = param.init(params, cfg.run.seed, place=place)
    else:
        params = weights.load(
            params, cfg.model.path, dtype=stored(cfg, job), place=place,
            form=form_of(cfg.model.form),
        )  # fmt: skip
    if cfg.lora.path is not None:
        adapters = lora_files.load(job.abstract, cfg.lora.config(), cfg.lora.path, place=place)
    else:
        adapters = param.init(adapters, cfg.run.seed, place=place)
    params = tree.combine(adapters, params)
    if cfg.lora.magnitude and cfg.lora.path is None:
        params = lora.begin(params, full, on.layout.put)
    trained, frozen = tree.partition(job.trained, params)
    whole = not tree.leaves(frozen)
    return start(trained, optimizer, frozen=None if whole else frozen, seed=cfg.run.seed)


def stored(cfg: Config, job: jobs.Job) -> Callable[[str, torch.dtype], torch.dtype]:
    """Say in what a weight is stored: float32, but a frozen one as its file has it, where that is
    what is computed in."""
    own = torch.bfloat16 if cfg.train.precision == "bfloat16" else torch.float32

    def kind(path: str, published: torch.dtype) -> torch.dtype:
        return own if published == own and not job.trained(path, None) else torch.float32

    return kind


def form_of(name: str) -> str:
    """Give the name of a layout of experts; empty where the folder tells."""
    return "" if name == "auto" else name


def whole(state: TrainState) -> Any:
    """Give all weights, trained and frozen."""
    return state.params if state.frozen is None else tree.combine(state.params, state.frozen)


def evaluate_all(
    cfg: Config,
    job: jobs.Job,
    held_out: data.HeldOut | None,
    on: Parallel,
    compute: Compute,
    cut: Any,
    place: Any,
    log: logs.Log,
    state: TrainState,
    at: int,
    limit: int | None,
) -> list[evaluate.Answer]:
    """Measure loss and answers on what was held out (`limit` answers; None for all), and log it."""
    if held_out is None:
        return []
    params = on.layout.bind(local(whole(state)))
    every = on.measuring(compute)
    metrics: dict[str, float] = {
        "eval/loss": evaluate.mean_loss(
            lambda batch: on.total(qwen3_vl.loss(params, place(cut(batch)), job.config, every)),
            held_out.loader.steps(),
        )
    }
    alone = on.answering(compute)
    asked = held_out.asked
    # Pictures of both kinds of question: not the first ones, which may be all of one kind.
    chosen = asked if limit is None else random.Random(0).sample(asked, min(limit, len(asked)))
    found = evaluate.answers(
        chosen,
        chat=job.chat,
        root=job.held_out_root,
        geometry=job.geometry,
        prefill=lambda batch, **sizes: decoding.prefill(
            params, place(batch), job.config, alone, **sizes
        ),
        decode=lambda cache, tokens: decoding.decode(params, cache, tokens, job.config, alone),
        limit=cfg.data.answer_tokens,
    )
    if found:
        metrics["eval/exact"] = sum(answer.right for answer in found) / len(found)
    log.evaluation(at, metrics)
    return found


def saving(
    cfg: Config, about: dict[str, Any], ranks: Ranks
) -> AbstractContextManager[Callable[[TrainState, int], None]]:
    """Make what writes a checkpoint of the state after so many steps."""
    group = ranks.beside() if cfg.run.save_behind else ranks.group
    meta = {"config": config.to_dict(cfg), "about": about}

    def save(state: TrainState, at: int) -> None:
        assert cfg.run.out is not None
        checkpoint.save(cfg.run.out, at, state, meta, keep=cfg.run.keep, group=group)

    return behind(save, to_host) if cfg.run.save_behind else nullcontext(save)


def command(cfg: Config, ranks: Ranks) -> str:
    """Write the command that goes on with this run."""
    start = ["python"] if ranks.world == 1 else ["torchrun", f"--nproc_per_node={ranks.world}"]
    words = [word for word in sys.argv[1:] if word not in ("--run.resume", "--run.no-resume")]
    if "--run.out" not in " ".join(words):
        words += ["--run.out", str(cfg.run.out)]
    return shlex.join([*start, "recipes/qwen3vl.py", *words, "--run.resume"])


def export_all(
    cfg: Config, job: jobs.Job, state: TrainState, on: Parallel, ranks: Ranks
) -> list[Path]:
    """Write the weights as a Hugging Face folder, adapters as one of PEFT; gives the folders."""
    assert cfg.run.out is not None
    targets = {"adapter": bool(cfg.lora.rank and not cfg.lora.also),
               "export": not cfg.lora.rank or cfg.lora.merge}  # fmt: skip
    folders = [cfg.run.out / name for name, wanted in targets.items() if wanted]
    for folder in folders if ranks.first else ():
        shutil.rmtree(folder, ignore_errors=True)  # Of the run before it was resumed.
    if targets["adapter"]:
        lora_files.save(
            state.params,
            job.abstract,
            cfg.lora.config(),
            cfg.run.out / "adapter",
            base=str(cfg.model.path or ""),
            fetch=full,
            write=ranks.first,
        )
    if targets["export"]:
        export(
            on.layout.merged(whole(state)) if cfg.lora.rank else whole(state),
            lora.without(job.abstract),
            cfg.run.out / "export",
            source=cfg.model.path,
            files=job.files,
            form=form_of(cfg.run.export_form),
            source_form=form_of(cfg.model.form),
            fetch=full,
            write=ranks.first,
        )
    return folders


def finish(
    cfg: Config,
    job: jobs.Job,
    state: TrainState,
    found: list[evaluate.Answer],
    about: dict[str, Any],
    on: Parallel,
    ranks: Ranks,
) -> None:
    """Export the weights, write the report, and print what came out."""
    folder = cfg.run.out
    assert folder is not None
    written = export_all(cfg, job, state, on, ranks) if cfg.run.export else []
    if not ranks.first:
        return
    steps, evaluations = logs.read(folder)
    summary: dict[str, str | int | float] = {}
    right = sum(answer.right for answer in found)
    if found:
        summary["held-out accuracy"] = right / len(found)
    if evaluations:
        summary["held-out loss"] = evaluations[-1]["eval/loss"]
    summary |= {
        "steps": len(steps),
        "tokens": sum(line["tokens"] for line in steps),
        "training_s": sum(line["step_s"] for line in steps),
        "parameters": param.count(job.abstract),
        **{key: str(value) for key, value in about.items()},
    }
    shown = [jobs.show(answer, job) for answer in jobs.choose(found, 24)]
    page = report.write(folder, config=config.to_dict(cfg), summary=summary, samples=shown)
    for path in written:
        print(f"exported {path}")
    print(f"report {page}")
    if found:
        print(jobs.answer_table(jobs.choose(found, 8)))
        print(f"held-out exact answers: {right / len(found):.3f} ({right} of {len(found)})")


def run(argv: list[str]) -> None:
    """Run from the words of a command line; what is wrong with the input is said in a line."""
    cfg = cli.parse(Config, argv, prog="qwen3vl.py", description=__doc__ or "")
    said = (ValueError, FloatingPointError, OSError)

    def say(error: BaseException) -> str | None:
        return str(error) if isinstance(error, said) and not cfg.run.traceback else None

    try:
        backend = resolve_device(cfg.run.device).backend
        with joined(backend, seconds=cfg.sharding.timeout, say=say) as ranks:
            main(cfg, ranks)
    except said as error:
        if cfg.run.traceback:
            raise
        print(f"qwen3vl.py: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    run(sys.argv[1:])
