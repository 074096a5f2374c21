"""Sets of rows of a range, which a search tests without a list of them, and the cache of those that match filters."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

ENTRY_BYTES = 1_024  # bytes that an entry of the cache counts besides its set


class RowSet:
    """A set of rows of a range: a bit per row, or the rows if these take less memory.

    Args:
        rows: int64, ascending, all in the range.
        first_row, end: The range; by default it begins with row 0 and ends with the last one of `rows`.

    Attributes:
        nbytes: Bytes that the set takes.
    """

    def __init__(self, rows: np.ndarray, first_row: int = 0, end: int | None = None):
        end = (int(rows[-1]) + 1 if len(rows) else first_row) if end is None else end
        self.first_row, self.end = first_row, end
        self._count = len(rows)
        self._origin = first_row & ~7  # the row of the first bit, so that the bits begin at a byte of `bitmap`
        self._rows: np.ndarray | None = rows
        self._bits = np.empty(0, np.uint8)
        if 8 * rows.nbytes > end - first_row:
            self._bits, self._rows = self._pack(rows), None

    @classmethod
    def of(cls, rows: np.ndarray | RowSet, first_row: int, end: int) -> RowSet:
        """Returns those of the rows, given in ascending order, that are in a range."""
        if isinstance(rows, RowSet):
            if (rows.first_row, rows.end) == (first_row, end):
                return rows
            rows = rows._rows_between(first_row, end)
        return cls(rows[slice(*np.searchsorted(rows, [first_row, end]))], first_row, end)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._bits.nbytes if self._rows is None else self._rows.nbytes

    def rows(self) -> np.ndarray:
        """Returns the rows: int64, ascending."""
        if self._rows is None:
            return self._origin + np.flatnonzero(self._mask(self._bits))
        return self._rows

    def _rows_between(self, first_row: int, end: int) -> np.ndarray:
        """Returns ascending rows of the set: at least those in [first_row, end). Only their bits are read."""
        if self._rows is not None:
            return self._rows
        first, last = (max(0, row - self._origin) >> 3 for row in (first_row, end + 7))
        return self._origin + 8 * first + np.flatnonzero(np.unpackbits(self._bits[first:last], bitorder="little"))

    def missing_rows(self) -> np.ndarray:
        """Returns the rows of the range that are not in the set: int64, ascending."""
        bits = self._pack(self._rows) if self._rows is not None else self._bits
        return self.first_row + np.flatnonzero(~self._mask(bits)[self.first_row - self._origin :])

    def contains(self, rows: np.ndarray) -> np.ndarray:
        """Returns whether each row, int64 of any shape, is in the set: bool of the same shape."""
        if self._rows is not None:
            places = np.searchsorted(self._rows, rows)
            return np.append(self._rows, -1)[places] == rows if len(self._rows) else np.zeros(rows.shape, bool)
        is_inside = (rows >= self.first_row) & (rows < self.end)
        places = np.where(is_inside, rows - self._origin, 0)
        return is_inside & (self._bits[places >> 3] >> (places & 7).astype(np.uint8) & 1).astype(bool)

    def bitmap(self) -> np.ndarray:
        """Returns a bit for every row from 0 to the end of the range, the lowest bit of a byte first: uint8."""
        bits = self._pack(self._rows) if self._rows is not None else self._bits
        bitmap = np.zeros((self._origin >> 3) + len(bits), np.uint8)  # the pages before the range are never written
        bitmap[self._origin >> 3 :] = bits
        return bitmap

    def _pack(self, rows: np.ndarray) -> np.ndarray:
        mask = np.zeros(self.end - self._origin, bool)
        mask[rows - self._origin] = True
        return np.packbits(mask, bitorder="little")

    def _mask(self, bits: np.ndarray) -> np.ndarray:
        return np.unpackbits(bits, count=self.end - self._origin, bitorder="little").view(bool)


class CacheUsage(NamedTuple):
    """The size of a cache and its bound, in bytes, and its number of entries."""

    bytes: int
    max_bytes: int
    entries: int


class FilterCache:
    """The rows that match the latest filters, for all objects of a process that search. Thread-safe.

    The least recently used sets are dropped when all of them take more than `max_bytes`; a larger set is not kept.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes, self._bytes = max_bytes, 0
        self._owners: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._sets: OrderedDict[tuple[int, bytes], RowSet] = OrderedDict()
        self._lock = threading.RLock()  # reentrant, as the garbage collector may call `_drop` anywhere

    def get(self, owner: object, filter_hash: bytes) -> RowSet | None:
        """Returns the set of an owner's filter; None if it is not kept."""
        with self._lock:
            key = self._owners.get(owner, -1), filter_hash
            if (rows := self._sets.get(key)) is not None:
                self._sets.move_to_end(key)
            return rows

    def put(self, owner: object, filter_hash: bytes, rows: RowSet) -> None:
        """Keeps a set until its owner is gone or others have been used since."""
        size = rows.nbytes + ENTRY_BYTES
        if size > self._max_bytes:
            return
        with self._lock:
            if owner not in self._owners:
                self._owners[owner] = next(self._numbers)
                weakref.finalize(owner, self._drop, self._owners[owner]).atexit = False
            key = self._owners[owner], filter_hash
            self._remove(key)
            self._sets[key] = rows
            self._bytes += size
            while self._sets and self._bytes > self._max_bytes:
                self._remove(next(iter(self._sets)))

    def usage(self) -> CacheUsage:
        """Returns the size of the cache."""
        with self._lock:
            return CacheUsage(self._bytes, self._max_bytes, len(self._sets))

    def _drop(self, owner: int) -> None:
        """Removes the sets of an owner that is gone."""
        with self._lock:
            for key in [key for key in list(self._sets) if key[0] == owner]:
                self._remove(key)

    def _remove(self, key: tuple[int, bytes]) -> None:
        if (removed := self._sets.pop(key, None)) is not None:
            size = removed.nbytes + ENTRY_BYTES
            self._bytes -= size


filter_cache = FilterCache(256 << 20)
