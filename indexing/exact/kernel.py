"""Compiles, caches and loads exact search's C++ kernel; where that cannot be done, says so once and steps aside.

Needs Linux, g++ 12 or later and a processor with AVX-512 BF16 (Intel Cooper Lake and Sapphire Rapids, AMD Zen 4, and
later); matrix units (AMX) are used where there are any.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from retriever.errors import InputError
from retriever.forward import native

SOURCE = Path(__file__).with_name("exact_kernel.cpp")
NEEDED = frozenset(("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "f16c", "fma"))
GROUP = 32  # queries that a thread handles together
LONGEST = 1 << 30  # rows per call: the kernel counts a part's rows in 32 bits
ALONE = 8_192  # vectors for which another thread pays

log = logging.getLogger(__name__)


@functools.cache
def load() -> ctypes.CDLL | None:
    """The kernel, compiled on first use, or None where it cannot run (the reason is logged once per process)."""
    try:
        return _declared(native.load(SOURCE, NEEDED))
    except (OSError, AttributeError) as error:
        log.warning("exact search runs in torch, which takes longer: %s", error)
        return None


class KernelSearch:
    """The compiled search over parts; see indexing.exact.ExactSearch, which checks what comes in."""

    def __init__(self, library: ctypes.CDLL, queries: np.ndarray, k: int, threads: int, *, amx: bool = True):
        self._library, self._shape = library, (len(queries), k)
        # Threads share the queries; where there are too few of them, the passages, each with a search of its own.
        searches, inner = (threads, 1) if len(queries) <= GROUP * threads else (1, threads)
        self._searches: list[ctypes.c_void_p] = []
        for _ in range(searches):
            search = library.riptide_search_new(
                queries.ctypes.data, *queries.shape, k, inner, int(amx and library.riptide_amx() == 1)
            )
            if not search:
                raise MemoryError(f"no memory to search {len(queries)} queries for their top {k}")
            self._searches.append(search)

    def __del__(self) -> None:
        for search in getattr(self, "_searches", ()):
            self._library.riptide_search_free(search)

    def add(self, vectors: np.ndarray, first_row: int, deleted: np.ndarray) -> None:
        """Search vectors, C-contiguous float16 or float32 [n, dim], without their rows `deleted` (sorted int64)."""
        step = min(LONGEST, max(ALONE, -(-len(vectors) // len(self._searches))))
        starts = range(0, len(vectors), step)
        if len(starts) == 1:
            self._add(0, vectors, first_row, deleted)
            return
        with ThreadPoolExecutor(len(self._searches)) as pool:
            for begin in range(0, len(starts), len(self._searches)):
                calls = []
                for i, start in enumerate(starts[begin : begin + len(self._searches)]):
                    low, high = np.searchsorted(deleted, [start, start + step])
                    block, gone = vectors[start : start + step], deleted[low:high] - start
                    calls.append(pool.submit(self._add, i, block, first_row + start, gone))
                for call in calls:
                    call.result()

    def add_converted(self, converted: Converted) -> None:
        """Search what was converted before; where queries are few, by one thread."""
        bad = self._library.riptide_search_add_converted(self._searches[0], converted.pointer)
        _check(bad, converted.first_row)

    def _add(self, which: int, vectors: np.ndarray, first_row: int, deleted: np.ndarray) -> None:
        deleted = np.ascontiguousarray(deleted, dtype=np.int64)
        half = int(vectors.dtype == np.float16)
        bad = self._library.riptide_search_add(
            self._searches[which],
            vectors.ctypes.data,
            half,
            *vectors.shape,
            first_row,
            deleted.ctypes.data,
            len(deleted),
        )
        _check(bad, first_row)

    def result(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(scores float32 [q, k], rows int64 [q, k]) of each search: of disjoint passages, to be merged."""
        results = []
        for search in self._searches:
            scores, rows = np.empty(self._shape, np.float32), np.empty(self._shape, np.int64)
            self._library.riptide_search_result(search, scores.ctypes.data, rows.ctypes.data)
            results.append((scores, rows))
        return results


class Converted:
    """A part's vectors as searches take them, less its rows `deleted` (sorted int64): as large as in float16 of a
    multiple of 32 columns."""

    def __init__(self, library: ctypes.CDLL, vectors: np.ndarray, first_row: int, deleted: np.ndarray):
        self._library, self._vectors, self.first_row = library, vectors, first_row  # some are read again
        deleted = np.ascontiguousarray(deleted, dtype=np.int64)
        half = int(vectors.dtype == np.float16)
        self.pointer = library.riptide_converted_new(
            vectors.ctypes.data, half, *vectors.shape, first_row, deleted.ctypes.data, len(deleted)
        )
        if not self.pointer:
            raise MemoryError(f"no memory for the part with row {first_row}")

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._library.riptide_converted_free(self.pointer)


def _check(bad: int, first_row: int) -> None:
    if bad == -2:
        raise MemoryError(f"no memory to search the part with row {first_row}")
    if bad >= 0:
        raise InputError(f"the vector of row {first_row + bad} has NaN, Inf or a norm above 1e15: encode it again")


def score_pairs(
    library: ctypes.CDLL, queries: np.ndarray, rows: np.ndarray, vectors: np.ndarray, threads: int
) -> np.ndarray:
    """float32 [q, c]: exact scores of vectors[rows], int64 [q, c], -inf where a row is -1; arrays are C-contiguous."""
    scores = np.empty(rows.shape, np.float32)
    half = int(vectors.dtype == np.float16)
    library.riptide_score_pairs(
        queries.ctypes.data,
        *queries.shape,
        rows.ctypes.data,
        rows.shape[1],
        vectors.ctypes.data,
        half,
        threads,
        scores.ctypes.data,
    )
    return scores


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    signatures = {
        "riptide_amx": (integer, []),
        "riptide_search_new": (pointer, [pointer, long, long, long, integer, integer]),
        "riptide_search_free": (None, [pointer]),
        "riptide_search_add": (long, [pointer, pointer, integer, long, long, long, pointer, long]),
        "riptide_converted_new": (pointer, [pointer, integer, long, long, long, pointer, long]),
        "riptide_converted_free": (None, [pointer]),
        "riptide_search_add_converted": (long, [pointer, pointer]),
        "riptide_search_result": (None, [pointer, pointer, pointer]),
        "riptide_score_pairs": (None, [pointer, long, long, pointer, long, pointer, integer, integer, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
