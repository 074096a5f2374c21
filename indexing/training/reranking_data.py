"""Opens the training data of `train_reranker`: queries, negatives, a dev split, and ranked lists for a final check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.mining.negatives import mined_corpus, read_training_data
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.indexing.training.dev_splits import DevSplit, open_dev_lists, queries_with_negatives
from riptide.indexing.training.order import RankedLists, compare_orders
from riptide.indexing.training.process_cache import ProcessCache
from riptide.indexing.training.worker import open_backbone
from riptide.retriever.options.reranking import CrossEncoderOptions
from riptide.retriever.systems.cross import CrossSystem
from riptide.retriever.training.system import Evaluate
from riptide.retriever.training.training_data import TrainingData


@dataclass(frozen=True, kw_only=True)
class CrossMaker:
    """The `SystemMaker` of `train_reranker`, which creates a CrossSystem on each worker.

    Attributes:
        store: The store.
        backbone: Name of the backbone.
        backbone_settings: The settings of the backbone, which must be the same on every node.
        options: Options of the trained system.
        corpus: The corpus.
        queries: Name of the query set.
        negatives: Name of the mined negatives.
        split: The split to train on.
        limit: Use only its first N queries; None: all.
        checkpointing: Recompute activations in the backward pass.
        dev: The dev split that measures quality; None: no measurement.
        dev_negatives: Name of the mined negatives of its queries; None: `negatives`.
        lists: Hits that the trained model orders again, to compare both orders; None: no comparison.
        cache: The data that this process has opened.
    """

    store: Store
    backbone: str
    backbone_settings: dict[str, Any]
    options: CrossEncoderOptions
    corpus: Corpus
    queries: str
    negatives: str
    split: str
    limit: int | None
    checkpointing: bool
    dev: DevSplit | None = None
    dev_negatives: str | None = None
    lists: RankedLists | None = None
    cache: ProcessCache = field(default_factory=ProcessCache, repr=False, compare=False)

    def make(
        self, *, device: torch.device, dtype: torch.dtype, rank: int, world: int
    ) -> tuple[CrossSystem, Evaluate | None, None]:
        """Creates the system of a worker; see `SystemMaker`."""
        folder = open_backbone(self.store, self.backbone, self.backbone_settings)
        negatives, queries = self.store.open("negatives", self.negatives), Queries.open(self.store, self.queries)
        data = open_mined_queries(self.corpus, queries, self.split, negatives, self.limit, self.cache)
        system = CrossSystem(folder, self.options, data, device=device, dtype=dtype, checkpointing=self.checkpointing)
        if self.dev is None:
            return system, None, None

        compose = partial(system.tokenizer.compose, policy=self.options.title)
        dev_negatives = self.store.open("negatives", self.dev_negatives or self.negatives)
        data = open_dev_data(self.store, self.dev, dev_negatives, self.cache)
        dev = open_dev_lists(data, self.dev.split, self.dev.passages, compose)
        return system, lambda: dev.mrr(system, rank, world), None

    def judge(self, system: CrossSystem) -> dict[str, Any]:
        """Returns {"order": metrics of the lists in the source's and in the model's order}; {} without lists."""
        if self.lists is None or system.data is None:
            return {}

        def score(queries: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> np.ndarray:
            return system.score(queries, system.tokenizer.compose(titles, texts, self.options.title))

        return {"order": compare_orders(self.lists, system.data.passages, score)}


def open_mined_queries(
    corpus: Corpus, queries: Queries, split: str, negatives: Artifact, limit: int | None, cache: ProcessCache
) -> TrainingData:
    """Opens the queries of a split with their mined negatives, or returns them from the cache.

    See `read_training_data`.
    """
    key = (corpus.generations[-1].url, queries.artifact.fingerprint, split, negatives.url, negatives.fingerprint, limit)
    return cache.get(("mined queries", *key), lambda: read_training_data(corpus, queries, split, negatives, limit))


def open_dev_data(store: Store, dev: DevSplit, negatives: Artifact, cache: ProcessCache) -> TrainingData:
    """Reads the queries of a dev split that have a positive and negatives, for lists to re-rank.

    Args:
        store: The store.
        dev: The dev split.
        negatives: The mined negatives of its queries.
        cache: The cache of the job.

    Raises:
        InputError: If the negatives are of other queries or of another corpus, or if no query has any.
    """
    queries = Queries.open(store, dev.queries)
    try:
        data = open_mined_queries(mined_corpus(store, negatives), queries, dev.split, negatives, dev.limit, cache)
    except InputError as error:
        raise InputError(
            f"{Parameter('dev_split', dev.split)}: {error}; mine the negatives of this split, and name them with "
            f"{Parameter('dev_negatives')}"
        ) from None
    queries_with_negatives(data, dev.split)
    return data
