"""The most memory that this process has had."""

import resource
import sys


def peak_bytes() -> int:
    """Give the largest resident memory of this process so far, in bytes.

    Linux tells it of the program itself; elsewhere it may be that of what started the process.
    """
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            line = next(line for line in file if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
