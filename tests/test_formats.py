"""Rows of a file become samples, or are refused by name."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmfn.data import formats
from mmfn.data.sample import BadSample, Image, Sample, Text, TooLong, Turn

CASES = Path(__file__).parent / "data" / "cases"


def row(*said: Any, **keys: Any) -> dict[str, Any]:
    """A row whose turns are the user's and the assistant's in turns."""
    roles = ("user", "assistant") * len(said)
    turns = [{"role": r, "content": c} for r, c in zip(roles, said, strict=False)]
    return {"id": "r", "messages": turns, **keys}


def parse(*said: Any, **keys: Any) -> Sample:
    """Understand a row made by `row`."""
    return formats.parse(row(*said, **keys), "t.json[0]")


def sources(sample: Sample) -> list[str]:
    """List the sources of the pictures of a sample."""
    return [image.source for image in sample.images]


def test_a_string_is_one_image_a_list_is_many_and_none_is_none() -> None:
    """And the newline after a mark belongs to the text."""
    first, second, third = formats.read(CASES / "d01_llava_str_image.json")
    assert sources(first) == ["a64.png"]
    assert sources(second) == ["a64.png", "b96x64.png"]
    assert sources(third) == []
    assert first.turns[0].parts == (Image("a64.png"), Text("\nWhat is it?"))


def test_counts_of_marks_and_images_have_to_agree() -> None:
    """The message names the file, the row, the id and both counts."""
    samples = formats.read(CASES / "d02_counts.json")
    assert sources(samples[0]) == ["a64.png"]
    expected = {
        1: "too_many_placeholders.*2 marks / 1 image",
        2: "too_few_placeholders.*1 mark / 2 images",
        3: "no_placeholder.*0 marks / 1 image",
        4: "placeholder_no_image.*1 mark / 0 images",
    }
    for index, message in expected.items():
        with pytest.raises(BadSample, match=rf"d02_counts.json\[{index}\], id '{message}"):
            samples[index]


@pytest.mark.parametrize("order", [range(6), (3, 0, 5, 2, 4, 1)])
def test_each_row_is_understood_by_its_own_keys(order: Any, tmp_path: Path) -> None:
    """Strings, lists and nulls, both spellings of turns, in any order of rows."""
    lines = (CASES / "d04_mixed_schema.jsonl").read_text().splitlines()
    path = tmp_path / "shuffled.jsonl"
    path.write_text("\n".join(lines[i] for i in order))
    samples = formats.read(path)
    assert [len(sample.images) for sample in samples] == [[1, 1, 0, 0, 1, 1][i] for i in order]
    assert [s.turns[-1].parts for s in samples] == [(Text(f"A{i}"),) for i in order]
    assert [sample.name for sample in samples] == [str(i) for i in order]
    assert samples[2].where == "shuffled.jsonl:3"


def test_a_bare_image_part_takes_the_image_at_top_level() -> None:
    """A row without an id is named by its place."""
    (sample,) = formats.read(CASES / "d05_bare_placeholder.json")
    assert sample.turns[0].parts == (Image("a64.png"), Text("Read it."))
    assert sample.name == sample.where == "d05_bare_placeholder.json[0]"


def test_images_inside_and_at_top_level_are_refused() -> None:
    """And so is a bare part with no image at top level."""
    content = [{"type": "image", "image": "b.png"}, {"type": "text", "text": "Q"}]
    with pytest.raises(BadSample, match="1 image at top level and 1 inside turns"):
        parse(content, "A", image="a.png")
    with pytest.raises(BadSample, match="'r': 1 mark / 0 images"):
        parse([{"type": "image"}, {"type": "text", "text": "Q"}], "A")


def test_text_that_looks_like_a_mark_is_text_where_no_image_is_declared() -> None:
    """In a row without images, in the text of a part, and where it spells a special token."""
    html, literal = formats.read(CASES / "d06_literal_tokens.json")
    said = "Explain the SVG tag <image> and the marker <video>."
    assert html.turns[0].parts == (Text(said),)
    assert html.turns[1].parts == (Text("An <image> element embeds a raster."),)
    assert literal.turns[0].parts == (
        Image("a64.png"),
        Text("\nSay the string <|image_pad|> back."),
    )
    listed = [{"type": "image"}, {"type": "text", "text": "Is <image> a tag?"}]
    assert parse(listed, "A", image="a.png").turns[0].parts[1] == Text("Is <image> a tag?")


@pytest.mark.parametrize(
    "text",
    [
        "<image>\nQ",
        "Q\n<image>",
        "<image><image>\nQ",
        " <image> \n<image>\nQ",
        "<image>",
        "<video>\nQ",
    ],
)
def test_a_line_of_marks_without_media_is_a_lost_picture(text: str) -> None:
    """At either end of what a user says, also beside a picture inside the turn."""
    inside = [{"type": "image", "image": "a.png"}, {"type": "text", "text": text}]
    for content in (text, inside):
        with pytest.raises(BadSample, match=r"turn 0 has \d marks? / 0 (image|video)s"):
            parse(content, "A")
    assert parse("Q", text).turns[1].parts == (Text(text),)  # An answer may well say so.


def test_the_k_th_mark_in_reading_order_is_the_k_th_image() -> None:
    """Over two turns, with the text around each mark kept."""
    (sample,) = formats.read(CASES / "d10_interleaved.json")
    assert sample.turns[0].parts == (Text("First "), Image("a64.png"), Text(" then"))
    assert sample.turns[2].parts == (
        Text("Before "),
        Image("b96x64.png"),
        Text(" middle "),
        Image("c432x400.png"),
        Text(" after"),
    )


def test_roles_come_from_their_field_and_never_from_parity() -> None:
    """Each odd order has one outcome: kept as it is, or refused with the id."""
    samples = formats.read(CASES / "d11_bad_roles.json")

    def roles(index: int) -> list[str]:
        return [turn.role for turn in samples[index].turns]

    assert roles(0) == ["assistant", "user", "assistant"]
    assert roles(1) == ["user", "user", "assistant"]
    assert roles(2) == ["user", "assistant", "user"]
    assert roles(6) == ["system", "user", "assistant"]
    with pytest.raises(BadSample, match="'null_value': turn 1 has neither 'value' nor 'content'"):
        samples[3]
    with pytest.raises(BadSample, match="'empty': 'conversations' is empty"):
        samples[4]
    with pytest.raises(BadSample, match="'unknown_role': turn 0 has role 'robot'"):
        samples[5]


TEXT = {"type": "text", "text": "Q"}
IMAGE = (Image("a.png"), Text("Q"))


@pytest.mark.parametrize(
    ("content", "keys", "parts"),
    [
        ([{"type": "image", "image": "a.png"}, TEXT], {}, IMAGE),
        ([{"type": "image", "path": "a.png"}, TEXT], {}, IMAGE),
        ([{"type": "image", "url": "a.png"}, TEXT], {}, IMAGE),
        ([{"type": "image_url", "image_url": "a.png"}, TEXT], {}, IMAGE),
        ([{"type": "image_url", "image_url": {"url": "a.png"}}, TEXT], {}, IMAGE),
        ([{"image_url": {"url": "a.png", "detail": "auto"}}, {"text": "Q"}], {}, IMAGE),
        ([{"type": "image", "image": "a.png", "text": None}, "Q"], {}, IMAGE),
        ([{"type": "image"}, TEXT | {"image": None}], {"images": ["a.png"], "image": []}, IMAGE),
        ("<image>Q", {"images": {"path": "a.png", "bytes": None}}, IMAGE),
        ("<image>Q", {"image": None, "images": [{"url": "a.png"}]}, IMAGE),
        ({"type": "text", "text": "Q"}, {}, (Text("Q"),)),
        (["a", {"type": "text", "text": "b"}, TEXT], {"images": []}, (Text("abQ"),)),
        ("ü 漢字 \u2028 \U0001f600\r\n", {}, (Text("ü 漢字 \u2028 \U0001f600\r\n"),)),
        ("", {}, ()),
        ([], {}, ()),
    ],
)
def test_content_of_every_known_shape_is_understood(content: Any, keys: Any, parts: Any) -> None:
    """Nulls count as absent; neighbouring texts are joined, and kept to the character."""
    assert parse(content, "A", **keys).turns == (
        Turn("user", parts),
        Turn("assistant", (Text("A"),)),
    )


@pytest.mark.parametrize(
    ("content", "keys", "message"),
    [
        ([{"type": "video", "video": "v.mp4"}], {}, "turn 0, part 0 has type 'video'"),
        ([{"type": "image", "image": "a.png", "nframs": 3}], {}, "'image' has 'nframs'"),
        ([{"type": "image", "image": "a.png", "max_pixels": 9}], {}, "'image' has 'max_pixels'"),
        ([{"type": "image", "image": "a.png", "url": "b.png"}], {}, r"has \['image', 'url'\]"),
        ([{"type": "text"}], {}, r"of type 'text' has \[\], needs one of"),
        ([{"type": "text", "text": ["Q"]}], {}, "the text of turn 0, part 0 is a list"),
        ([{"type": "text", "content": "Q"}], {}, "'text' has 'content', which is not"),
        ([{"type": "image_url"}], {}, "of type 'image_url' has"),
        ([{"type": "image_url", "image_url": {"url": "a", "detail": "low"}}], {}, "'detail'"),
        ([{"type": "image", "image": ""}], {}, "'image' holds empty"),
        ([["Q"]], {}, "turn 0, part 0 is a list"),
        ([{"type": ["text"], "text": "Q"}], {}, r"has type \['text'\]"),
        (3, {}, "the content of turn 0 is 3, needs text"),
        ("Q", {"video": "v.mp4"}, "the row has 'video', which is not supported"),
        ("Q", {"videos": ["v.mp4"]}, "the row has 'videos'"),
        ("Q", {"audio": "a.wav"}, "the row has 'audio'"),
        ("Q", {"image_url": "a.png"}, "the row has 'image_url'"),
        ("Q", {"tools": [{"name": "f"}]}, "the row has 'tools'"),
        ("<image>", {"image": "a.png", "images": ["a.png"]}, "both 'image' and 'images'"),
        ("<image>", {"image": [["a.png"]]}, "'image' holds a list"),
        ("<image>", {"images": [None]}, "'images' holds null"),
        ("<image>", {"image": 7}, "'image' holds 7"),
        ("<image>", {"image": {"bytes": "xx"}}, r"an object with \['bytes'\]"),
        ("Q", {"conversations": []}, "both 'conversations' and 'messages'"),
        ("Q", {"messages": None}, "neither 'conversations' nor 'messages'"),
        ("Q", {"messages": "Q"}, "'messages' is a string"),
        ("Q", {"messages": ["Q"]}, "turn 0 is a string"),
        ("Q", {"system": 3}, "'system' is 3"),
        ("half \ud800", {}, r"turn 0 has half a surrogate pair, U\+D800"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(content: Any, keys: Any, message: str) -> None:
    """The message begins with the file, the row and the id."""
    with pytest.raises(BadSample, match=message) as caught:
        parse(content, "A", **keys)
    assert str(caught.value).startswith("t.json[0], id 'r': ")


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"role": "user"}, "turn 2 has neither 'value' nor 'content'"),
        ({"role": "user", "from": "human", "value": "Q"}, "has both 'from' and 'role'"),
        ({"role": "user", "value": "Q", "content": "Q"}, "has both 'value' and 'content'"),
        ({"role": "user", "content": "Q", "weight": 0}, "turn 2 has 'weight'"),
        ({"role": "assistant", "content": "A", "tool_calls": [{}]}, "turn 2 has 'tool_calls'"),
        ({"role": "tool", "content": "3"}, "turn 2 has role 'tool'; there are system, user, human"),
        ({"role": ["user"], "content": "Q"}, r"turn 2 has role \['user'\]"),
        ({"role": "system", "content": "S"}, "turn 2 has role 'system', which only turn 0 can"),
        ({"role": "assistant", "content": ""}, "turn 2: a turn of role 'assistant' is empty"),
        (
            {"role": "assistant", "content": [{"type": "image", "image": "a.png"}]},
            "turn 2: an image stands in a turn of role 'assistant'",
        ),
    ],
)
def test_a_turn_that_is_not_understood_is_refused_by_its_index(turn: Any, message: str) -> None:
    """Missing, doubled and unknown keys, roles, and answers with nothing or a picture in them."""
    with pytest.raises(BadSample, match=message):
        formats.parse({"id": "r", "messages": [*row("Q", "A")["messages"], turn]}, "t.json[0]")


def test_the_system_text_of_a_row_is_its_first_turn() -> None:
    """An empty one is none, and a second one is refused."""
    assert parse("Q", "A", system="S").turns[0] == Turn("system", (Text("S"),))
    assert parse("Q", "A", system="").turns == parse("Q", "A", system=None).turns
    with pytest.raises(BadSample, match="turn 1 has role 'system'"):
        formats.parse({"system": "S", "messages": [{"role": "system", "content": "T"}]}, "t:1")


def test_notes_of_the_author_change_nothing() -> None:
    """Keys at top level that name no media."""
    assert parse("Q", "A", source="web", width=3, image_id=7) == parse("Q", "A")


@pytest.mark.parametrize("name", [True, [1], {"a": 1}])
def test_an_id_that_is_no_name_is_refused(name: Any) -> None:
    """Numbers are names, and the empty string is none."""
    with pytest.raises(BadSample, match=r"t.json\[0\]: the id is"):
        formats.parse(row("Q", "A", id=name), "t.json[0]")
    assert formats.parse(row("Q", "A", id=""), "t.json[0]").name == "t.json[0]"
    assert formats.parse(row("Q", "A", id=0), "t.json[0]").name == "0"


def test_a_broken_line_is_named_by_its_number_and_spares_the_others(tmp_path: Path) -> None:
    """With a byte order mark, blank lines and both line ends."""
    path = tmp_path / "t.JSONL"
    good = json.dumps(row("ü\u2028", "A"), ensure_ascii=False).encode()
    bad = [b'{"id": 3,', b'{"id": "\xff"}', b"[]", b"[" * 100_000]
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join([good, b"  ", *bad, b"", good + b"\r"]))
    samples = formats.read(path)
    assert len(samples) == 6
    assert samples[0].turns == samples[-1].turns == parse("ü\u2028", "A").turns
    for index, message in enumerate(
        ["3: the line is not JSON", "4: .*utf-8", "5: .*empty", "6: "], 1
    ):
        with pytest.raises(BadSample, match=f"t.JSONL:{message}"):
            samples[index]
    with pytest.raises(IndexError):
        samples[6]


def test_a_file_that_is_no_list_of_rows_is_refused_by_name(tmp_path: Path) -> None:
    """A row that is no object is refused only when it is asked for."""
    for name, content, message in [
        ("a.json", b"{}", "a.json holds empty, needs a list of rows"),
        ("b.json", b"[1,", "b.json is not JSON"),
        ("c.json", b"\xff\xff", "c.json is not JSON"),
        ("d.parquet", b"", "d.parquet ends in '.parquet', needs '.json' or '.jsonl'"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            formats.read(tmp_path / name)
    with pytest.raises(ValueError, match=r"e.json is not a file"):
        formats.read(tmp_path / "e.json")
    (tmp_path / "f.json").write_text(json.dumps([row("Q", "A"), 3]))
    with pytest.raises(BadSample, match=r"f.json\[1\]: the row is 3, needs an object"):
        formats.read(tmp_path / "f.json")[-1]


def test_an_empty_file_has_no_samples(tmp_path: Path) -> None:
    """Of both kinds."""
    (tmp_path / "a.jsonl").write_text("\n")
    (tmp_path / "b.json").write_text("[]")
    assert len(formats.read(tmp_path / "a.jsonl")) == len(formats.read(tmp_path / "b.json")) == 0


def test_samples_and_errors_travel_to_and_from_other_processes() -> None:
    """As a loader with workers sends them."""
    samples = pickle.loads(pickle.dumps(formats.read(CASES / "d04_mixed_schema.jsonl")))
    assert samples[-2:] == [samples[4], samples[5]]
    assert list(samples) == list(formats.read(CASES / "d04_mixed_schema.jsonl"))
    error = pickle.loads(pickle.dumps(TooLong("s", "f.json[0]", "why")))
    assert isinstance(error, TooLong)
    assert str(error) == "f.json[0], id 's': why"


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.sampled_from(["<image>", "<image>Q"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "image", "image_url", "url", "path"]),
            inner | st.sampled_from(["text", "image", "image_url"]),
            max_size=3,
        )
    ),
    max_leaves=8,
)
TURN = st.fixed_dictionaries({"role": st.sampled_from(["user", "gpt"]), "content": JSON})


@given(
    st.dictionaries(st.sampled_from(["id", "image", "images", "system"]), JSON, max_size=2),
    st.lists(TURN, max_size=3) | JSON,
)
def test_any_row_is_understood_or_refused(keys: dict[str, Any], said: Any) -> None:
    """Never another error, and never a picture more or less than declared."""
    try:
        sample = formats.parse({**keys, "messages": said}, "t:1")
    except BadSample:
        return
    declared = keys.get("image") or keys.get("images") or []
    if declared:
        assert len(sample.images) == (len(declared) if isinstance(declared, list) else 1)
