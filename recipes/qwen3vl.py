"""Fine-tune Qwen3-VL on chat with pictures, from a Hugging Face folder to a Hugging Face folder.

Without --model.path and --data.train a small Qwen3-VL is trained from scratch on scikit-learn's
handwritten digits, and asked about those it has not seen.
"""

import random
import shlex
import shutil
import sys
from functools import partial
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
    optim,
    param,
    report,
    tree,
    weights,
)
from mmfn import log as logs
from mmfn.batch import to_device
from mmfn.compute import Compute, sequential
from mmfn.data.loader import Loader
from mmfn.device import Device
from mmfn.device import resolve as resolve_device
from mmfn.models import decoding, qwen3_vl
from mmfn.models.flops import count, lengths
from mmfn.recipes import qwen3vl_job as jobs
from mmfn.recipes.qwen3vl_config import Config, refuse_other, resolve
from mmfn.train import TrainState, make_step, start
from mmfn.transforms import compile_blocks, compile_loss, compile_step, remat


def main(cfg: Config) -> TrainState:
    """Train as the config says; gives the last state."""
    cfg = resolve(cfg)
    folder = cfg.run.out
    assert folder is not None
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--run.out={folder} is not a folder")
    device = resolve_device(cfg.run.device)
    device.prepare()
    resumed = checkpoint.latest(folder)
    if resumed is not None and not cfg.run.resume:
        raise ValueError(f"{folder} holds a checkpoint of step {resumed}; --run.resume goes on")
    if cfg.run.resume:
        if resumed is None:
            raise ValueError(f"--run.resume: there is no whole checkpoint in {folder}")
        refuse_other(cfg, folder)

    job = jobs.load(cfg)
    print(param.table(job.abstract) if cfg.run.verbose else job.headline)
    train, steps = jobs.training(cfg, job, note=print)
    held_out = jobs.evaluation(cfg, job)
    folder.mkdir(parents=True, exist_ok=True)
    about = jobs.about(cfg, job, device)
    files.write_json(folder / "config.json", config.to_dict(cfg))
    files.write_json(folder / "about.json", about)

    compute = compose(cfg, device)
    optimizer = make_optimizer(cfg, job, device, steps)
    step = make_step(partial(loss, cfg=job.config, compute=compute), optimizer)
    step = compile_step(step) if cfg.run.compile == "step" else step
    state = initial(cfg, job, optimizer, device)
    if resumed is not None:
        state, _ = checkpoint.restore(folder, resumed, state, donate=True)
    done = 0 if resumed is None else resumed

    place = partial(to_device, device=device.torch)
    peak = flops.peak(device.model, compute.dtype or torch.float32, cfg.run.peak_flops)
    with logs.open_log(folder, steps, done) as log, loop.interruption() as stopping:
        measure = partial(evaluate_all, cfg, job, held_out, compute, place, log)
        state, done = loop.fit(
            step,
            state,
            train.steps(done, steps),
            done=done,
            total=steps,
            log=log,
            actions=loop.Actions(
                evaluate=lambda state, at: measure(state, at, cfg.data.eval_samples),
                save=lambda state, at: save(cfg, state, at, about),
                flops=lambda read: sum(count(job.config, lengths(b)).total for b in read.batches),
                memory=device.memory,
            ),
            every=loop.Every(cfg.train.eval_every, cfg.run.save_every),
            on_nonfinite=cfg.train.on_nonfinite,
            peak=peak,
            place=place,
            stopping=stopping,
        )
        if done < steps:
            log.note(f"stopped after step {done} of {steps}; go on with: {command(cfg)}")
            raise SystemExit(128 + stopping())
        found = measure(state, done, None)
    finish(cfg, job, state, found, about)
    last: TrainState = state
    return last


def loss(params: Any, batch: Any, cfg: qwen3_vl.Config, compute: Compute) -> torch.Tensor:
    """Give the loss that is trained: next-token cross entropy over the count of the step."""
    return qwen3_vl.loss(params, batch, cfg, compute)


def compose(cfg: Config, device: Device) -> Compute:
    """Compose how the model is computed from the flags."""
    stack = compile_blocks(sequential) if cfg.run.compile == "blocks" else sequential
    stack = remat(stack) if cfg.train.remat else stack
    dtype = torch.bfloat16 if cfg.train.precision == "bfloat16" else None
    ops = compile_loss(device.ops) if cfg.run.compile == "blocks" else device.ops
    return Compute(ops=ops, dtype=dtype, stack=stack)


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


