"""Copies vectors of deleted passages to later passages with the same text, so that these are not encoded again."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from riptide.indexing.corpus.corpus import Corpus, open_table, read_rows, save_array
from riptide.indexing.embeddings.embeddings_reader import EmbeddingsReader
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import RowPart, split_rows
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.store import Store
from riptide.indexing.work.work import BaseStage, Committed, ProgressCounter, WorkUnit
from riptide.indexing.work.worker_tasks import Runner

COPIES = "copies"  # name of the part of embeddings with the rows whose vectors are copied, int64 [2, n]
_DIGEST_BYTES = 16  # of SHA-256. A cryptographic hash: two texts with one digest cannot be constructed.


class Copies(NamedTuple):
    """The passages of a part whose vectors are copied.

    Attributes:
        rows: Their rows within the part: int64 [n], ascending.
        sources: The row of the corpus whose vector each one gets: int64 [n].
    """

    rows: np.ndarray
    sources: np.ndarray


NO_COPIES = Copies(np.empty(0, np.int64), np.empty(0, np.int64))


def find_copies(corpus: Corpus, number: int, rows: int, num_rows: int, title: str) -> np.ndarray:
    """Finds the passages of a generation with the text of a passage that the same generation deletes.

    At the peak, memory holds about 90 bytes for each deleted passage, 32 for each copy, and the texts of a part.

    Args:
        corpus: The corpus.
        number: The number of the generation.
        rows: The number of rows of the corpus, the first ones, that have vectors to copy.
        num_rows: The number of rows of the corpus, the first ones, that get vectors.
        title: The option `title` of the encoder. Titles are compared unless it is "none".

    Returns:
        The row of each such passage, ascending, and the row of a deleted passage with its text: int64 [2, n].
    """
    generation = corpus.generations[number]
    deleted = _deleted_rows(generation)
    deleted = deleted[deleted < rows]
    pairs = [np.empty((2, 0), np.int64)]
    if len(deleted):
        names = ["text"] if title == "none" else ["title", "text"]
        deleted_digests, firsts = np.unique(
            np.concatenate(
                [_digests(read_rows(part, local, names)) for part, _, local in split_rows(corpus.parts, deleted)]
            ),
            return_index=True,
        )
        for part in _parts_of(corpus, generation):
            if (count := min(part.part.rows, num_rows - part.first_row)) <= 0:
                break
            digests = _digests(open_table(part).slice(0, count).select(names))
            places = np.minimum(np.searchsorted(deleted_digests, digests), len(deleted_digests) - 1)
            local = np.flatnonzero((deleted_digests[places] == digests) & (digests != b""))
            pairs.append(np.stack([part.first_row + local, deleted[firsts[places[local]]]]))
    return np.concatenate(pairs, axis=1)


def _deleted_rows(generation: Artifact) -> np.ndarray:
    """Returns the rows of earlier generations that a generation of the corpus deletes: int64, ascending."""
    part = generation.find_part("deleted")
    return np.empty(0, np.int64) if part is None else np.unique(np.load(generation.local_path(part)))


def _parts_of(corpus: Corpus, generation: Artifact) -> Iterator[RowPart]:
    """Yields the parts of a generation of the corpus."""
    return (part for part in corpus.parts if part.artifact.key == generation.key)


def _digests(table: pa.Table) -> np.ndarray:
    """Returns a digest of the values of each row, bytes [n]; that of a row without text is empty.

    Erased passages have no text.
    """
    columns = [column.to_pylist() for column in table.columns]
    digests = np.zeros(len(table), f"S{_DIGEST_BYTES}")
    for row, values in enumerate(zip(*columns, strict=True)):
        if any(values):
            data = [value.encode() for value in values]
            lengths = b"".join(len(value).to_bytes(8, "little") for value in data)
            digests[row] = hashlib.sha256(lengths + b"".join(data)).digest()[:_DIGEST_BYTES]
    return digests


def _max_sources(generation: Artifact) -> int:
    """Returns the largest possible number of deleted passages whose text a passage of the generation has.

    One of them may be the source of several passages.
    """
    deleted = generation.find_part("deleted")
    return 0 if deleted is None else min(deleted.rows, generation.rows)


@dataclass(frozen=True)
class CopyPlan:
    """Finds the vectors that pending generations of embeddings copy from complete ones.

    Attributes:
        store: The store.
        name: The name of the embeddings.
        reader: Their reader.
        title: As of `find_copies`.
        num_rows: As of `find_copies`.
        generations: The numbers of the generations of the corpus that have no complete embeddings, delete passages and
            add some.
    """

    store: Store
    name: str
    reader: type[EmbeddingsReader]
    title: str
    num_rows: int
    generations: tuple[int, ...]

    @classmethod
    def of(
        cls, store: Store, corpus: Corpus, name: str, reader: type[EmbeddingsReader], title: str, num_rows: int
    ) -> CopyPlan:
        """Returns the plan of embeddings; without complete ones nothing is copied."""
        first = len(store.generations("embeddings", name))
        pending = range(first, len(corpus.generations)) if first else range(0)
        numbers = tuple(number for number in pending if _max_sources(corpus.generations[number]))
        return cls(store, name, reader, title, num_rows, numbers)

    def open_embeddings(self) -> EmbeddingsReader:
        """Opens the complete generations."""
        return self.reader(self.name, self.store.generations("embeddings", self.name))

    def max_sources(self, corpus: Corpus) -> int:
        """Returns the largest possible number of vectors that are copied, without reading texts."""
        return sum(_max_sources(corpus.generations[number]) for number in self.generations)

    def find(self, number: int) -> np.ndarray:
        """Returns the `find_copies` of a generation."""
        return find_copies(Corpus.open(self.store), number, self.open_embeddings().num_rows, self.num_rows, self.title)


@dataclass(frozen=True)
class CopyStage(BaseStage):
    """The stage that records which vectors are copied, so that every attempt copies the same ones.

    It runs after the drafts exist. No erasure begins while a draft exists, so it finds no passage that is being erased.
    """

    plan: CopyPlan
    rows: Mapping[int, int]
    title: str = "compare"
    noun: str = "passages"

    @property
    def total(self) -> int:
        """The number of passages whose texts are compared."""
        return sum(self.rows.values())

    def units(self, committed_parts: Committed) -> list[WorkUnit]:
        """Returns a unit for each generation."""
        return [WorkUnit((COPIES,), rows, number, target=number) for number, rows in self.rows.items()]

    def make(
        self, unit: WorkUnit, missing_names: Sequence[str], draft: Draft, runner: Runner, counter: ProgressCounter
    ) -> None:
        """Commits the rows of a generation whose vectors are copied."""
        copies = self.plan.find(unit.payload)
        draft.commit(COPIES, ".npy", functools.partial(save_array, copies), rows=copies.shape[1])
        counter.count(unit.rows)


def read_copies(draft: Draft, part: RowPart, rows: int) -> Copies:
    """Returns the copies among the first `rows` passages of a part of the corpus."""
    if (committed := draft.find_part(COPIES)) is None:
        return NO_COPIES
    copies: Any = np.load(draft.local_path(committed), mmap_mode="r")
    first, end = np.searchsorted(copies[0], [part.first_row, part.first_row + rows])
    return Copies(copies[0, first:end] - part.first_row, np.array(copies[1, first:end]))
