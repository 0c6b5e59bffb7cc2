"""Optimizers as pairs of functions over trees: transforms of gradients, chained before an update.

`chain(clip_by_global_norm(1.0), adamw(cosine(1e-4, 1000)))`. State is a tree like the weights, so
it is cut over ranks, saved and compiled as they are.

Source: the shape of optax (DeepMind 2020); each rule names its own.
"""

import fnmatch
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from mmfn import tree
from mmfn.param import Param
from mmfn.tree import pytree

Schedule = Callable[[Tensor], Tensor]
"""Gives the learning rate, float32, of the update after `count` (float32) earlier ones."""


@pytree
class Gradients:
    """A tree of gradients, their global norm, and a factor that is not applied yet.

    The factor waits so that a fused update can apply it while it reads the values anyway.
    """

    values: Any
    norm: Tensor
    """Norm of the values before the factor, float32, over all ranks."""
    factor: Tensor
    """float32."""
    skip: Tensor
    """1 where the values are not finite and no update may happen, else 0; float32."""


@attrs.frozen
class Transform:
    """A pair: `init(params) -> state`, `update(gradients, state, params) -> (gradients, state)`."""

    init: Callable[[Any], Any]
    update: Callable[[Gradients, Any, Any], tuple[Gradients, Any]]


@attrs.frozen
class Optimizer:
    """A pair: `init(params) -> state`, `update(gradients, state, params) -> (params, state)`.

    `donate=True` lets `update` write into the state and params it is given, which must not be
    used again. `rate(state)` is the learning rate of the next update, for the log.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    rate: Callable[[Any], Tensor]


def global_norm(values: Any) -> Tensor:
    """Give the norm of all leaves taken together, float32 at least; zero for an empty tree."""
    flat = tree.leaves(values)
    if not flat:
        return torch.zeros(())
    norms = torch._foreach_norm(flat, 2.0)
    wide = [n.to(torch.promote_types(n.dtype, torch.float32)) for n in norms]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(wide))
    return norm


def gradients(values: Any, norm: Callable[[Any], Tensor] = global_norm) -> Gradients:
    """Measure a tree of gradients; `norm` says how, where leaves are cut over ranks."""
    size = norm(values)
    return Gradients(values, size, torch.ones_like(size), (~size.isfinite()).to(size.dtype))


def clip_by_global_norm(limit: float) -> Transform:
    """Scale gradients down to the norm `limit` where they are longer.

    Source: Pascanu et al. 2013, arXiv:1211.5063; the 1e-6 is that of `clip_grad_norm_`.
    """
    if not limit > 0:
        raise ValueError(f"the limit of the gradient norm is {limit}; it must be positive")

    def update(grads: Gradients, state: tuple[()], params: Any) -> tuple[Gradients, tuple[()]]:
        factor = (limit / (grads.norm * grads.factor + 1e-6)).clamp(max=1.0)
        return tree.evolve(grads, factor=grads.factor * factor), state

    return Transform(lambda params: (), update)


def chain(*links: Any) -> Optimizer:
    """Apply transforms in order, then the optimizer that comes last."""
    *transforms, last = links
    if not isinstance(last, Optimizer) or not all(isinstance(t, Transform) for t in transforms):
        raise ValueError(f"a chain is transforms and an optimizer at its end, not {links}")

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(link.init(params) for link in links)

    def update(
        grads: Gradients, state: tuple[Any, ...], params: Any, *, donate: bool = False
    ) -> tuple[Any, tuple[Any, ...]]:
        states = []
        for transform, own in zip(transforms, state[:-1], strict=True):
            grads, own = transform.update(grads, own, params)
            states.append(own)
        params, own = last.update(grads, state[-1], params, donate=donate)
        return params, (*states, own)

    return Optimizer(init, update, lambda state: last.rate(state[-1]))


@attrs.frozen
class Group:
    """What a rule of the optimizer says of the leaves whose path matches."""

    scale: float = 1.0
    """Factor on the learning rate."""
    decay: float = 0.0
    """Weight decay, per unit of learning rate."""


def groups(params: Any, decay: float, rules: Sequence[tuple[str, Group]] = ()) -> tuple[Group, ...]:
    """Give each leaf its group: that of the first rule whose pattern matches its path.

    Patterns are those of `fnmatch` (`vision.*`). A leaf that no rule names has scale 1, and
    `decay` if it is published with two dimensions or more: norms and biases do not decay.

    Raises:
        ValueError: a pattern matches no leaf; names it.
    """
    unused = {pattern for pattern, _ in rules}
    found, path = [], ""
    for path, leaf in tree.items(params):
        dims = len(leaf.published) if isinstance(leaf, Param) else leaf.ndim
        group = Group(decay=decay if dims >= 2 else 0.0)
        for pattern, named in rules:
            if fnmatch.fnmatchcase(path, pattern):
                unused.discard(pattern)
                group = named
                break
        found.append(group)
    for pattern, _ in rules:
        # A rule that another rule hides is as wrong as one that names nothing.
        if pattern in unused:
            raise ValueError(f"the rule {pattern!r} decides for no weight; paths are like {path!r}")
    return tuple(found)


@pytree
class Moments:
    """State of Adam: number of updates so far, running means of gradients and their squares."""

    count: Tensor
    mean: Any
    square: Any


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    count: Tensor,
    rate: Tensor,
    factor: Tensor,
    skip: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    """Update params, means and squares in place, unless `skip` is 1: the definition.

    `count` counts this update. Gradients are multiplied by `factor` first.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
    """
    # As written, 1 - b**count is off by 2e-5 in float32 at the first steps; this by 1e-7.
    fix1 = -torch.expm1(count * math.log(beta1)) if beta1 > 0 else torch.ones_like(count)
    fix2 = -torch.expm1(count * math.log(beta2)) if beta2 > 0 else torch.ones_like(count)
    keep = skip == 0
    for param, grad, mean, square in zip(params, grads, means, squares, strict=True):
        g = grad * factor
        new_mean = mean.lerp(g.to(mean.dtype), 1 - beta1)
        new_square = square.lerp((g * g).to(square.dtype), 1 - beta2)
        step = (new_mean / fix1) / ((new_square / fix2).sqrt() + eps)
        new = (param * (1 - rate * decay) - rate * step).to(param.dtype)
        mean.copy_(torch.where(keep, new_mean, mean))
        square.copy_(torch.where(keep, new_square, square))
        param.copy_(torch.where(keep, new, param))


def adamw(
    rate: Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    groups: Group | Sequence[Group] = Group(),
    kernel: Callable[..., None] = adamw_,
) -> Optimizer:
    """Adam with decoupled weight decay; moments are float32, as the weights must be.

    `groups` is one group for all, or one a leaf, as `optim.groups` gives them. `kernel` is
    `adamw_` or a fused version of it. Decay 0 is Adam.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101.
    """

    def init(params: Any) -> Moments:
        # bfloat16 weights would lose updates below their spacing (and moments too).
        narrow = [(p, x.dtype) for p, x in tree.items(params) if x.dtype.itemsize < 4]
        if narrow:
            raise ValueError(f"{narrow[0][0]} is {narrow[0][1]}; AdamW needs float32 weights")
        flat = tree.leaves(params)
        device = flat[0].device if flat else torch.device("cpu")
        zeros = tree.map(torch.zeros_like, params)
        return Moments(torch.zeros((), device=device), zeros, tree.map(torch.zeros_like, params))

    def update(
        grads: Gradients, state: Moments, params: Any, *, donate: bool = False
    ) -> tuple[Any, Moments]:
        if not donate:
            params, state = tree.map(torch.clone, params), tree.map(torch.clone, state)
        count = state.count + 1
        now = rate(state.count)
        rows = list(
            zip(
                *map(tree.leaves, (params, grads.values, state.mean, state.square)),
                strict=True,
            )
        )
        for group, chosen in _by_group(rows, groups).items():
            kernel(
                *map(list, zip(*chosen, strict=True)),
                count,
                now * group.scale,
                grads.factor,
                grads.skip,
                *betas,
                eps,
                group.decay,
            )
        # A skipped update does not count.
        return params, tree.evolve(state, count=state.count + (1 - grads.skip).to(count.dtype))

    return Optimizer(init, update, lambda state: rate(state.count))


@pytree
class Momentum:
    """State of SGD: number of updates so far, running sum of gradients (if momentum)."""

    count: Tensor
    mean: Any


def sgd(
    rate: Schedule, *, momentum: float = 0.0, groups: Group | Sequence[Group] = Group()
) -> Optimizer:
    """Gradient descent, with heavy-ball momentum and L2 decay, as `torch.optim.SGD` has them.

    Source: Polyak 1964, doi:10.1016/0041-5553(64)90137-5.
    """

    def init(params: Any) -> Momentum:
        flat = tree.leaves(params)
        device = flat[0].device if flat else torch.device("cpu")
        mean = tree.map(torch.zeros_like, params) if momentum else None
        return Momentum(torch.zeros((), device=device), mean)

    def update(
        grads: Gradients, state: Momentum, params: Any, *, donate: bool = False
    ) -> tuple[Any, Momentum]:
        if not donate:
            params, state = tree.map(torch.clone, params), tree.map(torch.clone, state)
        now, keep = rate(state.count), grads.skip == 0
        flat = tree.leaves(params)
        means = tree.leaves(state.mean) if momentum else [None] * len(flat)
        rows = list(zip(flat, tree.leaves(grads.values), means, strict=True))
        for group, chosen in _by_group(rows, groups).items():
            for param, grad, mean in chosen:
                move = grad * grads.factor + group.decay * param
                if mean is not None:
                    move = mean * momentum + move
                    mean.copy_(torch.where(keep, move, mean))
                new = param - (now * group.scale).to(param.dtype) * move
                param.copy_(torch.where(keep, new, param))
        return params, tree.evolve(state, count=state.count + (1 - grads.skip).to(torch.float32))

    return Optimizer(init, update, lambda state: rate(state.count))


def _by_group(
    rows: Sequence[tuple[Any, ...]], groups: Group | Sequence[Group]
) -> dict[Group, list[tuple[Any, ...]]]:
    each = [groups] * len(rows) if isinstance(groups, Group) else groups
    if len(each) != len(rows):
        raise ValueError(f"{len(each)} groups for {len(rows)} weights")
    found: dict[Group, list[tuple[Any, ...]]] = {}
    for row, group in zip(rows, each, strict=True):
        found.setdefault(group, []).append(row)
    return found
