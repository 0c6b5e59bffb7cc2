"""From the rows of a JSON or JSONL file to samples.

A row holds its turns in `conversations` or `messages`, and each turn its role in `from` or `role`
and its content in `value` or `content`; the two spellings mix freely, row by row. A key that is
null counts as absent, everywhere.

Content is a string or a list of parts. In a row with pictures at top level (`image` or `images`: a
string or a list), each `<image>` in a string and each part `{"type": "image"}` without a source is
a mark, and the k-th mark in reading order is the k-th picture; the counts have to agree. In any
other row, and in the text of a part, `<image>` is text. Because a lost picture must not go
unnoticed, one case of it is refused: a user's text that begins or ends with a line of nothing but
marks, which is how such files write a picture.

Text is kept as written: the newline after a mark belongs to the text. A row that is not understood
is refused whole, by `BadSample`, never repaired.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, overload

import attrs
import numpy as np
from jaxtyping import Int

from mmfn.data.sample import BadSample, Image, Part, Role, Sample, Text, Turn, join

ROLES: Mapping[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
"""Roles as written; the place of a turn never decides."""

REFUSED = (
    *("video", "videos", "audio", "audios", "image_url", "image_urls", "image_path"),
    *("image_paths", "image_file", "image_files", "img", "imgs", "picture", "pictures"),
    *("tools", "functions", "chosen", "rejected"),
)
"""Keys of a row that would change what is trained on, and that nothing here reads. Other unknown
keys of a row are notes of its author and change nothing."""

TURN_KEYS = {"from", "role", "value", "content", "id", "name"}

STALE = re.compile(
    r"\A\s*((<(?:image|video|audio)>[^\S\n]*)+)(?:\n|\Z)"
    r"|(?:\A|\n)[^\S\n]*((<(?:image|video|audio)>[^\S\n]*)+)\s*\Z"
)
"""A first or last line of nothing but marks."""


@attrs.frozen
class Mark:
    """A place for the next picture of the row."""


Piece: TypeAlias = Text | Image | Mark


@attrs.frozen(eq=False)
class Samples(Sequence):  # Without its type: a check of one would read a row.
    """The samples of a file, each understood when it is asked for.

    `rows[i]` raises `BadSample` for a row that is not understood, and only for that one.
    """

    path: Path
    held: tuple[Any, ...] | None
    """The rows of a JSON file."""
    lines: Int[np.ndarray, "rows 2"]
    """For a JSONL file the number of each line, from 1, and its offset in bytes."""

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.lines) if self.held is None else len(self.held)

    def where(self, index: int) -> str:
        """Name a row in messages, as in `Sample.where`."""
        index = range(len(self))[index]
        name = self.path.name
        return f"{name}[{index}]" if self.held is not None else f"{name}:{self.lines[index, 0]}"

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        """Understand one row, or those of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        where = self.where(index)
        if self.held is not None:
            return parse(self.held[index], where)
        with self.path.open("rb") as file:
            file.seek(self.lines[index, 1])
            line = file.readline()
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise BadSample(where, where, f"the line is not JSON: {error}") from error
        return parse(row, where)


def read(path: Path | str) -> Samples:
    """Open a `.json` file (a list of rows) or a `.jsonl` file (a row a line; blank ones count not).

    Of a JSONL file only the offsets of the lines are held.

    Raises:
        ValueError: the file is missing or of another kind, is not JSON, or is not a list.
    """
    path = Path(path)
    if path.suffix.lower() not in (".json", ".jsonl"):
        raise ValueError(f"{path} ends in {path.suffix!r}, needs '.json' or '.jsonl'")
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    none = np.zeros((0, 2), dtype=np.int64)
    if path.suffix.lower() == ".jsonl":
        found = np.array(list(_lines(path)), dtype=np.int64)
        return Samples(path, None, found.reshape(-1, 2))
    try:
        rows = json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds {_kind(rows)}, needs a list of rows")
    return Samples(path, tuple(rows), none)


def _lines(path: Path) -> Iterator[tuple[int, int]]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            mark = 3 if number == 1 and line.startswith(b"\xef\xbb\xbf") else 0
            if line[mark:].strip():
                yield number, offset + mark
            offset += len(line)


def parse(row: Any, where: str) -> Sample:
    """Understand one row.

    Raises:
        BadSample: it is not understood; says why, with its id and `where`.
    """
    if not isinstance(row, Mapping):
        raise BadSample(where, where, f"the row is {_kind(row)}, needs an object")
    name = row.get("id")
    if name is None or name == "":
        name = where
    if isinstance(name, bool) or not isinstance(name, str | int | float):
        raise BadSample(where, where, f"the id is {_kind(name)}, needs a string or a number")
    try:
        return Sample(str(name), where, tuple(_turns(_present(row))))
    except ValueError as error:
        raise BadSample(str(name), where, str(error)) from error


def _turns(row: dict[str, Any]) -> list[Turn]:
    if refused := [key for key in REFUSED if row.get(key)]:
        raise ValueError(f"the row has {refused[0]!r}, which is not supported")
    if row.get("weight", 1) != 1:
        raise ValueError(f"the row has weight {row['weight']!r}; every sample counts as one")
    images = _images(row)
    said = [_turn(entry, index, marked=bool(images)) for index, entry in enumerate(_entries(row))]
    pieces = [piece for _, content in said for piece in content]
    inside = sum(isinstance(piece, Image) for piece in pieces)
    if images and inside:
        raise ValueError(f"{_count(len(images), 'image')} at top level and {inside} inside turns")
    marks = sum(isinstance(piece, Mark) for piece in pieces)
    if marks != len(images):
        raise ValueError(f"{_count(marks, 'mark')} / {_count(len(images), 'image')}")

    rest = iter(images)
    turns = []
    for index, (role, content) in enumerate(said):
        parts: list[Part] = [next(rest) if isinstance(p, Mark) else p for p in content]
        try:
            turns.append(Turn(role, join(parts)))
        except ValueError as error:
            raise ValueError(f"turn {index}: {error}") from error
    return turns


