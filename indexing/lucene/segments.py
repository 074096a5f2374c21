"""Lucene segments as parts of an artifact: reads their files, checks the pinned versions, and commits them."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.lucene.lucene import LuceneSegmentFiles, lucene_versions, make_analyzer
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import RowRange
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.work.worker_tasks import JVM_CORE, Allocation, Report, Runner, WorkerResources

SegmentFiles = tuple[tuple[str, tuple[tuple[str, bytes], ...], str], ...]
"""Of each segment: the name of its bulk, its small files, and the path of the bulk. A key of caches."""


def segment_rows(shards: Sequence[tuple[Artifact, ArtifactPart]]) -> list[RowRange]:
    """Returns the range of rows of each committed segment."""
    return [RowRange(int(part.facts["first_row"]), int(part.facts["end"])) for _, part in shards]


def segment_files(shards: Sequence[tuple[Artifact, ArtifactPart]]) -> SegmentFiles:
    """Returns the local files of committed segments; `segments_of` converts them for a search."""
    files = []
    for artifact, part in shards:
        small = tuple((name, base64.b64decode(content)) for name, content in part.facts["small_files"].items())
        files.append((part.facts["segment_file"], small, str(artifact.local_path(part))))
    return tuple(files)


def segments_of(files: SegmentFiles) -> list[tuple[LuceneSegmentFiles, Path]]:
    """Converts the hashable form of segments to the arguments of SegmentSearch: (segment, path of its bulk)."""
    return [(LuceneSegmentFiles(bulk, dict(small)), Path(path)) for bulk, small, path in files]


def check_lucene_versions(artifact: Artifact | Draft) -> None:
    """Raises InputError if this process has other versions of Lucene or Anserini than the artifact pins."""
    for package, version in lucene_versions().items():
        if artifact.config[package] != version:
            raise InputError(
                f"{artifact.url} was made with {package} {artifact.config[package]}, here is {version}: build another "
                f"one ({Parameter('name')}), or install that version of pyserini on every node"
            )


def query_versions(runner: Runner, previous: Sequence[Artifact], language: str, count: int) -> dict[str, str]:
    """Runs a task on one worker and returns the versions of Lucene and Anserini that it reports.

    Args:
        runner: What runs the worker.
        previous: The existing generations of the index, which must have been built with the same versions.
        language: The language of the analyzer, which the worker must know.
        count: Number of workers that can fill shards at the same time.

    Raises:
        InputError: If Java does not work there, or if the existing generations were built with other versions.
    """
    reported: dict[str, str] = runner.run_on_first_available(LuceneVersionsTask(language), None, count)
    existing_versions = {key: previous[0].config[key] for key in reported} if previous else reported
    if existing_versions != reported:
        raise InputError(
            f"{previous[0].url} was built with {existing_versions}, this is {reported}, whose terms may differ: build "
            f"another one ({Parameter('name')})"
        )
    return reported


@dataclass(frozen=True)
class LuceneVersionsTask:
    """A worker task that returns the versions of Lucene and Anserini, and checks that Java knows the language."""

    language: str
    resources: WorkerResources = JVM_CORE  # a thread that ends while it is attached to the JVM crashes the process

    def open(self, allocation: Allocation) -> Callable[[None, Report], dict[str, str]]:
        """Checks Java and returns a function that reports versions. Raises InputError if Java or the language fails."""
        make_analyzer(self.language)
        return lambda item, report: lucene_versions()


def commit_segment(
    draft: Draft, name: str, segment: LuceneSegmentFiles, folder: Path, first: int, end: int, **facts: Any
) -> None:
    """Commits the segment of rows [first, end) as a part: the bulk as its file, the small files in its record.

    facts: further facts of the record.
    """
    small = {file: base64.b64encode(content).decode() for file, content in sorted(segment.small.items())}
    draft.commit(
        name,
        ".cfs",
        lambda path: shutil.move(folder / segment.bulk, path),
        rows=end - first,
        first_row=first,
        end=end,
        segment_file=segment.bulk,
        small_files=small,
        **facts,
    )
