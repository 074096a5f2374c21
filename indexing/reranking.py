"""What `train_reranker` trains, from the store: questions and mined negatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from indexing.corpus import Corpus
from indexing.negatives import training_data
from indexing.queries import Queries
from indexing.store import Store
from indexing.training_job import open_backbone
from retriever.reranker_training import CrossOptions, CrossSystem


@dataclass(frozen=True, kw_only=True)
class CrossMaker:
    """A Maker. described: what the backbone must be on every node."""

    store: Store
    backbone: str
    described: dict[str, Any]
    options: CrossOptions
    corpus: Corpus
    queries: str
    negatives: str
    split: str
    limit: int | None
    checkpointing: bool

    def make(
        self, *, device: torch.device, dtype: torch.dtype, rank: int, world: int
    ) -> tuple[CrossSystem, None, None]:
        folder = open_backbone(self.store, self.backbone, self.described)
        negatives = self.store.open("negatives", self.negatives)
        data = training_data(self.corpus, Queries.open(self.store, self.queries), self.split, negatives, self.limit)
        system = CrossSystem(folder, self.options, data, device=device, dtype=dtype, checkpointing=self.checkpointing)
        return system, None, None
