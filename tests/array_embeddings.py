"""Embeddings of an array, for tests of what searches embeddings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from riptide.indexing.embeddings.dense_embeddings import PartVectors
from riptide.indexing.store.chain import RowPart

ON_DISK = RowPart(SimpleNamespace(has_file=lambda part: True), None, 0)  # type: ignore[arg-type]


class ArrayEmbeddings:
    """As much of Embeddings as searches need, and of an index with one file.

    Args:
        vectors: The vectors, float16 [n, dim].
        first_row: The row of the first vector.
        file: The file of the index.
    """

    def __init__(self, vectors: np.ndarray, first_row: int = 0, file: Path | None = None):
        self.all_vectors, self.first_row, self.file = vectors, first_row, file
        self.num_rows = len(vectors)

    def vectors(self, part: None) -> np.ndarray:
        return self.all_vectors

    def keep_open(self, part: None, open: Callable[[None], np.ndarray]) -> np.ndarray:
        return open(part)

    def ranges(self, first_row: int, end: int) -> list[tuple[int, PartVectors]]:
        rows = slice(first_row - self.first_row, end - self.first_row)
        return [(first_row, PartVectors(self, ON_DISK, rows))]  # type: ignore[arg-type]

    def take(self, rows: np.ndarray) -> np.ndarray:
        return self.all_vectors[rows - self.first_row]

    def local_path(self, part: object) -> Path | None:
        return self.file
