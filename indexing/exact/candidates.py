"""Scores given candidates of each query exactly: float64 sums, rounded to float32, as `ExactSearch` scores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.exact import kernel as kernels
from riptide.indexing.exact.arrays import Hits, available_threads, check_queries, check_vectors, pad_hits

CANDIDATES = 1 << 20  # candidates that are scored in one call: 8 MiB of rows, and a few arrays of that size
_PAIRS = 16_384  # pairs of a query and a candidate that a thread scores at once; fewer are scored sooner by one thread


def rescore_candidates(
    queries: np.ndarray,
    rows: np.ndarray,
    parts: Sequence[tuple[int, np.ndarray]],
    k: int,
    threads: int | None = None,
    *,
    use_kernel: bool = True,
) -> Hits:
    """Returns the best k of each query's candidates.

    Each candidate is scored once, in its part: time and memory are those of the candidates, for any number of parts.

    Args:
        queries: float32 [q, dim].
        rows: Candidates of each query, int64 [q, c], global rows, -1 for none. Repeated rows count once.
        parts: Disjoint parts: first row, vectors [n, dim], float16 or float32 (memory maps are accepted).
        k: Number of hits per query.
        threads: CPU threads; None: all that this process may use.
        use_kernel: Use the compiled kernel if it runs on this machine.

    Raises:
        InputError: For a row outside of the parts, and for vectors that are not finite.
    """
    queries = check_queries(queries)
    parts = [(first, check_vectors(vectors, queries.shape[1], first)) for first, vectors in parts if len(vectors)]
    rows = np.maximum(np.asarray(rows, dtype=np.int64), -1)
    if rows.ndim != 2 or len(rows) != len(queries):
        raise InputError(f"candidate rows have shape {rows.shape}, expected [{len(queries)}, c]")
    rows.sort(axis=1)
    repeated = (rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] >= 0)
    if repeated.any():
        rows[:, 1:][repeated] = -1
        rows.sort(axis=1)
    edges = np.array([(first, first + len(vectors)) for first, vectors in parts], np.int64).reshape(-1, 2)
    # int64 [q, parts, 2]: the columns at which the candidates of a part begin and end; the rows of a query ascend.
    columns = np.array([np.searchsorted(mine, edges) for mine in rows], np.int64).reshape(len(rows), len(parts), 2)
    if (columns[..., 1] - columns[..., 0]).sum() != np.count_nonzero(rows >= 0):
        expected = f"{edges.min()} to {edges.max() - 1}" if len(edges) else "none"
        raise InputError(f"candidate rows reach from {rows[rows >= 0].min()} to {rows.max()}, expected {expected}")
    scores = np.full(rows.shape, -np.inf, np.float32)
    score = _pair_scorer(queries, threads or available_threads(), use_kernel)
    for number, (first, vectors) in enumerate(parts):
        for query_ids, starts, ends in _group_by_num_candidates(columns[:, number, 0], columns[:, number, 1]):
            here = starts[:, None] + np.arange((ends - starts).max())
            inside = here < ends[:, None]
            here = np.minimum(here, rows.shape[1] - 1)
            group_scores = score(query_ids, np.where(inside, rows[query_ids[:, None], here] - first, -1), vectors)
            scores[np.broadcast_to(query_ids[:, None], here.shape)[inside], here[inside]] = group_scores[inside]
    if not np.isfinite(scores[rows >= 0]).all():
        raise InputError("a candidate's vector has NaN or Inf: encode it again")
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]  # stable: equal scores stay ordered by row
    return pad_hits(Hits(np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)), k)


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
    """Returns score(query ids [n], local rows int64 [n, c], vectors): float32 [n, c], -inf where a row is -1."""
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
            taken = torch.from_numpy(vectors[local[some]])  # a copy: a memory map cannot be written to, as torch wants
            query = torch.from_numpy(query_ids[some[0]])
            scores[some] = score_pairs(double, query, taken, torch.arange(len(taken))).numpy()
        return scores

    return score
