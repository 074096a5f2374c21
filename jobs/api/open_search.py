"""An open search source, which answers queries in this process without loading its models and indexes again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, overload

import numpy as np

from riptide.base.arguments import refuse_unknown_names
from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Passage
from riptide.indexing.exact import Hits
from riptide.indexing.hit_sources.grammar import check_options_used
from riptide.indexing.hit_sources.modes import default_source, expand_mode, find_mode, source_of_mode
from riptide.indexing.hit_sources.search_options import COUNTS, By, SearchOptions
from riptide.indexing.search.few_queries import LocalSearch
from riptide.indexing.search.rescoring import open_reranker
from riptide.indexing.search.retrieval import RERANK_DEPTH
from riptide.indexing.store.store import Store
from riptide.indexing.work.local_runner import LocalRunner
from riptide.jobs.api.hits import Hit, QueryHits, SearchResults
from riptide.jobs.api.parameters import check_name, named_parameters, plain_argument
from riptide.retriever.options import EncoderPrecision


class _Open(NamedTuple):
    """The resources of an open search: the source with its corpus, and a reader of passages."""

    search: LocalSearch
    read_passages: Callable[[np.ndarray], list[Passage]]


@refuse_unknown_names
class Search:
    """An open search: `search("a query")` returns the same hits as a run with the same settings.

    It reads the corpus and the indexes as they were when it was opened. Models and indexes are loaded by the first
    query, and stay open until `close`, or the end of a `with` block. Several threads may search at once.

    Attributes:
        source: What is searched, in the grammar of sources, with all names filled in.

    Args:
        store: The store.
        source: A mode (hybrid, dense, exact, bm25) or a source, such as "0.4*bm25+0.6*exact:minilm"; None: the first
            that the store has of hybrid, dense, exact, bm25 and a SPLADE index.
        embeddings: Name of dense embeddings, for a mode; None: the only ones.
        index: Name of a FAISS index, for a mode; None: the only one.
        rerank: Re-rank the first hits with this cross-encoder: a Hugging Face name, a folder, or models/NAME.
        rerank_depth: Number of hits that it re-ranks; None: 100.
        rerank_dtype: The dtype of its matrix products, as of `riptide search`.
        by: What a hit is in a corpus of split documents: "document" (default) or "passage".
        settings: Encoder and task of the queries, and parameters of the index.
        gpus: Number of GPUs of this machine that models may use.

    Raises:
        InputError: If an artifact is missing or does not fit the others, or if the source has no use for a setting.
    """

    def __init__(
        self,
        store: Store,
        source: str | None = None,
        *,
        embeddings: str | None = None,
        index: str | None = None,
        rerank: str | None = None,
        rerank_depth: int | None = None,
        rerank_dtype: EncoderPrecision = "auto",
        by: By | None = None,
        settings: SearchOptions | None = None,
        gpus: int = 0,
    ):
        settings = settings or SearchOptions()
        names = {"source": source, "embeddings": embeddings, "index": index, "rerank": rerank}
        for name, text in (names | {"encoder": settings.encoder, "task": settings.task}).items():
            check_name(name, text)
        if by not in (None, "document", "passage"):
            raise InputError(f"{Parameter('by', repr(by))}: expected document or passage")
        counts = {"rerank_depth": rerank_depth} | {name: getattr(settings, name) for name in COUNTS}
        for name, value in counts.items():
            if value is not None:
                check_count(name, value)
        for name, value in {"rerank_depth": rerank_depth, "rerank_dtype": rerank_dtype}.items():
            if value not in (None, "auto") and rerank is None:
                raise InputError(f"{Parameter(name, value)}: it goes with {Parameter('rerank')}")
        chosen = choose_source(store, source, embeddings, index)
        check_options_used(chosen, settings)
        runner = LocalRunner(gpus=gpus)
        self._store, self._rerank_depth = store, RERANK_DEPTH if rerank_depth is None else rerank_depth
        reranker = None if rerank is None else open_reranker(store, rerank, rerank_dtype)
        search = LocalSearch(store, chosen, settings, runner, reranker=reranker, by=by, stays_open=True)
        self._open: _Open | None = _Open(search, search.corpus.open_passage_reader())
        self.source = search.source
        self._first = threading.Lock()
        self._is_loaded = False

    @overload
    def __call__(self, query: str, k: int = 10, *, filter: Mapping[str, Any] | str | None = None) -> QueryHits: ...

    @overload
    def __call__(
        self, query: list[str] | tuple[str, ...], k: int = 10, *, filter: Mapping[str, Any] | str | None = None
    ) -> SearchResults: ...

    def __call__(
        self, query: str | list[str] | tuple[str, ...], k: int = 10, *, filter: Mapping[str, Any] | str | None = None
    ) -> QueryHits | SearchResults:
        """Returns the hits of one query or of several queries.

        Args:
            query: A text, or several: searching them together takes less time than one after another.
            k: Number of hits per query.
            filter: Return only passages whose metadata match, such as "year >= 2000 and lang in (en, de)", or a dict,
                whose values may be those of NumPy, pandas and datetime. The rows of the latest filters are cached.

        Returns:
            The hits of the text; for several texts, a list with the hits of each.

        Raises:
            InputError: If a query is empty, if the filter does not fit the corpus, if the search is closed, or if its
                artifacts were removed since it was opened.
        """
        k, filter = plain_argument("k", k), plain_argument("filter", filter)
        with named_parameters():
            if isinstance(query, bytes | Mapping) or not isinstance(query, Iterable):
                raise InputError(f"found {type(query).__name__}, expected the text of a query, or a list of texts")
            texts = [query] if isinstance(query, str) else list(query)
            check_texts(texts)
            check_count("k", k)
            try:
                results = self._search_and_read(self._require_open(), texts, k, filter)
            except (InputError, FileNotFoundError) as error:
                self._check_current(error)
                raise
        return results[0] if isinstance(query, str) else results

    def close(self) -> None:
        """Refuses later searches; models, indexes and files are released when the running searches have ended."""
        self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Search({self._store.url!r}, {self.source!r})"

    def _require_open(self) -> _Open:
        """Returns the resources of the search. Raises InputError if the search is closed."""
        if (files := self._open) is None:
            raise InputError(f"the search of {self.source} is closed: open another one with store.search")
        return files

    def _search_and_read(
        self, files: _Open, texts: list[str], k: int, filter: Mapping[str, Any] | str | None
    ) -> SearchResults:
        """Searches texts and reads the passages of their hits."""
        search, results = files.search, SearchResults()
        allowed_rows = search.matching_rows(filter)
        if not texts:
            return results
        hits = self._search_texts(search, texts, k, allowed_rows)
        rows = hits.rows[hits.rows >= 0]
        passages = files.read_passages(rows)
        by_document = search.documents is not None
        names = search.corpus.documents(rows).tolist() if by_document else [passage.id for passage in passages]
        named_passages = iter(zip(names, passages, strict=True))
        for text, scores, of_query in zip(texts, hits.scores, hits.rows, strict=True):
            query_hits = QueryHits(text)
            for rank, score in enumerate(scores[of_query >= 0].tolist(), 1):
                name, passage = next(named_passages)
                query_hits.append(Hit(rank, score, name, passage.row, passage.title, passage.text, passage.metadata))
            results.append(query_hits)
        return results

    def _search_texts(self, search: LocalSearch, texts: list[str], k: int, allowed_rows: np.ndarray | None) -> Hits:
        """Searches texts. The first search loads models, so it runs alone."""
        if not self._is_loaded:
            with self._first:
                hits = search.search(texts, k, rerank_depth=self._rerank_depth, allowed_rows=allowed_rows)
                self._is_loaded = True
                return hits
        return search.search(texts, k, rerank_depth=self._rerank_depth, allowed_rows=allowed_rows)

    def _check_current(self, error: Exception) -> None:
        """Raises InputError if the corpus of the search was removed from the store or replaced."""
        if self._open is None:
            return
        searched = [generation.fingerprint for generation in self._open.search.corpus.generations]
        stored = [generation.fingerprint for generation in self._store.generations("corpus")]
        if stored[: len(searched)] != searched:
            raise InputError(
                f"{self._store.url}: the corpus was removed or replaced after this search was opened: open another one "
                "with store.search"
            ) from error


def choose_source(store: Store, source: str | None, embeddings: str | None = None, index: str | None = None) -> str:
    """Returns the source for a mode, for a source in the grammar, or the default source of the store.

    Args:
        store: The store.
        source: A mode or a source; None: the default source of the store.
        embeddings: Name of dense embeddings, for a mode; None: the only ones.
        index: Name of a FAISS index, for a mode; None: the only one.

    Raises:
        InputError: If the store lacks what a mode searches, or has several artifacts of a kind.
    """
    if source is None:
        return default_source(store, embeddings, index)
    mode = find_mode(source)
    if mode is not None and (embeddings is not None or index is not None):
        return source_of_mode(mode, store, embeddings, index)
    if embeddings is not None or index is not None:
        name, value = ("index", index) if embeddings is None else ("embeddings", embeddings)
        raise InputError(f"{Parameter(name, value)}: the source {source!r} names what it searches; leave one out")
    return expand_mode(source, store)


def check_count(name: str, value: Any) -> None:
    """Raises InputError unless the value of a parameter is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{Parameter(name, repr(value))}: expected an integer of at least 1")


def check_texts(texts: Sequence[Any]) -> None:
    """Raises InputError if a query is not a string or is empty."""
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"query {number}: expected a text, got {type(text).__name__}")
        if not text.strip():
            raise InputError(f"query {number}: {text!r} is empty; expected some words")
