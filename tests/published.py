"""transformers' models as an independent implementation: in true float64, and what they read."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl import modeling_qwen3_vl as published
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as published_experts

from mmfn.data.encoded import Encoded, Run
from mmfn.models import qwen3_vl


def keep_float64(monkeypatch: pytest.MonkeyPatch) -> None:
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
