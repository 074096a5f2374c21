r"""Maps from the vectors of one encoder to those of another one, fitted on texts that both have encoded.

The queries of a new encoder search the passages' vectors of the old encoder after such a map. With the rows x_i of X
(new encoder, n x d) and y_i of Y (old encoder, n x e), all scaled to length 1:

identity     y = x, if both have the same dimensions
orthogonal   y = x W, W = U V^T with X^T Y = U S V^T: the solution of min |X W - Y|_F over matrices with orthonormal
             columns (rows, if d < e). Schönemann 1966, "A generalized solution of the orthogonal Procrustes problem".
affine       y = (x - m) W + c with the means m and c, W = (X'^T X' + λ n I)^-1 X'^T Y' of the centred X' and Y': ridge
             regression (Hoerl and Kennard 1970); λ is the one of STRENGTHS with the largest held-out cosine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from riptide.base.errors import InputError

HELD_OUT = 0.2  # share of the texts that measure a map
MIN_TEXTS = 20  # fewer texts fit and measure nothing
STRENGTHS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
NEIGHBOURS = 10
MAX_HELD_OUT = 2_000  # held-out texts whose neighbours are compared: their similarities are one matrix


@dataclass(frozen=True)
class SpaceMap:
    """A map from new vectors to old ones, with its quality on texts that it was not fitted on.

    Attributes:
        name: identity, orthogonal or affine.
        weights: float32 [d, e].
        offset: float32 [e].
        cosine: Mean cosine of a mapped vector and the old vector of the same text.
        neighbours: Mean share of the NEIGHBOURS nearest old vectors of the other held-out texts that a mapped vector
            has in common with the old vector of the same text.
    """

    name: str
    weights: np.ndarray
    offset: np.ndarray
    cosine: float = float("nan")
    neighbours: float = float("nan")

    def apply(self, vectors: np.ndarray) -> np.ndarray:
        """Maps new vectors of any length, float32 [n, d], to the old space: float32 [n, e], scaled to length 1."""
        return unit_rows(unit_rows(vectors) @ self.weights + self.offset)


def fit_maps(new: np.ndarray, old: np.ndarray, *, seed: int = 0) -> list[SpaceMap]:
    """Fits each map on all texts, and measures it by a fit without a held-out part.

    Args:
        new: Vectors of the new encoder, float [n, d].
        old: Vectors of the old encoder for the same texts, float [n, e].
        seed: Seed of the held-out part.

    Returns:
        The maps; identity only if d = e.

    Raises:
        InputError: For fewer than MIN_TEXTS texts.
    """
    if len(new) < MIN_TEXTS:
        raise InputError(f"{len(new):,} texts to fit a map between two encoders, expected at least {MIN_TEXTS}")
    new, old = unit_rows(new), unit_rows(old)
    order = np.random.default_rng(seed).permutation(len(new))
    held_out, training = np.split(order, [round(HELD_OUT * len(new))])
    held_out = held_out[:MAX_HELD_OUT]
    affine_maps = _fit_affine(new[training], old[training], STRENGTHS)
    cosines = [_mean_cosine(affine_map.apply(new[held_out]), old[held_out]) for affine_map in affine_maps]
    strength = STRENGTHS[int(np.argmax(cosines))]

    def fit(rows: np.ndarray) -> list[SpaceMap]:
        maps = [_fit_orthogonal(new[rows], old[rows]), *_fit_affine(new[rows], old[rows], [strength])]
        if new.shape[1] == old.shape[1]:
            maps.insert(0, _map("identity", np.eye(new.shape[1])))
        return maps

    qualities = [_measure(each, new[held_out], old[held_out]) for each in fit(training)]
    return [
        SpaceMap(whole.name, whole.weights, whole.offset, *quality)
        for whole, quality in zip(fit(order), qualities, strict=True)
    ]


def best_map(maps: list[SpaceMap]) -> SpaceMap:
    """Returns the map with the largest share of common neighbours; if several have it, the first one, as simpler."""
    return max(maps, key=lambda space_map: space_map.neighbours)


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    """Scales the rows of an array to length 1, as float32; rows of zeros stay."""
    vectors = np.asarray(vectors, np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))


def _fit_orthogonal(new: np.ndarray, old: np.ndarray) -> SpaceMap:
    left, _, right = np.linalg.svd(new.T.astype(np.float64) @ old, full_matrices=False)
    return _map("orthogonal", left @ right)


def _fit_affine(new: np.ndarray, old: np.ndarray, strengths: Sequence[float]) -> list[SpaceMap]:
    """Returns the affine map of each strength, from one eigendecomposition.

    `np.linalg.solve` needs more stack than a JVM leaves to the main thread: it would end the process.
    """
    mean, target = new.mean(axis=0, dtype=np.float64), old.mean(axis=0, dtype=np.float64)
    centred = new - mean
    values, vectors = np.linalg.eigh(centred.T @ centred)
    projected = vectors.T @ (centred.T @ (old - target))
    maps = list[SpaceMap]()
    for strength in strengths:
        weights = vectors @ (projected / (np.maximum(values, 0) + strength * len(new))[:, None])
        maps.append(_map("affine", weights, target - mean @ weights))
    return maps


def _map(name: str, weights: np.ndarray, offset: np.ndarray | None = None) -> SpaceMap:
    offset = np.zeros(weights.shape[1]) if offset is None else offset
    return SpaceMap(name, weights.astype(np.float32), offset.astype(np.float32))


def _measure(space_map: SpaceMap, new: np.ndarray, old: np.ndarray) -> tuple[float, float]:
    """Returns the mean cosine and the share of common neighbours of a map on held-out texts."""
    mapped = space_map.apply(new)
    k = min(NEIGHBOURS, len(old) - 1)
    nearest, expected = (_nearest_others(vectors, old, k) for vectors in (mapped, old))
    common = [len({*one} & {*other}) / k for one, other in zip(nearest.tolist(), expected.tolist(), strict=True)]
    return _mean_cosine(mapped, old), float(np.mean(common))


def _nearest_others(vectors: np.ndarray, targets: np.ndarray, k: int) -> np.ndarray:
    """Returns the numbers of the k targets nearest to each vector, without the target of the same number."""
    similarities = vectors @ targets.T
    np.fill_diagonal(similarities, -np.inf)
    return np.argpartition(-similarities, k - 1, axis=1)[:, :k]


def _mean_cosine(mapped: np.ndarray, old: np.ndarray) -> float:
    return float(np.einsum("ij,ij->i", mapped, old, dtype=np.float64).mean())
