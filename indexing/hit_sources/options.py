"""The settings of a search that a user may give, and the modes. Imports nothing heavy, as clients import it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["dense", "exact", "bm25", "hybrid"]  # short names of sources

# What a source must search for a setting to have an effect, in error messages.
NEEDS = {"nprobe": "an index", "depth": "an index", "encoder": "vectors", "task": "vectors"}


@dataclass(frozen=True)
class SearchOptions:
    """Settings of a search. None: as the artifacts say.

    Attributes:
        encoder: Where the encoder is now.
        task: The task whose encoder the queries use; it must encode passages as the embeddings were encoded.
        nprobe: Lists to probe.
        depth: Candidates of each shard that are scored again.
    """

    encoder: str | None = None
    task: str | None = None
    nprobe: int | None = None
    depth: int | None = None
