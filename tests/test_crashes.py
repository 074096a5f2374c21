"""A run of tests continues after a test on Ray has ended its process, and after no other crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from crashes import CRASHED, ENDED

CONFTEST = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import crashes

def pytest_configure(config):
    config.addinivalue_line("markers", "cluster: on Ray")
    crashes.watch(config)

def pytest_collection_modifyitems(config, items):
    items[:] = [item for item in items if item.nodeid not in crashes.ended_before(config)]
"""
TESTS = """
import os, pathlib, pytest

@pytest.mark.MARK
def test_first(): pass

def test_that_crashes_once():
    mark = pathlib.Path("mark")
    if not mark.exists():
        mark.touch()
        os._exit(1)

def test_last(): assert FINE
"""
COMMAND = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "1", "--dist", "loadfile", "--max-worker-restart", "0"]
# Other plugins of this environment take seconds of each process to load.
ENVIRONMENT = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def run_tests(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the tests of a folder in a process of pytest-xdist."""
    environment = {**ENVIRONMENT, **variables}
    return subprocess.run(COMMAND, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)


def write_tests(folder: Path, mark: str, fine: bool = True) -> None:
    """Writes a file of three tests, the second of which ends its process once."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS.replace("MARK", mark).replace("FINE", str(fine)))


@pytest.mark.parametrize(("fine", "status"), [(True, 0), (False, 1)], ids=["fine", "failing"])
def test_a_second_run_does_what_a_crash_on_ray_left(tmp_path: Path, fine: bool, status: int) -> None:
    write_tests(tmp_path, "cluster", fine)
    crashed = run_tests(tmp_path)
    assert crashed.returncode == CRASHED, crashed.stdout
    assert "crashed while running 'test_it.py::test_that_crashes_once'" in crashed.stdout
    second = run_tests(tmp_path, RIPTIDE_CONTINUE="1")
    assert second.returncode == status, second.stdout
    assert ("2 passed" if fine else "1 failed, 1 passed") in second.stdout
    assert (tmp_path / ".pytest_cache/v" / ENDED).read_text() == "[]"  # a later run with the variable runs all tests


def test_make_does_not_pass_on_the_variable_of_the_second_run() -> None:
    command = ["make", "--no-print-directory", "--eval", 'show:;@echo "<$$RIPTIDE_CONTINUE>"', "show"]
    environment = {**os.environ, "RIPTIDE_CONTINUE": "1"}
    shown = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True)
    assert shown.stdout == "<>\n", shown.stderr


def test_another_crash_is_a_failure(tmp_path: Path) -> None:
    write_tests(tmp_path, "slow")
    assert run_tests(tmp_path).returncode == 1
