"""Operations of a step, peaks of devices, and the share of one in the other."""

from itertools import count as ticking

import attrs
import pytest
import tiny
import torch
from torch.utils.flop_counter import FlopCounterMode

from mmfn import flops, memory, tree
from mmfn.batch import Batch
from mmfn.device import resident_bytes
from mmfn.models import flops as model_flops
from mmfn.models import qwen3_vl
from mmfn.models.flops import Lengths
from mmfn.models.presets import PRESETS


def counted(cfg: qwen3_vl.Config, batch: Batch) -> tuple[int, int]:
    """Let torch count the products of forward and of both together."""
    params = tree.map(lambda leaf: leaf.requires_grad_(), tiny.params(cfg))
    with FlopCounterMode(display=False) as forward:
        qwen3_vl.loss(params, batch, cfg)
    with FlopCounterMode(display=False) as both:
        qwen3_vl.loss(params, batch, cfg).backward()
    return forward.get_total_flops(), both.get_total_flops()


@pytest.mark.parametrize("tied", [False, True])
def test_operations_are_those_that_torch_counts(tied: bool) -> None:
    """Exactly, forward and backward. The definition computes padding, and each pair of a row."""
    cfg = attrs.evolve(tiny.CONFIG, tied=tied)
    batch = tiny.batch(*(tiny.encoded(name) for name in "ATB"))
    tokens, patches, supervised = len(batch.tokens), len(batch.media.patches), len(batch.at)
    # All single: each attends to itself only, so the pairs that are hidden are added here.
    ones = Lengths((1,) * tokens, (1,) * patches, supervised)
    ours = model_flops.count(cfg, ones)
    text = 4 * cfg.heads * cfg.head_dim * cfg.layers * (tokens**2 - tokens)
    tower = 4 * cfg.vision.embed * cfg.vision.layers * (patches**2 - patches)
    forward, both = counted(cfg, batch)
    assert ours.forward + text + tower == forward
    assert ours.total + 3 * (text + tower) == both


def test_attention_counts_the_pairs_that_see_each_other() -> None:
    """Up to itself within a sample, all within a frame; counted here pair by pair."""
    batch = tiny.batch(*(tiny.encoded(name) for name in "ATB"))
    cfg, found = tiny.CONFIG, model_flops.lengths(batch)

    def pairs(number: torch.Tensor) -> torch.Tensor:
        return (number[:, None] == number) & (number > 0)

    text = int(pairs(batch.segments.number).tril().sum())
    tower = int(pairs(batch.media.segments.number).sum())
    single = Lengths((1,) * sum(found.samples), (1,) * sum(found.frames), found.supervised)
    more = model_flops.count(cfg, found).forward - model_flops.count(cfg, single).forward
    assert more == 4 * cfg.heads * cfg.head_dim * cfg.layers * (
        text - len(single.samples)
    ) + 4 * cfg.vision.embed * cfg.vision.layers * (tower - len(single.frames))


def test_lengths_are_those_of_what_was_packed() -> None:
    """Padding is no length, in whichever order samples stand and however long the buffers are."""
    names = ["A", "T", "B"]
    samples = [tiny.encoded(name) for name in names]
    found = model_flops.lengths(tiny.batch(*samples, tokens=200, least_patches=256))
    assert found.samples == tuple(len(s.tokens) for s in samples)
    assert found.frames == tuple(run.height * run.width for s in samples for run in s.runs)
    assert found.supervised == sum(int(s.supervised[1:].sum()) for s in samples)
    full = tiny.batch(*samples, tokens=sum(found.samples))
    assert model_flops.lengths(full) == found


def test_samples_cost_the_same_packed_together_or_apart() -> None:
    """No sample sees another."""
    samples = [tiny.encoded(name) for name in "ATB"]

    def total(batch: Batch) -> int:
        return model_flops.count(tiny.CONFIG, model_flops.lengths(batch)).total

    assert sum(total(tiny.batch(sample)) for sample in samples) == total(tiny.batch(*samples)) > 0


def test_a_batch_without_pictures_needs_no_tower() -> None:
    """Its buffer of padding is no work."""
    found = model_flops.lengths(tiny.batch(tiny.encoded("T")))
    assert found.frames == ()
    towerless = attrs.evolve(tiny.CONFIG, vision=attrs.evolve(tiny.CONFIG.vision, layers=40))
    assert model_flops.count(towerless, found) == model_flops.count(tiny.CONFIG, found)


def test_a_token_costs_about_six_operations_a_parameter() -> None:
    """Of the decoder at its published size, tied head included, where attention is short."""
    cfg = PRESETS["2B"]
    decoder = 1_720_574_976  # Qwen3-1.7B, embedding counted once
    total = model_flops.count(cfg, Lengths((1,) * 1000, (), 1000)).total
    assert total == pytest.approx(6 * 1000 * decoder, rel=2e-3)


def test_lengths_are_not_read_from_a_device() -> None:
    """A step would have to wait for it."""
    batch = tree.map(lambda leaf: leaf.to("meta"), tiny.batch(tiny.encoded("T")))
    with pytest.raises(ValueError, match=r"on the CPU, and this one is on meta"):
        model_flops.lengths(batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rate_of_products_is_that_of_the_fastest(dtype: torch.dtype) -> None:
    """By a clock whose intervals grow from a second on."""
    squares = (n * n / 2 for n in ticking())
    rate = flops.gemm_rate(dtype, 30, clock=lambda: next(squares))
    assert rate == 2 * 1024**3 / 1.5


def test_the_rate_of_products_is_measured_in_the_time_given() -> None:
    """Of any CPU that a test runs on: more than a pocket calculator, less than a rack."""
    assert 1e8 < flops.gemm_rate(torch.float32, 0.01) < 1e15


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("Ascend910_9391", 376e12),
        ("NVIDIA H100 NVL", None),
        ("Ascend910B3", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks_are_found_by_the_name_of_the_device(name: str, rate: float | None) -> None:
    """For halves only; of a device without a published peak nothing is said."""
    assert flops.peak(name, torch.bfloat16) == rate
    assert flops.peak(name, torch.float32) is None


def test_a_peak_that_is_given_is_taken() -> None:
    """For every device and dtype, if it can be one."""
    assert flops.peak("Ascend910B3", torch.float32, 320e12) == 320e12
    with pytest.raises(ValueError, match=r"given as 0 FLOP/s, which is not positive"):
        flops.peak("cpu", torch.float32, 0)


def test_utilisation_is_the_share_of_the_peak() -> None:
    """And nothing where there is no peak."""
    assert flops.utilisation(6e12, 2.0, 12e12) == 0.25
    assert flops.utilisation(6e12, 2.0, None) is None


def test_the_peak_of_memory_covers_what_was_freed() -> None:
    """64 MiB above all before, after they are gone."""
    before = memory.peak_bytes()
    assert before >= resident_bytes() > 2**20
    block = bytearray(before - resident_bytes() + 2**26)
    block[:: 2**12] = b"x" * len(block[:: 2**12])  # A page that is not written is not there.
    del block
    assert memory.peak_bytes() >= before + 2**25
