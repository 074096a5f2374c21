"""The hits of a search: rows with their passages, as lists and as data frames."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from riptide.base.arguments import refuse_unknown_names
from riptide.jobs.evaluation.frames import import_frames, notebook_table

if TYPE_CHECKING:
    import pandas
    import polars


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


@refuse_unknown_names
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
        return import_frames("pandas").DataFrame.from_records(self, columns=Hit._fields)

    def to_polars(self) -> polars.DataFrame:
        """Returns a data frame with a row per hit. The metadata are JSON text, which `str.json_decode` decodes.

        Raises:
            InputError: If polars is not installed.
        """
        return _polars_frame({}, map(_with_json, self))

    def _repr_html_(self) -> str:
        """Returns the hits as an HTML table, which a notebook shows."""
        return notebook_table(self.query, _SHOWN, map(_shown_cells, self))


@refuse_unknown_names
class SearchResults(list[QueryHits]):
    """The hits of several queries, in the order of the queries."""

    def to_pandas(self) -> pandas.DataFrame:
        """Returns a data frame with a row per hit; its first columns are the number and the text of the query.

        Raises:
            InputError: If pandas is not installed.
        """
        rows = [(number, hits.query, *hit) for number, hits in enumerate(self) for hit in hits]
        return import_frames("pandas").DataFrame.from_records(rows, columns=("query_number", "query", *Hit._fields))

    def to_polars(self) -> polars.DataFrame:
        """Returns the columns of `to_pandas` in a polars data frame. The metadata are JSON text for `str.json_decode`.

        Raises:
            InputError: If polars is not installed.
        """
        rows = [(number, hits.query, *_with_json(hit)) for number, hits in enumerate(self) for hit in hits]
        return _polars_frame({"query_number": "Int64", "query": "String"}, rows)

    def _repr_html_(self) -> str:
        """Returns the hits of all queries as an HTML table, which a notebook shows."""
        rows = [(hits.query, *_shown_cells(hit)) for hits in self for hit in hits]
        return notebook_table(f"hits of {len(self):,} queries", ("query", *_SHOWN), rows)


_SHOWN = ("rank", "score", "id", "title", "text", "metadata")
# Polars types of the fields of a hit, given so that they do not depend on the metadata or the number of hits.
_POLARS_TYPES = {
    "rank": "Int64",
    "score": "Float64",
    "id": "String",
    "row": "Int64",
    "title": "String",
    "text": "String",
    "metadata": "String",
}


def _shown_cells(hit: Hit) -> tuple[Any, ...]:
    """Returns the values of a hit that a table shows; the metadata are JSON text."""
    return tuple(getattr(_with_json(hit), name) for name in _SHOWN)


def _with_json(hit: Hit) -> Hit:
    """Returns a copy of a hit in which the metadata are JSON text."""
    return hit._replace(metadata=json.dumps(hit.metadata, ensure_ascii=False))  # type: ignore[arg-type]


def _polars_frame(first_types: dict[str, str], rows: Iterable[tuple[Any, ...]]) -> polars.DataFrame:
    """Returns a polars data frame of hits. first_types: the types of the columns that precede the fields of a hit."""
    frames = import_frames("polars")
    schema = {name: getattr(frames, kind) for name, kind in {**first_types, **_POLARS_TYPES}.items()}
    return frames.DataFrame(list(map(tuple, rows)), schema=schema, orient="row")
