"""The benchmark compares two sides that do the same work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

STEP = Path(__file__).parent / "bench" / "step.py"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_sides_of_the_benchmark_compute_the_same_losses(dtype: str) -> None:
    """Padded and packed, with pictures: step.py ends with status 1 where losses differ."""
    flags = ["--shape", "tiny", "--dtype", dtype, "--warmup", "1", "--steps", "1"]
    flags += ["--ours", "eager", "--theirs", "eager"]
    run = subprocess.run([sys.executable, STEP, *flags], capture_output=True, text=True, check=True)
    report = json.loads(run.stdout.splitlines()[-1])
    assert (report["shape"], report["dtype"]) == ("tiny", dtype)
    assert report["ratio"] == pytest.approx(report["ours_ms"] / report["theirs_ms"], abs=0.01)
    assert report["ratio_rss"] == pytest.approx(report["ours_mib"] / report["theirs_mib"], abs=0.01)
