"""Creates, writes and reads FAISS indexes.

The metric is always the inner product (cosine: normalised vectors), and an id is a passage's global row.

A process that also uses torch should import torch first: then both share one pool of OpenMP threads, which is about
10% faster when they alternate.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from riptide.base.errors import InputError
from riptide.indexing.dense.factory import num_lists
from riptide.process.forks import need_threads
from riptide.process.native import cpu_info


def _import_faiss() -> Any:
    """Imports the module faiss so that its OpenBLAS uses fast kernels with reproducible sums on this CPU.

    faiss-cpu 1.15.1 contains OpenBLAS 0.3.15, which treats a CPU newer than itself (Sapphire Rapids) as the oldest one
    that it knows: SSE3, products at a quarter of the speed. It reads this variable when it is loaded. Without AVX-512
    the kernels for Haswell are avoided: their sums depend on the number of threads (`faiss_search`).
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

GRAPH_CONSTRUCTION = 100  # vectors compared for the links of a new one (efConstruction); FAISS's 40 costs recall


def check_factory(factory: str, dim: int) -> None:
    """Raises InputError for a factory whose indexes are not reproducible, cannot be sharded or cannot exclude rows."""
    create_index(factory, dim)


def row_bytes(factory: str, dim: int) -> int:
    """Returns the bytes that an index takes for each vector: its code, its id and, in a graph, its links."""
    index = create_index(factory, dim)  # owns the inner one
    inner = inner_index(index)
    if isinstance(inner, faiss.IndexIVF):
        return int(inner.code_size) + 8
    if isinstance(inner, faiss.IndexHNSW):  # links of the lowest layer, about one of another layer, place and level
        return int(inner.storage.sa_code_size() + 4 * inner.hnsw.nb_neighbors(0) + 16) + 8
    return int(inner.sa_code_size()) + 8


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


def create_index(factory: str, dim: int) -> Any:
    """Returns an empty index for inner products.

    Raises:
        InputError: If the factory is unknown, or if its indexes cannot be sharded or cannot exclude rows.
    """
    if "IVF" in factory and not 1 <= num_lists(factory) <= 1 << 22:
        raise InputError(f"index {factory!r}: expected 1 to {1 << 22} lists")
    try:
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise InputError(f"index {factory!r} cannot be made for {dim} dimensions: {_error_text(error)}") from error
    inner = inner_index(index)
    kinds = (
        faiss.IndexIVF,
        faiss.IndexFlat,
        faiss.IndexScalarQuantizer,
        faiss.IndexHNSWFlat,
        faiss.IndexHNSWSQ,
    )
    plain = isinstance(faiss.downcast_index(index), (*kinds, faiss.IndexPreTransform))
    linear = all(isinstance(transform, faiss.LinearTransform) for transform in transforms(index))
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


def inner_index(index: Any) -> Any:
    """Returns the index that stores the codes, which transforms and id maps wrap."""
    index = faiss.downcast_index(index)
    while isinstance(index, (faiss.IndexPreTransform, faiss.IndexIDMap)):
        index = faiss.downcast_index(index.index)
    return index


def transforms(index: Any) -> Iterator[Any]:
    """Yields the transforms that an index applies to vectors, in order."""
    index = faiss.downcast_index(index)
    while isinstance(index, faiss.IndexIDMap):
        index = faiss.downcast_index(index.index)
    if isinstance(index, faiss.IndexPreTransform):
        yield from (faiss.downcast_VectorTransform(index.chain.at(i)) for i in range(index.chain.size()))


@contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """Limits the threads of FAISS that this thread starts within the block."""
    need_threads("the first encoding or dense search")
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def _error_text(error: RuntimeError) -> str:
    """Returns the message of a FAISS error without the source position, in one line of at most 160 characters."""
    text = " ".join(str(error).split())
    place, _, problem = text.partition(": ")
    return (problem.removeprefix("Error: ") if place.startswith("Error in ") else text)[:160]
