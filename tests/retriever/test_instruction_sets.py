"""Tests of numbers hold on CPUs with fewer instructions: some run again with AVX2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = ("objectives/test_new_term.py", "objectives/test_losses.py")


@pytest.mark.slow
def test_tests_of_numbers_pass_with_the_instruction_set_avx2() -> None:
    """In a process of its own, as torch chooses its kernels when it is imported."""
    files = [str(REPOSITORY / "tests/retriever" / file) for file in FILES]
    plugins = ["-p", "no:cacheprovider", "-p", "pytest_timeout"]  # others take seconds to load
    command = [sys.executable, "-m", "pytest", "-q", "-x", *plugins, "-m", "not slow", *files]
    sets = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(command, cwd=REPOSITORY, env=os.environ | sets, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:]
