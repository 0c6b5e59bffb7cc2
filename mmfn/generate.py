"""Decoding: tokens one after the other, with a cache that is a tree like any other.

A model gives two functions, `prefill(prompts) -> (logits, cache)` and `decode(cache, tokens) ->
(logits, cache)`; how the next token is chosen is a function too.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmfn import rng

Choose = Callable[[Tensor, int], Tensor]
"""Chooses tokens `[samples]` from logits `[samples, vocab]` at step `index` of the answer."""


def greedy(logits: Float[Tensor, "samples vocab"], index: int) -> Int[Tensor, " samples"]:
    """Choose the most probable token; of equals the first."""
    return logits.argmax(-1)


def sampled(seed: int, *, temperature: float = 1.0, top_p: float = 1.0) -> Choose:
    """Make a choice at random: a function of (seed, sample, step), not of a stream.

    Only the most probable tokens that together reach `top_p` are drawn from.

    Source: Holtzman et al. 2020, arXiv:1904.09751.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive; `greedy` is its limit")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} is not in (0, 1]")

    def choose(logits: Tensor, index: int) -> Tensor:
        weights, order = (logits.float() / temperature).softmax(-1).sort(-1, descending=True)
        sums = weights.cumsum(-1)
        # Keep a token if those before it do not reach top_p yet; the first is always kept.
        kept = torch.where(sums - weights < top_p, weights, 0.0).cumsum(-1)
        rows = torch.arange(len(logits), device=logits.device)
        drawn = rng.uniform(rng.derive(seed, index), rows)[:, None] * kept[:, -1:]
        place = torch.searchsorted(kept, drawn, right=True).clamp(max=logits.shape[-1] - 1)
        return order.gather(-1, place).squeeze(-1)

    return choose


def generate(
    prefill: Callable[[Any], tuple[Tensor, Any]],
    decode: Callable[[Any, Tensor], tuple[Tensor, Any]],
    prompts: Any,
    *,
    stop: Collection[int],
    limit: int,
    choose: Choose = greedy,
) -> list[list[int]]:
    """Continue each prompt up to a token of `stop`, which is left out, or `limit` tokens."""
    with torch.no_grad():
        logits, cache = prefill(prompts)
        answers: list[list[int]] = [[] for _ in range(len(logits))]
        done = [False] * len(logits)
        for index in range(limit):
            tokens = choose(logits, index)
            for sample, token in enumerate(tokens.tolist()):
                done[sample] = done[sample] or token in stop
                if not done[sample]:
                    answers[sample].append(token)
            if all(done) or index + 1 == limit:
                break
            logits, cache = decode(cache, tokens)
    return answers
