"""Distillation losses: the student's scores of a query's passages approximate those of a teacher, a re-ranker.

The teacher's scores are logits. A re-ranker stores probabilities, sigmoids of its logits, and `teacher_logits` computes
the logits from them. These, and not log-probabilities, are what the losses were published with: Hofstätter et al. 2020
compare margins of the cross-encoder's raw scores. Log-probabilities of relevant passages are all close to 0 (0.999 and
0.9 differ by 0.1, their logits by 4.7), so they would hide which relevant passage the teacher prefers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from riptide.retriever.objectives.loss_function import LossFunction

if TYPE_CHECKING:
    import torch

# Half the distance between 1 and the next lower float32. Sigmoids of logits above 16.6 are 1 in float32, so logits are
# clamped to [-16.6, 16.6], so that neither direction counts more.
_MIN_PROBABILITY = 2.0**-24


def teacher_logits(probabilities: torch.Tensor) -> torch.Tensor:
    """Returns log(p / (1 - p)) of each probability, from -16.6 to 16.6; NaN stays NaN.

    Args:
        probabilities: float32 of any shape, 0 to 1, or NaN.

    Returns:
        float32 of the same shape.
    """
    return probabilities.double().logit(eps=_MIN_PROBABILITY).float()


def kl_loss(
    queries: torch.Tensor,
    passages: torch.Tensor,
    groups: torch.Tensor,
    teacher: torch.Tensor,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Returns the mean over queries of KL(teacher || student) of their softmax distributions over the group.

    sum_i t_i (log t_i - log s_i) over the passages of a query's group, where t is the softmax of the teacher's logits
    and s the softmax of q.p / temperature. Unlike sentence-transformers' DistillKLDivLoss, the temperature applies to
    the student only, and the loss is not multiplied by its square; both are equal at temperature 1.

    Args:
        queries: float32 [m, d].
        passages: float32 [p, d].
        groups: The passages of each query that the teacher scored: its positive, then negatives; int64 [m, g].
        teacher: The teacher's logits, float32 [m, g]. Passages with NaN are left out; the positive has a logit.
        temperature: The student's similarities are divided by it.

    Returns:
        The loss, a scalar.
    """
    unknown = teacher.isnan()
    student = _scores(queries, passages, groups, temperature).masked_fill(unknown, float("-inf")).log_softmax(dim=1)
    target = teacher.to(student.dtype).masked_fill(unknown, float("-inf")).log_softmax(dim=1)
    terms = target.exp() * (target - student).masked_fill(unknown, 0.0)
    return terms.sum() / len(queries)


def margin_mse_loss(
    queries: torch.Tensor,
    passages: torch.Tensor,
    groups: torch.Tensor,
    teacher: torch.Tensor,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Returns the mean over triples of the squared difference between the student's and the teacher's margins.

    Hofstätter et al. 2020, Eq. 2: the mean of ((s(q,p+) - s(q,p-)) - (t(q,p+) - t(q,p-)))^2 over all triples of a
    query, its positive and one of its negatives, with s(q, p) = q.p / temperature (the paper: 1).

    Args:
        queries: float32 [m, d].
        passages: float32 [p, d].
        groups: The passages of each query that the teacher scored: its positive, then negatives; int64 [m, g].
        teacher: The teacher's logits, float32 [m, g]. Negatives with NaN are left out.
        temperature: The student's similarities are divided by it.

    Returns:
        The loss, a scalar; 0 without triples.
    """
    scores = _scores(queries, passages, groups, temperature)
    margins = teacher[:, :1] - teacher[:, 1:]
    known = ~margins.isnan()
    difference = (scores[:, :1] - scores[:, 1:] - margins).where(known, 0.0)
    return difference.square().sum() / known.sum().clamp(min=1)


def _scores(queries: torch.Tensor, passages: torch.Tensor, groups: torch.Tensor, temperature: float) -> torch.Tensor:
    """Returns the inner products of each query with the passages of its group, divided by the temperature: [m, g]."""
    return (queries @ passages.T).gather(1, groups) / temperature


KL = LossFunction(
    "kl",
    "distillation of the re-ranker that scored the negatives (`riptide mine-negatives --teacher-scores`), by the KL "
    "divergence over a query's positive and mined negatives",
    kl_loss,
    needs_teacher=True,
)
MARGIN_MSE = LossFunction(
    "margin-mse",
    "distillation by the squared error of its margins (Hofstätter et al. 2020)",
    margin_mse_loss,
    needs_teacher=True,
)
