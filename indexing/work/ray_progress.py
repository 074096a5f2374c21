"""Reports progress within unfinished items of Ray workers, which an actor collects."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from riptide.indexing.work.polling import call_repeatedly
from riptide.indexing.work.worker_tasks import Report, ignore_progress

REPORT_INTERVAL_S = 1.0  # seconds between two reports of a worker, and between two queries of the driver
ANSWER_TIMEOUT_S = 10.0  # maximum seconds to wait for the board, which may never start


class ProgressBoard:
    """An actor with the number of processed rows of each unfinished item, by the number of the item."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}

    def set_rows(self, number: int, rows: int | None) -> None:
        """Sets the number of processed rows of an item; None removes an item that has ended."""
        if rows is None:
            self._rows.pop(number, None)
        else:
            self._rows[number] = rows

    def count_rows(self) -> int:
        """Returns the total number of processed rows of all unfinished items."""
        return sum(self._rows.values())


class Reporter:
    """A Report that sends the rows of an item to the board, at most once every REPORT_INTERVAL_S seconds."""

    def __init__(self, board: Any, number: int):
        self._board, self._number = board, number
        self._next = time.monotonic() + REPORT_INTERVAL_S

    def __call__(self, rows: int) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + REPORT_INTERVAL_S
            self._board.set_rows.remote(self._number, rows)

    def close(self) -> None:
        """Removes the item from the board, including rows of an earlier, lost attempt."""
        self._board.set_rows.remote(self._number, None)


@contextlib.contextmanager
def open_reporter(board: Any | None, number: int) -> Iterator[Report]:
    """Yields the Report of an item; without a board, a Report that does nothing."""
    if board is None:
        yield ignore_progress
        return
    report = Reporter(board, number)
    try:
        yield report
    finally:
        report.close()


@contextlib.contextmanager
def progress_board(on_progress: Report) -> Iterator[Any | None]:
    """Yields a board and reports its total every REPORT_INTERVAL_S seconds; yields None if progress is not shown."""
    if on_progress is ignore_progress:
        yield None
        return
    import ray

    board = ray.remote(num_cpus=0)(ProgressBoard).remote()

    def report_rows() -> None:
        with contextlib.suppress(Exception):  # without the board only the progress is missing
            on_progress(ray.get(board.count_rows.remote(), timeout=ANSWER_TIMEOUT_S))

    try:
        with call_repeatedly(report_rows, REPORT_INTERVAL_S):
            yield board
    finally:
        ray.kill(board)
