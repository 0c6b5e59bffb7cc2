"""What a model makes of samples it was not trained on: its loss, and its own answers."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from mmfn.data import chat as chats
from mmfn.data import pack
from mmfn.data.encoded import Geometry
from mmfn.data.loader import Step
from mmfn.data.sample import Sample, Text
from mmfn.generate import generate


@attrs.frozen
class Answer:
    """A question whose answer is known, and what the model said."""

    sample: Sample
    question: str
    expected: str
    given: str

    @property
    def right(self) -> bool:
        """Whether the answer is exact, but for white space around it."""
        return self.given.strip() == self.expected.strip()


def answered(samples: Iterable[Sample]) -> list[Sample]:
    """Choose the samples that end with an assistant's turn: those that ask and answer."""
    return [s for s in samples if len(s.turns) > 1 and s.turns[-1].role == "assistant"]


def answers(
    samples: Sequence[Sample],
    *,
    chat: chats.Chat,
    root: Path,
    geometry: Geometry,
    prefill: Callable[..., tuple[Tensor, Any]],
    decode: Callable[..., tuple[Tensor, Any]],
    limit: int,
    together: int = 64,
) -> list[Answer]:
    """Let the model answer each sample's last turn by greedy decoding, `together` at a time.

    `prefill(batch, samples=, room=)` and `decode(cache, tokens)` are the model's, see
    `mmfn.generate`; an answer ends with its turn or after `limit` tokens.
    """
    found = []
    for start in range(0, len(samples), together):
        part = samples[start : start + together]
        prompts = [chats.prompt(sample.turns[:-1], chat, root) for sample in part]
        length = sum(len(prompt.tokens) for prompt in prompts)
        batch, _ = pack.collate([prompts], geometry=geometry, tokens=-(-length // 256) * 256)
        room = max(len(prompt.tokens) for prompt in prompts) + limit
        said = generate(
            partial(prefill, samples=len(part), room=room),
            decode,
            batch,
            stop=[chat.special.turn_end],
            limit=limit,
        )
        for sample, ids in zip(part, said, strict=True):
            given = str(chat.tokenizer.decode(ids))
            found.append(Answer(sample, _text(sample, -2), _text(sample, -1), given))
    return found


def mean_loss(loss: Callable[[Any], Tensor], steps: Iterable[Step]) -> float:
    """Give the mean loss of all targets: `loss(batch)` is divided by its step's count already."""
    total, count = 0.0, 0
    with torch.no_grad():
        for step in steps:
            for batch in step.batches:
                total += float(loss(batch)) * step.counts.supervised
            count += step.counts.supervised
    return total / max(1, count)


def _text(sample: Sample, turn: int) -> str:
    return "".join(part.text for part in sample.turns[turn].parts if isinstance(part, Text))
