"""FAISS indexes over plain arrays: choose, train, fill, search, measure.

The metric is always the inner product (cosine: normalised vectors), an id is a passage's global row, and a search
returns candidates only: `indexing.exact.rescore` scores them from the float16 embeddings, so compression costs no
precision. Training and filling give the same bytes for the same input, whatever the number of threads: products are
shared out among threads only where that leaves every sum as it is.
"""

import importlib
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from indexing.exact import available_threads
from retriever.errors import InputError
from retriever.native import processor


def _import_faiss() -> Any:
    """faiss, with the matrix products that this processor deserves.

    faiss-cpu 1.15.1 brings OpenBLAS 0.3.15, which takes a processor that is younger than itself (Sapphire Rapids) for
    the oldest it knows: SSE3, products at a quarter of the speed. It reads this variable when it is loaded. Without
    AVX-512 its products for Haswell are not taken: their sums depend on how many threads share them (`_share`).
    """
    unset = "OPENBLAS_CORETYPE" not in os.environ
    flags = processor()[0]
    if unset and "avx2" in flags:
        os.environ["OPENBLAS_CORETYPE"] = "SKYLAKEX" if {"avx512f", "avx512bw", "avx512vl"} <= flags else "SANDYBRIDGE"
    try:
        return importlib.import_module("faiss")
    finally:
        if unset:
            os.environ.pop("OPENBLAS_CORETYPE", None)


faiss = _import_faiss()

SMALL = 50_000  # vectors: below, scoring all takes as long as probing lists, and less where questions come together
POINTS_PER_CENTROID = 64  # FAISS asks for 39 to 256
ADD_ROWS = 65_536  # rows per call of add: bounds the float32 copy
# Where OpenMP may grant fewer threads than it is asked for, OpenBLAS waits for the others for ever.
_RATIONED = {"OMP_THREAD_LIMIT", "OMP_DYNAMIC"}

log = logging.getLogger(__name__)


def choose_factory(num_vectors: int, dim: int, recall: float, memory_bytes: int | None = None, shards: int = 1) -> str:
    """A FAISS factory string for num_vectors of dim dimensions and a recall@100 (after re-scoring) to be reached.

    memory_bytes bounds the index as a whole, each shard's centroids among it, without the embeddings (they stay on
    disk); InputError if nothing fits.
    """
    if num_vectors < 1 or dim < 1 or not 0 < recall <= 1:
        raise InputError(f"cannot choose an index for {num_vectors} vectors of {dim} dimensions and recall {recall}")
    if memory_bytes is None:
        memory_bytes = 1 << 62
    if num_vectors < SMALL and num_vectors * (4 * dim + 16) <= memory_bytes:
        return "Flat"
    count = _lists_for(num_vectors)
    lists, links = (f"IVF{count}", 0) if count < 32_768 else (f"IVF{count}_HNSW32", 2 * 32 * 4)
    centroids = (4 * dim + links) * count * shards
    codes = _codes(dim, recall)
    for code, code_bytes in codes:
        if centroids + num_vectors * (code_bytes + 8) <= memory_bytes:
            return f"{lists},{code}"
    least = centroids + num_vectors * (codes[-1][1] + 8)
    raise InputError(
        f"no index of {num_vectors} vectors of {dim} dimensions fits {memory_bytes} bytes: the smallest takes {least}"
    )


def _lists_for(num_vectors: int) -> int:
    """A power of two near 4 sqrt(n), with enough vectors to train each centroid."""
    wanted = 2 ** round(math.log2(4 * math.sqrt(num_vectors)))
    most = 2 ** int(math.log2(max(2, num_vectors / 39)))
    return min(wanted, most, 1 << 18)


