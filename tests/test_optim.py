"""Optimizers agree with torch's, and what they must never do."""

from collections.abc import Callable
from typing import ClassVar

import pytest
import tiny
import torch
from torch import Tensor

from mmfn import optim, param, schedules, tree
from mmfn.kernels import cpu
from mmfn.models import qwen3_vl
from mmfn.optim import Group
from mmfn.train import make_step, start

KERNELS = {"definition": optim.adamw_, "fused": cpu.adamw_}


def values(seed: int) -> tuple[Tensor, Tensor]:
    """Two leaves."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(7, 5, generator=random), torch.randn(5, generator=random)


def apply(optimizer: optim.Optimizer, params, steps: int, **options: bool):
    """Take steps with gradients that depend on the weights."""
    state = optimizer.init(params)
    for index in range(steps):
        grads = tree.map(lambda p, g: p * 0.1 + g, params, values(index + 1))
        params, state = optimizer.update(optim.gradients(grads), state, params, **options)
    return params, state


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(("clip", "decay"), [(1e9, 0.0), (0.5, 0.1)])
def test_adamw_is_torchs(kernel: Callable[..., None], clip: float, decay: float) -> None:
    """Eight steps, with clipping and decay, of torch.optim.AdamW and clip_grad_norm_."""
    ours, _ = apply(
        optim.chain(
            optim.clip_by_global_norm(clip),
            optim.adamw(schedules.constant(0.01), groups=Group(decay=decay), kernel=kernel),
        ),
        values(0),
        8,
        donate=False,
    )
    theirs = [leaf.clone().requires_grad_() for leaf in values(0)]
    reference = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.95), weight_decay=decay)
    for index in range(8):
        for leaf, grad in zip(theirs, values(index + 1), strict=True):
            leaf.grad = leaf.detach() * 0.1 + grad
        torch.nn.utils.clip_grad_norm_(theirs, clip)
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.detach(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_sgd_is_torchs(momentum: float, decay: float) -> None:
    """Eight steps, with momentum and L2 decay."""
    rule = optim.sgd(schedules.constant(0.1), momentum=momentum, groups=Group(decay=decay))
    ours, _ = apply(optim.chain(rule), values(0), 8)
    theirs = [leaf.clone().requires_grad_() for leaf in values(0)]
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, weight_decay=decay)
    for index in range(8):
        for leaf, grad in zip(theirs, values(index + 1), strict=True):
            leaf.grad = leaf.detach() * 0.1 + grad
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.detach(), atol=1e-6, rtol=1e-5)


def test_updates_below_the_spacing_of_bfloat16_are_kept() -> None:
    """500 updates of 1e-5: 0.994993; a bfloat16 weight would stay at 1, and is refused."""
    rule = optim.adamw(schedules.constant(1e-5), betas=(0.9, 0.999))
    params = (torch.ones(1),)
    state = rule.init(params)
    for _ in range(500):
        grads = optim.gradients((torch.full((1,), 0.01),))
        params, state = rule.update(grads, state, params, donate=True)
    assert params[0].item() == pytest.approx(0.994993, abs=2e-6)
    assert params[0].bfloat16().item() == 0.99609375
    assert state.mean[0].dtype == torch.float32
    with pytest.raises(ValueError, match=r"0 is torch.bfloat16; AdamW needs float32"):
        rule.init((torch.ones(1, dtype=torch.bfloat16),))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_gradient_that_is_not_finite_changes_nothing(kernel: Callable[..., None]) -> None:
    """Neither weights nor moments nor the count of updates."""
    rule = optim.chain(
        optim.clip_by_global_norm(1.0), optim.adamw(schedules.constant(0.1), kernel=kernel)
    )
    params, state = apply(rule, values(0), 2, donate=False)
    before = [leaf.clone() for leaf in tree.leaves((params, state))]
    broken = (torch.full((7, 5), torch.nan), torch.ones(5))
    after = rule.update(optim.gradients(broken), state, params, donate=True)
    assert all(torch.equal(a, b) for a, b in zip(before, tree.leaves(after), strict=True))


def test_donated_state_is_written_into_and_other_state_is_not() -> None:
    """`donate=True` gives the same tensors; without it the caller's are untouched."""
    rule = optim.adamw(schedules.constant(0.1))
    params = values(0)
    state = rule.init(params)
    kept, _ = rule.update(optim.gradients(values(1)), state, params)
    assert torch.equal(params[0], values(0)[0])
    assert kept[0] is not params[0]
    given, _ = rule.update(optim.gradients(values(1)), state, params, donate=True)
    assert given[0] is params[0]
    assert not torch.equal(params[0], values(0)[0])


