"""Losses and their gradients, compared with loops over single scores in float64 and with finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from loss_checks import assert_gradient, assert_gradients, gradient_of, log_sum_exp, random

from riptide.retriever.objectives.contrastive import contrastive_loss, own_passages_loss, symmetric_loss
from riptide.retriever.objectives.pair_term import BatchLabels, batch_loss
from riptide.retriever.options.reranking import PairLoss
from riptide.retriever.systems.cross import pair_loss
from riptide.retriever.systems.rip import rip_loss


def expected_contrastive(
    queries: np.ndarray, passages: np.ndarray, positives: list[int], temperature: float, ignored: np.ndarray
) -> float:
    """DPTDR, Eq. 3, one scalar product at a time."""
    total = 0.0
    for row, query in enumerate(queries):
        scores = {}
        for column, passage in enumerate(passages):
            if not ignored[row, column]:
                product = 0.0
                for left, right in zip(query, passage, strict=True):
                    product += float(left) * float(right)
                scores[column] = product / temperature
        total += log_sum_exp(list(scores.values())) - scores[positives[row]]
    return total / len(queries)


POSITIVES = torch.tensor([3, 0, 8, 3, 1])  # two queries share a passage


def ignored_pairs() -> torch.Tensor:
    """Further positives: none for some queries, several for others."""
    ignored = torch.zeros(5, 9, dtype=torch.bool)
    ignored[0, 5] = ignored[3, 0] = ignored[3, 7] = ignored[3, 8] = True
    return ignored


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("temperature", [0.05, 0.5, 1.0, 20.0])
def test_the_contrastive_loss_equals_a_loop(temperature: float, masked: bool, dtype: torch.dtype) -> None:
    queries, passages = random(5, 8).to(dtype), random(9, 8, seed=1).to(dtype)
    ignored = ignored_pairs() if masked else torch.zeros(5, 9, dtype=torch.bool)
    actual = contrastive_loss(queries, passages, POSITIVES, temperature, ignored)
    expected = expected_contrastive(queries.numpy(), passages.numpy(), POSITIVES.tolist(), temperature, ignored.numpy())
    assert (actual.shape, actual.dtype) == ((), dtype)
    assert actual.item() == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 1e-12)
    if not masked:
        assert torch.equal(contrastive_loss(queries, passages, POSITIVES, temperature), actual)


def test_the_contrastive_loss_has_temperature_1_by_default() -> None:
    queries, passages = random(5, 8), random(9, 8, seed=1)
    expected = expected_contrastive(queries.numpy(), passages.numpy(), POSITIVES.tolist(), 1.0, np.zeros((5, 9), bool))
    assert contrastive_loss(queries, passages, POSITIVES).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_contrastive_gradient_equals_finite_differences(temperature: float, masked: bool) -> None:
    queries, passages = random(5, 4), random(9, 4, seed=1)
    ignored = ignored_pairs() if masked else None
    assert_gradients(
        lambda left, right: contrastive_loss(left, right, POSITIVES, temperature, ignored), queries, passages
    )


def test_an_ignored_passage_has_no_part_in_a_querys_loss() -> None:
    """Its score changes neither loss nor gradients, and an infinite or undefined gradient does not come from it."""
    queries, passages = random(1, 4), random(4, 4, seed=1)
    ignored = torch.tensor([[False, True, False, True]])
    positives = torch.tensor([2])

    def loss(values: torch.Tensor) -> torch.Tensor:
        return contrastive_loss(queries, values, positives, 0.5, ignored)

    alone = contrastive_loss(queries, passages[[0, 2]], torch.tensor([1]), 0.5)
    assert loss(passages).item() == pytest.approx(alone.item(), rel=1e-14)
    gradient = gradient_of(loss, passages)
    assert (gradient[[1, 3]] == 0).all()
    assert (gradient[[0, 2]] != 0).all()
    passages[1] = 1e6 * queries[0]
    assert loss(passages).item() == pytest.approx(alone.item(), rel=1e-14)
    assert torch.isfinite(gradient_of(loss, passages)).all()


def test_a_passage_that_one_query_ignores_is_a_negative_of_the_others() -> None:
    queries, passages, positives = random(2, 4), random(3, 4, seed=1), torch.tensor([0, 1])
    ignored = torch.tensor([[False, False, True], [False, False, False]])
    first = contrastive_loss(queries[:1], passages[:2], positives[:1], 0.5)
    second = contrastive_loss(queries[1:], passages, positives[1:], 0.5)
    actual = contrastive_loss(queries, passages, positives, 0.5, ignored)
    assert actual.item() == pytest.approx((first.item() + second.item()) / 2, rel=1e-14)


@pytest.mark.parametrize("num_passages", [1, 2, 7])
def test_equal_scores_share_the_probability(num_passages: int) -> None:
    """The positive counts once in the sum: n equal scores give log n, which is 0 for a positive without negatives."""
    queries = random(3, 4)
    passages = random(1, 4, seed=1).expand(num_passages, 4)
    positives = torch.arange(3) % num_passages
    assert contrastive_loss(queries, passages, positives, 0.3).item() == pytest.approx(
        math.log(num_passages), abs=1e-14
    )
    gradient = gradient_of(lambda values: contrastive_loss(values, passages, positives, 0.3), queries)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_a_positive_without_negatives_has_no_loss_and_no_gradient() -> None:
    """One passage for one query, or all other passages ignored."""
    queries, passages = random(2, 4), random(3, 4, seed=1)
    ignored = torch.tensor([[False, True, True], [True, True, False]])
    for loss in (
        lambda values: contrastive_loss(values[:1], passages[:1], torch.tensor([0])),
        lambda values: contrastive_loss(values, passages, torch.tensor([0, 2]), 0.1, ignored),
    ):
        assert loss(queries).item() == 0
        assert (gradient_of(loss, queries) == 0).all()


def test_one_query_with_known_scores() -> None:
    """Scores 1, 0 and -1 by hand, and one step of temperature."""
    query, passages = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 5.0], [0.0, 5.0], [-1.0, 5.0]])
    for temperature in (1.0, 0.5):
        scores = [math.exp(score / temperature) for score in (1, 0, -1)]
        for positive in range(3):
            actual = contrastive_loss(query, passages, torch.tensor([positive]), temperature)
            assert actual.item() == pytest.approx(-math.log(scores[positive] / sum(scores)), rel=1e-6)


def test_the_temperature_divides_the_scores() -> None:
    queries, passages = random(5, 4), random(9, 4, seed=1)
    scaled = contrastive_loss(queries / 0.05, passages, POSITIVES)
    assert contrastive_loss(queries, passages, POSITIVES, 0.05).item() == pytest.approx(scaled.item(), rel=1e-13)


def test_large_scores_do_not_overflow() -> None:
    """exp(1000) is infinite in float32; the loss is a difference of scores."""
    queries, passages = torch.tensor([[1000.0]]), torch.tensor([[1.0], [0.5], [-1.0]])
    losses = [contrastive_loss(queries, passages, torch.tensor([positive])).item() for positive in range(3)]
    assert losses == [0, 500, 2000]
    gradient = gradient_of(lambda values: contrastive_loss(values, passages, torch.tensor([1])), queries)
    assert gradient.item() == pytest.approx(0.5)


def expected_symmetric(
    queries: np.ndarray, passages: np.ndarray, positives: list[int], temperature: float, ignored: np.ndarray
) -> float:
    """Both directions, one pair at a time: queries that a passage answers are no negatives of it."""
    total = 0.0
    for number, positive in enumerate(positives):
        scores = {}
        for other, query in enumerate(queries):
            is_answered = positives[other] == positive or ignored[other, positive]
            if other == number or not is_answered:
                scores[other] = float(query @ passages[positive]) / temperature
        total += log_sum_exp(list(scores.values())) - scores[number]
    by_query = expected_contrastive(queries, passages, positives, temperature, ignored)
    return (by_query + total / len(queries)) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_the_symmetric_loss_equals_a_loop(temperature: float, masked: bool, dtype: torch.dtype) -> None:
    """Two queries share a positive, and with the mask a passage that is one query's positive answers another one."""
    queries, passages = random(5, 8).to(dtype), random(9, 8, seed=1).to(dtype)
    ignored = ignored_pairs() if masked else torch.zeros(5, 9, dtype=torch.bool)
    actual = symmetric_loss(queries, passages, POSITIVES, temperature, ignored)
    rows = queries.double().numpy(), passages.double().numpy()
    expected = expected_symmetric(*rows, POSITIVES.tolist(), temperature, ignored.numpy())
    assert (actual.shape, actual.dtype) == ((), dtype)
    assert actual.item() == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 1e-12)
    if not masked:
        assert torch.equal(symmetric_loss(queries, passages, POSITIVES, temperature), actual)


