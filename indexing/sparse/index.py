"""Opens and searches an index of sparse embeddings: impacts in Lucene shards, with exact scores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from riptide.base.errors import TextsError
from riptide.indexing.corpus.row_sets import RowSet
from riptide.indexing.exact import Hits
from riptide.indexing.exact.score_parts import RowsOfQueries, ScoreParts, TermScore, parts_of_terms
from riptide.indexing.lucene.lucene import OPEN_LOCK
from riptide.indexing.lucene.lucene_terms import terms_of_explanation
from riptide.indexing.lucene.segment_search import search_blocks, search_segments
from riptide.indexing.lucene.segments import (
    SegmentFiles,
    check_lucene_versions,
    segment_files,
    segment_rows,
    segments_of,
)
from riptide.indexing.sparse.impacts import EXACT, Impacts, exact_scores, quantise, query_texts, unquantisable_vectors
from riptide.indexing.sparse.lucene_search import ImpactSearch
from riptide.indexing.sparse.sparse_embeddings import SparseEmbeddings
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import open_chain
from riptide.indexing.store.store import Store
from riptide.indexing.work.worker_tasks import ALL_CORES, Allocation, Report, Runner, WorkerResources
from riptide.retriever.encoding.sparse_vectors import SparseVectors


class ImpactIndex:
    """An index of sparse embeddings opened for reading: all complete generations of index/NAME.

    Attributes:
        num_rows: The number of passages.
        num_postings: The number of impacts.
        largest: The largest impact.
    """

    def __init__(self, name: str, generations: Sequence[Artifact], embeddings: SparseEmbeddings):
        self.name, self.embeddings = name, embeddings
        self.generations = list(generations)
        self.shards = [(artifact, part) for artifact in generations for part in artifact.numbered_parts("shard")]
        self.num_rows = sum(part.rows for _, part in self.shards)
        self.num_postings = sum(int(part.facts["postings"]) for _, part in self.shards)
        self.largest = max(int(part.facts["largest"]) for _, part in self.shards)

    @staticmethod
    def is_index(config: Mapping[str, Any]) -> bool:
        """Returns whether an index with this configuration holds impacts."""
        return "impacts" in config

    @classmethod
    def open(cls, store: Store, name: str | None, embeddings: SparseEmbeddings) -> ImpactIndex:
        """Opens index/NAME. If `name` is None, opens the only index of impacts in the store.

        Raises:
            InputError: If it was built from other embeddings, or lacks rows that they have.
        """
        name = store.only_name("index", name, cls.is_index)
        return cls(name, open_chain(store, "index", name, embeddings.generations), embeddings)

    def searcher(self, shard_range: slice = slice(None)) -> ImpactSearch:
        """Opens shards in this process; the next call for the same shards returns the same object.

        Args:
            shard_range: Which of the shards are opened and searched, at least one.

        Raises:
            InputError: If they were made with another version of Lucene.
        """
        shards = self.shards[shard_range]
        with OPEN_LOCK:
            check_lucene_versions(self.generations[0])
            return _open_searcher(segment_files(shards), segment_rows(shards)[0].first_row)

    def search(
        self,
        queries: SparseVectors,
        k: int,
        deleted: np.ndarray,
        *,
        threads: int = 1,
        allowed_rows: RowSet | np.ndarray | None = None,
        searcher: ImpactSearch | None = None,
        first_query: int = 0,
    ) -> Hits:
        """Returns the top k passages of each query by the exact inner product of impacts.

        Equal scores are ordered by row. Scores of 2^24 and more, which float32 rounds, are computed again in int64 for
        all passages that can be among the top k; the order is that of the exact scores, and Hits holds them rounded.

        Args:
            queries: The vectors of the queries.
            k: Hits per query.
            deleted: Rows to exclude, int64, ascending.
            threads: Threads that search.
            allowed_rows: Only these rows are hits, and `deleted` is not used: int64, ascending. None: all rows.
            searcher: The open shards; None: `searcher` opens them.
            first_query: The number of the first query in errors.

        Raises:
            TextsError: If a weight of a query does not fit, or if a single product is 2^24 or more.
        """
        impacts = self._quantise_queries(queries, first_query)
        open_searcher, texts = searcher or self.searcher(), query_texts(impacts)

        def find(texts: Sequence[str], depth: int) -> Hits:
            return search_segments(open_searcher, texts, depth, deleted, allowed_rows, threads)

        hits = find(texts, k)
        for number in np.flatnonzero(hits.scores[:, 0] >= EXACT) if k else ():
            candidates = _find_candidates(find, texts[number], k, open_searcher.num_documents)
            passages = quantise(self.embeddings.take(candidates), lambda row: f"candidate {row}")
            scores = exact_scores(impacts, int(number), passages, self.embeddings.dim)
            best = np.lexsort((candidates, -scores))[:k]
            hits.scores[number, : len(best)] = scores[best]
            hits.rows[number, : len(best)] = candidates[best]
        return hits

    def explain(
        self, queries: SparseVectors, rows: RowsOfQueries, searcher: ImpactSearch | None = None
    ) -> list[dict[int, ScoreParts]]:
        """Returns the terms of passages, by row; see `SegmentedIndex.explain`.

        The terms are the numbers of words as text, and their weights are impacts.
        """
        impacts, scores = self._quantise_queries(queries, 0), list[dict[int, ScoreParts]]()
        open_searcher = searcher or self.searcher()
        for number, (text, of_query) in enumerate(zip(query_texts(impacts), rows, strict=True)):
            words, weights = (column.tolist() for column in impacts.of_row(number))
            query_weights = dict(zip(map(str, words), map(float, weights), strict=True))
            explanations = open_searcher.explain(text, of_query)
            scores.append({row: _parts_of_impacts(each, query_weights) for row, each in explanations.items()})
        return scores

    def _quantise_queries(self, queries: SparseVectors, first_query: int) -> Impacts:
        """Quantises the weights of queries. Raises TextsError if some queries cannot be searched exactly."""
        reasons = unquantisable_vectors(queries)
        good = np.array([number for number in range(len(queries)) if number not in reasons], np.int64)
        impacts = quantise(queries.take(good), str)
        most = np.zeros(len(good), np.int64)
        np.maximum.at(most, np.repeat(np.arange(len(good)), np.diff(impacts.offsets)), impacts.impacts)
        for number in np.flatnonzero(most * self.largest >= EXACT):
            reasons[int(good[number])] = (
                f"a word has the impact {most[number]:,}, and one of a passage of index/{self.name} has "
                f"{self.largest:,}: their product must be below {EXACT:,}, above which Lucene rounds it"
            )
        if reasons:
            numbered = {first_query + number: reason for number, reason in reasons.items()}
            raise TextsError(f"query {min(numbered)}: {numbered[min(numbered)]}", numbered)
        return impacts


def _parts_of_impacts(explanation: dict[str, Any], query_weights: Mapping[str, float]) -> ScoreParts:
    """Returns the terms of the score of a passage from Lucene's explanation."""
    # The values that ImpactSimilarity explains are the impacts of the passage, without the weights of the query.
    impacts = {word: float(node["value"]) for word, node in terms_of_explanation(explanation)}
    return parts_of_terms(
        TermScore(word, query_weights[word] * impact, query_weights[word], impact) for word, impact in impacts.items()
    )


