"""A process of pytest that hangs outside a test ends and tells where, alone and with pytest-xdist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from watchdog import watch

def pytest_configure(config):
    watch(config, silence=10.0)  # pytest-xdist needs seconds to start its worker

def pytest_runtest_logfinish(nodeid):
    if "second" in nodeid:
        hang_between_tests()

def hang_between_tests():
    time.sleep(600)
"""
TESTS = "def test_first(): pass\ndef test_second(): pass\ndef test_third(): pass\n"


@pytest.mark.parametrize("parallel", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_a_process_that_hangs_between_tests_ends_and_prints_its_stacks(tmp_path: Path, parallel: list[str]) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *parallel, str(tmp_path)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "in hang_between_tests" in ended.stderr


def test_a_process_that_reports_goes_on(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.replace("hang_between_tests()\n", "time.sleep(0)\n", 1))
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0
    assert "3 passed" in ended.stdout
