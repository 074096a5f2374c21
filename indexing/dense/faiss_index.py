"""Trains, fills, writes, reads and searches FAISS indexes over plain arrays, and computes recall.

The metric is always the inner product (cosine: normalised vectors), an id is a passage's global row, and a search
returns candidates only: `riptide.indexing.exact` scores them from the float16 embeddings, so compression costs no
precision.

Training and filling give the same bytes for the same input on one kind of CPU. If several threads share a product of
FAISS, its sums may depend on their number. So FAISS trains with one thread, k-means sums in a fixed order, and filling
runs in parallel over fixed blocks of rows, each of which is one thread's.

A process that also uses torch should import torch first: then both share one pool of OpenMP threads, which is about
10% faster when they alternate.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.corpus.row_sets import RowSet
from riptide.indexing.dense.factory import FLAT, needs_training, num_lists
from riptide.indexing.dense.kmeans import Checkpoint, train_centroids
from riptide.indexing.exact import ExactSearch, OpenPart, available_threads
from riptide.indexing.exact import kernel as kernels
from riptide.indexing.exact.nearest import NearestTargets
from riptide.indexing.exact.score_parts import ProbedList
from riptide.process.forks import need_threads
from riptide.process.native import cpu_info


def _import_faiss() -> Any:
    """Imports the module faiss so that its OpenBLAS uses fast kernels with reproducible sums on this CPU.

    faiss-cpu 1.15.1 contains OpenBLAS 0.3.15, which treats a CPU newer than itself (Sapphire Rapids) as the oldest one
    that it knows: SSE3, products at a quarter of the speed. It reads this variable when it is loaded. Without AVX-512
    the kernels for Haswell are avoided: their sums depend on the number of threads (`_search_threads`).
    """
    unset = "OPENBLAS_CORETYPE" not in os.environ
    flags = cpu_info()[0]
    if unset and "avx2" in flags:
        os.environ["OPENBLAS_CORETYPE"] = "SKYLAKEX" if {"avx512f", "avx512bw", "avx512vl"} <= flags else "SANDYBRIDGE"
    try:
        return importlib.import_module("faiss")
    finally:
        if unset:
            os.environ.pop("OPENBLAS_CORETYPE", None)


faiss = _import_faiss()

MAX_CODE_SAMPLE = 100_000  # most vectors that train codes; FAISS uses as many for scalar quantizers
MIN_CODE_SAMPLE = 1_000  # vectors for codes that have no parameters to train
ADD_ROWS = 65_536  # rows per block that one thread adds; limits the memory of the float32 copy
GRAPH_CONSTRUCTION = 100  # vectors compared for the links of a new one (efConstruction); FAISS's 40 costs recall
# With these variables OpenMP may start fewer threads than requested, and OpenBLAS would wait for the rest forever.
_RATIONED = {"OMP_THREAD_LIMIT", "OMP_DYNAMIC"}


def check_factory(factory: str, dim: int) -> None:
    """Raises InputError for a factory whose indexes are not reproducible, cannot be sharded or cannot exclude rows."""
    _create_index(factory, dim)


def row_bytes(factory: str, dim: int) -> int:
    """Returns the bytes that an index takes for each vector: its code, its id and, in a graph, its links."""
    index = _create_index(factory, dim)  # owns the inner one
    inner = _inner_index(index)
    if isinstance(inner, faiss.IndexIVF):
        return int(inner.code_size) + 8
    if isinstance(inner, faiss.IndexHNSW):  # links of the lowest layer, about one of another layer, place and level
        return int(inner.storage.sa_code_size() + 4 * inner.hnsw.nb_neighbors(0) + 16) + 8
    return int(inner.sa_code_size()) + 8


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
    index = _create_index(factory, sample.shape[1])
    inner = _inner_index(index)
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
    with _limited_threads(1):
        for transform in _transforms(index):
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


def write_index(index: Any, path: str | Path) -> None:
    """Writes an index to a FAISS file. The format has no checksum, so the caller stores a hash of the file.

    FAISS ignores an error when it closes a file: on a full disk the file would be cut without an error. Here, Python's
    file writes the bytes.

    Raises:
        OSError: If the bytes cannot be written.
    """
    with open(path, "wb") as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))


def read_index(path: str | Path, *, mmap: bool = False) -> Any:
    """Reads or memory-maps (shared, read on demand) a FAISS file. Raises InputError if it is not a readable index."""
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if mmap else 0)
    except RuntimeError as error:
        raise InputError(f"{path}: not a FAISS index that can be read ({_error_text(error)})") from error


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
    inner = _inner_index(index)
    is_packed = isinstance(inner, faiss.IndexIVFFastScan)
    if not isinstance(inner, faiss.IndexIVF) or (is_packed and not isinstance(inner, faiss.IndexIVFPQFastScan)):
        index = index if is_packed else faiss.IndexIDMap2(index)
        with _limited_threads(1):
            for row, block in _read_blocks(parts, first_row, index.d):
                index.add_with_ids(*_check_block(row, block))
        return index
    workers = threads or available_threads()
    if kernels.load_kernel() is None:
        workers = 1  # torch, which replaces the kernel, uses its own threads
    filled, *spare = [_empty_lists(inner) for _ in range(workers + 1)]
    centroids = _open_centroids(inner)

    def add(lists: Any, row: int, block: np.ndarray) -> Any:
        with _limited_threads(1):  # OpenMP keeps this setting per thread
            vectors, rows = _check_block(row, block)
            for transform in _transforms(index):
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
                for transform in _transforms(index):
                    queries = transform.apply(queries)
                nearest = self._centroids.search(_inner_index(index).quantizer, queries, nprobe, threads)
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
    inner = _inner_index(index)
    count = _search_threads(threads, index)
    with _limited_threads(count):
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
    inner = _inner_index(index)
    if not isinstance(inner, faiss.IndexIVF):
        return [None] * len(vectors)
    both = np.concatenate([query[None], vectors])
    for transform in _transforms(index):
        both = transform.apply(both)
    count = min(nprobe, inner.nlist)
    with _limited_threads(1):
        lists = inner.quantizer.search(both[1:], 1)[1][:, 0].tolist()
        probed = inner.quantizer.search(both[:1], count)[1][0].tolist()
    ranks = {number: rank for rank, number in enumerate(probed, 1)}
    return [ProbedList(number, ranks.get(number), count, inner.nlist) for number in lists]


def draw_queries(num_vectors: int, count: int, seed: int) -> np.ndarray:
    """Draws rows whose vectors serve as queries when recall is measured without real queries: int64, ascending."""
    return np.sort(np.random.default_rng(seed).choice(num_vectors, min(count, num_vectors), replace=False))


def recall_at(found_rows: np.ndarray, exact_rows: np.ndarray, ks: Sequence[int]) -> dict[int, float]:
    """Returns k -> recall@k, the mean share of the exact top k among the first k found; rows int64 [q, >= k]."""
    recalls = {}
    for k in ks:
        shares = []
        for found, exact in zip(found_rows[:, :k], exact_rows[:, :k], strict=True):
            expected = exact[exact >= 0]
            if len(expected):
                shares.append(np.isin(expected, found).mean())
        recalls[k] = float(np.mean(shares)) if shares else 1.0
    return recalls


def _create_index(factory: str, dim: int) -> Any:
    if "IVF" in factory and not 1 <= num_lists(factory) <= 1 << 22:
        raise InputError(f"index {factory!r}: expected 1 to {1 << 22} lists")
    try:
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise InputError(f"index {factory!r} cannot be made for {dim} dimensions: {_error_text(error)}") from error
    inner = _inner_index(index)
    kinds = (
        faiss.IndexIVF,
        faiss.IndexFlat,
        faiss.IndexScalarQuantizer,
        faiss.IndexHNSWFlat,
        faiss.IndexHNSWSQ,
    )
    plain = isinstance(faiss.downcast_index(index), (*kinds, faiss.IndexPreTransform))
    linear = all(isinstance(transform, faiss.LinearTransform) for transform in _transforms(index))
    if not plain or not linear or not isinstance(inner, kinds):
        # This package adds re-scoring and id maps itself, and other indexes cannot exclude deleted rows.
        raise InputError(
            f"index {factory!r} is not supported: expected Flat, SQ…, IVF…, HNSW… or HNSW…,SQ…, after PCA, OPQ or RR"
        )
    quantizer = faiss.downcast_index(inner.quantizer) if isinstance(inner, faiss.IndexIVF) else None
    if quantizer is not None and not isinstance(quantizer, (faiss.IndexFlat, faiss.IndexHNSWFlat)):
        raise InputError(f"index {factory!r} is not supported: expected IVF… or IVF…_HNSW… for the lists")
    if index.metric_type != faiss.METRIC_INNER_PRODUCT or inner.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise InputError(f"index {factory!r} is not made for inner products: choose another factory")
    if isinstance(inner, faiss.IndexHNSW):
        inner.hnsw.efConstruction = GRAPH_CONSTRUCTION
    return index


def _inner_index(index: Any) -> Any:
    """Returns the index that stores the codes, which transforms and id maps wrap."""
    index = faiss.downcast_index(index)
    while isinstance(index, (faiss.IndexPreTransform, faiss.IndexIDMap)):
        index = faiss.downcast_index(index.index)
    return index


def _transforms(index: Any) -> Iterator[Any]:
    index = faiss.downcast_index(index)
    while isinstance(index, faiss.IndexIDMap):
        index = faiss.downcast_index(index.index)
    if isinstance(index, faiss.IndexPreTransform):
        yield from (faiss.downcast_VectorTransform(index.chain.at(i)) for i in range(index.chain.size()))


def _clusterings(inner: Any) -> Iterator[Any]:
    if isinstance(inner, faiss.IndexIVF):
        yield inner.cp
    if hasattr(inner, "pq"):
        yield inner.pq.cp


def _code_bits(inner: Any) -> Iterator[int]:
    yield 0
    if hasattr(inner, "pq"):
        yield inner.pq.nbits


def _search_threads(threads: int | None, index: Any) -> int:
    """Returns the number of threads of a search: `threads`, or 1 if several threads would change the scores.

    OpenBLAS splits sums over more than 320 dimensions (the number depends on the kernel): for one thread into halves
    that are multiples of its registers (16 numbers), for several threads into plain halves. Multiples of 32 are split
    alike by the kernels that `_import_faiss` selects; a user may select others.
    """
    count = threads or available_threads()
    if _RATIONED & os.environ.keys() or "OPENBLAS_CORETYPE" in os.environ:
        return 1
    inner = _inner_index(index)
    dims = [inner.d, *(transform.d_in for transform in _transforms(index))]
    dims += [inner.pq.dsub] if hasattr(inner, "pq") else []
    return count if all(dim <= 320 or dim % 32 == 0 for dim in dims) else 1


@contextmanager
def _limited_threads(threads: int) -> Iterator[None]:
    need_threads("the first encoding or dense search")
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def _check_finite(vectors: np.ndarray, what: str) -> None:
    if not np.isfinite(vectors).all():
        raise InputError(f"{what} has NaN or Inf: encode it again")


def _error_text(error: RuntimeError) -> str:
    """Returns the message of a FAISS error without the source position, in one line of at most 160 characters."""
    text = " ".join(str(error).split())
    place, _, problem = text.partition(": ")
    return (problem.removeprefix("Error: ") if place.startswith("Error in ") else text)[:160]
