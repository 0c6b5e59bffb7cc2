"""The model agrees with transformers' in float64: logits and every gradient."""

import attrs
import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from transformers.models.qwen3_vl import modeling_qwen3_vl as published
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as published_experts

from mmfn import tree
from mmfn.compute import Compute
from mmfn.data import pack
from mmfn.data.encoded import Encoded, Geometry, Run
from mmfn.kernels import cpu
from mmfn.models import moe, qwen3_vl, vision
from mmfn.transforms import value_and_grad


@pytest.fixture(autouse=True)
def true_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep transformers from casting to float32 in norms, the tower's positions and routers."""

    def norm(self, x: Tensor) -> Tensor:
        return (
            self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )

    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        q, k = (x * cos + published.rotate_half(x) * sin for x in (q, k))
        return q, k

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(x.reshape(-1, self.hidden_dim), self.weight)
        weight, expert = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, weight / weight.sum(-1, keepdim=True), expert

    monkeypatch.setattr(published.Qwen3VLTextRMSNorm, "forward", norm)
    monkeypatch.setattr(published_experts.Qwen3VLMoeTextRMSNorm, "forward", norm)
    monkeypatch.setattr(published_experts.Qwen3VLMoeTextTopKRouter, "forward", route)
    for module in (published, published_experts):
        monkeypatch.setattr(module, "apply_rotary_pos_emb_vision", turn)


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

SHAPES = {
    "text only": [7],
    "one picture": [3, (4, 6), 5],
    "several": [2, (2, 4), 1, (6, 2), (2, 2), 4],
    "video": [2, [(4, 4)] * 3, 3],
    "mixed": [1, [(2, 6)] * 2, 2, (4, 2), 1, [(2, 2)], 3],
    "picture at the start": [(4, 4), 6],
    "picture at the end": [4, (2, 8)],
    "odd grids": [1, (2, 10), 1, (14, 2), 2],
}


def sample(shape: list, cfg: qwen3_vl.Config, seed: int) -> tuple[Encoded, list, list]:
    """Make a sample from numbers of text tokens, pictures (h, w) and videos [(h, w), ...]."""
    random = np.random.default_rng(seed)
    tokens: list[int] = []
    runs: list[Run] = []
    images, videos = [], []
    scale = cfg.vision.merge // 2 if cfg.vision.merge % 2 == 0 else cfg.vision.merge
    for part in shape:
        if isinstance(part, int):
            tokens += random.integers(0, 119, part).tolist()
            continue
        frames = part if isinstance(part, list) else [part]
        mark = cfg.video_token if isinstance(part, list) else cfg.image_token
        for height, width in frames:
            h, w = height * scale, width * scale
            tokens.append(cfg.vision_start_token)
            runs.append(Run(len(tokens), h, w))
            tokens += [mark] * (h * w // cfg.vision.merge**2) + [cfg.vision_end_token]
        grid = [len(frames), frames[0][0] * scale, frames[0][1] * scale]
        (videos if isinstance(part, list) else images).append((grid, len(runs) - len(frames)))
    patches = random.normal(
        size=(sum(r.height * r.width for r in runs), cfg.vision.patch_dim)
    ).astype(np.float32)
    ids = np.array(tokens, dtype=np.int64)
    return Encoded(f"s{seed}", ids, ids < 119, tuple(runs), patches), images, videos


def published_inputs(sample: Encoded, images: list, videos: list) -> dict[str, Tensor]:
    """Lay a sample out as transformers wants it: pictures and videos apart."""
    sizes = [run.height * run.width for run in sample.runs]
    pieces = np.split(sample.patches, np.cumsum(sizes)[:-1]) if sizes else []
    inputs: dict[str, Tensor] = {"input_ids": torch.from_numpy(sample.tokens)[None]}
    ids = inputs["input_ids"]
    inputs["mm_token_type_ids"] = torch.where(ids == 120, 1, torch.where(ids == 121, 2, 0)).int()
    for found, pixels, grid in (
        (images, "pixel_values", "image_grid_thw"),
        (videos, "pixel_values_videos", "video_grid_thw"),
    ):
        if found:
            rows = [piece for (g, first) in found for piece in pieces[first : first + g[0]]]
            inputs[pixels] = torch.from_numpy(np.concatenate(rows)).double()
            inputs[grid] = torch.tensor([g for g, _ in found])
    return inputs


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
