"""Certification: searches a sample of a service's approximate searches again exactly, and estimates their recall.

The exact searches run in slices of rows while no request is in work, with pauses that keep their CPU time below BUDGET.
"""

from __future__ import annotations

import asyncio
import logging
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
from riptide.indexing.exact import Hits, merge_hits
from riptide.indexing.hit_sources.dense import ONLINE
from riptide.indexing.hit_sources.exact import EXACT
from riptide.indexing.hit_sources.index_source import INDEX
from riptide.serve.parts.leaf import AskLeaves, SliceHits, SliceRequest, SourceQueries, wait_for_reply
from riptide.serve.parts.query_states import PendingQuery, QueryGroup, QueryState
from riptide.serve.release.artifacts import ReleaseArtifacts
from riptide.serve.release.release_tasks import ServedSource

log = logging.getLogger("riptide.serve")

BUDGET = 0.02  # CPU seconds of certification per second, of one core
SLICE_BYTES = 32 << 20  # bytes of vectors that a slice reads, which takes one core about 10 ms
TOGETHER = 8  # maximum samples with the same filter that are searched together: the vectors are read once for all
MAX_WAITING = 64  # samples that wait; more are dropped
WINDOW = 500  # queries of the estimate of a group, the latest ones
POLL_S = 0.02  # seconds between two looks whether a request is in work
SLICE_S = 30.0  # timeout of a slice in seconds
UNKNOWN = Interval(np.nan, 0.0, 1.0)
OUTCOMES = ("certified", "queue_full", "release_gone", "no_hits", "failed")  # of sampled queries


class RecallGroup(NamedTuple):
    """The searches whose recall is estimated together: a task, a mode, a class of k and a class of filters."""

    task: str
    mode: str
    k: str
    filter: str


@dataclass(frozen=True)
class GroupRecall:
    """The estimated recall of a group; samples 0 and a mean of NaN before the first sample of a release."""

    samples: int = 0
    interval: Interval = UNKNOWN
    is_below_target: bool = False


class Sample(NamedTuple):
    """A search that is to be repeated exactly: its vector, float32 [dim], and its approximate hits, [1, k]."""

    release: str
    task: str
    mode: str
    source: ServedSource
    filter: str | None
    k: int
    vector: np.ndarray
    hits: Hits


class ReleaseGoneError(Exception):
    """Another release became live while a sample of this one was searched."""


class Certifier:
    """Samples the approximate dense searches of a service, and estimates their recall from exact searches.

    `offer` is thread-safe; all else runs in one event loop.

    Args:
        share: The share of the searches that are sampled.
        target: The recall below which a group is reported; None: none.
        ask_leaves: Asks all leaves.
        live: Returns the live release.
        is_idle: Returns whether no request is in work.

    Attributes:
        recalls: The estimates of the live release, by group. Groups of earlier releases stay, without samples.
        cpu_s: CPU seconds of all exact searches.
    """

    def __init__(
        self,
        share: float,
        target: float | None,
        ask_leaves: AskLeaves,
        live: Callable[[], ReleaseArtifacts | None],
        is_idle: Callable[[], bool],
    ):
        self._share, self._target, self._ask_leaves = share, target, ask_leaves
        self._live, self._is_idle = live, is_idle
        self._random = random.Random()
        self._samples: deque[Sample] = deque()
        self._windows: dict[RecallGroup, deque[float]] = {}
        self._release = ""  # the release of the windows
        self._free_at = 0.0  # time at which the budget allows the next slice
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="certify")
        self.recalls: dict[RecallGroup, GroupRecall] = {}
        self.cpu_s = 0.0

    @property
    def counts(self) -> dict[str, int]:
        """The number of sampled queries by outcome."""
        return {outcome: self._counts[outcome] for outcome in OUTCOMES}

    def offer(
        self, queries: Sequence[PendingQuery], groups: Sequence[QueryGroup], states: Sequence[QueryState]
    ) -> None:
        """Samples the searches of a batch: those in an index to which all shards answered."""
        for group in groups:
            if group.source.kind is not INDEX:
                continue
            for position, (number, label) in enumerate(group.members):
                query, state = queries[number], states[number]
                is_complete = state.query_error is None and state.shards.successful == state.shards.total
                if not is_complete or self._random.random() >= self._share:
                    continue
                if len(self._samples) >= MAX_WAITING:
                    self._count("queue_full")
                    continue
                hits = Hits(*(each[:, : query.k] for each in state.hits_by_label[label]))
                names = query.search.labels
                mode = "source" if ONLINE.name not in names else ONLINE.name if len(names) == 1 else "hybrid"
                self._samples.append(
                    Sample(
                        query.release.id,
                        query.task.name,
                        mode,
                        group.source,
                        group.filter,
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
        if live.release.id != self._release:
            self._release = live.release.id
            self._windows = {group: deque(maxlen=WINDOW) for group in self.recalls}
            self.recalls = dict.fromkeys(self.recalls, GroupRecall())
        samples = self._take_samples()
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
        touched = set()
        for row, sample in enumerate(samples):
            expected = Hits(*(each[row : row + 1, : sample.k] for each in exact))
            if not (expected.rows >= 0).any():
                self._count("no_hits")  # nothing matches the filter
                continue
            group = RecallGroup(sample.task, sample.mode, k_class(sample.k), selectivity_class(share))
            window = self._windows.setdefault(group, deque(maxlen=WINDOW))
            window.append(float(recall_of_hits(sample.hits, expected)[0]))
            self._count("certified")
            touched.add(group)
        for group in touched:
            values = np.array(self._windows[group])
            interval = await asyncio.get_running_loop().run_in_executor(self._pool, mean_interval, values)
            self._report(group, len(values), interval)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _take_samples(self) -> list[Sample]:
        """Removes the first sample of the live release and those that can be searched together with it."""
        waiting = [self._samples.popleft() for _ in range(len(self._samples))]
        current = [sample for sample in waiting if sample.release == self._release]
        self._count("release_gone", len(waiting) - len(current))
        taken, others = list[Sample](), list[Sample]()
        for sample in current:
            first = taken[0] if taken else sample
            is_alike = (sample.source, sample.filter) == (first.source, first.filter)
            (taken if is_alike and len(taken) < TOGETHER else others).append(sample)
        self._samples.extendleft(reversed(others))
        return taken

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
            await self._wait_for_idle_time(live)
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

    async def _wait_for_idle_time(self, live: ReleaseArtifacts) -> None:
        """Waits until the budget allows a slice and no request is in work. Raises ReleaseGoneError."""
        while (pause_s := self._free_at - time.monotonic()) > 0 or not self._is_idle():
            await asyncio.sleep(max(min(pause_s, 1.0), POLL_S))
            if self._live() is not live:
                raise ReleaseGoneError

    def _report(self, group: RecallGroup, samples: int, interval: Interval) -> None:
        """Records the estimate of a group; logs when it falls below the target, and when it no longer is below."""
        was_below = group in self.recalls and self.recalls[group].is_below_target
        is_below = self._target is not None and interval.upper < self._target
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

    def _count(self, outcome: str, number: int = 1) -> None:
        with self._lock:
            self._counts[outcome] += number


def k_class(k: int) -> str:
    """Returns the class of a number of hits, which is a label of metrics."""
    return "1-10" if k <= 10 else "11-100" if k <= 100 else "101+"
