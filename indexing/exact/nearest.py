"""The nearest target of each of many vectors by inner product, and sums of vectors by target: what k-means repeats.

Both give the same bytes for any number of threads: the nearest target is the one with the largest exact score, as
`top_k` defines it, and each sum is taken in the order of the rows.
"""

from __future__ import annotations

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.exact import kernel as kernels
from riptide.indexing.exact.arrays import available_threads, check_queries, check_vectors

ROWS = 16_384  # vectors that are added in float64 at once without the kernel


class NearestTargets:
    """Targets that are prepared once, to find the one with the largest inner product of each of many vectors.

    Scores are exact and rounded to float32; of targets with equal scores the first one is the nearest.

    Args:
        targets: float32 [m, dim], at least one.
        threads: CPU threads; None: all that this process may use.
        use_kernel: Use the compiled kernel if it runs on this machine; otherwise torch.
    """

    def __init__(self, targets: np.ndarray, *, threads: int | None = None, use_kernel: bool = True):
        self._targets, self._threads = check_queries(targets), threads or available_threads()
        if not len(targets):
            raise InputError("found no target, expected at least one")
        library = kernels.load_kernel() if use_kernel else None
        self._kernel = None if library is None else kernels.KernelTargets(library, self._targets, self._threads)

    def find(self, vectors: np.ndarray) -> np.ndarray:
        """Returns the row of the nearest target of each vector: int32 [n]. Several threads may call it.

        Args:
            vectors: float16 or float32 [n, dim].

        Raises:
            InputError: For vectors of another shape or dtype, NaN, Inf and norms above 1e15.
        """
        vectors = check_vectors(vectors, self._targets.shape[1], 0)
        if self._kernel is not None:
            return self._kernel.find(vectors)
        from riptide.indexing.exact.torch_pass import find_nearest

        return find_nearest(vectors, self._targets, self._threads)


def sum_by_target(
    vectors: np.ndarray, nearest: np.ndarray, num_targets: int, *, threads: int | None = None, use_kernel: bool = True
) -> np.ndarray:
    """Returns the sum of the vectors of each target: float64 [num_targets, dim].

    Args:
        vectors: float16 or float32 [n, dim].
        nearest: The target of each vector, int32 [n], as `NearestTargets.find` returns them.
        num_targets: Number of targets.
        threads: CPU threads; None: all that this process may use.
        use_kernel: Use the compiled kernel if it runs on this machine; otherwise torch.
    """
    vectors = check_vectors(vectors, vectors.shape[1], 0)
    library = kernels.load_kernel() if use_kernel else None
    if library is not None:
        return kernels.sum_by_target(library, vectors, nearest, num_targets, threads or available_threads())
    import torch

    sums = torch.zeros((num_targets, vectors.shape[1]), dtype=torch.float64)
    for start in range(0, len(vectors), ROWS):
        block = vectors[start : start + ROWS].astype(np.float64)
        sums.index_add_(0, torch.from_numpy(nearest[start : start + ROWS].astype(np.int64)), torch.from_numpy(block))
    return sums.numpy()
