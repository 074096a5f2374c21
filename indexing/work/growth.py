"""The next generation of an index that grows with its corpus or its embeddings: its target, its shards, its build."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from indexing.store.artifact import Artifact
from indexing.store.store import generation
from indexing.work.tasks import Runner, ignore
from indexing.work.work import Target, Work


@dataclass(frozen=True)
class IndexOptions:
    """The options that shape an index of vectors; a kind of vector may use some of them only.

    Attributes:
        shards: Number of shards of the first generation.
        factory: FAISS' factory string; auto: chosen by size, memory and recall.
        recall: Recall of the exact top 100 to reach, after candidates were scored again.
        memory_bytes: With auto, the largest size of the first generation.
    """

    shards: int = 4
    factory: str = "auto"
    recall: float = 0.95
    memory_bytes: int | None = None


class GrowingWork(Work, Protocol):
    """A work that makes the next generation of an index.

    Attributes:
        previous: The existing generations.
        complete: Whether they cover all rows.
    """

    previous: list[Artifact]
    complete: bool


@dataclass(frozen=True)
class IndexBuild:
    """How a job builds an index, and what it prints.

    Attributes:
        work: Makes the index.
        plan: Lines of --plan above those of the stages.
        memory: What the plan says about memory.
        report: Opens the complete index and returns lines about it.
        prepare: Called with the runner before the work.
    """

    work: GrowingWork
    plan: Sequence[str]
    memory: str
    report: Callable[[], Sequence[str]]
    prepare: Callable[[Runner], object] = ignore


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
    role = source[0].kind
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
