"""The vision tower of Qwen3-VL: patches of pictures and frames to features for the decoder.

A ViT with learned positions resampled to each grid, 2-D rotary positions and attention within each
frame; `merge²` patches become one feature, at the end and after some blocks before (deepstack).

Source: Bai et al. 2025, arXiv:2511.21631 (Qwen3-VL).
"""

import math
from functools import partial
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mmfn import ops as op
from mmfn import tree
from mmfn.batch import Media
from mmfn.compute import Compute, Region, inside
from mmfn.param import Param
from mmfn.tree import Leaf, pytree


@attrs.frozen
class Config:
    """Sizes of the tower."""

    layers: int = 24
    embed: int = 1024
    """Width."""
    heads: int = 16
    mlp: int = 4096
    """Inner width of the feed-forward layers."""
    channels: int = 3
    patch: int = 16
    """Side of a patch in pixels."""
    patch_time: int = 2
    """Frames in a patch."""
    merge: int = 2
    """Side of the block of patches that becomes one token."""
    places: int = 2304
    """Entries of the square table of learned positions."""
    out: int = 2048
    """Width of the decoder."""
    deepstack: tuple[int, ...] = (5, 11, 17)
    """Layers (from 0) whose output is added to the first layers of the decoder, in order."""

    def __attrs_post_init__(self) -> None:
        if self.embed % self.heads or self.embed // self.heads % 4:
            raise ValueError(
                f"vision embed={self.embed} is not a multiple of 4 · vision heads={self.heads}"
            )
        if self.side**2 != self.places:
            raise ValueError(f"vision places={self.places} is not a square")
        if any(not 0 <= i < self.layers for i in self.deepstack):
            raise ValueError(f"deepstack={self.deepstack} names layers beyond layers={self.layers}")
        if list(self.deepstack) != sorted(set(self.deepstack)):
            raise ValueError(f"deepstack={self.deepstack} is not in increasing order")

    @property
    def side(self) -> int:
        """Side of the table of learned positions."""
        return math.isqrt(self.places)

    @property
    def patch_dim(self) -> int:
        """Values in a patch."""
        return self.channels * self.patch_time * self.patch**2


@pytree
class Affine:
    """A linear map with a bias, or the scale and bias of a layer norm."""

    weight: Leaf
    bias: Leaf


@pytree
class Block:
    """One transformer block."""

    attention_norm: Affine
    qkv: Affine
    proj: Affine
    mlp_norm: Affine
    up: Affine
    down: Affine


@pytree
class Merger:
    """Norm and two layers from `merge²` patches to one feature."""

    norm: Affine
    up: Affine
    down: Affine


@pytree
class Tower:
    """All weights of the tower."""

    patch: Affine
    places: Leaf
    layers: tuple[Block, ...]
    merger: Merger
    deepstack: tuple[Merger, ...]


