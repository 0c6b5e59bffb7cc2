"""The state of a run on disk: complete or absent, without pickles, resharded while read.

A checkpoint is a folder `checkpoints/step-00000010` of the run's folder:

- `shard-*.safetensors`: the leaves by path, each rank's parts in files of its own, written and
  read by `torch.distributed.checkpoint`, so that any mesh reads what any other wrote;
- `meta.json`: what is no tensor (config, place in the data, versions);
- `manifest.json`, written last: every leaf with shape and dtype, every file with size and digest.

It is written under a name that ends in `.partial`, synced, and renamed. One run at a time writes
to a folder. `group` is the ranks that hold the state together; `None` is this process alone.
"""

import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from mmfn import files as disk
from mmfn import tree

MANIFEST = "manifest.json"
META = "meta.json"
FORMAT = 1
"""Number of this layout of a folder."""
FILE_BYTES = 2**30
"""A rank writes files of about this size: what it holds in memory twice while it writes."""

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


@attrs.frozen
class _Manifest:
    step: int
    leaves: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and dtype by path."""
    files: Mapping[str, tuple[int, str]]
    """Bytes and SHA-256 by name."""


class _Copies(DefaultSavePlanner):
    """Hand out copies: safetensors takes neither views nor two tensors in the same memory."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = super().resolve_data(write_item)
        assert isinstance(value, Tensor)
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def save(
    run_folder: Path,
    step: int,
    state: Any,
    meta: Mapping[str, Any],
    *,
    keep: int,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a tree of tensors and what belongs to it, then remove all but the `keep` newest.

    Gives the folder. When this returns, the checkpoint survives a power failure, and `state` may
    be overwritten. The newest complete checkpoint is never removed, nor are later steps than this
    one, which a run has that was taken up again at an earlier step; remains of saves that were
    cut short are.

    Raises:
        ValueError: this step is there already, a leaf is no tensor, `meta` is not what JSON gives
            back, `keep` is less than one, several ranks run and no `group` is given; names them.
        OSError: the files cannot be written; names the folder.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step={step} and keep={keep} should be at least 0 and 1")
    leaves = _leaves(state)
    size = _size(group)
    final = _folder(run_folder, step)
    partial = final.with_name(f"{final.name}.partial")

    def start() -> None:
        if final.exists() and _problem(final) is None:
            raise ValueError(f"{final} exists and is complete")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for folder in partial.parents[:2]:
            disk.sync(folder)
        disk.write_json(partial / META, meta)

    _first(group, start)
    # From here on the state is only read: `mmfn.behind` does it on a copy, on a thread.
    _write(partial, leaves, FILE_BYTES * size, group)
    # Each rank looks at its own files: others may see them late on a network drive.
    mine = f"shard-{1 if group is None else dist.get_rank(group) + 1:05d}-*"
    parts = _together(group, lambda: {path.name: _stat(path) for path in partial.glob(mine)})

    def finish() -> None:
        shapes = {path: (tuple(leaf.shape), _name(leaf.dtype)) for path, leaf in leaves.items()}
        written = {META: _stat(partial / META)}
        for part in parts:
            written |= part
        manifest = _Manifest(step, shapes, written)
        disk.write_json(partial / MANIFEST, {"format": FORMAT, **attrs.asdict(manifest)})
        # What is there under this name is damaged: `start` has refused a complete one.
        shutil.rmtree(final, ignore_errors=True)
        disk.publish(partial, final)
        _prune(run_folder, step, keep)

    _first(group, finish)
    return final


def latest(run_folder: Path) -> int | None:
    """Find the newest complete checkpoint; gives its step, or `None` if there is none.

    Incomplete and damaged ones are passed over, each with a line in the log. What is looked at is
    names and sizes; `restore` reads every byte.
    """
    for path in sorted(_root(run_folder).glob("step-*.partial")):
        logger.warning("passed over %s: it was not written to the end", path)
    for step in sorted(_steps(run_folder), reverse=True):
        problem = _problem(_folder(run_folder, step))
        if problem is None:
            return step
        logger.warning("passed over step %d: %s", step, problem)
    return None


def restore(
    run_folder: Path,
    step: int,
    like: Any,
    *,
    donate: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Read the checkpoint of `step` into a tree like `like`; gives it and the `meta` of `save`.

    Leaves have the device and the placement of those of `like`, whatever mesh wrote them. With
    `donate` they are those of `like`, overwritten, which needs no second copy of the state.

    Raises:
        ValueError: no such checkpoint, a file that is missing or is not what was written, leaves
            that are missing, unexpected or of another shape or dtype; names file or leaf.
    """
    leaves = _leaves(like)
    _size(group)
    folder = _folder(run_folder, step)
    if not folder.is_dir():
        there = ", ".join(map(str, sorted(_steps(run_folder)))) or "none"
        raise ValueError(f"{folder} does not exist; there are steps {there} in {folder.parent}")
    manifest = _read_manifest(folder)
    _check_leaves(folder, manifest, leaves)

    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def check() -> None:
        for name in sorted(manifest.files)[rank::ranks]:
            _check(folder / name, manifest.files[name])

    _together(group, check)
    meta = disk.read_json(folder / META)
    values = {path: leaf if donate else torch.empty_like(leaf) for path, leaf in leaves.items()}
    with _unwrapped(folder):
        read_tensors(
            {path: value.detach() for path, value in values.items()},
            storage_reader=HuggingFaceStorageReader(str(folder)),
            process_group=group,
            no_dist=group is None,
        )
    return tree.unflatten(like, list(values.values())), meta


def _root(run_folder: Path) -> Path:
    return Path(run_folder) / "checkpoints"


def _folder(run_folder: Path, step: int) -> Path:
    return _root(run_folder) / f"step-{step:08d}"


def _steps(run_folder: Path) -> list[int]:
    names = (re.fullmatch(r"step-(\d{8,})", path.name) for path in _root(run_folder).glob("*"))
    return [int(name[1]) for name in names if name]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _leaves(state: Any) -> dict[str, Tensor]:
    leaves: dict[str, Tensor] = {}
    for path, leaf in tree.items(state):
        if not isinstance(leaf, Tensor):
            raise ValueError(f"{path} is a {type(leaf).__name__}, not a tensor; meta holds such")
        if leaf.is_meta:
            raise ValueError(f"{path} is on the meta device: it has no values and no memory")
        if path in leaves:
            raise ValueError(f"two leaves have the path {path}")
        leaves[path] = leaf
    if not leaves:
        raise ValueError("the state has no leaves")
    return leaves


def _write(
    folder: Path, leaves: Mapping[str, Tensor], file_bytes: int, group: dist.ProcessGroup | None
) -> None:
    held, number, index = 0, 1, {}
    for path, leaf in leaves.items():
        size = leaf.numel() * leaf.element_size()
        if held and held + size > file_bytes:
            held, number = 0, number + 1
        held += size
        index[path] = number
    with _unwrapped(folder):
        write_tensors(
            dict(leaves),
            storage_writer=HuggingFaceStorageWriter(
                str(folder), fqn_to_index_mapping=index, save_distributed=True
            ),
            planner=_Copies(),
            process_group=group,
            no_dist=group is None,
        )


@contextmanager
def _unwrapped(folder: Path) -> Iterator[None]:
    """Raise what went wrong in place of the wrapper, which is no `Exception`."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if not isinstance(cause, Exception):
            raise cause from None
        raise OSError(f"{folder} cannot be written or read: {cause}") from cause


def _stat(path: Path) -> tuple[int, str]:
    return path.stat().st_size, disk.digest(path)


def _read_manifest(folder: Path) -> _Manifest:
    """Read what should be in a folder, and check names and sizes."""
    path = folder / MANIFEST
    value = disk.read_json(path)
    if value.get("format") != FORMAT:
        raise ValueError(f"{path} has format {value.get('format')!r}; this version reads {FORMAT}")
    try:
        manifest = _Manifest(
            step=int(value["step"]),
            leaves={k: (tuple(shape), str(dtype)) for k, (shape, dtype) in value["leaves"].items()},
            files={name: (int(size), str(sha)) for name, (size, sha) in value["files"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a manifest: {error!r}") from error
    if _folder(Path(), manifest.step).name != folder.name:
        raise ValueError(f"{path} is of step {manifest.step}, not of {folder.name}")
    if META not in manifest.files:
        raise ValueError(f"{path} does not list {META}")
    for name, (size, _) in manifest.files.items():
        if not disk.plain_name(name):
            raise ValueError(f"{path} names {name!r}, which is not a plain file name")
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing")
        if (found := (folder / name).stat().st_size) != size:
            raise ValueError(f"{folder / name} has {found} bytes, not the {size} that were written")
    for extra in sorted(folder.glob("*.safetensors")):
        if extra.name not in manifest.files:
            raise ValueError(f"{extra} is not listed in {MANIFEST}")
    return manifest


def _problem(folder: Path) -> str | None:
    try:
        _read_manifest(folder)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _check(path: Path, file: tuple[int, str]) -> None:
    if _stat(path) != file:
        raise ValueError(
            f"{path} is not what was written: its bytes have another digest; without the folder "
            f"{path.parent.name} a run goes on from the checkpoint before"
        )
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def _check_leaves(folder: Path, manifest: _Manifest, leaves: Mapping[str, Tensor]) -> None:
    here = {path: (tuple(leaf.shape), _name(leaf.dtype)) for path, leaf in leaves.items()}
    differ = []
    for path in dict.fromkeys([*here, *manifest.leaves]):
        if path not in manifest.leaves:
            differ.append(f"{path} is missing there")
        elif path not in here:
            differ.append(f"{path} is only there")
        elif here[path] != manifest.leaves[path]:
            there = " ".join(map(str, manifest.leaves[path]))
            differ.append(f"{path} is {there} there and {' '.join(map(str, here[path]))} here")
    if differ:
        more = f" and {len(differ) - 10} more" if len(differ) > 10 else ""
        raise ValueError(
            f"{folder} and this run differ in {len(differ)} leaves: {'; '.join(differ[:10])}{more}"
        )


def _prune(run_folder: Path, step: int, keep: int) -> None:
    folders = [_folder(run_folder, other) for other in sorted(_steps(run_folder)) if other <= step]
    complete = [folder for folder in folders if _problem(folder) is None]
    for folder in complete[:-keep]:
        # Renamed first: half removed, it must not look complete.
        os.rename(folder, folder.with_name(f"{folder.name}.partial"))
    for remains in _root(run_folder).glob("step-*.partial"):
        shutil.rmtree(remains)


def _size(group: dist.ProcessGroup | None) -> int:
    if group is not None:
        return dist.get_world_size(group)
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(f"{dist.get_world_size()} ranks run, and group=None is one process alone")
    return 1


def _together(group: dist.ProcessGroup | None, work: Callable[[], Result]) -> list[Result]:
    """Do `work` on each rank; gives all results, or raises the first error, on all of them."""
    if group is None:
        return [work()]
    outcome: tuple[Result | None, Exception | None]
    try:
        outcome = work(), None
    except Exception as error:
        outcome = None, error
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    for _, problem in outcomes:
        if problem is not None:
            raise problem
    return [result for result, _ in outcomes]


def _first(group: dist.ProcessGroup | None, work: Callable[[], None]) -> None:
    """Do `work` on the first rank; the others wait, and raise what it raises."""
    _together(group, work if group is None or dist.get_rank(group) == 0 else lambda: None)
