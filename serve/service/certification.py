"""Certification: searches a sample of a service's approximate searches again exactly, and estimates their recall.

The exact searches run in slices of rows while no request waits or runs, with pauses that keep their CPU time below
BUDGET. If the recall of searches in an index is below the target, the search effort of the index may be raised.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from riptide.indexing.dense.certified_recall import Interval, mean_interval, recall_of_hits, selectivity_class
from riptide.indexing.dense.factory import num_lists
from riptide.indexing.exact import Hits, merge_hits, without_rows
from riptide.indexing.hit_sources.dense import ONLINE
from riptide.indexing.hit_sources.exact import EXACT
from riptide.indexing.hit_sources.index_source import INDEX
from riptide.indexing.hit_sources.online_search import SearchTarget
from riptide.serve.parts.leaf import AskLeaves, SliceHits, SliceRequest, SourceQueries, wait_for_reply
from riptide.serve.parts.query_states import QueryGroup
from riptide.serve.release.artifacts import ReleaseArtifacts
from riptide.serve.release.release import Release
from riptide.serve.release.release_tasks import ServedSource, ServedTask, SourceSearch

log = logging.getLogger("riptide.serve")

BUDGET = 0.02  # CPU seconds of certification per second, of one core
SLICE_BYTES = 32 << 20  # bytes of vectors that a slice reads, which takes one core about 10 ms
TOGETHER = 8  # maximum samples with the same filter that are searched together: the vectors are read once for all
MAX_WAITING = 64  # samples that wait; more are dropped
WINDOW = 500  # queries of the estimate of a group, the latest ones
POLL_S = 0.02  # seconds between two checks whether a request waits or runs
SLICE_S = 30.0  # timeout of a slice in seconds
RAISE = 1.5  # factor by which a search effort is raised
UNKNOWN = Interval(np.nan, 0.0, 1.0)
OUTCOMES = ("certified", "queue_full", "release_gone", "effort_raised", "no_hits", "failed")  # of sampled queries


SearchState = tuple[str | None, ...]  # fingerprints of what determines the hits of a task in a target


class RecallGroup(NamedTuple):
    """The searches whose recall is estimated together: a task, a mode, a class of k and a class of filters."""

    task: str
    mode: str
    k: str
    filter: str


class IndexSearches(NamedTuple):
    """The searches that have the same search effort: those of a task and a mode in an index."""

    task: str
    mode: str
    source: ServedSource


@dataclass(frozen=True)
class RaisedEffort:
    """The raised search effort of searches in an index.

    Attributes:
        name: Its name: nprobe or ef_search.
        value: The lists to probe, or the vectors that a search of a graph keeps.
        built: The value that the build of the index measured.
        state: The state of the source for which it was raised.
    """

    name: str
    value: int
    built: int
    state: SearchState


@dataclass(frozen=True)
class GroupRecall:
    """The estimated recall of a group; samples 0 and a mean of NaN if no sample is of the live release."""

    samples: int = 0
    interval: Interval = UNKNOWN
    is_below_target: bool = False


class Sample(NamedTuple):
    """A search that is to be repeated exactly: its vector, float32 [dim], and its approximate hits, [1, k]."""

    release: Release
    task: ServedTask
    mode: str
    source: ServedSource
    filter: str | None
    effort: int | None
    k: int
    vector: np.ndarray
    hits: Hits

    @property
    def state(self) -> SearchState:
        return search_state(self.release, self.task, self.source.target)

    @property
    def searches(self) -> IndexSearches:
        return IndexSearches(self.task.name, self.mode, self.source)


class ReleaseGoneError(Exception):
    """A release with another state of a source became live while a sample of the source was searched."""


class _Recall(NamedTuple):
    """The recall of a sample in a window, with the source and its state."""

    source: ServedSource
    state: SearchState
    value: float


class Certifier:
    """Samples the approximate dense searches of a service, and estimates their recall from exact searches.

    `offer` is thread-safe; all else runs in one event loop.

    Args:
        share: The share of the searches that are sampled.
        target: The recall below which a group is reported; None: none.
        max_effort: The maximum to which the search effort of the searches of such a group is raised; None: it is not.
        ask_leaves: Asks all leaves.
        live: Returns the live release.
        is_idle: Returns whether no request waits or runs.
        erased_rows: Returns the rows, int64 ascending, that answers of a release leave out.

    Attributes:
        recalls: The estimates of the live release, by group. Samples of earlier releases count if the live release
            searches the same artifacts; groups of its tasks stay if they have no other samples.
        raised: The raised search efforts.
        cpu_s: CPU seconds of all exact searches.
    """

    def __init__(
        self,
        share: float,
        target: float | None,
        max_effort: int | None,
        ask_leaves: AskLeaves,
        live: Callable[[], ReleaseArtifacts | None],
        is_idle: Callable[[], bool],
        erased_rows: Callable[[Release], np.ndarray],
    ):
        self._share, self._target, self._max_effort, self._ask_leaves = share, target, max_effort, ask_leaves
        self._live, self._is_idle, self._erased_rows = live, is_idle, erased_rows
        self._random = random.Random()
        self._samples: deque[Sample] = deque()
        self._windows: dict[RecallGroup, deque[_Recall]] = {}
        self._release: ReleaseArtifacts | None = None  # the release of the windows
        self._free_at = 0.0  # time at which the budget allows the next slice
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="certify")
        self.recalls: dict[RecallGroup, GroupRecall] = {}
        self.raised: dict[IndexSearches, RaisedEffort] = {}
        self.cpu_s = 0.0

    @property
    def counts(self) -> dict[str, int]:
        """The number of sampled queries by outcome."""
        return {outcome: self._counts[outcome] for outcome in OUTCOMES}

    def efforts(self, task: str, search: SourceSearch) -> dict[ServedSource, int]:
        """Returns the raised search efforts of the sources of a search of the live release."""
        if not self.raised:
            return {}
        mode = _mode_of(search)
        return {
            source: raised.value
            for source in search.sources
            if (raised := self.raised.get(IndexSearches(task, mode, source))) is not None
        }

    def keep_raised(self, live: ReleaseArtifacts) -> None:
        """Drops the raised efforts of sources that the live release searches in another state, or not at all."""
        for searches, raised in list(self.raised.items()):
            if not _has_state(live, searches.task, searches.source.target, raised.state):
                del self.raised[searches]
                log.warning(
                    "%s of %s is that of the build again, for task %s, mode %s: release %s searches other artifacts",
                    raised.name,
                    searches.source.source_text,
                    searches.task,
                    searches.mode,
                    live.release.id,
                )

    def offer(self, groups: Sequence[QueryGroup]) -> None:
        """Samples the searches of a batch: those in an index to which all shards answered."""
        for group in groups:
            if group.source.kind is not INDEX:
                continue
            for position, (state, label) in enumerate(group.members):
                query = state.query
                is_complete = state.query_error is None and state.shards.successful == state.shards.total
                if not is_complete or self._random.random() >= self._share:
                    continue
                if len(self._samples) >= MAX_WAITING:
                    self._count("queue_full")
                    continue
                # Copies: the arrays are views of the hits of a whole batch.
                hits = Hits(*(each[:, : query.k].copy() for each in state.hits_by_label[label]))
                self._samples.append(
                    Sample(
                        query.release,
                        query.task,
                        _mode_of(query.search),
                        group.source,
                        group.filter,
                        group.effort,
                        query.k,
                        group.queries[position].copy(),
                        hits,
                    )
                )

    async def step(self) -> None:
        """Searches the next samples, and updates the estimates of their groups."""
        live = self._live()
        if live is None:
            return
        if live is not self._release:
            self._release = live
            await self._drop_stale_recalls(live)
        samples = self._take_samples(live)
        if not samples:
            return
        try:
            exact, share = await self._search(live, samples)
        except ReleaseGoneError:
            self._count("release_gone", len(samples))
            return
        except BaseException:
            self._count("failed", len(samples))
            raise
        erased_rows, changed_groups = self._erased_rows(live.release), set()
        for row, sample in enumerate(samples):
            expected = without_rows(Hits(*(each[row : row + 1, : sample.k] for each in exact)), erased_rows)
            if not (expected.rows >= 0).any():
                self._count("no_hits")  # nothing matches the filter, or it is erased
                continue
            group = RecallGroup(sample.task.name, sample.mode, k_class(sample.k), selectivity_class(share))
            window = self._windows.setdefault(group, deque(maxlen=WINDOW))
            recall = float(recall_of_hits(sample.hits, expected)[0])
            window.append(_Recall(sample.source, sample.state, recall))
            self._count("certified")
            changed_groups.add(group)
        for group in changed_groups:
            await self._estimate(group)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _drop_stale_recalls(self, live: ReleaseArtifacts) -> None:
        """Drops the recalls of sources that the live release searches in another state, and groups of removed tasks."""
        for group, window in list(self._windows.items()):
            if group.task not in live.tasks:
                del self._windows[group]
                self.recalls.pop(group, None)
                continue
            states = {(recall.source.target, recall.state) for recall in window}
            current = {key for key in states if _has_state(live, group.task, *key)}
            if current != states:
                recalls = (recall for recall in window if (recall.source.target, recall.state) in current)
                self._windows[group] = deque(recalls, maxlen=WINDOW)
                await self._estimate(group)

    async def _estimate(self, group: RecallGroup) -> None:
        """Updates the estimate of a group from its window."""
        values = np.array([recall.value for recall in self._windows[group]])
        if not len(values):
            self.recalls[group] = GroupRecall()
            return
        interval = await asyncio.get_running_loop().run_in_executor(self._pool, mean_interval, values)
        self._report(group, len(values), interval)

    def _take_samples(self, live: ReleaseArtifacts) -> list[Sample]:
        """Removes the first sample of the live release and those that can be searched together with it."""
        waiting = [self._samples.popleft() for _ in range(len(self._samples))]
        of_release = [sample for sample in waiting if _is_current(live, sample)]
        self._count("release_gone", len(waiting) - len(of_release))
        current = [sample for sample in of_release if sample.effort == self._effort(sample.searches)]
        self._count("effort_raised", len(of_release) - len(current))
        selected, others = list[Sample](), list[Sample]()
        for sample in current:
            first = selected[0] if selected else sample
            is_alike = (sample.source, sample.filter) == (first.source, first.filter)
            (selected if is_alike and len(selected) < TOGETHER else others).append(sample)
        self._samples.extendleft(reversed(others))
        return selected

    async def _search(self, live: ReleaseArtifacts, samples: Sequence[Sample]) -> tuple[Hits, float | None]:
        """Returns the exact hits of samples with one filter, and the share of the passages that match it."""
        first = samples[0]
        embeddings = live.readers[ONLINE, first.source.target].embeddings
        queries = SourceQueries(
            EXACT.name,
            first.source.target,
            np.stack([sample.vector for sample in samples]),
            max(sample.k for sample in samples),
            first.filter,
        )
        step = max(1, SLICE_BYTES // (2 * embeddings.dim))
        best, num_rows = list[Hits](), 0
        for start in range(0, embeddings.num_rows, step):
            await self._wait_for_idle_time(live, samples)
            request = SliceRequest(live.release.id, time.monotonic() + SLICE_S, queries, start, start + step)
            replies = await asyncio.get_running_loop().run_in_executor(self._pool, self._search_slice, request)
            cpu_s = sum(reply.cpu_s for reply in replies)
            self.cpu_s += cpu_s
            self._free_at = time.monotonic() + cpu_s / BUDGET
            num_rows += sum(reply.num_rows for reply in replies)
            best = [merge_hits([*best, *(reply.hits for reply in replies)], queries.k)]
        total = live.corpus.num_rows - len(live.corpus.deleted)
        return best[0], None if first.filter is None else num_rows / max(1, total)

    def _search_slice(self, request: SliceRequest) -> list[SliceHits]:
        replies = self._ask_leaves("search_slice", request)
        return [wait_for_reply(reply, request.deadline) for reply in replies]

    async def _wait_for_idle_time(self, live: ReleaseArtifacts, samples: Sequence[Sample]) -> None:
        """Waits until the budget allows a slice and no request waits or runs. Raises ReleaseGoneError."""
        while (pause_s := self._free_at - time.monotonic()) > 0 or not self._is_idle():
            await asyncio.sleep(max(min(pause_s, 1.0), POLL_S))
            current = self._live()
            if current is not live and not all(current and _is_current(current, sample) for sample in samples):
                raise ReleaseGoneError

    def _report(self, group: RecallGroup, samples: int, interval: Interval) -> None:
        """Records the estimate of a group, or raises the search effort of its searches if it is below the target.

        Logs when it falls below the target and no effort can be raised, and when it no longer is below.
        """
        was_below = group in self.recalls and self.recalls[group].is_below_target
        is_below = self._target is not None and interval.upper < self._target
        if is_below and self._raise_efforts(group, interval):
            return
        self.recalls[group] = GroupRecall(samples, interval, is_below)
        if is_below != was_below:
            log.warning(
                "recall@%s of task %s, mode %s, filter %s is %s %s: %.4f (%.4f to %.4f) in %d queries%s",
                group.k,
                group.task,
                group.mode,
                group.filter,
                "below" if is_below else "no longer below",
                self._target,
                *interval,
                samples,
                "; build the index for real queries (build-index --queries)" if is_below else "",
            )

    def _effort(self, searches: IndexSearches) -> int | None:
        """Returns the raised search effort of searches; None: it is that of the build."""
        raised = self.raised.get(searches)
        return None if raised is None else raised.value

    def _raise_efforts(self, group: RecallGroup, interval: Interval) -> bool:
        """Raises the efforts of those sources of a group whose mean recall is below the target, by the factor RAISE.

        If one is raised, all samples of the task and mode are dropped: they were measured with the previous effort.

        Returns:
            Whether an effort was raised; False if all have reached their maximum.
        """
        live, values = self._live(), dict[tuple[ServedSource, SearchState], list[float]]()
        if live is None or self._max_effort is None or self._target is None:
            return False
        for source, state, value in self._windows[group]:
            values.setdefault((source, state), []).append(value)
        samples, has_raised = len(self._windows[group]), False
        for (source, state), recalls in values.items():
            if not _has_state(live, group.task, source.target, state) or np.mean(recalls) >= self._target:
                continue
            searches, index = IndexSearches(group.task, group.mode, source), live.readers[ONLINE, source.target].index
            before = self._effort(searches) or index.effort
            value = min(math.ceil(RAISE * before), self._max_effort, num_lists(index.factory) or self._max_effort)
            if value <= before:
                continue
            has_raised = True
            self.raised[searches] = RaisedEffort(index.effort_name, value, index.effort, state)
            log.warning(
                "%s of %s is raised from %d to %d for task %s, mode %s (the build chose %d): recall@%s, filter %s is "
                "%.4f (%.4f to %.4f) in %d queries, below %s",
                *(index.effort_name, source.source_text, before, value, group.task, group.mode, index.effort),
                *(group.k, group.filter, *interval, samples, self._target),
            )
        for other, window in self._windows.items() if has_raised else ():
            if (other.task, other.mode) == (group.task, group.mode):
                window.clear()
                self.recalls[other] = GroupRecall()
        return has_raised

    def _count(self, outcome: str, number: int = 1) -> None:
        with self._lock:
            self._counts[outcome] += number


def _mode_of(search: SourceSearch) -> str:
    """Returns the mode of a search: dense, hybrid (a fusion of a mode), or source (the request names its sources)."""
    is_of_mode = ONLINE.name in search.labels
    return "source" if not is_of_mode else ONLINE.name if len(search.labels) == 1 else "hybrid"


def search_state(release: Release, task: ServedTask, target: SearchTarget) -> SearchState:
    """Returns the fingerprints of what determines the hits of a task in a target: encoder, prompt and artifacts."""
    prompt = None if task.prompt is None else release.fingerprints[f"prompts/{task.prompt}"]
    return release.query_encoder, prompt, *release.searched_fingerprints(ONLINE, target)


def _has_state(live: ReleaseArtifacts, task: str, target: SearchTarget, state: SearchState) -> bool:
    """Returns whether the live release searches a target for a task in a state."""
    if task not in live.tasks or (ONLINE, target) not in live.readers:
        return False
    return search_state(live.release, live.tasks[task], target) == state


def _is_current(live: ReleaseArtifacts, sample: Sample) -> bool:
    """Returns whether the hits of a sample are those that the live release finds."""
    if sample.release.id == live.release.id:
        return True
    return _has_state(live, sample.task.name, sample.source.target, sample.state)


def k_class(k: int) -> str:
    """Returns the class of a number of hits, which is a label of metrics."""
    return "1-10" if k <= 10 else "11-100" if k <= 100 else "101+"
