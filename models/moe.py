"""A mixture of experts: a router chooses some of many feed-forward layers for each token.

Source: Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961 (balance); Yang
et al. 2025, arXiv:2505.09388 (Qwen3).
"""

from functools import partial
from typing import Any

import attrs
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmfn import ops as op
from mmfn import tree
from mmfn.compute import Compute
from mmfn.param import Form, Param
from mmfn.tree import Leaf, pytree


@attrs.frozen
class Config:
    """Sizes of the experts of a layer."""

    experts: int
    choices: int
    """Experts that a token passes through."""
    mlp: int
    """Inner width of an expert."""
    normalise: bool = True
    """Whether the weights of a token's experts sum to one."""

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.choices <= self.experts:
            raise ValueError(f"choices={self.choices} is not from 1 to experts={self.experts}")


@pytree
class Moe:
    """The router and all experts of a layer."""

    router: Leaf
    gate_up: Leaf
    down: Leaf


@pytree
class Routing:
    """What a router did with the tokens that are no padding; sums, so parts of a batch add up."""

    load: Float[Tensor, "*layers choice"]
    """Tokens of each expert, float32."""
    probability: Float[Tensor, "*layers choice"]
    """Sum of the tokens' probabilities of each expert, before the choice."""
    left_out: Float[Tensor, "*layers"]
    """Choices for which there was no room; float32."""


def abstract(cfg: Config, embed: int, at: str) -> Moe:
    """State the weights of a layer whose published keys begin with `at`."""
    e, m, d = cfg.experts, cfg.mlp, embed
    # transformers 5 writes the same keys with the last axes turned; others split the experts.
    return Moe(
        router=Param((e, d), "choice embed", f"{at}.gate.weight", d**-0.5),
        gate_up=Param(
            (e, d, 2, m),
            "expert embed (gate_up mlp)",
            f"{at}.experts.gate_up_proj",
            d**-0.5,
            form="hub",
            forms=(
                Form("transformers", "expert (gate_up mlp) embed", f"{at}.experts.gate_up_proj"),
                Form(
                    "per_expert",
                    "mlp embed",
                    f"{at}.experts.{{expert}}.{{gate_up}}_proj.weight",
                    {"gate_up": ("gate", "up")},
                ),
            ),
        ),
        down=Param(
            (e, m, d),
            "expert mlp embed",
            f"{at}.experts.down_proj",
            m**-0.5,
            form="hub",
            forms=(
                Form("transformers", "expert embed mlp", f"{at}.experts.down_proj"),
                Form("per_expert", "embed mlp", f"{at}.experts.{{expert}}.down_proj.weight"),
            ),
        ),
    )


def route(
    router: Float[Tensor, "choice embed"], x: Float[Tensor, "tokens embed"], cfg: Config
) -> tuple[
    Float[Tensor, "tokens choices"], Int[Tensor, "tokens choices"], Float[Tensor, "tokens choice"]
]:
    """Choose experts: their weights and numbers, and the probabilities of all; float32 at least."""
    probability = op.linear(op.wide(x), op.wide(router)).softmax(-1)
    # Without a gradient: a block that is run again is given the same choices (`keep_choices`).
    _, expert = probability.detach().topk(cfg.choices)
    weight = probability.gather(1, expert)
    if cfg.normalise:
        weight = weight / weight.sum(-1, keepdim=True)
    return weight, expert, probability


def feed_forward(
    params: Moe,
    x: Float[Tensor, "tokens embed"],
    real: Bool[Tensor, " tokens"] | None,
    cfg: Config,
    compute: Compute,
) -> tuple[Float[Tensor, "tokens embed"], Routing]:
    """Pass each token through its experts; padding, where `real` is false, through none.

    x is what `fan` gives; the result is summed over ranks by `leave`.
    """
    weight, expert, probability = route(params.router, x, cfg)
    if real is not None:
        expert = torch.where(real[:, None], expert, cfg.experts)
        probability = torch.where(real[:, None], probability, 0.0)
    y, left_out = compute.experts(
        partial(apply, ops=compute.ops),
        # The gate and the value are one product.
        (tree.map(lambda w: w.flatten(2), params.gate_up), params.down),
        x,
        expert,
        weight,
        experts=cfg.experts,
        ops=compute.ops,
    )
    zero = torch.zeros((), device=x.device)
    return y, Routing(
        load=op.count_choices(expert, cfg.experts).float(),
        probability=compute.text.alike(probability.sum(0)),
        left_out=zero if left_out is None else left_out.float(),
    )


def apply(
    weights: Any, x: Float[Tensor, "rows embed"], counts: Int[Tensor, " expert"], ops: op.Ops
) -> Float[Tensor, "rows embed"]:
    """Apply gated feed-forward layers to the rows of each."""
    gate_up, down = weights
    gate, up = op.grouped(x, gate_up, counts, ops.grouped_linear).chunk(2, -1)
    return op.grouped(ops.swiglu(gate, up), down, counts, ops.grouped_linear)


def stacked(layers: list[Routing]) -> Routing:
    """Join those of the layers, in order."""
    joined: Routing = tree.map(lambda *each: torch.stack(each), *layers)
    return joined


def balance(
    routing: Routing, load: Float[Tensor, "layers choice"], cfg: Config
) -> Float[Tensor, ""]:
    """Give this part's share of the balance loss, which is `choices` where all loads are equal.

    `load` is that of the whole step: all micro-batches, all ranks. Shares of its parts sum to the
    loss of the step, whatever the parts are. Layers are pooled.

    Source: Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6, for several choices.
    """
    total = load.sum(0).detach()
    tokens = (total.sum() / cfg.choices).clamp(min=1.0)
    return cfg.experts * (total / tokens * (routing.probability.sum(0) / tokens)).sum()


def report(routing: Routing, cfg: Config) -> dict[str, Tensor]:
    """Make the metrics of a step out of the routing of all of it: keys of `mmfn.log.EXPERTS`."""
    load = routing.load
    mean = load.mean(-1, keepdim=True).clamp(min=1.0)
    return {
        "balance": balance(routing, load, cfg),
        "load_max": (load / mean).max(),
        "load_idle": (load == 0).sum(),
        "left_out": routing.left_out.sum(),
        "load": load.sum(0),
    }
