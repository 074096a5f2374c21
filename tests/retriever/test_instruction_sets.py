"""Tests of numbers hold on CPUs with fewer instructions: some run again with the sets of AVX2, and of SSE 4.1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = ("terms/test_new_term.py", "losses/test_losses.py", "forward/test_packing.py")


@pytest.mark.slow
@pytest.mark.parametrize(("aten", "onednn"), [("avx2", "AVX2"), ("default", "SSE41")])
def test_tests_of_numbers_pass_with_lower_instruction_sets(aten: str, onednn: str) -> None:
    """In a process of its own, as torch chooses its kernels when it is imported."""
    files = [str(REPOSITORY / "tests/retriever" / file) for file in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *files]
    sets = {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}
    ended = subprocess.run(command, cwd=REPOSITORY, env=os.environ | sets, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:]
