"""Marks of the backward pass, for a compiler that runs blocks again in the same graph.

A step that holds both passes in one graph has to say which of its operations are the backward pass:
those that `torch.autograd.grad` makes (`value_and_grad` marks them), and those that a written
`backward` makes, which this marks. One that is not marked cuts the pass in two, and torch 2.13
refuses to recompute then.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.fx.traceback import annotate


def backward_pass() -> AbstractContextManager[Any]:
    """Mark what is done inside as the backward pass."""
    return annotate({"phase": "backward"})


def in_backward(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark all that a `backward` does."""
    return lambda *args: _marked(fn, args)


def _marked(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with backward_pass():
        return fn(*args)