def _entries(row: dict[str, Any]) -> list[Any]:
    """List the turns as written, with the system text of the row as the first."""
    keys = [key for key in ("conversations", "messages") if key in row]
    if len(keys) != 1:
        found = (
            "both 'conversations' and" if keys else f"{sorted(row)}, neither 'conversations' nor"
        )
        raise ValueError(f"the row has {found} 'messages'")
    entries = row[keys[0]]
    if not isinstance(entries, list) or not entries:
        needs = "a list of at least one turn"
        raise ValueError(f"{keys[0]!r} is {_kind(entries)}, needs {needs}")
    system = row.get("system", "")
    if not isinstance(system, str):
        raise ValueError(f"'system' is {_kind(system)}, needs a string")
    return [{"role": "system", "content": system}, *entries] if system else entries


def _images(row: dict[str, Any]) -> list[Image]:
    """List the pictures at top level."""
    found = {key: row[key] for key in ("image", "images") if row.get(key, []) != []}
    if len(found) == 2:
        raise ValueError("the row has both 'image' and 'images'")
    return [
        _source(value, key)
        for key, entry in found.items()
        for value in (entry if isinstance(entry, list) else [entry])
    ]


def _source(value: Any, key: str) -> Image:
    """Read a source: a string, or an object with it under `path` or `url`."""
    if isinstance(value, Mapping):
        entry = _present(value)
        if entry.get("detail") == "auto":  # What is done anyway; any other wish would be lost.
            del entry["detail"]
        names = sorted(entry)
        if names not in (["path"], ["url"]):
            raise ValueError(f"{key!r} is an object with {names}, needs one of 'path' and 'url'")
        value = entry[names[0]]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key!r} holds {_kind(value)}, needs a path or a data URL")
    return Image(value)


def _turn(entry: Any, index: int, marked: bool) -> tuple[Role, list[Piece]]:
    if not isinstance(entry, Mapping):
        raise ValueError(f"turn {index} is {_kind(entry)}, needs an object")
    entry = _present(entry)
    if unknown := sorted(entry.keys() - TURN_KEYS):
        raise ValueError(f"turn {index} has {unknown[0]!r}; there are {sorted(TURN_KEYS)}")
    said = _one(entry, ("from", "role"), index)
    if not isinstance(said, str) or said not in ROLES:
        raise ValueError(f"turn {index} has role {said!r}; there are {', '.join(ROLES)}")
    role = ROLES[said]
    content = _one(entry, ("value", "content"), index)
    pieces = list(_pieces(content, index, marked))
    for piece in pieces:
        if isinstance(piece, Text):
            _check_text(piece.text, f"turn {index}")
            if role == "user" and (stale := STALE.search(piece.text)):
                marks = (stale[1] or stale[3]).split(">")[:-1]
                kind = marks[0].strip().removeprefix("<")
                raise ValueError(
                    f"turn {index} has {_count(len(marks), 'mark')} / 0 {kind}s to stand there"
                )
    return role, pieces


def _pieces(content: Any, index: int, marked: bool) -> Iterator[Piece]:
    match content:
        case str() if marked:
            first, *rest = content.split("<image>")
            yield Text(first)
            for text in rest:
                yield Mark()
                yield Text(text)
        case str():
            yield Text(content)
        case list():
            for number, part in enumerate(content):
                yield _part(part, f"turn {index}, part {number}")
        case Mapping():
            yield _part(content, f"turn {index}")
        case _:
            raise ValueError(f"the content of turn {index} is {_kind(content)}, needs text")


def _part(part: Any, place: str) -> Piece:
    if isinstance(part, str):
        return Text(part)
    if not isinstance(part, Mapping):
        raise ValueError(f"{place} is {_kind(part)}, needs text or an object")
    entry = _present(part)
    kinds = {"text": ("text",), "image": ("image", "path", "url"), "image_url": ("image_url",)}
    kind = entry.pop("type", None)
    if kind is None:
        kind = next((name for name in kinds if name in entry), None)
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{place} has type {kind!r}; there are {', '.join(kinds)}")
    names = sorted(entry)
    if unknown := [name for name in names if name not in kinds[kind]]:
        raise ValueError(f"{place} of type {kind!r} has {unknown[0]!r}, which is not supported")
    if not names and kind == "image":
        return Mark()
    if len(names) != 1:
        raise ValueError(f"{place} of type {kind!r} has {names}, needs one of {kinds[kind]}")
    value = entry[names[0]]
    if kind != "text":
        return _source(value, names[0])
    if not isinstance(value, str):
        raise ValueError(f"the text of {place} is {_kind(value)}, needs a string")
    return Text(value)


def _one(entry: dict[str, Any], names: tuple[str, str], index: int) -> Any:
    found = [name for name in names if name in entry]
    if len(found) != 1:
        first, second = names
        has = f"both {first!r} and {second!r}" if found else f"neither {first!r} nor {second!r}"
        raise ValueError(f"turn {index} has {has}")
    return entry[found[0]]


def _check_text(text: str, place: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"half a surrogate pair, U+{ord(text[error.start]):04X}"
        raise ValueError(f"the text of {place} has {found}, which is no character") from error


def _present(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if value is not None}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _kind(value: Any) -> str:
    """Name what JSON holds here."""
    match value:
        case None:
            return "null"
        case bool() | int() | float():
            return f"{value!r}"
        case str() | list() | Mapping() if not value:
            return "empty"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"
