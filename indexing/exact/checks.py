"""Checks of queries and vectors before a search, and the number of threads that it may use."""

from __future__ import annotations

import os

import numpy as np

from riptide.base.errors import InputError

MAX_NORM = 1e15  # maximum norm of a vector: products of two, and sums of them, stay finite in float32


def available_threads() -> int:
    """Returns the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_queries(queries: np.ndarray) -> np.ndarray:
    """Returns queries as contiguous float32 [q, dim].

    Raises:
        InputError: For another shape, NaN, Inf and norms above 1e15.
    """
    queries = np.ascontiguousarray(queries, dtype=np.float32)
    if queries.ndim != 2 or queries.shape[1] < 1:
        raise InputError(f"queries have shape {queries.shape}, expected [q, dim]")
    norms = np.linalg.norm(queries.astype(np.float64), axis=1)
    bad = np.flatnonzero(~(norms <= MAX_NORM))
    if len(bad):
        raise InputError(f"query {bad[0]} has norm {norms[bad[0]]}, expected a finite one of at most {MAX_NORM:g}")
    return queries


def check_vectors(vectors: np.ndarray, dim: int, first_row: int) -> np.ndarray:
    """Checks the shape and dtype of vectors [n, dim], and returns them C-contiguous.

    Raises:
        InputError: For another shape or dtype; names the part by its first row.
    """
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise InputError(f"vectors from row {first_row} have shape {vectors.shape}, expected [n, {dim}] as the queries")
    if vectors.dtype not in (np.float16, np.float32):
        raise InputError(f"vectors from row {first_row} are {vectors.dtype}, expected float16 or float32")
    return vectors if vectors.flags.c_contiguous else np.ascontiguousarray(vectors)
