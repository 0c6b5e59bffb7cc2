"""Configs: trees of frozen attrs classes, made of named values and back.

A field of a class is a group (another such class) or holds a bool, int, float, str, path, enum or
`Literal`, a tuple of these, or one of all these or `None`. A value is named by its dotted path,
`optimizer.lr`; where it is given, groups may be nested or dotted, and `-` in a name is `_`.

What is unknown, given twice, missing or of another type is an error with the names and the values,
all of them at once. Nothing is converted but an int where a float is needed.
"""

import difflib
import enum
import json
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs

Config = TypeVar("Config")

OTHER_NAMES: Mapping[str, str] = {
    "batch_size": "rows",
    "cutoff_len": "max_tokens",
    "eval_steps": "eval_every",
    "grad_accum": "accumulate",
    "gradient_accumulation_steps": "accumulate",
    "learning_rate": "lr",
    "max_length": "max_tokens",
    "max_steps": "steps",
    "model_max_length": "max_tokens",
    "model_name_or_path": "path",
    "num_train_epochs": "epochs",
    "output_dir": "out",
    "per_device_train_batch_size": "rows",
    "resume_from_checkpoint": "resume",
    "seq_len": "row_tokens",
    "wd": "weight_decay",
}
"""What other trainers call a value. Never accepted, only answered with the name that there is."""


@attrs.frozen
class Field:
    """A value of a config that is no group."""

    kind: Any
    """Its type, as annotated."""
    default: Any = attrs.NOTHING
    """`attrs.NOTHING` where a value has to be given."""


def fields(config_class: type[Any]) -> dict[str, Field]:
    """List the values of a config by their dotted names, in the order of the classes.

    Raises:
        TypeError: a field has a type that a config cannot hold.
    """
    return dict(_fields(config_class, "", attrs.NOTHING))


def to_dict(config: Any) -> dict[str, Any]:
    """Write a config as JSON has it: groups are objects, tuples lists, paths and enums strings."""
    return {field.name: _plain(getattr(config, field.name)) for field in attrs.fields(type(config))}


def from_dict(
    config_class: type[Config], values: Mapping[str, Any], where: str = "config"
) -> Config:
    """Make a config of what `to_dict` gives; what is absent has its default.

    Raises:
        ValueError: a name is unknown, given twice or missing, or a value is of another type; a line
            for each, which begins with `where`.
    """
    known = fields(config_class)
    found, problems = check(flatten(values, known), known, convert, where=f"{where}: ")
    return build(config_class, found, problems, show=lambda name: f"{where}: {name}")


