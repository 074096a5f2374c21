"""The public Python API: an Encoder, a Store with the artifacts in it, and a Client of a server.

from riptide import Client, Corpus, Encoder, Store
vectors = Encoder("sentence-transformers/all-MiniLM-L6-v2").encode(["what is a riptide?"], side="query")
passages = Corpus.open(Store("data/squad")).passages([0, 1, 2])
hits = Client("http://127.0.0.1:8000").search("what is a riptide?")

Encoder, MtebEncoder, Reranker, SparseEncoder and open_mteb_encoder need torch, which takes a second to load. They are
imported when they are first used, so a program with a Client alone never loads it.
"""

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any


def _check_packages() -> None:
    """Raises ImportError if another module is found first under the name of one of riptide's packages."""
    folder = os.path.dirname(os.path.realpath(__file__))
    for package in ("retriever", "indexing", "serve"):
        spec, expected = importlib.util.find_spec(package), os.path.join(folder, package)
        location = str([*(spec.submodule_search_locations or ()), spec.origin][0]) if spec else expected
        if os.path.realpath(location) != expected:
            raise ImportError(
                f"{location} hides riptide's package {package} ({expected}): rename it, or take its folder off "
                "the path of Python (the folder of the program, PYTHONPATH)"
            )


_check_packages()

from indexing.corpus.corpus import Corpus, Passage
from indexing.corpus.queries import Queries
from indexing.dense.index import Index
from indexing.embeddings.embeddings import Embeddings
from indexing.exact import Hits, exact_search
from indexing.hit_sources.fusion import reciprocal_rank, weighted
from indexing.store.store import Store
from retriever.errors import InputError
from retriever.options import EncoderOptions, RerankerOptions
from serve.client import Client, ServerError
from serve.protocol import FoundPassage

if TYPE_CHECKING:
    from indexing.embeddings.mteb_models import open_mteb_encoder
    from retriever.encoding.encoder import Encoder
    from retriever.encoding.mteb_encoder import MtebEncoder
    from retriever.encoding.reranker import Reranker
    from retriever.encoding.sparse_encoder import SparseEncoder

__all__ = [
    "Client",
    "Corpus",
    "Embeddings",
    "Encoder",
    "EncoderOptions",
    "FoundPassage",
    "Hits",
    "Index",
    "InputError",
    "MtebEncoder",
    "Passage",
    "Queries",
    "Reranker",
    "RerankerOptions",
    "ServerError",
    "SparseEncoder",
    "Store",
    "exact_search",
    "open_mteb_encoder",
    "reciprocal_rank",
    "weighted",
]

_MODELS = {
    "Encoder": "retriever.encoding.encoder",
    "MtebEncoder": "retriever.encoding.mteb_encoder",
    "Reranker": "retriever.encoding.reranker",
    "SparseEncoder": "retriever.encoding.sparse_encoder",
    "open_mteb_encoder": "indexing.embeddings.mteb_models",
}


def __getattr__(name: str) -> Any:
    """Imports a name that needs torch on its first use (PEP 562)."""
    if name not in _MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODELS[name]), name)
