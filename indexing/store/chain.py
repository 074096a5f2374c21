"""Chains of generations: an artifact that grows with its corpus is read as one sequence of global rows."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.store.store import Store, repeated_command

_VERBS = {"embeddings": "encode", "topics": "infer the topics of"}  # how a job covers new rows; other kinds: add


@dataclass(frozen=True)
class RowPart:
    """A part and the global rows it holds: [first_row, end)."""

    artifact: Artifact
    part: ArtifactPart
    first_row: int

    @property
    def end(self) -> int:
        return self.first_row + self.part.rows

    @property
    def label(self) -> str:
        """`g0001/part-00007`: its place in the chain."""
        return f"{self.artifact.key.rpartition('/')[2]}/{self.part.name}"


class RowRange(NamedTuple):
    """The rows [first_row, end)."""

    first_row: int
    end: int

    def select_shards(self, shards: Sequence[tuple[int, int]]) -> slice:
        """Returns which shards belong to the range: those whose middle row is in it.

        So each shard belongs to exactly one of the ranges into which a corpus is split.

        Args:
            shards: First row and end of each shard, in the order of their rows.
        """
        middles = [(first + end) // 2 for first, end in shards]
        return slice(bisect.bisect_left(middles, self.first_row), bisect.bisect_left(middles, self.end))


def row_parts(generations: Sequence[Artifact]) -> list[RowPart]:
    """Returns all parts of a chain with their first global rows, in the order of generations and of parts."""
    parts, row = [], 0
    for artifact in generations:
        for part in artifact.numbered_parts("part"):
            parts.append(RowPart(artifact, part, row))
            row += part.rows
    return parts


class RowChain:
    """All complete generations of an artifact whose parts hold consecutive rows.

    Attributes:
        generations: The generations, oldest first.
        parts: Their parts with the global rows.
        num_rows: The number of rows.
    """

    def __init__(self, generations: Sequence[Artifact]):
        self.generations = list(generations)
        self.parts = row_parts(generations)
        self.num_rows = self.parts[-1].end if self.parts else 0


def split_rows(parts: Sequence[RowPart], rows: np.ndarray) -> Iterator[tuple[RowPart, np.ndarray, np.ndarray]]:
    """Yields (part, positions in `rows`, rows within the part) for each part that holds some of `rows`, int64 [n]."""
    starts = np.array([part.first_row for part in parts], np.int64)
    owner = np.searchsorted(starts, rows, side="right") - 1
    for index in np.unique(owner):
        positions = np.flatnonzero(owner == index)
        yield parts[index], positions, rows[positions] - starts[index]


def parts_of_range(parts: Sequence[RowPart], first_row: int, end: int) -> Iterator[tuple[RowPart, slice]]:
    """Yields each part that holds some of the rows [first_row, end), with these rows counted within the part."""
    for part in parts:
        start, stop = max(first_row, part.first_row), min(end, part.end)
        if start < stop:
            yield part, slice(start - part.first_row, stop - part.first_row)


def split_range(first_row: int, end: int, num_ranges: int) -> list[RowRange]:
    """Splits the rows [first_row, end) into `num_ranges` ranges of nearly equal length."""
    bounds = np.linspace(first_row, end, num_ranges + 1).astype(np.int64).tolist()
    return list(itertools.starmap(RowRange, itertools.pairwise(bounds)))


def open_chain(
    store: Store, kind: str, name: str, source: Sequence[Artifact], rows: int | None = None
) -> list[Artifact]:
    """Returns the generations of KIND/NAME, which must cover its source; errors as of the two checks below.

    Args:
        store: The store.
        kind: The kind of the chain.
        name: Its name.
        source: The generations of the corpus or the embeddings that it should be built from.
        rows: The number of rows that are needed, the first ones of the source; None: all.
    """
    generations = store.generations(kind, name)
    check_lineage(generations, source)
    check_coverage(generations, source, rows)
    return generations


def check_coverage(generations: Sequence[Artifact], source: Sequence[Artifact], rows: int | None = None) -> None:
    """Checks that a chain has all rows of the one that it was built from, up to the limit in its configuration.

    Args:
        generations: The generations of the chain, at least one.
        source: The generations of the corpus or the embeddings that it was built from.
        rows: The number of rows that are needed, the first ones of the source; None: all.

    Raises:
        InputError: If rows are missing; the message names the job that adds them.
    """
    first, covered = generations[0], sum(artifact.rows for artifact in generations)
    rows = sum(artifact.rows for artifact in source) if rows is None else rows
    expected = min(rows, first.config.get("limit") or rows)
    if covered < expected:
        url, verb = first.url.rpartition("/")[0], _VERBS.get(first.kind, "add")
        is_corpus = source[0].kind == "corpus"
        nouns = (
            "the corpus' {:,} passages" if is_corpus else f"the {{:,}} vectors of {source[0].key.rpartition('/')[0]}"
        )
        raise InputError(
            f"{url} covers {covered:,} of {nouns.format(expected)}: run "
            f"{repeated_command(first.kind, url.rpartition('/')[2])}, to {verb} the new ones"
        )


def check_lineage(generations: Sequence[Artifact], source: Sequence[Artifact]) -> None:
    """Checks that a chain was built from another one, for example an index from a corpus.

    Args:
        generations: The generations of the chain.
        source: The generations of the corpus or the embeddings that it should be built from.

    Raises:
        InputError: If a generation was built from other ones; the message names both.
    """
    fingerprints: dict[str, Any] = {artifact.key: artifact.fingerprint for artifact in source}
    name = "the corpus" if source[0].key.startswith("corpus/") else source[0].key.rpartition("/")[0]
    for artifact in generations:
        for role, entry in artifact.inputs.items():
            if role != "previous" and fingerprints.get(entry["artifact"]) != entry["fingerprint"]:
                actual = fingerprints.get(entry["artifact"])
                raise InputError(
                    f"{artifact.url} was built from {entry['artifact']} {entry['fingerprint'][:12]}, {name} "
                    f"{f'is now {actual[:12]}' if actual else 'has no such generation'}: build another one "
                    f"({Parameter('name')})"
                )
