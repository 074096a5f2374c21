"""A run, from queries to hits: encode blocks of queries, search them, commit each block as a part."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from indexing.artifact import Artifact, Draft
from indexing.corpus import Corpus
from indexing.embeddings import Embeddings
from indexing.encoding import check_encoder
from indexing.exact import Hits
from indexing.index import Index
from indexing.queries import Queries
from indexing.runs import hits_table, write_parquet
from indexing.searching import search_dense, search_exact
from indexing.store import Store
from indexing.tasks import node_cores, run_tasks
from retriever.encoder import Encoder, EncoderOptions, describe
from retriever.errors import InputError

QUERY_BLOCK = 8_192  # queries a part: what streams past the corpus together


class Retrieval:
    """Everything that a run needs, opened and checked before anything is computed."""

    def __init__(
        self,
        store: Store,
        *,
        mode: Literal["dense", "exact"],
        split: str,
        k: int,
        name: str | None = None,
        queries: str | None = None,
        embeddings: str | None = None,
        index: str | None = None,
        encoder: str | None = None,
        nprobe: int | None = None,
        depth: int | None = None,
        drop_self: bool = False,
        limit: int | None = None,
    ):
        """Raises InputError where something is missing, or was not made from what it is asked to fit."""
        self.store, self.mode, self.k, self.drop_self = store, mode, k, drop_self
        self.corpus = Corpus.open(store)
        self.queries = Queries.open(store, queries)
        self.split = self.queries.split(split, limit)
        if embeddings is None and mode == "dense":
            index = store.only("index", index)
            [latest] = store.generations("index", index)[-1:]
            embeddings = latest.config["embeddings"]
        self.embeddings = Embeddings.open(store, embeddings, self.corpus)
        self.index = Index.open(store, index, self.embeddings) if mode == "dense" else None
        self.encoder_name = encoder or self.embeddings.encoder_name
        self.options = EncoderOptions(**{**self.embeddings.encoder_options, "compile": "never"})
        self._check_encoder()
        self.source = f"index:{self.index.name}" if self.index else f"exact:{self.embeddings.name}"
        searched = self.index.name if self.index else self.embeddings.name
        chosen = name or f"{self.queries.artifact.key.partition('/')[2]}-{split}-{mode}-{searched}"
        self.name = chosen if limit is None else f"{chosen}-limit{limit}"
        self.nprobe = (nprobe or self.index.nprobe) if self.index else None
        self.depth = max(k + drop_self, depth or self.index.depth) if self.index else None
        self.config = {
            "source": self.source,
            "split": split,
            "k": k,
            "nprobe": self.nprobe,
            "depth": self.depth,
            "drop_self": drop_self,
            "limit": limit,
        }

    def _check_encoder(self) -> None:
        found = describe(self.encoder_name, EncoderOptions(**self.embeddings.encoder_options))
        made = self.embeddings.config["encoder"]
        if found != made:
            names = ", ".join(k for k in {**made, **found} if made.get(k) != found.get(k))
            raise InputError(
                f"encoder {self.encoder_name} is not the one that made embeddings/{self.embeddings.name} "
                f"({names} differ): name that one with --encoder, or encode the corpus with this one"
            )

    def inputs(self) -> dict[str, Artifact]:
        """What the run is made of: the latest generation of each chain stands for those before it."""
        found = {"queries": self.queries.artifact, "corpus": self.corpus.generations[-1]}
        found |= {f"embeddings/{n}": g for n, g in enumerate(self.embeddings.generations)}
        if self.index:
            found |= {f"index/{n}": g for n, g in enumerate(self.index.generations)}
        return found

    def draft(self) -> Draft:
        return self.store.create("runs", self.name, inputs=self.inputs(), config=self.config)

    def run(self) -> Iterator[tuple[bool, int]]:
        """Search what is left, block by block; yields (found done already, queries) for each."""
        with self.draft() as draft:
            committed = draft.committed()
            hits = sum(part.rows for part in committed.values())
            for number, start in enumerate(range(0, len(self.split.ids), QUERY_BLOCK)):
                ids = self.split.ids[start : start + QUERY_BLOCK]
                name = f"part-{number:05d}"
                if draft.complete or name in committed:
                    yield True, len(ids)
                    continue
                found = self.search(self.encode(self.split.texts[start : start + QUERY_BLOCK]))
                table = hits_table(ids, *self._kept(ids, found))
                draft.commit(name, ".parquet", functools.partial(write_parquet, table), rows=len(table))
                hits += len(table)
                yield False, len(ids)
            draft.note(hits=hits)

    def encode(self, texts: list[str]) -> np.ndarray:
        """Query vectors float32 [q, dim], by a task on the cluster."""
        cores = node_cores()
        shared = (self.encoder_name, self.options, self.embeddings.config["encoder"], cores)
        [(_, vectors)] = run_tasks(encode_queries, [texts], *shared, num_cpus=cores)
        return vectors

    def search(self, vectors: np.ndarray) -> Hits:
        k = self.k + self.drop_self
        if self.index:
            return search_dense(
                self.index, self.embeddings, vectors, k, self.corpus.deleted, nprobe=self.nprobe, depth=self.depth
            )
        return search_exact(self.embeddings, vectors, k, self.corpus.deleted)

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


def encode_queries(
    texts: list[str], name: str, options: EncoderOptions, pinned: Mapping[str, Any], threads: int
) -> np.ndarray:
    """One task: float32 [q, dim]."""
    encoder = Encoder(name, options, threads=threads)
    check_encoder(encoder, pinned)
    return encoder.encode(texts, side="query")
