"""The next generation of an index that grows with its corpus or its embeddings: its target and its shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from indexing.store.artifact import Artifact
from indexing.store.store import generation
from indexing.work.work import Target


def next_target(
    kind: str, name: str, source: Sequence[Artifact], previous: Sequence[Artifact], config: Mapping[str, Any]
) -> Target:
    """Returns the generation of an index that covers a source.

    Args:
        kind: The kind of the index.
        name: Its name.
        source: The generations of the corpus or of the embeddings. The new generation has the number of the last one.
        previous: The existing generations of the index.
        config: The settings that shape its content.
    """
    role = source[0].key.partition("/")[0]
    inputs = {f"{role}/{number}": artifact for number, artifact in enumerate(source)}
    if previous:
        inputs["previous"] = previous[-1]
    return Target(kind, f"{name}/{generation(len(source) - 1)}", inputs, config)


def count_shards(shards: int, rows: int, first_rows: int) -> int:
    """Returns the number of shards of a generation, at least 1 and at most one per row.

    Args:
        shards: The number of shards of the first generation.
        rows: The rows of this generation.
        first_rows: The rows of the first generation, to which the number is in proportion; 0: this is the first.
    """
    share = rows / first_rows if first_rows else 1.0
    return max(1, min(round(shards * share), rows))
