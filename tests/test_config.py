"""Configs: values by name to frozen classes and back, exactly."""

import enum
import json
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfn import config


class Kind(enum.Enum):
    """A choice with other values than names."""

    DENSE = 1
    SPARSE = 2


@attrs.frozen
class Inner:
    """A group in a group."""

    sizes: tuple[int, ...] = (1, 2)
    kinds: tuple[Kind, ...] = ()
    level: Literal[0, 1, "all"] = 0


@attrs.frozen
class Group:
    """A group whose default as a field differs from that of the class."""

    rate: float = 0.5
    inner: Inner = Inner()


@attrs.frozen
class Config:
    """All that a config can hold."""

    name: str
    kind: Kind = Kind.DENSE
    group: Group = Group(rate=0.25, inner=Inner(level="all"))
    paths: tuple[Path, ...] = attrs.field(factory=lambda: (Path("a"),))
    pair: tuple[int, float] | None = None
    flag: bool | None = None
    folder: Path | None = None


floats = st.floats(allow_nan=False, allow_infinity=False)
paths = st.text("abc./ ", min_size=1).map(Path)
configs = st.builds(
    Config,
    name=st.text(),
    kind=st.sampled_from(Kind),
    group=st.builds(
        Group,
        rate=floats,
        inner=st.builds(
            Inner,
            sizes=st.lists(st.integers()).map(tuple),
            kinds=st.lists(st.sampled_from(Kind)).map(tuple),
            level=st.sampled_from([0, 1, "all"]),
        ),
    ),
    paths=st.lists(paths).map(tuple),
    pair=st.none() | st.tuples(st.integers(), floats),
    flag=st.none() | st.booleans(),
    folder=st.none() | paths,
)


@given(configs)
@settings(max_examples=50, deadline=None)
def test_a_config_comes_back_from_json(made: Config) -> None:
    """Types too: `repr` tells 1 from 1.0 and from True."""
    text = json.dumps(config.to_dict(made), allow_nan=False)
    assert repr(config.from_dict(Config, json.loads(text))) == repr(made)


def test_absent_values_have_the_default_of_the_nearest_class() -> None:
    """A group that is given in part keeps the rest of the default that it has as a field."""
    made = config.from_dict(Config, {"name": "x", "group": {"inner": {"sizes": [5]}}})
    assert made == Config("x", group=Group(0.25, Inner(sizes=(5,), level="all")))
    dotted = config.from_dict(Config, {"name": "x", "group.inner": {"sizes": [5]}})
    assert dotted == made


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"group": {"inner": {"sizes": [1, 2.0]}}}, "group.inner.sizes is [1, 2.0], needs values"),
        ({"group": {"inner": {"sizes": [True]}}}, "is [true], needs values, each an int"),
        ({"group": {"inner": {"level": True}}}, "is true, needs 0 or 1 or 'all'"),
        ({"group": {"inner": {"level": 1.0}}}, "is 1.0, needs 0 or 1 or 'all'"),
        ({"group": {"inner": {"kinds": ["DENSE", 2]}}}, "each 'DENSE' or 'SPARSE'"),
        (
            {"group": {"inner": {"szies": [1]}}},
            "szies is unknown; the nearest is group.inner.sizes",
        ),
        ({"group": {"rate": 10**400}}, "needs a finite float"),
        ({"group": {"rate": float("inf")}}, "group.rate is Infinity, needs a finite float"),
        ({"group": 3}, "group is a group: there are group.rate, group.inner.*"),
        ({"kind": "dense"}, "kind is 'dense', needs 'DENSE' or 'SPARSE'"),
        ({"kind": 1}, "kind is 1, needs 'DENSE' or 'SPARSE'"),
        ({"pair": [1, 2, 3]}, "is [1, 2, 3], needs None or 2 values: an int, a finite float"),
        ({"pair": "12"}, "pair is '12', needs None or 2 values"),
        ({"flag": 1}, "flag is 1, needs None or true or false"),
        ({"paths": ["a", ""]}, 'paths is ["a", ""], needs values, each a path'),
        ({"folder": "a\0b"}, "folder is 'a\\x00b', needs None or a path"),
        ({"name": None}, "name is null, needs a string"),
        ({"name": "a", "Name": "a"}, "Name is unknown; the nearest is name"),
    ],
)
def test_what_is_of_another_type_or_name_is_refused(values: dict[str, Any], message: str) -> None:
    """Named with where it was given; no value is changed to fit."""
    with pytest.raises(ValueError, match=r".") as caught:
        config.from_dict(Config, {"name": "x"} | values, where="runs/a/config.json")
    lines = str(caught.value).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("runs/a/config.json: ")
    assert message in lines[0]


def test_all_problems_are_told_at_once() -> None:
    """What is missing too."""
    with pytest.raises(ValueError, match=r".") as caught:
        config.from_dict(Config, {"knd": "DENSE", "flag": "x"})
    assert str(caught.value).splitlines() == [
        "config: knd is unknown; the nearest is kind",
        "config: flag is 'x', needs None or true or false",
        "config: name is not given, needs a string",
    ]


@attrs.frozen
class Checked:
    """A class that refuses some of its own values."""

    steps: int = attrs.field(default=1, validator=attrs.validators.gt(0))
    side: int = attrs.field(default=8, validator=attrs.validators.in_((8, 16)))


def test_what_a_class_itself_refuses_is_a_problem_like_any_other() -> None:
    """As its validator says it."""
    assert config.from_dict(Checked, {"steps": 2}) == Checked(2)
    with pytest.raises(ValueError, match="'steps' must be > 0: 0"):
        config.from_dict(Checked, {"steps": 0})
    with pytest.raises(ValueError, match=r"^'side' must be in \(8, 16\) \(got 9\)$"):
        config.from_dict(Checked, {"side": 9})


@attrs.frozen
class Wrong:
    """A config that could not be written as JSON and read again."""

    table: dict[str, int] = attrs.field(factory=dict)


@pytest.mark.parametrize(
    "kind", [dict[str, int], int | str, int | str | None, tuple[tuple[int, int], ...], complex, Any]
)
def test_a_type_that_a_config_cannot_hold_is_refused(kind: Any) -> None:
    """When its class is first used, not when a value comes."""
    with pytest.raises(TypeError, match="a config cannot hold"):
        config.needs(kind)
    with pytest.raises(TypeError, match=r"a config cannot hold dict\[str, int\]"):
        config.fields(Wrong)
