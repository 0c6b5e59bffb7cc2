"""Tokenizers: one trained in process, with the marks and the layout of Qwen3-VL, or a user's own.

Either is data in a folder, like any published one: reading it runs no code and needs no network.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mmfn import files

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""The marks of Qwen3-VL that a tokenizer of ours has, in the order of their ids, after all others.
`<|endoftext|>` pads, `<|im_end|>` ends an answer."""

BYTES = 256
"""Entries that every byte-level vocabulary has: any text can be encoded."""

CHAT_TEMPLATE = """\
{%- macro written(content) -%}
{%- if content is string %}{{ content }}
{%- else %}
{%- for part in content %}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif part.type == 'text' %}{{ part.text }}
{%- else %}{{ raise_exception('a part has type ' ~ part.type ~ ', not image, video or text') }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- endmacro -%}
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ written(message.content) ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
"""A turn is `<|im_start|>role`, a newline, its parts, `<|im_end|>`, a newline. One pad stands for a
picture; whoever encodes the picture repeats it."""


def build(texts: Iterable[str], vocab: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `vocab` ids, those of `SPECIAL` included.

    It has fewer where the texts hold no more pairs to merge. Digits are never merged, so a number
    is the row of its digits. The same texts give the same ids, in any order. `save_pretrained`
    writes a folder that `load` and `AutoTokenizer` read.

    Raises:
        ValueError: `vocab` has no room for the bytes and the special tokens.

    Source: Sennrich et al. 2016, arXiv:1508.07909 (BPE); Radford et al. 2019 (on bytes).
    """
    least = BYTES + len(SPECIAL)
    if vocab < least:
        raise ValueError(
            f"vocab={vocab}, needs at least {least}: {BYTES} bytes, {len(SPECIAL)} special tokens"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in SPECIAL])
    wrap: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    return wrap(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def load(folder: Path | str) -> PreTrainedTokenizerBase:
    """Read a tokenizer from the folder of a model, from its data only: no code, no network.

    Raises:
        ValueError: there is no `tokenizer.json`, or the tokenizer needs code of the folder
            (`auto_map`), which is never run; names the file.
    """
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder / 'tokenizer.json'} is missing")
    path = folder / "tokenizer_config.json"
    if path.is_file() and "auto_map" in files.read_json(path):
        raise ValueError(f"{path} has auto_map, which asks to run code of the folder")
    found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return cast(PreTrainedTokenizerBase, found)
