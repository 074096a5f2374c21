"""What an erasure does with the artifacts of each kind. A test fails for a kind without an entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from riptide.indexing.erasure.part_changes import (
    PartChange,
    corpus_changes,
    covers_rows,
    embedding_changes,
    lists_rows,
    table_changes,
    topic_changes,
)
from riptide.indexing.store.artifact import Artifact


@dataclass(frozen=True)
class KindErasure:
    """What an erasure does with the artifacts of a kind. An artifact of a kind with neither is kept.

    Attributes:
        changes: Yields the parts to write again, of all generations of an artifact.
        is_affected: Whether an artifact was made from one of the rows and has to be removed. Its command makes it
            again, which is cheaper than encoding.
        remains: What an artifact of the kind may still have of the passages; "": nothing.
    """

    changes: Callable[[Sequence[Artifact], np.ndarray], Iterator[PartChange]] | None = None
    is_affected: Callable[[Artifact, np.ndarray], bool] | None = None
    remains: str = ""


KINDS = {  # in the order of the work: the corpus first, whose deleted rows hide the passages
    "corpus": KindErasure(corpus_changes),
    "embeddings": KindErasure(embedding_changes),
    "topics": KindErasure(
        topic_changes, remains="words of its vocabulary, and topics that were fitted to the passages"
    ),
    "runs": KindErasure(table_changes),
    "candidates": KindErasure(table_changes),
    "scores": KindErasure(table_changes),
    "negatives": KindErasure(is_affected=lists_rows),
    "index": KindErasure(is_affected=covers_rows),
    "bm25": KindErasure(is_affected=covers_rows),
    "queries": KindErasure(),
    "models": KindErasure(remains="weights that may have been trained on the passages"),
    "prompts": KindErasure(remains="weights that may have been trained on the passages"),
    "sweeps": KindErasure(),
    "releases": KindErasure(),
}
