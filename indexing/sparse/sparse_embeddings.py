"""Reads and writes sparse embeddings: a CSR file for each part of the corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from riptide.base.wording import Parameter
from riptide.indexing.embeddings.embeddings_reader import EmbeddingsReader
from riptide.indexing.embeddings.vector_kind import PartTexts, VectorKind
from riptide.indexing.sparse.csr_file import NUMBER_BYTES, SUFFIX, map_vectors, open_spool, read_vectors
from riptide.indexing.store.chain import RowPart, parts_of_range, split_rows
from riptide.process.memory import format_bytes
from riptide.retriever.encoding.sparse_vectors import SparseVectors, concatenate_sparse_vectors

if TYPE_CHECKING:
    from riptide.retriever.encoding.encoder import Encoder
    from riptide.retriever.encoding.sparse_encoder import SparseEncoder

MAX_WORDS = 1_000  # mean words per passage above which a job warns; SPLADE models give a few hundred


class SparseKind(VectorKind):
    """The vector kind of sparse vectors (SPLADE)."""

    name = "sparse"
    remedy = "encode the corpus with pooling splade"
    suffix = SUFFIX

    def write(self, texts: PartTexts, path: Path) -> None:
        """Encodes a part's passages and writes their vectors to a file.

        They leave memory batch by batch, because those of a model that was trained without a regulariser have almost as
        many numbers as the vocabulary has words.
        """
        sparse = self.query_encoder(texts.encoder)
        with open_spool(path.parent, sparse.dim) as spool:

            def forward() -> None:
                for places, vectors in sparse.batches(texts.tokens, **texts.arguments):
                    spool.add(texts.rows[places], vectors)

            if len(texts.rows):
                texts.run(forward)
            if len(texts.copied_rows):
                spool.add(texts.copied_rows, texts.copied_vectors)
            spool.save(path)

    def flatten(self, vectors: SparseVectors, count: int) -> list[np.ndarray]:
        return super().flatten(vectors.between(0, count).dense(), count)

    def read(self, path: Path, rows: int, dim: int, label: str) -> SparseVectors:
        return read_vectors(path, rows, dim, label)

    def query_encoder(self, encoder: Encoder) -> SparseEncoder:
        from riptide.retriever.encoding.sparse_encoder import SparseEncoder

        return SparseEncoder(encoder)

    def batched_model_type(self, encoder_settings: Mapping[str, Any]) -> None:
        return None

    def describe_vectors(self, encoder_settings: Mapping[str, Any]) -> str:
        return f"sparse vectors over {encoder_settings['dim']:,} words"

    def describe_size(self, encoder_settings: Mapping[str, Any], rows: int) -> str:
        words = encoder_settings["passage_terms"]
        most = f"at most {words:,}" if words else "as many as are not 0"
        return f"{rows:,} sparse vectors, {NUMBER_BYTES} bytes a word, {most} of a passage"

    def warning(self, rows: int, size_bytes: int) -> str | None:
        """Returns a warning if the mean number of words per vector exceeds MAX_WORDS; otherwise None."""
        words = size_bytes / max(1, rows) / NUMBER_BYTES
        if words <= MAX_WORDS:
            return None
        return (
            f"the vectors of the first part have {words:,.0f} words on average, {format_bytes(size_bytes)} in all: "
            f"give {Parameter('passage_terms', 'N')} under another {Parameter('name')} to keep the N largest weights "
            f"of a passage, or train with a larger {Parameter('flops_passages')}"
        )


SPARSE = SparseKind()


class SparseEmbeddings(EmbeddingsReader):
    """Sparse embeddings opened for reading: all complete generations of embeddings/NAME."""

    kind = SPARSE

    def vectors(self, part: RowPart) -> SparseVectors:
        """Reads the vectors of a part. Raises InputError if its file is damaged or holds other vectors."""
        vectors: SparseVectors = super().vectors(part)
        return vectors

    def take(self, rows: np.ndarray) -> SparseVectors:
        """Reads the vectors of `rows`, int64 [n], in that order."""
        return self._take(rows, self.vectors)

    def take_open(self, rows: np.ndarray) -> SparseVectors:
        """Reads vectors as `take` does, and keeps the files open, memory-mapped, for many calls."""
        return self._take(rows, lambda part: self.keep_open(part, self._map_part))

    def _take(self, rows: np.ndarray, vectors_of: Callable[[RowPart], SparseVectors]) -> SparseVectors:
        """Returns the vectors of rows, int64 [n], in that order; `vectors_of` opens all vectors of a part."""
        pieces, order = [], [np.empty(0, np.int64)]
        for part, positions, local in split_rows(self.parts, rows):
            pieces.append(vectors_of(part).take(local))
            order.append(positions)
        return concatenate_sparse_vectors(pieces, self.dim).take(np.argsort(np.concatenate(order)))

    def _map_part(self, part: RowPart) -> SparseVectors:
        label = f"{part.artifact.url}/{part.part.file}"
        return map_vectors(part.artifact.local_path(part.part), part.part.rows, self.dim, label)

    def open_vector_reader(self) -> Callable[[np.ndarray], np.ndarray]:
        """Returns a function that reads vectors in dense form, for many calls: rows int64 [n] -> float32 [n, dim].

        The files of the parts are checked when they are read first, and are memory-mapped.
        """
        return lambda rows: self.take_open(rows).dense()

    def read_range(self, first_row: int, end: int) -> Iterator[tuple[int, SparseVectors]]:
        """Yields the vectors of rows [first_row, end) part by part, as (first row, vectors)."""
        for part, rows in parts_of_range(self.parts, first_row, end):
            yield part.first_row + rows.start, self.vectors(part).between(rows.start, rows.stop)