def _find_candidates(find: Callable[[Sequence[str], int], Hits], text: str, k: int, num_documents: int) -> np.ndarray:
    """Returns the rows whose rounded score is at least the score of the k-th hit, int64 [any].

    Rounding does not change the order of different scores, so the exact top k are among these.

    Args:
        find: Returns the hits of texts at a depth, by their rounded scores.
        text: The query.
        k: Hits of the query.
        num_documents: Number of passages, the greatest depth.
    """
    depth = k
    while True:
        depth = min(2 * depth, num_documents)
        hits = find([text], depth)
        rows, scores = hits.rows[0][hits.rows[0] >= 0], hits.scores[0]
        if len(rows) < depth or depth == num_documents or scores[-1] < scores[k - 1]:
            return rows[scores[: len(rows)] >= scores[min(k, len(rows)) - 1]]


@functools.lru_cache(maxsize=2)
def _open_searcher(files: SegmentFiles, first_row: int) -> ImpactSearch:
    return ImpactSearch(segments_of(files), first_row)


def search_impacts(
    index: ImpactIndex,
    queries: SparseVectors,
    k: int,
    deleted: np.ndarray,
    runner: Runner,
    *,
    allowed_rows: np.ndarray | None = None,
) -> Hits:
    """Returns the top k passages of each query; spreads the queries over workers. See `ImpactIndex.search`."""
    task = SearchImpactsTask(index, k, deleted, allowed_rows)
    return search_blocks(task, len(queries), queries.between, runner)


@dataclass(frozen=True)
class SearchImpactsTask:
    """A worker task that searches a block of queries; an item is (number of the first query, vectors)."""

    index: ImpactIndex
    k: int
    deleted: np.ndarray
    allowed_rows: np.ndarray | None
    resources: WorkerResources = ALL_CORES

    def open(self, allocation: Allocation) -> Callable[[tuple[int, SparseVectors], Report], Hits]:
        """Opens the shards and returns a function that searches a block of queries."""
        self.index.searcher()

        def search(block: tuple[int, SparseVectors], report: Report) -> Hits:
            first, queries = block
            return self.index.search(
                queries,
                self.k,
                self.deleted,
                threads=allocation.cores,
                allowed_rows=self.allowed_rows,
                first_query=first,
            )

        return search
