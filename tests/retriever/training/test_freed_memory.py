"""A process that keeps freed memory has no page faults when it requests the same memory again."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, resource, sys
import numpy as np
from riptide.retriever.training.freed_memory import keep_freed_memory

kind, size = sys.argv[1], int(sys.argv[2])
if kind == "after":
    with keep_freed_memory():
        np.ones(size, np.uint8)
with keep_freed_memory() if kind == "kept" else contextlib.nullcontext():
    np.ones(size, np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        np.ones(size, np.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_faults(kind: str, size: int) -> int:
    """Returns the page faults of a process that requests a block of `size` bytes ten times."""
    command = [sys.executable, "-c", PROGRAM, kind, str(size)]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is needed")
def test_kept_memory_causes_no_page_faults() -> None:
    assert count_faults("kept", 2**26) < 100 < count_faults("freed", 2**26) / 10


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is needed")
def test_blocks_that_glibc_keeps_itself_cause_none_afterwards_either() -> None:
    assert count_faults("after", 2**24) < 100
