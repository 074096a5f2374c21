"""A kind of hit source that the project does not have: `fixed:NAME` gives every query the rows of fixed/NAME."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.filters import Filter
from riptide.indexing.exact import Hits
from riptide.indexing.hit_sources import registry
from riptide.indexing.hit_sources.online_search import OnlineSearch, PinnedArtifacts, SearcherScope, SearchTarget
from riptide.indexing.hit_sources.source_kind import SearchContext, SourceKind
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.indexing.work.worker_tasks import Runner


@dataclass
class FixedSource:
    artifact: Artifact
    corpus: Corpus
    search_parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def source_text(self) -> str:
        return f"fixed:{self.artifact.key.partition('/')[2]}"

    def inputs(self) -> dict[str, Artifact]:
        return {self.source_text: self.artifact}

    def search(self, texts: Sequence[str], k: int, runner: Runner, allowed_rows: np.ndarray | None = None) -> Hits:
        return fixed_hits(self.artifact, self.corpus, len(texts), k, allowed_rows)


def fixed_hits(
    artifact: Artifact, corpus: Corpus, num_queries: int, k: int, allowed_rows: np.ndarray | None = None
) -> Hits:
    """Returns the artifact's rows that are allowed and not deleted, with the scores 100, 99, …"""
    rows = artifact.config["rows"]
    alive = [row for row in rows if row not in corpus.deleted and (allowed_rows is None or row in allowed_rows)][:k]
    rows, scores = np.full((num_queries, k), -1, np.int64), np.full((num_queries, k), -np.inf, np.float32)
    rows[:, : len(alive)] = alive
    scores[:, : len(alive)] = 100 - np.arange(len(alive))
    return Hits(scores, rows)


class OnlineFixed(OnlineSearch):
    """A target is the name of an artifact."""

    name = "fixed"

    def artifacts(self, target: SearchTarget) -> list[tuple[str, str]]:
        return [("fixed", str(target[0]))]

    def read(self, target: SearchTarget, pinned: PinnedArtifacts) -> Artifact:
        [artifact] = pinned.generations("fixed", str(target[0]))
        return artifact

    def open(self, readers: Artifact, corpus: Corpus, scope: SearcherScope) -> FixedSearcher:
        return FixedSearcher(readers, corpus, scope)

    def probe(self, searcher: FixedSearcher) -> None:
        searcher.search(["x"], 1)


@dataclass
class FixedSearcher:
    artifact: Artifact
    corpus: Corpus
    scope: SearcherScope

    def search(self, queries: Sequence[str], k: int, filter: Filter | None = None) -> Hits:
        scores, rows = fixed_hits(self.artifact, self.corpus, len(queries), k)
        is_own = (rows >= self.scope.rows.first_row) & (rows < self.scope.rows.end)
        return Hits(np.where(is_own, scores, -np.inf), np.where(is_own, rows, -1))


class FixedKind(SourceKind):
    name = "fixed"
    forms = ("fixed:NAME",)
    label = "fixed"
    queries = "texts"
    online = OnlineFixed()

    def open(self, context: SearchContext, name: str) -> FixedSource:
        return FixedSource(context.store.open("fixed", context.store.only_name("fixed", name)), context.corpus)


@contextmanager
def fixed_kind() -> Iterator[FixedKind]:
    """Registers the kind, and nothing else, while the context is open."""
    kind = FixedKind()
    registry.KINDS.append(kind)
    try:
        yield kind
    finally:
        registry.KINDS.remove(kind)


def save_fixed(store: Store, name: str, rows: Sequence[int]) -> Artifact:
    """Makes fixed/NAME."""
    with store.create("fixed", name, config={"rows": list(rows)}) as draft:
        if not draft.is_complete:
            draft.add_notes(rows=len(rows))
    return store.open("fixed", name)
