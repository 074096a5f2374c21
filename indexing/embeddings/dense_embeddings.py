"""Dense vectors: float16 .npy files, one for each part of the corpus."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import save_array
from riptide.indexing.embeddings.embeddings_reader import EmbeddingsReader
from riptide.indexing.embeddings.vector_kind import PartTexts, VectorKind
from riptide.indexing.exact.arrays import VectorFile
from riptide.indexing.store.chain import RowPart, parts_of_range, split_rows
from riptide.process.memory import format_bytes

READERS = 32  # parts whose rows are fetched at the same time
RANGE_SHARE = 1 / 8  # largest share of a part's rows that is fetched by ranges instead of its file
GAP_BYTES = 8 << 10  # rows that are further apart are fetched by separate requests
MAX_FETCHED_BYTES = 256 << 20  # bytes of rows that are fetched before they are scored
MAX_HEADER_BYTES = 1024  # bytes before the vectors in a .npy file


class DenseKind(VectorKind):
    """The kind of dense vectors: float16 [rows, dim] in .npy files."""

    name = "dense"
    remedy = "give embeddings of a dense encoder, or search the index of these by the source splade:NAME"
    suffix = ".npy"

    def write(self, texts: PartTexts, path: Path) -> None:
        half = np.empty((0, texts.encoder.dim), np.float16)
        if len(texts.rows):
            vectors = texts.run(functools.partial(texts.encoder.forward, texts.tokens, **texts.arguments))
            half = vectors.astype(np.float16)
            if (place := _first_not_finite(half)) is not None:
                raise InputError(
                    f"{texts.label(texts.rows[place])} does not fit float16 (largest "
                    f"{np.abs(vectors[place]).max():.3g}); normalise it ({Parameter('normalize')})"
                )
        if len(texts.copied_rows):
            if (place := _first_not_finite(texts.copied_vectors)) is not None:
                raise InputError(
                    f"{texts.label(texts.copied_rows[place])}, copied from a deleted passage with its text, is not "
                    f"finite: encode the corpus under another {Parameter('name')}"
                )
            encoded, half = half, np.empty((len(texts.rows) + len(texts.copied_rows), texts.encoder.dim), np.float16)
            half[texts.rows], half[texts.copied_rows] = encoded, texts.copied_vectors
        save_array(half, path)

    def read(self, path: Path, rows: int, dim: int, label: str) -> np.ndarray:
        """Opens a file of vectors, memory-mapped: float16 [rows, dim]. Raises InputError for another shape or dtype."""
        vectors: np.ndarray = np.load(path, mmap_mode="r")
        if vectors.shape != (rows, dim) or vectors.dtype != np.float16:
            raise InputError(f"{label}: {vectors.dtype} {list(vectors.shape)}, expected float16 {[rows, dim]}")
        return vectors

    def describe_vectors(self, encoder_settings: Mapping[str, Any]) -> str:
        return f"vectors of {encoder_settings['dim']}"

    def describe_size(self, encoder_settings: Mapping[str, Any], rows: int) -> str:
        return f"{rows:,} vectors, {format_bytes(rows * encoder_settings['dim'] * 2)} of float16"


def _first_not_finite(vectors: np.ndarray) -> int | None:
    """Returns the index of the first vector, [n, dim], with a value that is not finite; None: all are finite."""
    is_finite = np.isfinite(vectors).all(axis=1)
    return None if is_finite.all() else int(np.argmin(is_finite))


DENSE = DenseKind()


class Embeddings(EmbeddingsReader):
    """Reads embeddings/NAME with dense vectors from all complete generations."""

    kind = DENSE

    def vectors(self, part: RowPart) -> np.ndarray:
        """Opens the vectors of a part, memory-mapped: float16 [rows, dim]. Raises InputError if the shape differs."""
        vectors: np.ndarray = super().vectors(part)
        return vectors

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Returns the vectors of the given rows, int64 [n], in their order: float16 [n, dim]."""
        return self._take(rows, self.vectors)

    def open_vector_reader(self) -> Callable[[np.ndarray], np.ndarray]:
        """Returns a function like `take` that keeps part files open, for many calls: int64 [n] -> float16 [n, dim]."""
        return lambda rows: self._take(rows, lambda part: self.keep_open(part, self.vectors))

    def _take(self, rows: np.ndarray, vectors_of: Callable[[RowPart], np.ndarray]) -> np.ndarray:
        """Returns the vectors of rows, int64 [n], as float16 [n, dim]; `vectors_of` opens all vectors of a part."""
        vectors = np.empty((len(rows), self.dim), np.float16)
        for part, positions, local in split_rows(self.parts, rows):
            vectors[positions] = vectors_of(part)[local]
        return vectors

    def fetch(self, rows: np.ndarray) -> np.ndarray:
        """Returns the same as `take`, by ranges of files that this node does not have."""
        vectors = np.empty((len(rows), self.dim), np.float16)
        for part, positions, local in split_rows(self.parts, rows):
            distinct, places = np.unique(local, return_inverse=True)
            vectors[positions] = PartVectors(self, part, slice(0, part.part.rows)).read_rows(distinct)[places]
        return vectors

    def read_range(self, first_row: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (first row, vectors) of the rows [first_row, end) part by part: float16 [n, dim], memory-mapped."""
        for first, vectors in self.ranges(first_row, end):
            yield first, vectors.open()

    def ranges(self, first_row: int, end: int) -> list[tuple[int, PartVectors]]:
        """Returns the vectors of the rows [first_row, end) without opening a file: (first row, vectors) per part."""
        return [
            (part.first_row + rows.start, PartVectors(self, part, rows))
            for part, rows in parts_of_range(self.parts, first_row, end)
        ]


@dataclass(frozen=True, slots=True)
class PartVectors:
    """The vectors of a range of rows of a part, whose file is opened when they are needed.

    Attributes:
        embeddings: The embeddings.
        part: The part.
        rows: The rows of the part.
    """

    embeddings: Embeddings
    part: RowPart
    rows: slice

    def __len__(self) -> int:
        return self.rows.stop - self.rows.start

    def open(self) -> np.ndarray:
        """Returns the vectors, memory-mapped: float16 [n, dim]."""
        return self.embeddings.vectors(self.part)[self.rows]

    def open_local(self) -> np.ndarray | None:
        """Returns the vectors, memory-mapped, if this node has their file, which then stays open; otherwise None."""
        if not self.part.artifact.has_file(self.part.part):
            return None
        return self.embeddings.keep_open(self.part, self.embeddings.vectors)[self.rows]

    def read_rows(self, rows: np.ndarray) -> np.ndarray:
        """Returns the vectors of `rows` of the range, int64 [m], ascending: float16 [m, dim].

        Of a part that this node does not have, the bytes of the rows are fetched if they are few, otherwise the file.
        """
        part, row_bytes = self.part.part, 2 * self.embeddings.dim
        header = part.bytes - part.rows * row_bytes
        if (
            self.part.artifact.has_file(part)
            or len(rows) > part.rows * RANGE_SHARE
            or not 0 < header <= MAX_HEADER_BYTES
        ):
            return self.open()[rows]
        rows = rows + self.rows.start
        vectors = np.empty((len(rows), self.embeddings.dim), np.float16)
        cuts = np.flatnonzero(np.diff(rows) * row_bytes > GAP_BYTES) + 1
        for positions in np.split(np.arange(len(rows)), cuts):
            first, last = rows[positions[0]], rows[positions[-1]]
            data = self.part.artifact.read_range(part, header + first * row_bytes, header + (last + 1) * row_bytes)
            vectors[positions] = np.frombuffer(data, np.float16).reshape(-1, self.embeddings.dim)[
                rows[positions] - first
            ]
        return vectors


class FetchedVectors:
    """A VectorFile of which some rows are in memory.

    Args:
        num_rows: Number of all vectors.
        rows: The rows in memory, int64 [m], ascending.
        vectors: Their vectors, [m, dim].
    """

    def __init__(self, num_rows: int, rows: np.ndarray, vectors: np.ndarray):
        self._num_rows, self._rows, self._vectors = num_rows, rows, vectors

    def __len__(self) -> int:
        return self._num_rows

    def open_local(self) -> None:
        """Returns None: not all rows are in memory."""

    def read_rows(self, rows: np.ndarray) -> np.ndarray:
        """Returns the vectors of `rows`, which must be in memory."""
        return self._vectors[np.searchsorted(self._rows, rows)]


def fetch_rows(parts: Sequence[tuple[int, PartVectors]], rows: np.ndarray) -> list[tuple[int, VectorFile]]:
    """Fetches the vectors of rows of those parts that this node does not have, with several requests at once.

    Args:
        parts: First row and vectors of each part with such a row.
        rows: Global rows, int64, ascending.

    Returns:
        The parts. Those of which only rows were fetched are replaced by these rows. If the rows take more than
        MAX_FETCHED_BYTES, nothing is fetched, and the search reads part by part.
    """

    def fetch(entry: tuple[int, PartVectors]) -> tuple[int, VectorFile]:
        first, vectors = entry
        low, high = np.searchsorted(rows, [first, first + len(vectors)])
        local = rows[low:high] - first
        if vectors.open_local() is not None:
            return entry
        return first, FetchedVectors(len(vectors), local, vectors.read_rows(local))

    if all(vectors.part.artifact.has_file(vectors.part.part) for _, vectors in parts):
        return list(parts)
    if len(rows) * 2 * parts[0][1].embeddings.dim > MAX_FETCHED_BYTES:
        return list(parts)
    with ThreadPoolExecutor(READERS) as threads:
        return list(threads.map(fetch, parts))
