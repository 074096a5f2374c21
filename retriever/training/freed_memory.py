"""Keeps the memory that a step frees, for the next step."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of mallopt
_KEPT = 2**31 - 1  # bytes at the end of the heap, the largest value that mallopt takes


def keep_freed_memory() -> None:
    """Has glibc keep freed memory instead of returning it to the system; does nothing with another C library.

    glibc returns blocks of more than 32 MiB at once. A step on a CPU frees and requests several gigabytes in such
    blocks, and each page of them costs a page fault.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, _KEPT)
