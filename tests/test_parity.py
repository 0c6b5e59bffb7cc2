"""The model agrees with transformers' in float64: logits and every gradient."""

import attrs
import pytest
import tiny
import torch
from published import SHAPES, keep_float64, published_inputs, sample

from mmfn import tree
from mmfn.compute import Compute
from mmfn.data import pack
from mmfn.data.encoded import Geometry
from mmfn.kernels import cpu
from mmfn.models import moe, qwen3_vl, vision
from mmfn.transforms import value_and_grad


@pytest.fixture(autouse=True)
def true_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep transformers from casting to float32."""
    keep_float64(monkeypatch)


CONFIGS = {
    "tiny": tiny.CONFIG,
    "tied": attrs.evolve(tiny.CONFIG, tied=True),
    "wide": qwen3_vl.Config(
        vocab=150, embed=24, layers=2, heads=6, kv_heads=3, head_dim=12, mlp=20, theta=5e5,
        sections=(2, 2, 2), image_token=120, video_token=121, vision_start_token=122,
        vision_end_token=123,
        vision=vision.Config(
            layers=3, embed=24, heads=3, mlp=16, patch=3, places=25, out=24, deepstack=(0,)
        ),
    ),
    "one head": qwen3_vl.Config(
        vocab=130, embed=16, layers=4, heads=4, kv_heads=1, head_dim=24, mlp=12, theta=1e6,
        sections=(4, 4, 4), image_token=120, video_token=121, vision_start_token=122,
        vision_end_token=123,
        vision=vision.Config(
            layers=5, embed=8, heads=1, mlp=8, patch=2, merge=3, places=9, out=16,
            deepstack=(0, 2, 3),
        ),
    ),
}  # fmt: skip
CONFIGS |= {
    "experts": tiny.MOE,
    "experts in some blocks": attrs.evolve(
        CONFIGS["one head"], experts=moe.Config(experts=5, choices=3, mlp=7), dense=(0, 2)
    ),
}


@pytest.mark.parametrize("compute", [Compute(), Compute(ops=cpu.OPS)], ids=["definition", "fused"])
@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_logits_and_gradients_agree(cfg: qwen3_vl.Config, compute: Compute) -> None:
    """Each shape alone, then all of them packed in one row, at float64's default tolerances."""
    model = tiny.reference(cfg)
    params = tiny.params(cfg, torch.float64)
    geometry = Geometry(cfg.vision.merge, cfg.vision.side, cfg.vision.patch_dim)
    samples, summed = [], None
    for seed, shape in enumerate(SHAPES.values()):
        one, images, videos = sample(shape, cfg, seed)
        samples.append(one)
        labels = torch.where(torch.from_numpy(one.supervised), torch.from_numpy(one.tokens), -100)
        out = model(**published_inputs(one, images, videos), use_cache=False)
        theirs = torch.nn.functional.cross_entropy(
            out.logits[0, :-1], labels[1:], ignore_index=-100, reduction="sum"
        )
        theirs.backward()
        batch, _ = pack.collate([[one]], geometry=geometry, tokens=512)
        batch = tree.evolve(
            batch, media=tree.evolve(batch.media, patches=batch.media.patches.double())
        )
        logits = qwen3_vl.forward(params, batch, cfg, compute)
        torch.testing.assert_close(logits[: len(one.tokens)], out.logits[0])
        ours, grads = value_and_grad(qwen3_vl.loss)(params, batch, cfg, compute)
        torch.testing.assert_close(ours, theirs.detach())
        check_gradients(cfg, grads, model)
        summed = grads if summed is None else tree.map(torch.add, summed, grads)
        model.zero_grad(set_to_none=True)

    row, _ = pack.collate([samples], geometry=geometry, tokens=512)
    _, together = value_and_grad(qwen3_vl.loss)(params, row, cfg, compute)
    for (path, a), b in zip(tree.items(together), tree.leaves(summed), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, path=path: f"{path}: {text}")


def check_gradients(cfg: qwen3_vl.Config, grads: qwen3_vl.Qwen3VL, model) -> None:
    """Every weight of the model, once."""
    theirs = dict(model.named_parameters())
    for (path, grad), leaf in zip(
        tree.items(grads), tree.leaves(qwen3_vl.abstract(cfg)), strict=True
    ):
        (piece,) = leaf.pieces("transformers")
        other = theirs.pop(leaf.key).grad
        other = torch.zeros(piece.published, dtype=grad.dtype) if other is None else other
        torch.testing.assert_close(
            piece.view(grad).reshape(piece.published),
            other,
            msg=lambda text, path=path: f"{path}: {text}",
        )
    assert not theirs
