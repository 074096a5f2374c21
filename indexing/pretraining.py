"""What `pretrain_rip` trains, from the store: the corpus' passages, and which of them hold a pair of sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from indexing.chain import RowPart
from indexing.corpus import Corpus, open_table
from indexing.store import Store
from indexing.tasks import run_tasks
from indexing.training_job import open_backbone
from retriever.errors import InputError
from retriever.rip import RipData, RipOptions, RipSystem, eligible


@dataclass(frozen=True, kw_only=True)
class RipMaker:
    """A Maker. described: what the backbone must be on every node. rows: those that can be drawn, int64, or Ray's
    reference to them."""

    store: Store
    backbone: str
    described: dict[str, Any]
    options: RipOptions
    rows: Any
    checkpointing: bool

    def make(self, *, device: torch.device, dtype: torch.dtype, rank: int, world: int) -> tuple[RipSystem, None, None]:
        folder = open_backbone(self.store, self.backbone, self.described)
        corpus = Corpus.open(self.store)

        def texts(rows: np.ndarray) -> list[str]:
            return [passage.text for passage in corpus.passages(rows)]

        if isinstance(self.rows, np.ndarray):
            rows = self.rows
        else:
            import ray

            rows = ray.get(self.rows)
        data = RipData(corpus.num_rows, texts, rows)
        system = RipSystem(folder, self.options, data, device=device, dtype=dtype, checkpointing=self.checkpointing)
        return system, None, None


def drawable(corpus: Corpus, options: RipOptions, limit: int | None) -> np.ndarray:
    """The rows among the corpus' first `limit` that can be drawn, on the cluster: int64 [any], ascending.

    Raises InputError where there is none.
    """
    found = {part.first_row: rows for part, rows in run_tasks(drawable_part, corpus.parts, options)}
    rows = np.concatenate([np.empty(0, np.int64), *(found[first] for first in sorted(found))])
    rows = np.setdiff1d(rows[rows < (limit or corpus.num_rows)], corpus.deleted)
    if not len(rows):
        raise InputError(f"no passage has two {options.unit}s to make a pair of")
    return rows


def drawable_part(part: RowPart, options: RipOptions) -> np.ndarray:
    """One task: the rows of a part that can be drawn, int64 [any]."""
    texts = open_table(part).column("text").to_pylist()
    return part.first_row + np.flatnonzero(eligible(texts, options))
