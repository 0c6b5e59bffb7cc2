"""Functions from function to function: gradients, accumulation, recompute, compilation.

`value_and_grad` is the training path. The same functions work under `torch.func.grad`, `vmap` and
`jvp` with the definition ops and the plain stack.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from mmfn import tree
from mmfn.compute import Stack
from mmfn.ops import Ops
from mmfn.phase import backward_pass


def value_and_grad(fn: Callable[..., Any], *, more: bool = False) -> Callable[..., tuple[Any, Any]]:
    """Make a function that gives `fn(params, ...)`, a scalar, and its gradient by `params`.

    The gradient is a tree like `params`; a leaf that `fn` does not read has a gradient of zeros.
    With `more` what `fn` gives is a pair, the scalar and a tree that takes no gradient.
    """

    @wraps(fn)
    def run(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        with torch.enable_grad():
            # A new leaf each time: the caller's tensors are not touched.
            flat = [leaf.detach().requires_grad_() for leaf in tree.leaves(params)]
            out = fn(tree.unflatten(params, flat), *args, **kwargs)
            value = out[0] if more else out
            # A compiled step that runs blocks again is told which part is the backward pass.
            with backward_pass():
                grads = torch.autograd.grad(value, flat, allow_unused=True, materialize_grads=True)
        return tree.map(torch.Tensor.detach, out), tree.unflatten(params, list(grads))

    return run


def accumulate(fn: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Make a function that sums `fn(params, batch, ...)`, a value and a gradient, over batches.

    Losses are divided by the count of the whole step already, so a sum is what is wanted; a value
    may be a tree, whose leaves are summed.
    """

    def run(params: Any, batches: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        value, grads = fn(params, batches[0], *args)
        total = tree.leaves(grads)
        for batch in batches[1:]:
            more, grads_more = fn(params, batch, *args)
            value = tree.map(torch.add, value, more)
            torch._foreach_add_(total, tree.leaves(grads_more))
        return value, grads

    return run


Contexts: TypeAlias = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Policy: TypeAlias = Callable[[], Contexts]
"""What to keep: makes the contexts of the first and of the second run of a block."""


class _Choices(TorchFunctionMode):
    """Notes the indices that `topk` of what takes no gradient gives, or gives those noted."""

    def __init__(self, noted: list[Tensor], *, again: bool) -> None:
        self.noted, self.again, self.next = noted, again, 0

    def __enter__(self) -> "_Choices":
        self.next = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **(kwargs or {}))
        if self.again:
            self.next += 1
            index = self.noted[self.next - 1]
            return args[0].gather(-1, index), index
        out = func(*args, **(kwargs or {}))
        self.noted.append(out[1])
        return out


def keep_choices() -> Contexts:
    """Keep what a router chose: a block that is run again then has the same rows bit for bit."""
    noted: list[Tensor] = []
    return _Choices(noted, again=False), _Choices(noted, again=True)


def keep_choices_in_graph() -> Contexts:
    """Do what `keep_choices` does, in a compiled step."""
    contexts: Contexts = create_selective_checkpoint_contexts([torch.ops.aten.topk.default])
    return contexts


def remat(stack: Stack, policy: Policy | None = None, *, first: int | None = None) -> Stack:
    """Keep only the input of each block (and what `policy` keeps), and run it again backward.

    `first` says how many layers, from the first one, do so: they are the last ones backward, when
    what others kept is gone. Blocks of experts need the policy `keep_choices`.

    Source: Chen et al. 2016, arXiv:1604.06174.
    """
    options: dict[str, Any] = {} if policy is None else {"context_fn": policy}

    def run(
        block: Callable[..., Any],
        layers: Sequence[Any],
        x: Tensor,
        *args: Any,
        each: Sequence[Any],
        keep: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor], list[Any]]:
        most = len(layers) if first is None else first
        marked = [(index < most, own) for index, own in enumerate(each)]
        return stack(
            # A lambda: checkers of annotations wrap every `def`, and Dynamo would not look inside.
            lambda *inputs: (
                checkpoint(
                    block,
                    *inputs[:-1],
                    inputs[-1][1],
                    use_reentrant=False,
                    preserve_rng_state=False,
                    **options,
                )
                if inputs[-1][0]
                else block(*inputs[:-1], inputs[-1][1])
            ),
            layers,
            x,
            *args,
            each=marked,
            keep=keep,
        )

    return run


def forgetting(
    values: Sequence[Tensor], again: Callable[[], Sequence[Tensor]]
) -> AbstractContextManager[Any]:
    """Keep for the backward pass which of `values` was saved, not the tensor; `again()` makes them.

    What shares the memory of one counts as that one.
    """
    places = {value.untyped_storage().data_ptr(): n for n, value in enumerate(values)}

    def pack(x: Tensor) -> Any:
        place = places.get(x.untyped_storage().data_ptr())
        if place is None or x.numel() == 0:
            return x
        return place, x.shape, x.stride(), x.storage_offset()

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        place, shape, stride, offset = kept
        made: Tensor = again()[place]
        return made.as_strided(shape, stride, offset)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def compile_blocks(stack: Stack, *, backend: str = "inductor") -> Stack:
    """Compile the block: blocks of one kind are one graph, whatever the number of layers."""
    compiled: dict[Any, Callable[..., Any]] = {}

    def run(
        block: Callable[..., Any],
        layers: Sequence[Any],
        x: Tensor,
        *args: Any,
        each: Sequence[Any],
        keep: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor], list[Any]]:
        # A model binds options to its block anew in each call; the function behind is the same.
        function, options = getattr(block, "func", block), getattr(block, "keywords", {})
        if function not in compiled:
            compiled[function] = torch.compile(
                function, fullgraph=True, dynamic=False, backend=backend
            )
        quick = compiled[function]
        return stack(
            lambda *inputs: quick(*inputs, **options), layers, x, *args, each=each, keep=keep
        )

    return run


def compile_loss(ops: Ops, *, backend: str = "inductor") -> Ops:
    """Compile the cross entropy, beside `compile_blocks`: its passes over the logits are one."""
    compiled = torch.compile(ops.cross_entropy, fullgraph=True, dynamic=False, backend=backend)
    return attrs.evolve(ops, cross_entropy=compiled)


def compile_step(step: Callable[..., Any], *, backend: str = "inductor") -> Callable[..., Any]:
    """Compile a function that takes gradients inside, a training step, as one graph.

    Raises:
        torch._dynamo.exc.Unsupported: something in it cannot be in the graph; names it.
    """
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend=backend)

    @wraps(step)
    def run(*args: Any) -> Any:
        # Off by default in torch 2.13: autograd.grad would break the graph.
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            return compiled(*args)

    return run
