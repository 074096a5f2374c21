"""What `tune_prompts` trains on: queries and mined negatives of a store, mined again by the current model if asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from indexing.corpus import Corpus
from indexing.encoders import EncoderSpec
from indexing.exact import ExactSearch
from indexing.judging.dev import dev_set
from indexing.models import model_folder
from indexing.pairs.sets import SetName, open_sets
from indexing.queries import Queries
from indexing.store import Store
from retriever.dual import DualSystem, TuneOptions
from retriever.errors import InputError
from retriever.files import resolve
from retriever.mixture.schedule import Batches
from retriever.prompts import load_prompt
from retriever.system import Evaluate, Refresh

_BLOCK = 65_536  # passages whose vectors are in memory at once


@dataclass(frozen=True, kw_only=True)
class TuneMaker:
    """The Maker of `tune_prompts`.

    Attributes:
        store: The store.
        backbone: The backbone, with the options that turn its texts into vectors.
        described: The description of the backbone, which must be the same on every node.
        tuning: Options of the trained system.
        corpus: The corpus.
        sets: The training sets. The dev split is one of the first set's query set.
        batches: Whether a batch mixes the training sets.
        limit: Use only the first N queries of each training split; None: all.
        dev_split: The split that measures quality; None: no measurement.
        dev_limit: Use only the first N queries of the dev split; None: all.
        dev_passages: Number of passages in which they are searched: relevant ones, and random others.
        checkpointing: Recompute activations in the backward pass.
        start: Start from prompts/NAME; None: from random values.
        refresh_depth: Negatives per query in each mining by the current model; 0: no such mining.
    """

    store: Store
    backbone: EncoderSpec
    described: dict[str, Any]
    tuning: TuneOptions
    corpus: Corpus
    sets: tuple[SetName, ...]
    batches: Batches
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
        """Makes the system of a worker; see Maker."""
        if self.backbone.describe("query") != self.described:
            raise InputError(f"{self.backbone.name}: this node has another one than the node of the job")
        weighted = self.tuning.draw_positive == "weighted"
        data = open_sets(self.store, self.sets, limit=self.limit, batches=self.batches, weighted=weighted).data
        start = None if self.start is None else load_prompt(model_folder(self.store.open("prompts", self.start)))
        system = DualSystem(resolve(self.backbone.folder), self.backbone.options, self.tuning, data, device=device,
                            dtype=dtype, checkpointing=self.checkpointing, start=start)  # fmt: skip
        refresh = RefreshedNegatives(system, self.refresh_depth, rank, world) if self.refresh_depth else None
        if self.dev_split is None:
            return system, None, refresh

        def compose(titles: Sequence[str], texts: Sequence[str]) -> list[str]:
            return system.tokenizer.compose(titles, texts, system.encoder.title)

        queries = Queries.open(self.store, self.sets[0].queries)
        dev = dev_set(self.corpus, queries, self.dev_split, self.dev_limit, self.dev_passages, compose)
        return system, lambda: dev.mrr(system, rank, world), refresh


@dataclass(frozen=True)
class RefreshedNegatives:
    """A Refresh that mines the nearest passages of each training query by the current model.

    A query's positives, and other passages with their text, are excluded.

    The workers encode the corpus together, block by block. Each searches for its share of the queries.

    Attributes:
        system: The system that is trained.
        depth: Negatives per query.
        rank: The rank of this worker.
        world: The number of workers.
    """

    system: DualSystem
    depth: int
    rank: int = 0
    world: int = 1

    def mine(self) -> torch.Tensor:
        """Returns rows, nearest first, padded with -1: int64 [queries, depth], on the CPU."""
        system, data = self.system, self.system.data
        assert data is not None
        queries = system.encode(data.queries, "query", self.rank, self.world)
        share = np.arange(self.rank, len(queries), self.world)
        max_relevant = max(len(data.relevant(query)) for query in range(len(data.queries)))
        search = ExactSearch(queries[share], min(self.depth + max_relevant, data.num_passages))
        for first in range(0, data.num_passages, _BLOCK):
            rows = np.arange(first, min(first + _BLOCK, data.num_passages))
            vectors = system.encode(system.compose(rows), "passage", self.rank, self.world)
            search.add(vectors.astype(np.float16), first, data.deleted)
        mined = torch.full((len(queries), self.depth), -1, dtype=torch.int64)
        for query, hits in zip(share.tolist(), search.result().rows, strict=True):
            negatives = hits[(hits >= 0) & ~np.isin(hits, data.relevant(query))][: self.depth]
            mined[query, : len(negatives)] = torch.from_numpy(negatives)
        mined = mined.to(system.device)
        if self.world > 1:
            dist.all_reduce(mined, dist.ReduceOp.MAX)
        return mined.cpu()

    def take(self, mined: torch.Tensor) -> None:
        """Trains on mined rows from the next batch on."""
        data = self.system.data
        assert data is not None
        self.system.data = replace(data, negatives=[rows[rows >= 0] for rows in mined.numpy()])
