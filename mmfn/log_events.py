"""Scalars as TensorBoard reads them, written in place: no thread, and no TensorFlow."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


@contextmanager
def open_events(
    folder: Path, start: int
) -> Iterator[Callable[[int, Mapping[str, int | float | None]], None]]:
    """Open a new file of events in a folder, which hides those of steps after `start` (all, at 0).

    Yields a function of (step, values by tag); values that are absent or not finite are left out.
    """
    # Files are read in the order of their names. A fixed width keeps that the order of time.
    path = folder / f"events.out.tfevents.{time.time_ns():020d}.mmfn"
    with open(path, "xb") as file:
        writer = RecordWriter(file)

        def write(event: Event) -> None:
            writer.write(event.SerializeToString())
            writer.flush()

        def scalars(step: int, values: Mapping[str, int | float | None]) -> None:
            known = {k: float(v) for k, v in values.items() if v is not None and math.isfinite(v)}
            summary = Summary(
                value=[Summary.Value(tag=k, simple_value=v) for k, v in known.items()]
            )
            write(Event(wall_time=time.time(), step=step, summary=summary))

        write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        # A start at a step makes TensorBoard forget what earlier files say of it and later ones.
        again = SessionLog(status=SessionLog.START)
        write(Event(wall_time=time.time(), step=start + 1 if start else 0, session_log=again))
        yield scalars
