"""The registry of kinds of hit sources. To add a kind, write its module and add its object to KINDS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from riptide.base.errors import InputError
from riptide.indexing.embeddings.vector_kind import vector_kind_of
from riptide.indexing.hit_sources.bm25 import BM25
from riptide.indexing.hit_sources.exact import EXACT
from riptide.indexing.hit_sources.index_source import INDEX
from riptide.indexing.hit_sources.online_search import OnlineSearch
from riptide.indexing.hit_sources.source_kind import HitSource, IndexKind, SearchContext, SourceKind
from riptide.indexing.hit_sources.splade import SPLADE
from riptide.retriever.options import VECTORS

KINDS: list[SourceKind] = [INDEX, EXACT, BM25, SPLADE]


def register_poolings() -> None:
    """Adds the poolings of all kinds of vector to the valid values of the option pooling."""
    for vectors in (kind.reader.kind for kind in index_kinds()):
        VECTORS.update(dict.fromkeys(vectors.poolings, vectors.name))


def find_kind(name: str) -> SourceKind | None:
    """Returns the kind of source with this name; None if there is no such kind."""
    return next((kind for kind in KINDS if kind.name == name), None)


def all_forms() -> list[str]:
    """Returns the forms of a single source in the grammar, for all kinds, sorted by kind name."""
    return [form for kind in sorted(KINDS, key=lambda kind: kind.name) for form in kind.forms]


def index_kinds() -> list[IndexKind]:
    """Returns the kinds of source that search an index of vectors: one for each kind of vector."""
    return [kind for kind in KINDS if isinstance(kind, IndexKind)]


def find_index_kind(encoder_settings: Mapping[str, Any]) -> IndexKind:
    """Returns the kind of source that searches the vectors of an encoder by an index.

    encoder_settings: as `EncoderSpec.settings` returns them. Raises InputError for vectors of an unknown kind.
    """
    for kind in index_kinds():
        if kind.reader.kind.is_made_by(encoder_settings):
            return kind
    known = ", ".join(kind.reader.kind.name for kind in index_kinds())
    raise InputError(f"the encoder makes {vector_kind_of(encoder_settings)} vectors, expected one of the kinds {known}")


def open_source(kind: SourceKind, context: SearchContext, name: str) -> HitSource:
    """Opens a source by kind and name. Raises InputError if it is an index that another kind searches."""
    if isinstance(kind, IndexKind):
        config = kind.config_of(context.store, name)
        if not kind.is_index(config):
            name = context.store.only_name("index", name)
            for other in index_kinds():
                if other.is_index(config):
                    raise InputError(f"index/{name} {other.summary}: search it by the source {other.source_text(name)}")
            raise InputError(f"index/{name} is over vectors of an unknown kind: expected an index that {kind.summary}")
    return kind.open(context, name)


def online_searches() -> list[OnlineSearch]:
    """Returns the distinct online searches of all kinds of sources; several kinds may share one."""
    return list(dict.fromkeys(kind.online for kind in KINDS))


register_poolings()
