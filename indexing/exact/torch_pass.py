"""Exact search by torch, for CUDA devices and for CPUs on which the compiled kernel does not run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from indexing.exact.checks import MAX_NORM
from retriever.errors import InputError

TINY = 1e-30  # covers products that underflow, which no relative bound does
PAIR_ELEMENTS = 1 << 18  # (query, passage) pairs times dim that are scored at once: 2 MiB of float64, in a cache


class Block(NamedTuple):
    """Rows that are not deleted.

    Attributes:
        vectors: [n, dim], float32; for CUDA in their own dtype.
        rows: Global rows, int64 [n].
        norm: The largest norm.
    """

    vectors: np.ndarray
    rows: np.ndarray
    norm: float


class TorchSearch:
    """Same interface as `KernelSearch`: float32 products on the CPU, float16 (exact for the passages) on CUDA."""

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
        self.add_blocks(blocks_of(vectors, first_row, deleted, self.half))

    def add_blocks(self, blocks: Iterable[Block]) -> None:
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

    def result(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(self.scores.copy(), self.rows.copy())]

    def _search(self, q: slice, block: Block) -> None:
        fast = self._multiply(self.rounded[q], torch.from_numpy(block.vectors).to(self.device))
        error = self.slack[q] * block.norm * 1.001 + TINY
        threshold = self.scores[q, -1] * self.scale[q]
        if np.isneginf(threshold).any() and len(block.rows) >= self.k:
            best = torch.topk(fast, self.k, dim=1, sorted=True).values[:, -1]
            threshold = np.maximum(threshold, best.cpu().numpy().astype(np.float64) - error)
        # In float32, rounded down: compared with float64, torch would convert every product.
        cut = np.nextafter((threshold - error).astype(np.float32), np.float32(-np.inf))
        may_be_hit = fast >= torch.from_numpy(cut[:, None]).to(self.device)
        query_ids, positions = (i.cpu().numpy() for i in torch.nonzero(may_be_hit, as_tuple=True))
        scores = score_pairs(self.queries[q], query_ids, block.vectors, positions)
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


def blocks_of(vectors: np.ndarray, first_row: int, deleted: np.ndarray, half: bool = False) -> Iterator[Block]:
    """Yields blocks of a size at which products are fast.

    Args:
        vectors: float16 or float32 [n, dim].
        first_row: Global row of the first vector.
        deleted: int64 rows of `vectors` that are excluded.
        half: Keep the dtype, for CUDA.

    Raises:
        InputError: For NaN, Inf and norms above 1e15.
    """
    size = 65_536 if half else 8_192
    for start in range(0, len(vectors), size):
        rows = np.arange(start, min(start + size, len(vectors)))
        block = np.array(vectors[start : start + size])
        live = np.setdiff1d(rows, deleted, assume_unique=True)
        if not len(live):
            continue
        if len(live) < len(rows):
            block = block[live - start]
        wide = _widened(block, torch.float32)
        norms = np.linalg.norm(wide, axis=1).astype(np.float64)
        bad = live[~(norms <= MAX_NORM)]
        if len(bad):
            raise InputError(
                f"the vector of row {first_row + bad[0]} has NaN, Inf or a norm above 1e15: encode it again"
            )
        yield Block(block if half else wide, first_row + live, float(norms.max()))


def score_pairs(queries: np.ndarray, query_ids: np.ndarray, vectors: np.ndarray, local: np.ndarray) -> np.ndarray:
    """Returns inner products of float64 queries[query_ids] and vectors[local], summed in float64: float32 [n]."""
    scores = np.empty(len(local), np.float32)
    step = max(1, PAIR_ELEMENTS // queries.shape[1])
    for i in range(0, len(local), step):
        pair = slice(i, i + step)
        scores[pair] = np.einsum("nd,nd->n", queries[query_ids[pair]], _widened(vectors[local[pair]], torch.float64))
    return scores


def _widened(vectors: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Returns the same numbers in a wider type. numpy converts float16 one number at a time, so torch does it."""
    wide: np.ndarray = torch.from_numpy(vectors).to(dtype).numpy()
    return wide
