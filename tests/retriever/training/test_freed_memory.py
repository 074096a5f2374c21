"""A process that keeps freed memory has no page faults when it requests the same memory again."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, resource, sys
import numpy as np
from riptide.retriever.training.freed_memory import keep_freed_memory

with keep_freed_memory() if sys.argv[1] == "kept" else contextlib.nullcontext():
    np.ones(2**26, np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        np.ones(2**26, np.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is needed")
def test_kept_memory_causes_no_page_faults() -> None:
    faults = {
        kind: int(subprocess.run([sys.executable, "-c", PROGRAM, kind], capture_output=True, check=True).stdout)
        for kind in ("freed", "kept")
    }
    assert faults["kept"] < 100 < faults["freed"] / 10, faults
