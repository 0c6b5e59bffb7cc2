"""Qwen3-VL, dense and mixture of experts: a decoder of text and the features of a vision tower.

Letters in shapes: kv_heads and groups are the heads of keys and the query heads that share one.
Parts are separately callable: `vision.encode`, `start`, `block`, `head`. `own` are the
tokens that a rank holds between blocks: all, unless they are cut (`Compute.text`).

Source: Bai et al. 2025, arXiv:2511.21631; Yang et al. 2025, arXiv:2505.09388 (Qwen3).
"""

from collections.abc import Callable, Mapping
from functools import partial

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmfn import losses, tree
from mmfn import ops as op
from mmfn.batch import Batch
from mmfn.compute import Compute, Region, inside, plain
from mmfn.models import mlp, moe, vision
from mmfn.param import Param
from mmfn.tree import Leaf, pytree


@attrs.frozen
class Config:
    """Sizes of the decoder, its tower, and the ids that mark media."""

    vocab: int
    embed: int
    """Width of the decoder."""
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    """Inner width of the feed-forward layers."""
    vision: vision.Config
    head_dim: int = 128
    tied: bool = False
    """Whether the head is the embedding."""
    experts: moe.Config | None = None
    """Experts in place of the feed-forward layer of a block."""
    dense: tuple[int, ...] = ()
    """Blocks (from 0) that have a feed-forward layer all the same."""
    eps: float = 1e-6
    theta: float = 5e6
    """Base of the rotary frequencies."""
    sections: tuple[int, int, int] = (24, 20, 20)
    """Pairs of a head that are turned by time, row and column."""
    image_token: int = 151655
    video_token: int = 151656
    vision_start_token: int = 151652
    vision_end_token: int = 151653

    def __attrs_post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if 2 * sum(self.sections) != self.head_dim:
            raise ValueError(
                f"sections={self.sections} do not sum to half of head_dim={self.head_dim}"
            )
        if any(3 * s > self.head_dim // 2 for s in self.sections[1:]):
            raise ValueError(f"sections={self.sections} cannot alternate in {self.head_dim // 2}")
        if self.vision.out != self.embed:
            raise ValueError(f"vision out={self.vision.out} is not embed={self.embed}")
        if len(self.vision.deepstack) > self.layers:
            raise ValueError(
                f"deepstack={self.vision.deepstack} has more entries than layers={self.layers}"
            )
        if any(not 0 <= i < self.layers for i in self.dense):
            raise ValueError(f"dense={self.dense} names blocks beyond layers={self.layers}")

    @property
    def mixed(self) -> tuple[int, ...]:
        """Blocks that have experts."""
        if self.experts is None:
            return ()
        return tuple(i for i in range(self.layers) if i not in self.dense)


@pytree
class Attention:
    """Grouped-query attention with normalised queries and keys."""

    q: Leaf
    k: Leaf
    v: Leaf
    o: Leaf
    q_norm: Leaf
    k_norm: Leaf


@pytree
class Block:
    """One decoder block."""

    attention_norm: Leaf
    attention: Attention
    mlp_norm: Leaf
    mlp: mlp.Mlp | moe.Moe


@pytree
class Head:
    """What follows the blocks; a tied head has no weight of its own."""

    norm: Leaf
    weight: Leaf


@pytree
class Decoder:
    """All weights of the decoder."""

    embedding: Leaf
    layers: tuple[Block, ...]
    head: Head


@pytree
class Qwen3VL:
    """All weights: a tree of tensors, of `Param`s or of placements."""

    vision: vision.Tower
    text: Decoder


def abstract(cfg: Config) -> Qwen3VL:
    """State every weight once: sizes, axes, initial spread, published key."""
    d, k, g, c = cfg.embed, cfg.kv_heads, cfg.heads // cfg.kv_heads, cfg.head_dim
    prefix, into, out = "model.language_model", d**-0.5, (k * g * c) ** -0.5
    heads = "kv_heads groups head_dim"

    def feed_forward(i: int, at: str) -> mlp.Mlp | moe.Moe:
        if cfg.experts is not None and i in cfg.mixed:
            return moe.abstract(cfg.experts, d, at)
        return mlp.abstract(d, cfg.mlp, at)

    def block(i: int) -> Block:
        at = f"{prefix}.layers.{i}"
        attn = f"{at}.self_attn"
        return Block(
            attention_norm=Param((d,), "embed", f"{at}.input_layernorm.weight", mean=1.0),
            attention=Attention(
                q=Param((k, g, c, d), f"({heads}) embed", f"{attn}.q_proj.weight", into),
                k=Param((k, c, d), "(kv_heads head_dim) embed", f"{attn}.k_proj.weight", into),
                v=Param((k, c, d), "(kv_heads head_dim) embed", f"{attn}.v_proj.weight", into),
                o=Param((d, k, g, c), f"embed ({heads})", f"{attn}.o_proj.weight", out),
                q_norm=Param((c,), "head_dim", f"{attn}.q_norm.weight", mean=1.0),
                k_norm=Param((c,), "head_dim", f"{attn}.k_norm.weight", mean=1.0),
            ),
            mlp_norm=Param((d,), "embed", f"{at}.post_attention_layernorm.weight", mean=1.0),
            mlp=feed_forward(i, f"{at}.mlp"),
        )

    head = None if cfg.tied else Param((cfg.vocab, d), "vocab embed", "lm_head.weight", into)
    return Qwen3VL(
        vision=vision.abstract(cfg.vision),
        text=Decoder(
            embedding=Param(
                (cfg.vocab, d),
                "vocab embed",
                f"{prefix}.embed_tokens.weight",
                into,
                copies=("lm_head.weight",) if cfg.tied else (),
            ),
            layers=tuple(block(i) for i in range(cfg.layers)),
            head=Head(Param((d,), "embed", f"{prefix}.norm.weight", mean=1.0), head),
        ),
    )


GROUPS: Mapping[str, tuple[str, ...]] = {
    "text": ("text.embedding", "text.layers.*", "text.head.norm"),
    "head": ("text.head.weight*",),
    "tower": ("vision.patch.*", "vision.places", "vision.layers.*"),
    "mergers": ("vision.merger.*", "vision.deepstack.*"),
}
"""Patterns of the paths of each part of the model, by the name that a command line takes; every
weight is in one. A tied head is the embedding."""


def angles(
    positions: Int[Tensor, "3 tokens"], cfg: Config
) -> tuple[Float[Tensor, "tokens head_dim"], Float[Tensor, "tokens head_dim"]]:
    """Cosine and sine, float32, of the interleaved rotary positions: time, row, column in turn."""
    half = cfg.head_dim // 2
    pair = torch.arange(half, device=positions.device)
    axis = torch.zeros_like(pair)
    for index, section in enumerate(cfg.sections[1:], start=1):
        axis = torch.where((pair % 3 == index) & (pair < 3 * section), index, axis)
    rate = 1.0 / cfg.theta ** (2 * pair.float() / cfg.head_dim)
    angle = positions.float()[axis].T * rate
    return torch.cat((angle.cos(),) * 2, -1), torch.cat((angle.sin(),) * 2, -1)


def select(
    features: Float[Tensor, "features embed"], feature: Int[Tensor, " tokens"], other: Tensor
) -> Float[Tensor, "tokens embed"]:
    """Give each token its feature, or `other` where it has none."""
    return torch.where((feature >= 0)[:, None], features[feature.clamp(min=0)], other)


def embed(
    embedding: Float[Tensor, "vocab embed"],
    tokens: Int[Tensor, " tokens"],
    cfg: Config,
    region: Region,
) -> Float[Tensor, "own embed"]:
    """Give the tokens that are here their embeddings."""
    return region.leave(op.lookup(embedding, tokens, region.pieces(cfg.vocab)))


def project(
    params: Attention,
    x: Float[Tensor, "tokens embed"],
    cos: Float[Tensor, "tokens head_dim"],
    sin: Float[Tensor, "tokens head_dim"],
    cfg: Config,
    ops: op.Ops,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make queries `[tokens, kv_heads, groups, head_dim]`, and keys and values without groups."""
    q = ops.rms_norm(op.linear(x, params.q), params.q_norm, cfg.eps)
    k = ops.rms_norm(op.linear(x, params.k), params.k_norm, cfg.eps)
    return ops.rotary(q, cos, sin), ops.rotary(k, cos, sin), op.linear(x, params.v)


def _cut(params: Block, cfg: Config, region: Region) -> Block:
    """Take weights that are whole on every rank to where heads or tokens are cut."""
    own, inner = params.attention, params.mlp
    before, after = region.outside(params.attention_norm, params.mlp_norm)
    # Where the query heads of a key head are cut, keys are not: each rank makes them.
    shared = own.q.shape[1] < cfg.heads // cfg.kv_heads
    taken = inside(
        region,
        tree.fields(own) | tree.fields(inner),
        whole={"q_norm", "k_norm", "router", *(("k", "v") if shared else ())},
        inputs={"o", "down"},
    )
    return Block(
        attention_norm=before,
        attention=tree.evolve(own, **{name: taken[name] for name in tree.fields(own)}),
        mlp_norm=after,
        mlp=tree.evolve(inner, **{name: taken[name] for name in tree.fields(inner)}),
    )


def block(
    params: Block,
    x: Float[Tensor, "own embed"],
    cos: Float[Tensor, "tokens head_dim"],
    sin: Float[Tensor, "tokens head_dim"],
    batch: Batch | None,
    deep: Float[Tensor, "features embed"] | None,
    *,
    cfg: Config,
    compute: Compute,
    attend: Callable[..., Tensor] | None = None,
) -> Float[Tensor, "own embed"] | tuple[Float[Tensor, "own embed"], moe.Routing]:
    """Attend, then the feed-forward layer, then add the deep features, if this layer takes any.

    A block of experts gives its routing too. `attend(q, k, v)` stands in for attention over the
    batch's segments: decoding with a cache, or with tokens cut over ranks.
    """
    ops, region, tokens = compute.ops, compute.text, len(cos)
    params = _cut(compute.ready(params), cfg, region)

    y = ops.rms_norm(x, params.attention_norm, cfg.eps)
    q, k, v = project(params.attention, region.fan(region.join(y, tokens)), cos, sin, cfg, ops)
    if attend is None:
        assert batch is not None
        y = region.attend(ops.attention)(q, k, v, batch.segments, causal=True)
    else:
        y = attend(q, k, v)
    x = x + region.leave(op.linear(y, params.attention.o, contract=3))

    y = region.fan(region.join(ops.rms_norm(x, params.mlp_norm, cfg.eps), tokens))
    routing = None
    if isinstance(params.mlp, moe.Moe):
        assert cfg.experts is not None
        real = None if batch is None else batch.real
        y, routing = moe.feed_forward(params.mlp, y, real, cfg.experts, compute)
    else:
        y = mlp.feed_forward(params.mlp, y, ops)
    x = x + region.leave(y)
    if deep is not None:
        assert batch is not None
        nothing = torch.zeros((), dtype=x.dtype, device=x.device)
        x = x + select(deep, region.own(batch.feature), nothing)
    return x if routing is None else (x, routing)


def hidden(
    params: Qwen3VL, batch: Batch, cfg: Config, compute: Compute = plain
) -> tuple[Float[Tensor, "own embed"], moe.Routing | None]:
    """Run the tower and all blocks: the state of the tokens that are here, before the last norm.

    Gives the routing of all blocks of experts too, if there are any.
    """
    x, deep = start(params, batch, cfg, compute)
    cos, sin = map(compute.ops.once, angles(batch.positions, cfg))
    x, _, routing = compute.stack(
        partial(block, cfg=cfg, compute=compute),
        params.text.layers,
        x,
        cos,
        sin,
        batch,
        each=(*deep, *(None,) * (cfg.layers - len(deep))),
    )
    return x, moe.stacked(routing) if routing else None


def start(
    params: Qwen3VL, batch: Batch, cfg: Config, compute: Compute
) -> tuple[Float[Tensor, "own embed"], tuple[Float[Tensor, "features embed"], ...]]:
    """Make what the blocks read: the tokens' embeddings or features, and the deep features."""
    region = compute.text
    features, *deep = region.share(vision.encode(params.vision, batch.media, cfg.vision, compute))
    rows = embed(compute.whole(params.text.embedding), batch.tokens, cfg, region)
    return select(features, region.own(batch.feature), rows.to(features.dtype)), tuple(deep)


def head(
    params: Decoder, x: Float[Tensor, "tokens embed"], cfg: Config, compute: Compute
) -> tuple[Float[Tensor, "tokens columns"], Float[Tensor, "vocab columns"]]:
    """Give the normalised states and the weight of the head, whose product are the logits.

    x is what `join` gives. There are `embed` columns, and more if the head is adapted.
    """
    region = compute.text
    (norm,) = region.outside(compute.ready(params.head.norm))
    weight = params.embedding if params.head.weight is None else params.head.weight
    x = region.fan(compute.ops.rms_norm(x, norm, cfg.eps))
    weight = inside(region, {"head": compute.ready(weight)})["head"]
    return weight.joined(x) if isinstance(weight, op.Composed) else (x, weight)


def logits(
    params: Decoder, x: Float[Tensor, "tokens embed"], cfg: Config, compute: Compute
) -> Float[Tensor, "tokens vocab"]:
    """Predict the next token after each state that `join` gives."""
    return compute.text.logits(op.linear(*head(params, x, cfg, compute)), cfg.vocab)


def forward(
    params: Qwen3VL, batch: Batch, cfg: Config, compute: Compute = plain
) -> Float[Tensor, "tokens vocab"]:
    """Predict the next token at each place: logits."""
    x, _ = hidden(params, batch, cfg, compute)
    x = compute.text.join(x, len(batch.tokens))
    return logits(params.text, x, cfg, compute)


def loss(params: Qwen3VL, batch: Batch, cfg: Config, compute: Compute = plain) -> Float[Tensor, ""]:
    """Sum the weighted cross entropy of the targets, divided by the batch's count."""
    return losses_of(params, batch, cfg, compute)[0]


def losses_of(
    params: Qwen3VL,
    batch: Batch,
    cfg: Config,
    compute: Compute = plain,
    *,
    balance: float = 0.0,
    load: Float[Tensor, "layers choice"] | None = None,
) -> tuple[Float[Tensor, ""], moe.Routing | None]:
    """Give the loss, with `balance` times the balance loss of the experts, and their routing.

    `load` is that of the whole step, where it has other batches.
    """
    x, routing = hidden(params, batch, cfg, compute)
    x = compute.text.join(x, len(batch.tokens))[batch.at]
    x, weight = head(params.text, x, cfg, compute)
    value = losses.next_token(
        x,
        weight,
        batch.targets,
        batch.weights,
        batch.count,
        pieces=compute.text.pieces(cfg.vocab),
        cross_entropy=compute.ops.cross_entropy,
    )
    if routing is not None and balance:
        assert cfg.experts is not None
        load = compute.total(routing.load) if load is None else load
        value = value + balance * moe.balance(routing, load, cfg.experts)
    return value, routing


def report(cfg: Config) -> Callable[[moe.Routing], dict[str, Tensor]]:
    """Make what gives the metrics of a step, out of the routing of all of it."""
    own = cfg.experts
    return lambda routing: {} if own is None else moe.report(routing, own)
