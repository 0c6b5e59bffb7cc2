"""The operations that have a fused kernel somewhere: their definitions, in plain torch.

Definitions are differentiable any number of times and work under `torch.func`. Which version runs
is an argument: `Ops` is the table that a model takes, `definition` the one made of this module.
Norms, angles, soft-max and loss are computed in float32 at least, whatever the inputs are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import attrs
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mmfn.batch import Segments


def wide(x: Tensor) -> Tensor:
    """Cast to float32, or leave what is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Composed:
    """A node that stands where a weight does, and says how x meets it: one with an adapter."""

    @property
    def loose(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Name the fields that are whole on every rank though the weight is cut over them: where
        its outputs are cut, and where its inputs are."""
        return (), ()

    def linear(self, x: Tensor, bias: Tensor | None, contract: int) -> Tensor:
        """Do what `linear` does."""
        raise NotImplementedError

    def grouped(self, x: Tensor, counts: Tensor, product: Callable[..., Tensor]) -> Tensor:
        """Do what `grouped` does."""
        raise NotImplementedError

    def joined(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Give an input and a plain weight whose product is that of x with this node."""
        raise NotImplementedError


def linear(
    x: Tensor, weight: Tensor | Composed, bias: Tensor | None = None, *, contract: int = 1
) -> Tensor:
    """Contract the last `contract` axes of x with those of the weight; its others come last.

    x is `[tokens, *in]`, weight `[*out, *in]`, bias `[*out]`; the result is `[tokens, *out]`.
    """
    if isinstance(weight, Composed):
        return weight.linear(x, bias, contract)
    out = weight.shape[: weight.ndim - contract]
    flat = F.linear(
        x.flatten(x.ndim - contract),
        weight.flatten(weight.ndim - contract).flatten(0, -2),
        None if bias is None else bias.flatten(),
    )
    return flat if len(out) == 1 else flat.unflatten(-1, out)


def attention(
    q: Float[Tensor, "tokens kv_heads groups head_dim"],
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
    segments: Segments,
    *,
    causal: bool,
) -> Float[Tensor, "tokens kv_heads groups head_dim"]:
    """Let each token read its segment: all of it, or up to itself when `causal`.

    Source: Ainslie et al. 2023, arXiv:2305.13245, section 2.2.
    """
    scores = torch.einsum("skgc,tkc->kgst", q, k) * q.shape[-1] ** -0.5
    number = segments.number
    visible = number[:, None] == number
    if causal:
        place = torch.arange(len(number), device=number.device)
        visible = visible & (place[:, None] >= place)
    # In bfloat16 the sum over a long row would lose its small terms.
    weights = wide(scores).masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("kgst,tkc->skgc", weights.to(v.dtype), v)


def rms_norm(
    x: Float[Tensor, "*rows embed"], scale: Float[Tensor, " embed"], eps: float
) -> Float[Tensor, "*rows embed"]:
    """Divide each row by its root mean square and scale it.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    y = wide(x)
    return (y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * scale).to(x.dtype)


def rotary(
    x: Float[Tensor, "tokens *heads head_dim"],
    cos: Float[Tensor, "tokens head_dim"],
    sin: Float[Tensor, "tokens head_dim"],
) -> Float[Tensor, "tokens *heads head_dim"]:
    """Turn the pairs (i, i + head_dim/2) of each head by the angles of its token.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.4; halves are paired, not neighbours.
    """
    shape = (len(x), *(1,) * (x.ndim - 2), x.shape[-1])
    first, second = wide(x).chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (x * cos.view(shape) + turned * sin.view(shape)).to(x.dtype)


def swiglu(
    gate: Float[Tensor, "tokens mlp"], up: Float[Tensor, "tokens mlp"]
) -> Float[Tensor, "tokens mlp"]:
    """Multiply the value by the gate's SiLU.

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    return F.silu(gate) * up


def count_choices(expert: Int[Tensor, "tokens choices"], experts: int) -> Int[Tensor, " expert"]:
    """Count the choices of each expert; one of the expert numbered `experts` is none."""
    flat = expert.flatten()
    counts = flat.new_zeros(experts + 1).scatter_add(0, flat, torch.ones_like(flat))
    return counts[:experts]


def by_expert(
    expert: Int[Tensor, "tokens choices"], experts: int
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " expert"]]:
    """List the choices `token · choices + choice` in the order of their experts, and count them.

    A choice of the expert numbered `experts` is none: it comes last and is not counted.
    """
    return expert.flatten().argsort(stable=True), count_choices(expert, experts)