def initial(cfg: Config, job: jobs.Job, optimizer: optim.Optimizer, device: Device) -> TrainState:
    """Make the state before the first step: weights from the folder, or initial ones."""
    if cfg.model.path is None:
        params = param.init(job.abstract, cfg.run.seed)
    else:
        params = weights.load(job.abstract, cfg.model.path)
    params = tree.map(lambda leaf: leaf.to(device.torch), params)
    trained, frozen = tree.partition(job.trained, params)
    whole = not tree.leaves(frozen)
    return start(trained, optimizer, frozen=None if whole else frozen, seed=cfg.run.seed)


def whole(state: TrainState) -> Any:
    """Give all weights, trained and frozen."""
    return state.params if state.frozen is None else tree.combine(state.params, state.frozen)


def evaluate_all(
    cfg: Config,
    job: jobs.Job,
    held_out: Loader | None,
    compute: Compute,
    place: Any,
    log: logs.Log,
    state: TrainState,
    at: int,
    limit: int | None,
) -> list[evaluate.Answer]:
    """Measure loss and answers on what was held out (`limit` answers; None for all), and log it."""
    if held_out is None:
        return []
    params = whole(state)
    metrics: dict[str, float] = {
        "eval/loss": evaluate.mean_loss(
            lambda batch: qwen3_vl.loss(params, place(batch), job.config, compute),
            held_out.steps(),
        )
    }
    asked = evaluate.answered(job.held_out)
    # Pictures of both kinds of question: not the first ones, which may be all of one kind.
    chosen = asked if limit is None else random.Random(0).sample(asked, min(limit, len(asked)))
    found = evaluate.answers(
        chosen,
        chat=job.chat,
        root=job.root,
        geometry=job.geometry,
        prefill=lambda batch, **sizes: decoding.prefill(
            params, place(batch), job.config, compute, **sizes
        ),
        decode=lambda cache, tokens: decoding.decode(params, cache, tokens, job.config, compute),
        limit=cfg.data.answer_tokens,
    )
    if found:
        metrics["eval/exact"] = sum(answer.right for answer in found) / len(found)
    log.evaluation(at, metrics)
    return found


def save(cfg: Config, state: TrainState, at: int, about: dict[str, Any]) -> None:
    """Write a checkpoint of the state after `at` steps."""
    assert cfg.run.out is not None
    meta = {"config": config.to_dict(cfg), "about": about}
    checkpoint.save(cfg.run.out, at, state, meta, keep=cfg.run.keep)


def command(cfg: Config) -> str:
    """Write the command that goes on with this run."""
    words = [word for word in sys.argv[1:] if word not in ("--run.resume", "--run.no-resume")]
    if "--run.out" not in " ".join(words):
        words += ["--run.out", str(cfg.run.out)]
    return shlex.join(["python", "recipes/qwen3vl.py", *words, "--run.resume"])


def finish(
    cfg: Config,
    job: jobs.Job,
    state: TrainState,
    found: list[evaluate.Answer],
    about: dict[str, Any],
) -> None:
    """Export the weights, write the report, and print what came out."""
    folder = cfg.run.out
    assert folder is not None
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
    if cfg.run.export:
        target = folder / "export"
        shutil.rmtree(target, ignore_errors=True)  # Of the run before it was resumed.
        weights.export(
            tree.map(lambda leaf: leaf.to("cpu"), whole(state)),
            job.abstract,
            target,
            source=cfg.model.path,
            files=job.files,
        )
        print(f"exported {target}")
    print(f"report {page}")
    if found:
        print(jobs.answer_table(jobs.choose(found, 8)))
        print(f"held-out exact answers: {right / len(found):.3f} ({right} of {len(found)})")


def run(argv: list[str]) -> None:
    """Run from the words of a command line; what is wrong with the input is said in a line."""
    cfg = cli.parse(Config, argv, prog="qwen3vl.py", description=__doc__ or "")
    try:
        main(cfg)
    except (ValueError, FloatingPointError, OSError) as error:
        if cfg.run.traceback:
            raise
        print(f"qwen3vl.py: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    run(sys.argv[1:])
