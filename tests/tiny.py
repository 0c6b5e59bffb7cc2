"""The tiny reference model: weights made by a rule from their names, and four fixed sequences.

Anything that fills the same named tensors by the same rule must give the same numbers; those that
the tests hold were computed with transformers 5.24 (CPU, float32, eager attention).
"""

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from torch import Tensor
from transformers import (
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from mmfn import losses, tree
from mmfn.batch import Batch
from mmfn.data import pack
from mmfn.data.encoded import Encoded, Geometry, Run
from mmfn.models import hub, moe, qwen3_vl, vision
from mmfn.param import Param

CONFIG = qwen3_vl.Config(
    vocab=128,
    embed=32,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp=48,
    theta=10000.0,
    sections=(4, 2, 2),
    image_token=120,
    video_token=121,
    vision_start_token=122,
    vision_end_token=123,
    vision=vision.Config(
        layers=4, embed=16, heads=2, mlp=24, patch=4, places=16, out=32, deepstack=(1, 2)
    ),
)
MOE = attrs.evolve(CONFIG, experts=moe.Config(experts=4, choices=2, mlp=24))
GEOMETRY = Geometry(merge=2, side=4, patch_dim=96)

IMAGE = [122, *[120] * 6, 123]
FRAME = [122, *[121] * 4, 123]
SEQUENCES = {
    "A": [5, 6, 7, *IMAGE, 8, 9, 10, 11, *FRAME, 12, 13, *FRAME, 14, 15, 16, 17],
    "B": [5, 10, 11, *FRAME, 12, 13, *FRAME, 8, *IMAGE, 14, 15, 16, 17],
    "T": [20, 21, 22, 23, 24, 25, 26],
    "C": [24, 31, 38, 45, 52, 59, 26, 33, 40, 47, 54, 61, 28, 35, 42],
    "picture": [5, 6, 7, *IMAGE, 14, 15, 16, 17],
    "text": [5, 6, 7, 8, 9, 10, 11, 12],
}


def pixels(count: int, offset: int = 0) -> np.ndarray:
    """Make `count` patches of 96 values by the rule of the fingerprints."""
    place = torch.arange(count * 96, dtype=torch.float64)
    return torch.sin(0.013 * (place + offset)).view(count, 96).float().numpy()


def fill(key: str, shape: Sequence[int]) -> Tensor:
    """Make the published tensor called `key` by the rule of the fingerprints."""
    start = sum(key.encode()) % 97
    size = torch.Size(shape)
    wave = torch.sin(0.7 * torch.arange(size.numel(), dtype=torch.float64) + start)
    if len(shape) == 1:
        value = 1 + 0.1 * wave if key.endswith("weight") else 0.02 * wave
    else:
        fan = shape[-1] if len(shape) <= 3 else size[1:].numel()
        value = wave / fan**0.5
    return value.view(size).float()


def params(cfg: qwen3_vl.Config = CONFIG, dtype: torch.dtype = torch.float32) -> qwen3_vl.Qwen3VL:
    """Make the weights of a model of this config."""

    def make(leaf: Param) -> Tensor:
        # The rule is about the tensors as transformers 5 holds them.
        piece = leaf.pieces("transformers")[0]
        value = torch.empty(leaf.shape, dtype=dtype)
        piece.view(value).copy_(fill(piece.key, piece.published).view(piece.shape))
        return value

    return tree.map(make, qwen3_vl.abstract(cfg))


def encoded(name: str, labels: str = "all") -> Encoded:
    """Make one of the sequences; `labels` says what is supervised: last4, all text, or C's rule."""
    tokens = np.array(SEQUENCES[name], dtype=np.int64)
    runs = []
    parts = [np.zeros((0, 96), dtype=np.float32)]
    frames = 0
    for start in np.flatnonzero(tokens == 122) + 1:
        if tokens[start] == 120:
            runs.append(Run(int(start), 4, 6))
            parts.append(pixels(24))
        else:
            runs.append(Run(int(start), 4, 4))
            parts.append(pixels(32, 1000)[16 * frames : 16 * (frames + 1)])
            frames += 1
    place = np.arange(len(tokens))
    supervised = {
        "last4": place >= len(tokens) - 4,
        "all": tokens < 120,
        "C": place >= 6,
    }[labels]
    return Encoded(name, tokens, supervised, tuple(runs), np.concatenate(parts))


def batch(
    *samples: Encoded, tokens: int = 96, normalise: losses.Normalise = "token", **least: int
) -> Batch:
    """Pack samples in one row whose loss is divided by its own count."""
    packed, counts = pack.collate(
        [list(samples)], geometry=GEOMETRY, tokens=tokens, normalise=normalise, **least
    )
    return pack.with_count([packed], counts.divisor(normalise))[0]


def reference(
    cfg: qwen3_vl.Config = CONFIG, *, exact: bool = True
) -> Qwen3VLForConditionalGeneration | Qwen3VLMoeForConditionalGeneration:
    """Build transformers' model with the same weights; in true float64 when `exact`.

    As published, it casts to float32 in norms and in the tower's rotary positions even in float64.
    """
    mixed = cfg.experts is not None
    config = (Qwen3VLMoeConfig if mixed else Qwen3VLConfig).from_dict(hub.to_hub(cfg))
    config._attn_implementation = "sdpa"
    # Its grouped products refuse float64.
    config._experts_implementation = "eager"
    kind = Qwen3VLMoeForConditionalGeneration if mixed else Qwen3VLForConditionalGeneration
    model = kind(config)
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.copy_(fill(key, value.shape))
    if cfg.tied:
        model.tie_weights()
    return model.double().eval() if exact else model.eval()