def abstract(cfg: Config, prefix: str = "model.visual") -> Tower:
    """State every weight of the tower once."""
    d, m = cfg.embed, cfg.mlp
    merged = d * cfg.merge**2
    heads = (3, cfg.heads, d // cfg.heads)
    cube = (cfg.channels, cfg.patch_time, cfg.patch, cfg.patch)

    def affine(
        key: str, out: tuple[int, ...], axes: str, into: tuple[int, ...], more: str
    ) -> Affine:
        fan = torch.Size(into).numel()
        weight = Param((*out, *into), f"{axes} {more}", f"{prefix}.{key}.weight", fan**-0.5)
        return Affine(weight, Param(out, axes, f"{prefix}.{key}.bias"))

    def norm(key: str, size: int, axis: str) -> Affine:
        weight = Param((size,), axis, f"{prefix}.{key}.weight", mean=1.0)
        return Affine(weight, Param((size,), axis, f"{prefix}.{key}.bias"))

    def block(i: int) -> Block:
        at = f"blocks.{i}"
        fused, parts = (
            "(qkv vision_heads vision_head_dim)",
            "(vision_heads vision_head_dim)",
        )
        return Block(
            attention_norm=norm(f"{at}.norm1", d, "vision_embed"),
            qkv=affine(f"{at}.attn.qkv", heads, fused, (d,), "vision_embed"),
            proj=affine(f"{at}.attn.proj", (d,), "vision_embed", heads[1:], parts),
            mlp_norm=norm(f"{at}.norm2", d, "vision_embed"),
            up=affine(f"{at}.mlp.linear_fc1", (m,), "vision_mlp", (d,), "vision_embed"),
            down=affine(f"{at}.mlp.linear_fc2", (d,), "vision_embed", (m,), "vision_mlp"),
        )

    def merger(at: str, *, joined: bool) -> Merger:
        size, axis = (merged, "merged") if joined else (d, "vision_embed")
        return Merger(
            norm=norm(f"{at}.norm", size, axis),
            up=affine(f"{at}.linear_fc1", (merged,), "merged_mlp", (merged,), "merged"),
            down=affine(f"{at}.linear_fc2", (cfg.out,), "embed", (merged,), "merged_mlp"),
        )

    return Tower(
        patch=affine(
            "patch_embed.proj",
            (d,),
            "vision_embed",
            cube,
            "channels patch_time patch_height patch_width",
        ),
        places=Param((cfg.places, d), "places vision_embed", f"{prefix}.pos_embed.weight", 0.02),
        layers=tuple(block(i) for i in range(cfg.layers)),
        merger=merger("merger", joined=False),
        deepstack=tuple(
            merger(f"deepstack_merger_list.{i}", joined=True) for i in range(len(cfg.deepstack))
        ),
    )


def angles(
    positions: Int[Tensor, "2 patches"], head_dim: int
) -> tuple[Float[Tensor, "patches head_dim"], Float[Tensor, "patches head_dim"]]:
    """Cosine and sine, float32, of the 2-D rotary positions: rows turn the first quarter of the
    pairs' frequencies, columns the second; both halves of a head alike."""
    exponent = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=positions.device)
    rate = 1.0 / 10000.0 ** (exponent / (head_dim // 2))
    angle = (positions.float()[..., None] * rate).transpose(0, 1).flatten(1)
    return torch.cat((angle.cos(),) * 2, -1), torch.cat((angle.sin(),) * 2, -1)


def layer_norm(x: Tensor, params: Affine) -> Tensor:
    """Normalise each row to mean 0 and variance 1, then scale and shift it."""
    return F.layer_norm(x, params.weight.shape, params.weight, params.bias, 1e-6)


def embed(
    patch: Affine, places: Float[Tensor, "places vision_embed"], media: Media
) -> Float[Tensor, "patches vision_embed"]:
    """Map pixels by one matrix product; add learned positions, blended in float32 at least."""
    x = op.linear(media.patches.to(patch.weight.dtype), patch.weight.flatten(1), patch.bias)
    table = op.wide(places)
    learned = sum(table[media.places[i]] * media.blend[i, :, None] for i in range(4))
    return x + torch.as_tensor(learned).to(x.dtype)


def block(
    params: Block,
    x: Float[Tensor, "patches vision_embed"],
    cos: Float[Tensor, "patches head_dim"],
    sin: Float[Tensor, "patches head_dim"],
    media: Media,
    own: None = None,
    *,
    compute: Compute,
) -> Float[Tensor, "patches vision_embed"]:
    """Attend within each frame, then the feed-forward layer."""
    ops, region = compute.ops, compute.tower
    params = _cut(compute.ready(params), region)
    y = region.fan(layer_norm(x, params.attention_norm))
    q, k, v = op.linear(y, params.qkv.weight, params.qkv.bias).unbind(1)
    q, k = ops.rotary(q, cos, sin), ops.rotary(k, cos, sin)
    y = ops.attention(q.unsqueeze(2), k, v, media.segments, causal=False).squeeze(2)
    x = x + _out(params.proj, y, region)
    y = region.fan(layer_norm(x, params.mlp_norm))
    y = F.gelu(op.linear(y, params.up.weight, params.up.bias), approximate="tanh")
    return x + _out(params.down, y, region)


def _cut(params: Any, region: Region) -> Any:
    """Take what is whole on every rank of a block or merger's matrices to where they are cut."""
    own = {
        name: affine.weight for name, affine in tree.fields(params).items() if "norm" not in name
    }
    taken = inside(region, own, inputs={"proj", "down"})
    return tree.evolve(
        params,
        **{n: tree.evolve(getattr(params, n), weight=weight) for n, weight in taken.items()},
    )


def _out(params: Affine, y: Tensor, region: Region) -> Tensor:
    """Map back to the width of the stream; the bias counts once, after the sum over ranks."""
    bias: Tensor = params.bias
    return region.leave(op.linear(y, params.weight, contract=y.ndim - 1)) + bias


def merge(
    params: Merger, x: Float[Tensor, "patches vision_embed"], compute: Compute
) -> Float[Tensor, "features embed"]:
    """Make one feature of each block of patches; the norm's size says if it comes before."""
    params = _cut(compute.ready(params), compute.tower)
    joined = params.up.weight.shape[1]
    if params.norm.weight.shape[0] == joined:
        y = layer_norm(x.reshape(-1, joined), params.norm)
    else:
        y = layer_norm(x, params.norm).reshape(-1, joined)
    region = compute.tower
    y = F.gelu(op.linear(region.fan(y), params.up.weight, params.up.bias))
    return _out(params.down, y, region)


def encode(
    params: Tower, media: Media, cfg: Config, compute: Compute
) -> tuple[Float[Tensor, "features embed"], ...]:
    """Encode pictures and frames: features for the tokens, then deep ones for the first layers."""
    # The table is blended in float32, so it is not cast.
    x = embed(compute.ready(params.patch), compute.whole(params.places), media)
    cos, sin = map(compute.ops.once, angles(media.positions, cfg.embed // cfg.heads))
    x, kept, _ = compute.stack(
        partial(block, compute=compute),
        params.layers,
        x,
        cos,
        sin,
        media,
        each=(None,) * cfg.layers,
        keep=cfg.deepstack,
    )
    pairs = zip((params.merger, *params.deepstack), (x, *kept), strict=True)
    return tuple(merge(merger, y, compute) for merger, y in pairs)
