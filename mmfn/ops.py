"""The operations that have a fused kernel somewhere: their definitions, in plain torch.

Definitions are differentiable any number of times and work under `torch.func`. Which version runs
is an argument: `Ops` is the table that a model takes, `definition` the one made of this module.
Norms, angles, soft-max and loss are computed in float32 at least, whatever the inputs are.
"""

from collections.abc import Callable

import attrs
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mmfn.batch import Segments


def wide(x: Tensor) -> Tensor:
    """Cast to float32, or leave what is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, contract: int = 1) -> Tensor:
    """Contract the last `contract` axes of x with those of the weight; its others come last.

    x is `[tokens, *in]`, weight `[*out, *in]`, bias `[*out]`; the result is `[tokens, *out]`.
    """
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


def cross_entropy(
    x: Float[Tensor, "supervised embed"],
    head: Float[Tensor, "vocab embed"],
    targets: Int[Tensor, " supervised"],
    weights: Float[Tensor, " supervised"],
) -> Float[Tensor, ""]:
    """Sum the weighted negative log-probabilities of the targets under `softmax(x @ head.T)`."""
    logits = wide(linear(x, head))
    picked = logits.gather(-1, targets[:, None]).squeeze(-1)
    return ((logits.logsumexp(-1) - picked) * weights).sum()


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a weight to the dtype that is computed in; its gradient is cast back."""
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
    cross_entropy: Callable[..., Tensor] = cross_entropy
    cast: Callable[[Tensor, torch.dtype], Tensor] = cast
    once: Callable[[Tensor], Tensor] = once


definition = Ops()
"""The definitions: for research, for tests, and where no fused version exists."""
