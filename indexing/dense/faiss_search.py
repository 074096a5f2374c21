"""Searches FAISS indexes for candidates.

`riptide.indexing.exact` scores the candidates from the float16 embeddings, so compression costs no precision.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.corpus.row_sets import RowSet
from riptide.indexing.dense.faiss_index import faiss, inner_index, limited_threads, transforms
from riptide.indexing.exact import ExactSearch, OpenPart, available_threads
from riptide.indexing.exact import kernel as kernels
from riptide.indexing.exact.score_parts import ProbedList

# With these variables OpenMP may start fewer threads than requested, and OpenBLAS would wait for the rest forever.
_RATIONED = {"OMP_THREAD_LIMIT", "OMP_DYNAMIC"}


class Centroids:
    """The centroids of an index with lists, which are converted once; those of its shards are equal. Thread-safe."""

    def __init__(self) -> None:
        self._converted: OpenPart | None = None
        self._converting = threading.Lock()

    def search(self, quantizer: Any, queries: np.ndarray, nprobe: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the scores and numbers of the nearest lists of each query, float32 and int64 [q, nprobe].

        For up to 256 queries, the exact kernel takes an eighth of the time of FAISS, and half of it for more.
        """
        quantizer = faiss.downcast_index(quantizer)
        if not isinstance(quantizer, faiss.IndexFlat) or kernels.load_kernel() is None:
            return quantizer.search(queries, nprobe)
        with self._converting:
            if self._converted is None:
                self._converted = OpenPart(quantizer.reconstruct_n(0, quantizer.ntotal), 0)
        search = ExactSearch(queries, nprobe, threads=threads)
        search.add_open_part(self._converted)
        return search.result()

    def query_lists(self) -> QueryLists:
        """Returns an object that finds the lists of one block of queries."""
        return QueryLists(self)


class QueryLists:
    """Finds the lists that a block of queries probes, once for all shards of an index. Thread-safe."""

    def __init__(self, centroids: Centroids) -> None:
        self._centroids = centroids
        self._lists: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._finding = threading.Lock()

    def find(
        self, index: Any, queries: np.ndarray, nprobe: int, threads: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the transformed queries, float32 [q, d], and the scores and numbers of their lists [q, nprobe].

        Args:
            index: A shard with lists.
            queries: float32 [q, dim], the same block in each call.
            nprobe: Number of lists per query.
            threads: Threads of the search.
        """
        with self._finding:
            if nprobe not in self._lists:
                for transform in transforms(index):
                    queries = transform.apply(queries)
                nearest = self._centroids.search(inner_index(index).quantizer, queries, nprobe, threads)
                self._lists[nprobe] = (queries, *nearest)
            return self._lists[nprobe]


def search_shard(
    index: Any,
    queries: np.ndarray,
    depth: int,
    *,
    effort: int,
    query_lists: QueryLists | None = None,
    deleted: np.ndarray | None = None,
    allowed_rows: RowSet | None = None,
    threads: int | None = None,
) -> np.ndarray:
    """Returns the candidate rows of each query by descending approximate score: int64 [q, depth], padded with -1.

    Args:
        index: A filled shard.
        queries: float32 [q, dim].
        depth: Number of candidates per query.
        effort: Lists to probe (nprobe), or vectors that the search of a graph keeps (efSearch, raised to `depth`); a
            flat index scores all vectors.
        query_lists: The lists of these queries, shared by the searches of several shards.
        deleted: int64 rows that are excluded.
        allowed_rows: Rows that alone are considered, without deleted ones.
        threads: None: one for each core.

    Raises:
        InputError: For queries of another shape, and for a depth or effort below 1.
    """
    queries = np.ascontiguousarray(queries, dtype=np.float32)
    if queries.ndim != 2 or queries.shape[1] != index.d:
        raise InputError(f"queries have shape {queries.shape}, expected [q, {index.d}] like the index")
    if depth < 1 or effort < 1:
        raise InputError(f"depth is {depth} and effort is {effort}, expected 1 or more")
    options: dict[str, Any] = {}
    if allowed_rows is not None:
        options["sel"] = faiss.IDSelectorBitmap(allowed_rows.bitmap())
    elif deleted is not None and len(deleted):
        excluded = faiss.IDSelectorBatch(np.ascontiguousarray(deleted, dtype=np.int64))
        options["sel"] = faiss.IDSelectorNot(excluded)
    inner = inner_index(index)
    count = _search_threads(threads, index)
    with limited_threads(count):
        if isinstance(inner, faiss.IndexIVF):
            nprobe = min(effort, inner.nlist)
            lists = (query_lists or Centroids().query_lists()).find(index, queries, nprobe, count)
            return _search_lists(inner, *lists, depth, faiss.SearchParametersIVF(nprobe=nprobe, **options))
        if isinstance(inner, faiss.IndexHNSW):
            parameters = faiss.SearchParametersHNSW(efSearch=max(effort, depth), **options)
        else:
            parameters = faiss.SearchParameters(**options)
        return index.search(queries, depth, params=parameters)[1]


def _search_lists(
    inner: Any, queries: np.ndarray, scores: np.ndarray, lists: np.ndarray, depth: int, parameters: Any
) -> np.ndarray:
    """Returns the candidates in the given lists; FAISS's own `search_preassigned` takes no parameters in Python."""
    rows = np.empty((len(queries), depth), np.int64)
    unused = np.empty((len(queries), depth), np.float32)
    arrays = (queries, lists, scores, unused, rows)
    queries_at, lists_at, scores_at, unused_at, rows_at = map(faiss.swig_ptr, arrays)
    inner.search_preassigned_c(
        len(queries), queries_at, depth, lists_at, scores_at, unused_at, rows_at, False, parameters
    )
    return rows


def find_probed_lists(index: Any, query: np.ndarray, vectors: np.ndarray, nprobe: int) -> list[ProbedList | None]:
    """Returns the list of each vector, and its rank among the lists that a query probes; None: an index without lists.

    Args:
        index: A trained index, with or without vectors.
        query: float32 [dim].
        vectors: float32 [n, dim].
        nprobe: Number of lists that the query probes.
    """
    inner = inner_index(index)
    if not isinstance(inner, faiss.IndexIVF):
        return [None] * len(vectors)
    both = np.concatenate([query[None], vectors])
    for transform in transforms(index):
        both = transform.apply(both)
    count = min(nprobe, inner.nlist)
    with limited_threads(1):
        lists = inner.quantizer.search(both[1:], 1)[1][:, 0].tolist()
        probed = inner.quantizer.search(both[:1], count)[1][0].tolist()
    ranks = {number: rank for rank, number in enumerate(probed, 1)}
    return [ProbedList(number, ranks.get(number), count, inner.nlist) for number in lists]


def _search_threads(threads: int | None, index: Any) -> int:
    """Returns the number of threads of a search: `threads`, or 1 if several threads would change the scores.

    OpenBLAS splits sums over more than 320 dimensions (the number depends on the kernel): for one thread into halves
    that are multiples of its registers (16 numbers), for several threads into plain halves. Multiples of 32 are split
    alike by the kernels that `faiss_index` selects; a user may select others.
    """
    count = threads or available_threads()
    if _RATIONED & os.environ.keys() or "OPENBLAS_CORETYPE" in os.environ:
        return 1
    inner = inner_index(index)
    dims = [inner.d, *(transform.d_in for transform in transforms(index))]
    dims += [inner.pq.dsub] if hasattr(inner, "pq") else []
    return count if all(dim <= 320 or dim % 32 == 0 for dim in dims) else 1
