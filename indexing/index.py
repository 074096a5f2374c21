"""An index: a quantiser trained once, and shards of contiguous rows; grows with its embeddings by more shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from indexing.artifact import Artifact, Draft, Part
from indexing.embeddings import Embeddings, EmbeddingsReader
from indexing.store import Store
from retriever.errors import InputError


@dataclass(frozen=True)
class Shard:
    """One FAISS file, which holds the rows [first_row, end)."""

    artifact: Artifact | Draft
    part: Part
    first_row: int
    end: int


class Index:
    """All complete generations of index/NAME, for reading."""

    def __init__(self, name: str, generations: Sequence[Artifact]):
        self.name = name
        self.generations = list(generations)
        self.shards = [
            Shard(artifact, part, part.facts["first_row"], part.facts["end"])
            for artifact in generations
            for part in artifact.group("shard")
        ]
        self.num_rows = self.shards[-1].end if self.shards else 0
        self.factory: str = generations[0].config["factory"]
        self.nprobe: int = generations[-1].notes["nprobe"]
        self.depth: int = generations[-1].notes["depth"]
        self.recall: dict[str, float] = generations[-1].notes["recall"]

    @property
    def quantizer(self) -> tuple[Artifact, Part]:
        """The trained, empty index that all shards were filled from."""
        return self.generations[0], self.generations[0].part("quantizer")

    @classmethod
    def open(cls, store: Store, name: str | None, embeddings: Embeddings) -> Index:
        """Opens index/NAME; `name` may be left out if the store has only one FAISS index.

        Raises:
            InputError: If it was built from other embeddings, or lacks rows that they have.
        """
        name = store.only("index", name, holds_faiss)
        generations = store.generations("index", name)
        check_lineage(generations, embeddings)
        index = cls(name, generations)
        check_coverage(store, name, index.num_rows, embeddings)
        return index


def holds_impacts(config: Mapping[str, Any]) -> bool:
    """Whether an index is one of impacts, over sparse embeddings. config: of its artifact."""
    return "impacts" in config


def holds_faiss(config: Mapping[str, Any]) -> bool:
    """Whether an index is one of FAISS, over dense embeddings. config: of its artifact."""
    return not holds_impacts(config)


def check_coverage(store: Store, name: str, num_rows: int, embeddings: EmbeddingsReader) -> None:
    """Raises InputError if index/NAME, which has a number of rows, lacks rows of its embeddings."""
    if num_rows < embeddings.num_rows:
        raise InputError(
            f"{store.url}/index/{name} covers {num_rows:,} of the {embeddings.num_rows:,} vectors of "
            f"embeddings/{embeddings.name}: run jobs/build_index.py --name {name} again to add the new ones"
        )


def check_lineage(generations: Sequence[Artifact], embeddings: EmbeddingsReader) -> None:
    """Raises InputError unless every generation was built from these embeddings, both sides named."""
    made: dict[str, Any] = {artifact.key: artifact.fingerprint for artifact in embeddings.generations}
    for artifact in generations:
        for role, entry in artifact.inputs.items():
            if role != "previous" and made.get(entry["artifact"]) != entry["fingerprint"]:
                there = made.get(entry["artifact"])
                raise InputError(
                    f"{artifact.url} was built from {entry['artifact']} {entry['fingerprint'][:12]}, asked for are "
                    f"embeddings/{embeddings.name}, {f'now {there[:12]}' if there else 'which have no such generation'}"
                )
