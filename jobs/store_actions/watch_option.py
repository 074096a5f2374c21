"""Synchronises a corpus with its source again and again, for import-corpus with the option watch."""

from __future__ import annotations

from riptide.jobs.commands.cli import describe_os_problem, find_input_error

import contextlib
from collections.abc import Callable
from time import sleep, time

from riptide.indexing.files.listing import FileStates, file_states
from riptide.jobs.common.printing import WARNING, print_only_results, say_result

MAX_WAIT_S = 600.0  # longest time between two attempts for the same files

Sync = Callable[[Callable[[], bool]], object]


def watch_source(source: str, seconds: float, store_url: str, sync: Sync) -> None:
    """Looks at the files of a source again and again, and synchronises when they have changed.

    Returns when a signal arrives between two syncs.

    Args:
        source: A local folder or file.
        seconds: Time between two looks.
        store_url: The store, for messages about its disk.
        sync: Makes the corpus equal to the source. Its argument returns whether the source is as it was at the look.

    Raises:
        KeyboardInterrupt: If a signal arrives during a sync, which the same command resumes.
    """
    watcher = SourceWatcher(source, seconds, store_url, sync)
    say_result(f"watch    {source}: looks every {seconds:g} s; SIGINT or SIGTERM ends the command")
    try:
        while True:
            watcher.look()
            sleep(seconds)
    except KeyboardInterrupt:
        if watcher.is_syncing:
            raise
        say_result(f"watch    {source}: ended by a signal; no sync was running")


class SourceWatcher:
    """The state of a watch.

    Args:
        source: A local folder or file.
        seconds: Time between two looks.
        store_url: The store, for messages about its disk.
        sync: As in `watch_source`.

    Attributes:
        is_syncing: Whether a sync runs, or was ended by a signal.
    """

    def __init__(self, source: str, seconds: float, store_url: str, sync: Sync):
        self.source, self._seconds, self._store_url, self._sync = source, seconds, store_url, sync
        self.is_syncing = False
        self._synced: FileStates | None = None  # the files at the last sync
        self._seen: FileStates | None = None  # the files at the last look
        self._failed: FileStates | None = None  # the files at the last sync, if it failed
        self._interval = self._remaining = 1  # looks between two attempts for these files, and until the next one
        self._warning = ""  # the warning that was printed last, unless the cause is gone

    def look(self) -> None:
        """Synchronises if the files have changed since the last sync, and are the same as at the last look.

        So files that change from look to look are not read. At the first look, files whose last changes are older than
        the time between two looks count as the same. If the source cannot be read, a warning says why, and the next
        look tries again. So it is after a sync that fails; if it fails again for the same files, the time until the
        next attempt doubles, up to MAX_WAIT_S.
        """
        try:
            files = file_states(self.source)
        except Exception as error:
            self._warn(error, self._seconds)
            return
        is_settled = files == self._seen
        if self._seen is None:
            is_settled = max(changed_ns for _, changed_ns in files.values()) < (time() - self._seconds) * 1e9
        self._seen = files
        if files == self._synced:
            self._failed = None
            if self._warning:
                say_result(f"watch    {self.source}: has the files of the last sync again")
                self._warning = ""
        elif is_settled and self._is_due(files):
            self._synchronise(files)

    def _is_due(self, files: FileStates) -> bool:
        """Returns whether files are to be read at this look; counts the looks since a sync of them has failed."""
        if files != self._failed:
            self._interval = self._remaining = 1
        self._remaining -= 1
        return self._remaining <= 0

    def _synchronise(self, files: FileStates) -> None:
        """Synchronises; all lines of the first sync are printed, and one line about each later one."""
        self.is_syncing = True
        try:
            with contextlib.nullcontext() if self._synced is None else print_only_results():
                self._sync(lambda: file_states(self.source) == files)
        except Exception as error:
            self.is_syncing = False  # after a signal, it stays True
            if files == self._failed:
                self._interval = min(2 * self._interval, max(1, int(MAX_WAIT_S // self._seconds)))
            self._failed, self._remaining = files, self._interval
            self._warn(error, self._interval * self._seconds)
        else:
            self.is_syncing = False
            self._synced, self._failed, self._warning = files, None, ""

    def _warn(self, error: Exception, wait_s: float) -> None:
        """Prints a warning, unless the last one was the same. Raises an error that is not about input or a disk."""
        cause = find_input_error(error)
        problem = f"{cause}" if cause is not None else describe_os_problem(error, self._store_url)
        if problem is None or isinstance(error, BrokenPipeError):
            raise error
        if problem != self._warning:
            self._warning = problem
            say_result(f"{WARNING}{' '.join(problem.split())}; the next attempt is in {wait_s:g} s")
