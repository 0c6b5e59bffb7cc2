"""Files that are complete or absent: written beside their place, synced, renamed into it."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def plain_name(name: str) -> bool:
    """Tell whether `name` is the name of a file in a folder, and no path out of it."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


def sync(path: Path) -> None:
    """Make what was written to a file or a folder survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    """Give the SHA-256 of a file, in hexadecimal.

    Raises:
        ValueError: it is no file that can be read; names it.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def publish(partial: Path, final: Path) -> None:
    """Sync a folder of files, and rename it to its name: readers see all of it or nothing."""
    for path in sorted(partial.iterdir()):
        sync(path)
    sync(partial)
    os.rename(partial, final)
    sync(final.parent)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `final` at the end, or vanishes on an error.

    Raises:
        ValueError: `final` is there and is not an empty folder.
    """
    if final.exists() and not (final.is_dir() and not any(final.iterdir())):
        raise ValueError(f"{final} exists and is not an empty folder")
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.parent / f".{final.name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        yield partial
        publish(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, so that the file is the old or the new one at any time.

    Raises:
        ValueError: JSON would give back another value (NaN, keys that are no strings, objects of
            other types; a tuple may become a list); names the file and the entry.
    """
    _check(path.name, value)
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, "utf-8")
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: the file is missing, or holds anything else; names it.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def _check(where: str, value: Any) -> None:
    match value:
        case None | bool() | int() | str():
            return
        case float():
            if not math.isfinite(value):
                raise ValueError(f"{where} is {value}, which JSON cannot hold")
        case list() | tuple():
            for index, item in enumerate(value):
                _check(f"{where}.{index}", item)
        case Mapping():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise ValueError(f"{where} has the key {key!r}, which is not a string")
                _check(f"{where}.{key}", item)
        case _:
            raise ValueError(f"{where} is a {type(value).__name__}, which JSON cannot hold")
