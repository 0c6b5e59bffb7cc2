"""Experts on one device: their operations, padding, the balance loss, recompute."""

from collections.abc import Sequence

import attrs
import pytest
import tiny
import torch
from torch import Tensor

from mmfn import ops, optim, schedules, tree
from mmfn.batch import Batch
from mmfn.compute import Compute, sequential
from mmfn.kernels import cpu, routing
from mmfn.models import moe, qwen3_vl
from mmfn.train import make_step, start
from mmfn.transforms import keep_choices, remat, value_and_grad

CFG = tiny.MOE
BALANCED = 1.0
"""Weight of the balance loss."""


def random(*shape: int, seed: int = 0) -> Tensor:
    """Draw normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("counts", [[3, 4, 2], [0, 9, 0], [0, 0, 0], [1, 0, 5], [9, 0, 0]], ids=str)
def test_a_grouped_product_is_a_product_of_each_group(counts: list[int]) -> None:
    """Fused and defined: values and gradients; rows beyond the counts are zeros."""
    x, weight, grad = random(9, 5), random(3, 5, 4, seed=1), random(9, 4, seed=2)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        rows = x.split([*counts, 9 - sum(counts)])
        parts = [row @ w for row, w in zip(rows[:-1], weight, strict=True)]
        return torch.cat([*parts, x.new_zeros(len(rows[-1]), 4)])

    want, back = torch.func.vjp(plain, x, weight)
    for version in (ops.grouped_linear, cpu.grouped_linear):
        inputs = (x.clone().requires_grad_(), weight.clone().requires_grad_())
        got = version(*inputs, torch.tensor(counts))
        torch.testing.assert_close(got, want)
        found = torch.autograd.grad(got, inputs, grad)
        torch.testing.assert_close(found, back(grad))


@pytest.mark.parametrize("version", [ops, routing])
def test_there_and_back_is_the_weighted_sum(version) -> None:
    """Permuted and brought back: each token times the sum of its weights; gradients too."""
    x, weight = random(6, 3), random(6, 2, seed=1)
    expert = torch.tensor([[0, 2], [1, 0], [2, 1], [3, 0], [1, 2], [3, 3]])
    order, counts = ops.by_expert(expert, 3)
    assert counts.tolist() == [3, 3, 3]
    assert expert.flatten()[order].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]

    def there_and_back(x: Tensor, weight: Tensor) -> Tensor:
        return version.unpermute(version.permute(x, order, 2), order, weight)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight.sum(1, keepdim=True)

    inputs = [each.clone().requires_grad_() for each in (x, weight)]
    for function in (there_and_back,):
        got, want = function(*inputs), plain(*inputs)
        torch.testing.assert_close(got, want)
        grad = random(6, 3, seed=2)
        ours = torch.autograd.grad(got, inputs, grad)
        torch.testing.assert_close(ours, torch.autograd.grad(want, inputs, grad))


@pytest.mark.parametrize("compute", [Compute(), Compute(ops=cpu.OPS)], ids=["defined", "fused"])
def test_padding_goes_to_no_expert(compute: Compute) -> None:
    """A longer tail changes neither loss nor gradients nor loads."""
    losses = []
    for tokens in (33, 64, 128):
        batch = tiny.batch(tiny.encoded("A"), tokens=tokens)
        value, routed = qwen3_vl.losses_of(tiny.params(CFG), batch, CFG, compute, balance=BALANCED)
        assert routed is not None
        assert routed.load.sum(1).tolist() == [66.0] * 3
        losses.append(value.item())
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)


def balanced(params, batch: Batch, load: Tensor | None = None):
    """Give the balanced loss and the routing."""
    return qwen3_vl.losses_of(params, batch, CFG, balance=BALANCED, load=load)


def load_of(params, batches: Sequence[Batch]) -> Tensor:
    """Count the loads of a step before it."""
    found = [qwen3_vl.hidden(params, batch, CFG)[1] for batch in batches]
    return torch.stack([routed.load for routed in found if routed is not None]).sum(0)


def test_the_balance_loss_does_not_depend_on_micro_batches() -> None:
    """T once, or four times in four micro-batches: 1.996194 and the same gradient; and A, T, B
    together are not the mean of each alone."""
    one = tiny.batch(tiny.encoded("T"))
    _, routed = balanced(tiny.params(CFG), one)
    assert routed is not None
    share = moe.balance(routed, routed.load, CFG.experts)
    assert share.item() == pytest.approx(1.996194, abs=1e-5)
    steps = []
    for batches in (
        (one,),
        tuple(tree.evolve(one, count=one.count * 4) for _ in range(4)),
    ):
        known = load_of(tiny.params(CFG), batches)
        found = [
            value_and_grad(lambda p, b, k=known: balanced(p, b, k)[0])(tiny.params(CFG), b)
            for b in batches
        ]
        steps.append((sum(v.item() for v, _ in found), found))
    assert steps[1][0] == pytest.approx(steps[0][0], abs=1e-6)
    four = steps[1][1]
    for index, (path, want) in enumerate(tree.items(steps[0][1][0][1])):
        got = torch.stack([tree.leaves(grads)[index] for _, grads in four]).sum(0)
        torch.testing.assert_close(got, want, msg=lambda text, path=path: f"{path}: {text}")


def test_a_step_balances_over_all_of_its_micro_batches() -> None:
    """A, T, B in three micro-batches or in one row: one loss, one update."""
    together = (tiny.batch(*(tiny.encoded(n) for n in "ATB"), tokens=96),)
    apart = tuple(tiny.batch(tiny.encoded(n), tokens=40) for n in "ATB")
    apart = tuple(tree.evolve(b, count=together[0].count) for b in apart)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(schedules.constant(0.1)))
    ends = []
    for batches in (together, apart):
        step = make_step(balanced, optimizer, prepare=load_of, report=lambda more: {})
        state, metrics = step(start(tiny.params(CFG), optimizer), batches)
        ends.append((metrics["loss"].item(), state.params))
    assert ends[0][0] == pytest.approx(ends[1][0], abs=1e-5)
    for (path, a), b in zip(tree.items(ends[0][1]), tree.leaves(ends[1][1]), strict=True):
        torch.testing.assert_close(
            a, b, atol=2e-6, rtol=1e-5, msg=lambda text, path=path: f"{path}: {text}"
        )


def test_recompute_routes_as_the_first_pass_did() -> None:
    """Two experts with equal rows of the router tie for every token, in bfloat16: 20 steps; and in
    float32 the gradients are bit for bit those without recompute."""
    params = tree.map_with_path(
        lambda path, leaf: leaf[[0, 0, 2, 3]] if path.endswith("router") else leaf,
        tiny.params(CFG),
    )
    batch = tiny.batch(*(tiny.encoded(n) for n in "ATB"))
    again = remat(sequential, keep_choices)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(schedules.constant(0.1)))
    compute = Compute(ops=cpu.OPS, dtype=torch.bfloat16, stack=again)
    step = make_step(lambda p, b: qwen3_vl.loss(p, b, CFG, compute), optimizer)
    state = start(tree.map(torch.clone, params), optimizer)
    losses = []
    for _ in range(20):
        state, metrics = step(state, (batch,))
        losses.append(metrics["loss"].item())
        assert metrics["skipped"].item() == 0
    assert losses[-1] < min(4.5, losses[0])
    found = [
        value_and_grad(qwen3_vl.loss)(params, batch, CFG, Compute(ops=cpu.OPS, stack=stack))
        for stack in (sequential, again)
    ]
    assert torch.equal(found[0][0], found[1][0])
    assert all(map(torch.equal, tree.leaves(found[0][1]), tree.leaves(found[1][1])))


def test_what_was_chosen_is_not_chosen_again() -> None:
    """A router that would choose otherwise the second time: the first choice stays."""
    calls = []

    def chosen(x: Tensor) -> Tensor:
        calls.append(len(calls))
        # The second pass sees another order of experts.
        _, expert = (x.detach() * (-1.0) ** len(calls)).topk(1)
        return x.gather(1, expert)

    x = random(5, 4).requires_grad_()
    y, _, _ = remat(sequential, keep_choices)(lambda layer, x, own: chosen(x), [0], x, each=[None])
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert len(calls) == 2
    first = (-x).topk(1)[1]
    assert torch.equal(grad, torch.zeros_like(x).scatter(1, first, 1.0))


def test_choices_that_are_left_out_take_no_step() -> None:
    """The flag comes out, and weights and moments are as before it."""
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedules.constant(0.1)))
    batch = tiny.batch(tiny.encoded("A"))

    def spilt(params, batch: Batch):
        value, routed = balanced(params, batch)
        assert routed is not None
        return value, tree.evolve(routed, left_out=routed.left_out + 1)

    step = make_step(
        spilt, optimizer, report=lambda more: {"left_out": more.left_out.sum()}, donate=False
    )
    before = start(tiny.params(CFG), optimizer)
    after, metrics = step(before, (batch,))
    assert (metrics["left_out"].item(), metrics["skipped"].item()) == (3.0, 1.0)
    assert all(map(torch.equal, tree.leaves(before.params), tree.leaves(after.params)))
    assert int(after.step) == 1


def test_impossible_experts_are_refused() -> None:
    """With both numbers."""
    with pytest.raises(ValueError, match="choices=5 is not from 1 to experts=4"):
        moe.Config(experts=4, choices=5, mlp=8)
    with pytest.raises(ValueError, match=r"dense=\(3,\) names blocks beyond layers=3"):
        attrs.evolve(CFG, dense=(3,))
