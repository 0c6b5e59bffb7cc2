"""The house: where files lie, which way imports go, and what the text of the files may say."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import mmfn

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FLOORS = {"mmfn": 0, "sharding": 1, "models": 2, "recipes": 3}
"""The folders of code, from the ground up: nothing imports what is above it."""
LONGEST = 400
"""Lines of a file; one that would pass holds two ideas."""


def files(*folders: str, suffix: str = ".py") -> list[Path]:
    """List the files below some folders, each once: links to folders are not followed."""
    found = []
    for folder in folders:
        for here, below, names in os.walk(ROOT / folder):
            below[:] = [name for name in below if name != "__pycache__"]
            found += [Path(here, name) for name in names if name.endswith(suffix)]
    return sorted(found)


def module(file: Path) -> str:
    """Give the name under which a file of code is imported."""
    words = list(file.relative_to(ROOT).with_suffix("").parts)
    words = words if words[0] == "mmfn" else ["mmfn", *words]
    return ".".join(words[:-1] if words[-1] == "__init__" else words)


def imports(source: ast.AST) -> Iterator[str]:
    """Yield what is imported, wherever that stands, `import_module` and tables of names too."""
    for node in ast.walk(source):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=name, level=level):
                yield from (f"{'.' * level}{name or ''}.{alias.name}" for alias in node.names)
            case ast.Constant(value=str(text)) if re.fullmatch(r"mmfn(\.\w+)+", text):
                yield text


def floor(name: str) -> int:
    """Give the floor of a module of ours."""
    word = f"{name}.".split(".")[1]
    return FLOORS.get(word, 0)


def public(source: ast.AST) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Yield the functions, classes and methods that others may use."""
    for node in getattr(source, "body", []):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node)


def written(source: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name where a function changes something that its module holds."""
    held = {name.id for node in getattr(source, "body", []) for name in _bound(node)}
    changers = {"append", "add", "update", "setdefault", "pop", "clear", "extend", "insert"}
    functions = (node for node in ast.walk(source) if isinstance(node, ast.FunctionDef))
    for function in functions:
        inner = list(ast.walk(function))
        # A name that the function binds is its own, whatever the module holds.
        names = (node for node in inner if isinstance(node, ast.Name | ast.arg))
        own = {n.arg if isinstance(n, ast.arg) else n.id for n in names if _binds(n)}
        for node in inner:
            match node:
                case ast.Global(names=names_):
                    yield node.lineno, names_[0]
                case (
                    ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del())
                    | ast.Attribute(value=ast.Name(id=name), ctx=ast.Store() | ast.Del())
                ) if name in held - own:
                    yield node.lineno, name
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if (
                    name in held - own and attr in changers
                ):
                    yield node.lineno, name


def _bound(node: ast.AST) -> Iterator[ast.Name]:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        yield from (n for n in ast.walk(node) if isinstance(n, ast.Name) and _binds(n))


def _binds(node: ast.Name | ast.arg) -> bool:
    return isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store)


def test_imports_go_one_way() -> None:
    """From the core up: `sharding`, `models`, `recipes`; no file imports what is above it."""
    wrong = [
        f"{module(file)} imports {name}"
        for file in files(*FLOORS)
        for name in imports(ast.parse(file.read_text()))
        if name.split(".")[0] == "mmfn" and floor(name) > floor(module(file))
    ]
    assert wrong == []


def test_imports_are_absolute_and_start_at_mmfn() -> None:
    """`import models` would be a second copy of every class in it."""
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files(*FLOORS, "tests")
        for name in imports(ast.parse(file.read_text()))
        if name.startswith(".") or name.split(".")[0] in FLOORS.keys() - {"mmfn"}
    ]
    assert wrong == []
    assert not sys.modules.keys() & (FLOORS.keys() - {"mmfn"})


def test_what_is_imported_is_declared() -> None:
    """Every package that the code imports is a dependency or an extra, so a wheel brings it."""
    names = packages_distributions()
    extra = PROJECT["project"]["optional-dependencies"]["npu"]
    lines = PROJECT["project"]["dependencies"] + extra
    declared = {re.split(r"[^\w-]", line)[0].lower().replace("_", "-") for line in lines}
    missing = {
        f"{file.relative_to(ROOT)} imports {word}"
        for file in files(*FLOORS)
        for word in {name.split(".")[0] for name in imports(ast.parse(file.read_text()))}
        if word != "mmfn" and word not in sys.stdlib_module_names
        if not {d.lower().replace("_", "-") for d in names.get(word, [word])} & declared
    }
    assert missing == set()


def test_packages_are_the_folders() -> None:
    """A folder without its line in `packages` is in the editable install, but not in the wheel."""
    folders = {module(file) for file in files(*FLOORS) if file.name == "__init__.py"}
    holding = {module(file.with_name("__init__.py")) for file in files(*FLOORS)}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders == holding


def test_links_lead_to_the_folders() -> None:
    """`mmfn/models` is `models`: static tools, and runs without an install, need it."""
    for name in FLOORS.keys() - {"mmfn"}:
        assert os.readlink(ROOT / "mmfn" / name) == f"../{name}"


def test_the_root_holds_only_what_is_agreed() -> None:
    """Beside the folders of code: tests, docs, and the files that every project has."""
    agreed = {*FLOORS, "tests", "docs", "pyproject.toml", "Makefile"}
    agreed |= {"README.md", "CHANGELOG.md", "LICENSE"}
    # What git ignores: builds, installs and runs.
    made = {"build", "dist", "runs", "mmfn.egg-info"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert found - made <= agreed


def test_importing_mmfn_imports_no_torch() -> None:
    """Where an accelerator's plug-in is broken, `import torch` fails before anything could help."""
    code = "import sys, mmfn; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd="/", check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    """Each name of `mmfn.__all__` can be used, and `dir` shows it."""
    assert all(getattr(mmfn, name) is not None for name in mmfn.__all__)
    assert set(dir(mmfn)) == set(mmfn.__all__)


def test_files_are_short() -> None:
    """No file of code or tests has more than 400 lines."""
    lengths = {file: len(file.read_text().splitlines()) for file in files(*FLOORS, "tests")}
    assert {str(f.relative_to(ROOT)): n for f, n in lengths.items() if n > LONGEST} == {}


def test_no_function_changes_what_its_module_holds() -> None:
    """State is an argument: there is no `global`, and no table that fills while a run goes on."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line} changes {name}"
        for file in files(*FLOORS)
        for line, name in written(ast.parse(file.read_text()))
    ]
    assert wrong == []


