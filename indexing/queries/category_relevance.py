"""Relevance by category: a passage is relevant for a query if they have a category in common (Topic-DPR, section 4)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from riptide.base.errors import InputError
from riptide.indexing.corpus.categories import categories_of_rows, category_names
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.queries.queries import Queries


@dataclass(frozen=True)
class QueryCategories:
    """The categories of each query, and the number of queries that take them from judged passages.

    Attributes:
        by_query: The names of the categories of each query; none if its judged passages are deleted.
        num_from_judgements: Number of queries whose categories are those of their judged passages.
    """

    by_query: Mapping[str, frozenset[str]]
    num_from_judgements: int


class CategoryRelevance:
    """Finds the passages of a corpus that share a category with a query. Nothing is written to the store.

    Args:
        corpus: The corpus. Deleted passages are not relevant.
        field: The metadata field with the categories of a passage.

    Raises:
        InputError: If a passage has no categories; the message names the first one. If the corpus is one of split
            documents.
    """

    def __init__(self, corpus: Corpus, field: str):
        if corpus.is_split:
            raise InputError(
                f"{corpus.generations[0].url}: its documents are split, and relevance by category counts passages; "
                "import the documents unsplit into another store, or measure by judgements"
            )
        self.corpus, self.field = corpus, field
        self.table = categories_of_rows(corpus, field)
        self._numbers = {name: number for number, name in enumerate(self.table.names)}
        self._alive = np.ones(corpus.num_rows, bool)
        self._alive[corpus.deleted] = False

    @property
    def num_passages(self) -> int:
        """The number of passages that are not deleted."""
        return int(self._alive.sum())

    @functools.cached_property
    def _rows_by_category(self) -> list[np.ndarray]:
        """The rows of the passages of each category: a list of int64 arrays, indexed by category number."""
        rows = np.repeat(np.arange(self.table.num_rows), np.diff(self.table.offsets))
        order = np.argsort(self.table.values, kind="stable")
        ends = np.cumsum(np.bincount(self.table.values, minlength=len(self.table.names)))
        return np.split(rows[order], ends[:-1]) if len(ends) else []

    def relevant(self, categories: frozenset[str]) -> np.ndarray:
        """Returns a mask of the passages that have at least one of the categories: bool [rows of the corpus].

        A category that no passage has makes no passage relevant.
        """
        result = np.zeros(self.table.num_rows, bool)
        for name in categories & self._numbers.keys():
            result[self._rows_by_category[self._numbers[name]]] = True
        return result & self._alive

    def categories_of(self, queries: Queries, ids: Sequence[str], qrels: pa.Table | None) -> QueryCategories:
        """Returns the categories of each query, from its metadata or, without the field, from its judged passages.

        A query whose judged passages are all deleted has no categories, and no passage is relevant for it.

        Args:
            queries: The query set.
            ids: The queries.
            qrels: Judgements: columns query_id, corpus_id, score; None: there are none. Those above 0 count.

        Raises:
            InputError: If a query has no categories in its metadata and no judged passage.
        """
        metadata = dict(zip(*(queries.table[column].to_pylist() for column in ("id", "metadata")), strict=True))
        without = [id for id in ids if not _has_field(metadata[id], self.field)]
        by_query = {} if qrels is None else self._categories_from_judgements(qrels, without)
        unjudged = "" if qrels is None else ", which has no judged passage,"
        for id in ids:
            if id not in by_query:  # raises InputError for a query with neither the field nor a judged passage
                place = f"{queries.artifact.key}: the query {id!r}"
                place += "" if _has_field(metadata[id], self.field) else unjudged
                by_query[id] = frozenset(category_names(metadata[id], self.field, place))
        return QueryCategories(by_query, len(without))

    def _categories_from_judgements(self, qrels: pa.Table, ids: Sequence[str]) -> dict[str, frozenset[str]]:
        """Returns the categories of each query's passages judged above 0; omits queries without such a judgement."""
        chosen = pa.array(ids, qrels["query_id"].type)
        qrels = qrels.filter(pc.and_(pc.greater(qrels["score"], 0), pc.is_in(qrels["query_id"], chosen)))
        by_query: dict[str, set[str]] = {}
        rows = self.corpus.rows_of(qrels["corpus_id"].to_pylist())
        for query, row in zip(qrels["query_id"].to_pylist(), rows.tolist(), strict=True):
            names = by_query.setdefault(query, set())
            if row >= 0:
                names.update(self.table.names[number] for number in self.table.of_row(row))
        return {query: frozenset(names) for query, names in by_query.items()}


def _has_field(metadata: str, field: str) -> bool:
    """Returns whether metadata, given as JSON text or an empty text, has a field."""
    return bool(metadata) and field in orjson.loads(metadata)
