"""Hugging Face's side: transformers' own Qwen3-VL, padded micro-batches, torch's fused AdamW.

Experts are its grouped products.

`eager` is the model as it is; `compiled` compiles each decoder layer and each vision block, which
was the quickest of the ways to compile it. Weights, gradients and moments are in the given dtype.
On several ranks each block, and the model around them, is cut by FSDP2.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import worker
from shapes import (
    CHANNELS,
    END,
    IMAGE,
    MERGE,
    PATCH,
    PATCH_TIME,
    START,
    VIDEO,
    Sample,
    Shape,
    samples,
)
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import (
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)


def config(shape: Shape) -> Qwen3VLConfig | Qwen3VLMoeConfig:
    """Write a shape as their config."""
    rope = {
        "rope_type": "default",
        "rope_theta": 500000.0,
        "mrope_interleaved": True,
        "mrope_section": list(shape.sections),
    }
    text = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.embed,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
    }
    tower = {
        "depth": shape.vision_layers,
        "hidden_size": shape.vision_embed,
        "num_heads": shape.vision_heads,
        "intermediate_size": shape.vision_mlp,
        "out_hidden_size": shape.embed,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": PATCH_TIME,
        "in_channels": CHANNELS,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": list(shape.deepstack),
    }
    if shape.experts:
        text |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.choices,
            "moe_intermediate_size": shape.expert_mlp,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    kind = Qwen3VLMoeConfig if shape.experts else Qwen3VLConfig
    return kind(
        text_config=text,
        vision_config=tower,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )


def padded(rows: Sequence[Sample], dtype: torch.dtype) -> dict[str, Tensor]:
    """Lay samples below each other, padded at the right to the longest: what their model takes."""
    longest = max(len(sample.tokens) for sample in rows)
    tokens = np.zeros((len(rows), longest), dtype=np.int64)
    labels, mask = np.full_like(tokens, -100), np.zeros_like(tokens)
    for row, sample in enumerate(rows):
        here = slice(0, len(sample.tokens))
        tokens[row, here], mask[row, here] = sample.tokens, 1
        labels[row, here] = np.where(sample.supervised, sample.tokens, -100)
    batch = {
        "input_ids": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "attention_mask": torch.from_numpy(mask),
        "mm_token_type_ids": torch.from_numpy(tokens == IMAGE).int(),
    }
    pictures = [sample for sample in rows if sample.grid]
    if pictures:
        patches = np.concatenate([sample.patches for sample in pictures])
        batch["pixel_values"] = torch.from_numpy(patches).to(dtype)
        batch["image_grid_thw"] = torch.tensor([[1, s.grid, s.grid] for s in pictures])
    return batch


def make(job: worker.Job) -> Callable[[], float]:
    """Build the model and its optimizer; a step is every micro-batch, then one update."""
    torch.manual_seed(job.seed - job.rank)
    kind, own = Qwen3VLForConditionalGeneration, {}
    if job.shape.experts:
        # Their quickest on a CPU.
        kind, own = Qwen3VLMoeForConditionalGeneration, {"experts_implementation": "grouped_mm"}
    model = kind._from_config(config(job.shape), attn_implementation="sdpa", dtype=job.dtype, **own)
    model.train()
    if job.save and job.rank == 0:
        model.save_pretrained(job.folder)
    if job.ranks > 1:
        for part in (*model.model.language_model.layers, *model.model.visual.blocks, model):
            fully_shard(part)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(
        params,
        lr=worker.LEARNING_RATE,
        betas=worker.BETAS,
        weight_decay=worker.DECAY,
        fused=True,
    )
    made = samples(job.shape, job.seed)
    rows = range(0, len(made), job.shape.rows)
    batches = [padded(made[i : i + job.shape.rows], job.dtype) for i in rows]
    # The first token of a row is nobody's next one.
    count = sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in batches)
    if job.form == "compiled":
        for block in (*model.model.language_model.layers, *model.model.visual.blocks):
            block.compile()

    def step() -> float:
        total = 0.0
        for batch in batches:
            loss = model(**batch, use_cache=False, num_items_in_batch=count).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(params, worker.CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


if __name__ == "__main__":
    worker.serve(make)
