"""What `tune_prompts` trains, from the store: questions, mined negatives, and a dev split to be judged by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
import torch.distributed as dist

from indexing.corpus import Corpus
from indexing.encoders import EncoderSpec
from indexing.exact import ExactSearch
from indexing.models import model_folder
from indexing.negatives import training_data
from indexing.queries import Queries
from indexing.store import Store
from retriever.dual import DevSet, DualSystem, TuneOptions
from retriever.errors import InputError
from retriever.files import resolve
from retriever.prompts import load_prompt
from retriever.system import Evaluate, Refresh

_BLOCK = 65_536  # passages whose vectors are held at once


@dataclass(frozen=True, kw_only=True)
class TuneMaker:
    """A Maker. backbone: whose texts become vectors as its options say; described: what it must be on every node.

    dev_split: None for none. dev_limit: its first questions; dev_passages: how many passages they are looked for in,
    those that answer them and others at random. start: prompts/NAME to begin from.
    refresh_depth: how many negatives of each question are mined when they are mined anew; 0: never.
    """

    store: Store
    backbone: EncoderSpec
    described: dict[str, Any]
    tuning: TuneOptions
    corpus: Corpus
    queries: str
    negatives: str
    split: str
    limit: int | None
    dev_split: str | None
    dev_limit: int | None
    dev_passages: int
    checkpointing: bool
    start: str | None = None
    refresh_depth: int = 0

    def make(
        self, *, device: torch.device, dtype: torch.dtype, rank: int, world: int
    ) -> tuple[DualSystem, Evaluate | None, Refresh | None]:
        found = self.backbone.describe("query")
        if found != self.described:
            raise InputError(f"{self.backbone.name}: this node has another one than the node of the job")
        negatives = self.store.open("negatives", self.negatives)
        queries = Queries.open(self.store, self.queries)
        data = training_data(self.corpus, queries, self.split, negatives, self.limit)
        start = None if self.start is None else load_prompt(model_folder(self.store.open("prompts", self.start)))
        system = DualSystem(resolve(self.backbone.folder), self.backbone.options, self.tuning, data, device=device,
                            dtype=dtype, checkpointing=self.checkpointing, start=start)  # fmt: skip
        refresh = RefreshedNegatives(system, self.refresh_depth, rank, world) if self.refresh_depth else None
        if self.dev_split is None:
            return system, None, refresh
        dev = dev_set(self.corpus, queries, self.dev_split, self.dev_limit, self.dev_passages, system)
        return system, lambda: dev.mrr(system, rank, world), refresh


@dataclass(frozen=True)
class RefreshedNegatives:
    """A Refresh: each training question's nearest passages by the model as it is, its positives left out.

    The corpus goes through the model block by block, shared by the workers; each searches for its share of questions.
    """

    system: DualSystem
    depth: int
    rank: int = 0
    world: int = 1

    def mine(self) -> torch.Tensor:
        """Rows, nearest first, -1 behind the last: int64 [questions, depth], on the processor."""
        system, data = self.system, self.system.data
        assert data is not None
        queries = system.encode(data.queries, "query", self.rank, self.world)
        own = np.arange(self.rank, len(queries), self.world)
        most = max(len(rows) for rows in data.positives)
        search = ExactSearch(queries[own], min(self.depth + most, data.num_passages))
        for first in range(0, data.num_passages, _BLOCK):
            rows = np.arange(first, min(first + _BLOCK, data.num_passages))
            vectors = system.encode(system.compose(rows), "passage", self.rank, self.world)
            search.add(vectors.astype(np.float16), first, data.deleted)
        mined = torch.full((len(queries), self.depth), -1, dtype=torch.int64)
        for query, found in zip(own.tolist(), search.result().rows, strict=True):
            kept = found[(found >= 0) & ~np.isin(found, data.positives[query])][: self.depth]
            mined[query, : len(kept)] = torch.from_numpy(kept)
        mined = mined.to(system.device)
        if self.world > 1:
            dist.all_reduce(mined, dist.ReduceOp.MAX)
        return mined.cpu()

    def take(self, mined: torch.Tensor) -> None:
        data = self.system.data
        assert data is not None
        self.system.data = replace(data, negatives=[rows[rows >= 0] for rows in mined.numpy()])


def dev_set(
    corpus: Corpus, queries: Queries, split: str, limit: int | None, passages: int, system: DualSystem
) -> DevSet:
    """The split's first questions, and the passages that they are looked for in; the same on every worker.

    Raises InputError where none of them has an answer in the corpus.
    """
    asked = queries.split(split, limit)
    qrels = queries.qrels(split).filter(pc.field("score") > 0)
    qrels = qrels.filter(pc.is_in(qrels["query_id"], pc.cast(pa_strings(asked.ids), qrels["query_id"].type)))
    rows = corpus.rows_of(qrels["corpus_id"].to_pylist())
    answers: dict[str, list[int]] = {}
    for query, row in zip(qrels["query_id"].to_pylist(), rows.tolist(), strict=True):
        if row >= 0:
            answers.setdefault(query, []).append(row)
    texts = [(text, answers[id]) for id, text in zip(*asked, strict=True) if id in answers]
    if not texts:
        raise InputError(f"{queries.artifact.url}: no query of the split {split!r} has an answer in the corpus")
    own = np.unique(np.concatenate([rows for _, rows in texts]))
    others = np.setdiff1d(np.arange(corpus.num_rows), np.concatenate([own, corpus.deleted]))
    extra = max(0, min(passages - len(own), len(others)))
    pool = np.sort(np.concatenate([own, np.random.default_rng(0).choice(others, extra, replace=False)])).astype(
        np.int64
    )
    found = corpus.passages(pool)
    composed = system.tokenizer.compose([p.title for p in found], [p.text for p in found], system.encoder.title)
    return DevSet([text for text, _ in texts], [np.searchsorted(pool, sorted(rows)) for _, rows in texts], composed)


def pa_strings(values: list[str]) -> Any:
    import pyarrow as pa

    return pa.array(values, pa.string())
