"""Modes: short names of the usual sources (dense, exact, bm25, hybrid)."""

from __future__ import annotations

from indexing.hit_sources.grammar import fusion_text
from indexing.hit_sources.options import Mode
from indexing.store import Store
from retriever.errors import InputError

HYBRID = 0.5  # weight of BM25; of 0.3, 0.5, 0.7 and reciprocal ranks the best on SQuAD's dev and SciFact's train split


def hybrid(bm25: str, dense: str) -> str:
    """Returns the fusion that the mode hybrid stands for: of a lexical and a dense source."""
    return fusion_text([bm25, dense], [HYBRID, 1 - HYBRID])


def source_of(mode: Mode, store: Store, embeddings: str | None = None, index: str | None = None) -> str:
    """Returns the source that a mode stands for. A name may be left out if the store has only one.

    hybrid is BM25 and the index with equal weights; exact search takes the place of the index if the store has none, or
    if embeddings are named.

    Raises:
        InputError: If the store has no such artifact, or several.
    """
    if mode == "bm25":
        return "bm25"
    if mode == "hybrid":
        probed = index is not None or (embeddings is None and store.names("index"))
        return hybrid("bm25", source_of("dense" if probed else "exact", store, embeddings, index))
    if mode == "exact":
        return f"exact:{store.only('embeddings', embeddings)}"
    name = store.only("index", index)
    [latest] = store.generations("index", name)[-1:]
    if embeddings not in (None, latest.config["embeddings"]):
        raise InputError(f"index/{name} is over embeddings/{latest.config['embeddings']}, not {embeddings}")
    return f"index:{name}"
