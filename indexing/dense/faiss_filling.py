"""Trains FAISS indexes, and fills them with vectors.

Both give the same bytes for the same input on one kind of CPU. If several threads share a product of FAISS, its sums
may depend on their number. So FAISS trains with one thread, k-means sums in a fixed order, and filling runs in parallel
over fixed blocks of rows, each of which is one thread's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.dense.factory import FLAT, needs_training, num_lists
from riptide.indexing.dense.faiss_index import create_index, faiss, inner_index, limited_threads, transforms
from riptide.indexing.dense.kmeans import Checkpoint, train_centroids
from riptide.indexing.exact import available_threads
from riptide.indexing.exact import kernel as kernels
from riptide.indexing.exact.nearest import NearestTargets

MAX_CODE_SAMPLE = 100_000  # most vectors that train codes; FAISS uses as many for scalar quantizers
MIN_CODE_SAMPLE = 1_000  # vectors for codes that have no parameters to train
ADD_ROWS = 65_536  # rows per block that one thread adds; limits the memory of the float32 copy


def train_quantizer(
    sample: np.ndarray,
    factory: str,
    *,
    seed: int,
    threads: int | None = None,
    checkpoint: Checkpoint | None = None,
) -> Any:
    """Returns an empty faiss.Index (inner product) with a trained quantizer; the bytes are the same for any threads.

    The centroids of inverted lists are trained by `riptide.indexing.dense.kmeans`; FAISS trains transforms and codes,
    with one thread, as its sums depend on the number of threads.

    Args:
        sample: float16 or float32 [n, dim].
        factory: FAISS's factory string.
        seed: Seed of k-means.
        threads: CPU threads of k-means; None: one for each core.
        checkpoint: Saves the centroids after each iteration of k-means, and provides those of an interrupted training.
            It is not used after a transform, whose training may turn its axes on another kind of CPU.

    Raises:
        InputError: If the sample is too small for the factory.
    """
    if sample.dtype != np.float16:
        sample = np.ascontiguousarray(sample, dtype=np.float32)
    _check_finite(sample, "the training sample")
    index = create_index(factory, sample.shape[1])
    inner = inner_index(index)
    needed = 0 if not needs_training(factory) else max(num_lists(factory), *(1 << b for b in _code_bits(inner)))
    if len(sample) < needed:
        remedy = f"Flat, IVF{max(1, len(sample) // 39)},Flat" if num_lists(factory) else FLAT
        raise InputError(
            f"{factory} needs {needed} vectors or more to train on, found {len(sample)}: take {remedy} or add vectors"
        )
    for clustering in _clusterings(inner):
        clustering.seed = seed
        clustering.min_points_per_centroid = 1  # no warning about few points: a build measures recall anyway
    if hasattr(inner, "do_polysemous_training"):
        inner.do_polysemous_training = False  # it trains for minutes, for a search mode that is not used
    with limited_threads(1):
        for transform in transforms(index):
            checkpoint = None
            sample = sample.astype(np.float32, copy=False)
            if not transform.is_trained:
                transform.train(sample)
            sample = transform.apply(sample)
        if isinstance(inner, faiss.IndexIVF):
            centroids = train_centroids(sample, inner.nlist, seed=seed, threads=threads, checkpoint=checkpoint)
            inner.quantizer.add(centroids)
            inner.quantizer.is_trained = True  # so that FAISS trains only the codes
            sample = _draw_code_sample(inner, sample, seed)
        inner.train(sample.astype(np.float32, copy=False))
    index.is_trained = inner.is_trained
    return index


def _draw_code_sample(inner: Any, sample: np.ndarray, seed: int) -> np.ndarray:
    """Returns the vectors that train the codes of inverted lists, as FAISS first assigns all that it gets."""
    count = min(len(sample), inner.train_encoder_num_vectors() or MIN_CODE_SAMPLE, MAX_CODE_SAMPLE)
    return sample[np.sort(np.random.default_rng(seed).choice(len(sample), count, replace=False))]


def fill_shard(trained_index: Any, parts: Iterable[np.ndarray], first_row: int, *, threads: int | None = None) -> Any:
    """Returns a copy of `trained_index` with the given vectors added; any number of threads gives the same bytes.

    Each block of ADD_ROWS rows is added by one thread to an empty copy of the lists, and the copies are merged in the
    order of the rows. Codes of fast scan (`PQ…x4fs`) are packed after that. Other codes of fast scan, Flat indexes and
    graphs are filled by one thread. A graph has the same bytes for the same parts.

    Args:
        trained_index: The result of `train_quantizer`; it stays empty.
        parts: Vectors, float [n, dim] each.
        first_row: Id of the first vector; the others follow it.
        threads: Blocks that are added at the same time; None: one for each core.

    Raises:
        InputError: For vectors of another shape, NaN and Inf.
    """
    index = faiss.clone_index(trained_index)
    inner = inner_index(index)
    is_packed = isinstance(inner, faiss.IndexIVFFastScan)
    if not isinstance(inner, faiss.IndexIVF) or (is_packed and not isinstance(inner, faiss.IndexIVFPQFastScan)):
        index = index if is_packed else faiss.IndexIDMap2(index)
        with limited_threads(1):
            for row, block in _read_blocks(parts, first_row, index.d):
                index.add_with_ids(*_check_block(row, block))
        return index
    workers = threads or available_threads()
    if kernels.load_kernel() is None:
        workers = 1  # torch, which replaces the kernel, uses its own threads
    filled, *spare = [_empty_lists(inner) for _ in range(workers + 1)]
    centroids = _open_centroids(inner)

    def add(lists: Any, row: int, block: np.ndarray) -> Any:
        with limited_threads(1):  # OpenMP keeps this setting per thread
            vectors, rows = _check_block(row, block)
            for transform in transforms(index):
                vectors = block = transform.apply(vectors)
            if centroids is None:
                lists.add_with_ids(vectors, rows)
            else:  # FAISS finds the nearest centroids more slowly
                nearest = centroids.find(block if block.dtype == np.float16 else vectors).astype(np.int64)
                lists.add_core(len(vectors), *map(faiss.swig_ptr, (vectors, rows, nearest)))
        return lists

    def merge(lists: Any) -> None:
        filled.merge_from(lists, 0)
        spare.append(lists)

    with ThreadPoolExecutor(workers, thread_name_prefix="fill") as pool:
        pending: deque[Future[Any]] = deque()
        for row, block in _read_blocks(parts, first_row, index.d):
            if not spare:
                merge(pending.popleft().result())
            pending.append(pool.submit(add, spare.pop(), row, block))
        while pending:
            merge(pending.popleft().result())
    if is_packed:
        filled = faiss.IndexIVFPQFastScan(filled, inner.bbs)
    inner.replace_invlists(filled.invlists, True)
    filled.own_invlists = False
    index.ntotal = inner.ntotal = filled.ntotal
    return index


def _empty_lists(inner: Any) -> Any:
    """Returns a copy of an empty index with lists; of an index with fast scan, one whose codes are not packed yet."""
    if not isinstance(inner, faiss.IndexIVFPQFastScan):
        return faiss.clone_index(inner)
    lists = faiss.IndexIVFPQ(inner.quantizer, inner.d, inner.nlist, inner.pq.M, inner.pq.nbits, inner.metric_type)
    lists.pq, lists.by_residual, lists.is_trained = inner.pq, inner.by_residual, True
    return lists


def _open_centroids(inner: Any) -> NearestTargets | None:
    """Returns the centroids of inverted lists; None if a graph (HNSW) finds them."""
    quantizer = faiss.downcast_index(inner.quantizer)
    if not isinstance(quantizer, faiss.IndexFlat):
        return None
    centroids = faiss.rev_swig_ptr(quantizer.get_xb(), quantizer.ntotal * quantizer.d)
    return NearestTargets(centroids.reshape(-1, quantizer.d), threads=1)


def _read_blocks(parts: Iterable[np.ndarray], first_row: int, dim: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first row, vectors) of blocks of at most ADD_ROWS rows, which do not depend on the thread count."""
    row = first_row
    for part in parts:
        for start in range(0, len(part), ADD_ROWS):
            block = part[start : start + ADD_ROWS]
            if block.ndim != 2 or block.shape[1] != dim:
                raise InputError(f"vectors from row {row} have shape {block.shape}, expected [n, {dim}]")
            yield row, block
            row += len(block)


def _check_block(row: int, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns a block as float32 [n, dim], and its row numbers, int64 [n]. Raises InputError for NaN and Inf."""
    block = np.ascontiguousarray(block, dtype=np.float32)
    _check_finite(block, f"the part with row {row}")
    return block, np.arange(row, row + len(block), dtype=np.int64)


def _check_finite(vectors: np.ndarray, what: str) -> None:
    if not np.isfinite(vectors).all():
        raise InputError(f"{what} has NaN or Inf: encode it again")


def _clusterings(inner: Any) -> Iterator[Any]:
    if isinstance(inner, faiss.IndexIVF):
        yield inner.cp
    if hasattr(inner, "pq"):
        yield inner.pq.cp


def _code_bits(inner: Any) -> Iterator[int]:
    yield 0
    if hasattr(inner, "pq"):
        yield inner.pq.nbits
