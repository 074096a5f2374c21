"""Compiles, caches and loads the C++ kernel of exact search; logs a warning once if the kernel cannot run.

Needs Linux on x86-64 or ARM, and g++ 12 or later. It multiplies bfloat16 where the CPU does (AMX, AVX-512 BF16, ARM's
BF16), else 16-bit integers (AVX-512, AVX2, NEON). For a few queries over converted vectors it multiplies bytes
(AVX-512, AVX2).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from riptide.base.errors import InputError
from riptide.process import native

SOURCE = Path(__file__).with_name("exact_kernel.cpp")
GROUP = 32  # queries that a thread scores together
MAX_ROWS = 1 << 30  # maximum rows per call, since the kernel counts them in 32 bits
MIN_VECTORS = 8_192  # minimum vectors per thread; one thread is faster for fewer

log = logging.getLogger(__name__)


@functools.cache
def load_kernel() -> ctypes.CDLL | None:
    """Returns the kernel, compiled on first use; None if it cannot run (the reason is logged once)."""
    try:
        return declare_types(native.load_library(SOURCE))
    except (OSError, AttributeError) as error:
        log.warning("exact search runs in torch, which takes longer: %s", error)
        return None


class KernelSearch:
    """Top-k search over parts by the compiled kernel. Does not check arguments, which ExactSearch does."""

    def __init__(self, library: ctypes.CDLL, queries: np.ndarray, k: int, threads: int, *, amx: bool = True):
        self._library, self._shape = library, (len(queries), k)
        # Threads share the queries of one search; if these are too few, each thread searches a share of the passages.
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
        """Searches C-contiguous float16 or float32 vectors [n, dim], except vectors[deleted] (ascending int64)."""
        step = min(MAX_ROWS, max(MIN_VECTORS, -(-len(vectors) // len(self._searches))))
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

    def add_converted(self, converted: ConvertedVectors) -> None:
        """Searches converted vectors; uses one thread if there are few queries."""
        bad = self._library.riptide_search_add_converted(self._searches[0], converted.pointer)
        _raise_problem(bad, converted.first_row)

    def _add(self, search_number: int, vectors: np.ndarray, first_row: int, deleted: np.ndarray) -> None:
        deleted = np.ascontiguousarray(deleted, dtype=np.int64)
        half = int(vectors.dtype == np.float16)
        bad = self._library.riptide_search_add(
            self._searches[search_number],
            vectors.ctypes.data,
            half,
            *vectors.shape,
            first_row,
            deleted.ctypes.data,
            len(deleted),
        )
        _raise_problem(bad, first_row)

    def partial_hits(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the top k of disjoint sets of passages, for merging: scores float32 [q, k], rows int64 [q, k]."""
        results = []
        for search in self._searches:
            scores, rows = np.empty(self._shape, np.float32), np.empty(self._shape, np.int64)
            self._library.riptide_search_result(search, scores.ctypes.data, rows.ctypes.data)
            results.append((scores, rows))
        return results


class KernelTargets:
    """Finds the nearest target of vectors. Does not check arguments, which NearestTargets does."""

    def __init__(self, library: ctypes.CDLL, targets: np.ndarray, threads: int):
        self._library = library
        self._pointer = library.riptide_search_new(
            targets.ctypes.data, *targets.shape, 1, threads, int(library.riptide_amx() == 1)
        )
        if not self._pointer:
            raise MemoryError(f"no memory for {len(targets)} targets")

    def __del__(self) -> None:
        if getattr(self, "_pointer", None):
            self._library.riptide_search_free(self._pointer)

    def find(self, vectors: np.ndarray) -> np.ndarray:
        """Returns the nearest target of each C-contiguous vector: int32 [n]. Several threads may call it."""
        nearest = np.empty(len(vectors), np.int32)
        half = int(vectors.dtype == np.float16)
        bad = self._library.riptide_search_nearest(
            self._pointer, vectors.ctypes.data, half, *vectors.shape, nearest.ctypes.data
        )
        _raise_problem(bad, 0)
        return nearest


class ConvertedVectors:
    """The vectors of a part in the kernel's layout, without vectors[deleted] (ascending int64).

    They take as much memory as in float16 with a multiple of 32 columns, and half as much again on x86-64 with AVX2,
    where searches of a few queries read 8-bit copies.
    """

    def __init__(self, library: ctypes.CDLL, vectors: np.ndarray, first_row: int, deleted: np.ndarray):
        # The kernel reads some original vectors later, so they must stay alive.
        self._library, self._vectors, self.first_row = library, vectors, first_row
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


def _raise_problem(bad: int, first_row: int) -> None:
    """Raises the error that a kernel result means: -2: no memory; 0 and above: the row of an invalid vector."""
    if bad == -2:
        raise MemoryError(f"no memory to search the part with row {first_row}")
    if bad >= 0:
        raise InputError(f"the vector of row {first_row + bad} has NaN, Inf or a norm above 1e15: encode it again")


def score_pairs(
    library: ctypes.CDLL, queries: np.ndarray, rows: np.ndarray, vectors: np.ndarray, threads: int
) -> np.ndarray:
    """Returns the exact scores of vectors[rows], rows int64 [q, c]: float32 [q, c], -inf where a row is -1.

    All arrays are C-contiguous.
    """
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


def sum_by_target(
    library: ctypes.CDLL, vectors: np.ndarray, nearest: np.ndarray, num_targets: int, threads: int
) -> np.ndarray:
    """Returns the sum of the vectors of each target, float64 [m, dim], as `nearest.sum_by_target` does."""
    sums = np.zeros((num_targets, vectors.shape[1]))
    half = int(vectors.dtype == np.float16)
    library.riptide_sum_by_target(
        vectors.ctypes.data, half, *vectors.shape, nearest.ctypes.data, num_targets, threads, sums.ctypes.data
    )
    return sums


def declare_types(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the argument and result types of the library's functions, and returns the library."""
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
        "riptide_search_nearest": (long, [pointer, pointer, integer, long, long, pointer]),
        "riptide_sum_by_target": (None, [pointer, integer, long, long, pointer, long, integer, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
