"""The gated feed-forward layer of a dense block."""

from jaxtyping import Float
from torch import Tensor

from mmfn import ops as op
from mmfn.param import Param
from mmfn.tree import Leaf, pytree


@pytree
class Mlp:
    """Its weights."""

    gate: Leaf
    up: Leaf
    down: Leaf


def abstract(embed: int, mlp: int, at: str) -> Mlp:
    """State the weights of a layer whose published keys begin with `at`."""
    into = embed**-0.5
    return Mlp(
        gate=Param((mlp, embed), "mlp embed", f"{at}.gate_proj.weight", into),
        up=Param((mlp, embed), "mlp embed", f"{at}.up_proj.weight", into),
        down=Param((embed, mlp), "embed mlp", f"{at}.down_proj.weight", mlp**-0.5),
    )


def feed_forward(
    params: Mlp, x: Float[Tensor, "tokens embed"], ops: op.Ops
) -> Float[Tensor, "tokens embed"]:
    """Apply the layer."""
    return op.linear(ops.swiglu(op.linear(x, params.gate), op.linear(x, params.up)), params.down)
