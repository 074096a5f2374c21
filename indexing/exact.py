"""Exact top-k inner-product search over plain arrays: blocks of embeddings stream past a large block of queries.

A fast pass multiplies in low precision and drops a passage only when a proven bound on its rounding error says that
it cannot belong to the top k; what is left is scored again in float64 and rounded to float32. So the result is exact,
the same bytes for any split into parts, block size and number of threads. (Between the kernel and torch the float64
sums differ in order: one score in some hundred million may round to the other neighbour.)

The bound, for a query q and a passage p with rounded copies q', p' (Cauchy-Schwarz, then float32 accumulation):
    |q.p - q'.p'| <= |q - q'| |p| + |q'| |p - p'| + dim 2^-23 |q'| |p'|
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from indexing import kernel as kernels
from retriever.errors import InputError

LARGEST = 1e15  # of a vector's norm: products of two, and sums of them, stay finite in float32
TINY = 1e-30  # covers products that underflow, which no relative bound does
PAIR_ELEMENTS = 1 << 18  # (query, passage) pairs times dim that are scored at once: 2 MiB of float64, in a cache
CANDIDATES = 1 << 20  # that rescore_pieces hands over at once: 8 MiB of rows, and a few arrays like it


class Hits(NamedTuple):
    """The best passages of each query: scores descending, equal scores by smaller row, padded with -inf and -1."""

    scores: np.ndarray  # float32 [q, k]
    rows: np.ndarray  # int64 [q, k]


def nothing(queries: int, k: int) -> Hits:
    """No hits."""
    return Hits(np.full((queries, k), -np.inf, np.float32), np.full((queries, k), -1, np.int64))


class OpenPart:
    """Vectors [n, dim] that are searched again and again, as `ExactSearch.add` takes them: converted once.

    Takes as much memory as they do in float16 of a multiple of 32 columns, beside them (without the kernel twice that).
    Raises as `add` does, but for vectors that are not finite, which may be found by the search.
    """

    def __init__(self, vectors: np.ndarray, first_row: int, deleted: np.ndarray | None = None):
        if vectors.ndim != 2 or vectors.shape[1] < 1:
            raise InputError(f"vectors from row {first_row} have shape {vectors.shape}, expected [n, dim]")
        self.vectors, self.first_row = check_vectors(vectors, vectors.shape[1], first_row), first_row
        self.deleted = _local(deleted, first_row, len(vectors))
        library = kernels.load() if len(vectors) else None
        self.converted = None if library is None else kernels.Converted(library, self.vectors, first_row, self.deleted)
        self.blocks = list(_blocks(self.vectors, first_row, self.deleted)) if library is None else []


class ExactSearch:
    """The exact top k over all parts that are added, in any order.

    queries: float32 [q, dim]. threads: of the CPU, by default all that this process may use. device: "cpu" or a CUDA
    device. use_kernel=False keeps to torch where the compiled kernel would run. Not to be used again after an error.
    """

    def __init__(
        self, queries: np.ndarray, k: int, *, threads: int | None = None, device: str = "cpu", use_kernel: bool = True
    ):
        queries = check_queries(queries)
        if k < 1:
            raise InputError(f"k is {k}, expected 1 or more")
        self.dim, self.k = queries.shape[1], k
        threads = threads or available_threads()
        library = kernels.load() if use_kernel and device == "cpu" and len(queries) else None
        self._engine: kernels.KernelSearch | _TorchSearch
        if library is not None:
            self._engine = kernels.KernelSearch(library, queries, k, threads)
        else:
            self._engine = _TorchSearch(queries, k, threads, device)

    def add(self, vectors: np.ndarray, first_row: int, deleted: np.ndarray | None = None) -> None:
        """Search vectors [n, dim], float16 (a memory map will do) or float32, rows first_row, first_row + 1, …

        deleted: sorted int64 global rows to leave out; those outside of this part are ignored. No row may come twice.
        Raises InputError for another dim or dtype, and for NaN, Inf and norms above 1e15.
        """
        vectors = check_vectors(vectors, self.dim, first_row)
        if len(vectors):
            self._engine.add(vectors, first_row, _local(deleted, first_row, len(vectors)))

    def add_open(self, part: OpenPart) -> None:
        """Search a part that was opened before; see `add`."""
        if part.vectors.shape[1] != self.dim:
            raise InputError(f"vectors from row {part.first_row} have {part.vectors.shape[1]} columns, not {self.dim}")
        if part.converted is not None and isinstance(self._engine, kernels.KernelSearch):
            self._engine.add_converted(part.converted)
        elif part.blocks and isinstance(self._engine, _TorchSearch):
            self._engine.add_blocks(part.blocks)
        elif len(part.vectors):
            self._engine.add(part.vectors, part.first_row, part.deleted)

    def result(self) -> Hits:
        """The top k of all that was added so far; more may be added afterwards."""
        return merge([Hits(*hits) for hits in self._engine.result()], self.k)


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
    """The exact top k of float32 queries [q, dim] over parts (first row, vectors [n, dim]); see ExactSearch."""
    search = ExactSearch(queries, k, threads=threads, device=device, use_kernel=use_kernel)
    for first_row, vectors in parts:
        search.add(vectors, first_row, deleted)
    return search.result()


def search_open(queries: np.ndarray, parts: Iterable[OpenPart], k: int) -> Hits:
    """`exact_search` over parts that were opened before, by one thread; of a few dozen queries."""
    search = ExactSearch(queries, k, threads=1)
    for part in parts:
        search.add_open(part)
    return search.result()


def rescore(
    queries: np.ndarray,
    rows: np.ndarray,
    vectors: np.ndarray,
    first_row: int,
    k: int,
    *,
    threads: int | None = None,
    use_kernel: bool = True,
) -> Hits:
    """rescore_pieces of one piece."""
    return rescore_pieces(queries, rows, [(first_row, vectors)], k, threads, use_kernel=use_kernel)


def rescore_pieces(
    queries: np.ndarray,
    rows: np.ndarray,
    pieces: Sequence[tuple[int, np.ndarray]],
    k: int,
    threads: int | None = None,
    *,
    use_kernel: bool = True,
) -> Hits:
    """The best k of each query's candidates, scored like ExactSearch does.

    queries float32 [q, dim]; rows int64 [q, c], global, -1 for none, repeated ones count once; pieces: disjoint
    (first row, vectors [n, dim], float16 or float32, a memory map will do). InputError for a row outside of them.
    Each candidate is scored once, in its piece: time and memory are those of the candidates, however many the pieces.
    """
    queries = check_queries(queries)
    pieces = [(first, check_vectors(vectors, queries.shape[1], first)) for first, vectors in pieces if len(vectors)]
    rows = np.maximum(np.asarray(rows, dtype=np.int64), -1)
    if rows.ndim != 2 or len(rows) != len(queries):
        raise InputError(f"candidate rows have shape {rows.shape}, expected [{len(queries)}, c]")
    rows.sort(axis=1)
    repeated = (rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] >= 0)
    if repeated.any():
        rows[:, 1:][repeated] = -1
        rows.sort(axis=1)
    edges = np.array([(first, first + len(vectors)) for first, vectors in pieces], np.int64).reshape(-1, 2)
    # int64 [q, pieces, 2]: the columns in which a piece's candidates begin and end, as a query's rows ascend.
    columns = np.array([np.searchsorted(mine, edges) for mine in rows], np.int64).reshape(len(rows), len(pieces), 2)
    if (columns[..., 1] - columns[..., 0]).sum() != np.count_nonzero(rows >= 0):
        expected = f"{edges.min()} to {edges.max() - 1}" if len(edges) else "none"
        raise InputError(f"candidate rows reach from {rows[rows >= 0].min()} to {rows.max()}, expected {expected}")
    scores = np.full(rows.shape, -np.inf, np.float32)
    score = _pair_scorer(queries, threads or available_threads(), use_kernel)
    for number, (first, vectors) in enumerate(pieces):
        for query_ids, low, high in _alike(columns[:, number, 0], columns[:, number, 1]):
            here = low[:, None] + np.arange((high - low).max())
            inside = here < high[:, None]
            here = np.minimum(here, rows.shape[1] - 1)
            found = score(query_ids, np.where(inside, rows[query_ids[:, None], here] - first, -1), vectors)
            scores[np.broadcast_to(query_ids[:, None], here.shape)[inside], here[inside]] = found[inside]
    if not np.isfinite(scores[rows >= 0]).all():
        raise InputError("a candidate's vector has NaN or Inf: encode it again")
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]  # stable: equal scores stay ordered by row
    return _padded(Hits(np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)), k)


def merge(hits: Sequence[Hits], k: int) -> Hits:
    """The best k of hits over disjoint sets of rows, for the same queries: score descending, then row ascending."""
    if not hits:
        raise ValueError("nothing to merge")
    if len(hits) == 1:
        return _padded(Hits(hits[0].scores[:, :k], hits[0].rows[:, :k]), k)
    scores = np.concatenate([h.scores for h in hits], axis=1)
    rows = np.concatenate([h.rows for h in hits], axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")
    sorted_scores, sorted_rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
    # A stable sort leaves ties in the order of the lists, mostly that of rows already: others pay for a second key.
    ties = (sorted_scores[:, 1:] == sorted_scores[:, :-1]) & (sorted_rows[:, 1:] < sorted_rows[:, :-1])
    mixed = np.flatnonzero(ties.any(axis=1))
    if len(mixed):
        order = np.lexsort((rows[mixed], -scores[mixed]), axis=1)
        sorted_scores[mixed] = np.take_along_axis(scores[mixed], order, 1)
        sorted_rows[mixed] = np.take_along_axis(rows[mixed], order, 1)
    return _padded(Hits(sorted_scores[:, :k], sorted_rows[:, :k]), k)


def _local(deleted: np.ndarray | None, first_row: int, count: int) -> np.ndarray:
    """Those of sorted global rows that are among `count` from `first_row` on, int64, counted from there."""
    if deleted is None or not len(deleted):
        return np.empty(0, np.int64)
    deleted = np.asarray(deleted, dtype=np.int64)
    low, high = np.searchsorted(deleted, [first_row, first_row + count])
    return deleted[low:high] - first_row


def available_threads() -> int:
    """The processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_queries(queries: np.ndarray) -> np.ndarray:
    """queries as contiguous float32 [q, dim], or an InputError: another shape, NaN, Inf, a norm above 1e15."""
    queries = np.ascontiguousarray(queries, dtype=np.float32)
    if queries.ndim != 2 or queries.shape[1] < 1:
        raise InputError(f"queries have shape {queries.shape}, expected [q, dim]")
    norms = np.linalg.norm(queries.astype(np.float64), axis=1)
    bad = np.flatnonzero(~(norms <= LARGEST))
    if len(bad):
        raise InputError(f"query {bad[0]} has norm {norms[bad[0]]}, expected a finite one of at most {LARGEST:g}")
    return queries


