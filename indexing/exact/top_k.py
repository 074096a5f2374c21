"""Exact top-k search by inner product over parts of vectors, and exact re-scoring of given candidates.

A fast pass multiplies in low precision and drops a passage only if a proven bound on its rounding error says that it
cannot belong to the top k; the remaining passages are scored again in float64 and rounded to float32. So the result is
exact, with the same bytes for any split into parts, block size and number of threads. (Between the kernel and torch
the float64 sums differ in order: one score in some hundred million may round to the other neighbour.)

The bound, for a query q and a passage p with rounded copies q', p' (Cauchy-Schwarz, then float32 accumulation):
    |q.p - q'.p'| <= |q - q'| |p| + |q'| |p - p'| + dim 2^-23 |q'| |p'|
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.exact import kernel as kernels
from riptide.indexing.exact.arrays import (
    Hits,
    VectorFile,
    available_threads,
    check_queries,
    check_vectors,
    merge_hits,
    pad_hits,
)

if TYPE_CHECKING:
    from riptide.indexing.exact.torch_pass import Block, TorchSearch


CANDIDATES = 1 << 20  # maximum candidates scored in one call; their rows take 8 MiB, and a few other arrays as much
PARTS_AT_ONCE = 1 << 19  # maximum (query, part) pairs whose candidates are located at once; they take 8 MiB
_PAIRS = 16_384  # minimum (query, candidate) pairs per thread of the kernel; pairs that torch scores at once


class OpenPart:
    """A part of vectors [n, dim] that is converted once and searched many times.

    In addition to `vectors`, they take 3 bytes per value with a multiple of 32 columns: 2 for many queries and 1 for a
    few (4 without the kernel, and 2 with it on a CPU without AVX2).

    Args:
        vectors: float16 or float32 [n, dim], as for `ExactSearch.add`.
        first_row: Global row of the first vector.
        deleted: Sorted int64 global rows that are excluded.

    Raises:
        InputError: As `ExactSearch.add`. Vectors that are not finite may be detected only by the search.
    """

    def __init__(self, vectors: np.ndarray, first_row: int, deleted: np.ndarray | None = None):
        if vectors.ndim != 2 or vectors.shape[1] < 1:
            raise InputError(f"vectors from row {first_row} have shape {vectors.shape}, expected [n, dim]")
        self.vectors, self.first_row = check_vectors(vectors, vectors.shape[1], first_row), first_row
        self.deleted = _deleted_rows_within(deleted, first_row, len(vectors))
        library = kernels.load_kernel() if len(vectors) else None
        self.converted = (
            None if library is None else kernels.ConvertedVectors(library, self.vectors, first_row, self.deleted)
        )
        self.blocks: list[Block] = []
        if library is None and len(vectors):
            from riptide.indexing.exact.torch_pass import make_blocks

            self.blocks = list(make_blocks(self.vectors, first_row, self.deleted))


class ExactSearch:
    """Finds the exact top k over all added parts, which may come in any order. Unusable after an error.

    Args:
        queries: float32 [q, dim].
        k: Number of hits per query, at least 1.
        threads: CPU threads; None: all that this process may use.
        device: "cpu" or a CUDA device.
        use_kernel: Use the compiled kernel if it runs on this machine; otherwise torch.
    """

    def __init__(
        self, queries: np.ndarray, k: int, *, threads: int | None = None, device: str = "cpu", use_kernel: bool = True
    ):
        queries = check_queries(queries)
        if k < 1:
            raise InputError(f"k is {k}, expected 1 or more")
        self.dim, self.k = queries.shape[1], k
        threads = threads or available_threads()
        library = kernels.load_kernel() if use_kernel and device == "cpu" and len(queries) else None
        self._kernel: kernels.KernelSearch | None = None
        self._torch: TorchSearch | None = None
        if library is not None:
            self._kernel = kernels.KernelSearch(library, queries, k, threads)
        else:
            from riptide.indexing.exact.torch_pass import TorchSearch

            self._torch = TorchSearch(queries, k, threads, device)

    @property
    def _engine(self) -> kernels.KernelSearch | TorchSearch:
        engine = self._kernel or self._torch
        assert engine is not None
        return engine

    def add(self, vectors: np.ndarray, first_row: int, deleted: np.ndarray | None = None) -> None:
        """Searches a part and keeps its best hits. No row may be added twice.

        Args:
            vectors: float16 (memory maps are accepted) or float32 [n, dim].
            first_row: Global row of the first vector; the others follow it.
            deleted: Sorted int64 global rows that are excluded; rows outside of this part are ignored.

        Raises:
            InputError: For another dim or dtype, and for NaN, Inf and norms above 1e15.
        """
        vectors = check_vectors(vectors, self.dim, first_row)
        if len(vectors):
            self._engine.add(vectors, first_row, _deleted_rows_within(deleted, first_row, len(vectors)))

    def add_open_part(self, part: OpenPart) -> None:
        """Searches an open part, as `add` does."""
        if part.vectors.shape[1] != self.dim:
            raise InputError(
                f"vectors from row {part.first_row} have {part.vectors.shape[1]} columns, expected {self.dim}"
            )
        if part.converted is not None and self._kernel is not None:
            self._kernel.add_converted(part.converted)
        elif part.blocks and self._torch is not None:
            self._torch.add_blocks(part.blocks)
        elif len(part.vectors):
            self._engine.add(part.vectors, part.first_row, part.deleted)

    def result(self) -> Hits:
        """Returns the top k of all parts added so far; further parts may be added afterwards."""
        return merge_hits([Hits(*hits) for hits in self._engine.partial_hits()], self.k)


def exact_search(
    queries: np.ndarray,
    parts: Iterable[tuple[int, np.ndarray]],
    k: int,
    *,
    deleted: np.ndarray | None = None,
    threads: int | None = None,
    device: str = "cpu",
    use_kernel: bool = True,
) -> Hits:
    """Returns the exact top k of float32 queries [q, dim] over parts (first row, vectors [n, dim]); see ExactSearch."""
    search = ExactSearch(queries, k, threads=threads, device=device, use_kernel=use_kernel)
    for first_row, vectors in parts:
        search.add(vectors, first_row, deleted)
    return search.result()


def search_open_parts(queries: np.ndarray, parts: Iterable[OpenPart], k: int, *, threads: int | None = None) -> Hits:
    """Returns the exact top k of float32 queries [q, dim] over open parts; see ExactSearch."""
    search = ExactSearch(queries, k, threads=threads)
    for part in parts:
        search.add_open_part(part)
    return search.result()


def _deleted_rows_within(deleted: np.ndarray | None, first_row: int, count: int) -> np.ndarray:
    """Returns the deleted rows within [first_row, first_row + count), relative to `first_row`: int64, ascending."""
    if deleted is None or not len(deleted):
        return np.empty(0, np.int64)
    deleted = np.asarray(deleted, dtype=np.int64)
    low, high = np.searchsorted(deleted, [first_row, first_row + count])
    return deleted[low:high] - first_row


def rescore_candidates(
    queries: np.ndarray,
    rows: np.ndarray,
    parts: Sequence[tuple[int, np.ndarray | VectorFile]],
    k: int,
    threads: int | None = None,
    *,
    use_kernel: bool = True,
) -> Hits:
    """Scores the candidates of each query exactly, and returns the top k.

    Scores are float64 sums, rounded to float32, as those of `ExactSearch`. Each candidate is scored once, in its part:
    time and memory are those of the candidates, for any number of parts.

    Args:
        queries: float32 [q, dim].
        rows: Candidates of each query, int64 [q, c], global rows, -1 for none. Repeated rows count once.
        parts: Disjoint parts in the order of their rows: first row, vectors [n, dim], float16 or float32. Those of a
            VectorFile are read if they are candidates.
        k: Number of hits per query.
        threads: CPU threads; None: all that this process may use.
        use_kernel: Use the compiled kernel if it runs on this machine.

    Raises:
        InputError: For a row outside of the parts, and for vectors that are not finite.
    """
    queries = check_queries(queries)
    parts = [(first, vectors) for first, vectors in parts if len(vectors)]
    rows = np.maximum(np.asarray(rows, dtype=np.int64), -1)
    if rows.ndim != 2 or len(rows) != len(queries):
        raise InputError(f"candidate rows have shape {rows.shape}, expected [{len(queries)}, c]")
    rows.sort(axis=1)
    repeated = (rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] >= 0)
    if repeated.any():
        rows[:, 1:][repeated] = -1
        rows.sort(axis=1)
    edges = np.array([(first, first + len(vectors)) for first, vectors in parts], np.int64).reshape(-1, 2)
    scores = np.full(rows.shape, -np.inf, np.float32)
    score = _pair_scorer(queries, threads or available_threads(), use_kernel)
    num_located = 0
    step = max(1, PARTS_AT_ONCE // max(1, len(rows)))
    for block in range(0, len(parts), step):
        # int64 [q, parts, 2]: the columns at which the candidates of a part begin and end, since rows are ascending.
        columns = np.array([np.searchsorted(mine, edges[block : block + step]) for mine in rows], np.int64)
        counts = (columns[..., 1] - columns[..., 0]).sum(axis=0) if len(rows) else np.empty(0, np.int64)
        num_located += int(counts.sum())
        for number in np.flatnonzero(counts):
            first, vectors = parts[block + number]
            needed = None  # the rows of `array`, if it has not all of them
            if isinstance(vectors, np.ndarray):
                array = vectors
            elif (whole := vectors.open_local()) is not None:
                array = whole
            else:
                groups = _candidates_in_part(rows, columns[:, number], first)
                needed = np.unique(np.concatenate([local[inside] for _, _, inside, local in groups]))
                array = vectors.read_rows(needed)
            array = check_vectors(array, queries.shape[1], first)
            for query_ids, here, inside, local in _candidates_in_part(rows, columns[:, number], first):
                if needed is not None:
                    local[inside] = np.searchsorted(needed, local[inside])
                group_scores = score(query_ids, local, array)
                scores[np.broadcast_to(query_ids[:, None], here.shape)[inside], here[inside]] = group_scores[inside]
    if num_located != np.count_nonzero(rows >= 0):
        expected = f"{edges.min()} to {edges.max() - 1}" if len(edges) else "none"
        raise InputError(f"candidate rows reach from {rows[rows >= 0].min()} to {rows.max()}, expected {expected}")
    if not np.isfinite(scores[rows >= 0]).all():
        raise InputError("a candidate's vector has NaN or Inf: encode it again")
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]  # stable, so that ties stay in ascending row order
    return pad_hits(Hits(np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)), k)


def _candidates_in_part(
    rows: np.ndarray, columns: np.ndarray, first: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Yields groups of queries with candidates in a part, which begins with the row `first`.

    Args:
        rows: Candidates of each query, int64 [q, c], ascending.
        columns: The columns at which the candidates of the part begin and end, int64 [q, 2].
        first: The first row of the part.

    Yields:
        Query ids, int64 [n]; then three [n, m] arrays: the columns of the candidates, which of them are candidates of
        the part, and their rows within the part, -1 for others.
    """
    for query_ids, starts, ends in _group_by_num_candidates(*columns.T):
        here = starts[:, None] + np.arange((ends - starts).max())
        inside = here < ends[:, None]
        here = np.minimum(here, rows.shape[1] - 1)
        yield query_ids, here, inside, np.where(inside, rows[query_ids[:, None], here] - first, -1)


