"""The public Python API: a Store with the artifacts in it, an Encoder, and a Client of a server.

from riptide import Client, Encoder, Store
store = Store("data/squad")
hits = store.search("hybrid")("who wrote Dracula?", k=10)
result = store.evaluate(["bm25", "hybrid"], split="test")
vectors = Encoder("sentence-transformers/all-MiniLM-L6-v2").encode(["what is a riptide?"], side="query")
hits = Client("http://127.0.0.1:8000").search("what is a riptide?")

Each name is imported when it is first used, so a program with a Client alone never loads torch.

`python -m riptide` and the console script `riptide` run the jobs: `riptide --help` lists them.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from riptide.base.errors import InputError
    from riptide.indexing.corpus.corpus import Corpus, Passage
    from riptide.indexing.dense.index import Index
    from riptide.indexing.embeddings.dense_embeddings import Embeddings
    from riptide.indexing.embeddings.mteb_models import open_mteb_encoder
    from riptide.indexing.exact import Hits, exact_search
    from riptide.indexing.hit_sources.fusion import reciprocal_rank, weighted
    from riptide.indexing.queries.queries import Queries
    from riptide.jobs.api.hits import Hit, QueryHits, SearchResults
    from riptide.jobs.api.open_search import Search
    from riptide.jobs.api.python_store import Store
    from riptide.jobs.api.stored_run import Run
    from riptide.jobs.comparison.comparison import Comparison
    from riptide.jobs.evaluation.evaluation import Evaluation
    from riptide.retriever.encoding.encoder import Encoder
    from riptide.retriever.encoding.mteb_encoder import MtebEncoder
    from riptide.retriever.encoding.reranker import Reranker
    from riptide.retriever.encoding.sparse_encoder import SparseEncoder
    from riptide.retriever.options import EncoderOptions, RerankerOptions
    from riptide.serve.client import Client, ServerError
    from riptide.serve.protocol import FoundPassage

__version__ = "0.1.0"

# A checkout has links here to the four packages beside this folder. An archive may have lost them, and Ray packs a
# working directory without them (.rayignore).
if not os.path.isfile(os.path.join(__path__[0], "jobs", "__init__.py")):
    __path__.append(os.path.dirname(__path__[0]))

__all__ = [
    "Client",
    "Comparison",
    "Corpus",
    "Embeddings",
    "Encoder",
    "EncoderOptions",
    "Evaluation",
    "FoundPassage",
    "Hit",
    "Hits",
    "Index",
    "InputError",
    "MtebEncoder",
    "Passage",
    "Queries",
    "QueryHits",
    "Reranker",
    "RerankerOptions",
    "Run",
    "Search",
    "SearchResults",
    "ServerError",
    "SparseEncoder",
    "Store",
    "exact_search",
    "open_mteb_encoder",
    "reciprocal_rank",
    "weighted",
]

_MODULES = {
    "Client": ".serve.client",
    "Comparison": ".jobs.comparison.comparison",
    "Corpus": ".indexing.corpus.corpus",
    "Embeddings": ".indexing.embeddings.dense_embeddings",
    "Encoder": ".retriever.encoding.encoder",
    "EncoderOptions": ".retriever.options",
    "Evaluation": ".jobs.evaluation.evaluation",
    "FoundPassage": ".serve.protocol",
    "Hit": ".jobs.api.hits",
    "Hits": ".indexing.exact",
    "Index": ".indexing.dense.index",
    "InputError": ".base.errors",
    "MtebEncoder": ".retriever.encoding.mteb_encoder",
    "Passage": ".indexing.corpus.corpus",
    "Queries": ".indexing.queries.queries",
    "QueryHits": ".jobs.api.hits",
    "Reranker": ".retriever.encoding.reranker",
    "RerankerOptions": ".retriever.options",
    "Run": ".jobs.api.stored_run",
    "Search": ".jobs.api.open_search",
    "SearchResults": ".jobs.api.hits",
    "ServerError": ".serve.client",
    "SparseEncoder": ".retriever.encoding.sparse_encoder",
    "Store": ".jobs.api.python_store",
    "exact_search": ".indexing.exact",
    "open_mteb_encoder": ".indexing.embeddings.mteb_models",
    "reciprocal_rank": ".indexing.hit_sources.fusion",
    "weighted": ".indexing.hit_sources.fusion",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on its first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    """Returns the public names."""
    return __all__
