"""Synchronises a corpus with its source again and again, for import-corpus with the option watch."""

from __future__ import annotations

from riptide.jobs.commands.cli import describe_os_problem, find_input_error

import contextlib
from collections.abc import Callable
from time import sleep, time

from riptide.indexing.files.listing import FileStates, file_states
from riptide.jobs.common.printing import WARNING, print_only_results, say_result


def watch_source(source: str, seconds: float, store_url: str, sync: Callable[[], object]) -> None:
    """Looks at the files of a source again and again, and synchronises when they have changed.

    Returns when a signal arrives between two syncs.

    Args:
        source: A local folder or file.
        seconds: Time between two looks.
        store_url: The store, for messages about its disk.
        sync: Makes the corpus equal to the source.

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

    Args: as those of `watch_source`.

    Attributes:
        is_syncing: Whether a sync runs, or was ended by a signal.
    """

    def __init__(self, source: str, seconds: float, store_url: str, sync: Callable[[], object]):
        self.source, self._seconds, self._store_url, self._sync = source, seconds, store_url, sync
        self.is_syncing = False
        self._synced: FileStates | None = None  # the files at the last sync
        self._seen: FileStates | None = None  # the files at the last look
        self._warning = ""  # the warning that was printed last, unless the cause is gone

    def look(self) -> None:
        """Synchronises if the files have changed since the last sync, and are the same as at the last look.

        So a file that is still being written is not read. At the first look, files whose last changes are older than
        the time between two looks count as the same. If the source cannot be read, or if a sync is refused, a warning
        says why, and the next look tries again.
        """
        try:
            files = file_states(self.source)
            is_settled = files == self._seen
            if self._seen is None:
                is_settled = max(changed_ns for _, changed_ns in files.values()) < (time() - self._seconds) * 1e9
            self._seen = files
            if files != self._synced:
                if is_settled:
                    self._synchronise(files)
            elif self._warning:
                say_result(f"watch    {self.source}: can be read again, and has not changed")
                self._warning = ""
        except Exception as error:
            self._warn(error)

    def _synchronise(self, files: FileStates) -> None:
        """Synchronises; all lines of the first sync are printed, and one line about each later one."""
        self.is_syncing = True
        try:
            with contextlib.nullcontext() if self._synced is None else print_only_results():
                self._sync()
        except Exception:
            self.is_syncing = False  # after a signal, it stays True
            raise
        self.is_syncing = False
        self._synced, self._warning = files, ""

    def _warn(self, error: Exception) -> None:
        """Prints a warning, unless the last one was the same. Raises an error that is not about input or a disk."""
        cause = find_input_error(error)
        problem = f"{cause}" if cause is not None else describe_os_problem(error, self._store_url)
        if problem is None or isinstance(error, BrokenPipeError):
            raise error
        if problem != self._warning:
            self._warning = problem
            say_result(f"{WARNING}{' '.join(problem.split())}; the next look, in {self._seconds:g} s, tries again")