def permute(
    x: Float[Tensor, "tokens embed"], order: Int[Tensor, " rows"], choices: int
) -> Float[Tensor, "rows embed"]:
    """Give each choice the row of its token, in the order that `by_expert` lists."""
    return x[order // choices]


def unpermute(
    y: Float[Tensor, "rows embed"],
    order: Int[Tensor, " rows"],
    weight: Float[Tensor, "tokens choices"],
) -> Float[Tensor, "tokens embed"]:
    """Give each token the weighted sum of the rows of its choices."""
    rows = y[order.argsort()].unflatten(0, weight.shape)
    return (wide(rows) * weight[..., None]).sum(1).to(y.dtype)


def grouped_linear(
    x: Float[Tensor, "rows into"],
    weight: Float[Tensor, "expert into out"],
    counts: Int[Tensor, " expert"],
) -> Float[Tensor, "rows out"]:
    """Multiply the first `counts[0]` rows with the first matrix, the next with the second, ...

    Rows beyond the sum of the counts become zeros.
    """
    # Every matrix meets every row: nothing depends on the counts but a mask.
    place = torch.arange(len(x), device=x.device)
    ends = counts.cumsum(0)
    number = (place[:, None] >= ends).sum(1)
    parts = [torch.where((number == e)[:, None], x @ w, 0.0) for e, w in enumerate(weight)]
    return torch.stack(parts).sum(0)


def grouped(
    x: Tensor, weight: Tensor | Composed, counts: Tensor, product: Callable[..., Tensor]
) -> Tensor:
    """Do what `grouped_linear` does, by one version of it, the `product`."""
    if isinstance(weight, Composed):
        return weight.grouped(x, counts, product)
    return product(x, weight, counts)


@dataclass(frozen=True)  # Those of attrs cannot be made inside a compiled step.
class Pieces:
    """The vocabulary cut over ranks: which entries are here, and what the ranks do together."""

    start: int
    """The first entry that is here; the weight has only those of this rank."""
    psum: Callable[[Tensor], Tensor]
    """Sums over the ranks; its gradient passes as it is."""
    pmax: Callable[[Tensor], Tensor]
    """Gives the largest of all ranks; no gradient passes."""

    def here(self, entries: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Count entries from the first of `size` that are here; gives also which of them are."""
        place = entries - self.start
        found = (place >= 0) & (place < size)
        return place.clamp(0, max(0, size - 1)), found


def lookup(
    embedding: Float[Tensor, "vocab embed"], tokens: Int[Tensor, " tokens"], pieces: Pieces | None
) -> Float[Tensor, "tokens embed"]:
    """Give the embeddings of tokens; of one piece, zeros for those that are not in it."""
    if pieces is None:
        return F.embedding(tokens, embedding)
    if len(embedding) == 0:
        return embedding.new_zeros(len(tokens), embedding.shape[1])
    place, found = pieces.here(tokens, len(embedding))
    return torch.where(found[:, None], F.embedding(place, embedding), 0.0)


def cross_entropy(
    x: Float[Tensor, "supervised embed"],
    head: Float[Tensor, "vocab embed"],
    targets: Int[Tensor, " supervised"],
    weights: Float[Tensor, " supervised"],
    pieces: Pieces | None = None,
) -> Float[Tensor, ""]:
    """Sum the weighted negative log-probabilities of the targets under `softmax(x @ head.T)`.

    With `pieces` the head has this rank's entries of the vocabulary; logits never leave the rank.
    """
    logits = wide(linear(x, head))
    if pieces is None:
        picked = logits.gather(-1, targets[:, None]).squeeze(-1)
        return ((logits.logsumexp(-1) - picked) * weights).sum()
    # A rank may have no entry at all: a column that counts for nothing stands in.
    padded = F.pad(logits, (0, 1), value=-torch.inf)
    peak = pieces.pmax(padded.amax(-1))
    level = pieces.psum((padded - peak[:, None]).exp().sum(-1)).log() + peak
    place, found = pieces.here(targets, len(head))
    own = F.pad(logits, (0, 1)).gather(-1, place[:, None]).squeeze(-1)
    picked = pieces.psum(torch.where(found, own, 0.0))
    return ((level - picked) * weights).sum()


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a weight to the dtype that is computed in; its gradient is cast back.

    What has this dtype already stays as it is.
    """
    return x.to(dtype)


def once(x: Tensor) -> Tensor:
    """Give x as it is: a value that many loops read, and that no compiler should derive in each."""
    return x


@attrs.frozen
class Ops:
    """Which version of each operation runs."""

    attention: Callable[..., Tensor] = attention
    rms_norm: Callable[..., Tensor] = rms_norm
    rotary: Callable[..., Tensor] = rotary
    swiglu: Callable[..., Tensor] = swiglu
    permute: Callable[..., Tensor] = permute
    unpermute: Callable[..., Tensor] = unpermute
    grouped_linear: Callable[..., Tensor] = grouped_linear
    cross_entropy: Callable[..., Tensor] = cross_entropy
    cast: Callable[[Tensor, torch.dtype], Tensor] = cast
    once: Callable[[Tensor], Tensor] = once


definition = Ops()
"""The definitions: for research, for tests, and where no fused version exists."""
