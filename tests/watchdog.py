"""Ends a process of pytest that has reported nothing for a long time, and prints what its threads do.

The time limit of a test does not see a process that hangs between two tests, or one of pytest-xdist that waits for the
other. Then only the end of CI's time would end it, which tells nothing.
"""

from __future__ import annotations

import faulthandler
import os
import sys

import pytest


class Watchdog:
    """A plugin of pytest, for the main process and for those of pytest-xdist.

    Args:
        silence: Seconds without a report after which the process ends with status 1.
    """

    def __init__(self, silence: float):
        self.silence = silence
        assert sys.__stderr__
        self._file = os.dup(sys.__stderr__.fileno())  # tests have another stderr, which pytest captures

    def pytest_sessionstart(self) -> None:
        """The tests are going to be collected."""
        self._wait()

    def pytest_runtest_logstart(self) -> None:
        """A test starts, in this process or in another one."""
        self._wait()

    def pytest_runtest_logreport(self) -> None:
        """A part of a test has ended."""
        self._wait()

    def pytest_sessionfinish(self) -> None:
        """The session ends, and fixtures with it."""
        self._wait()

    def _wait(self) -> None:
        faulthandler.dump_traceback_later(self.silence, exit=True, file=self._file)


def watch(config: pytest.Config, silence: float) -> None:
    """Adds the watchdog; to be called by pytest_configure.

    The main process of pytest-xdist waits longer than its workers: the one that hangs prints its stacks before it is
    ended with the main process, and the two do not write at once.
    """
    has_workers = getattr(config.option, "numprocesses", None) is not None and not hasattr(config, "workerinput")
    config.pluginmanager.register(Watchdog(1.5 * silence if has_workers else silence), "watchdog")
