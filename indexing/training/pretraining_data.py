"""Selects the training data of `pretrain_rip`: the passages of a corpus that contain a pair of sentences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus, open_table
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.chain import RowPart
from riptide.indexing.store.store import Store
from riptide.indexing.training.dev_splits import DevSplit, open_dev_pairs, open_dev_set
from riptide.indexing.training.process_cache import ProcessCache
from riptide.indexing.training.worker import open_backbone
from riptide.indexing.work.worker_tasks import PYTHON_CORE, Allocation, Report, Runner, WorkerResources
from riptide.retriever.options.pretraining import RipOptions
from riptide.retriever.systems.condenser import describe_head
from riptide.retriever.systems.rip import RipData, RipSystem, are_eligible
from riptide.retriever.training.system import Evaluate

PLAN_SAMPLE = 50_000  # passages that --plan examines, as splitting into sentences takes time


@dataclass(frozen=True, kw_only=True)
class RipMaker:
    """The `SystemMaker` of `pretrain_rip`, which creates a RipSystem on each worker.

    Attributes:
        store: The store.
        backbone: Name of the backbone.
        backbone_settings: The settings of the backbone, which must be the same on every node.
        options: Options of the trained system.
        rows: Rows of the passages to train on, int64 [n], or Ray's reference to them.
        checkpointing: Recompute activations in the backward pass.
        head: The description of the backbone's saved head, which must be the same on every node; None if absent or
            not used.
        dev: The dev split that measures quality; None: no measurement.
        dev_hits: Rows of further passages in which its queries are searched, int64 [any]; None: there are none.
        cache: The data that this process has opened.
    """

    store: Store
    backbone: str
    backbone_settings: dict[str, Any]
    options: RipOptions
    rows: Any
    checkpointing: bool
    head: dict[str, str] | None = None
    dev: DevSplit | None = None
    dev_hits: np.ndarray | None = field(default=None, compare=False)
    cache: ProcessCache = field(default_factory=ProcessCache, repr=False, compare=False)

    def make(
        self, *, device: torch.device, dtype: torch.dtype, rank: int, world: int
    ) -> tuple[RipSystem, Evaluate | None, None]:
        """Creates the system of a worker; see `SystemMaker`."""
        folder = open_backbone(self.store, self.backbone, self.backbone_settings)
        if self.options.trains_condenser_head and describe_head(folder) != self.head:
            raise InputError(f"{self.backbone}: this node has another head of it than the node of the job: {folder}")
        corpus = Corpus.open(self.store)

        def read_texts(rows: np.ndarray) -> list[str]:
            return [passage.text for passage in corpus.passages(rows)]

        if isinstance(self.rows, np.ndarray):
            rows = self.rows
        else:
            import ray

            rows = ray.get(self.rows)
        data = RipData(corpus.num_rows, read_texts, rows)
        system = RipSystem(folder, self.options, data, device=device, dtype=dtype, checkpointing=self.checkpointing)
        if self.dev is None:
            return system, None, None

        compose = partial(system.tokenizer.compose, policy=system.encoder.title)
        queries = Queries.open(self.store, self.dev.queries)
        pairs = open_dev_pairs(corpus, queries, self.dev.split, self.dev.limit, self.cache)
        dev = open_dev_set(corpus, pairs, self.dev.passages, compose, hits=self.dev_hits)
        return system, lambda: dev.mrr(system, rank, world), None


@dataclass(frozen=True)
class FindEligibleRowsTask:
    """A worker task that finds the passages of a corpus part that contain a pair of sentences.

    Attributes:
        options: Options of the trained system.
        resources: The resources of one worker.
    """

    options: RipOptions
    resources: WorkerResources = PYTHON_CORE

    def open(self, allocation: Allocation) -> Callable[[RowPart, Report], np.ndarray]:
        """Returns a function that returns the eligible rows of a part, also deleted ones: int64 [n]."""

        def find(part: RowPart, report: Report) -> np.ndarray:
            texts = open_table(part).column("text").to_pylist()
            return part.first_row + np.flatnonzero(are_eligible(texts, self.options))

        return find


def training_rows(corpus: Corpus, options: RipOptions, limit: int | None, runner: Runner) -> np.ndarray:
    """Returns the rows of the passages to train on, int64 [n], ascending.

    Args:
        corpus: The corpus.
        options: Options of the trained system.
        limit: Use only the first N passages of the corpus; None: all.
        runner: Reads the parts of the corpus.

    Raises:
        InputError: If no passage contains a pair.
    """
    rows_of_parts = {part.first_row: rows for part, rows in runner.run(FindEligibleRowsTask(options), corpus.parts)}
    rows = np.concatenate([np.empty(0, np.int64), *(rows_of_parts[first] for first in sorted(rows_of_parts))])
    rows = np.setdiff1d(rows[rows < (limit or corpus.num_rows)], corpus.deleted)
    if not len(rows):
        raise no_pairs_error(options)
    return rows


@dataclass(frozen=True)
class EligibleCount:
    """The number of passages that can be trained on, possibly an estimate.

    Attributes:
        num_eligible: Their number; an estimate if fewer passages were examined than the corpus has.
        num_examined: Number of passages that were examined.
        num_passages: Number of passages of the corpus within the limit, deleted ones excluded.
    """

    num_eligible: int
    num_examined: int
    num_passages: int


def count_eligible(
    corpus: Corpus, options: RipOptions, limit: int | None, runner: Runner, sample: int = PLAN_SAMPLE
) -> EligibleCount:
    """Counts the passages that can be trained on, or estimates their number from some parts of a large corpus.

    Args:
        corpus: The corpus.
        options: Options of the trained system.
        limit: Use only the first N passages of the corpus; None: all.
        runner: Reads the parts of the corpus.
        sample: Passages to examine at least, in whole parts that are spread evenly over the corpus.
    """
    end = min(limit or corpus.num_rows, corpus.num_rows)
    parts = [part for part in corpus.parts if part.first_row < end]
    mean_rows = max(1, sum(part.end - part.first_row for part in parts) // max(1, len(parts)))
    num_parts = min(len(parts), -(-sample // mean_rows))
    chosen = [parts[number * len(parts) // num_parts] for number in range(num_parts)]

    def num_live(first: int, stop: int) -> int:
        deleted = np.searchsorted(corpus.deleted, stop) - np.searchsorted(corpus.deleted, first)
        return stop - first - int(deleted)

    examined = num_eligible = 0
    for part, rows in runner.run(FindEligibleRowsTask(options), chosen):
        examined += num_live(part.first_row, min(part.end, end))
        num_eligible += len(np.setdiff1d(rows[rows < end], corpus.deleted))
    total = num_live(0, end)
    return EligibleCount(round(num_eligible * total / max(1, examined)), examined, total)


def no_pairs_error(options: RipOptions) -> InputError:
    """Returns the error for a corpus without a passage to train on."""
    if not options.has_pairs:
        return InputError("no passage has a text to mask: expected at least one")
    return InputError(
        f"no passage has two {options.unit}s of at least {options.min_words} words to make a pair of: "
        "lower min_words, or draw spans instead of sentences"
    )
