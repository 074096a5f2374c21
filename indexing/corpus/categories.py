"""Reads the categories of passages from their metadata."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import BATCH_ROWS, Corpus, open_table
from riptide.retriever.training.training_data import CategoryTable


def categories_of_rows(corpus: Corpus, field: str = "categories", rows: np.ndarray | None = None) -> CategoryTable:
    """Returns a table of the categories of each passage of a corpus.

    Args:
        corpus: The corpus.
        field: The metadata field with the categories of a passage: a list of strings, or one string.
        rows: The rows whose categories are needed, int64 [any]; None: all. Other rows, and deleted ones, have no
            categories in the table, and are not checked.

    Returns:
        The table; its number of rows is that of the corpus.

    Raises:
        InputError: If one of these passages has no categories; the message names the first one.
    """
    is_needed = np.ones(corpus.num_rows, bool) if rows is None else np.zeros(corpus.num_rows, bool)
    if rows is not None:
        is_needed[rows] = True
    is_needed[corpus.deleted] = False
    counts = np.zeros(corpus.num_rows, np.int64)
    numbers: dict[str, int] = {}  # category -> number, by first occurrence
    values: list[int] = []
    for part in corpus.parts:
        table = open_table(part).select(["id", "metadata"])
        needed_rows = np.flatnonzero(is_needed[part.first_row : part.end])
        for first in range(0, len(needed_rows), BATCH_ROWS):
            batch_rows = needed_rows[first : first + BATCH_ROWS]
            columns = table.take(batch_rows).to_pydict()
            for row, id, metadata in zip(part.first_row + batch_rows, columns["id"], columns["metadata"], strict=True):
                names = category_names(metadata, field, f"{part.artifact.url}: the passage {id!r}")
                counts[row] = len(names)
                values.extend(numbers.setdefault(name, len(numbers)) for name in names)
    sorted_names = sorted(numbers)
    by_name = np.empty(len(sorted_names), np.int32)
    by_name[[numbers[name] for name in sorted_names]] = np.arange(len(sorted_names), dtype=np.int32)
    value_rows = np.repeat(np.arange(corpus.num_rows), counts)
    sorted_values = by_name[np.array(values, np.int64)]
    order = np.lexsort((sorted_values, value_rows))
    return CategoryTable(tuple(sorted_names), np.concatenate([[0], np.cumsum(counts)]), sorted_values[order])


def category_names(metadata: str, field: str, place: str) -> set[str]:
    """Returns the categories in the metadata of a passage or query. Raises InputError if there are none.

    Args:
        metadata: A JSON object, or an empty string.
        field: The field with the categories: a list of strings, or one string.
        place: What has the metadata, for the error.

    Raises:
        InputError: If there are no categories, or if they are no strings.
    """
    fields: dict[str, Any] = orjson.loads(metadata) if metadata else {}
    value = fields.get(field)
    names = [value] if isinstance(value, str) else value
    if isinstance(names, list) and names and all(isinstance(name, str) and name for name in names):
        return set(names)
    if field in fields:
        actual = f"its metadata field {field!r} is {orjson.dumps(value).decode()[:80]}"
    elif fields:
        actual = f"its metadata has no field {field!r}, but {', '.join(map(repr, sorted(fields)[:8]))}"
    else:
        actual = "it has no metadata"
    raise InputError(
        f"{place} has no categories: {actual}; expected a list of names in the field {field!r}: import it with its "
        f"categories, or name another field by {Parameter('categories_field')}"
    )
