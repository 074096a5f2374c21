"""A store with mined negatives whose queries are a training set of runs in another store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samples import make_passages, make_queries, write_beir

from riptide.indexing.store.store import Store

MINING = ("--sources", "exact:enc", "--depth", 12, "--pool-negatives", 5, "--denoised-negatives", 3)


@dataclass(frozen=True)
class ForeignStore:
    """A store of 30 passages with their embeddings `enc`, and of the query set `foreign` with 6 training queries.

    Attributes:
        path: The folder of the store.
        source: The BEIR folder that it was imported from.
    """

    path: Path
    source: Path

    @property
    def store(self) -> Store:
        """The opened store."""
        return Store(str(self.path))

    def training_set(self, negatives: str = "none", path: Path | None = None) -> tuple[str, str]:
        """Returns the option that adds the training set; `path`: the folder of the store if it was moved."""
        return "--also-train", f"queries=foreign,negatives={negatives},store={path or self.path}"

    def mine(self, done: Callable[..., str], name: str, *more: object) -> None:
        """Makes negatives/NAME."""
        done("mine_negatives", "--store", self.path, *MINING, "--name", name, *more)


def make_foreign_store(
    folder: Path, model: str, done: Callable[..., str], passages: list[dict[str, Any]] | None = None
) -> ForeignStore:
    """Imports and encodes 30 passages, of which 6 are positives.

    Args:
        folder: The folder in which the store is made.
        model: The encoder.
        done: The fixture `done`.
        passages: The passages; None: random ones.
    """
    passages = passages or make_passages(30, seed=5, prefix="f")
    queries, judged = make_queries(passages, 6)
    foreign = ForeignStore(folder / "elsewhere", write_beir(folder / "foreign", passages, queries, {"train": judged}))
    at = ("--store", foreign.path)
    done("import_corpus", *at, "--source", foreign.source)
    done("encode_corpus", *at, "--encoder", model, "--name", "enc", "--dtype", "float32", "--compile", "never")
    return foreign
