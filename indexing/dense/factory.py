"""Chooses the FAISS factory string of an index, and parses factory strings; does not import FAISS."""

from __future__ import annotations

import math
import re

from riptide.base.errors import InputError

SMALL = 50_000  # with fewer vectors, scoring all of them is as fast as probing lists, and faster for many queries
FLAT = "Flat"
POINTS_PER_CENTROID = 64  # training vectors per list; FAISS recommends 39 to 256
DEPTHS = (200, 400, 800, 1600)  # candidates per shard whose exact scores are computed
GRAPH_DEPTHS = (100, *DEPTHS)  # a graph search visits more vectors for more candidates, so it may take fewer


def choose_factory(num_vectors: int, dim: int, recall: float, memory_bytes: int | None = None, shards: int = 1) -> str:
    """Returns the FAISS factory string of an index that should reach a recall within a memory limit.

    Args:
        num_vectors: Number of vectors.
        dim: Their dimensions.
        recall: The recall@100, after re-scoring, that the index should reach.
        memory_bytes: Bound on the whole index, with the centroids of every shard and without the embeddings, which stay
            on disk; None: no bound.
        shards: Number of shards.

    Raises:
        InputError: If no index fits.
    """
    if num_vectors < 1 or dim < 1 or not 0 < recall <= 1:
        raise InputError(
            f"cannot choose an index for {num_vectors} vectors of {dim} dimensions and recall {recall}: expected at "
            "least one vector, one dimension and a recall above 0 and up to 1"
        )
    if memory_bytes is None:
        memory_bytes = 1 << 62
    if num_vectors < SMALL and num_vectors * (4 * dim + 16) <= memory_bytes:
        return FLAT
    count = _choose_num_lists(num_vectors)
    lists, links = (f"IVF{count}", 0) if count < 32_768 else (f"IVF{count}_HNSW32", 2 * 32 * 4)
    centroid_bytes = (4 * dim + links) * count * shards
    codes = _candidate_codes(dim, recall)
    for code, code_bytes in codes:
        if centroid_bytes + num_vectors * (code_bytes + 8) <= memory_bytes:
            return f"{lists},{code}"
    min_bytes = centroid_bytes + num_vectors * (codes[-1][1] + 8)
    raise InputError(
        f"no index of {num_vectors} vectors of {dim} dimensions fits {memory_bytes} bytes: the smallest takes "
        f"{min_bytes}"
    )


def _choose_num_lists(num_vectors: int) -> int:
    """Returns the number of inverted lists: a power of two near 4 sqrt(n), with enough vectors to train each."""
    preferred_lists = 2 ** round(math.log2(4 * math.sqrt(num_vectors)))
    max_lists = 2 ** int(math.log2(max(2, num_vectors / 39)))
    return min(preferred_lists, max_lists, 1 << 18)


def _candidate_codes(dim: int, recall: float) -> list[tuple[str, int]]:
    """Returns the possible codes as (name, bytes per vector), from the best recall to the smallest size.

    Fast-scan codes are compared for 32 vectors at once. At equal recall, they answer 2.7 times as many queries as
    RaBitQ, which remains for odd dimensions (docs/measurements/search.md).
    """
    codes = [("SQ8", dim)] if recall > 0.99 else []
    for group in (2, 4, 8, 16):  # dimensions that share a 4-bit code
        if dim % group == 0:
            residual = "r" if group == 2 else ""
            codes.append((f"PQ{dim // group}x4fs{residual}", -(-dim // group // 2)))
    return codes if dim % 2 == 0 else [*codes, ("RaBitQ", dim // 8 + 8)]


def is_flat(factory: str) -> bool:
    """Returns whether an index is Flat: it needs no training, and searches score all vectors of the embeddings."""
    return factory == FLAT


def is_graph(factory: str) -> bool:
    """Returns whether an index is a graph (HNSW) of the vectors; the HNSW of `IVF…_HNSW32` is one of its centroids."""
    return any(component.startswith("HNSW") for component in factory.split(","))


def effort_name(factory: str) -> str:
    """Returns the name of the search parameter that trades speed for recall: "ef_search" of a graph, else "nprobe"."""
    return "ef_search" if is_graph(factory) else "nprobe"


def search_efforts(factory: str) -> list[int]:
    """Returns the values of the search parameter `effort_name` at which a build measures recall, in ascending order."""
    if is_graph(factory):
        return [GRAPH_DEPTHS[0] << i for i in range(8)]
    lists = max(1, num_lists(factory))
    return sorted({min(1 << i, lists) for i in range(lists.bit_length() + 1)})


def candidate_depths(factory: str, effort: int) -> tuple[int, ...]:
    """Returns the numbers of candidates at which a build measures recall: for a graph, at most those that it keeps."""
    return tuple(depth for depth in GRAPH_DEPTHS if depth <= effort) if is_graph(factory) else DEPTHS


def num_lists(factory: str) -> int:
    """Returns the number of inverted lists of a factory string, with k for 1,024 and M for its square; 0: no lists."""
    lists = re.search(r"IVF(\d+)([kM]?)", factory)
    return int(lists[1]) * {"": 1, "k": 1 << 10, "M": 1 << 20}[lists[2]] if lists else 0


def needs_training(factory: str) -> bool:
    """Returns whether an index must see vectors before it stores any; Flat and graphs of float32 vectors need not."""
    return not re.fullmatch(r"Flat|HNSW\d*(,Flat)?", factory)


def training_size(factory: str, num_vectors: int) -> int:
    """Returns the size of the training sample: 64 vectors per list, at least 65,536, at most all.

    It is 0 for an index that needs no training.
    """
    if not needs_training(factory):
        return 0
    return min(num_vectors, max(POINTS_PER_CENTROID * num_lists(factory), 65_536))
