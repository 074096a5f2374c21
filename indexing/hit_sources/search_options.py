"""The settings of a search that a user may give, and the modes. Imports nothing heavy, as clients import it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from riptide.base.option_fields import option

Mode = Literal["dense", "exact", "bm25", "hybrid"]  # short names of sources
By = Literal["document", "passage"]  # what the hits of a search are; the same unless the corpus is split

# What a source must search for a setting to have an effect, in error messages.
NEEDS = {"nprobe": "an index", "depth": "an index", "encoder": "vectors", "task": "vectors"}


@dataclass(frozen=True)
class SearchOptions:
    """Settings of a search. None: as the artifacts say. Who takes them from a user checks them."""

    GROUP: ClassVar = "settings of the search"

    encoder: str | None = None
    """Where the query encoder is now; default: where it was when the corpus was encoded."""
    task: str | None = None
    """Tuned task of the queries, which must encode passages as the embeddings were encoded; default: the task that the
    corpus was encoded for, if any. A sweep stands for the task that it chose."""
    nprobe: int | None = option(None, minimum=1)
    """Lists probed per query; default: the number at which recall was measured during the build."""
    depth: int | None = option(None, minimum=1)
    """Candidates per shard that are scored again; default: the number at which recall was measured during the build."""
