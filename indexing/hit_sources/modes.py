"""Modes: short names of the usual sources (dense, exact, bm25, hybrid)."""

from __future__ import annotations

from indexing.embeddings import holds_dense
from indexing.hit_sources.grammar import fusion_text
from indexing.hit_sources.options import Mode
from indexing.index import holds_faiss
from indexing.store import Store
from retriever.errors import InputError

HYBRID = 0.5  # weight of BM25; of 0.3, 0.5, 0.7 and reciprocal ranks the best on SQuAD's dev and SciFact's train split


def hybrid(bm25: str, dense: str) -> str:
    """Returns the fusion that the mode hybrid stands for: of a lexical and a dense source."""
    return fusion_text([bm25, dense], [HYBRID, 1 - HYBRID])


def source_of(mode: Mode, store: Store, embeddings: str | None = None, index: str | None = None) -> str:
    """Returns the source that a mode stands for.

    hybrid is BM25 and the index with equal weights; exact search takes the place of the index if the store has none, or
    if embeddings are named.

    Args:
        mode: The mode.
        store: The store.
        embeddings: Name of dense embeddings; None: the only ones.
        index: Name of a FAISS index; None: the only one.

    Raises:
        InputError: If the store has no such artifact, or several.
    """
    if mode == "bm25":
        return "bm25"
    if mode == "hybrid":
        probed = index is not None or (embeddings is None and _has_faiss(store))
        return hybrid("bm25", source_of("dense" if probed else "exact", store, embeddings, index))
    if mode == "exact":
        return f"exact:{store.only('embeddings', embeddings, holds_dense)}"
    name = store.only("index", index, holds_faiss)
    [latest] = store.generations("index", name)[-1:]
    if embeddings not in (None, latest.config["embeddings"]):
        raise InputError(f"index/{name} is over embeddings/{latest.config['embeddings']}, not {embeddings}")
    return f"index:{name}"


def _has_faiss(store: Store) -> bool:
    """Whether the store has a FAISS index."""
    return any(holds_faiss(made.config) for name in store.names("index") for made in store.generations("index", name))
