"""What `tune_prompts` trains, from the store: questions, mined negatives, and a dev split to be judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch

from indexing.corpus import Corpus
from indexing.encoders import EncoderSpec
from indexing.models import model_folder
from indexing.negatives import training_data
from indexing.queries import Queries
from indexing.store import Store
from retriever.dual import DevSet, DualSystem, TuneOptions
from retriever.errors import InputError
from retriever.files import resolve
from retriever.prompts import load_prompt
from retriever.system import Evaluate


@dataclass(frozen=True, kw_only=True)
class TuneMaker:
    """A Maker. backbone: whose texts become vectors as its options say; described: what it must be on every node.

    dev_split: None for none. dev_limit: its first questions; dev_passages: how many passages they are looked for in,
    those that answer them and others at random. start: prompts/NAME to begin from.
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

    def make(
        self, *, device: torch.device, dtype: torch.dtype, rank: int, world: int
    ) -> tuple[DualSystem, Evaluate | None]:
        found = self.backbone.describe("query")
        if found != self.described:
            raise InputError(f"{self.backbone.name}: this node has another one than the node of the job")
        negatives = self.store.open("negatives", self.negatives)
        queries = Queries.open(self.store, self.queries)
        data = training_data(self.corpus, queries, self.split, negatives, self.limit)
        start = None if self.start is None else load_prompt(model_folder(self.store.open("prompts", self.start)))
        system = DualSystem(resolve(self.backbone.folder), self.backbone.options, self.tuning, data, device=device,
                            dtype=dtype, checkpointing=self.checkpointing, start=start)  # fmt: skip
        if self.dev_split is None:
            return system, None
        dev = dev_set(self.corpus, queries, self.dev_split, self.dev_limit, self.dev_passages, system)
        return system, lambda: dev.mrr(system, rank, world)


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
