"""The tiny model gives the numbers that transformers 5.24 gives (float32, eager attention)."""

import attrs
import pytest
import tiny
import torch

from mmfn import optim, param, schedules, tree
from mmfn.batch import Batch
from mmfn.compute import Compute
from mmfn.kernels import cpu
from mmfn.models import qwen3_vl
from mmfn.models.presets import PRESETS
from mmfn.train import make_step, start
from mmfn.transforms import accumulate, value_and_grad

TIED = attrs.evolve(tiny.CONFIG, tied=True)
COMPUTES = {"definition": Compute(), "fused": Compute(ops=cpu.OPS)}


def loss_and_norm(
    cfg: qwen3_vl.Config, batch: Batch, compute: Compute = COMPUTES["definition"]
) -> tuple[float, float, qwen3_vl.Qwen3VL]:
    """Give loss, gradient norm and gradients."""
    value, grads = value_and_grad(qwen3_vl.loss)(tiny.params(cfg), batch, cfg, compute)
    return value.item(), optim.global_norm(grads).item(), grads


def test_the_trees_have_the_published_numbers_of_values() -> None:
    """Tiny: 69,424, 65,328 tied, 83,632 with experts. Presets: as transformers builds them."""
    assert param.count(qwen3_vl.abstract(tiny.CONFIG)) == 69_424
    assert param.count(qwen3_vl.abstract(TIED)) == 65_328
    assert param.count(qwen3_vl.abstract(tiny.MOE)) == 83_632
    totals = {name: param.count(qwen3_vl.abstract(c)) for name, c in PRESETS.items()}
    assert totals == {
        "2B": 2_127_532_032,
        "4B": 4_437_815_808,
        "8B": 8_767_123_696,
        "32B": 33_357_390_064,
        "30B-A3B": 31_070_754_032,
        "235B-A22B": 235_670_022_896,
    }


@pytest.mark.parametrize("compute", COMPUTES.values(), ids=COMPUTES)
@pytest.mark.parametrize(
    ("cfg", "name", "labels", "loss", "norm"),
    [
        (tiny.CONFIG, "A", "last4", 5.303901, None),
        (tiny.CONFIG, "B", "last4", 5.289475, None),
        (tiny.CONFIG, "A", "all", 5.183817, 22.330985),
        (tiny.CONFIG, "B", "all", 5.045018, 16.965129),
        (tiny.CONFIG, "T", "all", 5.359126, 60.300610),
        (tiny.CONFIG, "C", "C", 4.570230, 27.266976),
        (tiny.CONFIG, "text", "all", 5.347210, None),
        (tiny.CONFIG, "picture", "last4", 5.492619, None),
        (TIED, "A", "last4", 5.417253, None),
        (TIED, "A", "all", 5.300910, 20.388954),
        (TIED, "B", "all", 5.140432, 16.542498),
        (TIED, "T", "all", 5.644034, 90.226488),
        (tiny.MOE, "A", "last4", 5.016264, None),
        (tiny.MOE, "B", "last4", 5.010696, None),
        (tiny.MOE, "A", "all", 4.976150, 6.913276),
        (tiny.MOE, "B", "all", 4.935081, 5.279153),
        (tiny.MOE, "T", "all", 5.032174, 9.934974),
    ],
)
def test_losses_and_gradient_norms_of_single_sequences(
    cfg: qwen3_vl.Config, name: str, labels: str, loss: float, norm: float | None, compute: Compute
) -> None:
    """Losses to 1e-5, norms to 1e-4 relative: dense, tied and experts, defined and fused."""
    value, size, _ = loss_and_norm(cfg, tiny.batch(tiny.encoded(name, labels)), compute)
    assert value == pytest.approx(loss, abs=1e-5)
    if norm is not None:
        assert size == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("compute", COMPUTES.values(), ids=COMPUTES)
def test_packing_keeps_samples_apart(compute: Compute) -> None:
    """A+T+B in one row: the mean of the three (5.326543 would be leakage, 5.307163 1-D positions);
    and other tokens in A move no logit of T or B."""
    pack = [tiny.encoded(name, "last4") for name in "ATB"]
    value, _, _ = loss_and_norm(tiny.CONFIG, tiny.batch(*pack), compute)
    assert value == pytest.approx(5.308712, abs=1e-5)
    other = attrs.evolve(pack[0], tokens=pack[0].tokens.copy())
    other.tokens[[0, 12, 31]] = [99, 98, 97]
    logits = [
        qwen3_vl.forward(tiny.params(), tiny.batch(*samples), tiny.CONFIG, compute)
        for samples in (pack, [other, *pack[1:]])
    ]
    assert (logits[0][:33] - logits[1][:33]).abs().max() > 0.1
    torch.testing.assert_close(logits[0][33:70], logits[1][33:70], atol=1e-6, rtol=0)


def test_text_alone_leaves_the_tower_a_gradient_of_exactly_zero() -> None:
    """No picture in the batch: the tower runs on padding, and nothing of it reaches the loss."""
    _, _, grads = loss_and_norm(tiny.CONFIG, tiny.batch(tiny.encoded("T")))
    assert all((leaf == 0).all() for leaf in tree.leaves(grads.vision))
    assert all((leaf != 0).any() for leaf in tree.leaves(grads.text))


