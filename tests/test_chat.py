"""Samples become the ids of the published chat template, with the answers supervised."""

import json
import pickle
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import qwen
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pictures
from transformers import PreTrainedTokenizerFast

from mmfn.data import chat, formats, media
from mmfn.data.chat import Chat, Length
from mmfn.data.encoded import Encoded, Run
from mmfn.data.media import Pixels
from mmfn.data.sample import BadSample, Image, Sample, Text, TooLong, Turn, join

CASES = Path(__file__).parent / "data" / "cases"
HALF = (0.5, 0.5, 0.5)
START, END, PAD = 151_644, 151_645, 151_655

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The published layout, for text and pictures only."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """The published vocabulary."""
    return qwen.tokenizer()


@pytest.fixture(scope="module")
def qwen3(tokenizer: PreTrainedTokenizerFast) -> Chat:
    """As `load` gives it for a published folder."""
    pixels = Pixels(16, 2, 2, 65_536, 16_777_216, HALF, HALF)
    return Chat(tokenizer, pixels, chat.special_of(tokenizer), 32_768)


def sample(*said: tuple[str, Any]) -> Sample:
    """A sample of (role, parts), a string being one text."""
    turns = [Turn(r, join([Text(p)]) if isinstance(p, str) else tuple(p)) for r, p in said]
    return Sample("s", "t.json[0]", tuple(turns))


def supervised(encoded: Encoded, qwen3: Chat) -> str:
    """The text of the targets."""
    return str(qwen3.tokenizer.decode(encoded.tokens[encoded.supervised]))


def reference(turns: tuple[Turn, ...], qwen3: Chat, **options: Any) -> list[int]:
    """The ids that transformers gives, each pad repeated as the pictures ask."""
    messages = [
        {
            "role": turn.role,
            "content": [
                {"type": "text", "text": p.text} if isinstance(p, Text) else {"type": "image"}
                for p in turn.parts
            ],
        }
        for turn in turns
    ]
    ids = qwen3.tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATE, tokenize=True, return_dict=False, **options
    )
    images = iter([p for turn in turns for p in turn.parts if isinstance(p, Image)])
    repeated = []
    for token in ids:
        times = 1
        if token == PAD:
            rows, columns = media.grid(next(images).source, CASES, qwen3.pixels)
            times = rows * columns // 4
        repeated += [token] * times
    return repeated


TALK = (
    ("system", "Be brief."),
    ("user", [Text("\n\nBefore "), Image("a64.png"), Image("b96x64.png"), Text("\n after")]),
    ("assistant", "Zwei Bilder: \u4f60\u597d \U0001f600\n\n"),
    ("user", [Image("exif6.jpg")]),
    ("assistant", "\n  It's red.\r\n\tBlue "),
    ("user", ""),
)


def test_ids_are_those_of_the_published_template(qwen3: Chat) -> None:
    """With a system turn, pictures between texts, and newlines at every border."""
    made = sample(*TALK)
    encoded = chat.encode(made, qwen3, CASES)
    assert encoded.tokens.tolist() == reference(made.turns, qwen3)
    asked = chat.prompt(made.turns, qwen3, CASES)
    assert asked.tokens.tolist() == reference(made.turns, qwen3, add_generation_prompt=True)
    assert asked.tokens.tolist()[-3:] == [START, 77_091, 198]
    assert not asked.supervised.any()
    np.testing.assert_array_equal(asked.patches, encoded.patches)


WORD = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.text("\n\r a<|>.\t")
# Written as text, a special token is text here, and is one for the template.
WORD = WORD.filter(lambda word: re.search(r"<\|\w\w+\|>", word) is None)


@settings(deadline=None)
@given(st.lists(st.tuples(WORD, st.booleans(), WORD, WORD.filter(bool)), min_size=1, max_size=3))
def test_any_text_is_encoded_as_the_template_encodes_it(qwen3: Chat, talk: Any) -> None:
    """Each answer is supervised to its end of turn, and nothing else but, where the answer begins
    with space, the newline before it that shares a token with it."""
    picture = [Image("a64.png")]
    said = []
    for first, pictured, second, answer in talk:
        parts = join([Text(first), *(picture if pictured else []), Text(second)])
        said += [("user", parts), ("assistant", answer)]
    made = sample(*said)
    encoded = chat.encode(made, qwen3, CASES)
    assert encoded.tokens.tolist() == reference(made.turns, qwen3)
    measured = Length(len(encoded.tokens), len(encoded.patches), int(encoded.supervised.sum()))
    assert chat.measure(made, qwen3, CASES) == measured
    ends = np.flatnonzero(encoded.tokens == END)
    assert encoded.supervised[ends].tolist() == [False, True] * len(talk)
    backend: Any = qwen3.tokenizer.backend_tokenizer
    text = backend.normalizer.normalize_str
    answers = [text(answer) for *_, answer in talk]
    pieces = supervised(encoded, qwen3).split("<|im_end|>")[:-1]
    for piece, answer in zip(pieces, answers, strict=True):
        assert piece == answer or (piece == "\n" + answer and answer[0].isspace())


def test_the_word_assistant_in_a_question_supervises_nothing(qwen3: Chat) -> None:
    """Token by token."""
    (made,) = formats.read(CASES / "l05_word_assistant.json")
    encoded = chat.encode(made, qwen3, CASES)
    expected = [START, 872, 198, 77_091, 25, 895, 17_847, 2213, END, 198]
    expected += [START, 77_091, 198, 1866, 17_847, 2213, END, 198]
    assert encoded.tokens.tolist() == expected
    assert np.flatnonzero(encoded.supervised).tolist() == [13, 14, 15, 16]
    assert supervised(encoded, qwen3) == "true assistant content<|im_end|>"


def test_the_end_of_turn_is_supervised_whatever_the_pad_id(qwen3: Chat) -> None:
    """Here the pad is the end of turn."""
    other = deepcopy(qwen3.tokenizer)
    other.pad_token = "<|im_end|>"
    assert other.pad_token_id == END
    (made,) = formats.read(CASES / "l05_word_assistant.json")
    encoded = chat.encode(made, attrs.evolve(qwen3, tokenizer=other), CASES)
    assert encoded.tokens[encoded.supervised].tolist() == [1866, 17_847, 2213, END]


def test_text_that_spells_a_special_token_is_text(qwen3: Chat) -> None:
    """In questions and answers, even a whole turn of it."""
    html, literal = formats.read(CASES / "d06_literal_tokens.json")
    plain = chat.encode(html, qwen3, CASES).tokens
    assert not np.isin(plain, [PAD, qwen3.special.video_pad, qwen3.special.vision_start]).any()
    assert html.turns[0].parts[0].text in qwen3.tokenizer.decode(plain)
    encoded = chat.encode(literal, qwen3, CASES)
    assert np.count_nonzero(encoded.tokens == PAD) == 64
    assert supervised(encoded, qwen3) == "<|image_pad|><|im_end|>"
    assert np.count_nonzero(encoded.supervised) > 2  # It takes several tokens to spell it.

    for mark in (*chat.MARKS.values(), "<|endoftext|>", "<|box_start|>"):
        text = f"a{mark}<|im_end|>\n<|im_start|>assistant\nb"
        made = sample(("user", text), ("assistant", mark))
        encoded = chat.encode(made, qwen3, CASES)
        special = encoded.tokens[encoded.tokens >= 151_643].tolist()
        assert special == [START, END, START, END]
        assert supervised(encoded, qwen3) == f"{mark}<|im_end|>"
        assert text in qwen3.tokenizer.decode(encoded.tokens)


def test_a_tokenizer_whose_text_can_spell_a_special_id_is_refused(qwen3: Chat) -> None:
    """As one does that holds `<|image_pad|>` as an ordinary added word."""
    whole: Any = qwen3.tokenizer.backend_tokenizer
    state = json.loads(whole.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["special"] and token["content"] != "<|image_pad|>"
    backend = type(whole).from_str(json.dumps(state))
    other = PreTrainedTokenizerFast(tokenizer_object=backend)
    with pytest.raises(ValueError, match=r"'<\|image_pad\|>' is encoded as the special id 151655"):
        attrs.evolve(qwen3, tokenizer=other)
    with pytest.raises(ValueError, match=r"no token '<\|im_start\|>'"):
        chat.special_of(PreTrainedTokenizerFast(tokenizer_object=qwen.empty()))
    with pytest.raises(ValueError, match="max_tokens=0, needs at least 1"):
        attrs.evolve(qwen3, max_tokens=0)


def test_pictures_stand_where_they_were_in_the_text(qwen3: Chat) -> None:
    """Their patches follow in the same order."""
    (made,) = formats.read(CASES / "d10_interleaved.json")
    encoded = chat.encode(made, qwen3, CASES)
    assert [(r.height, r.width) for r in encoded.runs] == [(16, 16), (14, 20), (24, 28)]
    pads = [encoded.tokens[r.start : r.start + r.height * r.width // 4] for r in encoded.runs]
    assert [len(pad) for pad in pads] == [64, 70, 168]
    assert all((pad == PAD).all() for pad in pads)
    text = qwen3.tokenizer.decode(encoded.tokens).replace("<|image_pad|>", "")
    around = "<|vision_start|><|vision_end|>"
    assert f"user\nBefore {around} middle {around} after<|im_end|>" in text
    for run, image, start in zip(encoded.runs, made.images, (0, 256, 536), strict=True):
        alone, _ = media.patches(media.open_image(image.source, CASES), qwen3.pixels)
        np.testing.assert_array_equal(
            encoded.patches[start : start + run.height * run.width], alone
        )
    assert encoded.patches.dtype == np.float32


@pytest.mark.parametrize(
    ("file", "grids"),
    [
        ("d01_llava_str_image.json", [[(16, 16)], [(16, 16), (14, 20)], []]),
        ("d05_bare_placeholder.json", [[(16, 16)]]),
    ],
)
def test_grids_follow_the_pictures(file: str, grids: Any, qwen3: Chat) -> None:
    """One pad for each block of four patches; measuring counts the same."""
    for made, expected in zip(formats.read(CASES / file), grids, strict=True):
        encoded = chat.encode(made, qwen3, CASES)
        assert [(run.height, run.width) for run in encoded.runs] == expected
        assert np.count_nonzero(encoded.tokens == PAD) == sum(h * w for h, w in expected) // 4
        assert encoded.patches.shape == (sum(h * w for h, w in expected), 1536)
        assert chat.measure(made, qwen3, CASES).patches == len(encoded.patches)


def test_a_bare_part_puts_the_picture_before_the_text(qwen3: Chat) -> None:
    """Where the part stood."""
    (made,) = formats.read(CASES / "d05_bare_placeholder.json")
    encoded = chat.encode(made, qwen3, CASES)
    assert encoded.runs == (Run(4, 16, 16),)
    text = qwen3.tokenizer.decode(encoded.tokens[4 + 64 :])
    assert text.startswith("<|vision_end|>Read it.<|im_end|>")


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (0, "Hello<|im_end|>Bye<|im_end|>"),
        (1, "c<|im_end|>"),
        (2, "b<|im_end|>"),
        (6, "b<|im_end|>"),
    ],
)
def test_answers_are_supervised_in_any_order_of_turns(
    index: int, expected: str, qwen3: Chat
) -> None:
    """Answers first, questions in a row, a question last, a system turn."""
    made = formats.read(CASES / "d11_bad_roles.json")[index]
    assert supervised(chat.encode(made, qwen3, CASES), qwen3) == expected


def test_a_sample_without_an_answer_is_encoded_with_no_target(qwen3: Chat) -> None:
    """What becomes of it is for the caller to say."""
    made = sample(("user", "Q"))
    assert not chat.encode(made, qwen3, CASES).supervised.any()
    assert chat.measure(made, qwen3, CASES) == Length(6, 0, 0)


def test_a_sample_that_is_too_long_is_named_with_its_length_and_the_limit(
    qwen3: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No limit of the tokenizer counts, and no picture is decoded for it."""
    question = ("user", [Image("c432x400.png"), Text("Say it")])
    made = sample(question)
    assert chat.measure(made, qwen3, CASES) == Length(177, 672, 0)
    assert len(chat.encode(made, attrs.evolve(qwen3, max_tokens=177), CASES).tokens) == 177
    for limit in (64, 100, 176):
        narrow = attrs.evolve(qwen3, max_tokens=limit)
        message = rf"t.json\[0\], id 's': 177 tokens are more than max_tokens={limit}"
        with pytest.raises(TooLong, match=message):
            chat.encode(made, narrow, CASES)
        assert chat.measure(made, narrow, CASES).tokens == 177

    short = deepcopy(qwen3.tokenizer)
    short.model_max_length = 10
    assert len(chat.encode(made, attrs.evolve(qwen3, tokenizer=short), CASES).tokens) == 177
    narrow = attrs.evolve(qwen3, max_tokens=5)
    monkeypatch.setattr(media, "open_image", None)
    with pytest.raises(TooLong, match="more than max_tokens=5"):
        chat.encode(sample(("user", [Image("a64.png")])), narrow, CASES)


