"""The kernel of exact search is loaded on every machine that can run it, and its bytes are the same on all of them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from kernels import ARCHITECTURES, load_for, must_load

from riptide.indexing.exact import Hits, kernel, merge_hits

pytestmark = pytest.mark.skipif(not must_load(), reason="kernels run on Linux")


def test_the_kernel_is_loaded() -> None:
    """Without it search falls back to torch, and only a warning says so."""
    library = kernel.load_kernel()
    assert library is not None
    assert library.riptide_amx() in (0, 1)


def results(library: ctypes.CDLL, queries: np.ndarray, vectors: np.ndarray) -> list[bytes]:
    """Returns the bytes of a search by two threads and of the scores of some candidates."""
    search = kernel.KernelSearch(library, queries, 20, 2)
    search.add(vectors, 0, np.arange(0, len(vectors), 5))
    hits = merge_hits([Hits(*partial) for partial in search.partial_hits()], 20)
    rows = np.random.default_rng(3).integers(-1, len(vectors), size=(len(queries), 50))
    return [
        hits.scores.tobytes(),
        hits.rows.tobytes(),
        kernel.score_pairs(library, queries, rows, vectors, 2).tobytes(),
    ]


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in ("alderlake", "skylake-avx512") else [])
        for name in ARCHITECTURES
    ],
)
def test_the_bytes_are_those_of_other_instruction_sets(architecture: str) -> None:
    """Products are integers or bfloat16 in registers of other widths; the last number has the largest magnitude."""
    library, native_library = kernel.declare_types(load_for(architecture, kernel.SOURCE)), kernel.load_kernel()
    assert native_library is not None
    rng = np.random.default_rng(0)
    for dim in (5, 83, 384):
        for dtype in (np.float16, np.float32):
            vectors = (rng.standard_normal((9_000, dim)) * 10.0 ** rng.uniform(-4, 3, (9_000, 1))).astype(dtype)
            vectors[70, -1] = 65_000
            queries = rng.standard_normal((70, dim), dtype=np.float32)
            for few in (70, 12, 1):
                assert results(library, queries[:few], vectors) == results(native_library, queries[:few], vectors)
