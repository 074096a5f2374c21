"""Losses of category positives (Topic-DPR, Eq. 3 to 7), compared with loops in float64 and finite differences."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from loss_checks import assert_gradient, assert_gradients, gradient_of, log_sum_exp, random

from riptide.retriever.objectives.category_term import category_loss, category_overlap, weighted_positives_loss
from riptide.retriever.objectives.topic_term import topic_loss

# The categories of the passages of a batch: subsets, equal sets, a set that no other one meets, and a chain of sets.
CATEGORIES = [{"a", "b"}, {"a"}, {"b", "c", "d"}, {"e"}, {"a", "b"}, {"d"}]
SIZE = len(CATEGORIES)


def members_of(categories: Sequence[set[str]]) -> torch.Tensor:
    names = sorted(set().union(*categories))
    return torch.tensor([[name in each for name in names] for each in categories])


def expected_rho(first: set[str], second: set[str]) -> float:
    """Topic-DPR, Eq. 6, of two sets."""
    return len(first & second) / len(first | second)


def expected_mean(
    scores: list[list[float]],
    queries: Sequence[set[str]],
    passages: Sequence[set[str]],
    counts_itself: bool,
    ignored: torch.Tensor | None = None,
) -> float:
    """Topic-DPR, Eq. 3 and 4, one pair at a time."""
    total = 0.0
    for row, of_row in enumerate(scores):
        others = [column for column in range(len(of_row)) if counts_itself or column != row]
        positives = [column for column in others if queries[row] & passages[column]]
        negatives = [
            of_row[column]
            for column in others
            if column not in positives and (ignored is None or not ignored[row, column])
        ]
        for column in positives:
            difference = log_sum_exp([of_row[column], *negatives]) - of_row[column]
            total += expected_rho(queries[row], passages[column]) * difference / len(positives)
    return total / len(scores)


def products(queries: torch.Tensor, passages: torch.Tensor, temperature: float) -> list[list[float]]:
    """Returns each inner product divided by the temperature."""
    rows = passages.tolist()
    return [[sum(map(operator.mul, query, row)) / temperature for row in rows] for query in queries.tolist()]


def units(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.nn.functional.normalize(random(*shape, seed=seed), dim=-1)


def test_the_overlap_equals_that_of_sets() -> None:
    rho = category_overlap(members_of(CATEGORIES))
    expected = [[expected_rho(first, second) for second in CATEGORIES] for first in CATEGORIES]
    np.testing.assert_allclose(rho.numpy(), expected, rtol=1e-6)
    assert rho[0].tolist() == pytest.approx([1, 1 / 2, 1 / 4, 0, 1, 0])
    pairs = category_overlap(members_of(CATEGORIES)[:2], members_of(CATEGORIES)[3:])
    assert torch.equal(pairs, rho[:2, 3:])


def test_pairs_without_categories_do_not_overlap() -> None:
    assert (category_overlap(torch.zeros(2, 3, dtype=torch.bool)) == 0).all()
    assert (category_overlap(torch.zeros(2, 0, dtype=torch.bool)) == 0).all()


def ignored_pairs() -> torch.Tensor:
    """A pair without a common category, one with, and all negatives of a query."""
    ignored = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    ignored[0, 3] = ignored[1, 4] = True
    ignored[3] = torch.tensor([True, True, True, False, True, True])
    return ignored


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("counts_itself", [False, True])
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_weighted_positives_equal_a_loop(
    temperature: float, counts_itself: bool, masked: bool, dtype: torch.dtype
) -> None:
    queries, passages = units(SIZE, 8).to(dtype), units(SIZE, 8, seed=1).to(dtype)
    ignored = ignored_pairs() if masked else None
    rho = category_overlap(members_of(CATEGORIES))
    actual = weighted_positives_loss(queries @ passages.T / temperature, rho, counts_itself, ignored)
    scores = products(queries, passages, temperature)
    expected = expected_mean(scores, CATEGORIES, CATEGORIES, counts_itself, ignored)
    assert (actual.shape, actual.dtype) == ((), dtype)
    assert actual.item() == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("counts_itself", [False, True])
def test_the_gradient_of_weighted_positives_equals_finite_differences(counts_itself: bool, masked: bool) -> None:
    rho, ignored = category_overlap(members_of(CATEGORIES)), ignored_pairs() if masked else None
    assert_gradient(lambda values: weighted_positives_loss(values, rho, counts_itself, ignored), random(SIZE, SIZE))


def test_a_positive_by_hand() -> None:
    """Scores 2, 1 and 0: the positives have the weights 1 and 1/2, and each meets the only negative."""
    members = members_of([{"a", "b"}, {"a"}, {"c"}])
    rho = category_overlap(members[:1], members)
    actual = weighted_positives_loss(torch.tensor([[2.0, 1.0, 0.0]]), rho)
    terms = [-math.log(math.exp(score) / (math.exp(score) + 1)) for score in (2, 1)]
    assert actual.item() == pytest.approx((terms[0] + terms[1] / 2) / 2, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_negatives_or_positives_there_is_no_loss_and_no_gradient(dtype: torch.dtype) -> None:
    scores = 100 * random(3, 3).to(dtype)
    for rho, counts_itself in ((torch.ones(3, 3), True), (torch.zeros(3, 3), True), (torch.eye(3), False)):
        assert weighted_positives_loss(scores, rho, counts_itself).item() == 0
        gradient = gradient_of(lambda values, r=rho, c=counts_itself: weighted_positives_loss(values, r, c), scores)
        assert (gradient == 0).all()


def test_large_similarities_do_not_overflow() -> None:
    scores = torch.tensor([[-1e4, 1e4], [1e4, -1e4]])
    assert weighted_positives_loss(scores, torch.eye(2)).item() == 2e4
    gradient = gradient_of(lambda values: weighted_positives_loss(values, torch.eye(2)), scores)
    assert gradient.tolist() == [[-0.5, 0.5], [0.5, -0.5]]


OWN = torch.tensor([3, 0, 2, 3, 5, 1, 4])  # two of the seven queries have the same passage


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5])
def test_the_loss_of_queries_and_passages_equals_loops(alpha: float, masked: bool) -> None:
    """Queries whose own passages are in another order than the queries."""
    queries, passages = units(len(OWN), 8), units(SIZE, 8, seed=1)
    of_queries = [CATEGORIES[number] for number in OWN.tolist()]
    ignored = ignored_pairs()[OWN] if masked else None
    rho = category_overlap(members_of(CATEGORIES))[OWN]
    actual = category_loss(queries, passages, rho, 0.1, alpha, OWN, ignored)
    by_passage = expected_mean(products(queries, passages, 0.1), of_queries, CATEGORIES, True, ignored)
    of_pairs = None if ignored is None else ignored[:, OWN]
    by_query = expected_mean(products(queries, queries, 0.1), of_queries, of_queries, False, of_pairs)
    expected = (1 - 2 * alpha) * by_passage + alpha * by_query
    assert by_query > 0
    assert actual.item() == pytest.approx(expected, rel=1e-6)
    assert_gradients(lambda left, right: category_loss(left, right, rho, 0.5, 0.25, OWN, ignored), queries, passages)


def test_queries_in_the_order_of_their_passages_need_no_positives() -> None:
    queries, passages, rho = units(SIZE, 8), units(SIZE, 8, seed=1), category_overlap(members_of(CATEGORIES))
    expected = category_loss(queries, passages, rho, 0.1, 0.3, torch.arange(SIZE))
    assert torch.equal(category_loss(queries, passages, rho, 0.1, 0.3), expected)


def expected_topic_loss(vectors: torch.Tensor, margin: float) -> float:
    """Topic-DPR, Eq. 5, one cosine at a time, and its mean over the prompts."""
    values = vectors.tolist()
    num_prompts, num_passages = len(values), len(values[0])

    def cosine(first: list[float], second: list[float]) -> float:
        return sum(map(operator.mul, first, second)) / math.hypot(*first) / math.hypot(*second)

    total = 0.0
    for own in range(num_prompts):
        for other in range(num_prompts):
            if other == own:
                continue
            for vector in values[own]:
                for same, moved in zip(values[own], values[other], strict=True):
                    total += max(margin - cosine(vector, same) + cosine(vector, moved), 0.0)
    return total / (num_prompts * (num_prompts - 1) * num_passages**2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("shape", [(2, 1, 4), (3, 4, 5)])
def test_the_topic_loss_equals_a_loop(shape: tuple[int, int, int], margin: float, dtype: torch.dtype) -> None:
    vectors = random(*shape).to(dtype)
    actual, expected = topic_loss(vectors, margin), expected_topic_loss(vectors, margin)
    assert (actual.shape, actual.dtype) == ((), dtype)
    assert actual.item() == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 1e-6, abs=1e-7)
    assert topic_loss(7 * vectors, margin).item() == pytest.approx(actual.item(), rel=1e-5), "cosines, of any length"


def test_the_gradient_of_the_topic_loss_equals_finite_differences() -> None:
    assert_gradient(lambda values: topic_loss(values, 0.3), random(3, 4, 5))


def test_the_topic_loss_of_one_prompt_and_of_separate_prompts_is_0() -> None:
    vectors = random(1, 4, 5)
    assert topic_loss(vectors, 0.5).item() == 0
    assert (gradient_of(lambda values: topic_loss(values, 0.5), vectors) == 0).all()
    opposite = torch.ones(2, 3, 5) * torch.tensor([1.0, -1.0])[:, None, None]
    assert topic_loss(opposite, 1.5).item() == 0
    assert topic_loss(opposite, 2.5).item() == pytest.approx(0.5)


def test_the_graph_of_the_topic_loss_keeps_no_pairs_of_prompts() -> None:
    """Its memory grows with the number of prompts, not with its square, nor with the pairs of passages."""
    sizes: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    vectors = random(12, 16, 4).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        topic_loss(vectors, 0.3)
    assert sizes
    assert max(sizes) == vectors.numel()  # all pairs of two prompts have 11 * 16 * 16 numbers
