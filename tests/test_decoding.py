"""Decoding with a cache says what the whole forward pass says."""

from functools import partial

import attrs
import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from mmfn.compute import Compute
from mmfn.data.encoded import Encoded
from mmfn.generate import generate, greedy, sampled
from mmfn.kernels import cpu
from mmfn.models import decoding, qwen3_vl

NAMES = ["A", "T", "B", "picture"]


@pytest.mark.parametrize("compute", [Compute(), Compute(ops=cpu.OPS)], ids=["definition", "fused"])
def test_tokens_are_those_of_the_whole_forward_pass(compute: Compute) -> None:
    """Four prompts of other lengths, with pictures and frames, packed; six tokens each."""
    params = tiny.params(dtype=torch.float64)
    prompts = [tiny.encoded(name) for name in NAMES]
    found = generate(
        partial(
            lambda batch, **sizes: decoding.prefill(params, batch, tiny.CONFIG, compute, **sizes),
            samples=4,
            room=48,
        ),
        lambda cache, tokens: decoding.decode(params, cache, tokens, tiny.CONFIG, compute),
        tiny.batch(*prompts),
        stop=[],
        limit=6,
    )
    for prompt, answer in zip(prompts, found, strict=True):
        expected: list[int] = []
        for _ in range(6):
            batch = tiny.batch(longer(prompt, expected))
            logits = qwen3_vl.forward(params, batch, tiny.CONFIG)
            expected.append(int(logits[len(prompt.tokens) + len(expected) - 1].argmax()))
        assert answer == expected


def longer(prompt: Encoded, more: list[int]) -> Encoded:
    """Add tokens of an answer to a prompt."""
    tokens = np.concatenate([prompt.tokens, np.array(more, dtype=np.int64)])
    return attrs.evolve(prompt, tokens=tokens, supervised=np.zeros(len(tokens), dtype=bool))


def test_an_answer_ends_before_its_stop_token() -> None:
    """Each at its own place; one that never stops ends at the limit."""
    script = torch.tensor([[1, 2, 9, 5], [9, 3, 3, 3], [4, 4, 4, 4]])

    def logits(index: int) -> Tensor:
        return torch.nn.functional.one_hot(script[:, index], 10).float()

    found = generate(
        lambda prompts: (logits(0), 0),
        lambda cache, tokens: (logits(cache + 1), cache + 1),
        None,
        stop=[9],
        limit=4,
    )
    assert found == [[1, 2], [], [4, 4, 4, 4]]


def test_a_prompt_without_room_is_refused() -> None:
    """With its number, its length and the room."""
    batch = tiny.batch(tiny.encoded("T"), tiny.encoded("A"))
    with pytest.raises(ValueError, match="prompt 1 has 33 tokens; room=32"):
        decoding.prefill(tiny.params(), batch, tiny.CONFIG, samples=2, room=32)


def test_sampling_is_a_function_of_seed_and_place() -> None:
    """The same twice, other for another seed; frequencies are the probabilities."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20_000, 4)
    drawn = sampled(1)(logits, 0)
    assert torch.equal(drawn, sampled(1)(logits, 0))
    assert not torch.equal(drawn, sampled(2)(logits, 0))
    assert not torch.equal(drawn, sampled(1)(logits, 1))
    shares = drawn.bincount(minlength=4) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.015, rtol=0)


def test_sampling_draws_from_the_most_probable_only() -> None:
    """With top_p 0.7 the first two of (0.5, 0.3, 0.15, 0.05); near zero temperature the first."""
    logits = torch.tensor([0.3, 0.5, 0.05, 0.15]).log().expand(2000, 4)
    assert set(sampled(0, top_p=0.7)(logits, 0).tolist()) == {0, 1}
    assert set(sampled(0, temperature=1e-3)(logits, 0).tolist()) == {1}
    assert torch.equal(greedy(logits, 0), torch.ones(2000, dtype=torch.int64))
    for wrong in ({"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            sampled(0, **wrong)
