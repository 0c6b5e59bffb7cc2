"""Command lines: a config class as flags and a help page, with a file of values below them.

`row_tokens` of the group `data` is the flag `--data.row-tokens`; a bool is `--run.resume` or
`--run.no-resume`; a tuple takes its items as words. The default of a flag is that of its class, its
help the string below the field. `--config FILE` gives values in JSON or YAML, named as
`mmfn.config` says, and flags win over it.

YAML is read as version 1.2 has it, without tags and aliases: `1e-5` is a number, `no` is a word,
`010` is ten.
"""

import inspect
import json
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import attrs
import tyro
import yaml

from mmfn import config
from mmfn.config import Field

Config = TypeVar("Config")

INT = re.compile(r"[-+]?[0-9]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
"""Numbers as YAML 1.2.2 writes them (section 10.3.2), but for those that are not finite: they stay
words, which no field for a number takes."""


def parse(
    config_class: type[Config], argv: Sequence[str], *, prog: str, description: str
) -> Config:
    """Make a config from the words of a command line, or end the program.

    `-h` or `--help` prints a page and exits with 0. What cannot be used goes to stderr, a line for
    each problem, and exits with 2.
    """
    if {"-h", "--help"} & set(argv):
        _help(config_class, prog, description)
    try:
        return read(config_class, argv)
    except ValueError as error:
        for line in (*str(error).splitlines(), "--help lists all flags"):
            print(f"{prog}: {line}", file=sys.stderr)
        raise SystemExit(2) from None


def read(config_class: type[Config], argv: Sequence[str]) -> Config:
    """Make a config from the words of a command line.

    Raises:
        ValueError: a flag or a key of the file is unknown (with the nearest right one), given
            twice, missing or of another type, or the file cannot be read: a line for each problem.
    """
    known = config.fields(config_class)
    allowed = {"config": Field(Path, None), **known}
    flags, problems = config.check(_flags(argv, known), allowed, from_words, where="--", show=_flag)
    path = flags.pop("config", None)
    values: dict[str, Any] = {}
    if path is not None:
        try:
            given = config.flatten(load(path), known)
        except ValueError as error:
            # What else is missing cannot be said without the file.
            raise ValueError("\n".join([*problems, str(error)])) from error
        values, wrong = config.check(given, known, config.convert, where=f"{path}: ")
        problems += wrong
    return config.build(config_class, values | flags, problems, show=_flag)


def load(path: Path) -> dict[str, Any]:
    """Read the values of a `.json`, `.yaml` or `.yml` file. Nothing in it makes an object.

    Raises:
        ValueError: it is missing, of another kind, malformed, holds a key twice, or is no mapping.
    """
    suffix = path.suffix.lower()
    if suffix not in (".json", ".yaml", ".yml"):
        raise ValueError(f"{path} ends in {path.suffix!r}, needs '.json', '.yaml' or '.yml'")
    try:
        text = path.read_text("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_once) if suffix == ".json" else _yaml(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        cause = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read: {cause}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {json.dumps(value)[:80]}, needs names with values")
    return value


def from_words(kind: Any, words: bool | str | list[str]) -> Any:
    """Take what stands after a flag as a value of type `kind`: a word, none or several, or a bool.

    Raises:
        ValueError: it is none; says what is needed.
    """
    inner, optional = config.unwrap(kind)
    if inner is bool and not optional:
        if isinstance(words, bool):
            return words
        raise ValueError("needs no value: alone it is true, with no- before its name false")
    if words == "None" and optional:
        return None
    if typing.get_origin(inner) is tuple:
        listed = [words] if isinstance(words, str) else words if isinstance(words, list) else []
        kinds = config.items(inner, len(listed))
        return config.convert(kind, [_word(*pair) for pair in zip(kinds, listed, strict=False)])
    return config.convert(kind, _word(inner, words) if isinstance(words, str) else [])


def _word(kind: Any, word: str) -> Any:
    if kind in (int, float):
        return _number(word)
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else (True, False)
    return {str(choice): choice for choice in choices}.get(word, word)


def _flags(argv: Sequence[str], known: Mapping[str, Field]) -> Iterator[tuple[str, Any]]:
    """Yield the names of flags, as written, and the words after them."""
    given: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            flag, equals, first = word[2:].partition("=")
            given.append((flag, [first] if equals else []))
        elif not given:
            raise ValueError(f"{word!r} stands before any flag")
        elif re.match("-[A-Za-z]", word):
            raise ValueError(
                f"{word!r} is no flag; flags begin with --, and --{given[-1][0]}={word} is a value"
            )
        else:
            given[-1][1].append(word)
    for flag, words in given:
        name = flag.replace("-", "_")
        positive = re.sub(r"(^|\.)no_([^.]*)$", r"\1\2", name)
        switch = name not in known and positive in known and known[positive].kind is bool
        value: bool | str | list[str] = words[0] if len(words) == 1 else words
        if not words and (switch or (name in known and known[name].kind is bool)):
            value = not switch
        yield positive if switch else flag, value


def _number(text: str) -> int | float | str:
    """Read a number, and leave any other text as it is."""
    if INT.fullmatch(text):
        return int(text)
    return float(text) if FLOAT.fullmatch(text) else text


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} is given twice")
    return values


def _yaml(text: str) -> Any:
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
            raise ValueError(f"{_line(event.start_mark)} has a tag or an alias")
    return _node(yaml.compose(text, Loader=yaml.SafeLoader))


def _node(node: yaml.Node | None) -> Any:
    """Read a node by its text: what the older version makes of it is not asked."""
    match node:
        case yaml.MappingNode(value=pairs):
            return _once([(_key(key), _node(value)) for key, value in pairs])
        case yaml.SequenceNode(value=values):
            return [_node(value) for value in values]
        case yaml.ScalarNode(value=text, style=None):
            words = {"true": True, "false": False, "null": None, "~": None, "": None}
            same = text in (text.lower(), text.upper(), text.capitalize())
            return words[text.lower()] if same and text.lower() in words else _number(text)
        case yaml.ScalarNode(value=text):
            return text
    return None


def _key(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"{_line(node.start_mark)} has a name that is no word")
    return str(node.value)


def _line(mark: Any) -> str:
    return f"line {mark.line + 1}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _help(config_class: type[Any], prog: str, description: str) -> NoReturn:
    about = "JSON or YAML file with values, nested as the groups are; flags win over it."
    file = tyro.conf.arg(metavar="FILE", help=about, help_behavior_hint="(optional)")
    config_kind: Any = Annotated[config_class, tyro.conf.arg(name="")]
    file_kind: Any = Annotated[Path | None, file]
    page = attrs.make_class(
        "Page",
        {
            "values": attrs.field(type=config_kind),
            "config": attrs.field(type=file_kind, default=None),
        },
    )
    # The page would join the lines of a paragraph to one, however long.
    width = min(shutil.get_terminal_size().columns, 100)
    for paragraph in inspect.cleandoc(description).split("\n\n"):
        print(textwrap.fill(paragraph, width), end="\n\n")
    tyro.cli(page, prog=prog, description="", args=["--help"])
    raise SystemExit(0)
