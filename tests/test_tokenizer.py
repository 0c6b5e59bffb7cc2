"""Tokenizers: one trained in process, and one read from a folder without running its code."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mmfn.data import tokenizer

TEXTS = ["Which digit is this?", "Which of the two is larger?", "user\n", "assistant\n", "héllo"]


@pytest.fixture(scope="module")
def built() -> PreTrainedTokenizerFast:
    """Give a small one."""
    return tokenizer.build(TEXTS, 320)


@pytest.mark.parametrize("text", ["Which digit?", " a\n\n b\t", "日本 ünï 😀", "7 + 42 = 49", ""])
def test_any_text_comes_back(built: PreTrainedTokenizerFast, text: str) -> None:
    """Bytes that were never seen have ids too."""
    assert built.decode(built.encode(text)) == text


def test_ids_do_not_depend_on_the_order_of_texts(built: PreTrainedTokenizerFast) -> None:
    """Nor on the call."""
    for texts in (TEXTS, TEXTS[::-1]):
        again = tokenizer.build(texts, 320)
        assert again.get_vocab() == built.get_vocab()
        assert again.backend_tokenizer.to_str() == built.backend_tokenizer.to_str()


def test_words_are_merged_and_digits_are_not(built: PreTrainedTokenizerFast) -> None:
    """A number is the row of its digits, wherever it stands."""
    assert len(built.encode("assistant")) == 1
    seven, five = built.convert_tokens_to_ids(["7", "5"])
    assert built.encode("assistant\n75")[-2:] == [seven, five]
    assert built.encode("it is 7")[-1] == seven


@pytest.mark.parametrize("vocab", [264, 300, 4000])
def test_the_vocabulary_is_no_larger_than_asked_and_ends_with_the_marks(vocab: int) -> None:
    """It is smaller when there is nothing left to merge."""
    made = tokenizer.build(TEXTS, vocab)
    assert len(made) <= vocab
    assert len(made) == vocab or vocab == 4000
    ids = made.convert_tokens_to_ids(list(tokenizer.SPECIAL))
    assert ids == list(range(len(made) - 8, len(made)))
    assert made.pad_token == "<|endoftext|>"
    assert made.eos_token == "<|im_end|>"


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    """With the number that is needed."""
    with pytest.raises(ValueError, match="vocab=100, needs at least 264: 256 bytes, 8 special"):
        tokenizer.build(TEXTS, 100)


def test_text_can_be_kept_from_spelling_a_mark(built: PreTrainedTokenizerFast) -> None:
    """As chat encoding asks for it; otherwise a mark is one id."""
    for mark in tokenizer.SPECIAL:
        assert len(built.encode(mark)) == 1
        apart = built(mark, split_special_tokens=True)["input_ids"]
        assert not set(apart) & set(built.all_special_ids)
        assert built.decode(apart) == mark


def test_the_template_lays_turns_out_as_the_published_one(built: PreTrainedTokenizerFast) -> None:
    """White space of the content is kept, and a part of another type is refused by name."""
    turns = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": "a.png"},
                {"type": "image"},
                {"type": "text", "text": " Which?\n"},
                {"type": "video"},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "\n7"}]},
    ]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
        "<|vision_start|><|image_pad|><|vision_end|> Which?\n"
        "<|vision_start|><|video_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\n\n7<|im_end|>\n"
    )
    assert built.apply_chat_template(turns, tokenize=False) == expected
    opened = built.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert opened == expected + "<|im_start|>assistant\n"
    wrong = [{"role": "user", "content": [{"type": "audio"}]}]
    with pytest.raises(Exception, match="a part has type audio, not image, video or text"):
        built.apply_chat_template(wrong, tokenize=False)


@pytest.mark.parametrize("config", [None, {"model_type": "qwen3_vl"}])
def test_a_saved_tokenizer_is_loaded_by_anyone(
    built: PreTrainedTokenizerFast, tmp_path: Path, config: dict[str, str] | None
) -> None:
    """By `load` and by `AutoTokenizer`, alone or in the folder of a model, with the same ids."""
    built.save_pretrained(tmp_path)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    text = "<|im_start|>user\nWhich digit is this, 42?<|im_end|>\n"
    turns = [{"role": "user", "content": text}]
    for read in (
        tokenizer.load(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False),
    ):
        assert read.is_fast
        assert read.encode(text) == built.encode(text)
        assert read.get_vocab() == built.get_vocab()
        assert (read.pad_token, read.eos_token) == ("<|endoftext|>", "<|im_end|>")
        assert read.apply_chat_template(turns, tokenize=False) == built.apply_chat_template(
            turns, tokenize=False
        )


def test_code_of_a_folder_is_never_run(built: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """`auto_map` of the tokenizer is refused by name, that of the model does not concern it."""
    built.save_pretrained(tmp_path)
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n")
    auto_map = {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    config = {"model_type": "qwen3_vl", "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert tokenizer.load(tmp_path).get_vocab() == built.get_vocab()
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": auto_map}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json has auto_map"):
        tokenizer.load(tmp_path)
    assert not marker.exists()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """No name is looked up elsewhere."""
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        tokenizer.load(tmp_path)
