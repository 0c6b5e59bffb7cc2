"""From a sample to token ids: the chat layout of Qwen3-VL.

A turn is `<|im_start|>role`, a newline, the content, `<|im_end|>`, a newline; a picture is
`<|vision_start|>`, one `<|image_pad|>` for each merge block of patches, `<|vision_end|>`. No system
turn is added. The ids are those of the published chat template.

Special ids come from the structure only. Text that spells `<|im_end|>` or `<|image_pad|>` is
encoded as the characters it is made of. What is supervised follows from the structure too, never
from ids or words: the content of each assistant turn, and the `<|im_end|>` after it, not the
newline that follows. Text between two special ids is encoded in one piece, as the template does, so
the newline before an answer that itself begins with newlines may share a token with them; a token
that holds any of the answer is supervised.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import numpy as np
from transformers import PreTrainedTokenizerBase

from mmfn import files
from mmfn.data import media
from mmfn.data import tokenizer as tokenizers
from mmfn.data.encoded import Encoded, Run
from mmfn.data.media import Pixels
from mmfn.data.sample import BadSample, Sample, Text, TooLong, Turn

MARKS: Mapping[str, str] = {
    "turn_start": "<|im_start|>",
    "turn_end": "<|im_end|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image_pad": "<|image_pad|>",
    "video_pad": "<|video_pad|>",
}
"""How the special tokens are spelt."""


@attrs.frozen
class Special:
    """Ids of the tokens that make the layout."""

    turn_start: int
    turn_end: int
    vision_start: int
    vision_end: int
    image_pad: int
    video_pad: int


@attrs.frozen
class Chat:
    """What encoding needs to know; `load` reads it from the folder of a model.

    The limit of the tokenizer itself is not read: `max_tokens` is the only one.

    Raises:
        ValueError: text can spell a special id with this tokenizer, or the limit is below 1.
    """

    tokenizer: PreTrainedTokenizerBase
    """A fast one; it is only ever asked to encode text."""
    pixels: Pixels
    special: Special
    max_tokens: int
    """Longest sample that is encoded, in tokens."""

    def __attrs_post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}, needs at least 1")
        if not getattr(self.tokenizer, "is_fast", False):
            raise ValueError(f"{type(self.tokenizer).__name__} is not a fast tokenizer")
        ids = set(attrs.astuple(self.special))
        for mark in MARKS.values():
            if spelt := ids.intersection(_text(mark, self)[0]):
                raise ValueError(f"text {mark!r} is encoded as the special id {min(spelt)}")


@attrs.frozen
class Length:
    """How much a sample asks for."""

    tokens: int
    patches: int
    supervised: int
    """Tokens that are targets."""


@attrs.frozen
class Laid:
    """The tokens of turns, before any picture is decoded."""

    tokens: tuple[int, ...]
    supervised: tuple[bool, ...]
    runs: tuple[Run, ...]


def special_of(tokenizer: PreTrainedTokenizerBase) -> Special:
    """Look up the special ids.

    Raises:
        ValueError: the tokenizer has no such token; names it.
    """
    known = tokenizer.get_vocab()
    if missing := [mark for mark in MARKS.values() if mark not in known]:
        raise ValueError(f"the tokenizer has no token {missing[0]!r}")
    return Special(**{name: known[mark] for name, mark in MARKS.items()})


def load(folder: Path | str, max_tokens: int) -> Chat:
    """Read tokenizer, special ids and pixel budget from the folder of a published model.

    Raises:
        ValueError: a part is missing, or `config.json` names other ids than the tokenizer.
    """
    folder = Path(folder)
    tokenizer = tokenizers.load(folder)
    special = special_of(tokenizer)
    config = files.read_json(folder / "config.json")
    keys = {
        "image_token_id": special.image_pad,
        "video_token_id": special.video_pad,
        "vision_start_token_id": special.vision_start,
        "vision_end_token_id": special.vision_end,
    }
    for key, value in keys.items():
        if config.get(key, value) != value:
            raise ValueError(f"config.json has {key}={config[key]}, the tokenizer has {value}")
    return Chat(tokenizer, media.pixels_of(folder), special, max_tokens)


def encode(sample: Sample, chat: Chat, root: Path | str) -> Encoded:
    """Give the ids, targets and patches of a sample; pictures are read from `root`.

    A sample without an assistant turn is encoded too, with no target in it: whether it is of use
    is for the caller to say.

    Raises:
        BadSample: a picture cannot be used; names it, the sample and why.
        TooLong: there are more tokens than `chat.max_tokens`; no picture has been decoded then.
    """
    with _named(sample):
        laid = _lay(sample.turns, chat, root)
        if len(laid.tokens) > chat.max_tokens:
            cause = f"{len(laid.tokens)} tokens are more than max_tokens={chat.max_tokens}"
            raise TooLong(sample.name, sample.where, cause)
        return _decoded(sample, laid, chat, root)


def measure(sample: Sample, chat: Chat, root: Path | str) -> Length:
    """Count what `encode` will give, from the headers of the pictures.

    A sample longer than `chat.max_tokens` is measured like any other.

    Raises:
        BadSample: the header of a picture cannot be used; names it, the sample and why.
    """
    with _named(sample):
        laid = _lay(sample.turns, chat, root)
    patches = sum(run.height * run.width for run in laid.runs)
    return Length(len(laid.tokens), patches, sum(laid.supervised))


def prompt(turns: Sequence[Turn], chat: Chat, root: Path | str) -> Encoded:
    """Give what a model goes on from to answer: the turns, and the opening of an assistant turn.

    Nothing in it is supervised, and `chat.max_tokens` does not bind it.

    Raises:
        ValueError: there are no turns, or a system turn is not the first.
        BadSample: a picture cannot be used.
    """
    sample = Sample("prompt", "prompt", tuple(turns))
    with _named(sample):
        encoded = _decoded(sample, _lay(sample.turns, chat, root), chat, root)
    opening = [chat.special.turn_start, *_text("assistant\n", chat)[0]]
    tokens = np.concatenate([encoded.tokens, np.array(opening, dtype=np.int64)])
    return attrs.evolve(encoded, tokens=tokens, supervised=np.zeros(len(tokens), dtype=bool))


def _lay(turns: Sequence[Turn], chat: Chat, root: Path | str) -> Laid:
    """Lay the tokens of turns out; of the pictures only headers are read."""
    special = chat.special
    tokens: list[int] = []
    supervised: list[bool] = []
    runs: list[Run] = []

    def add(ids: Sequence[int], target: bool | Sequence[bool] = False) -> None:
        tokens.extend(ids)
        supervised.extend([target] * len(ids) if isinstance(target, bool) else target)

    def add_text(text: str, before: int) -> None:
        """Add text that is a target from character `before` on."""
        ids, ends = _text(text, chat)
        add(ids, [end > before for end in ends])

    for turn in turns:
        answer = turn.role == "assistant"
        text = f"{turn.role}\n"
        opening = len(text)
        add([special.turn_start])
        for part in turn.parts:
            if isinstance(part, Text):
                text += part.text
                continue
            add_text(text, len(text))
            text = ""
            rows, columns = media.grid(part.source, root, chat.pixels)
            add([special.vision_start])
            runs.append(Run(len(tokens), rows, columns))
            add([special.image_pad] * (rows * columns // chat.pixels.merge**2))
            add([special.vision_end])
        add_text(text, opening if answer else len(text))
        add([special.turn_end], answer)
        add_text("\n", 1)
    return Laid(tuple(tokens), tuple(supervised), tuple(runs))


def _decoded(sample: Sample, laid: Laid, chat: Chat, root: Path | str) -> Encoded:
    """Add the patches to tokens laid out from headers."""
    patches = np.zeros((sum(r.height * r.width for r in laid.runs), chat.pixels.patch_dim), "f4")
    start = 0
    for image, run in zip(sample.images, laid.runs, strict=True):
        part, grid = media.patches(media.open_image(image.source, root), chat.pixels)
        if grid != (1, run.height, run.width):
            found = f"{run.height}x{run.width} patches by its header, {grid[1]}x{grid[2]} decoded"
            raise ValueError(f"{media.brief(image.source)} has {found}")
        patches[start : start + len(part)] = part
        start += len(part)
    return Encoded(
        name=sample.name,
        tokens=np.array(laid.tokens, dtype=np.int64),
        supervised=np.array(laid.supervised, dtype=bool),
        runs=laid.runs,
        patches=patches,
    )


def _text(text: str, chat: Chat) -> tuple[list[int], list[int]]:
    """Give the ids of plain text, and for each the index of the character after its last."""
    if not text:
        return [], []
    encoded = chat.tokenizer(
        text,
        add_special_tokens=False,
        split_special_tokens=True,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,  # It would warn of its own limit, which does not count here.
    )
    return encoded["input_ids"], [end for _, end in encoded["offset_mapping"]]


@contextmanager
def _named(sample: Sample) -> Iterator[None]:
    """Name the sample in what goes wrong with its pictures."""
    try:
        yield
    except BadSample:
        raise
    except ValueError as error:
        raise BadSample(sample.name, sample.where, str(error)) from error
