"""Command lines: what is given arrives, and what cannot be used is named before any work."""

import json
import re
from pathlib import Path
from typing import Literal

import attrs
import pytest

from mmfn import cli, config


@attrs.frozen
class Model:
    """What is trained."""

    path: Path | None = None
    """Folder with published weights; None: a small model."""


@attrs.frozen
class Data:
    """What it is trained on."""

    train: Path | None = None
    """File of samples; None: the digits that come with the library."""
    eval: Path | None = None
    """File of samples to measure with."""
    media_root: Path | None = None
    """Folder that holds the pictures."""
    row_tokens: int = 4096
    """Tokens in a row."""
    rows: int = 1
    """Rows in a micro-batch."""
    max_tokens: int = 4096
    """Longest sample in tokens."""
    on_long: Literal["raise", "drop"] = "raise"
    """What becomes of a longer one."""
    on_bad: Literal["raise", "skip"] = "raise"
    """What becomes of one that cannot be read."""
    min_pixels: int = 65536
    """Smaller pictures are enlarged, in pixels."""
    max_pixels: int = 16777216
    """Larger pictures are reduced, in pixels."""


@attrs.frozen
class Optimizer:
    """How the weights move."""

    lr: float = 1e-4
    """Peak of the learning rate, per step."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the means of gradients and of their squares, per step."""
    weight_decay: float = 0.0
    """Times the learning rate, per step."""


@attrs.frozen
class Train:
    """For how long."""

    steps: int | None = None
    """Optimizer steps; None: what the epochs ask for."""
    epochs: int = 1
    """Passes over the data."""
    accumulate: int = 1
    """Micro-batches in a step."""
    eval_every: int = 100
    """Steps between two measurements."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What becomes of a step whose gradients are not finite."""


@attrs.frozen
class Run:
    """Where."""

    out: Path
    """Folder of the run."""
    seed: int = 0
    """Of all that is random."""
    resume: bool = False
    """Go on from the last state in the folder."""
    device: str = "auto"
    """Such as cpu or cuda."""


@attrs.frozen
class Config:
    """A run of fine-tuning."""

    run: Run
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer(lr=2e-5)
    train: Train = Train()


def read(*words: str) -> Config:
    """Read a command line that has the one flag that is always needed."""
    return cli.read(Config, ["--run.out", "runs/a", *words])


def refused(*words: str) -> list[str]:
    """Read a command line that cannot be used; give the lines of the message."""
    with pytest.raises(ValueError, match=r".") as caught:
        cli.read(Config, words)
    return str(caught.value).splitlines()


