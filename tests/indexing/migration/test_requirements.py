"""Requirements of a gate: their form, and the decision."""

from __future__ import annotations

import numpy as np
import pytest

from riptide.base.errors import InputError
from riptide.indexing.migration.requirements import MIN_QUERIES, Requirement, decide, overlaps


@pytest.mark.parametrize("text", ["nDCG@10", "nDCG@10 > 0", ">= 1", "nDCG@10 >= nan", "nDCG@10 >= x", "overlap >= 0.5"])
def test_another_form_is_one_line(text: str) -> None:
    with pytest.raises(InputError, match="require"):
        Requirement.parse(text)


def test_the_lower_end_decides() -> None:
    random = np.random.default_rng(0)
    required = Requirement.parse("nDCG@10>=-0.005")
    assert (required.metric, required.bound, required.is_overlap) == ("nDCG@10", -0.005, False)
    better, worse = (random.normal(mean, 0.1, 400) for mean in (0.02, -0.05))
    assert decide(required, better).is_met
    refused = decide(required, worse)
    assert not refused.is_met
    assert refused.needed is None
    assert refused.describe().endswith("not met, and more queries of this kind would not change it")
    noisy = decide(required, np.tile([-0.3, 0.33], 50))
    assert not noisy.is_met
    assert noisy.needed is not None
    assert noisy.needed > 100
    assert f"about {noisy.needed:,} queries are needed to tell" in noisy.describe()
    few = decide(required, np.full(MIN_QUERIES - 1, 0.5))
    assert (few.is_met, few.needed) == (False, MIN_QUERIES)
    near = decide(required, np.tile([-0.3, 0.28], 50))  # the mean is below the bound, and the upper end is above it
    assert near.describe().endswith("not met; the interval contains the bound, so more queries are needed to tell")

    for bound in (-1e-200, -5e-324):  # that many queries have no number
        at_bound = decide(Requirement("RR@10", bound), np.tile([-0.5, 0.5], 50))
        assert (at_bound.is_met, at_bound.needed) == (False, None)


def test_losses_that_no_query_of_the_sample_has_are_within_the_interval() -> None:
    """An encoder that loses 1 on 2% of the queries: without a loss in the sample, the bootstrap has the interval 0."""
    required = Requirement.parse("nDCG@10>=-0.005")
    none = decide(required, np.zeros(50))
    assert (none.is_met, none.low) == (False, pytest.approx(-0.0738))
    assert none.needed == 738
    assert decide(required, np.zeros(none.needed)).is_met
    random = np.random.default_rng(0)
    assert not any(decide(required, -(random.random(50) < 0.02).astype(float)).is_met for _ in range(20))
    equal = decide(Requirement.parse("overlap@10 >= 0.9"), np.ones(50))
    assert (equal.is_met, equal.low, equal.high) == (True, pytest.approx(0.9262), 1)


def test_overlaps_are_shares_of_the_first_hits() -> None:
    first, second = [["a", "b", "c"], ["a"], [], ["a", "b"]], [["b", "a", "x"], ["y"], [], ["a"]]
    assert overlaps(first, second, 2).tolist() == [1, 0, 1, 0.5]
