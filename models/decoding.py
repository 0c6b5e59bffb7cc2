"""Decoding with Qwen3-VL: prompts packed in one row, then one token of each sample at a time."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmfn import ops as op
from mmfn import tree
from mmfn.batch import Batch
from mmfn.compute import Compute, plain
from mmfn.models import qwen3_vl
from mmfn.tree import pytree


@pytree
class Cache:
    """Keys and values of each layer, `[samples, room, kv_heads, head_dim]`."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    used: Int[Tensor, " samples"]
    """Tokens of each sample that are in the cache."""
    position: Int[Tensor, " samples"]
    """Position of the next token, the same for time, row and column: an answer is text."""


def prefill(
    params: qwen3_vl.Qwen3VL,
    batch: Batch,
    cfg: qwen3_vl.Config,
    compute: Compute = plain,
    *,
    samples: int,
    room: int,
) -> tuple[Float[Tensor, "samples vocab"], Cache]:
    """Read the prompts of `samples` segments: logits after each, and a cache for `room` tokens.

    Raises:
        ValueError: a prompt is longer than `room`; names the sample and both lengths.
    """
    ends = batch.segments.ends[:samples].long()
    lengths = ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
    if int(lengths.max()) > room:
        raise ValueError(
            f"prompt {int(lengths.argmax())} has {int(lengths.max())} tokens; room={room}"
        )
    device = batch.tokens.device
    starts, last = (ends - lengths).to(device), (ends - 1).to(device)
    number = batch.segments.number
    row = (number - 1).clamp(min=0).long()
    column = torch.arange(len(number), device=device) - starts[row]
    real = number > 0

    x, deep = qwen3_vl.start(params, batch, cfg, compute)
    cos, sin = qwen3_vl.angles(batch.positions, cfg)
    kept: list[tuple[Tensor, Tensor]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append((k, v))
        return compute.ops.attention(q, k, v, batch.segments, causal=True)

    own = (*deep, *(None,) * (cfg.layers - len(deep)))
    for layer, features_of_layer in zip(params.text.layers, own, strict=True):
        out = qwen3_vl.block(
            layer, x, cos, sin, batch, features_of_layer, cfg=cfg, compute=compute, attend=attend
        )
        x = out[0] if isinstance(out, tuple) else out

    def spread(packed: Tensor) -> Tensor:
        place = packed.new_zeros(samples, room, *packed.shape[1:])
        return place.index_put((row[real], column[real]), packed[real])

    cache = Cache(
        keys=tuple(spread(k) for k, _ in kept),
        values=tuple(spread(v) for _, v in kept),
        used=lengths.to(device),
        position=batch.positions.amax(0)[last] + 1,
    )
    return qwen3_vl.logits(params.text, x[last], cfg, compute), cache


def decode(
    params: qwen3_vl.Qwen3VL,
    cache: Cache,
    tokens: Int[Tensor, " samples"],
    cfg: qwen3_vl.Config,
    compute: Compute = plain,
) -> tuple[Float[Tensor, "samples vocab"], Cache]:
    """Read one more token of each sample: logits after it, and the cache with it."""
    samples, room = cache.keys[0].shape[:2]
    rows = torch.arange(samples, device=tokens.device)
    at = cache.used.clamp(max=room - 1)
    visible = torch.arange(room, device=tokens.device) <= at[:, None]
    x = qwen3_vl.embed(compute.whole(params.text.embedding), tokens, cfg, compute.text)
    x = x.to(cache.keys[0].dtype)
    cos, sin = qwen3_vl.angles(cache.position.expand(3, -1), cfg)
    keys, values = [], []
    for layer, old_k, old_v in zip(params.text.layers, cache.keys, cache.values, strict=True):

        def attend(
            q: Tensor, k: Tensor, v: Tensor, old_k: Tensor = old_k, old_v: Tensor = old_v
        ) -> Tensor:
            keys.append(old_k.index_put((rows, at), k))
            values.append(old_v.index_put((rows, at), v))
            scores = torch.einsum("bkgc,btkc->bkgt", q, keys[-1]) * q.shape[-1] ** -0.5
            hidden = ~visible[:, None, None, :]
            weights = op.wide(scores).masked_fill(hidden, -torch.inf).softmax(-1)
            return torch.einsum("bkgt,btkc->bkgc", weights.to(v.dtype), values[-1])

        out = qwen3_vl.block(
            layer, x, cos, sin, None, None, cfg=cfg, compute=compute, attend=attend
        )
        x = out[0] if isinstance(out, tuple) else out
    cache = tree.evolve(
        cache,
        keys=tuple(keys),
        values=tuple(values),
        used=cache.used + 1,
        position=cache.position + 1,
    )
    return qwen3_vl.logits(params.text, x, cfg, compute), cache
