"""Fixtures, and how a run of the tests is set up and reported."""

import os
from collections import defaultdict
from collections.abc import Iterator

# Before torch is imported: forked ranks that compile hang where the parent has a pool of compilers.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import jaxtyping
import pytest
import torch

SLOW = 2.0
"""Seconds from which a test is listed at the end."""


def pytest_configure() -> None:
    """Compute on one thread: sums have one order, and forked ranks find no threads to wait for."""
    torch.set_num_threads(1)


@pytest.fixture
def no_shape_checks() -> Iterator[None]:
    """Turn off the checks of annotations, which cannot be traced, while a test compiles."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that take long, one a line, with all their time together."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
    long = sorted(((s, test) for test, s in seconds.items() if s >= SLOW), reverse=True)
    for duration, test in long[:15]:
        terminalreporter.write_line(f"{duration:6.1f} s  {test}")
