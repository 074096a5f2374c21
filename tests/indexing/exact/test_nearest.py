"""The nearest targets are compared with products in float64, and sums with additions one by one."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import ARCHITECTURES, load_for, must_load

from riptide.base.errors import InputError
from riptide.indexing.exact import kernel as kernels
from riptide.indexing.exact.nearest import NearestTargets, sum_by_target

needs_kernel = pytest.mark.skipif(not must_load(), reason="the kernel does not run on this machine")
ENGINES = [pytest.param(True, marks=needs_kernel, id="kernel"), pytest.param(False, id="torch")]


def brute_force(vectors: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The first of the targets with the largest score, which is rounded to float32 as by a search."""
    scores = vectors.astype(np.float64) @ targets.T.astype(np.float64)
    return scores.astype(np.float32).argmax(axis=1)


@pytest.mark.parametrize("use_kernel", ENGINES)
@pytest.mark.parametrize(("dim", "count"), [(1, 3), (5, 1), (33, 40), (384, 700), (387, 64), (1_024, 33)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_target_of_each_vector_is_that_of_brute_force(
    use_kernel: bool, dim: int, count: int, dtype: type[np.floating]
) -> None:
    random = np.random.default_rng(dim)
    vectors = random.standard_normal((1_500, dim)).astype(dtype)
    targets = random.standard_normal((count, dim)).astype(np.float32)
    expected = brute_force(vectors, targets)
    for threads in (1, 3):
        found = NearestTargets(targets, threads=threads, use_kernel=use_kernel).find(vectors)
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_for_other_cpus_find_the_same(architecture: str) -> None:
    library = kernels.declare_types(load_for(architecture, kernels.SOURCE))
    random = np.random.default_rng(0)
    targets = random.standard_normal((300, 67)).astype(np.float32)
    for dtype in (np.float16, np.float32):
        vectors = random.standard_normal((1_000, 67)).astype(dtype)
        found = kernels.KernelTargets(library, targets, 2).find(vectors)
        np.testing.assert_array_equal(found, brute_force(vectors, targets))
        sums = kernels.sum_by_target(library, vectors, found, 300, 2)
        assert sums.tobytes() == sum_by_target(vectors, found, 300, use_kernel=False).tobytes()


@pytest.mark.parametrize("use_kernel", ENGINES)
def test_targets_that_low_precision_cannot_tell_apart(use_kernel: bool) -> None:
    """1,000 targets whose scores differ by less than the error of bfloat16, and twice as many copies of them."""
    random = np.random.default_rng(0)
    center = random.standard_normal(64)
    targets = (center + 1e-4 * random.standard_normal((1_000, 64))).astype(np.float32)
    targets = np.concatenate([targets, targets[::-1], targets])
    vectors = (center + random.standard_normal((300, 64))).astype(np.float16)
    found = NearestTargets(targets, use_kernel=use_kernel).find(vectors)
    np.testing.assert_array_equal(found, brute_force(vectors, targets))
    assert found.max() < 1_000
    zeros = np.zeros((3, 64), np.float16)
    np.testing.assert_array_equal(NearestTargets(targets, use_kernel=use_kernel).find(zeros), [0, 0, 0])


@pytest.mark.parametrize("use_kernel", ENGINES)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_sums_are_taken_in_the_order_of_the_rows(use_kernel: bool, dtype: type[np.floating]) -> None:
    random = np.random.default_rng(0)
    vectors = (random.standard_normal((4_000, 37)) * np.exp(random.uniform(-4, 4, (4_000, 1)))).astype(dtype)
    nearest = random.integers(0, 50, len(vectors)).astype(np.int32)
    nearest[nearest == 7] = 8  # a target without vectors
    expected = np.zeros((50, 37))
    for row, target in enumerate(nearest):
        expected[target] += vectors[row]
    for threads in (1, 2, 5):
        assert (
            sum_by_target(vectors, nearest, 50, threads=threads, use_kernel=use_kernel).tobytes() == expected.tobytes()
        )


@pytest.mark.parametrize("use_kernel", ENGINES)
def test_vectors_that_are_not_finite_are_refused(use_kernel: bool) -> None:
    vectors = np.ones((40, 8), np.float32)
    vectors[33, 5] = np.nan
    with pytest.raises(InputError, match="row 33 has NaN, Inf or a norm above 1e15"):
        NearestTargets(np.ones((2, 8), np.float32), use_kernel=use_kernel).find(vectors)
    with pytest.raises(InputError, match=r"expected \[n, 9\]"):
        NearestTargets(np.ones((2, 9), np.float32), use_kernel=use_kernel).find(vectors)
    with pytest.raises(InputError, match="found no target"):
        NearestTargets(np.ones((0, 8), np.float32), use_kernel=use_kernel).find(vectors)