def test_every_public_function_has_a_docstring() -> None:
    """And every class, method and module."""
    wrong = [
        f"{file.relative_to(ROOT)}: {getattr(node, 'name', 'module')}"
        for file in files(*FLOORS)
        for tree in [ast.parse(file.read_text())]
        for node in [tree, *public(tree)]
        if not ast.get_docstring(node)
    ]
    assert wrong == []


def test_models_have_no_modules() -> None:
    """A model is a function of a tree: no class inherits from torch's `Module`."""
    wrong = [
        f"{file.relative_to(ROOT)}: {node.name}"
        for file in files(*FLOORS)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).split(".")[-1] == "Module" for base in node.bases)
    ]
    assert wrong == []


def test_recipes_hide_no_package() -> None:
    """Run as a script, a recipe's folder comes first where imports are looked up."""
    names = {file.stem for file in files("recipes")} - {"__init__"}
    assert not names & (sys.stdlib_module_names | packages_distributions().keys())


def test_no_text_names_a_machine() -> None:
    """Neither a folder of somebody's machine nor a host from which packages come."""
    folder = re.compile(r"(?<![\w.$}*])/(?:home|root|work|opt|mnt|srv|Users|tmp)/\w")
    host = re.compile(
        r"localhost|\b(?:pypi|npmjs|pythonhosted)\b|\bdownload\.\w+\.org|\d+(?:\.\d+){3}"
    )
    text = files("docs", suffix="") + files(*FLOORS, "tests")
    text += [ROOT / name for name in ("README.md", "CHANGELOG.md", "Makefile", "pyproject.toml")]
    wrong = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in text
        if file != Path(__file__)
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1)
        if folder.search(line) or (file.suffix != ".py" and host.search(line))
    ]
    assert wrong == []
