"""A runner for tests: runs items one after the other, in a chosen order, records them, and fails where wanted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.indexing.work.work import Work, run_work
from riptide.indexing.work.worker_tasks import (
    ANY_WORKERS,
    Allocation,
    Item,
    Report,
    WorkerResources,
    WorkerTask,
    ignore_progress,
)


class InlineRunner:
    """Runs tasks one item after the other.

    Args:
        cores: The cores that a worker with all cores gets.
        order: Returns the items in the order in which they are run; default: as they come.
        fail_after: Number of items, over all tasks, after which `error` is raised in place of the next one.
        error: What is raised.

    Attributes:
        ran: The class of the task, and the item, of each call so far.
    """

    def __init__(
        self,
        *,
        cores: int = 1,
        order: Callable[[Iterable[Any]], Iterable[Any]] = iter,
        fail_after: int | None = None,
        error: BaseException | None = None,
    ):
        self.request = ANY_WORKERS
        self._cores, self._order = cores, order
        self._fail_after, self._error = fail_after, error or RuntimeError("interrupted")
        self.ran: list[tuple[str, Any]] = []

    def allocate(self, resources: WorkerResources) -> Allocation:
        """Returns what a worker with these resources gets."""
        return Allocation(resources.cores or self._cores)

    def run(
        self, task: WorkerTask, items: Iterable[Item], *, on_progress: Report = ignore_progress
    ) -> Iterator[tuple[Item, Any]]:
        """Runs the task for every item; see Runner."""
        worker = None
        for item in self._order(items):
            if len(self.ran) == self._fail_after:
                raise self._error
            worker = worker or task.open(self.allocate(task.resources))
            self.ran.append((type(task).__name__, item))
            yield item, worker(item, on_progress)

    def run_on_first_available(self, task: WorkerTask, item: Any, count: int) -> Any:
        """Runs the task for one item; see Runner."""
        [(_, result)] = self.run(task, [item])
        return result

    def items(self, task: str) -> list[Any]:
        """Returns the items of a task, in the order in which they were run."""
        return [item for name, item in self.ran if name == task]


class Tally:
    """A Progress that keeps the counts of each stage.

    Attributes:
        counts: (kept, rows) by the title of a stage.
        added: Sums of other figures: tokens, pairs, parts.
    """

    def __init__(self) -> None:
        self.counts: dict[str, list[tuple[bool, int]]] = {}
        self.added: Counter[str] = Counter()

    def __call__(self, title: str, total: int | None, noun: str, artifact: str) -> _Counts:
        return _Counts(self.counts.setdefault(title, []), self.added)


class _Counts:
    def __init__(self, counts: list[tuple[bool, int]], added: Counter[str]):
        self._counts, self._added = counts, added

    def __enter__(self) -> _Counts:
        return self

    def __exit__(self, *error: object) -> None: ...

    def count(self, amount: int, is_kept: bool = False) -> None:
        self._counts.append((is_kept, amount))

    def show(self, unfinished: int) -> None: ...

    def add(self, figure: str, amount: int, **tags: str) -> None:
        self._added[figure] += amount


def tallied(store: Store, work: Work, runner: InlineRunner) -> tuple[Sequence[Artifact], dict[str, list]]:
    """Runs a work; returns its artifacts and the counts of each stage."""
    tally = Tally()
    return run_work(store, work, runner, tally), tally.counts
