"""A run, from queries to hits: blocks of queries are searched, and each block committed as a part."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from indexing.artifact import Artifact, Draft, Part
from indexing.corpus import Corpus
from indexing.exact import Hits
from indexing.queries import Queries
from indexing.rescoring import RerankWorker, numerics_of_reranker, open_reranker, rerank, reranker_inputs
from indexing.retrievers import Retrievers, SearchOptions
from indexing.runs import hits_table, read_run, write_parquet
from indexing.store import Store
from retriever.errors import InputError

QUERY_BLOCK = 8_192  # queries a part: what streams past the corpus together

RERANK_DEPTH = 100  # hits that are re-ranked
HYBRID = 0.5  # weight of BM25; of 0.3, 0.5, 0.7 and reciprocal ranks the best on SQuAD's dev and SciFact's train split

Mode = Literal["dense", "exact", "bm25", "hybrid"]


class Retrieval:
    """Everything that a run needs, opened and checked before anything is computed."""

    def __init__(
        self,
        store: Store,
        *,
        source: str,
        split: str,
        k: int,
        name: str | None = None,
        queries: str | None = None,
        options: SearchOptions | None = None,
        drop_self: bool = False,
        reranker: str | None = None,
        rerank_depth: int = RERANK_DEPTH,
        limit: int | None = None,
    ):
        """Raises InputError where something is missing, or was not made from what it is asked to fit."""
        self.store, self.k, self.drop_self = store, k, drop_self
        self.corpus = Corpus.open(store)
        self.queries = Queries.open(store, queries)
        self.split = self.queries.split(split, limit)
        self.retrievers = Retrievers(store, self.corpus, options or SearchOptions())
        self.retriever = self.retrievers.open(source)
        self.reranker = open_reranker(store, reranker) if reranker else None
        self.reranker_name = reranker or ""
        self._reranker_inputs = reranker_inputs(store, reranker) if reranker else {}
        self.rerank_depth = rerank_depth
        chosen = name or "-".join(
            [self.queries.artifact.key.partition("/")[2], split, label(self.retriever.source)]
            + ([label(reranker.rstrip("/").rpartition("/")[2])] if reranker else [])
        )
        self.name = chosen if limit is None else f"{chosen}-limit{limit}"
        self.config: dict[str, Any] = {
            "source": self.retriever.source,
            "dials": self.retriever.dials,
            "split": split,
            "k": k,
            "drop_self": drop_self,
            "limit": limit,
        }
        if self.reranker:
            self.config |= {"reranker": self.reranker[1], "rerank_depth": rerank_depth}

    def inputs(self) -> dict[str, Artifact]:
        """What the run is made of: the latest generation of the corpus stands for those before it."""
        found = {"queries": self.queries.artifact, "corpus": self.corpus.generations[-1]}
        return found | self.retriever.inputs() | self._reranker_inputs

    def draft(self) -> Draft:
        return self.store.create("runs", self.name, inputs=self.inputs(), config=self.config)

    def run(self) -> Iterator[tuple[bool, int]]:
        """Search what is left, block by block; yields (found done already, queries) for each."""
        worker, facts = None, {}
        if self.reranker:
            worker = RerankWorker(self.store, self.reranker_name, *self.reranker, numerics_of_reranker())
            facts = {"numerics": worker.numerics}
        with self.draft() as draft:
            committed = draft.committed()
            for part in committed.values():
                check_numerics(draft, part, facts)
                self.retrievers.pin(part.facts)
            hits = sum(part.rows for part in committed.values())
            for number, start in enumerate(range(0, len(self.split.ids), QUERY_BLOCK)):
                ids = self.split.ids[start : start + QUERY_BLOCK]
                name = f"part-{number:05d}"
                if draft.complete or name in committed:
                    yield True, len(ids)
                    continue
                texts = self.split.texts[start : start + QUERY_BLOCK]
                found, passage_ids = self._kept(ids, self.retriever.search(texts, self.k + self.drop_self))
                if worker:
                    found = rerank(found, texts, self.rerank_depth, self.corpus, worker)
                    passage_ids = self.corpus.ids(found.rows)
                table = hits_table(ids, found, passage_ids)
                own = {**facts, **self.retrievers.numerics()}
                part = draft.commit(name, ".parquet", functools.partial(write_parquet, table), rows=len(table), **own)
                check_numerics(draft, part, facts)  # it may be another writer's
                hits += len(table)
                yield False, len(ids)
            draft.note(hits=hits, **facts)

    def unanswered(self) -> list[str]:
        """Ids of the queries that the complete run has no hit for, in their order: no word of theirs is indexed."""
        answered: set[str] = set()
        for table in read_run(self.store.open("runs", self.name)):
            answered.update(table["query_id"].combine_chunks().unique().to_pylist())
        return [id for id in self.split.ids if id not in answered]

    def _kept(self, query_ids: list[str], hits: Hits) -> tuple[Hits, np.ndarray]:
        """(hits, passage ids [q, k]), a hit that is the query itself dropped where that was asked for."""
        ids = self.corpus.ids(hits.rows)
        if not self.drop_self:
            return hits, ids
        itself = ids == np.asarray(query_ids, object)[:, None]
        rows = np.where(itself, -1, hits.rows)
        surplus = np.flatnonzero(~itself.any(axis=1))
        rows[surplus, self.k :] = -1
        return Hits(hits.scores, rows), ids


def check_numerics(draft: Draft, part: Part, facts: dict[str, str]) -> None:
    """Raises InputError for a part that a re-ranker of another numerics class ordered than the one in `facts`."""
    found, here = part.facts.get("numerics"), facts.get("numerics")
    if found != here:
        raise InputError(
            f"{draft.url}/{part.name} is of the re-ranker's numerics class `{found}`, here it is `{here}`: go on with "
            f"the kind of machine that began it, or remove {draft.key} and begin anew"
        )


def source_of(mode: Mode, store: Store, embeddings: str | None = None, index: str | None = None) -> str:
    """The source that a mode stands for: names may be left out where the store has one only. Raises InputError.

    hybrid: BM25 and the index, half and half; every vector where the store has no index, or embeddings are named.
    """
    if mode == "bm25":
        return "bm25"
    if mode == "hybrid":
        probed = index is not None or (embeddings is None and store.names("index"))
        return f"{HYBRID:g}*bm25+{1 - HYBRID:g}*{source_of('dense' if probed else 'exact', store, embeddings, index)}"
    if mode == "exact":
        return f"exact:{store.only('embeddings', embeddings)}"
    name = store.only("index", index)
    [latest] = store.generations("index", name)[-1:]
    if embeddings not in (None, latest.config["embeddings"]):
        raise InputError(f"index/{name} is over embeddings/{latest.config['embeddings']}, not {embeddings}")
    return f"index:{name}"


def label(source: str) -> str:
    """A source as a piece of a name: `index:minilm` is dense-minilm."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", source.replace("index:", "dense-"))
