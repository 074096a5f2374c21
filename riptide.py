"""riptide for Python users: an Encoder, a Store and what lies in it, a Client of a server.

from riptide import Client, Corpus, Encoder, Store
vectors = Encoder("sentence-transformers/all-MiniLM-L6-v2").encode(["what is a riptide?"], side="query")
passages = Corpus.open(Store("data/squad")).passages([0, 1, 2])
hits = Client("http://127.0.0.1:8000").search("what is a riptide?")
"""

from indexing.corpus import Corpus, Passage
from indexing.embeddings import Embeddings
from indexing.exact import Hits, exact_search
from indexing.fusion import reciprocal_rank, weighted
from indexing.index import Index
from indexing.queries import Queries
from indexing.store import Store
from retriever.encoder import Encoder, EncoderOptions
from retriever.errors import InputError
from retriever.reranker import Reranker, RerankerOptions
from serve.client import Client, ServerError
from serve.protocol import FoundPassage

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
    "Passage",
    "Queries",
    "Reranker",
    "RerankerOptions",
    "ServerError",
    "Store",
    "exact_search",
    "reciprocal_rank",
    "weighted",
]