def _group_by_num_candidates(
    starts: np.ndarray, ends: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields groups of queries with similar numbers of candidates, as (query ids, starts, ends).

    The numbers ends - starts of a group are between two powers of two, so a padded array has less than twice as many
    cells as candidates. Queries without candidates are left out, and large groups are cut.

    Args:
        starts, ends: The columns at which the candidates of each query begin and end, int64 [q].
    """
    _, size = np.frexp(ends - starts)
    for exponent in np.unique(size[size > 0]):
        same = np.flatnonzero(size == exponent)
        step = max(1, CANDIDATES >> int(exponent))
        for i in range(0, len(same), step):
            query_ids = same[i : i + step]
            yield query_ids, starts[query_ids], ends[query_ids]


def _pair_scorer(
    queries: np.ndarray, threads: int, use_kernel: bool
) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """Returns a function score(query ids [n], local rows int64 [n, c], vectors) -> float32 [n, c]; -inf for row -1."""
    library = kernels.load_kernel() if use_kernel else None
    if library is not None:
        return lambda query_ids, local, vectors: kernels.score_pairs(
            library, queries[query_ids], local, vectors, max(1, min(threads, len(local), local.size // _PAIRS))
        )
    import torch

    from riptide.indexing.exact.torch_pass import score_pairs

    double = torch.from_numpy(queries.astype(np.float64))

    def score(query_ids: np.ndarray, local: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        scores = np.full(local.shape, -np.inf, np.float32)
        pairs = np.nonzero(local >= 0)
        for i in range(0, len(pairs[0]), _PAIRS):
            some = pairs[0][i : i + _PAIRS], pairs[1][i : i + _PAIRS]
            taken = torch.from_numpy(vectors[local[some]])  # a copy, as torch warns about read-only maps
            query = torch.from_numpy(query_ids[some[0]])
            scores[some] = score_pairs(double, query, taken, torch.arange(len(taken))).numpy()
        return scores

    return score
