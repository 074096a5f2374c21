"""Dense vectors: float16 .npy files, one for each part of the corpus."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from riptide.base.errors import InputError
from riptide.base.memory import format_bytes
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import save_array
from riptide.indexing.embeddings.embeddings_reader import EmbeddingsReader
from riptide.indexing.embeddings.vector_kind import PartTexts, VectorKind
from riptide.indexing.store.chain import RowPart, parts_of_range, split_rows


class DenseKind(VectorKind):
    """The kind of dense vectors: float16 [rows, dim] in .npy files."""

    name = "dense"
    remedy = "give embeddings of a dense encoder, or search the index of these by the source splade:NAME"
    suffix = ".npy"

    def write(self, texts: PartTexts, path: Path) -> None:
        vectors = texts.run(functools.partial(texts.encoder.forward, texts.tokens, **texts.arguments))
        half = vectors.astype(np.float16)
        if not np.isfinite(half).all():
            part, row = texts.part, int(np.flatnonzero(~np.isfinite(half).all(axis=1))[0])
            raise InputError(
                f"{part.artifact.url}/{part.part.file}: the vector of passage {part.first_row + row} does not fit "
                f"float16 (largest {np.abs(vectors[row]).max():.3g}); normalise it ({Parameter('normalize')})"
            )
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
        files: dict[int, np.ndarray] = {}

        def vectors(part: RowPart) -> np.ndarray:
            if part.first_row not in files:
                files[part.first_row] = self.vectors(part)
            return files[part.first_row]

        return lambda rows: self._take(rows, vectors)

    def _take(self, rows: np.ndarray, vectors_of: Callable[[RowPart], np.ndarray]) -> np.ndarray:
        """Returns the vectors of rows, int64 [n], as float16 [n, dim]; `vectors_of` opens all vectors of a part."""
        vectors = np.empty((len(rows), self.dim), np.float16)
        for part, positions, local in split_rows(self.parts, rows):
            vectors[positions] = vectors_of(part)[local]
        return vectors

    def read_range(self, first_row: int, end: int) -> list[tuple[int, np.ndarray]]:
        """Returns the vectors of the rows [first_row, end), memory-mapped: (first row, float16 [n, dim]) per part."""
        return [
            (part.first_row + rows.start, self.vectors(part)[rows])
            for part, rows in parts_of_range(self.parts, first_row, end)
        ]
