"""Faults at a storage write, counted: the n-th write raises, or ends the process. A deletion counts as a write.

`python crash_points.py N before|after JOB ARGUMENTS` runs a job in this process and ends it by os._exit(9) at write N.
`stop-before` and `stop-after` stop the process there, until it receives SIGCONT.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WRITES = ("put", "put_new", "compare_and_swap", "delete")
EXIT_STATUS = 9
RECORDS_PER_LIST = 5  # so that a small import and a small sync write a list of records


class Counter:
    """Counts the writes of all threads; at write number `at` it calls `fault`, before or after the write."""

    def __init__(self, at: int | None, fault: Callable[[], object], *, after: bool = False):
        self.at, self.fault, self.after = at, fault, after
        self.count = 0
        self._lock = threading.Lock()

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a method of the storage that counts."""

        def write(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                number, self.count = self.count, self.count + 1
            if number == self.at and not self.after:
                self.fault()
            result = method(*arguments, **options)
            if number == self.at and self.after:
                self.fault()
            return result

        return write


@contextlib.contextmanager
def counted_writes(at: int | None, fault: Callable[[], object], *, after: bool = False) -> Iterator[Counter]:
    """Within it, the writes to local stores are counted, and write number `at` (from 0) meets a fault.

    Lists of records are shorter.
    """
    from riptide.indexing.storage.storage import LocalStorage
    from riptide.indexing.store import draft

    counter = Counter(at, fault, after=after)
    originals = {name: getattr(LocalStorage, name) for name in WRITES}
    records_per_list, draft.RECORDS_PER_LIST = draft.RECORDS_PER_LIST, RECORDS_PER_LIST
    for name, method in originals.items():
        setattr(LocalStorage, name, counter.wrap(method))
    try:
        yield counter
    finally:
        draft.RECORDS_PER_LIST = records_per_list
        for name, method in originals.items():
            setattr(LocalStorage, name, method)


@contextlib.contextmanager
def failing_calls(root: Path, call: str, at: int, error: int) -> Iterator[Counter]:
    """Within it, call number `at` (from 0) of `os.CALL` to the files below a folder raises an OSError."""

    def fail() -> None:
        raise OSError(error, os.strerror(error))

    def replacement(first: Any, *arguments: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.fspath(first)
        is_below = path.startswith(f"{root}/")
        return (counted if is_below else original)(first, *arguments, **options)

    counter = Counter(at, fail)
    original = getattr(os, call)
    counted = counter.wrap(original)
    setattr(os, call, replacement)
    try:
        yield counter
    finally:
        setattr(os, call, original)


def main(at: str, when: str, name: str, *arguments: str) -> None:
    """Runs a job and ends, or stops, the process at a write."""
    from riptide.jobs.commands.cli import options_class_of, run

    job = importlib.import_module(f"riptide.jobs.{name}")
    stops = when.startswith("stop-")
    fault = (lambda: os.kill(os.getpid(), signal.SIGSTOP)) if stops else (lambda: os._exit(EXIT_STATUS))
    with counted_writes(int(at), fault, after=when.endswith("after")):
        run(job.main, options_class_of(job.main), list(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
