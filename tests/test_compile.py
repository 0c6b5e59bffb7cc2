"""The whole training step is one graph, for all batches, without a look at the device."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mmfn import optim, schedules, tree
from mmfn.compute import Compute, sequential
from mmfn.data.encoded import Encoded, Run
from mmfn.kernels import cpu
from mmfn.models import qwen3_vl
from mmfn.train import TrainState, make_step, start
from mmfn.transforms import (
    compile_blocks,
    compile_step,
    keep_choices_in_graph,
    remat,
    value_and_grad,
)

pytestmark = pytest.mark.usefixtures("no_shape_checks")


def optimizer(cfg: qwen3_vl.Config = tiny.CONFIG) -> optim.Optimizer:
    """Clip and fused AdamW, with a schedule."""
    groups = optim.groups(qwen3_vl.abstract(cfg), decay=0.1)
    return optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.adamw(schedules.cosine(1e-3, 100, 10), groups=groups, kernel=cpu.adamw_),
    )


def step_of(
    compute: Compute, cfg: qwen3_vl.Config = tiny.CONFIG
) -> Callable[[TrainState, Sequence[Any]], Any]:
    """Make a training step of a tiny model, with the balance of experts if it has any."""
    return make_step(
        lambda p, b: qwen3_vl.losses_of(p, b, cfg, compute, balance=0.01),
        optimizer(cfg),
        report=qwen3_vl.report(cfg),
    )


def varied(seed: int) -> Any:
    """Make a batch of three samples with pictures and lengths by chance, 128 tokens."""
    random = np.random.default_rng(seed)
    samples = []
    for index in range(3):
        height, width = 2 * random.integers(1, 4, 2)
        before, after = random.integers(1, 9, 2)
        pads = height * width // 4
        tokens = np.concatenate(
            [
                random.integers(0, 119, before),
                [122],
                np.full(pads, 120),
                [123],
                random.integers(0, 119, after),
            ]
        ).astype(np.int64)
        run = Run(int(before) + 1, int(height), int(width))
        patches = random.normal(size=(height * width, 96)).astype(np.float32)
        samples.append(Encoded(f"{seed}.{index}", tokens, tokens < 119, (run,), patches))
    return tiny.batch(*samples, tokens=128, least_patches=128, least_targets=32)


FUSED = Compute(ops=cpu.OPS)
NARROW = Compute(ops=cpu.OPS, dtype=torch.bfloat16, stack=remat(sequential))


CHOSEN = Compute(ops=cpu.OPS, stack=remat(sequential, keep_choices_in_graph))


@pytest.mark.parametrize(
    ("cfg", "compute", "batches"),
    [(tiny.CONFIG, FUSED, 20), (tiny.CONFIG, NARROW, 3), (tiny.MOE, CHOSEN, 3)],
    ids=["float32", "bfloat16 recomputed", "experts recomputed"],
)
def test_the_step_is_one_graph_and_gives_the_same_numbers(
    cfg: qwen3_vl.Config, compute: Compute, batches: int
) -> None:
    """Batches of different pictures and lengths: `fullgraph`, at most two recompilations."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = compile_step(step_of(compute, cfg), backend="aot_eager")
    eager = step_of(attrs.evolve(compute, stack=sequential) if cfg.experts else compute, cfg)
    states = [start(tiny.params(cfg), optimizer(cfg)) for _ in range(2)]
    for seed in range(batches):
        found = []
        for index, step in enumerate((compiled, eager)):
            states[index], metrics = step(states[index], (varied(seed),))
            found.append([metrics[name].item() for name in ("loss", "grad_norm", "lr")])
        # The first steps only: rounding in another order is amplified by the optimizer.
        if seed < 3:
            assert found[0] == pytest.approx(found[1], rel=2e-2 if compute.dtype else 1e-4)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 3


@pytest.mark.slow
def test_inductor_gives_the_same_numbers() -> None:
    """The same with the real compiler, three batches of one shape."""
    torch._dynamo.reset()
    compiled, eager = compile_step(step_of(FUSED)), step_of(FUSED)
    states = [start(tiny.params(), optimizer()) for _ in range(2)]
    for _ in range(3):
        found = []
        for index, step in enumerate((compiled, eager)):
            states[index], metrics = step(states[index], (varied(0),))
            found.append([metrics[name].item() for name in ("loss", "grad_norm", "lr")])
        assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_blocks_of_one_kind_are_one_graph() -> None:
    """Three decoder layers (two with deep features) and four of the tower: three graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compute = Compute(ops=cpu.OPS, stack=compile_blocks(sequential, backend="aot_eager"))
    data = varied(1)
    ours = value_and_grad(qwen3_vl.loss)(tiny.params(), data, tiny.CONFIG, compute)
    plain = value_and_grad(qwen3_vl.loss)(tiny.params(), data, tiny.CONFIG, FUSED)
    for a, b in zip(tree.leaves(ours), tree.leaves(plain), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def test_recompute_changes_no_bit() -> None:
    """Recomputed blocks give the same loss and gradients, bit for bit, and keep less."""
    found, kept = [], []
    for compute in (FUSED, Compute(ops=cpu.OPS, stack=remat(sequential))):
        sizes: dict[int, int] = {}

        def pack(x: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            found.append(
                value_and_grad(qwen3_vl.loss)(tiny.params(), varied(2), tiny.CONFIG, compute)
            )
        kept.append(sum(sizes.values()))
    for a, b in zip(*map(tree.leaves, found), strict=True):
        assert torch.equal(a, b)
    assert kept[1] < kept[0]


def test_the_step_never_waits_for_the_device() -> None:
    """Fake tensors raise wherever a value would be read: `.item`, `.tolist`, boolean masks."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        state, data = (
            tree.map(mode.from_tensor, value)
            for value in (start(tiny.params(), optimizer()), varied(3))
        )
        state, metrics = step_of(FUSED)(state, (data, data))
        assert metrics["loss"].shape == ()
        with pytest.raises(Exception, match=r"local_scalar_dense|item"):
            metrics["loss"].item()
