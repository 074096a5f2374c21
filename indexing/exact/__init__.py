"""Exact top-k search by inner product over plain arrays.

arrays        checks of queries and vectors, and the hits of a search
top_k         exact top-k search over parts of vectors, and exact scores of given candidates
nearest       the nearest target of each of many vectors, and sums by target, for k-means
kernel        compiles and loads the C++ kernel (exact_kernel.cpp, passages.h, bytes.h)
score_parts   the parts of the score of a hit in one source: terms, or the probed list
torch_pass    exact search with torch, for GPUs and for machines without a C++ compiler

Importing this package loads no torch: `torch_pass` is imported by the functions that need it.
"""

from riptide.indexing.exact.arrays import (
    Hits,
    available_threads,
    check_queries,
    check_vectors,
    empty_hits,
    merge_hits,
    pad_hits,
    without_rows,
)
from riptide.indexing.exact.top_k import (
    ExactSearch,
    OpenPart,
    exact_search,
    rescore_candidates,
    search_open_parts,
)

__all__ = [
    "ExactSearch",
    "Hits",
    "OpenPart",
    "available_threads",
    "check_queries",
    "check_vectors",
    "empty_hits",
    "exact_search",
    "merge_hits",
    "pad_hits",
    "rescore_candidates",
    "search_open_parts",
    "without_rows",
]
