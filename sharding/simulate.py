"""Several ranks on one machine, as forked processes over gloo: for tests and for trying things."""

import faulthandler
import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class Died(RuntimeError):
    """A rank was ended by a signal."""


def run(ranks: int, work: Callable[..., Any], *args: Any, seconds: float = 300.0) -> list[Any]:
    """Call `work(rank, *args)` on so many ranks; gives what they return, in order.

    Ranks are forked, with one thread each; what they return is pickled.

    Raises:
        Died: a rank was ended by a signal, which counts before what others raise then.
        RuntimeError: a rank raised, with its own traceback, or time ran out.
    """
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_rank, args=(rank, ranks, Path(folder) / "store", results, work, args)
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(processes, results, time.monotonic() + seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank(
    rank: int, ranks: int, store: Path, results: Any, work: Callable[..., Any], args: Any
) -> None:
    # A forked process that uses more threads hangs once its parent has used them.
    torch.set_num_threads(1)
    faulthandler.enable()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    try:
        dist.init_process_group(
            "gloo",
            rank=rank,
            world_size=ranks,
            init_method=f"file://{store}",
            timeout=timedelta(seconds=120),
        )
        value = work(rank, *args)
        # One rank that leaves early makes others fail.
        dist.barrier()
        results.put((rank, value, None))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise SystemExit(1) from None


def _collect(processes: list[Any], results: Any, until: float) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(processes):
        try:
            rank, value, problem = results.get(timeout=0.2)
        except queue.Empty:
            _refuse_dead(processes)
            if time.monotonic() > until:
                left = sorted(set(range(len(processes))) - values.keys())
                raise RuntimeError(f"ranks {left} did not end in time") from None
            continue
        if problem is not None:
            # Others lose their connections to a rank that died: that it died is said first.
            time.sleep(1.0)
            _refuse_dead(processes)
            raise RuntimeError(f"rank {rank} failed:\n{problem}")
        values[rank] = value
    return [values[rank] for rank in range(len(processes))]


def _refuse_dead(processes: list[Any]) -> None:
    for rank, process in enumerate(processes):
        if process.exitcode is not None and process.exitcode < 0:
            raise Died(f"rank {rank} was ended by signal {-process.exitcode}")
