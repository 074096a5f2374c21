"""The source `bm25` or `bm25:NAME`: lexical search by Lucene's BM25."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.exact import Hits
from riptide.indexing.exact.score_parts import RowsOfQueries, ScoreParts
from riptide.indexing.hit_sources.online_search import (
    PROBE,
    Files,
    OnlineSearch,
    PinnedArtifacts,
    SearcherScope,
    SearchTarget,
)
from riptide.indexing.hit_sources.source_kind import SearchContext, SourceKind
from riptide.indexing.lucene.bm25_index import DEFAULT, Bm25, search_bm25
from riptide.indexing.lucene.segment_search import OpenSegments, segments_in_range
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import RowRange, check_lineage
from riptide.indexing.work.worker_tasks import Runner


@dataclass
class Bm25Source:
    """An open source `bm25:NAME` in a job."""

    bm25: Bm25
    corpus: Corpus
    search_parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def source_text(self) -> str:
        return BM25.source_text(self.bm25.name)

    def inputs(self) -> dict[str, Artifact]:
        return {f"{self.source_text}/{n}": artifact for n, artifact in enumerate(self.bm25.generations)}

    def search(self, texts: Sequence[str], k: int, runner: Runner, allowed_rows: np.ndarray | None = None) -> Hits:
        return search_bm25(self.bm25, texts, k, self.corpus.deleted, runner, allowed_rows=allowed_rows)

    def explain(self, texts: Sequence[str], rows: RowsOfQueries, runner: Runner) -> list[dict[int, ScoreParts]]:
        return OpenSegments(self.bm25, self.corpus, RowRange(0, self.corpus.num_rows)).explain(texts, rows)


class OnlineBm25(OnlineSearch):
    """BM25 search in a service. A target is the name of a BM25 index."""

    name = "bm25"

    def artifacts(self, target: SearchTarget) -> list[tuple[str, str]]:
        return [("bm25", str(target[0]))]

    def read(self, target: SearchTarget, pinned: PinnedArtifacts) -> Bm25:
        [(kind, name)] = self.artifacts(target)
        bm25 = Bm25(name, pinned.generations(kind, name))
        check_lineage(bm25.generations, pinned.corpus.generations)
        return bm25

    def open(self, readers: Bm25, corpus: Corpus, scope: SearcherScope) -> OpenSegments:
        return OpenSegments(readers, corpus, scope.rows, scope.threads or 1)

    def files(self, readers: Bm25, scope: SearcherScope) -> list[Files]:
        return [readers.shards[segments_in_range(readers, scope.rows)[0]]]

    def probe(self, searcher: OpenSegments) -> None:
        searcher.search([PROBE], 1)


class Bm25Kind(SourceKind):
    """The kind of BM25 sources. Without a name, the source is the index called bm25, or the only one."""

    name = "bm25"
    forms = ("bm25", "bm25:NAME")
    label = "bm25"
    queries = "texts"
    explains = True
    online = OnlineBm25()

    def allows_name(self, name: str) -> bool:
        return True

    def source_text(self, name: str) -> str:
        return self.name if name in ("", DEFAULT) else super().source_text(name)

    def open(self, context: SearchContext, name: str) -> Bm25Source:
        return Bm25Source(Bm25.open(context.store, name or None, context.corpus), context.corpus)


BM25 = Bm25Kind()
