"""The public Python API: a Store with the artifacts in it, an Encoder, and a Client of a server.

from riptide import Client, Encoder, Store
store = Store("data/squad")
hits = store.search("hybrid")("who wrote Dracula?", k=10)
result = store.evaluate(["bm25", "hybrid"], split="test")
vectors = Encoder("sentence-transformers/all-MiniLM-L6-v2").encode(["what is a riptide?"], side="query")
found = Client("http://127.0.0.1:8000").search("what is a riptide?")

Each name is imported when it is first used, so a program with a Client alone never loads torch.

`python -m riptide` and the console script `riptide` run the jobs: `riptide --help` lists them.
"""

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs.api.hits import Hit, QueryHits, SearchResults
    from jobs.api.runs import Run
    from jobs.api.search import Search
    from jobs.api.store import Store
    from jobs.evaluation.evaluation import Evaluation

    from indexing.corpus.corpus import Corpus, Passage
    from indexing.corpus.queries import Queries
    from indexing.dense.index import Index
    from indexing.embeddings.embeddings import Embeddings
    from indexing.embeddings.mteb_models import open_mteb_encoder
    from indexing.exact import Hits, exact_search
    from indexing.hit_sources.fusion import reciprocal_rank, weighted
    from retriever.encoding.encoder import Encoder
    from retriever.encoding.mteb_encoder import MtebEncoder
    from retriever.encoding.reranker import Reranker
    from retriever.encoding.sparse_encoder import SparseEncoder
    from retriever.errors import InputError
    from retriever.options import EncoderOptions, RerankerOptions
    from serve.client import Client, ServerError
    from serve.protocol import FoundPassage

__version__ = "0.1.0"
_FOLDER = os.path.dirname(os.path.realpath(__file__))

__all__ = [
    "Client",
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
    "Client": "serve.client",
    "Corpus": "indexing.corpus.corpus",
    "Embeddings": "indexing.embeddings.embeddings",
    "Encoder": "retriever.encoding.encoder",
    "EncoderOptions": "retriever.options",
    "Evaluation": "jobs.evaluation.evaluation",
    "FoundPassage": "serve.protocol",
    "Hit": "jobs.api.hits",
    "Hits": "indexing.exact",
    "Index": "indexing.dense.index",
    "InputError": "retriever.errors",
    "MtebEncoder": "retriever.encoding.mteb_encoder",
    "Passage": "indexing.corpus.corpus",
    "Queries": "indexing.corpus.queries",
    "QueryHits": "jobs.api.hits",
    "Reranker": "retriever.encoding.reranker",
    "RerankerOptions": "retriever.options",
    "Run": "jobs.api.runs",
    "Search": "jobs.api.search",
    "SearchResults": "jobs.api.hits",
    "ServerError": "serve.client",
    "SparseEncoder": "retriever.encoding.sparse_encoder",
    "Store": "jobs.api.store",
    "exact_search": "indexing.exact",
    "open_mteb_encoder": "indexing.embeddings.mteb_models",
    "reciprocal_rank": "indexing.hit_sources.fusion",
    "weighted": "indexing.hit_sources.fusion",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on its first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _check_packages(_MODULES[name].partition(".")[0])
    return getattr(importlib.import_module(_MODULES[name]), name)


def _check_packages(*packages: str) -> None:
    """Raises ImportError if another module is found first under the name of one of riptide's packages."""
    for package in packages:
        spec, expected = importlib.util.find_spec(package), os.path.join(_FOLDER, package)
        location = str([*(spec.submodule_search_locations or ()), spec.origin][0]) if spec else expected
        if os.path.realpath(location) != expected:
            raise ImportError(
                f"{location} hides riptide's package {package} ({expected}): rename it, or take its folder off "
                "the path of Python (the folder of the program, PYTHONPATH)"
            )


if __name__ == "__main__":  # `python -m riptide`: modules of the current folder do not hide the packages
    sys.path.insert(0, _FOLDER)
_check_packages("retriever", "indexing", "serve")


def main() -> None:
    """Runs the command line: `riptide COMMAND …`."""
    try:
        _check_packages("jobs")
    except ImportError as error:
        sys.exit(f"error: {error}")
    from jobs.common.starting import handle_signals

    handle_signals()
    from jobs.common.console import run_command

    run_command(sys.argv[1:], __version__)


if __name__ == "__main__":
    main()
