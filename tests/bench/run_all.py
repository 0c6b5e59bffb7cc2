"""Run every comparison, one after the other; flags are given to each of them.

Each prints its own table; at the end stands one line for each. This takes some minutes, and needs
a machine that does nothing else.
"""

import json
import subprocess
import sys
from pathlib import Path

RUNS = (
    ["--shape", "medium", "--dtype", "float32"],
    ["--shape", "medium", "--dtype", "bfloat16"],
    ["--shape", "chat", "--dtype", "float32"],
    ["--shape", "chat", "--dtype", "bfloat16"],
    ["--shape", "medium", "--dtype", "float32", "--experts", "16"],
    ["--shape", "medium", "--dtype", "bfloat16", "--experts", "16"],
    ["--shape", "medium", "--dtype", "float32", "--ranks", "2"],
    ["--shape", "medium", "--dtype", "bfloat16", "--ranks", "2"],
)


def main() -> None:
    """Run them, and say of each what part of their time and memory ours takes."""
    step = str(Path(__file__).with_name("step.py"))
    reports = []
    for flags in RUNS:
        print(f"== {' '.join(flags)}", flush=True)
        command = [sys.executable, step, *flags, *sys.argv[1:]]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(run.stdout, end="", flush=True)
        reports.append(json.loads(run.stdout.splitlines()[-1]))
    print("== ours over theirs")
    for report in reports:
        print(
            f"{report['shape']:8} {report['dtype']:9} ranks {report['ranks']}  "
            f"experts {report['experts']:2}  "
            f"time {report['ratio']:.3f}  memory {report['ratio_rss']:.3f}  "
            f"(theirs {report['theirs_form']})"
        )


if __name__ == "__main__":
    main()
