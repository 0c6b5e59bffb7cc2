"""The most memory that this process has had."""

import ctypes
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


def keep_freed() -> bool:
    """Tell the C library to keep freed memory for the next step; gives whether it does.

    By default glibc gives large blocks back to the system and gets them again page by page.
    Measured on a CPU: 1,662 ms a step in place of 1,808, and 1,984 MiB of memory in place of 1,756.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # Another C library.
        return False
    # M_MMAP_MAX (-4): no block is mapped apart. M_TRIM_THRESHOLD (-1): the heap is never cut.
    return bool(mallopt(-4, 0)) and bool(mallopt(-1, 2**31 - 1))
