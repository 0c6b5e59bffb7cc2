"""Time one training step, ours against Hugging Face's, and print the ratio.

    python tests/bench/step.py                      medium shape, float32, one thread
    python tests/bench/step.py --dtype bfloat16
    python tests/bench/step.py --shape chat
    python tests/bench/step.py --experts 16         a mixture of experts
    python tests/bench/step.py --ranks 2            ours on fsdp=2 against theirs with FSDP2, gloo

Each side is a process of its own (or one a rank) that lives through all rounds; in a round each
does one step while the others wait, and the least of its times counts, so a machine that is slow
for a while is slow for all. All start from the same weights and read the same samples: unless
their losses agree, before the first update and after it, nothing is compared. Memory is the peak
of resident memory over the timed steps. The last line is one JSON object; `ratio` is our time over
that of their quickest form, and `ratio_rss` is our memory over that of the same form.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shapes import SHAPES

HERE = Path(__file__).parent
CLOSE = {"float32": 1e-4, "bfloat16": 1e-2}
"""Relative difference of losses; a bfloat16 has 8 bits, and a loss is a mean of many."""

REMAT = {("float32", False): 4, ("float32", True): 5}
"""Layers that are run again backward, of a dense model or one of experts, where that is not 0:
float32 has time to spare for memory."""


class Side:
    """The processes, one a rank, that do one step together whenever they are asked."""

    def __init__(self, name: str, file: str, flags: list[str], threads: int, ranks: int) -> None:
        """Start them; `ask` what comes next only when they are ready."""
        few = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        self.name = name
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / file), *flags, "--threads", str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | few | quiet | place | {"RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
        self.hear()
        self.steps: list[dict[str, float]] = []

    def hear(self) -> dict[str, Any]:
        """Wait for the next answer of each: the longest time, most memory, and the mean loss."""
        answers: list[dict[str, Any]] = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{self.name} ended with status {process.wait()}")
            answers.append(json.loads(line))
        return {
            key: (statistics.fmean if key == "loss" else max)(answer[key] for answer in answers)
            for key in answers[0]
        }

    def ask(self, word: str) -> dict[str, Any]:
        """Have them do something, and wait for their answers."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
        return self.hear()

    def step(self) -> None:
        """Do one step and keep what they say of it."""
        self.steps.append(self.ask("step"))

    def close(self) -> None:
        """End them: they stop where their input does."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait()


def compare(sides: list[Side], warmup: int, steps: int) -> dict[str, dict[str, float]]:
    """Do the rounds, and give what each side took."""
    for _ in range(warmup):
        for side in sides:
            side.step()
    for side in sides:
        side.ask("mark")
    for _ in range(steps):
        for side in sides:
            side.step()
    results = {}
    for side in sides:
        times = [step["ms"] for step in side.steps[warmup:]]
        results[side.name] = {
            "ms": min(times),
            "median_ms": statistics.median(times),
            "mib": side.ask("peak")["mib"],
            "first_step_s": side.steps[0]["ms"] / 1e3,
            "first_loss": side.steps[0]["loss"],
            "second_loss": side.steps[1]["loss"],
            "last_loss": side.steps[-1]["loss"],
        }
    return results


def table(results: dict[str, dict[str, float]], tokens: int) -> str:
    """Lay out what each side took, one a line."""
    heads = ("", "least ms", "median ms", "tokens/s", "peak MiB", "first step s", "loss", "to")
    rows = [
        (
            name,
            f"{r['ms']:.1f}",
            f"{r['median_ms']:.1f}",
            f"{1e3 * tokens / r['ms']:.0f}",
            f"{r['mib']:.0f}",
            f"{r['first_step_s']:.1f}",
            f"{r['first_loss']:.5f}",
            f"{r['last_loss']:.5f}",
        )
        for name, r in results.items()
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = []
    for first, *rest in (heads, *rows):
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def main() -> None:
    """Start the sides one after the other, compare them, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="medium")
    parser.add_argument("--dtype", choices=CLOSE, default="float32")
    parser.add_argument("--ours", choices=["blocks", "compiled", "eager"], default="blocks")
    parser.add_argument(
        "--theirs", choices=["eager", "compiled"], nargs="+", default=["eager", "compiled"]
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each side")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--remat", type=int, help="layers that we run again backward; by default REMAT"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1, help="each with samples of its own")
    parser.add_argument("--experts", type=int, default=0, help="experts of each block; 0: dense")
    parser.add_argument("--top-k", type=int, default=4, help="experts of a token")
    parser.add_argument("--moe-inter", type=int, default=384, help="inner width of an expert")
    flags = parser.parse_args()
    if flags.steps < 1 or flags.warmup < 1:
        parser.error(f"--steps={flags.steps} and --warmup={flags.warmup} must be at least 1")

    sides: list[Side] = []
    sizes = (flags.threads, flags.ranks)
    # The first side writes the weights there that we read.
    with tempfile.TemporaryDirectory() as folder:
        common = ["--shape", flags.shape, "--dtype", flags.dtype, "--seed", str(flags.seed)]
        common += ["--folder", folder]
        common += ["--experts", *map(str, (flags.experts, flags.top_k, flags.moe_inter))]
        try:
            for form in dict.fromkeys(flags.theirs):
                own = ["--form", form] if sides else ["--form", form, "--save"]
                sides.append(Side(f"theirs, {form}", "peer_hf.py", common + own, *sizes))
            usual = REMAT.get((flags.dtype, flags.experts > 0), 0)
            remat = usual if flags.remat is None else flags.remat
            own = ["--form", flags.ours, "--remat", str(remat)]
            sides.append(Side(f"ours, {flags.ours}", "ours.py", common + own, *sizes))
            results = compare(sides, flags.warmup, flags.steps)
        finally:
            for side in sides:
                side.close()

    print(table(results, SHAPES[flags.shape].tokens * flags.ranks))
    ours = results.pop(f"ours, {flags.ours}")
    best = min(results, key=lambda name: results[name]["ms"])
    theirs = results[best]
    for name, result in results.items():
        for which in ("first_loss", "second_loss"):
            if not abs(ours[which] / result[which] - 1) <= CLOSE[flags.dtype]:
                raise SystemExit(f"{which}: ours is {ours[which]}, {name} is {result[which]}")
    report = {
        "ratio": round(ours["ms"] / theirs["ms"], 4),
        "ratio_rss": round(ours["mib"] / theirs["mib"], 4),
        "ours_ms": round(ours["ms"], 2),
        "theirs_ms": round(theirs["ms"], 2),
        "ours_mib": round(ours["mib"], 1),
        "theirs_mib": round(theirs["mib"], 1),
        "theirs_form": best.removeprefix("theirs, "),
        "ours_form": flags.ours,
        "ours_remat": remat,
        "dtype": flags.dtype,
        "shape": flags.shape,
        "experts": flags.experts,
        "threads": flags.threads,
        "ranks": flags.ranks,
        "steps": flags.steps,
        "first_loss": {"ours": ours["first_loss"], "theirs": theirs["first_loss"]},
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
