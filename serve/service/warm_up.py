"""Warms a release before it becomes live: reads its files, and runs queries until answers are fast.

Without a warm-up, the first queries of a new process wait for the disk, as it has not read the index yet. A release
whose files and spaces were all warmed for an earlier one needs no warm-up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.filters import prepare_filters
from riptide.indexing.store.store import Store
from riptide.process.memory import free_memory
from riptide.serve.parts.engine import Engine
from riptide.serve.parts.part import PartControl
from riptide.serve.parts.part_states import ENCODER, PASSAGES, RERANKER, parts_of
from riptide.serve.parts.query_states import PendingQuery
from riptide.serve.release.release import Release
from riptide.serve.release.release_tasks import ServedSource, ServedTask, find_source_search
from riptide.serve.service_errors import ExpiredError, OverloadedError

log = logging.getLogger("riptide.serve")

BATCH = 8  # queries per round
MIN_S = 30.0  # minimum timeout of a batch in seconds, also if less of the total time remains
WORDS = 12  # number of words of a passage that form a query
SAMPLE = 256  # number of passages from which queries are made
SHARE = 0.8  # fraction of the free memory that files may fill
# Errors of single queries: deadline passed, queue full, vector not finite.
HARMLESS = (ExpiredError, OverloadedError, InputError)
GAIN = 0.9  # a round counts as faster below this fraction of the fastest earlier one
ANSWER_S = 0.5  # a round that takes at most so many seconds counts as warm
MAX_ROUNDS = 50  # maximum rounds per source
PATIENCE = 3  # rounds without a faster one after which the warm-up of a source ends


class WarmUpSearch(NamedTuple):
    """The task and the source that warm-up queries search."""

    task: ServedTask
    source: ServedSource


class WarmUp:
    """Warms the releases of one service.

    Args:
        store: Where releases and artifacts are.
        engine: Runs the queries.
        parts: The parts of the service by name, which read their files.
        is_local: Whether all parts share this process's memory.
        total_s: Maximum seconds of a warm-up; 0: no warm-up.
    """

    def __init__(
        self, store: Store, engine: Engine, parts: Mapping[str, PartControl], *, is_local: bool, total_s: float
    ):
        self.store, self.engine, self.parts, self.is_local, self.total_s = store, engine, parts, is_local, total_s
        self._warm: set[Any] = set()  # keys of warm passages, spaces, BM25 indexes and re-rankers
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        """Stops a running warm-up after its current batch, because the process ends."""
        self._is_stopped.set()

    def run(self, release: Release) -> None:
        """Warms those contents of a release that are not warm yet. Blocks; raises exceptions of the parts.

        Args:
            release: A release that all parts have opened.
        """
        pending = {key: search for key, search in _searches_by_key(release).items() if key not in self._warm}
        if not pending or not self.total_s:
            return
        start = time.monotonic()
        end = start + self.total_s
        prepare_filters()
        size_bytes = self._read_files(release, {key[0] for key in pending}, start + self.total_s / 2)
        queries = self._make_queries(release, Corpus(release.generations(self.store, "corpus")).num_rows, end)
        durations = []
        for (part, *_), search in pending.items():
            if part != PASSAGES and queries:
                durations.append(f"{part} {self._run_queries(release, part, search, queries, end):.3f} s")
        self._warm |= pending.keys()
        log.info(
            "release %s is warm after %.1f s: %d MiB read, a batch of queries takes %s",
            release.id,
            time.monotonic() - start,
            size_bytes >> 20,
            ", ".join(durations) or "no time",
        )

    def _read_files(self, release: Release, parts: set[str], end: float) -> int:
        """Reads files of parts, as far as memory and time allow; returns the number of bytes read."""
        max_bytes, total_bytes = int(SHARE * free_memory()) if self.is_local else None, 0
        for part in parts_of(release):
            if part in parts - {ENCODER, RERANKER}:  # models are already in memory
                remaining = None if max_bytes is None else max_bytes - total_bytes
                total_bytes += self.parts[part].read_files(release.id, remaining, max(0.0, end - time.monotonic()))
        return total_bytes

    def _make_queries(self, release: Release, num_rows: int, end: float) -> list[str]:
        """Returns queries: the first words of passages."""
        rows = np.unique(np.random.default_rng(0).integers(0, max(1, num_rows), SAMPLE))
        seconds = max(MIN_S, end - time.monotonic())
        passages = self.engine.passages(release, rows, time.monotonic() + seconds)
        texts = [" ".join(f"{title} {text}".split()[:WORDS]) for _, _, title, text, *_ in passages]
        return [text[:500] for text in texts if text]

    def _run_queries(
        self, release: Release, part: str, warm_up_search: WarmUpSearch, texts: Sequence[str], end: float
    ) -> float:
        """Searches a source in rounds until they are fast or stop improving; returns the seconds of the last round."""
        search = find_source_search(warm_up_search.task, warm_up_search.source.source_text)
        seconds: list[float] = []
        while len(seconds) < MAX_ROUNDS and not (seconds and self._is_stopped.is_set()):
            first = len(seconds) * BATCH
            batch = [texts[number % len(texts)] for number in range(first, first + BATCH)]
            deadline = time.monotonic() + max(MIN_S, end - time.monotonic())
            rerank = 10 if part == RERANKER else 0
            start = time.monotonic()
            answers = self.engine.search(
                [PendingQuery(release, text, warm_up_search.task, 10, search, deadline, None, rerank) for text in batch]
            )
            seconds.append(time.monotonic() - start)
            for answer in answers:
                if answer.error is not None and not isinstance(answer.error, HARMLESS):
                    raise answer.error
            if max(seconds[-2:]) <= ANSWER_S and len(seconds) > 1:
                break
            before = seconds[:-PATIENCE]
            if time.monotonic() > end or (before and min(seconds[-PATIENCE:]) > GAIN * min(before)):
                log.warning(
                    "release %s: a batch of %d %s queries still takes %.1f s after %d rounds of warm-up",
                    release.id,
                    BATCH,
                    part,
                    seconds[-1],
                    len(seconds),
                )
                break
        return seconds[-1]


def _searches_by_key(release: Release) -> dict[tuple[Any, ...], WarmUpSearch]:
    """Returns a search that warms each of: the passages, every search target, the re-ranker. Keys have fingerprints."""
    first = release.tasks[0]
    served = first.served_sources()
    keys: dict[tuple[Any, ...], WarmUpSearch] = {}
    corpus = tuple(release.fingerprints[key] for key in release.generation_keys("corpus"))
    keys[PASSAGES, corpus] = WarmUpSearch(first, served[0])
    for task in release.tasks:
        for source in task.served_sources():
            encoder = release.query_encoder if source.kind.queries == "vectors" else ""
            fingerprints = release.searched_fingerprints(source.kind.online, source.target)
            keys.setdefault((source.kind.online.name, encoder, fingerprints), WarmUpSearch(task, source))
    if release.reranker is not None:
        model = tuple(value for key, value in sorted(release.fingerprints.items()) if key == release.reranker)
        # A source whose queries need no encoder.
        lexical = [source for source in served if source.kind.queries == "texts"]
        keys[RERANKER, release.reranker, model] = WarmUpSearch(first, (lexical or served)[0])
    return keys
