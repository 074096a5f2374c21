"""Lets a run of tests continue after a test on Ray has ended its process.

Ray's C++ core ends the process of a driver, without a line, if a thread calls it while another one disconnects. Such a
crash is printed, and the run exits with status CRASHED if nothing else failed; a second run with RIPTIDE_CONTINUE=1
then runs the tests that had not ended. pytest-xdist 3.8 may wait without end for the last tests if it replaces the
process itself.
"""

from __future__ import annotations

import os

import pytest

CRASHED = 9  # exit status
ENDED = "riptide/ended"  # the tests that had ended, in pytest's cache


class Crashes:
    """A plugin for the main process of pytest-xdist.

    Args:
        config: The configuration of the session.
    """

    def __init__(self, config: pytest.Config):
        self._config = config
        self._crashed = False
        self._ended: list[str] = []

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has ended."""
        self._ended.append(nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        """The process of a test has ended."""
        file = self._config.rootpath / crashitem.partition("::")[0]
        self._crashed = "pytest.mark.cluster" in file.read_text(encoding="utf-8")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Notes the tests that have ended, for a second run; the second run removes the note."""
        must_continue = self._crashed and session.testsfailed == 1
        if must_continue or "RIPTIDE_CONTINUE" in os.environ:
            assert self._config.cache is not None
            self._config.cache.set(ENDED, self._ended if must_continue else [])
        if must_continue:
            session.exitstatus = CRASHED


def watch(config: pytest.Config) -> None:
    """Adds the plugin; to be called by pytest_configure."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Crashes(config), "crashes")


def ended_before(config: pytest.Config) -> set[str]:
    """Returns the names of the tests that had ended before the crash that this run continues after."""
    if "RIPTIDE_CONTINUE" not in os.environ:
        return set()
    assert config.cache is not None
    return set(config.cache.get(ENDED, []))