def check_vectors(vectors: np.ndarray, dim: int, first_row: int) -> np.ndarray:
    """vectors [n, dim], their rows contiguous, or an InputError that names the part by its first row."""
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise InputError(f"vectors from row {first_row} have shape {vectors.shape}, expected [n, {dim}] as the queries")
    if vectors.dtype not in (np.float16, np.float32):
        raise InputError(f"vectors from row {first_row} are {vectors.dtype}, expected float16 or float32")
    return vectors if vectors.flags.c_contiguous else np.ascontiguousarray(vectors)


def _padded(hits: Hits, k: int) -> Hits:
    missing = k - hits.scores.shape[1]
    if missing <= 0:
        return Hits(np.ascontiguousarray(hits.scores), np.ascontiguousarray(hits.rows))
    widths = ((0, 0), (0, missing))
    return Hits(np.pad(hits.scores, widths, constant_values=-np.inf), np.pad(hits.rows, widths, constant_values=-1))


def _score_pairs(queries: np.ndarray, query_ids: np.ndarray, vectors: np.ndarray, local: np.ndarray) -> np.ndarray:
    """float32 [n]: inner products of float64 queries[query_ids] and vectors[local], summed in float64."""
    scores = np.empty(len(local), np.float32)
    step = max(1, PAIR_ELEMENTS // queries.shape[1])
    for i in range(0, len(local), step):
        pair = slice(i, i + step)
        scores[pair] = np.einsum("nd,nd->n", queries[query_ids[pair]], _widened(vectors[local[pair]], torch.float64))
    return scores


def _widened(vectors: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The same numbers in a wider type. By torch: numpy takes float16 one number after the other."""
    found: np.ndarray = torch.from_numpy(vectors).to(dtype).numpy()
    return found


def _alike(low: np.ndarray, high: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(query ids, low, high) in groups of queries whose counts high - low share a power of two: a padded array of a
    group is then less than twice its candidates. Queries without any are left out, large groups are cut."""
    _, size = np.frexp(high - low)
    for exponent in np.unique(size[size > 0]):
        same = np.flatnonzero(size == exponent)
        step = max(1, CANDIDATES >> int(exponent))
        for i in range(0, len(same), step):
            query_ids = same[i : i + step]
            yield query_ids, low[query_ids], high[query_ids]


_PAIRS = 16_384  # of a query and a passage, for which a thread of their own pays


def _pair_scorer(
    queries: np.ndarray, threads: int, use_kernel: bool
) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """score(query ids [n], local rows int64 [n, c], vectors): float32 [n, c], -inf where a row is -1."""
    library = kernels.load() if use_kernel else None
    if library is not None:
        return lambda query_ids, local, vectors: kernels.score_pairs(
            library, queries[query_ids], local, vectors, max(1, min(threads, len(local), local.size // _PAIRS))
        )
    double = queries.astype(np.float64)

    def score(query_ids: np.ndarray, local: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        scores = np.full(local.shape, -np.inf, np.float32)
        found = np.nonzero(local >= 0)
        scores[found] = _score_pairs(double, query_ids[found[0]], vectors, local[found])
        return scores

    return score


class _Block(NamedTuple):
    """Rows that are not deleted: vectors [n, dim] (float32; for CUDA as they came), rows int64 [n], largest norm."""

    vectors: np.ndarray
    rows: np.ndarray
    norm: float


def _blocks(vectors: np.ndarray, first_row: int, deleted: np.ndarray, half: bool = False) -> Iterator[_Block]:
    """Of a size that a product is quick for. deleted: int64, of `vectors`. half: for CUDA.

    Raises InputError for NaN, Inf and norms above 1e15.
    """
    size = 65_536 if half else 8_192
    for start in range(0, len(vectors), size):
        rows = np.arange(start, min(start + size, len(vectors)))
        taken = np.array(vectors[start : start + size])
        live = np.setdiff1d(rows, deleted, assume_unique=True)
        if not len(live):
            continue
        if len(live) < len(rows):
            taken = taken[live - start]
        wide = _widened(taken, torch.float32)
        norms = np.linalg.norm(wide, axis=1).astype(np.float64)
        bad = live[~(norms <= LARGEST)]
        if len(bad):
            raise InputError(
                f"the vector of row {first_row + bad[0]} has NaN, Inf or a norm above 1e15: encode it again"
            )
        yield _Block(taken if half else wide, first_row + live, float(norms.max()))


class _TorchSearch:
    """The same search without the kernel: float32 products on the CPU, float16 (exact for the passages) on CUDA."""

    def __init__(self, queries: np.ndarray, k: int, threads: int, device: str):
        self.k, self.threads, self.device = k, threads, torch.device(device)
        self.queries = queries.astype(np.float64)
        # A power of two leaves the products' digits alone and keeps float16 queries from overflowing.
        largest = np.abs(queries).max(axis=1, initial=0)
        self.scale = np.ldexp(1.0, -np.frexp(np.where(largest > 0, largest, 1))[1])
        scaled: np.ndarray = self.queries * self.scale[:, None]
        self.half = self.device.type == "cuda"
        rounded: np.ndarray = scaled.astype(np.float16 if self.half else np.float32)
        norms = np.linalg.norm(scaled, axis=1)
        # Per unit of a passage's norm; the last term also covers the rounding of float32 thresholds and of the norms.
        self.slack = np.linalg.norm(scaled - rounded, axis=1) + norms * (queries.shape[1] + 16) * 2.0**-23
        self.rounded = torch.from_numpy(rounded).to(self.device)
        self.scores = np.full((len(queries), k), -np.inf, np.float32)
        self.rows = np.full((len(queries), k), -1, np.int64)

    def add(self, vectors: np.ndarray, first_row: int, deleted: np.ndarray) -> None:
        self.add_blocks(_blocks(vectors, first_row, deleted, self.half))

    def add_blocks(self, blocks: Iterable[_Block]) -> None:
        step = 4_096 if self.half else 1_024
        threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision("highest")  # a user's "medium" would break the bound
        try:
            for block in blocks:
                for q in range(0, len(self.queries), step):
                    self._search(slice(q, q + step), block)
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)

    def _search(self, q: slice, block: _Block) -> None:
        fast = self._multiply(self.rounded[q], torch.from_numpy(block.vectors).to(self.device))
        error = self.slack[q] * block.norm * 1.001 + TINY
        threshold = self.scores[q, -1] * self.scale[q]
        if np.isneginf(threshold).any() and len(block.rows) >= self.k:
            best = torch.topk(fast, self.k, dim=1, sorted=True).values[:, -1]
            threshold = np.maximum(threshold, best.cpu().numpy().astype(np.float64) - error)
        # In float32, below itself: beside float64 torch would widen every product.
        cut = np.nextafter((threshold - error).astype(np.float32), np.float32(-np.inf))
        taken = fast >= torch.from_numpy(cut[:, None]).to(self.device)
        query_ids, positions = (i.cpu().numpy() for i in torch.nonzero(taken, as_tuple=True))
        scores = _score_pairs(self.queries[q], query_ids, block.vectors, positions)
        self._keep(q, query_ids, scores, block.rows[positions])

    def _multiply(self, queries: torch.Tensor, passages: torch.Tensor) -> torch.Tensor:
        if self.half and passages.dtype == torch.float16:
            return torch.mm(queries, passages.T, out_dtype=torch.float32)
        return queries.float() @ passages.float().T

    def _keep(self, q: slice, query_ids: np.ndarray, scores: np.ndarray, rows: np.ndarray) -> None:
        old = np.nonzero(self.rows[q] >= 0)
        in_order = not len(old[0]) or (len(rows) and rows.min() > self.rows[q][old].max())
        query_ids = np.concatenate([old[0], query_ids])
        scores = np.concatenate([self.scores[q][old], scores])
        rows = np.concatenate([self.rows[q][old], rows])
        bits = scores.view(np.int32).astype(np.int64)
        key = (query_ids << 32) + (1 << 31) - np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # by query, best first
        order = np.argsort(key, kind="stable") if in_order else np.lexsort((rows, key))
        query_ids = query_ids[order]
        rank = np.arange(len(order)) - np.searchsorted(query_ids, query_ids)
        best = rank < self.k
        self.scores[q][query_ids[best], rank[best]] = scores[order][best]
        self.rows[q][query_ids[best], rank[best]] = rows[order][best]

    def result(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(self.scores.copy(), self.rows.copy())]
