"""Array helpers of exact search: checks of queries and vectors, and hits with functions to merge and pad them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from riptide.base.errors import InputError

MAX_NORM = 1e15  # maximum norm of a vector: inner products and their partial sums stay finite in float32


class Hits(NamedTuple):
    """The top passages of each query by descending score, ties by ascending row, padded with scores -inf and rows -1.

    Attributes:
        scores: float32 [q, k].
        rows: int64 [q, k].
    """

    scores: np.ndarray
    rows: np.ndarray


class VectorFile(Protocol):
    """Vectors [n, dim], float16 or float32, in a file that is read when some of them are needed."""

    def __len__(self) -> int:
        """Returns the number of vectors."""

    def open_local(self) -> np.ndarray | None:
        """Returns all vectors if a file of this machine has them, memory-mapped; None if they would be fetched."""

    def read_rows(self, rows: np.ndarray) -> np.ndarray:
        """Returns the vectors of `rows`, int64 [m], ascending: [m, dim]. Fetches them alone if they are few."""


def empty_hits(queries: int, k: int) -> Hits:
    """Returns hits [queries, k] without any passage: scores -inf and rows -1."""
    return Hits(np.full((queries, k), -np.inf, np.float32), np.full((queries, k), -1, np.int64))


def merge_hits(hits: Sequence[Hits], k: int) -> Hits:
    """Merges several hits of the same queries into the top k, by descending score, then ascending row.

    Args:
        hits: At least one; their rows are disjoint.
        k: Number of hits per query.
    """
    if not hits:
        raise ValueError("nothing to merge")
    if len(hits) == 1:
        return pad_hits(Hits(hits[0].scores[:, :k], hits[0].rows[:, :k]), k)
    scores = np.concatenate([h.scores for h in hits], axis=1)
    rows = np.concatenate([h.rows for h in hits], axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")
    sorted_scores, sorted_rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
    # A stable sort leaves ties in the order of `hits`, in which rows mostly ascend. Only queries with other ties are
    # sorted again by both keys.
    ties = (sorted_scores[:, 1:] == sorted_scores[:, :-1]) & (sorted_rows[:, 1:] < sorted_rows[:, :-1])
    unsorted_queries = np.flatnonzero(ties.any(axis=1))
    if len(unsorted_queries):
        order = np.lexsort((rows[unsorted_queries], -scores[unsorted_queries]), axis=1)
        sorted_scores[unsorted_queries] = np.take_along_axis(scores[unsorted_queries], order, 1)
        sorted_rows[unsorted_queries] = np.take_along_axis(rows[unsorted_queries], order, 1)
    return pad_hits(Hits(sorted_scores[:, :k], sorted_rows[:, :k]), k)


def without_rows(hits: Hits, rows: np.ndarray) -> Hits:
    """Returns hits without some rows (int64, ascending): later hits move up, the ends have scores -inf and rows -1."""
    if not len(rows):
        return hits
    is_left_out = rows[np.minimum(np.searchsorted(rows, hits.rows), len(rows) - 1)] == hits.rows
    if not is_left_out.any():
        return hits
    order = np.argsort(is_left_out, axis=1, kind="stable")
    scores = np.where(is_left_out, np.float32(-np.inf), hits.scores)
    kept_rows = np.where(is_left_out, -1, hits.rows)
    return Hits(np.take_along_axis(scores, order, 1), np.take_along_axis(kept_rows, order, 1))


def pad_hits(hits: Hits, k: int) -> Hits:
    """Returns C-contiguous hits padded to at least k columns, with scores -inf and rows -1."""
    missing = k - hits.scores.shape[1]
    if missing <= 0:
        return Hits(np.ascontiguousarray(hits.scores), np.ascontiguousarray(hits.rows))
    widths = ((0, 0), (0, missing))
    return Hits(np.pad(hits.scores, widths, constant_values=-np.inf), np.pad(hits.rows, widths, constant_values=-1))


def available_threads() -> int:
    """Returns the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_queries(queries: np.ndarray) -> np.ndarray:
    """Checks queries, and returns them as C-contiguous float32 [q, dim].

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
