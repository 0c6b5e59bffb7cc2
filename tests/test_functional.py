"""The whole model under `torch.func`: gradients, per-sample gradients, jvp, Hessian products."""

from functools import partial

import pytest
import tiny
import torch

from mmfn import optim, tree
from mmfn.batch import Batch
from mmfn.models import qwen3_vl
from mmfn.transforms import value_and_grad

LOSS = partial(qwen3_vl.loss, cfg=tiny.CONFIG)


@pytest.fixture(scope="module")
def params() -> qwen3_vl.Qwen3VL:
    """The tiny weights in float64."""
    return tiny.params(dtype=torch.float64)


@pytest.fixture(scope="module")
def direction(params: qwen3_vl.Qwen3VL) -> qwen3_vl.Qwen3VL:
    """A direction in the space of weights."""
    random = torch.Generator().manual_seed(0)
    return tree.map(lambda p: torch.randn(p.shape, generator=random, dtype=p.dtype), params)


def batch(*names: str) -> Batch:
    """Pack sequences, all of their text supervised."""
    return tiny.batch(*(tiny.encoded(name) for name in names), tokens=48)


def dot(a: qwen3_vl.Qwen3VL, b: qwen3_vl.Qwen3VL) -> torch.Tensor:
    """Sum the products of all leaves."""
    parts = [(x * y).sum() for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)]
    return torch.stack(parts).sum()


def same(a: qwen3_vl.Qwen3VL, b: qwen3_vl.Qwen3VL) -> None:
    """Compare all leaves at float64's default tolerances."""
    for (path, x), y in zip(tree.items(a), tree.leaves(b), strict=True):
        torch.testing.assert_close(x, y, msg=lambda text, path=path: f"{path}: {text}")


def test_grad_is_autograd(params: qwen3_vl.Qwen3VL) -> None:
    """`torch.func.grad_and_value` and `value_and_grad` give the same tree and value."""
    value, grads = value_and_grad(LOSS)(params, batch("A", "T"))
    func_grads, func_value = torch.func.grad_and_value(LOSS)(params, batch("A", "T"))
    torch.testing.assert_close(func_value, value)
    same(func_grads, grads)


def test_vmap_gives_the_gradient_of_each_sample(params: qwen3_vl.Qwen3VL) -> None:
    """One call over three stacked batches, each against its own gradient."""
    batches = [batch(name) for name in ("A", "B", "picture")]
    stacked = tree.map(lambda *leaves: torch.stack(leaves), *map(pad, batches))
    each = torch.func.vmap(torch.func.grad(LOSS), in_dims=(None, 0))(params, stacked)
    for index, one in enumerate(batches):
        same(tree.map(lambda leaf, i=index: leaf[i], each), value_and_grad(LOSS)(params, one)[1])


def pad(one: Batch) -> Batch:
    """Lengthen the list of targets to 16 with weightless ones, so that batches can be stacked."""
    short = 16 - len(one.at)
    pads = {
        n: torch.nn.functional.pad(getattr(one, n), (0, short))
        for n in ("at", "targets", "weights")
    }
    return tree.evolve(one, **pads)


def test_vmap_over_weights_is_an_ensemble(params: qwen3_vl.Qwen3VL) -> None:
    """Two models in one call."""
    other = tree.map(lambda leaf: leaf * 1.01, params)
    both = tree.map(lambda *leaves: torch.stack(leaves), params, other)
    values = torch.func.vmap(LOSS, in_dims=(0, None))(both, batch("A"))
    torch.testing.assert_close(values[0], LOSS(params, batch("A")))
    torch.testing.assert_close(values[1], LOSS(other, batch("A")))


def test_jvp_is_the_gradient_along_a_direction(
    params: qwen3_vl.Qwen3VL, direction: qwen3_vl.Qwen3VL
) -> None:
    """Forward mode against reverse mode."""
    data = batch("B")
    value, slope = torch.func.jvp(lambda p: LOSS(p, data), (params,), (direction,))
    expected, grads = value_and_grad(LOSS)(params, data)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(slope, dot(grads, direction))


def test_hessian_vector_product(params: qwen3_vl.Qwen3VL, direction: qwen3_vl.Qwen3VL) -> None:
    """Forward over reverse against reverse over reverse by autograd."""
    data = batch("A")
    _, product = torch.func.jvp(lambda p: torch.func.grad(LOSS)(p, data), (params,), (direction,))
    flat = [leaf.clone().requires_grad_() for leaf in tree.leaves(params)]
    first = torch.autograd.grad(LOSS(tree.unflatten(params, flat), data), flat, create_graph=True)
    slope = torch.stack([(g * d).sum() for g, d in zip(first, tree.leaves(direction), strict=True)])
    second = torch.autograd.grad(slope.sum(), flat, materialize_grads=True)
    same(product, tree.unflatten(params, list(second)))
    assert optim.global_norm(product) > 0