def test_groups_follow_the_first_rule_that_matches() -> None:
    """Norms and biases do not decay; a rule without effect is an error that names it."""
    abstract = qwen3_vl.abstract(tiny.CONFIG)
    rules = [("vision.merger.*", Group(0.5, 0.2)), ("vision.*", Group(0.1, 0.0))]
    found = dict(zip(tree.paths(abstract), optim.groups(abstract, 0.1, rules), strict=True))
    assert found["vision.merger.up.weight"] == Group(0.5, 0.2)
    assert found["vision.layers.0.qkv.weight"] == Group(0.1, 0.0)
    assert found["text.layers.0.attention.q"] == Group(1.0, 0.1)
    assert found["text.layers.0.attention.q_norm"] == Group(1.0, 0.0)
    assert optim.groups(abstract, 0.1)[tree.paths(abstract).index("vision.layers.0.qkv.bias")] == (
        Group(1.0, 0.0)
    )
    with pytest.raises(ValueError, match=r"'txet\.\*' decides for no weight"):
        optim.groups(abstract, 0.1, [("txet.*", Group())])
    with pytest.raises(ValueError, match=r"'vision\.merger\.\*' decides for no weight"):
        optim.groups(abstract, 0.1, rules[::-1])


def test_a_scaled_group_moves_by_its_share() -> None:
    """Adam's first update is the rate itself: 0.1 and 0.01."""
    rule = optim.adamw(schedules.constant(0.1), groups=(Group(1.0), Group(0.1)))
    params = (torch.zeros(3), torch.zeros(3))
    moved, _ = rule.update(optim.gradients((torch.ones(3),) * 2), rule.init(params), params)
    torch.testing.assert_close(moved[0], torch.full((3,), -0.1))
    torch.testing.assert_close(moved[1], torch.full((3,), -0.01))


def test_schedules_have_the_values_of_their_formula() -> None:
    """Rate 1e-4, warm-up 10, half a cosine to 0 at 100: also what a resumed run goes on with."""
    rate = schedules.cosine(1e-4, 100, 10)
    expected = {
        0: 0.0, 5: 5e-5, 9: 9e-5, 10: 1e-4, 36: 8.078307e-05, 37: 7.938926e-05,
        38: 7.795965e-05, 55: 5e-05, 99: 3.045865e-08, 100: 0.0, 500: 0.0,
    }  # fmt: skip
    for count, value in expected.items():
        assert rate(torch.tensor(float(count))).item() == pytest.approx(value, rel=1e-5, abs=1e-11)
    line = schedules.linear(1.0, 110, 10, floor=0.2)
    assert [line(torch.tensor(float(c))).item() for c in (0, 10, 60, 110, 999)] == pytest.approx(
        [0, 1, 0.6, 0.2, 0.2]
    )
    with pytest.raises(ValueError, match="warmup=10 must be less than steps=10"):
        schedules.cosine(1.0, 10, 10)


def test_a_step_makes_no_float64_tensor() -> None:
    """Some devices have none: every tensor that an operation gives is looked at."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Spy(TorchDispatchMode):
        seen: ClassVar[set[torch.dtype]] = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.seen |= {x.dtype for x in tree.leaves([out]) if isinstance(x, Tensor)}
            return out

    optimizer = optim.chain(
        optim.clip_by_global_norm(1.0), optim.adamw(schedules.cosine(1e-3, 10, 2))
    )
    step = make_step(lambda p, b: qwen3_vl.loss(p, b, tiny.CONFIG), optimizer)
    state, batch = start(tiny.params(), optimizer), tiny.batch(tiny.encoded("A"))
    with Spy() as spy:
        step(state, [batch])
    assert torch.float32 in spy.seen
    assert torch.float64 not in spy.seen


def test_frozen_weights_have_no_state_and_do_not_move() -> None:
    """The tower is partitioned away: no gradient, no moment; the rest moves."""
    rule = optim.adamw(schedules.constant(0.01))
    trained, frozen = tree.partition(lambda path, leaf: path.startswith("text."), tiny.params())
    state = start(trained, rule, frozen=frozen)
    assert param.count(state.optimizer.mean) == param.count(trained)
    step = make_step(lambda p, b: qwen3_vl.loss(p, b, tiny.CONFIG), rule)
    before = tree.map(torch.clone, state.frozen)
    after, _ = step(state, [tiny.batch(tiny.encoded("A"))])
    for a, b in zip(tree.leaves(before), tree.leaves(after.frozen), strict=True):
        assert torch.equal(a, b)
    whole = tree.combine(after.params, after.frozen)
    assert not torch.equal(whole.text.embedding, tiny.params().text.embedding)
    with pytest.raises(ValueError, match="no weight to train"):
        start(tree.partition(lambda path, leaf: False, tiny.params())[0], rule)
