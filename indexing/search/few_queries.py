"""Searches a few queries in this process; the hits are the same as in a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from riptide.base.cuts import Cuts
from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus, DocumentNumbers
from riptide.indexing.corpus.filters import Filter, MatchingRows, filter_columns
from riptide.indexing.exact import Hits
from riptide.indexing.hit_sources.grammar import parse_source
from riptide.indexing.hit_sources.opened_sources import HitSources
from riptide.indexing.hit_sources.search_options import By, SearchOptions
from riptide.indexing.hit_sources.source_kind import ExplainedSource, HitSource, check_explains
from riptide.indexing.search.document_search import is_by_document, search_documents
from riptide.indexing.search.explanations import HitExplanation
from riptide.indexing.search.hit_explanations import SourceResult, explain_hits, rows_to_explain
from riptide.indexing.search.recorded_search import RecordedFusion
from riptide.indexing.search.rescoring import RerankerSpec, RerankTask, rerank
from riptide.indexing.search.runs import SearchCuts, search_cuts
from riptide.indexing.store.chain import RowRange
from riptide.indexing.store.store import Store
from riptide.indexing.work.local_runner import LocalRunner


def _check_unicode(queries: Sequence[str]) -> None:
    """Raises InputError for a query with an unpaired surrogate, which stands for a byte that is not UTF-8."""
    for number, query in enumerate(queries):
        try:
            query.encode()
        except UnicodeEncodeError as error:
            character = query[error.start]
            raise InputError(
                f"query {number}: found {character!r} at character {error.start + 1}, expected text in UTF-8"
            ) from error


class LocalSearch:
    """A search source and its corpus, which the constructor opens and checks, and optionally a re-ranker. Thread-safe.

    Hits equal those of a run with the same settings. Deleted passages are excluded.

    With `stays_open`, the files of vectors and indexes stay open between searches.

    Raises:
        InputError: If an artifact is missing, or does not belong to this corpus; also if this machine cannot compute
            the dtype of the re-ranker.
    """

    def __init__(
        self,
        store: Store,
        source: str,
        options: SearchOptions,
        runner: LocalRunner,
        *,
        reranker: RerankerSpec | None = None,
        by: By | None = None,
        stays_open: bool = False,
    ):
        self.corpus = Corpus.open(store)
        self.documents = DocumentNumbers(self.corpus.parts) if is_by_document(self.corpus, by) else None
        self._matches = MatchingRows(self.corpus, RowRange(0, self.corpus.num_rows))
        self.sources = HitSources(store, self.corpus, options, stays_open=stays_open)
        self.hit_source = self.sources.open(source)
        self._pair_cuts = Cuts()
        self.runner = runner
        self._rerank_task: RerankTask | None = None
        if reranker:
            self._rerank_task = RerankTask(reranker.with_numerics(runner, 1), self.corpus)

    @property
    def source(self) -> str:
        """The expression of the source in the grammar of sources, with all names filled in."""
        return self.hit_source.source_text

    def matching_rows(self, filter: Mapping[str, Any] | str | None) -> np.ndarray | None:
        """Returns the rows that match a filter, int64, ascending, without deleted rows; None without a filter.

        The rows of the latest filters are cached.

        Raises:
            InputError: If the filter does not parse.
        """
        if filter is None:
            return None
        return self._matches.rows(Filter.parse(filter, filter_columns(self.corpus))).rows()

    def search(
        self, queries: Sequence[str], k: int, *, rerank_depth: int = 0, allowed_rows: np.ndarray | None = None
    ) -> Hits:
        """Returns the top k passages of each query, or the best passage of each of the top k documents.

        Args:
            queries: The texts of the queries.
            k: Number of hits per query, at least 1.
            rerank_depth: Number of hits per query that the re-ranker orders; lower hits keep their order below them.
            allowed_rows: Only these rows are hits, as `matching_rows` returns them; None: all rows.

        Returns:
            Scores and rows, [q, at most k].

        Raises:
            InputError: If a query is no valid text.
        """
        return self._search(self.hit_source, queries, k, rerank_depth, allowed_rows)

    def search_and_explain(
        self,
        queries: Sequence[str],
        k: int,
        *,
        rerank_depth: int = 0,
        allowed_rows: np.ndarray | None = None,
        filter: str | None = None,
    ) -> tuple[Hits, list[list[HitExplanation]]]:
        """Returns the hits that `search` returns, and the explanations of the hits of each query.

        Args:
            queries: The texts of the queries.
            k: Number of hits per query.
            rerank_depth: As for `search`.
            allowed_rows: As for `search`.
            filter: The filter in the explanations; None: no filter.

        Raises:
            InputError: If a query is no valid text, or if a source cannot explain its hits.
        """
        check_explains((term.kind, term.name) for term in parse_source(self.source).terms)
        recorded = RecordedFusion.of(self.hit_source)
        hits = self._search(recorded, queries, k, rerank_depth, allowed_rows)
        rows = [[row for row in of_query.tolist() if row >= 0] for of_query in hits.rows]
        scores = []
        for place, source in enumerate(recorded.sources):
            hit_rows = [rows_to_explain(rows[number], recorded.hits[number][place]) for number in range(len(queries))]
            scores.append(cast(ExplainedSource, source).explain(queries, hit_rows, self.runner))
        explanations = []
        for number, of_query in enumerate(rows):
            source_results = [
                SourceResult(source.source_text, recorded.hits[number][place], scores[place][number])
                for place, source in enumerate(recorded.sources)
            ]
            final = hits.scores[number].tolist()
            is_reranked = self._rerank_task is not None and rerank_depth > 0
            reranked = [score if is_reranked and score >= 0 else None for score in final[: len(of_query)]]
            explanations.append(
                explain_hits(of_query, source_results, recorded.weights, recorded.depths[number], reranked, filter)
            )
        return hits, explanations

    def _search(
        self,
        source: HitSource,
        queries: Sequence[str],
        k: int,
        rerank_depth: int,
        allowed_rows: np.ndarray | None,
    ) -> Hits:
        """Searches a source; arguments and errors as for `search`."""
        _check_unicode(queries)
        self._pair_cuts, depth = Cuts(), rerank_depth if self._rerank_task else 0
        reorder = partial(self._rerank_hits, depth) if self._rerank_task else None
        if self.documents is not None:
            return search_documents(
                source,
                queries,
                k,
                self.runner,
                self.documents,
                allowed_rows=allowed_rows,
                rerank=reorder,
                rerank_depth=depth,
            )
        depth_of_source = min(max(k, depth), max(1, self.corpus.num_rows))
        hits = source.search(queries, depth_of_source, self.runner, allowed_rows)
        if reorder:
            hits = reorder(hits, queries)
        return Hits(hits.scores[:, :k], hits.rows[:, :k])

    def _rerank_hits(self, depth: int, hits: Hits, queries: Sequence[str]) -> Hits:
        assert self._rerank_task is not None
        hits, cuts = rerank(hits, queries, depth, self._rerank_task, self.runner)
        self._pair_cuts += cuts
        return hits

    def count_cuts(self) -> SearchCuts:
        """Returns the numbers of queries and pairs that the last search cut to a length limit."""
        return search_cuts([self.sources.count_cuts()])._replace(pairs=self._pair_cuts)