def file(folder: Path, text: str, name: str = "run.yaml") -> Path:
    """Write a file of values."""
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    """The default of a group goes before those of its class; dashes and underscores are alike."""
    path = file(
        tmp_path,
        "optimizer: {weight_decay: 0.1, betas: [0.8, 0.9]}\n"
        "data:\n  row-tokens: 64\n  on_long: drop\n"
        "run.resume: true\n",
    )
    found = read("--data.row-tokens", "32", "--config", str(path), "--data.max_tokens=16")
    assert found == Config(
        run=Run(out=Path("runs/a"), resume=True),
        data=Data(row_tokens=32, on_long="drop", max_tokens=16),
        optimizer=Optimizer(lr=2e-5, weight_decay=0.1, betas=(0.8, 0.9)),
    )
    assert read() == Config(run=Run(out=Path("runs/a")))
    assert cli.read(Config, ["--config", str(file(tmp_path, "run.out: b"))]).run.out == Path("b")


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--optimizer.lr", "1e-5"], "optimizer.lr", 1e-5),
        (["--optimizer.lr", "3"], "optimizer.lr", 3.0),
        (["--optimizer.lr=-.5E+1"], "optimizer.lr", -5.0),
        (["--optimizer.betas", "0.5", "1"], "optimizer.betas", (0.5, 1.0)),
        (["--run.seed", "-7"], "run.seed", -7),
        (["--run.resume"], "run.resume", True),
        (["--run.no-resume"], "run.resume", False),
        (["--run.device", "None"], "run.device", "None"),
        (["--run.device="], "run.device", ""),
        (["--run.device", "a=b"], "run.device", "a=b"),
        (["--run.device=--x"], "run.device", "--x"),
        (["--model.path", "None"], "model.path", None),
        (["--model.path", "a b/c"], "model.path", Path("a b/c")),
        (["--train.steps", "5"], "train.steps", 5),
        (["--train.on-nonfinite", "skip"], "train.on_nonfinite", "skip"),
    ],
)
def test_words_become_values_of_the_type_of_the_field(
    words: list[str], name: str, value: object
) -> None:
    """Of just this type: an int is no float."""
    group, field = name.split(".")
    found = getattr(getattr(read(*words), group), field)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data.rows", "ten"], "--data.rows is 'ten', needs an int"),
        (["--data.rows", "1.0"], "--data.rows is '1.0', needs an int"),
        (["--data.rows", "1_000"], "--data.rows is '1_000', needs an int"),
        (["--data.rows", "None"], "--data.rows is 'None', needs an int"),
        (["--data.rows", "True"], "--data.rows is 'True', needs an int"),
        (["--data.rows", "1", "2"], '--data.rows is ["1", "2"], needs an int'),
        (["--data.rows"], "--data.rows is empty, needs an int"),
        (["--train.steps", "x"], "--train.steps is 'x', needs None or an int"),
        (["--optimizer.lr", "nan"], "--optimizer.lr is 'nan', needs a finite float"),
        (["--optimizer.lr", "-inf"], "'-inf' is no flag; flags begin with --"),
        (["--optimizer.lr=-inf"], "--optimizer.lr is '-inf', needs a finite float"),
        (["--optimizer.lr", "1e999"], "--optimizer.lr is '1e999', needs a finite float"),
        (["--optimizer.lr", "9" * 400], "needs a finite float"),
        (["--optimizer.betas", "0.9"], "--optimizer.betas is '0.9', needs 2 values, each a finite"),
        (["--optimizer.betas", "1", "x"], "needs 2 values, each a finite float"),
        (["--data.on-long", "cut"], "--data.on-long is 'cut', needs 'raise' or 'drop'"),
        (["--run.resume", "True"], "--run.resume is 'True', needs no value"),
        (["--run.no-resume=1"], "--run.resume is '1', needs no value: alone it is true"),
        (["--model.path", ""], "--model.path is '', needs None or a path"),
        (["--run.out", "b"], "--run.out is given twice"),
        (["--run.seed=1", "--run.seed", "1"], "--run.seed is given twice"),
        (["--run.resume", "--run.no-resume"], "run.resume is given twice"),
        (["--data.row-tokens=1", "--data.row_tokens=1"], "--data.row_tokens is given twice"),
        (["-lr", "1"], "'-lr' is no flag; flags begin with --, and --run.out=-lr is a value"),
        (["--run", "x"], "--run is a group: there are --run.out, --run.seed"),
        (["--lr", "1"], "--lr is unknown; the nearest is --optimizer.lr"),
        (["--optimizr.lr", "1"], "--optimizr.lr is unknown; the nearest is --optimizer.lr"),
        (["--data.on-lnog", "drop"], "--data.on-lnog is unknown; the nearest is --data.on-long"),
        (["--train.lr", "1"], "--train.lr is unknown; the nearest is --optimizer.lr"),
        (["--confg", "a"], "--confg is unknown; the nearest is --config"),
        (["--xyz"], "--xyz is unknown; there are --config, --run.*, --model.*, --data.*"),
        (["--model.xyz"], "--model.xyz is unknown; there are --model.path"),
    ],
)
def test_what_a_flag_cannot_take_is_named(words: list[str], message: str) -> None:
    """With the flag as written, the value, and what is needed or was meant."""
    lines = refused("--run.out", "runs/a", *words)
    assert len(lines) == 1
    assert message in lines[0]


def test_words_before_any_flag_are_refused() -> None:
    """There are no positional arguments."""
    assert refused("runs/a") == ["'runs/a' stands before any flag"]