def flatten(
    values: Mapping[str, Any], known: Mapping[str, Field], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted names, as written, and the values of nested mappings."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        group = bool(value) or name.replace("-", "_") in _groups(known)
        if isinstance(value, Mapping) and group and name.replace("-", "_") not in known:
            yield from flatten(value, known, f"{name}.")
        else:
            yield name, value


def check(
    given: Iterable[tuple[str, Any]],
    known: Mapping[str, Field],
    take: Callable[[Any, Any], Any],
    *,
    where: str,
    show: Callable[[str], str] = str,
) -> tuple[dict[str, Any], list[str]]:
    """Take each value given as `take(kind, value)`; give those by name, and a line a problem.

    `where` stands before each name as written; `show` writes the right ones.
    """
    found: dict[str, Any] = {}
    problems = []
    for written, value in given:
        name = written.replace("-", "_")
        if name in found:
            problems.append(f"{where}{written} is given twice")
        elif name not in known:
            problems.append(f"{where}{written} is {_instead(name, known, show)}")
        else:
            found[name] = None
            try:
                found[name] = take(known[name].kind, value)
            except ValueError as error:
                problems.append(f"{where}{written} is {_show(value)}, {error}")
    return found, problems


def build(
    config_class: type[Config],
    values: Mapping[str, Any],
    problems: Iterable[str] = (),
    *,
    show: Callable[[str], str] = str,
) -> Config:
    """Make a config of values of the right types by name; others have their defaults.

    Raises:
        ValueError: there are problems, or a value is missing; or a class refuses its own values.
    """
    known = fields(config_class)
    whole = {name: values.get(name, field.default) for name, field in known.items()}
    missing = [name for name, value in whole.items() if value is attrs.NOTHING]
    lines = [f"{show(name)} is not given, needs {needs(known[name].kind)}" for name in missing]
    if lines := [*problems, *lines]:
        raise ValueError("\n".join(lines))
    try:
        made: Config = _build(config_class, whole, "")
    except ValueError as error:
        # Validators of attrs add what they looked at to the message.
        raise ValueError(str(error.args[0])) from error
    return made


def convert(kind: Any, value: Any) -> Any:
    """Take a value of JSON or YAML as one of type `kind`.

    Raises:
        ValueError: it is none; says what is needed.
    """
    inner, optional = unwrap(kind)
    if value is None and optional:
        return None
    try:
        if typing.get_origin(inner) is not tuple:
            return _scalar(inner, value)
        if isinstance(value, list | tuple) and len(kinds := items(inner, len(value))) == len(value):
            return tuple(_scalar(each, item) for each, item in zip(kinds, value, strict=True))
    except ValueError:
        pass
    raise ValueError(f"needs {needs(kind)}")


def needs(kind: Any) -> str:
    """Say in words what a value of this type is.

    >>> needs(tuple[float, float] | None)
    'None or 2 values, each a finite float'

    Raises:
        TypeError: a config cannot hold it.
    """
    inner, optional = unwrap(kind)
    words = {bool: "true or false", int: "an int", float: "a finite float", str: "a string"}
    parts = [part for part in typing.get_args(inner) if part is not ...]
    if choices := _choices(inner):
        text = " or ".join(map(repr, choices))
    elif inner in words:
        text = words[inner]
    elif isinstance(inner, type) and issubclass(inner, Path):
        text = "a path"
    elif typing.get_origin(inner) is tuple and not any(typing.get_args(part) for part in parts):
        each = list(dict.fromkeys(map(needs, parts)))
        number = "values" if ... in typing.get_args(inner) else f"{len(parts)} values"
        text = f"{number}, each {each[0]}" if len(each) == 1 else f"{number}: {', '.join(each)}"
    else:
        raise TypeError(f"a config cannot hold {kind}")
    return f"None or {text}" if optional else text


def unwrap(kind: Any) -> tuple[Any, bool]:
    """Give `X` of `X | None` or of `X`, and whether there was `None`."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(kind) if part is not type(None)]
        if len(parts) == 1:
            return parts[0], True
    return kind, False


def items(kind: Any, count: int) -> tuple[Any, ...]:
    """List the types of the items of a tuple type; as many as `count` if it has no length."""
    parts = typing.get_args(kind)
    return parts[:1] * count if ... in parts else parts


def _scalar(kind: Any, value: Any) -> Any:
    if choices := _choices(kind):
        if any(type(value) is type(choice) and value == choice for choice in choices):
            return getattr(kind, value) if isinstance(kind, type) else value
    elif issubclass(kind, Path):
        if type(value) is str and value and "\0" not in value:
            return kind(value)
    elif kind is float:
        # An int may be too large for a float.
        if type(value) in (int, float) and abs(value) <= sys.float_info.max:
            return float(value)
    elif type(value) is kind:
        return value
    raise ValueError


def _choices(kind: Any) -> tuple[Any, ...]:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return tuple(kind.__members__)
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _fields(config_class: type[Any], prefix: str, given: Any) -> Iterator[tuple[str, Field]]:
    """Walk the classes; what a group has as a default goes before the defaults of its class."""
    kinds = typing.get_type_hints(config_class)
    for field in attrs.fields(config_class):
        name, kind = f"{prefix}{field.name}", kinds[field.name]
        default: Any = field.default if given is attrs.NOTHING else getattr(given, field.name)
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # It is a class.
            default = default.factory()
        if attrs.has(kind):
            yield from _fields(kind, f"{name}.", default)
        else:
            needs(kind)
            yield name, Field(kind, default)


def _build(config_class: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    kinds = typing.get_type_hints(config_class)
    made = {}
    for field in attrs.fields(config_class):
        name, kind = f"{prefix}{field.name}", kinds[field.name]
        made[field.name] = _build(kind, values, f"{name}.") if attrs.has(kind) else values[name]
    return config_class(**made)


def _plain(value: Any) -> Any:
    match value:
        case tuple():
            return [_plain(item) for item in value]
        case Path():
            return str(value)
        case enum.Enum():
            return value.name
        case _:
            return to_dict(value) if attrs.has(type(value)) else value


def _groups(known: Iterable[str]) -> dict[str, list[str]]:
    """List what is in each group by name; the whole is the group ''. Groups end in `.*`."""
    groups: dict[str, dict[str, None]] = {}
    for name in known:
        words = name.split(".")
        for length in range(len(words)):
            child = ".".join(words[: length + 1])
            group = groups.setdefault(".".join(words[:length]), {})
            group[child if child == name else f"{child}.*"] = None
    return {name: list(children) for name, children in groups.items()}


def _instead(name: str, known: Mapping[str, Field], show: Callable[[str], str]) -> str:
    """Say why there is no value of this name, and which was meant."""
    groups = _groups(known)
    if name in groups:
        return f"a group: there are {', '.join(map(show, groups[name]))}"
    group, _, leaf = name.rpartition(".")
    leaves = {each: each.rpartition(".")[2] for each in known}
    near = [n for n in known if leaves[n] in (leaf, OTHER_NAMES.get(leaf))]
    for among in ([n for n in known if n.startswith(f"{group}.")], known):
        close = difflib.get_close_matches(leaf, [leaves[n] for n in among], 1)
        near = near or [n for n in among if leaves[n] in close]
    if near:
        best = max(near, key=lambda n: difflib.SequenceMatcher(None, n, name).ratio())
        return f"unknown; the nearest is {show(best)}"
    return f"unknown; there are {', '.join(map(show, groups.get(group, groups[''])))}"


def _show(value: Any) -> str:
    if value in ([], {}):
        return "empty"
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."
