"""Results worked out ahead, in order, by other processes."""

import os
from collections.abc import Callable, Generator
from typing import Any, TypeVar, cast

import attrs
import torch
from torch.utils.data import DataLoader, Dataset

Value = TypeVar("Value")


@attrs.frozen
class _Guarded:
    """A function as a table of its results; a `ValueError` is one, to be raised as it is."""

    function: Callable[[int], Any]

    def __getitem__(self, item: int) -> Any:
        try:
            return self.function(item)
        except ValueError as error:
            return error


def _apart(worker: int) -> None:
    """Leave signals that are sent to the group of the main process to that one.

    Ctrl-C in a terminal, and what schedulers send to end a run, reach all processes of a group; a
    worker that ends by them would make the main one fail before it has saved.
    """
    os.setpgid(0, 0)


def _same(value: Value) -> Value:
    return value


def ordered(
    function: Callable[[int], Value], items: range, *, workers: int, prefetch: int = 2
) -> Generator[Value, None, None]:
    """Yield `function(item)` in order, computed ahead by worker processes, or here without any.

    Each worker works up to `prefetch` items ahead. Workers end with the generator, and with this
    process however it ends. What a worker raises is raised here: a `ValueError` as it was, another
    exception with the worker's traceback as its text.
    """
    if workers == 0:
        yield from map(function, items)
        return
    results = iter(
        DataLoader(
            cast("Dataset[Any]", _Guarded(function)),
            batch_size=None,
            sampler=items,
            num_workers=workers,
            prefetch_factor=prefetch,
            collate_fn=_same,
            generator=torch.Generator(),  # Else it would draw from the global stream.
            worker_init_fn=_apart,
        )
    )
    try:
        for result in results:
            if isinstance(result, ValueError):
                raise result
            yield result
    finally:
        del results  # Ends the workers, also while a traceback holds this frame.
