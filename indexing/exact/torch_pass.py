"""Exact search with torch, for CUDA devices and for machines on which the kernel cannot be compiled.

Everything but the reading of the vectors happens on the device: the fast pass, the exact scores, and the order of hits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from riptide.base.errors import InputError
from riptide.indexing.exact.arrays import MAX_NORM
from riptide.process.forks import need_threads

TINY = 1e-30  # absolute error bound for products that underflow, which relative bounds do not cover
# Elements (pairs of query and passage times dim) that are scored at once in float64: 2 MiB, which fit a CPU cache;
# 256 MiB on a GPU.
PAIR_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}
BLOCK_ROWS = {"cpu": 8_192, "cuda": 65_536}
QUERY_STEP = {"cpu": 1_024, "cuda": 4_096}
NEAREST_PRODUCTS = 1 << 22  # products of vectors and targets that are in memory at once: 16 MiB


class Block(NamedTuple):
    """Vectors of rows that are not deleted, on the device that searches them.

    Attributes:
        vectors: [n, dim], float32; on CUDA in their own dtype.
        rows: Global rows, int64 [n], ascending.
        norm: The largest norm.
    """

    vectors: torch.Tensor
    rows: torch.Tensor
    norm: float


class TorchSearch:
    """Search with the interface of `KernelSearch`: float32 products (float16 on CUDA) select candidates.

    Candidates are then scored in float64. float16 is exact for passages that are stored in it.
    """

    def __init__(self, queries: np.ndarray, k: int, threads: int, device: str):
        need_threads("the first encoding or dense search")
        self.k, self.threads, self.device = k, threads, torch.device(device)
        double = queries.astype(np.float64)
        # Scaling by a power of two is exact, and prevents overflow of float16 queries.
        largest = np.abs(queries).max(axis=1, initial=0)
        scale = np.ldexp(1.0, -np.frexp(np.where(largest > 0, largest, 1))[1])
        scaled: np.ndarray = double * scale[:, None]
        rounded: np.ndarray = scaled.astype(np.float16 if self.device.type == "cuda" else np.float32)
        norms = np.linalg.norm(scaled, axis=1)
        # Error bound per unit of a passage's norm. The last term also covers rounding of float32 thresholds and norms.
        slack = np.linalg.norm(scaled - rounded, axis=1) + norms * (queries.shape[1] + 16) * 2.0**-23
        self.queries, self.scale = self._to_device(double), self._to_device(scale)
        self.rounded, self.slack = self._to_device(rounded), self._to_device(slack)
        # Covers two of the smallest float32, scaled as the scores: scores that underflow are rounded by up to one.
        self.tiny = self._to_device(TINY + 2.0**-148 * scale)
        self.scores = torch.full((len(queries), k), -torch.inf, device=self.device)
        self.rows = torch.full((len(queries), k), -1, dtype=torch.int64, device=self.device)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def add(self, vectors: np.ndarray, first_row: int, deleted: np.ndarray) -> None:
        self.add_blocks(make_blocks(vectors, first_row, deleted, self.device))

    def add_blocks(self, blocks: Iterable[Block]) -> None:
        step = QUERY_STEP[self.device.type]
        with _exact_products(self.threads):
            for block in blocks:
                for q in range(0, len(self.queries), step):
                    self._search(slice(q, q + step), block)

    def partial_hits(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(self.scores.cpu().numpy().copy(), self.rows.cpu().numpy().copy())]

    def _search(self, q: slice, block: Block) -> None:
        fast = self._multiply(self.rounded[q], block.vectors)
        error = self.slack[q] * (block.norm * 1.001) + self.tiny[q]
        threshold = self.scores[q, -1] * self.scale[q]
        if torch.isneginf(threshold).any() and len(block.rows) >= self.k:
            kth_scores = torch.topk(fast, self.k, dim=1, sorted=True).values[:, -1]
            threshold = torch.maximum(threshold, kth_scores.double() - error)
        # Rounded down to float32, because torch would convert every product to compare it with float64.
        cut = (threshold - error).float()
        cut = torch.nextafter(cut, torch.full_like(cut, -torch.inf))
        query_ids, positions = torch.nonzero(fast >= cut[:, None], as_tuple=True)
        scores = score_pairs(self.queries[q], query_ids, block.vectors, positions)
        self._merge_into_hits(q, query_ids, scores, block.rows[positions])

    def _multiply(self, queries: torch.Tensor, passages: torch.Tensor) -> torch.Tensor:
        if queries.is_cuda and passages.dtype == torch.float16:
            return torch.mm(queries, passages.T, out_dtype=torch.float32)
        return queries.float() @ passages.float().T

    def _merge_into_hits(self, q: slice, query_ids: torch.Tensor, scores: torch.Tensor, rows: torch.Tensor) -> None:
        """Merges candidates into the hits of the queries, ordered by descending score, then ascending row."""
        kept_scores, kept_rows = self.scores[q], self.rows[q]
        old = torch.nonzero(kept_rows >= 0, as_tuple=True)
        query_ids = torch.cat([old[0], query_ids])
        scores, rows = torch.cat([kept_scores[old], scores]), torch.cat([kept_rows[old], rows])
        by_row = torch.argsort(rows, stable=True)
        bits = scores[by_row].view(torch.int32).long()
        ascending = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # integers that sort like the scores
        order = by_row[torch.argsort((query_ids[by_row] << 32) - ascending, stable=True)]
        query_ids = query_ids[order]
        rank = torch.arange(len(order), device=self.device) - torch.searchsorted(query_ids, query_ids)
        best = rank < self.k
        at = query_ids[best], rank[best]
        kept_scores[at], kept_rows[at] = scores[order][best], rows[order][best]


@contextlib.contextmanager
def _exact_products(threads: int) -> Iterator[None]:
    """Sets the number of threads of torch, and products in full float32: "medium" breaks the error bounds."""
    before, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_float32_matmul_precision(precision)


def find_nearest(vectors: np.ndarray, targets: np.ndarray, threads: int) -> np.ndarray:
    """Returns the row of the nearest target of each vector, int32 [n], as `NearestTargets.find` does."""
    need_threads("the first encoding or dense search")
    nearest = np.empty(len(vectors), np.int32)
    wide = torch.from_numpy(targets)
    # Per unit of a vector's norm; covers the float32 sums, and the rounding of scores and of the cut.
    slack = float(np.linalg.norm(targets.astype(np.float64), axis=1).max()) * (targets.shape[1] + 32) * 2.0**-23
    step = max(32, NEAREST_PRODUCTS // len(targets))
    with _exact_products(threads):
        for start in range(0, len(vectors), step):
            for block in make_blocks(vectors[start : start + step], start, np.empty(0, np.int64)):
                products = block.vectors @ wide.T
                # A target whose product is below the cut is not the nearest one.
                cut = (products.amax(dim=1).double() - 2 * (slack * block.norm + TINY)).float()
                cut = torch.nextafter(cut, torch.full_like(cut, -torch.inf))
                positions, candidates = torch.nonzero(products >= cut[:, None], as_tuple=True)
                several = torch.bincount(positions)[positions] > 1  # only these need exact scores
                scores = np.zeros(len(positions), np.float32)
                scores[several.numpy()] = score_pairs(block.vectors, positions[several], wide, candidates[several])
                order = np.lexsort((candidates.numpy(), -scores, positions.numpy()))
                _, first = np.unique(positions.numpy(), return_index=True)
                nearest[block.rows.numpy()] = candidates.numpy()[order][first]
    return nearest


def make_blocks(
    vectors: np.ndarray, first_row: int, deleted: np.ndarray, device: torch.device | None = None
) -> Iterator[Block]:
    """Yields the vectors that are not deleted in blocks whose size makes matrix products fast.

    Args:
        vectors: float16 or float32 [n, dim].
        first_row: Global row of the first vector.
        deleted: int64 rows of `vectors` that are excluded.
        device: Where the blocks are searched; None: on the CPU.

    Raises:
        InputError: For NaN, Inf and norms above 1e15.
    """
    device = device or torch.device("cpu")
    size = BLOCK_ROWS[device.type]
    for start in range(0, len(vectors), size):
        rows = np.arange(start, min(start + size, len(vectors)))
        live = np.setdiff1d(rows, deleted, assume_unique=True)
        if not len(live):
            continue
        read = vectors[start : start + size] if len(live) == len(rows) else vectors[live]
        block = torch.from_numpy(np.array(read)).to(device)
        wide = block.float()
        norms = torch.linalg.vector_norm(wide, dim=1).double()
        if (bad := torch.nonzero(~(norms <= MAX_NORM))).numel():
            raise InputError(
                f"the vector of row {first_row + live[int(bad[0])]} has NaN, Inf or a norm above 1e15: encode it again"
            )
        global_rows = torch.from_numpy(first_row + live).to(device)
        yield Block(block if device.type == "cuda" else wide, global_rows, float(norms.max()))


def score_pairs(
    queries: torch.Tensor, query_ids: torch.Tensor, vectors: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Returns inner products of queries[query_ids] and vectors[positions], summed in float64 and rounded once.

    On a device, the order of a sum depends on dim alone: a score is the same in any set of pairs.

    Args:
        queries: float64 [q, dim], or floats that are exact in it.
        query_ids: int64 [n].
        vectors: float16 or float32 [p, dim].
        positions: int64 [n].

    Returns:
        float32 [n].
    """
    scores = torch.empty(len(positions), device=queries.device)
    step = max(1, PAIR_ELEMENTS[queries.device.type] // queries.shape[1])
    for i in range(0, len(positions), step):
        pair = slice(i, i + step)
        left, right = queries[query_ids[pair]].double(), vectors[positions[pair]].double()
        if queries.is_cuda:
            scores[pair] = sum_columns(left * right)
        else:
            scores[pair] = torch.from_numpy(np.einsum("nd,nd->n", left.numpy(), right.numpy()))
    return scores


def sum_columns(products: torch.Tensor) -> torch.Tensor:
    """Sums each row of [n, dim] to [n]: repeatedly adds the second half of the columns to the first half.

    The order of `torch.sum` depends on n and, on a CPU, on the number of threads.
    """
    while (width := products.shape[1]) > 1:
        half = width // 2
        added = products[:, :half] + products[:, half : 2 * half]
        products = torch.cat([added, products[:, 2 * half :]], dim=1) if width % 2 else added
    return products[:, 0]
