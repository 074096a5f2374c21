"""Exact top-k search: parts of vectors stream past a large block of queries.

A fast pass multiplies in low precision and drops a passage only if a proven bound on its rounding error says that it
cannot belong to the top k; the remaining passages are scored again in float64 and rounded to float32. So the result is
exact, with the same bytes for any split into parts, block size and number of threads. (Between the kernel and torch
the float64 sums differ in order: one score in some hundred million may round to the other neighbour.)

The bound, for a query q and a passage p with rounded copies q', p' (Cauchy-Schwarz, then float32 accumulation):
    |q.p - q'.p'| <= |q - q'| |p| + |q'| |p - p'| + dim 2^-23 |q'| |p'|
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.exact import kernel as kernels
from riptide.indexing.exact.arrays import Hits, available_threads, check_queries, check_vectors, merge_hits

if TYPE_CHECKING:
    from riptide.indexing.exact.torch_pass import Block, TorchSearch


class OpenPart:
    """Vectors [n, dim] that are converted once and searched many times.

    They take as much memory as in float16 with a multiple of 32 columns, in addition to `vectors` (without the kernel
    twice as much).

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
    """The exact top k over all parts that are added, in any order. Not to be used again after an error.

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
        """Searches a part. No row may be added twice.

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
        """Searches a part that was opened before; see `add`."""
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
        """Returns the top k of all parts that were added so far; more may be added afterwards."""
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


def search_open_parts(queries: np.ndarray, parts: Iterable[OpenPart], k: int) -> Hits:
    """Returns `exact_search` over parts that were opened before, by one thread; for up to a few dozen queries."""
    search = ExactSearch(queries, k, threads=1)
    for part in parts:
        search.add_open_part(part)
    return search.result()


def _deleted_rows_within(deleted: np.ndarray | None, first_row: int, count: int) -> np.ndarray:
    """Returns the sorted global rows that are among `count` rows from `first_row` on, int64, counted from there."""
    if deleted is None or not len(deleted):
        return np.empty(0, np.int64)
    deleted = np.asarray(deleted, dtype=np.int64)
    low, high = np.searchsorted(deleted, [first_row, first_row + count])
    return deleted[low:high] - first_row
