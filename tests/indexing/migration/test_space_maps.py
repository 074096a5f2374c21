"""Maps between the vectors of two encoders, against maps that are known."""

from __future__ import annotations

import numpy as np
import pytest

from riptide.base.errors import InputError
from riptide.indexing.migration.space_maps import SpaceMap, best_map, fit_maps, unit_rows


def maps_of(new: np.ndarray, old: np.ndarray) -> dict[str, SpaceMap]:
    return {each.name: each for each in fit_maps(new, old)}


def test_a_rotation_is_found_by_procrustes_and_by_regression() -> None:
    random = np.random.default_rng(0)
    new = unit_rows(random.standard_normal((400, 12)))
    rotation = np.linalg.qr(random.standard_normal((12, 12)))[0]
    maps = maps_of(new, new @ rotation)
    assert np.abs(maps["orthogonal"].weights - rotation).max() < 1e-5
    assert (maps["orthogonal"].neighbours, maps["orthogonal"].cosine) == (1, pytest.approx(1))
    assert maps["affine"].cosine == pytest.approx(1, abs=1e-4)
    assert maps["identity"].neighbours < 0.5
    assert best_map(list(maps.values())).name == "orthogonal"
    assert best_map(fit_maps(new, new)).name == "identity"  # the simplest of several equal maps


@pytest.mark.parametrize(("new_dim", "old_dim"), [(20, 12), (12, 20)])
def test_encoders_of_other_dimensions_are_mapped(new_dim: int, old_dim: int) -> None:
    """Both see the same eight numbers, linearly; the affine map finds the relation, and there is no identity."""
    random = np.random.default_rng(1)
    shared = random.standard_normal((600, 8))
    new, old = (shared @ random.standard_normal((8, dim)) for dim in (new_dim, old_dim))
    maps = maps_of(new, old)
    assert set(maps) == {"orthogonal", "affine"}
    weights = maps["orthogonal"].weights
    smaller = weights.T @ weights if new_dim > old_dim else weights @ weights.T
    assert np.abs(smaller - np.eye(len(smaller))).max() < 1e-5
    assert maps["affine"].cosine > 0.9
    for each in maps.values():  # vectors of similarity dot have any length
        mapped = each.apply(new * 12)
        assert np.abs(mapped - each.apply(unit_rows(new))).max() < 1e-5
        assert np.einsum("ij,ij->i", mapped, unit_rows(old)).mean() == pytest.approx(each.cosine, abs=0.02)


def test_the_regression_that_is_measured_has_not_seen_the_held_out_texts() -> None:
    """Vectors without a relation: a fit on the measured texts themselves would show one."""
    random = np.random.default_rng(2)
    maps = maps_of(random.standard_normal((80, 40)), random.standard_normal((80, 40)))
    assert abs(maps["affine"].cosine) < 0.2
    with pytest.raises(InputError, match="19 texts to fit a map between two encoders, expected at least 20"):
        fit_maps(np.ones((19, 4)), np.ones((19, 4)))
