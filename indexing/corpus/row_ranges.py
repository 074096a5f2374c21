"""The passages of a range of rows, open for a service: lookups, and the rows that match a filter."""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from riptide.indexing.corpus.corpus import Corpus, DocumentNumbers
from riptide.indexing.corpus.filters import Filter
from riptide.indexing.store.chain import RowPart, RowRange

FILTERS = 64  # filters whose matching rows are cached


class MatchingRows:
    """The rows of one range that match a filter, with a cache of the latest filters. Thread-safe."""

    def __init__(self, corpus: Corpus, range: RowRange):
        self.corpus, self.range = corpus, range
        self._cache: OrderedDict[Filter, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def rows(self, filter: Filter) -> np.ndarray:
        """Returns the matching rows, int64, ascending."""
        with self._lock:
            if filter in self._cache:
                self._cache.move_to_end(filter)
                return self._cache[filter]
        rows = filter.rows(self.corpus, *self.range)
        with self._lock:
            self._cache[filter] = rows
            while len(self._cache) > FILTERS:
                self._cache.popitem(last=False)
        return rows


def passage_parts(corpus: Corpus, rows: RowRange) -> list[RowPart]:
    """Returns the parts of a corpus that hold passages of a range of rows."""
    return [part for part in corpus.parts if part.first_row < rows.end and rows.first_row < part.end]


class OpenPassages:
    """The passages of a range of rows, with their files kept open: a lookup takes time in proportion to its passage."""

    def __init__(self, corpus: Corpus, rows: RowRange):
        self.rows, parts = rows, passage_parts(corpus, rows)
        self._starts = [part.first_row for part in parts]
        names = ["id", "title", "text", "metadata", *(["document", "start", "end"] if corpus.is_split else [])]
        self._columns = [[table.column(name) for name in names] for table in map(corpus.table, parts)]
        self._documents = DocumentNumbers(parts if corpus.is_split else [])
        self._documents.numbers(np.empty(0, np.int64))  # reads the documents now, not in the first search

    def fetch(self, rows: np.ndarray) -> list[tuple[Any, ...]]:
        """Returns the passages of those `rows`, int64 [n], that are in the range.

        Returns:
            (row, id, title, text, metadata as JSON) of each passage; if the corpus is split, also the id of its
            document, and the characters of its text at which the passage starts and ends.
        """
        passages = []
        for row in self._rows_in_range(rows).tolist():
            number = bisect.bisect_right(self._starts, row) - 1
            local = row - self._starts[number]
            passages.append((row, *(column[local].as_py() for column in self._columns[number])))
        return passages

    def documents(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns those of the rows, int64 [n], that are in the range, and the number of the document of each."""
        rows = self._rows_in_range(rows)
        return rows, self._documents.numbers(rows)

    def _rows_in_range(self, rows: np.ndarray) -> np.ndarray:
        return rows[(rows >= self.rows.first_row) & (rows < self.rows.end)]