def _codes(dim: int, recall: float) -> list[tuple[str, int]]:
    """(code, bytes per vector) from the one that finds most to the smallest."""
    one_bit = ("RaBitQ", dim // 8 + 8)
    codes = [one_bit] if recall <= 0.99 else [("SQ8", dim), one_bit]
    for sub in (4, 8, 16):  # dimensions per 4-bit code
        if dim % sub == 0 and dim // sub // 2 < one_bit[1]:
            codes.append((f"PQ{dim // sub}x4fs", dim // sub // 2))
    return codes


def check_factory(factory: str, dim: int) -> None:
    """Raise InputError, in one line, unless factory makes an index of dim dimensions that shards, repeats and masks."""
    _create(factory, dim)


def training_size(factory: str, num_vectors: int) -> int:
    """Vectors to train on: 64 per list, 65,536 at least (for the codes), all if there are fewer; 0 for Flat."""
    if factory == "Flat":
        return 0
    return min(num_vectors, max(POINTS_PER_CENTROID * num_lists(factory), 65_536))


def train_quantizer(sample: np.ndarray, factory: str, *, seed: int, threads: int | None = None) -> Any:
    """An empty, trained faiss.Index (inner product) from a sample, float32 [n, dim]; the same bytes for the same seed.

    Raises InputError if the sample is too small for the factory.
    """
    sample = np.ascontiguousarray(sample, dtype=np.float32)
    _check_finite(sample, "the training sample")
    index = _create(factory, sample.shape[1])
    inner = _inner(index)
    needed = 0 if factory == "Flat" else max(num_lists(factory), *(1 << b for b in _code_bits(inner)))
    if len(sample) < needed:
        remedy = f"Flat, IVF{max(1, len(sample) // 39)},Flat" if num_lists(factory) else "Flat"
        raise InputError(
            f"{factory} needs {needed} vectors or more to train on, found {len(sample)}: take {remedy} or add vectors"
        )
    for clustering in _clusterings(inner):
        clustering.seed = seed
        clustering.min_points_per_centroid = 1  # silences a warning: few points cost recall, which a build measures
    if hasattr(inner, "do_polysemous_training"):
        inner.do_polysemous_training = False  # minutes of training for a search mode that is never used here
    together = _share(threads, index)
    for transform in _transforms(index):
        if not transform.is_trained:
            with _threads(1):  # a covariance is summed over the vectors, as many as there are
                transform.train(sample)
        with _threads(together):
            sample = transform.apply(sample)
    with _threads(together):
        if isinstance(inner, faiss.IndexIVF) and getattr(faiss, "get_num_gpus", lambda: 0)() > 0:
            gpu = faiss.index_cpu_to_all_gpus(faiss.IndexFlatIP(inner.d))
            inner.clustering_index = gpu  # k-means assigns on the GPUs
        inner.train(sample)
        if isinstance(inner, faiss.IndexIVF):
            inner.clustering_index = None
    index.is_trained = inner.is_trained
    return index


def write_index(index: Any, path: str | Path) -> None:
    """Write a FAISS file. It carries no checksum: whoever stores it keeps its hash."""
    faiss.write_index(index, str(path))


def read_index(path: str | Path, *, mmap: bool = False) -> Any:
    """Read a FAISS file, or map it into memory (shared between processes, read on demand). Raises InputError."""
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if mmap else 0)
    except RuntimeError as error:
        raise InputError(f"{path}: not a FAISS index that can be read ({_reason(error)})") from error


def fill_shard(trained: Any, parts: Iterable[np.ndarray], first_row: int, *, threads: int | None = None) -> Any:
    """A new index with trained's quantizer and the vectors of parts, float [n, dim], as rows first_row, + 1, ...

    The same bytes from run to run and for any threads. trained itself stays empty. Raises InputError for NaN and Inf.
    """
    index = faiss.clone_index(trained)
    if not isinstance(_inner(index), faiss.IndexIVF):
        index = faiss.IndexIDMap2(index)
    row = first_row
    with _threads(_share(threads, index)):
        for part in parts:
            for start in range(0, len(part), ADD_ROWS):
                block = np.ascontiguousarray(part[start : start + ADD_ROWS], dtype=np.float32)
                if block.ndim != 2 or block.shape[1] != index.d:
                    raise InputError(f"vectors from row {row} have shape {block.shape}, expected [n, {index.d}]")
                _check_finite(block, f"the part with row {row}")
                index.add_with_ids(block, np.arange(row, row + len(block), dtype=np.int64))
                row += len(block)
    return index


def search_shard(
    index: Any,
    queries: np.ndarray,
    depth: int,
    *,
    nprobe: int,
    deleted: np.ndarray | None = None,
    allowed: np.ndarray | None = None,
    threads: int | None = None,
) -> np.ndarray:
    """Candidate rows, int64 [q, depth], best first by the index's approximate score, -1 where there are none.

    queries float32 [q, dim]; nprobe: lists to probe (a flat index has none and looks at all); deleted: int64 rows to
    skip; allowed: int64 rows to look at alone, the deleted ones not among them.
    """
    queries = np.ascontiguousarray(queries, dtype=np.float32)
    if queries.ndim != 2 or queries.shape[1] != index.d:
        raise InputError(f"queries have shape {queries.shape}, expected [q, {index.d}] like the index")
    if depth < 1 or nprobe < 1:
        raise InputError(f"depth is {depth} and nprobe is {nprobe}, expected 1 or more")
    options: dict[str, Any] = {}
    if allowed is not None:
        options["sel"] = faiss.IDSelectorBatch(np.ascontiguousarray(allowed, dtype=np.int64))
    elif deleted is not None and len(deleted):
        gone = faiss.IDSelectorBatch(np.ascontiguousarray(deleted, dtype=np.int64))
        options["sel"] = faiss.IDSelectorNot(gone)
    inner = _inner(index)
    if isinstance(inner, faiss.IndexIVF):
        parameters = faiss.SearchParametersIVF(nprobe=min(nprobe, inner.nlist), **options)
    else:
        parameters = faiss.SearchParameters(**options)
    if isinstance(faiss.downcast_index(index), faiss.IndexPreTransform):
        parameters = faiss.SearchParametersPreTransform(index_params=parameters, **options)
    with _threads(_share(threads, index)):
        return index.search(queries, depth, params=parameters)[1]


def draw_queries(num_vectors: int, count: int, seed: int) -> np.ndarray:
    """Rows, sorted int64, of the corpus' own vectors to measure recall with where there are no real queries."""
    return np.sort(np.random.default_rng(seed).choice(num_vectors, min(count, num_vectors), replace=False))


def recall_at(found_rows: np.ndarray, exact_rows: np.ndarray, ks: Sequence[int]) -> dict[int, float]:
    """k -> the mean share of a query's exact top k among its first k found; rows int64 [q, >= k], -1 for none."""
    recalls = {}
    for k in ks:
        shares = []
        for found, exact in zip(found_rows[:, :k], exact_rows[:, :k], strict=True):
            wanted = exact[exact >= 0]
            if len(wanted):
                shares.append(np.isin(wanted, found).mean())
        recalls[k] = float(np.mean(shares)) if shares else 1.0
    return recalls


def _create(factory: str, dim: int) -> Any:
    lists = re.search(r"IVF(\d+)", factory)
    if lists and not 1 <= int(lists[1]) <= 1 << 22:
        raise InputError(f"index {factory!r}: expected 1 to {1 << 22} lists")
    try:
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise InputError(f"index {factory!r} cannot be made for {dim} dimensions: {_reason(error)}") from error
    inner = _inner(index)
    kinds = (faiss.IndexIVF, faiss.IndexFlat, faiss.IndexScalarQuantizer)
    plain = isinstance(faiss.downcast_index(index), (*kinds, faiss.IndexPreTransform))
    linear = all(isinstance(transform, faiss.LinearTransform) for transform in _transforms(index))
    if not plain or not linear or not isinstance(inner, kinds):
        # Graphs differ from run to run, refinement and id maps are done here, the others cannot skip deleted rows.
        raise InputError(f"index {factory!r} is not supported: expected Flat, SQ… or IVF…, after PCA, OPQ or RR")
    if index.metric_type != faiss.METRIC_INNER_PRODUCT or inner.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise InputError(f"index {factory!r} is not made for inner products")
    return index


def _inner(index: Any) -> Any:
    """The index that holds the codes, below a transform or an id map."""
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


def num_lists(factory: str) -> int:
    """The inverted lists that a factory string asks for, 0 if none."""
    lists = re.search(r"IVF(\d+)", factory)
    return int(lists[1]) if lists else 0


def _clusterings(inner: Any) -> Iterator[Any]:
    if isinstance(inner, faiss.IndexIVF):
        yield inner.cp
    if hasattr(inner, "pq"):
        yield inner.pq.cp


def _code_bits(inner: Any) -> Iterator[int]:
    yield 0
    if hasattr(inner, "pq"):
        yield inner.pq.nbits


def _share(threads: int | None, index: Any) -> int:
    """How many threads may share out the products of index: threads, or one where several would change a sum.

    OpenBLAS cuts sums over many dimensions (more than 320, by kernel): for one thread in halves that are multiples of
    its registers (16 numbers), for several in halves as they come. Multiples of 32 are cut alike.
    """
    wanted = threads or available_threads()
    if wanted == 1 or _RATIONED & os.environ.keys():
        return 1  # what one thread does needs no others for the trial
    inner = _inner(index)
    dims = [inner.d, *(transform.d_in for transform in _transforms(index))]
    dims += [inner.pq.dsub] if hasattr(inner, "pq") else []
    alike = all(dim <= 320 or dim % 32 == 0 for dim in dims) and _shared_products_are_the_same()
    return wanted if alike else 1


@cache
def _shared_products_are_the_same() -> bool:
    """Whether several threads compute what one does, on this processor: by trying, once, in some 30 ms on free cores.
    Where they do not, that is logged."""
    rng = np.random.default_rng(0)
    for d_in, d_out, count in [(64, 33, 1_021), (768, 36, 510)]:
        product = faiss.RandomRotationMatrix(d_in, d_out)
        product.init(0)
        vectors = rng.standard_normal((count, d_in), dtype=np.float32)
        made = []
        for threads in (1, 2, 3, 4):
            with _threads(threads):
                made.append(product.apply(vectors).tobytes())
        if len(set(made)) > 1:
            log.warning(
                "FAISS works with one thread, which takes longer: several would change its sums "
                "(OPENBLAS_CORETYPE is set, faiss was imported before riptide, or the processor is of another kind)"
            )
            return False
    return True


@contextmanager
def _threads(threads: int) -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def _check_finite(vectors: np.ndarray, what: str) -> None:
    if not np.isfinite(vectors).all():
        raise InputError(f"{what} has NaN or Inf: encode it again")


def _reason(error: RuntimeError) -> str:
    """FAISS' message without its source position, on one line."""
    text = " ".join(str(error).split())
    return re.sub(r"^Error in .*?: (Error: )?", "", text)[:160]
