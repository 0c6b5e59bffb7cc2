"""One side of a comparison: a process that stays alive and does one step whenever it is asked."""

import argparse
import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from shapes import SHAPES, Shape

LEARNING_RATE = 1e-3
CLIP = 1.0
DECAY = 0.01
BETAS = (0.9, 0.999)


@attrs.frozen
class Job:
    """What a side is told."""

    shape: Shape
    dtype: torch.dtype
    form: str
    """`eager` or `compiled`."""
    folder: Path
    """Where the weights of the first step are."""
    save: bool
    """Write them there first, then go on."""
    remat: int
    """Layers, from the first one, whose blocks are run again backward; of ours only."""
    seed: int
    """Of the samples of this rank."""
    rank: int
    ranks: int


SIZES = ("experts", "choices", "expert_mlp")
"""Fields of a shape that its flag gives."""


def job() -> Job:
    """Read the command line of a side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--form", choices=["eager", "compiled", "blocks"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--remat", type=int, default=0)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--experts", type=int, nargs=3, default=(0, 0, 0))
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    dtype = getattr(torch, flags.dtype)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    return Job(
        shape=attrs.evolve(SHAPES[flags.shape], **dict(zip(SIZES, flags.experts, strict=True))),
        dtype=dtype,
        form=flags.form,
        folder=flags.folder,
        save=flags.save,
        remat=flags.remat,
        seed=flags.seed + rank,
        rank=rank,
        ranks=ranks,
    )


def serve(make: Callable[[Job], Callable[[], float]]) -> None:
    """Build a step, say so, then answer a line of JSON for each line of standard input.

    `step` does one and gives its milliseconds and loss; `mark` forgets the peak of memory; `peak`
    gives the peak since, in MiB. Whatever a library prints goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    step = make(job())
    answer(ready=True)
    for line in sys.stdin:
        match line.strip():
            case "step":
                start = time.perf_counter()
                loss = step()
                answer(ms=1e3 * (time.perf_counter() - start), loss=loss)
            case "mark":
                _forget_peak()
                answer(marked=True)
            case "peak":
                answer(mib=_peak())
            case other:
                raise ValueError(f"{other!r} is not one of step, mark, peak")


def _forget_peak() -> None:
    """Give free memory back, then set the high-water mark of resident memory to what is left."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise ValueError("the kernel tells no VmHWM in /proc/self/status")
