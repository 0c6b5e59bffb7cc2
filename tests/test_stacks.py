"""What is done around blocks changes no number: recompute of some layers."""

import attrs
import pytest
import tiny
import torch
from torch import Tensor

from mmfn import tree
from mmfn.compute import Compute, sequential
from mmfn.kernels import cpu
from mmfn.models import qwen3_vl
from mmfn.transforms import remat, value_and_grad


def gradients(compute: Compute) -> list[Tensor]:
    """Give loss and gradients of A, T and B."""
    batch = tiny.batch(*(tiny.encoded(n) for n in "ATB"))
    value, grads = value_and_grad(qwen3_vl.loss)(tiny.params(), batch, tiny.CONFIG, compute)
    return [value, *tree.leaves(grads)]


@pytest.mark.parametrize("first", [None, 0, 1, 2, 9])
def test_recompute_of_the_first_layers_changes_nothing(first: int | None) -> None:
    """Bit for bit, and so many blocks of the decoder and of the tower run twice."""
    calls = [0]

    def counting(x: Tensor, scale: Tensor, eps: float) -> Tensor:
        calls[0] += len(scale) == tiny.CONFIG.embed
        return cpu.OPS.rms_norm(x, scale, eps)

    plain = Compute(ops=attrs.evolve(cpu.OPS, rms_norm=counting))
    want = gradients(plain)
    once = calls[0]
    got = gradients(attrs.evolve(plain, stack=remat(sequential, first=first)))
    assert all(map(torch.equal, want, got))
    again = tiny.CONFIG.layers if first is None else min(first, tiny.CONFIG.layers)
    assert calls[0] - once == once + 2 * again
