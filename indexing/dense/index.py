"""A FAISS index: a quantizer that is trained once, and shards of contiguous rows; new embeddings add shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from riptide.indexing.dense.factory import effort_name
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import open_chain
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.store.store import Store


@dataclass(frozen=True)
class IndexShard:
    """A FAISS file of an index; it holds the vectors of the rows [first_row, end)."""

    artifact: Artifact | Draft
    part: ArtifactPart
    first_row: int
    end: int


class Index:
    """Reads index/NAME from all of its complete generations."""

    def __init__(self, name: str, generations: Sequence[Artifact]):
        self.name = name
        self.generations = list(generations)
        self.shards = [
            IndexShard(artifact, part, part.facts["first_row"], part.facts["end"])
            for artifact in generations
            for part in artifact.numbered_parts("shard")
        ]
        self.num_rows = self.shards[-1].end if self.shards else 0
        self.factory: str = generations[0].config["factory"]
        self.effort_name = effort_name(self.factory)
        self.effort: int = generations[-1].notes[self.effort_name]
        self.depth: int = generations[-1].notes["depth"]
        self.recall: dict[str, float] = generations[-1].notes["recall"]

    def __repr__(self) -> str:
        return f"Index({self.name!r}, {self.factory!r}, {self.num_rows:,} vectors)"

    @property
    def quantizer(self) -> tuple[Artifact, ArtifactPart]:
        """The artifact and part of the trained, empty index; each shard is a filled copy of it."""
        return self.generations[0], self.generations[0].part("quantizer")

    @staticmethod
    def is_index(config: Mapping[str, Any]) -> bool:
        """Returns whether an index with this configuration is a FAISS index."""
        return "factory" in config

    @classmethod
    def open(cls, store: Store, name: str | None, embeddings: Embeddings) -> Index:
        """Opens index/NAME; `name` may be left out if the store has only one FAISS index.

        Raises:
            InputError: If it was built from other embeddings, or lacks rows that they have.
        """
        name = store.only_name("index", name, cls.is_index)
        return cls(name, open_chain(store, "index", name, embeddings.generations))
