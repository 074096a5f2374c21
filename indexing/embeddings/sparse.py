"""Sparse embeddings: a chain of generations that matches the corpus part for part and row for row, CSR files."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from indexing.corpus.corpus import Corpus
from indexing.embeddings.embeddings import EmbeddingsReader, open_generations
from indexing.embeddings.sparse_files import map_vectors, read_vectors
from indexing.store.chain import RowPart, split_rows
from indexing.store.store import Store
from retriever.encoding.sparse_vectors import SparseVectors, concatenate


class SparseEmbeddings(EmbeddingsReader):
    """All complete generations of embeddings/NAME with sparse vectors, for reading."""

    @classmethod
    def open(cls, store: Store, name: str | None, corpus: Corpus) -> SparseEmbeddings:
        """Opens embeddings/NAME; `name` may be left out if the store has only one with sparse vectors.

        Raises:
            InputError: If their vectors are dense, if they are of another corpus, or if they lack rows of this one.
        """
        return cls(*open_generations(store, name, corpus, sparse=True))

    def vectors(self, part: RowPart) -> SparseVectors:
        """Returns the vectors of a part. Raises InputError if its file is damaged or holds other vectors."""
        label = f"{part.artifact.url}/{part.part.file}"
        return read_vectors(part.artifact.local(part.part), part.part.rows, self.dim, label)

    def take(self, rows: np.ndarray) -> SparseVectors:
        """Returns the vectors of some rows, int64 [n], in their order."""
        pieces, order = [], [np.empty(0, np.int64)]
        for part, positions, local in split_rows(self.parts, rows):
            pieces.append(self.vectors(part).take(local))
            order.append(positions)
        return concatenate(pieces, self.dim).take(np.argsort(np.concatenate(order)))

    def open_vectors(self) -> Callable[[np.ndarray], np.ndarray]:
        """Returns a function that reads vectors with all zeros, for many calls: int64 [n] -> float32 [n, dim].

        The files of the parts are checked when they are read first, and are memory-mapped.
        """
        files: dict[int, SparseVectors] = {}

        def take(rows: np.ndarray) -> np.ndarray:
            vectors = np.empty((len(rows), self.dim), np.float32)
            for part, positions, local in split_rows(self.parts, rows):
                if part.first_row not in files:
                    label = f"{part.artifact.url}/{part.part.file}"
                    files[part.first_row] = map_vectors(part.artifact.local(part.part), part.part.rows, self.dim, label)
                vectors[positions] = files[part.first_row].take(local).dense()
            return vectors

        return take

    def between(self, first_row: int, end: int) -> Iterator[tuple[int, SparseVectors]]:
        """Yields (first row, vectors) of each piece of the rows [first_row, end)."""
        for part in self.parts:
            start, stop = max(first_row, part.first_row), min(end, part.end)
            if start < stop:
                yield start, self.vectors(part).between(start - part.first_row, stop - part.first_row)