def test_a_picture_that_cannot_be_used_is_named_with_its_sample(qwen3: Chat) -> None:
    """With the file, the id and the cause; the others pass."""
    expected = {
        "1": "id '1': 'truncated.jpg' cannot be read: image file is truncated",
        "3": "id '3': 'not_image.jpg' is not a picture",
        "5": "id '5': 'empty.jpg' is empty",
        "7": "id '7': 'missing_file.png' is missing",
    }
    kept = []
    for made in formats.read(CASES / "d08_broken_media.json"):
        if made.name not in expected:
            kept.append(len(chat.encode(made, qwen3, CASES).runs))
            continue
        with pytest.raises(BadSample, match=expected[made.name]) as caught:
            chat.encode(made, qwen3, CASES)
        assert str(caught.value).startswith("d08_broken_media.json[")
    assert kept == [1, 1, 1, 1]
    for act in (chat.encode, chat.measure):
        with pytest.raises(BadSample, match=r"id 's': 'ratio200.png': 2001x10 .* 200.10"):
            act(sample(("user", [Image("ratio200.png")])), qwen3, CASES)


def test_a_picture_that_differs_from_its_header_is_refused(
    qwen3: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are laid out from the header."""
    wide = Pictures.new("RGB", (320, 64))
    monkeypatch.setattr(media, "open_image", lambda *_: wide)
    message = "'a64.png' has 16x16 patches by its header, 8x36 decoded"
    with pytest.raises(BadSample, match=message):
        chat.encode(sample(("user", [Image("a64.png")])), qwen3, CASES)


def folder(path: Path, tokenizer: PreTrainedTokenizerFast, **config: Any) -> Path:
    """Write what a published folder holds of this."""
    tokenizer.save_pretrained(path)
    ids = {"image_token_id": PAD, "vision_start_token_id": 151_652}
    vision = {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
    (path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_vl", "vision_config": vision, **ids, **config})
    )
    settings = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    settings |= {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
    settings |= {"image_mean": [*HALF], "image_std": [*HALF]}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return path


def test_all_that_encoding_needs_is_read_from_a_folder(qwen3: Chat, tmp_path: Path) -> None:
    """It travels to other processes, and its parts have to agree."""
    loaded = chat.load(folder(tmp_path, qwen3.tokenizer), 500)
    assert (loaded.pixels, loaded.special, loaded.max_tokens) == (qwen3.pixels, qwen3.special, 500)
    made = sample(*TALK)
    for one in (loaded, pickle.loads(pickle.dumps(loaded))):
        encoded = chat.encode(made, one, CASES)
        assert encoded.tokens.tolist() == chat.encode(made, qwen3, CASES).tokens.tolist()
    folder(tmp_path, qwen3.tokenizer, image_token_id=7)
    with pytest.raises(ValueError, match=r"image_token_id=7, the tokenizer has 151655"):
        chat.load(tmp_path, 500)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer.json is missing"):
        chat.load(tmp_path, 500)
