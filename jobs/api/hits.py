"""The hits of a search: rows with their passages, as lists and as data frames."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.evaluation.frames import import_pandas

if TYPE_CHECKING:
    import pandas


class Hit(NamedTuple):
    """A passage that a search found.

    Attributes:
        rank: Its rank, from 1.
        score: Its score; of two sources or search parameters, scores cannot be compared.
        id: The id of the passage; in a search by document, that of the document whose best passage it is.
        row: The row of the passage in the corpus.
        title: Its title.
        text: Its text.
        metadata: Its metadata, values by field.
    """

    rank: int
    score: float
    id: str
    row: int
    title: str
    text: str
    metadata: dict[str, Any]


class QueryHits(list[Hit]):
    """The hits of one query, by rank.

    Attributes:
        query: The text of the query.
    """

    def __init__(self, query: str, hits: Iterable[Hit] = ()):
        super().__init__(hits)
        self.query = query

    def to_pandas(self) -> pandas.DataFrame:
        """Returns a data frame with a row per hit. Raises InputError if pandas is not installed."""
        return import_pandas().DataFrame.from_records(self, columns=Hit._fields)


class SearchResults(list[QueryHits]):
    """The hits of several queries, in the order of the queries."""

    def to_pandas(self) -> pandas.DataFrame:
        """Returns a data frame with a row per hit; its first columns are the number and the text of the query.

        Raises:
            InputError: If pandas is not installed.
        """
        rows = [(number, hits.query, *hit) for number, hits in enumerate(self) for hit in hits]
        return import_pandas().DataFrame.from_records(rows, columns=("query_number", "query", *Hit._fields))
