"""A sample of a data set: turns of text and pictures, before any token or pixel.

`mmfn.data.formats` makes samples from the rows of a file, `mmfn.data.chat` encodes them.
"""

from typing import Literal, TypeAlias

import attrs

Role: TypeAlias = Literal["system", "user", "assistant"]


@attrs.frozen
class Text:
    """Text, kept as written; nothing in it is a mark any more."""

    text: str


@attrs.frozen
class Image:
    """A picture that stands at this place."""

    source: str
    """A path, relative to the media root, or a data URL; as written in the row."""


Part: TypeAlias = Text | Image
"""What a turn is made of, in reading order."""


@attrs.frozen
class Turn:
    """What one side says.

    Raises:
        ValueError: a picture in a turn that is not the user's (the chat layout has no place for it
            and would drop it), or an answer with nothing in it (it would teach to say nothing).
    """

    role: Role
    parts: tuple[Part, ...]
    """Neighbours are never both text, and no text is empty."""

    def __attrs_post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.role != "user" and any(isinstance(part, Image) for part in self.parts):
            raise ValueError(f"an image stands in a turn of role {self.role!r}, needs 'user'")
        if self.role == "assistant" and not self.parts:
            raise ValueError("a turn of role 'assistant' is empty")


@attrs.frozen
class Sample:
    """One row of a file, understood.

    Any order of user and assistant turns is kept as it is: an answer before any question is still
    an answer, questions may follow each other or come last.

    Raises:
        ValueError: there are no turns, or a system turn is not the first.
    """

    name: str
    """The id in the row, or `where` if it has none."""
    where: str
    """File and row: `train.json[0]` counts from 0, `train.jsonl:1` is a line and counts from 1."""
    turns: tuple[Turn, ...]

    def __attrs_post_init__(self) -> None:
        """Refuse what cannot be."""
        if not self.turns:
            raise ValueError("there are no turns")
        late = [i for i, turn in enumerate(self.turns) if i and turn.role == "system"]
        if late:
            raise ValueError(f"turn {late[0]} has role 'system', which only turn 0 can have")

    @property
    def images(self) -> tuple[Image, ...]:
        """Its pictures in reading order."""
        return tuple(p for turn in self.turns for p in turn.parts if isinstance(p, Image))


class BadSample(ValueError):
    """A sample that cannot be used: its name, where it is, and why."""

    def __init__(self, name: str, where: str, cause: str) -> None:
        """Hold the parts of the message."""
        super().__init__(name, where, cause)  # All three, so that a worker process can send it.
        self.name, self.where, self.cause = name, where, cause

    def __str__(self) -> str:
        """Name the row and the cause."""
        place = self.where if self.name == self.where else f"{self.where}, id {self.name!r}"
        return f"{place}: {self.cause}"


class TooLong(BadSample):
    """A sample of more tokens than a row may have."""


def join(parts: list[Part]) -> tuple[Part, ...]:
    """Put neighbouring texts together, so that they are encoded in one piece, and drop empty ones.

    >>> join([Text("a"), Text(""), Text("b"), Image("x.png")])
    (Text(text='ab'), Image(source='x.png'))
    """
    joined: list[Part] = []
    for part in parts:
        if isinstance(part, Text) and joined and isinstance(joined[-1], Text):
            joined[-1] = Text(joined[-1].text + part.text)
        elif not isinstance(part, Text) or part.text:
            joined.append(part)
    return tuple(joined)