@pytest.mark.parametrize("masked", [False, True])
def test_the_symmetric_gradient_equals_finite_differences(masked: bool) -> None:
    queries, passages = random(5, 4), random(9, 4, seed=1)
    ignored = ignored_pairs() if masked else None
    assert_gradients(lambda left, right: symmetric_loss(left, right, POSITIVES, 0.5, ignored), queries, passages)


def test_the_symmetric_loss_is_that_of_sentence_transformers() -> None:
    """Its passages are the positives, one for each query, and then the negatives."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesSymmetricRankingLoss
    from sentence_transformers.util import dot_score

    queries, positives, negatives = random(6, 8), random(6, 8, seed=1), random(6, 8, seed=2)
    peer = MultipleNegativesSymmetricRankingLoss(None, scale=2.0, similarity_fct=dot_score)
    expected = peer.compute_loss_from_embeddings([queries, positives, negatives], torch.empty(0))
    actual = symmetric_loss(queries, torch.cat([positives, negatives]), torch.arange(6), 0.5)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-12)


def test_queries_of_the_same_passage_are_no_negatives_of_it() -> None:
    """If one passage answers all queries, only the direction from queries to passages has a loss."""
    queries, passages, positives = random(3, 4), random(4, 4, seed=1), torch.tensor([2, 2, 2])
    expected = contrastive_loss(queries, passages, positives, 0.5) / 2
    assert symmetric_loss(queries, passages, positives, 0.5).item() == pytest.approx(expected.item(), rel=1e-14)
    assert symmetric_loss(queries[:1], passages[2:3], torch.tensor([0])).item() == 0


@pytest.mark.parametrize("num_passages", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rip_loss_equals_a_loop(num_passages: int, dtype: torch.dtype) -> None:
    """Eq. 4: the partner of row 2i is row 2i + 1, and a unit is no negative of itself."""
    vectors = random(2 * num_passages, 6).to(dtype)
    rows = vectors.double().numpy()
    total = 0.0
    for row, vector in enumerate(rows):
        scores = {other: float(vector @ rows[other]) for other in range(len(rows)) if other != row}
        total += log_sum_exp(list(scores.values())) - scores[row + 1 if row % 2 == 0 else row - 1]
    actual = rip_loss(vectors)
    assert (actual.shape, actual.dtype) == ((), dtype)
    assert actual.item() == pytest.approx(total / len(rows), rel=1e-5 if dtype == torch.float32 else 1e-12)


def test_the_rip_gradient_equals_finite_differences() -> None:
    assert_gradient(rip_loss, random(8, 4) / 2)


def test_the_rip_gradient_without_excluded_units_equals_finite_differences() -> None:
    """Rows 0 to 3 are of one passage, and row 4 has the text of row 7; a unit without negatives gets no gradient."""
    passages, texts = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 2, 3, 4, 5, 6, 4])
    assert_gradient(lambda values: rip_loss(values, passages, texts), random(8, 4) / 2)
    gradient = gradient_of(lambda values: rip_loss(values, passages[:4], texts[:4]), random(4, 4))
    assert (gradient == 0).all()


def test_the_rip_loss_of_equal_vectors_and_of_one_pair() -> None:
    assert rip_loss(torch.ones(6, 4)).item() == pytest.approx(math.log(5), rel=1e-6)
    assert rip_loss(random(2, 4)).item() == 0, "a pair without other units has no negatives"
    assert (gradient_of(rip_loss, random(2, 4)) == 0).all()


def expected_cross(logits: np.ndarray, loss: PairLoss) -> float:
    """The sum over queries; column 0 is the positive."""
    total = 0.0
    for scores in logits.tolist():
        if loss == "listwise":
            total += log_sum_exp(scores) - scores[0]
        else:
            signs = [1, *[-1] * (len(scores) - 1)]
            pairs = [math.log1p(math.exp(-sign * score)) for sign, score in zip(signs, scores, strict=True)]
            total += sum(pairs) / len(pairs)
    return total


@pytest.mark.parametrize("loss", ["bce", "listwise"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (6, 1), (6, 4)])
def test_the_losses_of_a_reranker_equal_a_loop(shape: tuple[int, int], loss: PairLoss) -> None:
    logits = 3 * random(*shape)
    expected = expected_cross(logits.numpy(), loss)
    assert pair_loss(logits, loss).item() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert pair_loss(logits.float(), loss).item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    if loss == "bce" or shape[1] > 1:
        assert_gradient(lambda values: pair_loss(values, loss), logits)


@pytest.mark.parametrize(("loss", "expected"), [("bce", 2 * math.log(2)), ("listwise", 2 * math.log(4))])
def test_the_losses_of_a_reranker_with_equal_scores(loss: PairLoss, expected: float) -> None:
    assert pair_loss(torch.zeros(2, 4), loss).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("loss", "expected"), [("bce", (1000 + math.log(2)) / 2), ("listwise", 1000.0)])
def test_the_losses_of_a_reranker_do_not_overflow(loss: PairLoss, expected: float) -> None:
    """The positive's score is 1000 below the negative's."""
    logits = torch.tensor([[-1000.0, 0.0]])
    assert pair_loss(logits, loss).item() == pytest.approx(expected, rel=1e-6)
    assert torch.isfinite(gradient_of(lambda values: pair_loss(values, loss), logits)).all()


GROUPS = torch.tensor([[3, 5, 0, 6], [0, 1, 2, 2], [8, 7, 4, 1], [3, 0, 5, 7], [1, 3, 6, 8]])  # one has 2 twice


def expected_own(queries: np.ndarray, passages: np.ndarray, temperature: float, ignored: np.ndarray) -> float:
    """HYPER, Eq. 6, one scalar product at a time; the first passage of a group is the positive."""
    total = 0.0
    for row, (query, group) in enumerate(zip(queries.tolist(), GROUPS.tolist(), strict=True)):
        scores = [
            sum(left * right for left, right in zip(query, passages[passage].tolist(), strict=True)) / temperature
            for passage in group
            if not ignored[row, passage]
        ]
        total += log_sum_exp(scores) - scores[0]
    return total / len(queries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_the_loss_of_own_negatives_equals_a_loop(temperature: float, masked: bool, dtype: torch.dtype) -> None:
    queries, passages = random(5, 8).to(dtype), random(9, 8, seed=1).to(dtype)
    ignored = ignored_pairs() if masked else torch.zeros(5, 9, dtype=torch.bool)
    expected = expected_own(queries.double().numpy(), passages.double().numpy(), temperature, ignored.numpy())
    actual = own_passages_loss(queries, passages, GROUPS, temperature, ignored)
    assert actual.item() == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 1e-12)
    labels = BatchLabels(POSITIVES, ignored, groups=GROUPS)
    assert batch_loss("contrastive", queries, passages, labels, temperature, negatives_from="own") == actual


@pytest.mark.parametrize("masked", [False, True])
def test_the_gradient_of_own_negatives_equals_finite_differences(masked: bool) -> None:
    """Passages of other queries alone get no gradient."""
    queries, passages = random(5, 4), random(9, 4, seed=1)
    ignored = ignored_pairs() if masked else None
    assert_gradients(lambda left, right: own_passages_loss(left, right, GROUPS, 0.5, ignored), queries, passages)
    gradient = gradient_of(lambda values: own_passages_loss(queries[:1], values, GROUPS[:1]), passages)
    assert gradient.abs().amax(1).nonzero().flatten().tolist() == sorted(GROUPS[0].tolist())
