"""Work that goes on behind a run: a checkpoint is written while steps are taken."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def behind(
    work: Callable[[Any, int], object], copy: Callable[[Any], Any]
) -> Iterator[Callable[[Any, int], None]]:
    """Let `work(state, at)` be done on a thread, one at a time, on a copy of the state.

    What is given copies the state and returns; it waits for the call before, if that is not done.
    At the end the last one is waited for. On several ranks `work` needs a process group of its
    own: its calls come between those of the steps.

    Raises:
        whatever `work` raised, at the next call or at the end.
    """
    thread: threading.Thread | None = None
    problems: list[BaseException] = []

    def wait() -> None:
        nonlocal thread
        if thread is not None:
            thread.join()
            thread = None
        if problems:
            raise problems.pop()

    def run(state: Any, at: int) -> None:
        try:
            work(state, at)
        except BaseException as error:
            problems.append(error)

    def start(state: Any, at: int) -> None:
        nonlocal thread
        wait()
        thread = threading.Thread(target=run, args=(copy(state), at), name=f"behind step {at}")
        thread.start()

    try:
        yield start
    except BaseException:
        # The reason why the run ends comes first; what was begun is finished.
        if thread is not None:
            thread.join()
        raise
    wait()
