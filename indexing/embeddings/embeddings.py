"""Embeddings: a chain of generations that matches the corpus part for part and row for row, float16 .npy files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from indexing.corpus.corpus import Corpus
from indexing.store.artifact import Artifact
from indexing.store.chain import RowPart, row_parts, split_rows
from indexing.store.store import Store
from retriever.errors import InputError

TOPICS = "topics"  # the group of parts with the topic of each passage, int32 [rows]


def open_generations(store: Store, name: str | None, corpus: Corpus, *, sparse: bool) -> tuple[str, list[Artifact]]:
    """Returns the name of embeddings and all their complete generations.

    Args:
        store: The store.
        name: Their name; None: the only ones of the store with such vectors.
        corpus: The corpus that they must cover.
        sparse: Whether their vectors must be sparse, or dense.

    Raises:
        InputError: If their vectors are of the other kind, if they are of another corpus, or if they lack rows of it.
    """
    name = store.only("embeddings", name, holds_sparse if sparse else holds_dense)
    generations = store.generations("embeddings", name)
    first = generations[0]
    if holds_sparse(first.config) != sparse:
        actual, expected = ("dense", "sparse") if sparse else ("sparse", "dense")
        remedy = (
            "encode the corpus with pooling splade"
            if sparse
            else "give embeddings of a dense encoder, or search the index of these by the source splade:NAME"
        )
        raise InputError(f"{store.url}/embeddings/{name}: holds {actual} vectors, expected {expected} ones: {remedy}")
    for made, of in zip(generations, corpus.generations, strict=False):
        if made.inputs["corpus"]["fingerprint"] != of.fingerprint:
            raise InputError(
                f"{made.url} was made from the corpus {made.inputs['corpus']['fingerprint'][:12]}, "
                f"{of.url} is {of.fingerprint[:12]}: encode this corpus"
            )
    num_rows = sum(part.rows for artifact in generations for part in artifact.group("part"))
    rows_to_cover = min(corpus.num_rows, first.config["limit"] or corpus.num_rows)
    if num_rows < rows_to_cover:
        raise InputError(
            f"{store.url}/embeddings/{name} covers {num_rows:,} of the corpus' {rows_to_cover:,} passages: "
            f"run jobs/encode_corpus.py --name {name} again to encode the new ones"
        )
    return name, generations


def is_sparse(described: Mapping[str, Any]) -> bool:
    """Whether the vectors of an encoder are sparse. described: its settings (`EncoderSpec.describe`)."""
    return bool(described.get("pooling") == "splade")


def holds_sparse(config: Mapping[str, Any]) -> bool:
    """Whether embeddings hold sparse vectors. config: of their artifact."""
    return is_sparse(config["encoder"])


def holds_dense(config: Mapping[str, Any]) -> bool:
    """Whether embeddings hold dense vectors. config: of their artifact."""
    return not is_sparse(config["encoder"])


class EmbeddingsReader:
    """Base of the readers of dense and sparse embeddings: the generations of embeddings/NAME and their notes.

    Attributes:
        num_rows: The number of passages.
        encoder_options: The fields of EncoderOptions.
        task: The task whose encoder made them; None: there was no task.
        dim: Numbers of a vector; of sparse ones, the words of the vocabulary.
        similarity: "cosine" or "dot".
    """

    def __init__(self, name: str, generations: Sequence[Artifact]):
        self.name = name
        self.generations = list(generations)
        self.parts: list[RowPart] = row_parts(generations)
        self.num_rows = self.parts[-1].end if self.parts else 0
        self.config: dict[str, Any] = generations[0].config
        notes = generations[0].notes
        self.encoder_name: str = notes["encoder"]
        self.encoder_options: dict[str, Any] = notes["options"]
        self.task: str | None = notes.get("task")
        self.dim: int = notes["dim"]
        self.similarity: str = notes["similarity"]

    def topics(self) -> np.ndarray | None:
        """Returns the topic by whose prompt each passage was encoded: int64 [num_rows]; None if there are no topics."""
        pieces = [np.load(made.local(part)) for made in self.generations for part in made.group(TOPICS)]
        return np.concatenate(pieces).astype(np.int64) if pieces else None


class Embeddings(EmbeddingsReader):
    """All complete generations of embeddings/NAME with dense vectors, for reading."""

    @classmethod
    def open(cls, store: Store, name: str | None, corpus: Corpus) -> Embeddings:
        """Opens embeddings/NAME; `name` may be left out if the store has only one with dense vectors.

        Raises:
            InputError: If their vectors are sparse, if they are of another corpus, or if they lack rows of this one.
        """
        return cls(*open_generations(store, name, corpus, sparse=False))

    def vectors(self, part: RowPart) -> np.ndarray:
        """Returns the vectors of a part, memory-mapped: float16 [rows, dim]. Raises InputError for another shape."""
        vectors = np.load(part.artifact.local(part.part), mmap_mode="r")
        if vectors.shape != (part.part.rows, self.dim) or vectors.dtype != np.float16:
            raise InputError(
                f"{part.artifact.url}/{part.part.file}: {vectors.dtype} {list(vectors.shape)}, expected float16 "
                f"{[part.part.rows, self.dim]}"
            )
        return vectors

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Returns the vectors of some rows: float16 [n, dim]."""
        vectors = np.empty((len(rows), self.dim), np.float16)
        for part, positions, local in split_rows(self.parts, rows):
            vectors[positions] = self.vectors(part)[local]
        return vectors

    def open_vectors(self) -> Callable[[np.ndarray], np.ndarray]:
        """Returns a `take` that keeps the files of the parts open, for many calls: int64 [n] -> float16 [n, dim]."""
        files: dict[int, np.ndarray] = {}

        def take(rows: np.ndarray) -> np.ndarray:
            vectors = np.empty((len(rows), self.dim), np.float16)
            for part, positions, local in split_rows(self.parts, rows):
                if part.first_row not in files:
                    files[part.first_row] = self.vectors(part)
                vectors[positions] = files[part.first_row][local]
            return vectors

        return take

    def between(self, first_row: int, end: int) -> list[tuple[int, np.ndarray]]:
        """(first row, float16 [n, dim]) of each piece of the rows [first_row, end), memory-mapped."""
        pieces = []
        for part in self.parts:
            start, stop = max(first_row, part.first_row), min(end, part.end)
            if start < stop:
                pieces.append((start, self.vectors(part)[start - part.first_row : stop - part.first_row]))
        return pieces


def holds_impacts(config: Mapping[str, Any]) -> bool:
    """Whether an index is one of impacts, over sparse embeddings. config: of its artifact."""
    return "impacts" in config


def holds_faiss(config: Mapping[str, Any]) -> bool:
    """Whether an index is one of FAISS, over dense embeddings. config: of its artifact."""
    return not holds_impacts(config)


def check_coverage(store: Store, name: str, num_rows: int, embeddings: EmbeddingsReader) -> None:
    """Raises InputError if index/NAME, which has a number of rows, lacks rows of its embeddings."""
    if num_rows < embeddings.num_rows:
        raise InputError(
            f"{store.url}/index/{name} covers {num_rows:,} of the {embeddings.num_rows:,} vectors of "
            f"embeddings/{embeddings.name}: run jobs/build_index.py --name {name} again to add the new ones"
        )
