"""Operations: definitions against independent forms, fused versions against the definitions."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmfn import ops
from mmfn.batch import Segments
from mmfn.kernels import cpu
from mmfn.kernels import loss as losses


def segments(lengths: list[int], repeats: int = 2) -> Segments:
    """Make segments of these lengths, the last one a tail."""
    ends = torch.tensor(lengths).cumsum(0).to(torch.int32)
    number = torch.arange(1, len(lengths) + 1).repeat_interleave(torch.tensor(lengths))
    number[number == len(lengths)] = 0
    return Segments(number.to(torch.int32), F.pad(ends, (0, repeats), value=int(ends[-1])))


def inputs(tokens: int, kv_heads: int, groups: int, head_dim: int) -> list[Tensor]:
    """Make queries, keys, values and a gradient in float64."""
    random = torch.Generator().manual_seed(0)
    q = (tokens, kv_heads, groups, head_dim)
    k = (tokens, kv_heads, head_dim)
    return [torch.randn(s, generator=random, dtype=torch.float64) for s in (q, k, k, q)]


def sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], causal: bool) -> Tensor:
    """Attend with torch's kernel, one segment at a time."""
    rows = []
    for part in zip(*(x.split(lengths) for x in (q.flatten(1, 2), k, v)), strict=True):
        heads_first = (x.transpose(0, 1)[None] for x in part)
        row = F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True)
        rows.append(row[0].transpose(0, 1))
    return torch.cat(rows).view_as(q)


def gradients(fn: Callable[..., Tensor], *leaves: Tensor, seed: Tensor) -> list[Tensor]:
    """Give the value of a function and its gradients."""
    own = [leaf.detach().requires_grad_() for leaf in leaves]
    value = fn(*own)
    return [value.detach(), *torch.autograd.grad(value, own, seed.to(value.dtype))]


@pytest.mark.parametrize("version", [ops.attention, cpu.attention], ids=["definition", "fused"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kv_heads", "groups"), [(2, 3), (1, 4), (4, 1)])
@pytest.mark.parametrize("lengths", [[9], [1, 7, 1, 4], [130, 5, 270, 11]])
def test_attention_is_torchs_on_each_segment(
    version: Callable[..., Tensor],
    causal: bool,
    kv_heads: int,
    groups: int,
    lengths: list[int],
) -> None:
    """Values and gradients in float64; the longest segment is more than one block of queries."""
    q, k, v, seed = inputs(sum(lengths), kv_heads, groups, 8)
    own = segments(lengths)
    ours = gradients(lambda q, k, v: version(q, k, v, own, causal=causal), q, k, v, seed=seed)
    theirs = gradients(lambda q, k, v: sdpa(q, k, v, lengths, causal), q, k, v, seed=seed)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_in_bfloat16_is_as_close_as_its_roundings(causal: bool) -> None:
    """Segments longer than what is kept for the backward pass (5 · 8 keys a query) are among them.

    Scores and weights are rounded to 8 bits: relative 2**-9 each, and sums of 8-bit values; a few
    times 2**-8 of the largest value is what remains.
    """
    lengths = [300, 20, 150]
    q, k, v, seed = (x.bfloat16().double() for x in inputs(sum(lengths), 2, 3, 8))
    own = segments(lengths)
    exact = gradients(
        lambda q, k, v: ops.attention(q, k, v, own, causal=causal), q, k, v, seed=seed
    )
    narrow = gradients(
        lambda q, k, v: cpu.attention(q, k, v, own, causal=causal),
        *(x.bfloat16() for x in (q, k, v)),
        seed=seed,
    )
    for a, b in zip(narrow, exact, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).abs().max() <= 4 * 2**-8 * b.abs().max()


def test_rms_norm_is_torchs() -> None:
    """Values and gradients in float64, over the last axis of any shape."""
    x, _, _, seed = inputs(5, 2, 3, 8)
    scale = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = gradients(lambda x, s: ops.rms_norm(x, s, 1e-6), x, scale, seed=seed)
    theirs = gradients(lambda x, s: F.rms_norm(x, (8,), s, 1e-6), x, scale, seed=seed)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_rotary_turns_pairs_as_complex_numbers() -> None:
    """Pair (i, i + 4) of a head of 8 is multiplied by e^(i angle): an isometry."""
    x, *_ = inputs(5, 2, 3, 8)
    angle = torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 9
    cos, sin = (torch.cat((f(angle),) * 2, -1) for f in (torch.cos, torch.sin))
    turned = (
        torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)[:, None, None]
    )
    ours = ops.rotary(x, cos, sin)
    torch.testing.assert_close(torch.complex(*ours.chunk(2, -1)), turned)
    torch.testing.assert_close(ours.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("version", [ops.cross_entropy, losses.cross_entropy, losses.in_chunks(3)])
@pytest.mark.parametrize("vocab", [11, 8192, 8192 + 5])
def test_cross_entropy_is_torchs_weighted(version: Callable[..., Tensor], vocab: int) -> None:
    """Values and gradients in float64; weightless places count for nothing; pieces do not show."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(6, 4, generator=random, dtype=torch.float64)
    head = torch.randn(vocab, 4, generator=random, dtype=torch.float64)
    targets = torch.randint(vocab, (6,), generator=random)
    targets[0] = vocab - 1
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1 / 3, 0.0])
    seed = torch.tensor(0.7)

    def reference(x: Tensor, head: Tensor) -> Tensor:
        return (F.cross_entropy(x @ head.T, targets, reduction="none") * weights).sum()

    ours = gradients(lambda x, h: version(x, h, targets, weights), x, head, seed=seed)
    theirs = gradients(reference, x, head, seed=seed)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("version", [ops.cross_entropy, losses.cross_entropy, losses.in_chunks(3)])
def test_cross_entropy_of_extreme_logits_is_finite(version: Callable[..., Tensor]) -> None:
    """Logits of ±1e4: no overflow, and the loss is the gap between them."""
    x, head = torch.tensor([[1e2]]), torch.tensor([[1e2], [-1e2], [0.0]])
    value = version(x, head, torch.tensor([1]), torch.ones(1))
    assert value.item() == pytest.approx(2e4)


def test_linear_contracts_the_last_axes() -> None:
    """Any number of axes on both sides, with a bias, as an einsum says it."""
    x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(4))
    weight = torch.randn(4, 6, 2, 3, generator=torch.Generator().manual_seed(5))
    bias = torch.randn(4, 6, generator=torch.Generator().manual_seed(6))
    expected = torch.einsum("tkc,abkc->tab", x, weight) + bias
    torch.testing.assert_close(ops.linear(x, weight, bias, contract=2), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_custom_operations_keep_their_promises(dtype: torch.dtype) -> None:
    """Schemas, fake versions and gradients, by torch's own checks.

    In bfloat16 part of a buffer is never written, and so cannot be compared.
    """
    q, k, v, _ = (x.to(dtype).requires_grad_() for x in inputs(12, 2, 2, 4))
    ends = segments([5, 7]).ends
    few = ("test_schema", "test_faketensor", "test_autograd_registration")
    more = ("test_aot_dispatch_dynamic",) if dtype == torch.float32 else ()
    torch.library.opcheck(cpu._attention, (q, k, v, ends, True), test_utils=(*few, *more))
    torch.library.opcheck(cpu._cast, (torch.ones(3, requires_grad=True), dtype))
    torch.library.opcheck(cpu._once, (torch.ones(3),))
