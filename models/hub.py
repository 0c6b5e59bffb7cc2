"""Configs in Hugging Face's form: read from a folder, written to one; never code from it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

from mmfn.models import moe, qwen3_vl, vision

_KINDS = {"qwen3_vl": Qwen3VLConfig, "qwen3_vl_moe": Qwen3VLMoeConfig}
"""Types of model that are read: without experts, and with."""

_SIZES = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "intermediate_size": 2**24,
}
_EXPERT_SIZES = {
    "num_experts": 2**16,
    "num_experts_per_tok": 2**16,
    "moe_intermediate_size": 2**24,
    "decoder_sparse_step": 1024,
}
_TOWER_SIZES = {
    "depth": 1024,
    "hidden_size": 2**20,
    "num_heads": 2**16,
    "intermediate_size": 2**24,
    "in_channels": 64,
    "patch_size": 1024,
    "temporal_patch_size": 64,
    "spatial_merge_size": 64,
    "num_position_embeddings": 2**24,
    "out_hidden_size": 2**20,
}
"""Sizes that are looked at, and the largest that is believed: a tree of ten million layers would
be built before the weights could tell that it is not theirs."""


def read_config(folder: Path) -> qwen3_vl.Config:
    """Read `config.json` of a published checkpoint. Only its values are used, never its code.

    Raises:
        ValueError: no such file, another model, or a setting that this model does not have.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"no config.json in {folder}; it is not a Hugging Face model folder")
    try:
        values = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return from_hub(values, str(path))


def from_hub(values: Mapping[str, Any], where: str = "config") -> qwen3_vl.Config:
    """Translate the values of a `config.json`.

    Raises:
        ValueError: names the file, the key, what it holds and what this model needs.
    """
    kind = values.get("model_type")
    if kind not in _KINDS:
        raise ValueError(f"{where}: model_type={kind!r} is none of {', '.join(_KINDS)}")
    plain = {key: value for key, value in values.items() if key != "auto_map"}
    for section in ("text_config", "vision_config"):
        if not plain.get(section):
            raise ValueError(f"{where}: {section} is missing or empty")
    try:
        config = _KINDS[kind].from_dict(plain)
    except Exception as error:  # Whatever its own checks raise, which differs from key to key.
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error
    # Of one class each; transformers annotates them as anything a caller may give.
    text: Any = config.text_config
    tower: Any = config.vision_config
    _need(where, text, "hidden_act", "silu")
    _need(where, text, "attention_bias", False)
    _need(where, tower, "hidden_act", "gelu_pytorch_tanh")
    sizes = _SIZES if kind == "qwen3_vl" else _SIZES | _EXPERT_SIZES
    for section, keys in (("text_config", sizes), ("vision_config", _TOWER_SIZES)):
        for key, most in keys.items():
            size = getattr(getattr(config, section), key, None)
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= most:
                raise ValueError(f"{where}: {section}.{key}={size!r} is not from 1 to {most}")
    rope = text.rope_parameters
    _need(where, rope, "rope_type", "default")
    _need(where, rope, "mrope_interleaved", True)
    experts, dense = (None, ()) if kind == "qwen3_vl" else _experts(where, text)
    return qwen3_vl.Config(
        experts=experts,
        dense=dense,
        vocab=text.vocab_size,
        embed=text.hidden_size,
        layers=text.num_hidden_layers,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        mlp=text.intermediate_size,
        tied=bool(config.tie_word_embeddings),
        eps=text.rms_norm_eps,
        theta=float(rope["rope_theta"]),
        sections=tuple(rope.get("mrope_section", (24, 20, 20))),
        image_token=config.image_token_id,
        video_token=config.video_token_id,
        vision_start_token=config.vision_start_token_id,
        vision_end_token=config.vision_end_token_id,
        vision=vision.Config(
            layers=tower.depth,
            embed=tower.hidden_size,
            heads=tower.num_heads,
            mlp=tower.intermediate_size,
            channels=tower.in_channels,
            patch=tower.patch_size,
            patch_time=tower.temporal_patch_size,
            merge=tower.spatial_merge_size,
            places=tower.num_position_embeddings,
            out=tower.out_hidden_size,
            deepstack=tuple(tower.deepstack_visual_indexes),
        ),
    )


def _experts(where: str, text: Any) -> tuple[moe.Config, tuple[int, ...]]:
    """Read the sizes of the experts, and which blocks have none."""
    only = list(text.mlp_only_layers)
    if any(isinstance(i, bool) or not isinstance(i, int) for i in only):
        raise ValueError(f"{where}: text_config.mlp_only_layers={only} are not all integers")
    dense = tuple(
        i for i in range(text.num_hidden_layers) if i in only or (i + 1) % text.decoder_sparse_step
    )
    if len(dense) == text.num_hidden_layers:
        raise ValueError(
            f"{where}: decoder_sparse_step={text.decoder_sparse_step} and mlp_only_layers={only} "
            f"leave none of {len(dense)} blocks with experts"
        )
    try:
        own = moe.Config(
            experts=text.num_experts,
            choices=text.num_experts_per_tok,
            mlp=text.moe_intermediate_size,
            normalise=bool(getattr(text, "norm_topk_prob", True)),
        )
    except ValueError as error:
        raise ValueError(f"{where}: num_experts_per_tok, num_experts: {error}") from error
    return own, dense


def to_hub(cfg: qwen3_vl.Config) -> dict[str, Any]:
    """Write a config as the values of a `config.json` that `transformers` reads."""
    tower, own = cfg.vision, cfg.experts
    make = Qwen3VLConfig if own is None else Qwen3VLMoeConfig
    experts: dict[str, Any] = {}
    if own is not None:
        experts = {
            "num_experts": own.experts,
            "num_experts_per_tok": own.choices,
            "moe_intermediate_size": own.mlp,
            "norm_topk_prob": own.normalise,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(cfg.dense),
        }
    config = make(
        text_config={
            **experts,
            "vocab_size": cfg.vocab,
            "hidden_size": cfg.embed,
            "intermediate_size": cfg.mlp,
            "num_hidden_layers": cfg.layers,
            "num_attention_heads": cfg.heads,
            "num_key_value_heads": cfg.kv_heads,
            "head_dim": cfg.head_dim,
            "rms_norm_eps": cfg.eps,
            "tie_word_embeddings": cfg.tied,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": cfg.theta,
                "mrope_section": list(cfg.sections),
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": tower.layers,
            "hidden_size": tower.embed,
            "num_heads": tower.heads,
            "intermediate_size": tower.mlp,
            "in_channels": tower.channels,
            "patch_size": tower.patch,
            "temporal_patch_size": tower.patch_time,
            "spatial_merge_size": tower.merge,
            "num_position_embeddings": tower.places,
            "out_hidden_size": tower.out,
            "deepstack_visual_indexes": list(tower.deepstack),
        },
        tie_word_embeddings=cfg.tied,
        image_token_id=cfg.image_token,
        video_token_id=cfg.video_token,
        vision_start_token_id=cfg.vision_start_token,
        vision_end_token_id=cfg.vision_end_token,
        architectures=[
            "Qwen3VLForConditionalGeneration"
            if own is None
            else "Qwen3VLMoeForConditionalGeneration"
        ],
    )
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


def _need(where: str, values: Any, key: str, needed: object) -> None:
    found = values.get(key) if isinstance(values, Mapping) else getattr(values, key, None)
    if found != needed:
        raise ValueError(f"{where}: {key}={found!r}, but this model has {key}={needed!r}")
