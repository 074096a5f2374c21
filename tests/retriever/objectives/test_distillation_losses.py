"""Distillation losses: compared with loops over single scores in float64, finite differences, sentence-transformers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from loss_checks import assert_gradients, gradient_of, log_sum_exp, random

from riptide.retriever.objectives.contrastive import contrastive_loss
from riptide.retriever.objectives.distillation import kl_loss, margin_mse_loss, teacher_logits
from riptide.retriever.objectives.pair_term import BatchLabels, batch_loss

# Groups share passages; the third query has one negative, the last one none.
GROUPS = torch.tensor([[3, 0, 8], [0, 5, 3], [8, 1, 2], [3, 4, 6]])
TEACHER = torch.tensor([[4.0, -1.0, 2.0], [1.0, 3.0, -6.0], [0.5, math.nan, -2.0], [2.0, math.nan, math.nan]])
LOSSES = [kl_loss, margin_mse_loss]


def expected_kl(scores: list[dict[int, float]], teacher: list[dict[int, float]]) -> float:
    """The mean over queries of sum_i t_i log(t_i / s_i)."""
    total = 0.0
    for student, target in zip(scores, teacher, strict=True):
        student_sum, target_sum = (log_sum_exp(list(each.values())) for each in (student, target))
        for place in target:
            log_target, log_student = target[place] - target_sum, student[place] - student_sum
            total += math.exp(log_target) * (log_target - log_student)
    return total / len(scores)


def expected_margin_mse(scores: list[dict[int, float]], teacher: list[dict[int, float]]) -> float:
    """The mean over all triples; place 0 is the positive."""
    errors = [
        ((student[0] - student[place]) - (target[0] - target[place])) ** 2
        for student, target in zip(scores, teacher, strict=True)
        for place in target
        if place
    ]
    return sum(errors) / len(errors)


def known_scores(
    queries: torch.Tensor, passages: torch.Tensor, temperature: float
) -> tuple[list[dict[int, float]], list[dict[int, float]]]:
    """Returns the student's and the teacher's scores of each query by place in its group, one product at a time."""
    student, teacher = [], []
    for query, group, logits in zip(queries.tolist(), GROUPS.tolist(), TEACHER.tolist(), strict=True):
        target = {place: logit for place, logit in enumerate(logits) if not math.isnan(logit)}
        teacher.append(target)
        vectors = {place: passages[group[place]].tolist() for place in target}
        student.append(
            {
                place: sum(left * right for left, right in zip(query, vector, strict=True)) / temperature
                for place, vector in vectors.items()
            }
        )
    return student, teacher


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 3.0])
@pytest.mark.parametrize(("loss", "expected"), [(kl_loss, expected_kl), (margin_mse_loss, expected_margin_mse)])
def test_a_distillation_loss_equals_a_loop(
    loss: Callable[..., torch.Tensor], expected: Callable[..., float], temperature: float, dtype: torch.dtype
) -> None:
    queries, passages = random(4, 8).to(dtype), random(9, 8, seed=1).to(dtype)
    actual = loss(queries, passages, GROUPS, TEACHER, temperature)
    assert (actual.shape, actual.dtype) == ((), dtype)
    close = 1e-6 if dtype == torch.float64 else 1e-4
    assert actual.item() == pytest.approx(expected(*known_scores(queries, passages, temperature)), rel=close)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_distillation_gradient_equals_finite_differences(loss: Callable[..., torch.Tensor]) -> None:
    queries, passages, teacher = random(4, 4), random(9, 4, seed=1), TEACHER.double()
    assert_gradients(lambda left, right: loss(left, right, GROUPS, teacher, 0.5), queries, passages)


@pytest.mark.parametrize("loss", LOSSES)
def test_passages_without_a_teacher_score_and_of_other_queries_have_no_part(loss: Callable[..., torch.Tensor]) -> None:
    queries, passages = random(4, 4), random(9, 4, seed=1)
    gradient = gradient_of(lambda values: loss(queries, values, GROUPS, TEACHER.double()), passages)
    assert (gradient[[1, 4, 6, 7]] == 0).all()
    assert (gradient[[0, 2, 3, 5, 8]] != 0).any(dim=1).all()
    by_query = gradient_of(lambda values: loss(values, passages, GROUPS, TEACHER.double()), queries)
    assert (by_query[3] == 0).all(), "a query without negatives teaches nothing"


@pytest.mark.parametrize("loss", LOSSES)
def test_a_student_with_the_teachers_scores_has_no_loss(loss: Callable[..., torch.Tensor]) -> None:
    """A constant for each query makes no difference: both losses compare passages of one query."""
    teacher = TEACHER[:2].double()
    passages = torch.eye(6, dtype=torch.float64)
    queries = torch.cat(
        [torch.cat([teacher[:1] + 7, torch.zeros(1, 3)], 1), torch.cat([torch.zeros(1, 3), teacher[1:]], 1)]
    )
    groups = torch.tensor([[0, 1, 2], [3, 4, 5]])
    assert loss(queries, passages, groups, teacher).item() == pytest.approx(0, abs=1e-12)
    assert gradient_of(lambda values: loss(values, passages, groups, teacher), queries).abs().max() < 1e-12


@pytest.mark.parametrize(("loss", "peer"), [(kl_loss, "DistillKLDivLoss"), (margin_mse_loss, "MarginMSELoss")])
def test_a_distillation_loss_is_that_of_sentence_transformers(loss: Callable[..., torch.Tensor], peer: str) -> None:
    from sentence_transformers.sentence_transformer import losses

    queries, passages, teacher = random(5, 8), random(9, 8, seed=1), 3 * random(5, 4, seed=2)
    groups = torch.from_numpy(np.random.default_rng(0).integers(9, size=(5, 4)))
    columns = [queries, *(passages[groups[:, place]] for place in range(4))]
    expected = getattr(losses, peer)(None).compute_loss_from_embeddings(columns, teacher)
    assert loss(queries, passages, groups, teacher).item() == pytest.approx(expected.item(), rel=1e-10)


def test_teacher_logits_are_those_of_the_reranker() -> None:
    logits = torch.tensor([-12.0, -3.0, -0.5, 0.0, 2.0, 8.0])
    torch.testing.assert_close(teacher_logits(torch.sigmoid(logits)), logits, atol=1e-2, rtol=1e-4)
    ends = teacher_logits(torch.tensor([0.0, 1.0, 1.0 - 2.0**-24, math.nan]))
    assert ends[:3].tolist() == pytest.approx([-math.log(2**24 - 1), math.log(2**24 - 1), math.log(2**24 - 1)])
    assert math.isnan(ends[3])


def test_scores_far_apart_do_not_overflow() -> None:
    """The teacher is certain, and so is the student, of another passage."""
    queries, passages = torch.tensor([[1000.0]]), torch.tensor([[1.0], [-1.0]])
    groups, teacher = torch.tensor([[0, 1]]), torch.tensor([[-16.6, 16.6]])
    assert kl_loss(queries, passages, groups, teacher).item() == pytest.approx(2000, rel=1e-6)
    assert margin_mse_loss(queries, passages, groups, teacher).item() == pytest.approx(2033.2**2, rel=1e-6)
    for loss in LOSSES:
        assert torch.isfinite(gradient_of(lambda values, loss=loss: loss(values, passages, groups, teacher), queries))


def test_no_triple_is_no_loss() -> None:
    queries, passages = random(2, 4), random(3, 4, seed=1)
    groups, teacher = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[1.0, math.nan], [2.0, math.nan]])
    for loss in LOSSES:
        assert loss(queries, passages, groups, teacher).item() == 0
        assert (gradient_of(lambda values, loss=loss: loss(values, passages, groups, teacher), queries) == 0).all()


@pytest.mark.parametrize("name", ["kl", "margin-mse"])
def test_the_contrastive_loss_is_added_with_its_weight(name: str) -> None:
    queries, passages = random(4, 8), random(9, 8, seed=1)
    ignored = torch.zeros(4, 9, dtype=torch.bool)
    ignored[0, 5] = True
    labels = BatchLabels(GROUPS[:, 0], ignored, GROUPS, TEACHER.double())
    alone = {"kl": kl_loss, "margin-mse": margin_mse_loss}[name](queries, passages, GROUPS, TEACHER.double(), 0.5)
    added = contrastive_loss(queries, passages, GROUPS[:, 0], 0.5, ignored)
    assert batch_loss(name, queries, passages, labels, 0.5).item() == alone.item()  # type: ignore[arg-type]
    both = batch_loss(name, queries, passages, labels, 0.5, 0.3)  # type: ignore[arg-type]
    assert both.item() == pytest.approx((alone + 0.3 * added).item(), rel=1e-14)
