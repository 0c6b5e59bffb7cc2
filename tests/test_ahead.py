"""Work done ahead by other processes: its order, its errors, and its end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mmfn.data.ahead import ordered


def square(item: int) -> int:
    """Take longer for some items than for others."""
    time.sleep(0.01 * (item % 3))
    return item * item


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_results_come_in_order(workers: int) -> None:
    """Whoever is ready first; and no number of the global stream is drawn."""
    before = torch.get_rng_state()
    assert list(ordered(square, range(3, 14), workers=workers)) == [n * n for n in range(3, 14)]
    assert torch.equal(torch.get_rng_state(), before)


class TwoWords(ValueError):
    """An error that cannot be made of one text."""

    def __init__(self, name: str, cause: str) -> None:
        """Hold a name and a cause."""
        super().__init__(name, cause)


def refuse(item: int) -> int:
    """Refuse item 2."""
    if item == 2:
        raise TwoWords("item 2", "it is even")
    return item


@pytest.mark.parametrize("workers", [0, 2])
def test_a_refusal_comes_as_it_was_raised(workers: int) -> None:
    """After the results before it."""
    results = ordered(refuse, range(5), workers=workers)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(TwoWords) as caught:
        next(results)
    assert caught.value.args == ("item 2", "it is even")


def slip(item: int) -> int:
    """Have a bug."""
    return {}["no such key"]  # type: ignore[no-any-return]


def test_a_bug_comes_with_the_traceback_of_the_worker() -> None:
    """It names the line, which is in another process."""
    with pytest.raises(KeyError, match="in slip"):
        list(ordered(slip, range(5), workers=1))


def kill(item: int) -> int:
    """End the process that asks for item 1."""
    if item == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_a_worker_that_is_killed_ends_the_run() -> None:
    """As when memory runs out."""
    results = ordered(kill, range(4), workers=1)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(results)


def process_of(item: int) -> int:
    """Give the process that works on an item."""
    return os.getpid()


def gone(process: int) -> bool:
    """Say whether a process ends within some seconds."""
    for _ in range(100):
        if not Path(f"/proc/{process}").exists() or _is_zombie(process):
            return True
        time.sleep(0.1)
    return False


def _is_zombie(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
def test_workers_end_with_the_reader() -> None:
    """When it is closed in the middle."""
    results = ordered(process_of, range(100), workers=2)
    processes = {next(results), next(results)}
    assert os.getpid() not in processes
    results.close()
    with pytest.raises(StopIteration):
        next(results)
    assert all(gone(process) for process in processes)


INTERRUPTED = """
import os, time
from mmfn.data.ahead import ordered
def process_of(item):
    return os.getpid()
if __name__ == "__main__":
    results = ordered(process_of, range(100), workers=2)
    print(next(results), next(results), flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.parametrize(
    # Workers of a killed process notice every five seconds whether it is there.
    "stop",
    [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)],
)
def test_workers_end_with_a_process_that_is_stopped(stop: signal.Signals, tmp_path: Path) -> None:
    """By Ctrl-C or killed: none is left behind."""
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        workers = [int(word) for word in process.stdout.readline().split()]
        process.send_signal(stop)
        process.communicate(timeout=30)
    assert process.returncode == -stop
    assert len(workers) == 2
    assert all(gone(worker) for worker in workers)
