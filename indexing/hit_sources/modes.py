"""Modes: short names of the usual sources (dense, exact, bm25, hybrid), and the default source of a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from riptide.base.arguments import closest_name
from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import DENSE
from riptide.indexing.embeddings.vector_kind import vector_kind_of
from riptide.indexing.hit_sources.bm25 import BM25
from riptide.indexing.hit_sources.exact import EXACT
from riptide.indexing.hit_sources.grammar import fusion_text
from riptide.indexing.hit_sources.index_source import INDEX
from riptide.indexing.hit_sources.registry import all_forms, find_kind, index_kinds
from riptide.indexing.hit_sources.search_options import Mode
from riptide.indexing.lucene.bm25_index import DEFAULT
from riptide.indexing.store.keys import Key
from riptide.indexing.store.store import Store, commands_that_make

HYBRID = 0.5  # BM25's weight; better than 0.3, 0.7 and reciprocal rank fusion on SQuAD dev and SciFact train
_DEFAULTS: tuple[Mode, ...] = ("hybrid", "dense", "bm25")  # a search without a source takes the first available mode


def hybrid_source(bm25: str, dense: str) -> str:
    """Returns the weighted fusion of a lexical and a dense source that the mode hybrid stands for."""
    return fusion_text([bm25, dense], [HYBRID, 1 - HYBRID])


def mode_sources(embeddings: str | None, index: str | None, bm25: str | None) -> dict[Mode, str]:
    """Returns mode -> source for the modes that these artifacts allow; without an index, dense is exact search.

    Args:
        embeddings: Name of dense embeddings, if any.
        index: Name of the FAISS index over them, if any.
        bm25: Name of a BM25 index, if any.
    """
    sources: dict[Mode, str] = {}
    if embeddings is not None:
        sources["exact"] = EXACT.source_text(embeddings)
        sources["dense"] = INDEX.source_text(index) if index is not None else sources["exact"]
    if bm25 is not None:
        sources["bm25"] = BM25.source_text(bm25)
    if embeddings is not None and bm25 is not None:
        sources["hybrid"] = hybrid_source(sources["bm25"], sources["dense"])
    return sources


def default_source(store: Store, embeddings: str | None = None, index: str | None = None) -> str:
    """Returns the source of a search that names no source: the first one that the store has.

    They are tried in this order: hybrid, dense, BM25, and an index of another kind of vector (SPLADE).

    Dense search takes the embeddings and the index that a release takes: see `dense_names`.

    Args:
        store: The store.
        embeddings: Name of dense embeddings; None: the only ones, if any.
        index: Name of a FAISS index; None: the only one over the embeddings, if any.

    Raises:
        InputError: If the store has nothing to search, or several artifacts of a kind.
    """
    dense: tuple[str | None, str | None] = (None, None)
    if embeddings is not None or index is not None or has_dense(store):
        dense = dense_names(store, embeddings, index)
    sources = mode_sources(*dense, DEFAULT if store.names("bm25") else None)
    for mode in _DEFAULTS:
        if mode in sources:
            return sources[mode]
    for kind in index_kinds():
        if kind is not INDEX and _has_index(store, kind.is_index):
            return kind.source_text(
                store.only_name("index", None, kind.is_index, choice=f"the source {kind.source_text('NAME')}")
            )
    if names := store.names("embeddings"):
        vectors = vector_kind_of(store.generations("embeddings", names[0])[0].config["encoder"])
        missing = f"build an index of its {vectors} embeddings ({commands_that_make('index')})"
    else:
        Corpus.open(store)
        missing = f"encode the corpus ({commands_that_make('embeddings')})"
    drafts = [key for key in store.incomplete_keys() if Key.parse(key).kind in ("embeddings", "index", "bm25")]
    remark = f" ({', '.join(drafts)}: begun and not complete)" if drafts else ""
    raise InputError(
        f"{store.url}: there is nothing to search{remark}: {missing}, or build a BM25 index "
        f"({commands_that_make('bm25')})"
    )


def has_dense(store: Store) -> bool:
    """Returns whether the store has dense embeddings."""
    names = store.names("embeddings")
    return any(DENSE.is_kind_of(made.config) for name in names for made in store.generations("embeddings", name))


def dense_names(store: Store, embeddings: str | None, index: str | None) -> tuple[str, str | None]:
    """Returns the name of the dense embeddings to search, and the name of the index over them or None.

    Args:
        store: The store.
        embeddings: Name of the embeddings; None: those of the index, or the only dense ones.
        index: Name of the index; None: the only one over the embeddings, if any.

    Raises:
        InputError: If there are no such artifacts, or several, or if the index is over other embeddings.
    """
    if index is not None:
        return store.only_name("embeddings", _embeddings_of(store, index, embeddings)), index
    embeddings = store.only_name("embeddings", embeddings, DENSE.is_kind_of)
    return embeddings, find_index_over(store, embeddings, f"say which with {Parameter('index', 'NAME')}")


def find_index_over(store: Store, embeddings: str, remedy: str) -> str | None:
    """Returns the name of the FAISS index over embeddings; None if there is no such index.

    Args:
        store: The store.
        embeddings: Name of the embeddings.
        remedy: How to choose one of several, for the error.

    Raises:
        InputError: If there are several.
    """
    configs = {name: store.generations("index", name)[-1].config for name in store.names("index")}
    names = [name for name, made in configs.items() if made["embeddings"] == embeddings and INDEX.is_index(made)]
    if len(names) > 1:
        raise InputError(f"{store.url} has several indexes over embeddings/{embeddings}: {', '.join(names)}; {remedy}")
    return names[0] if names else None


def find_mode(source: str) -> Mode | None:
    """Returns the mode with this name, ignoring case; None if there is no such mode."""
    modes: tuple[Mode, ...] = get_args(Mode)
    return next((mode for mode in modes if mode == source.lower()), None)


def expand_mode(source: str, store: Store) -> str:
    """Replaces a mode by the source that it stands for; returns other sources unchanged."""
    mode = find_mode(source)
    if mode is None:
        check_word(source)
        return source
    return source_of_mode(mode, store, by_name=True)


def check_word(source: str) -> None:
    """Raises InputError for a single word that is neither a mode nor a kind of source."""
    if source.isalnum() and find_mode(source) is None and find_kind(source) is None:
        modes: tuple[Mode, ...] = get_args(Mode)
        close = closest_name(source.lower(), modes)
        raise InputError(
            f"source {source!r}: expected a mode ({', '.join(modes)}) or a source ({', '.join(all_forms())}, or A+B)"
            + (f"; did you mean {close!r}?" if close else "")
        )


def source_of_mode(
    mode: Mode,
    store: Store,
    embeddings: str | None = None,
    index: str | None = None,
    *,
    by_name: bool = False,
    is_half: bool = False,
) -> str:
    """Returns the source that a mode stands for in a store.

    hybrid is BM25 and the index with equal weights; exact search takes the place of the index if the store has none, or
    if the named embeddings have none.

    Args:
        mode: The mode.
        store: The store.
        embeddings: Name of dense embeddings; None: the only ones.
        index: Name of a FAISS index; None: the only one, or the only one over the named embeddings.
        by_name: Whether an error shows how to choose one of several by the name of a source, not by a parameter.
        is_half: Whether it is the dense half of hybrid, which such an error then shows whole.

    Raises:
        InputError: If the store has no such artifact, or several.
    """
    if mode == "bm25":
        return "bm25"
    if embeddings is not None and index is None and mode != "exact":
        index = find_index_over(store, embeddings, f"say which with {Parameter('index', 'NAME')}")
    if mode == "hybrid":
        probed = index is not None or (embeddings is None and _has_index(store, INDEX.is_index))
        half: Mode = "dense" if probed else "exact"
        return hybrid_source("bm25", source_of_mode(half, store, embeddings, index, by_name=by_name, is_half=True))
    choice = (EXACT if mode == "exact" else INDEX).source_text("NAME") if by_name else None
    if choice and is_half:
        choice = hybrid_source("bm25", choice)
    if mode == "exact":
        return EXACT.source_text(store.only_name("embeddings", embeddings, DENSE.is_kind_of, choice=choice))
    name = store.only_name("index", index, INDEX.is_index, choice=choice)
    _embeddings_of(store, name, embeddings)
    return INDEX.source_text(name)


def _embeddings_of(store: Store, index: str, expected: str | None) -> str:
    """Returns the name of an index's embeddings. Raises InputError if it is missing or has other embeddings."""
    [latest] = store.generations("index", store.only_name("index", index))[-1:]
    embeddings = str(latest.config["embeddings"])
    if expected not in (None, embeddings):
        raise InputError(
            f"index/{index} is over embeddings/{embeddings}, not {expected}: name these embeddings, or another index"
        )
    return embeddings


def _has_index(store: Store, fits: Callable[[dict[str, Any]], bool]) -> bool:
    """Returns whether the store has an index whose configuration passes `fits`."""
    return any(fits(made.config) for name in store.names("index") for made in store.generations("index", name))
