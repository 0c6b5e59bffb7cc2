"""Show what a rank holds while weights are read or made: peak of its own memory, by ranks.

    python tests/bench/load.py                   2B whole; 30B-A3B at full width with 2 layers
    python tests/bench/load.py --large           besides, 235B-A22B with one layer on 4 ranks

A synthetic folder in bfloat16 in the published layout is written first, a leaf at a time. Each rank
reads its parts in float32 and checks every value. What counts is memory of its own (RssAnon over
that of the start, sampled each 5 ms): pages of files that are looked at belong to the system. The
last line is one JSON object; a rank's peak is in MiB, `share` in parts of all weights in float32.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file
from torch import Tensor

from mmfn import param, rng, tree, weights
from mmfn.models import qwen3_vl, vision
from mmfn.models.presets import PRESETS
from mmfn.param import Param
from mmfn.sharding import mesh as meshes
from mmfn.sharding import parallel, simulate
from mmfn.sharding.layout import local
from mmfn.sharding.rules import FSDP


def config(name: str, layers: int | None) -> qwen3_vl.Config:
    """Give a preset, at full width, with so many layers in decoder and tower."""
    cfg = PRESETS[name]
    if layers is None:
        return cfg
    tower: vision.Config = attrs.evolve(cfg.vision, layers=3, deepstack=(0,))
    return attrs.evolve(cfg, layers=layers, vision=tower)


def pattern(leaf: Param, path: str) -> Tensor:
    """Make the values of a leaf: integers that bfloat16 holds, by place and path."""
    seed = sum(path.encode()) % 97
    place = torch.arange(leaf.shape[-1], dtype=torch.int32)
    rows = torch.arange(leaf.size // leaf.shape[-1], dtype=torch.int32)[:, None]
    value = torch.empty(leaf.shape, dtype=torch.bfloat16)
    flat = value.view(-1, leaf.shape[-1])
    for start in range(0, len(flat), 65536):
        part = slice(start, start + 65536)
        flat[part] = ((place + 31 * rows[part] + seed) % 251 - 125).bfloat16()
    return value


def rows_of(leaf: Param, path: str, part: param.Part) -> Iterator[Tensor]:
    """Give the same values, of a part, a row at a time."""
    seed = sum(path.encode()) % 97
    for row in range(*part[0].indices(leaf.shape[0])):
        index = rng.flat_index(leaf.shape, (slice(row, row + 1), *part[1:]))[0]
        place, line = index % leaf.shape[-1], index // leaf.shape[-1]
        yield ((place + 31 * line + seed) % 251 - 125).float()


def write(cfg: qwen3_vl.Config, folder: Path) -> None:
    """Write a folder, a file for each leaf."""
    index = {}
    for number, (path, leaf) in enumerate(tree.items(qwen3_vl.abstract(cfg))):
        name = f"model-{number:05d}.safetensors"
        save_file({leaf.key: pattern(leaf, path).view(leaf.published)}, folder / name)
        index[leaf.key] = name
    (folder / weights.INDEX).write_text(json.dumps({"weight_map": index}))


class Peak:
    """Memory of this process's own, sampled on a thread: the most over what it was at first."""

    def __enter__(self) -> "Peak":
        """Begin."""
        self.first = self.most = _anonymous()
        self.going = True
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self.going = False
        self.thread.join()

    def _watch(self) -> None:
        while self.going:
            self.most = max(self.most, _anonymous())
            time.sleep(0.005)

    @property
    def mib(self) -> float:
        """Give it in MiB."""
        return (self.most - self.first) / 1024


def _anonymous() -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1])


def read(
    rank: int, cfg: qwen3_vl.Config, mesh: str, world: int, folder: Path | None
) -> tuple[float, float, float]:
    """Read or make this rank's parts: peak, what they are, both in MiB; seconds."""
    abstract = qwen3_vl.abstract(cfg)
    on = parallel.make(abstract, meshes.make(meshes.parse(mesh, world)), FSDP)
    start = time.perf_counter()
    with Peak() as peak:
        if folder is None:
            params = param.init(abstract, 0, place=on.layout.place)
        else:
            params = weights.load(abstract, folder, place=on.layout.place)
    seconds = time.perf_counter() - start
    parts = local(params)
    if folder is not None:
        rows = zip(
            tree.items(parts), tree.leaves(abstract), tree.leaves(on.layout.specs), strict=True
        )
        for (path, value), leaf, own in rows:
            for row, values in zip(rows_of(leaf, path, own.part(on.mesh)), value, strict=True):
                if not torch.equal(values, row):
                    raise SystemExit(f"{path} is not what the file holds")
    held = sum(value.numel() * value.element_size() for value in tree.leaves(parts))
    return peak.mib, held / 2**20, seconds


def main() -> None:
    """Write folders, read them on some ranks, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--large", action="store_true")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    jobs: list[tuple[str, int | None, list[str]]] = [
        ("2B", None, ["fsdp=1", "fsdp=2", "fsdp=4"]),
        ("30B-A3B", 2, ["fsdp=1", "fsdp=2 ep=2", "fsdp=4 ep=4", "fsdp=4 ep=2"]),
    ]
    if flags.large:
        jobs.append(("235B-A22B", 1, ["fsdp=4 ep=4"]))
    report: dict[str, Any] = {}
    for name, layers, cells in jobs:
        cfg = config(name, layers)
        whole = 4 * param.count(qwen3_vl.abstract(cfg)) / 2**20
        print(f"{name}, {layers or cfg.layers} layers: {whole:,.0f} MiB of weights in float32")
        with tempfile.TemporaryDirectory() as folder:
            write(cfg, Path(folder))
            for mesh in cells:
                world = int(mesh.split()[0].split("=")[1])
                for what, source in (("load", Path(folder)), ("init", None)):
                    if what == "init" and name != "2B":
                        continue
                    found = simulate.run(world, read, cfg, mesh, world, source, seconds=1200.0)
                    peak, held, seconds = (max(column) for column in zip(*found, strict=True))
                    print(
                        f"  {what} {mesh:14} peak {peak:8,.0f} MiB a rank, its parts "
                        f"{held:8,.0f} ({held / whole:.3f} of all), {seconds:.0f} s",
                        flush=True,
                    )
                    report[f"{name} {what} {mesh}"] = {
                        "peak_mib": round(peak),
                        "held_mib": round(held),
                        "share": round(peak / whole, 4),
                    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
