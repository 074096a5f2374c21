"""Reads all generations of a growing artifact, a chain, as one sequence of global rows."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.store.store import Store, repeated_command

MAX_OPEN_FILES = 4_096  # open part files of a process; fewer if `ulimit -n` is below twice this number
Opened = TypeVar("Opened")

_VERBS = {"embeddings": "encode", "topics": "infer the topics of"}  # verb in messages; otherwise "add"


@dataclass(frozen=True, slots=True)
class RowPart:
    """A part of a chain with its range of global rows, [first_row, end)."""

    artifact: Artifact
    part: ArtifactPart
    first_row: int

    def __reduce__(self) -> tuple[Any, ...]:
        return RowPart, (self.artifact.handle, self.part, self.first_row)  # a worker needs no other part

    @property
    def end(self) -> int:
        return self.first_row + self.part.rows

    @property
    def label(self) -> str:
        """The position of the part in the chain, for example `g0001/part-00007`."""
        return f"{self.artifact.key.rpartition('/')[2]}/{self.part.name}"


class RowRange(NamedTuple):
    """A range of global rows, [first_row, end)."""

    first_row: int
    end: int

    def select_shards(self, shards: Sequence[tuple[int, int]]) -> slice:
        """Returns the slice of the shards that belong to the range: the shards whose middle row is in it.

        So each shard belongs to exactly one of the ranges into which a corpus is split.

        Args:
            shards: First row and end of each shard, in the order of their rows.
        """
        middles = [(first + end) // 2 for first, end in shards]
        return slice(bisect.bisect_left(middles, self.first_row), bisect.bisect_left(middles, self.end))


class RowParts(Sequence[RowPart]):
    """The parts of a chain with their global rows, in the order of generations and of parts.

    Args:
        generations: The generations, oldest first.

    Attributes:
        starts: The first row of each part: int64 [n], ascending.
        num_rows: The number of rows of all parts.
    """

    def __init__(self, generations: Sequence[Artifact] = ()):
        self._generations = [(artifact, artifact.numbered_parts("part")) for artifact in generations]
        self._counts = list(itertools.accumulate((len(parts) for _, parts in self._generations), initial=0))
        rows = [parts.rows for _, parts in self._generations]
        bounds = np.cumsum(np.concatenate([np.zeros(1, np.int64), *rows]))
        self.starts, self.num_rows = bounds[:-1], int(bounds[-1])

    def __len__(self) -> int:
        return self._counts[-1]

    @overload
    def __getitem__(self, index: int) -> RowPart: ...

    @overload
    def __getitem__(self, index: slice) -> list[RowPart]: ...

    def __getitem__(self, index: int | slice) -> RowPart | list[RowPart]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        generation = bisect.bisect_right(self._counts, number) - 1
        artifact, parts = self._generations[generation]
        return RowPart(artifact, parts[number - self._counts[generation]], int(self.starts[number]))


class OpenFiles:
    """The part files that the chains of a process keep open for random access, least-recently-used first.

    Every memory map takes a file descriptor, so their number is bounded, for chains of any number of parts.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._owners: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._files: OrderedDict[tuple[int, str], Any] = OrderedDict()
        self._lock = threading.RLock()  # reentrant, as the garbage collector may call `_close` anywhere

    def get(self, owner: object, name: str, open: Callable[[], Opened]) -> Opened:
        """Returns a file of an owner by its name, which this call opens by `open` or an earlier one did."""
        with self._lock:
            if owner not in self._owners:
                self._owners[owner] = next(self._numbers)
                weakref.finalize(owner, self._close, self._owners[owner])
            key = self._owners[owner], name
            with contextlib.suppress(KeyError):
                self._files.move_to_end(key)
                file: Opened = self._files[key]
                return file
        file = open()
        with self._lock:
            self._files[key] = file
            while len(self._files) > self._limit:
                self._files.popitem(last=False)
        return file

    def _close(self, owner: int) -> None:
        """Closes the files of an owner that is gone."""
        with self._lock:
            for key in [key for key in self._files if key[0] == owner]:
                del self._files[key]


open_files = OpenFiles(max(16, min(MAX_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)))


class RowChain:
    """A chain: all complete generations of an artifact whose parts hold consecutive rows.

    Attributes:
        generations: The generations, oldest first.
        parts: Their parts with the global rows.
        num_rows: The number of rows.
    """

    def __init__(self, generations: Sequence[Artifact]):
        self.generations = list(generations)
        self.parts = RowParts(generations)
        self.num_rows = self.parts.num_rows

    def keep_open(self, part: RowPart, open: Callable[[RowPart], Opened]) -> Opened:
        """Returns `open(part)`, from an earlier call if the result is among the `open_files` of the process."""
        return open_files.get(self, part.label, lambda: open(part))


def split_rows(parts: RowParts, rows: np.ndarray) -> Iterator[tuple[RowPart, np.ndarray, np.ndarray]]:
    """Groups `rows`, int64 [n], by part: yields (part, positions in `rows`, rows within the part)."""
    owner = np.searchsorted(parts.starts, rows, side="right") - 1
    order = np.argsort(owner, kind="stable")
    owners, begins = np.unique(owner[order], return_index=True)
    for index, positions in zip(owners.tolist(), np.split(order, begins[1:]), strict=False):
        yield parts[index], positions, rows[positions] - parts.starts[index]


def parts_of_range(parts: RowParts, first_row: int, end: int) -> Iterator[tuple[RowPart, slice]]:
    """Yields each part that overlaps the rows [first_row, end), with the overlap as a slice within the part."""
    first = max(0, int(np.searchsorted(parts.starts, first_row, side="right")) - 1)
    for part in map(parts.__getitem__, range(first, int(np.searchsorted(parts.starts, end)))):
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
    """Opens the generations of KIND/NAME; raises the errors of `check_lineage` and `check_coverage`.

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
    """Raises InputError if a chain lacks rows of its source, up to the limit in its configuration.

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
    """Raises InputError if a chain was not built from the given source, for example an index from a corpus.

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
