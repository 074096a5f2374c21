"""The settings of a search that users can set, and the modes. Imports no large packages, since clients import it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from riptide.base.option_fields import option

Mode = Literal["dense", "exact", "bm25", "hybrid"]  # short names of usual sources
By = Literal["document", "passage"]  # the unit of hits; both are the same unless the corpus is split

# For error messages: setting -> what a source must search for the setting to have an effect.
NEEDS = {
    "nprobe": "an index",
    "ef_search": "an index",
    "depth": "an index",
    "encoder": "vectors",
    "task": "vectors",
}
COUNTS = ("nprobe", "ef_search", "depth")  # settings that are whole numbers, at least 1


@dataclass(frozen=True)
class SearchOptions:
    """Settings of a search. None: the value that the artifacts record. Callers check the values of users."""

    GROUP: ClassVar = "settings of the search"

    encoder: str | None = None
    """Where the query encoder is now; default: where it was when the corpus was encoded."""
    task: str | None = None
    """Tuned task of the queries, which must encode passages as the embeddings were encoded; default: the task that the
    corpus was encoded for, if any. A sweep stands for the task that it chose."""
    nprobe: int | None = option(None, minimum=1)
    """Lists probed per query; default: the number at which recall was measured during the build."""
    ef_search: int | None = option(None, minimum=1)
    """With an HNSW index: vectors that the search of a shard's graph keeps (efSearch), at least the depth; default: the
    number at which recall was measured during the build."""
    depth: int | None = option(None, minimum=1)
    """Candidates per shard that are scored again; default: the number at which recall was measured during the build."""