def test_a_tied_head_and_embedding_share_one_gradient() -> None:
    """Norm 3.119639 for A's last four (the parts alone are 1.247285 and 2.821251)."""
    _, _, grads = loss_and_norm(TIED, tiny.batch(tiny.encoded("A", "last4")))
    assert grads.text.embedding.norm().item() == pytest.approx(3.119639, rel=1e-5)


@pytest.mark.parametrize(
    "split", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3, 1, 0], [2]]]
)
def test_the_split_into_micro_batches_changes_nothing(split: list[list[int]]) -> None:
    """12, 6, 9 and 9 targets: 180.897784 / 36; the mean of means would be 5.039548 / 24.413930."""
    samples = [tiny.encoded(n, "C" if n == "C" else "all") for n in "ATBC"]
    batches = [tiny.batch(*(samples[i] for i in part), tokens=128) for part in split]
    batches = [tree.evolve(batch, count=torch.tensor(36.0)) for batch in batches]

    def loss(params, batch):
        return qwen3_vl.loss(params, batch, tiny.CONFIG)

    value, grads = accumulate(value_and_grad(loss))(tiny.params(), batches)
    assert value.item() == pytest.approx(5.024938, abs=1e-5)
    assert optim.global_norm(grads).item() == pytest.approx(20.966279, rel=1e-5)


@pytest.mark.parametrize("compute", COMPUTES.values(), ids=COMPUTES)
@pytest.mark.parametrize(
    ("cfg", "losses", "norms"),
    [
        (
            tiny.CONFIG,
            [5.024939, 4.78321, 4.638898, 4.520026, 4.561519],
            [20.96627, 7.0341, 4.49397, 7.47603, 22.50004],
        ),
        (
            TIED,
            [5.129683, 4.828548, 4.672166, 4.674099, 4.651883],
            [24.98829, 6.17323, 20.4103, 4.95221, 5.61037],
        ),
        (
            tiny.MOE,
            [4.910857, 4.770734, 4.600769, 4.977008, 4.6744],
            [4.69549, 2.28684, 5.44571, 68.75855, 10.92627],
        ),
    ],
    ids=["dense", "tied", "experts"],
)
def test_the_first_steps_of_training(
    cfg: qwen3_vl.Config, losses: list[float], norms: list[float], compute: Compute
) -> None:
    """A, T, C, B; AdamW 1e-3, betas 0.9/0.999, clip 1. Later steps drift with the order of sums."""
    kernel = cpu.adamw_ if compute.ops is cpu.OPS else optim.adamw_
    optimizer = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.adamw(schedules.constant(1e-3), betas=(0.9, 0.999), kernel=kernel),
    )
    step = make_step(lambda p, b: qwen3_vl.loss(p, b, cfg, compute), optimizer)
    state = start(tiny.params(cfg), optimizer)
    batch = tiny.batch(*(tiny.encoded(n, "C" if n == "C" else "all") for n in "ATCB"))
    for index, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        state, metrics = step(state, (batch,))
        to = (1e-5 if index < 3 else 1e-3, (1e-4, 1e-4, 5e-4, 1e-2, 1e-2)[index])
        assert metrics["loss"].item() == pytest.approx(loss, abs=to[0])
        assert metrics["grad_norm"].item() == pytest.approx(norm, rel=to[1])


def test_angles_alternate_between_time_row_and_column() -> None:
    """Position (5, 2, 3): T H W T H W T T; and rates stay float32 whatever the weights are."""
    cos, sin = qwen3_vl.angles(torch.tensor([[5], [2], [3]]), tiny.CONFIG)
    expected_cos = [0.283662, 0.806578, 0.955337, 0.987526, 0.9998, 0.999955, 0.999987, 0.999999]
    expected_sin = [-0.958924, 0.591127, 0.29552, 0.157456, 0.019999, 0.009487, 0.005, 0.001581]
    assert cos.dtype == torch.float32
    assert cos[0, :8].tolist() == pytest.approx(expected_cos, abs=1e-6)
    assert sin[0, 8:].tolist() == pytest.approx(expected_sin, abs=1e-6)
    whole = PRESETS["2B"]
    positions = torch.tensor([[1], [2], [4]])
    angle = torch.atan2(*(x[0, :64].double() for x in reversed(qwen3_vl.angles(positions, whole))))
    rate = whole.theta ** -(torch.arange(64).double() / 64)
    axis = torch.tensor([0, 1, 2] * 20 + [0] * 4)
    torch.testing.assert_close(
        angle.remainder(2 * torch.pi),
        (positions[axis, 0] * rate).remainder(2 * torch.pi),
        atol=1e-6,
        rtol=1e-5,
    )


def test_bfloat16_keeps_float32_weights_and_the_loss_close() -> None:
    """Compute in bfloat16: the loss of A is 5.30 to 0.02; gradients come back in float32."""
    compute = Compute(ops=cpu.OPS, dtype=torch.bfloat16)
    value, _, grads = loss_and_norm(tiny.CONFIG, tiny.batch(tiny.encoded("A", "last4")), compute)
    assert value == pytest.approx(5.30, abs=0.02)
    assert {leaf.dtype for leaf in tree.leaves(grads)} == {torch.float32}
