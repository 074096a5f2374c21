"""The base class of works that build the next generation for new rows, and the description of an index build."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import check_lineage
from riptide.indexing.store.store import Store, check_name, generation
from riptide.indexing.work.work import ArtifactTarget, BaseWork, DriverStage, SpreadStage
from riptide.indexing.work.worker_tasks import Runner, ignore_progress


class NextGenerationWork(BaseWork, ABC):
    """The base class of works that build the next generation of KIND/NAME for new rows of its source.

    A subclass sets the last row, and the settings that shape the content.

    Attributes:
        previous: The existing generations.
        config: The settings that shape the content.
        first_row, end: The rows of the source that the next generation adds.

    Args:
        store: The store.
        kind: The kind of the artifact.
        name: Its name.
        source: The generations of the corpus or of the embeddings that it grows with.

    Raises:
        InputError: If the name cannot be one, or if the existing generations were built from another source.
    """

    config: dict[str, Any]
    end: int

    def __init__(self, store: Store, kind: str, name: str, source: Sequence[Artifact]):
        check_name(kind, name)
        self.kind, self.name, self.source = kind, name, source
        self.previous = store.generations(kind, name)
        check_lineage(self.previous, source)
        self.first_row = sum(artifact.rows for artifact in self.previous)

    @property
    def is_complete(self) -> bool:
        """Whether the existing generations cover all rows."""
        return bool(self.previous) and self.first_row >= self.end

    @property
    def targets(self) -> list[ArtifactTarget]:
        """Returns the target of the next generation; [] if the existing generations cover all rows."""
        if self.is_complete:
            return []
        return [next_target(self.kind, self.name, self.source, self.previous, self.config)]

    @property
    @abstractmethod
    def stages(self) -> Sequence[SpreadStage | DriverStage]:
        """Returns the stages in the order in which they run."""


@dataclass(frozen=True)
class IndexBuild:
    """The work that builds an index, and the lines that the job prints about it.

    Attributes:
        work: Makes the index.
        plan_lines: Lines of --plan above those of the stages.
        memory_text: What the plan says about memory.
        report: Opens the complete index and returns lines about it.
        prepare: Called with the runner before the work.
    """

    work: NextGenerationWork
    plan_lines: Sequence[str]
    memory_text: str
    report: Callable[[], Sequence[str]]
    prepare: Callable[[Runner], object] = ignore_progress


def next_target(
    kind: str, name: str, source: Sequence[Artifact], previous: Sequence[Artifact], config: Mapping[str, Any]
) -> ArtifactTarget:
    """Returns the target of the generation that makes an index cover its source.

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
    return ArtifactTarget(kind, f"{name}/{generation(len(source) - 1)}", inputs, config)


def count_shards(shards: int, rows: int, first_rows: int) -> int:
    """Returns the number of shards of a generation: at least 1, at most one per row.

    Args:
        shards: The number of shards of the first generation.
        rows: The rows of this generation.
        first_rows: The rows of the first generation, to which the number is in proportion; 0: this is the first.
    """
    share = rows / first_rows if first_rows else 1.0
    return max(1, min(round(shards * share), rows))
