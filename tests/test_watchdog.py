"""A process of pytest that hangs outside a test ends and tells where, alone and with pytest-xdist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = f"""
import pytest, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from watchdog import watch

def pytest_configure(config):
    global watchdog
    watch(config, silence=300.0)  # on a busy machine, pytest-xdist needs long to start its worker
    watchdog = config.pluginmanager.get_plugin("watchdog")

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    if "second" in report.nodeid and report.when == "teardown":
        watchdog.silence /= 100  # what follows hangs

def pytest_runtest_logfinish(nodeid):
    if "second" in nodeid:
        hang_between_tests()

def hang_between_tests():
    time.sleep(600)
"""
TESTS = "def test_first(): pass\ndef test_second(): pass\ndef test_third(): pass\n"


def run_tests(folder: Path, conftest: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the tests without other plugins of this environment, which take seconds of each process to load."""
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.parametrize("parallel", [[], ["-p", "xdist", "-n", "1"]], ids=["alone", "xdist"])
def test_a_process_that_hangs_between_tests_ends_and_prints_its_stacks(tmp_path: Path, parallel: list[str]) -> None:
    ended = run_tests(tmp_path, CONFTEST, *parallel)
    assert ended.returncode == 1
    assert "in hang_between_tests" in ended.stderr


def test_a_process_that_reports_goes_on(tmp_path: Path) -> None:
    hanging = "watchdog.silence /= 100", "    hang_between_tests()"
    assert all(line in CONFTEST for line in hanging)
    ended = run_tests(tmp_path, CONFTEST.replace(hanging[0], "pass").replace(hanging[1], "    time.sleep(0)"))
    assert ended.returncode == 0
    assert "3 passed" in ended.stdout
