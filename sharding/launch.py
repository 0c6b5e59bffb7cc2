"""The ranks of a run as torchrun starts them: they join, agree, and end together.

A rank that fails says so first: the others find its claim in the store they share and end without
a word. The store is that of torchrun, which outlives the ranks.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


@attrs.frozen(eq=False)
class Ranks:
    """All processes of a run, as one of them sees them; a run without torchrun is one."""

    rank: int = 0
    world: int = 1
    group: Any = None
    """Their process group; `None` for one process."""
    store: Any = None
    """What they share outside of collectives."""

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and speaks."""
        return self.rank == 0

    def beside(self) -> Any:
        """Make a group of all ranks for calls that come between others; every rank calls this."""
        return None if self.group is None else dist.new_group(backend="gloo")

    def share(self, value: Any) -> Any:
        """Give what the first rank has."""
        box = [value]
        if self.group is not None:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def sum(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Sum integers over all ranks, on the host."""
        if self.group is None:
            return numbers
        total = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(total, group=self.group)
        return tuple(total.tolist())

    def largest(self, number: int) -> int:
        """Give the largest of all ranks' integers."""
        if self.group is None:
            return number
        most = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return int(most)


ALONE = Ranks()
"""A run of one process."""


@contextmanager
def ranks(
    backend: str = "gloo",
    *,
    seconds: int = 600,
    say: Callable[[BaseException], str | None] = str,
) -> Iterator[Ranks]:
    """Join the other ranks for the time of a run.

    No collective waits for longer than `seconds`. If the run fails on any rank, the process ends
    with code 1, and the first rank to fail writes `rank R: MESSAGE` to stderr; `say` makes the
    message of an exception, or `None` to have its traceback. A `SystemExit` keeps its own code, and
    says nothing.

    Raises:
        ValueError: torchrun's variables are there in part.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    there = [name for name in names if name in os.environ]
    if not there or os.environ.get("WORLD_SIZE") == "1":
        yield ALONE
        return
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(f"{there[0]} is set and {missing[0]} is not; torchrun sets both")
    limit = timedelta(seconds=seconds)
    store, rank, world = next(iter(rendezvous("env://", timeout=limit)))
    dist.init_process_group(
        backend, store=PrefixStore("run", store), rank=rank, world_size=world, timeout=limit
    )
    try:
        yield Ranks(rank, world, dist.group.WORLD, PrefixStore("check", store))
        # A rank that leaves early would make others fail.
        dist.barrier()
    except BaseException as error:
        code = _end(error, rank, store, say)
        sys.stdout.flush()
        sys.stderr.flush()
        # No clean-up: it would wait for ranks that wait for this one.
        os._exit(code)
    dist.destroy_process_group()


def _end(
    error: BaseException, rank: int, store: Any, say: Callable[[BaseException], str | None]
) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    try:
        first = int(store.add("failed", 1)) == 1
    except Exception:
        first = True  # The store is gone, and with it whoever failed before.
    if first:
        message = say(error)
        if message is None:
            message = "".join(traceback.format_exception(error))
        print(f"rank {rank}: {message}", file=sys.stderr)
    return 1