def test_a_file_with_an_unknown_key_is_answered_with_the_nearest(tmp_path: Path) -> None:
    """All of them in one message, those of the command line too; nothing is left to a default."""
    text = "optimizer:\n  lr: 1.0e-5\n  learning_rate: 3.0e-4\ntrain:\n  grad-accum: 4\n"
    path = file(tmp_path, text)
    assert refused("--config", str(path), "--optimizer.learning-rate", "1e-4") == [
        "--optimizer.learning-rate is unknown; the nearest is --optimizer.lr",
        f"{path}: optimizer.learning_rate is unknown; the nearest is optimizer.lr",
        f"{path}: train.grad-accum is unknown; the nearest is train.accumulate",
        "--run.out is not given, needs a path",
    ]


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("optimizer:\n  lr: 1e-5\n  weight_decay: 0.0\n", "optimizer.lr", 1e-5),
        ("optimizer: {lr: 1E5}", "optimizer.lr", 1e5),
        ("optimizer: {lr: 2}", "optimizer.lr", 2.0),
        ("train: {epochs: 010}", "train.epochs", 10),
        ("run: {device: no}", "run.device", "no"),
        ("run: {device: '5'}", "run.device", "5"),
        ("run: {resume: True}", "run.resume", True),
        ("train: {steps: ~}", "train.steps", None),
        ("train:\n  steps:\n", "train.steps", None),
        ("train: {}", "train.epochs", 1),
    ],
)
def test_yaml_is_read_as_people_write_it(
    tmp_path: Path, text: str, name: str, value: object
) -> None:
    """Version 1.1 would make `1e-5` a string, `no` false and `010` eight."""
    group, field = name.split(".")
    found = getattr(getattr(read("--config", str(file(tmp_path, text))), group), field)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "optimizer: {lr: '1e-5'}", "optimizer.lr is '1e-5', needs a finite float"),
        ("a.yaml", "optimizer: {lr: .nan}", "optimizer.lr is '.nan', needs a finite float"),
        ("a.yaml", "data: {rows: true}", "data.rows is true, needs an int"),
        ("a.yaml", "data: {rows: 1.0}", "data.rows is 1.0, needs an int"),
        ("a.yaml", "data: {rows: [1]}", "data.rows is [1], needs an int"),
        ("a.yaml", "data: {rows: }", "data.rows is null, needs an int"),
        ("a.yaml", "data: {rows: {a: 1}}", 'data.rows is {"a": 1}, needs an int'),
        ("a.yaml", "run: {resume: yes}", "run.resume is 'yes', needs true or false"),
        ("a.yaml", "run: {device: 5}", "run.device is 5, needs a string"),
        ("a.yaml", "data: {on_long: off}", "data.on_long is 'off', needs 'raise' or 'drop'"),
        ("a.yaml", "optimizer: {betas: 0.9}", "optimizer.betas is 0.9, needs 2 values, each a"),
        ("a.yaml", "optimizer: {betas: [1, 2, 3]}", "is [1, 2, 3], needs 2 values, each a finite"),
        ("a.yaml", "model: {path: 3}", "model.path is 3, needs None or a path"),
        ("a.yaml", "data:\n", "data is a group: there are data.train, data.eval"),
        ("a.yaml", "foo: {}", "foo is unknown; there are run.*, model.*"),
        ("a.yaml", "optimizer: {lr: 1, lr: 2}", "cannot be read: lr is given twice"),
        ("a.yaml", "optimizer: {lr: 1}\noptimizer.lr: 1", "optimizer.lr is given twice"),
        ("a.yaml", "data: {row-tokens: 1, row_tokens: 1}", "data.row_tokens is given twice"),
        ("a.yaml", "run: !!python/object/apply:os.getcwd []", "line 1 has a tag or an alias"),
        ("a.yaml", "run: &a {}\ntrain: *a", "line 2 has a tag or an alias"),
        ("a.yaml", "? [1]\n: 2", "line 1 has a name that is no word"),
        ("a.yaml", "run: [", "cannot be read: while parsing a flow node"),
        ("a.yaml", "", "a.yaml holds null, needs names with values"),
        ("a.yaml", "- 1", "a.yaml holds [1], needs names with values"),
        ("a.json", '{"optimizer": {"lr": NaN}}', "optimizer.lr is NaN, needs a finite float"),
        ("a.json", '{"data": {"rows": 1, "rows": 1}}', "cannot be read: rows is given twice"),
        ("a.json", "{", "a.json cannot be read: Expecting property name"),
        ("a.json", "3", "a.json holds 3, needs names with values"),
        ("a.toml", "", "a.toml ends in '.toml', needs '.json', '.yaml' or '.yml'"),
    ],
)
def test_what_a_file_cannot_say_is_named(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    """With the file, the name, the value and what is needed."""
    lines = refused("--run.out", "a", "--config", str(file(tmp_path, text, name)))
    assert len(lines) == 1
    assert lines[0].startswith(str(tmp_path / name))
    assert message in lines[0]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """As the system says it; what else is missing is not guessed then."""
    path = tmp_path / "none.yaml"
    assert refused("--config", str(path)) == [f"{path} cannot be read: No such file or directory"]
    assert refused("--config")[0] == "--config is empty, needs a path"


def test_a_written_config_is_a_file_of_values(tmp_path: Path) -> None:
    """What a run writes into its folder starts the same run again."""
    given = read("--optimizer.lr", "1e-7", "--data.train", "a.json", "--run.resume")
    path = file(tmp_path, json.dumps(config.to_dict(given)), "config.json")
    assert cli.read(Config, ["--config", str(path)]) == given


def test_what_cannot_be_used_ends_the_program_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines go to stderr, each with the name of the program, and nothing to stdout."""
    with pytest.raises(SystemExit) as ended:
        cli.parse(Config, ["--data.rows", "x", "--lr", "1"], prog="tune", description="Tune.")
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "tune: --data.rows is 'x', needs an int",
        "tune: --lr is unknown; the nearest is --optimizer.lr",
        "tune: --run.out is not given, needs a path",
        "tune: --help lists all flags",
    ]


def test_help_shows_every_flag_with_its_default_and_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other flag; wherever it stands, the program ends with 0 and says nothing else."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        cli.parse(
            Config, ["--lr", "--help"], prog="tune", description=f"Tune it.\n\n{'word ' * 50}"
        )
    assert ended.value.code == 0
    said = capsys.readouterr()
    assert said.err == ""
    shown = set(re.findall(r"--[a-z][\w.-]*", said.out))
    flags = {f"--{name.replace('_', '-')}" for name in config.fields(Config)}
    assert shown == flags | {"--help", "--config", "--run.no-resume"}
    page = " ".join(said.out.replace("│", " ").split())
    for part in (
        "usage: tune",
        "Tune it. word word",
        "Folder of the run. (required)",
        "Peak of the learning rate, per step. (default: 2e-05)",
        "{raise,drop} What becomes of a longer one. (default: raise)",
        "--config FILE",
        "How the weights move.",
    ):
        assert part in page
    assert max(map(len, said.out.splitlines())) <= 100
