"""Keeps the memory that a step frees, for the next step."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # parameters of mallopt
_KEPT = 2**31 - 1  # bytes at the end of the heap, the largest value that mallopt takes
# What glibc adapts to in a process that frees large blocks. It does not adapt any more once one of these is set.
_ADAPTED = {_MMAP_MAX: 65_536, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}


@contextlib.contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Context in which glibc keeps freed memory instead of returning it to the system; other C libraries do not.

    glibc returns blocks of more than 32 MiB at once. A step on a CPU frees and requests several gigabytes in such
    blocks, and each page of them costs a page fault. The end of the context returns all free memory.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        mallopt, trim = libc.mallopt, libc.malloc_trim
    except (OSError, AttributeError):
        yield
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        for parameter, value in _ADAPTED.items():
            mallopt(parameter, value)
        trim(0)
