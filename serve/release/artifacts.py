"""Opens the artifacts of a release for reading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import pyarrow as pa

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.filters import filter_columns
from riptide.indexing.hit_sources.dense import SearchSpace
from riptide.indexing.hit_sources.online_search import OnlineSearch, PinnedArtifacts, SearchTarget
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.model_artifacts import model_folder
from riptide.indexing.store.store import Store
from riptide.retriever.model.model_folder import PROMPT_SETTINGS
from riptide.serve.release.release import Release, encoder_of


class ReleaseArtifacts:
    """The artifacts of a release, opened for reading on this node and checked against the fingerprints of the release.

    Args:
        store: The store.
        release: The release.

    Raises:
        InputError: If an artifact is missing, or has another fingerprint than in the release.
    """

    def __init__(self, store: Store, release: Release):
        self.store, self.release = store, release
        self.tasks = {task.name: task for task in release.tasks}
        self._generations: dict[tuple[str, str], list[Artifact]] = {}
        self.corpus = Corpus(release.generations(store, "corpus"))
        pinned = PinnedArtifacts(store, self.corpus, self.generations)
        self.readers: dict[tuple[OnlineSearch, SearchTarget], Any] = {}  # readers of the sources of all tasks
        for source in (source for task in release.tasks for source in task.served_sources()):
            key = source.kind.online, source.target
            if key not in self.readers:
                self.readers[key] = source.kind.online.read(source.target, pinned)
        spaces = [readers for readers in self.readers.values() if isinstance(readers, SearchSpace)]
        self.embeddings = {space.embeddings.name: space.embeddings for space in spaces}
        self.indexes = {space.index.name: space.index for space in spaces if space.index}
        self.spec = encoder_of(store, release)

    def generations(self, kind: str, name: str) -> list[Artifact]:
        """Returns the generations of an artifact that the release uses."""
        if (kind, name) not in self._generations:
            self._generations[kind, name] = self.release.generations(self.store, kind, name)
        return self._generations[kind, name]

    @cached_property
    def columns(self) -> Mapping[str, pa.DataType]:
        """The metadata columns that requests can filter by, with their types."""
        return filter_columns(self.corpus)

    @cached_property
    def prompt_lengths(self) -> dict[str, dict[str, int]]:
        """The number of tokens of each task's prompt, by side; of computed and topic prompts, the tokens per query."""
        return {task.name: _prompt_lengths(self.store, task.prompt) for task in self.release.tasks if task.prompt}

    def read_columns_and_lengths(self) -> None:
        """Reads the columns and prompt lengths, so that the event loop need not read files later. Blocks."""
        for _ in (self.columns, self.prompt_lengths):
            pass


def check_row_ranges(artifacts: ReleaseArtifacts, row_ranges: int) -> None:
    """Raises InputError if an index of a release has fewer shards than there are ranges of rows."""
    for name, index in artifacts.indexes.items():
        if len(index.shards) < row_ranges:
            raise InputError(
                f"{Parameter('row_ranges', row_ranges)}: index/{name} has {len(index.shards)} shards, and each belongs "
                f"to one range: give at most so many, or build the index with {row_ranges} shards"
            )


def _prompt_lengths(store: Store, prompt: str) -> dict[str, int]:
    file = model_folder(store.open("prompts", prompt)) / PROMPT_SETTINGS
    settings = json.loads(file.read_text(encoding="utf-8"))
    if "topics" in settings:
        return dict.fromkeys(settings["sides"], settings["topics"]["length"])
    computed = {"query": settings["synthesis"]["length"]} if "synthesis" in settings else {}
    return computed | {side: place["length"] for side, place in settings["sides"].items() if place}
