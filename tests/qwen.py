"""A tokenizer with the published ids of Qwen, built from the vocabulary that the tests install."""

import base64
from functools import cache
from importlib import util
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    *("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start"),
    *("box_end", "quad_start", "quad_end", "vision_start", "vision_end", "vision_pad"),
    *("image_pad", "video_pad"),
)
"""The special tokens, from id 151643 on, each spelt `<|name|>`."""

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where text is cut before merging; published with the vocabulary."""


def _ranks() -> dict[bytes, int]:
    spec = util.find_spec("dashscope")
    assert spec is not None
    assert spec.origin is not None
    lines = (Path(spec.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(word): int(rank) for word, rank in map(bytes.split, lines)}


def _halves(word: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Give the two pieces whose merge makes this word: merge lower ranks until two are left."""
    parts = [word[i : i + 1] for i in range(len(word))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Build it, once: it takes some seconds. Copy it before changing it."""
    ranks = _ranks()
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in shown}
    hidden = (byte for byte in range(256) if byte not in letters)
    letters |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}

    def spell(word: bytes) -> str:
        return "".join(letters[byte] for byte in word)

    halves = [_halves(word, ranks) for word in ranks if len(word) > 1]
    model = models.BPE(
        vocab={spell(word): rank for word, rank in ranks.items()},
        merges=[(spell(first), spell(second)) for first, second in halves],
    )
    made = Tokenizer(model)
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(f"<|{n}|>", normalized=False) for n in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def empty() -> Tokenizer:
    """A tokenizer that knows no word."""
    return Tokenizer(models.BPE())
