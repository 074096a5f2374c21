"""What `train_reranker` trains on: queries and mined negatives of a store; and the comparison of orders at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from indexing.corpus import Corpus
from indexing.judging.order import RankedLists, compare_orders
from indexing.negatives import training_data
from indexing.queries import Queries
from indexing.store import Store
from indexing.training.worker import open_backbone
from retriever.batching import padded, plan
from retriever.recipe import positions_of
from retriever.reranker_training import CrossOptions, CrossSystem

_BUDGET = {"cpu": 4096, "cuda": 65536}  # tokens per scored batch, padding included
_STEP = 16  # the number of columns of such a batch is a multiple of this


@dataclass(frozen=True, kw_only=True)
class CrossMaker:
    """The Maker of `train_reranker`.

    Attributes:
        store: The store.
        backbone: Name of the backbone.
        described: The description of the backbone, which must be the same on every node.
        options: Options of the trained system.
        corpus: The corpus.
        queries: Name of the query set.
        negatives: Name of the mined negatives.
        split: The split to train on.
        limit: Use only its first N queries; None: all.
        checkpointing: Recompute activations in the backward pass.
        lists: Hits that the trained model orders again, to compare both orders; None: no comparison.
    """

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
    lists: RankedLists | None = None

    def make(
        self, *, device: torch.device, dtype: torch.dtype, rank: int, world: int
    ) -> tuple[CrossSystem, None, None]:
        """Makes the system of a worker; see Maker."""
        folder = open_backbone(self.store, self.backbone, self.described)
        negatives = self.store.open("negatives", self.negatives)
        data = training_data(self.corpus, Queries.open(self.store, self.queries), self.split, negatives, self.limit)
        system = CrossSystem(folder, self.options, data, device=device, dtype=dtype, checkpointing=self.checkpointing)
        return system, None, None

    def judge(self, system: CrossSystem) -> dict[str, Any]:
        """Returns {"order": metrics of the lists before and after the model has ordered them}; {} without lists."""
        if self.lists is None or system.data is None:
            return {}

        def score(queries: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> np.ndarray:
            return score_pairs(system, queries, system.tokenizer.compose(titles, texts, self.options.title))

        return {"order": compare_orders(self.lists, system.data.passages, score)}


def score_pairs(system: CrossSystem, queries: Sequence[str], passages: Sequence[str]) -> np.ndarray:
    """Returns the logits of pairs by the current model of a system: float32 [n]."""
    tokens, types = system.tokenizer(list(queries), list(passages))
    batches = plan(tokens.lengths, _BUDGET[system.device.type], _STEP, positions_of(system.model.config))
    pairs = padded(tokens, batches, side="right", pad_id=system.tokenizer.pad_id)
    kinds = padded(types, batches, side="right", pad_id=0)
    logits = np.empty(len(tokens), np.float32)
    system.module.eval()
    bfloat16 = system.dtype == torch.bfloat16
    with torch.no_grad(), torch.autocast(system.device.type, torch.bfloat16, enabled=bfloat16):
        for (rows, ids, lengths), (_, type_ids, _) in zip(pairs, kinds, strict=True):
            inputs = (tensor.to(system.device) for tensor in (ids, type_ids, lengths))
            logits[rows] = system.scored(*inputs)[: len(rows), 0].float().cpu().numpy()
    return logits
