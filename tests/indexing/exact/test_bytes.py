"""Searches of few queries by 8-bit copies: the bound on their scores holds, and the hits are exact."""

from __future__ import annotations

import ctypes
import functools
import itertools
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from kernels import ARCHITECTURES, load_for, must_load

from riptide.indexing.exact import Hits, OpenPart, exact_search, kernel, merge_hits, search_open_parts
from riptide.process import native

pytestmark = pytest.mark.skipif(not must_load(), reason="kernels run on Linux")

DIMS = (1, 2, 3, 5, 31, 32, 33, 63, 65, 100, 384, 1_100)
NATIVE = "native"
SETS = [
    NATIVE,
    "haswell",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("alderlake", "skylake-avx512", "icelake-server")),
]


def gaussian(rng: np.random.Generator, num_rows: int, dim: int) -> np.ndarray:
    return rng.standard_normal((num_rows, dim)).astype(np.float16)


def with_outliers(rng: np.random.Generator, num_rows: int, dim: int) -> np.ndarray:
    """One dimension has the largest magnitude of nearly all vectors, with either sign; so their center is small."""
    vectors = gaussian(rng, num_rows, dim)
    vectors[:, dim // 2] = rng.choice([-400, 400], num_rows)
    vectors[0] = 65_000
    return vectors


def with_common_part(rng: np.random.Generator, num_rows: int, dim: int) -> np.ndarray:
    return (100 * rng.standard_normal(dim) + rng.standard_normal((num_rows, dim))).astype(np.float16)


def with_zeros(rng: np.random.Generator, num_rows: int, dim: int) -> np.ndarray:
    vectors = gaussian(rng, num_rows, dim)
    vectors[rng.random(num_rows) < 0.5] = 0
    return vectors


def equal(rng: np.random.Generator, num_rows: int, dim: int) -> np.ndarray:
    return np.tile(gaussian(rng, 1, dim), (num_rows, 1))


def of_any_norm(rng: np.random.Generator, num_rows: int, dim: int) -> np.ndarray:
    """Norms from 1e-15 to 1e15, and some below the smallest magnitude that has a square."""
    vectors = rng.standard_normal((num_rows, dim))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors *= 10 ** rng.uniform(-15, 14.9, (num_rows, 1))
    vectors[:5] *= 1e-20
    return vectors.astype(np.float32)


def between_integers(rng: np.random.Generator, num_rows: int, dim: int) -> np.ndarray:
    """Every value is rounded by nearly half a step. Each vector has a negated one next to it, so the center is zero."""
    vectors = (rng.integers(-127, 127, (num_rows, dim)) + rng.choice([0.498, 0.502], (num_rows, dim))) / 127
    vectors[:, 0] = 1
    vectors[1::2] = -vectors[: num_rows // 2 * 2 : 2]
    return vectors.astype(np.float32)


FAMILIES = (gaussian, with_outliers, with_common_part, with_zeros, equal, of_any_norm, between_integers)


def rounding_of(vectors: np.ndarray) -> np.ndarray:
    """Returns float64 vectors less their 8-bit copies."""
    scales = np.abs(vectors).max(axis=1, keepdims=True) / 127
    return np.asarray(vectors - np.rint(vectors / scales) * scales)


@functools.cache
def load_scores(architecture: str, folder: Path) -> ctypes.CDLL:
    """Compiles the functions that write scores and bounds."""
    if architecture != NATIVE and ARCHITECTURES[architecture] not in native.cpu_info()[0]:
        pytest.skip(f"this CPU has no {ARCHITECTURES[architecture]}")
    source, library = Path(__file__).with_name("byte_scores.cpp"), folder / f"byte_scores-{architecture}.so"
    flags = native.compiler_flags() if architecture == NATIVE else (*native.FLAGS, f"-march={architecture}")
    folders = [f"-I{folder}" for folder in (native.HEADERS, kernel.SOURCE.parent)]
    subprocess.run(["g++", *flags, *folders, str(source), "-o", str(library)], check=True, timeout=600)
    loaded = ctypes.CDLL(str(library))
    if not loaded.byte_scores_exist():
        pytest.skip("this CPU has no instructions for bytes")
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    loaded.byte_scores.argtypes = [pointer, ctypes.c_int, long, long, pointer, long, pointer, pointer]
    return loaded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("byte_scores")


def largest_share(library: ctypes.CDLL, queries: np.ndarray, vectors: np.ndarray) -> float:
    """Returns the largest error of a score as a share of its bound."""
    largest = np.abs(queries).max(axis=1, keepdims=True)
    queries = np.ldexp(queries, -np.frexp(np.where(largest > 0, largest, 1))[1]).astype(np.float32)
    scores, bounds = (np.empty((len(queries), len(vectors)), np.float32) for _ in range(2))
    half = int(vectors.dtype == np.float16)
    arrays = [array.ctypes.data for array in (vectors, queries, scores, bounds)]
    library.byte_scores(arrays[0], half, *vectors.shape, arrays[1], len(queries), *arrays[2:])
    expected = queries.astype(np.longdouble) @ vectors.astype(np.longdouble).T
    assert np.isfinite(bounds).all()
    assert (bounds > 0).all()
    return float((np.abs(scores - expected) / bounds).max())


@pytest.mark.parametrize("architecture", SETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_score_is_farther_from_the_true_one_than_its_bound(
    architecture: str, family: Callable[..., np.ndarray], folder: Path
) -> None:
    library, rng = load_scores(architecture, folder), np.random.default_rng(0)
    for dim in DIMS:
        vectors = family(rng, 77, dim)
        queries = rng.standard_normal((7, dim)).astype(np.float32)
        queries[1, 0] = 1_000
        queries[2] = 0
        queries[3] = vectors[6]
        for scale in (1e-30, 1, 1e12):
            assert largest_share(library, (queries * scale).astype(np.float32), vectors) <= 1, (dim, scale)


@pytest.mark.parametrize("architecture", SETS)
def test_the_bound_is_nearly_reached_where_it_should_be(architecture: str, folder: Path) -> None:
    """Queries in the direction of a passage's rounding, and passages in that of a query's."""
    library, rng = load_scores(architecture, folder), np.random.default_rng(0)
    vectors = between_integers(rng, 64, 384)
    assert 0.95 < largest_share(library, rounding_of(vectors.astype(np.float64)).astype(np.float32), vectors) <= 1
    vectors = np.repeat(gaussian(rng, 32, 384), 2, axis=0)
    vectors[1::2] *= -1
    assert 0.95 < largest_share(library, rounding_of(vectors.astype(np.float64)).astype(np.float32), vectors) <= 1
    queries = rng.standard_normal((4, 384)).astype(np.float32)
    step = np.abs(queries).max(axis=1, keepdims=True).astype(np.float64) / (64 * 128)
    signs = np.sign(queries - np.rint(queries / step) * step)
    assert 0.7 < largest_share(library, queries, np.concatenate([signs, -signs]).astype(np.float32)) <= 1


def search_converted(
    library: ctypes.CDLL, queries: np.ndarray, vectors: np.ndarray, k: int, deleted: np.ndarray, edges: Sequence[int]
) -> Hits:
    """Searches converted vectors in parts that begin and end at `edges`."""
    search = kernel.KernelSearch(library, queries, k, 1)
    for low, high in itertools.pairwise(edges):
        gone = deleted[(deleted >= low) & (deleted < high)] - low
        search.add_converted(kernel.ConvertedVectors(library, vectors[low:high], low, gone))
    return merge_hits([Hits(*hits) for hits in search.partial_hits()], k)


def sort_all(
    library: ctypes.CDLL, queries: np.ndarray, vectors: np.ndarray, k: int, deleted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the top k by the exact scores of all rows, which are compared with those of NumPy."""
    live = np.setdiff1d(np.arange(len(vectors)), deleted)
    scores = kernel.score_pairs(library, queries, np.tile(live, (len(queries), 1)), vectors, 1)
    left, right = queries.astype(np.float64), vectors[live].astype(np.float64)
    tolerance = 1e-15 * (np.abs(left) @ np.abs(right).T) + 1e-7 * np.abs(scores) + 1e-45
    assert (np.abs(scores - left @ right.T) <= tolerance).all()
    order = np.array([np.lexsort((live, -mine))[:k] for mine in scores])
    found, rows = np.take_along_axis(scores, order, 1), live[order]
    padding = ((0, 0), (0, k - found.shape[1]))
    return np.pad(found, padding, constant_values=-np.inf), np.pad(rows, padding, constant_values=-1)


@pytest.mark.parametrize("architecture", SETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_hits_are_those_of_all_exact_scores(architecture: str, family: Callable[..., np.ndarray]) -> None:
    """Also with many candidates, after which products of 16 bits are used."""
    library = kernel.load_kernel() if architecture == NATIVE else load_for(architecture, kernel.SOURCE)
    assert library is not None
    library, rng = kernel.declare_types(library), np.random.default_rng(0)
    for dim in DIMS[::2]:
        vectors = family(rng, 3_001, dim)
        deleted = np.sort(rng.choice(3_001, 40, replace=False))
        queries = rng.standard_normal((33, dim)).astype(np.float32)
        queries[1] = vectors[1_700]
        queries[2] = 0
        for count, k in ((1, 10), (3, 100), (7, 1), (12, 10), (32, 3), (33, 3)):
            scores, rows = sort_all(library, queries[:count], vectors, k, deleted)
            for edges in ((0, 3_001), (0, 1, 33, 1_650, 3_001)):
                hits = search_converted(library, queries[:count], vectors, k, deleted, edges)
                np.testing.assert_array_equal(hits.rows, rows, str((dim, count, k, edges)))
                assert hits.scores.tobytes() == scores.tobytes()


@pytest.mark.parametrize("norm", [3e-15, 1e-15, 3e-16])
def test_scores_that_underflow_are_ordered_by_row_where_they_are_equal(norm: float) -> None:
    """Scores of about 1e-44 have few digits: many are equal only after rounding."""
    library, rng = kernel.load_kernel(), np.random.default_rng(0)
    assert library is not None
    vectors = (norm * rng.standard_normal((3_001, 33))).astype(np.float32)
    queries = (1e-30 * rng.standard_normal((3, 33))).astype(np.float32)
    _, rows = sort_all(library, queries, vectors, 100, np.empty(0, np.int64))
    parts = [(0, vectors[:1_000]), (1_000, vectors[1_000:])]
    for use_kernel in (True, False):
        np.testing.assert_array_equal(exact_search(queries, parts, 100, use_kernel=use_kernel).rows, rows)
    np.testing.assert_array_equal(
        search_open_parts(queries, [OpenPart(part, row) for row, part in parts], 100).rows, rows
    )


def test_many_parts_in_any_order_have_the_same_hits() -> None:
    rng = np.random.default_rng(0)
    vectors, queries = gaussian(rng, 20_000, 100), rng.standard_normal((5, 100)).astype(np.float32)
    expected = exact_search(queries, [(0, vectors)], 60)
    for step in (700, 9_000, 20_000):
        parts = [OpenPart(vectors[row : row + step], row) for row in range(0, len(vectors), step)]
        for ordered in (parts, parts[::-1]):
            hits = search_open_parts(queries, ordered, 60)
            assert hits.rows.tobytes() == expected.rows.tobytes()
            assert hits.scores.tobytes() == expected.scores.tobytes()


@pytest.mark.parametrize("dim", [1 << 17, (1 << 17) + 1])
def test_more_dimensions_than_sums_in_32_bits_allow(dim: int) -> None:
    """Sums of the largest integers: the last dim that has 8-bit copies, and the first one that has none."""
    vectors = np.full((3, dim), 1, np.float16)
    vectors[1, : dim // 2] = -1
    vectors[2, 5:] = 0
    queries = np.concatenate([vectors[:1], -vectors[:1]]).astype(np.float32)
    hits = search_open_parts(queries, [OpenPart(vectors, 0)], 3)
    scores = np.array([[dim, 5, dim - 2 * (dim // 2)], [2 * (dim // 2) - dim, -5, -dim]], np.float32)
    np.testing.assert_array_equal(hits.rows, [[0, 2, 1], [1, 2, 0]])
    np.testing.assert_array_equal(hits.scores, scores)
