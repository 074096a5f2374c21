"""Random sparse vectors as embeddings of a small corpus, and their index, built in this process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from small_stores import extend_corpus, shuffling_runner

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.sparse.building import BuildImpactsWork
from riptide.indexing.sparse.csr_file import SUFFIX, save_vectors
from riptide.indexing.sparse.index import ImpactIndex
from riptide.indexing.sparse.sparse_embeddings import SparseEmbeddings
from riptide.indexing.store.store import Store, generation
from riptide.indexing.work.work import run_work
from riptide.retriever.encoding.sparse_vectors import SparseVectors, from_dense

WIDTH = 300


def random_vectors(rows: int, *, seed: int = 0, largest: float = 3.0, density: float = 0.1) -> SparseVectors:
    """Returns random vectors over WIDTH words; some are empty, and words have very different frequencies."""
    draw = np.random.default_rng(seed)
    often = density * 2 * draw.random(WIDTH) ** 2
    matrix = (largest * draw.random((rows, WIDTH)) * (draw.random((rows, WIDTH)) < often)).astype(np.float32)
    matrix[::17] = 0
    return from_dense(matrix)


def add_embeddings(root: Path, parts: Sequence[SparseVectors], name: str = "s", deleted: Sequence[int] = ()) -> None:
    """Adds a generation to the corpus of the store `root`/store, and to embeddings/NAME one with these vectors."""
    store = Store(str(root / "store"))
    corpus = extend_corpus(root, [["text"] * len(vectors) for vectors in parts], deleted)
    config = {"encoder": {"pooling": "splade", "dim": WIDTH}, "limit": None, "numerics": "made by a test"}
    key = f"{name}/{generation(len(corpus.generations) - 1)}"
    with store.create("embeddings", key, inputs={"corpus": corpus.generations[-1]}, config=config) as draft:
        for number, vectors in enumerate(parts):
            draft.commit(f"part-{number:05d}", SUFFIX, partial(save_vectors, vectors), rows=len(vectors))
        draft.add_notes(encoder="e", options={}, task=None, dim=WIDTH, similarity="dot")


def build_index(root: Path, shards: int, name: str | None = None) -> ImpactIndex:
    """Builds or extends index/NAME over embeddings/s; by default the name says the number of shards."""
    store = Store(str(root / "store"))
    embeddings = SparseEmbeddings.open(store, "s", Corpus.open(store))
    work = BuildImpactsWork(store, embeddings, name or f"i{shards}", shards=shards)
    if not work.is_complete:
        work.pin_versions(shuffling_runner())
        run_work(store, work, shuffling_runner())
    return ImpactIndex.open(store, work.name, embeddings)
