"""Contrastive losses: softmax over a batch's passages, also over its queries, or over a query's own passages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riptide.retriever.objectives.loss_function import LossFunction

if TYPE_CHECKING:
    import torch


def contrastive_loss(
    queries: torch.Tensor,
    passages: torch.Tensor,
    positives: torch.Tensor,
    temperature: float = 1.0,
    ignored: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the mean over queries of the cross-entropy of the positive among all passages (DPTDR, Eq. 3).

    -log(e^s(q,p+) / (e^s(q,p+) + sum_j e^s(q,p-_j))) with s(q, p) = q.p / temperature.

    Args:
        queries: float32 [m, d].
        passages: float32 [p, d].
        positives: The passage that answers each query, int64 [m]; the other passages are negatives.
        temperature: Similarities are divided by it.
        ignored: Passages that also answer a query, and are no negatives of it: bool [m, p]; None: there are none.

    Returns:
        The loss, a scalar.
    """
    from torch.nn.functional import cross_entropy

    return cross_entropy(_scores(queries, passages, temperature, ignored), positives)


def symmetric_loss(
    queries: torch.Tensor,
    passages: torch.Tensor,
    positives: torch.Tensor,
    temperature: float = 1.0,
    ignored: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the mean of `contrastive_loss` and the same loss in the direction from positives to queries.

    From passages to queries, each query's pair with its positive counts once:
    -log(e^s(q_i,p_i) / (e^s(q_i,p_i) + sum_j e^s(q_j,p_i))), where j runs over the queries that p_i does not answer.
    So m queries with the same positive give m terms, and in none of them one of the others is a negative. Passages that
    are no query's positive are negatives of queries only. Without shared positives, this is sentence-transformers'
    MultipleNegativesSymmetricRankingLoss. GTR (section 3) takes the sum of both directions, twice this, with a
    temperature of 0.01 and cosines: q-p over [m, 2m], p-q over [m, m].

    Args:
        queries: float32 [m, d].
        passages: float32 [p, d].
        positives: The passage that answers each query, int64 [m]; several queries may have the same one.
        temperature: Similarities are divided by it.
        ignored: Passages that also answer a query: bool [m, p]; None: there are none.

    Returns:
        The loss, a scalar.
    """
    import torch

    num_queries = len(queries)
    numbers = torch.arange(num_queries, device=queries.device)
    # Answered[j, i]: passage i, the positive of query i, also answers query j.
    answered = positives[:, None] == positives[None]
    if ignored is not None:
        answered = answered | ignored[:, positives]
    answered = answered & (numbers[:, None] != numbers[None])
    by_passage = contrastive_loss(passages[positives], queries, numbers, temperature, answered.T)
    return (contrastive_loss(queries, passages, positives, temperature, ignored) + by_passage) / 2


def both_directions_loss(
    queries: torch.Tensor,
    passages: torch.Tensor,
    positives: torch.Tensor,
    temperature: float = 1.0,
    ignored: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the sum of both directions of `symmetric_loss` (GTR), with the same arguments."""
    return 2 * symmetric_loss(queries, passages, positives, temperature, ignored)


def own_passages_loss(
    queries: torch.Tensor,
    passages: torch.Tensor,
    groups: torch.Tensor,
    temperature: float = 1.0,
    ignored: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the mean over queries of the cross-entropy of each query's positive among the query's own passages.

    HYPER, Eq. 6:
    -log(e^s(q,p+) / (e^s(q,p+) + sum_j e^s(q,p-_j))) with s(q, p) = q.p / temperature, where j runs over the negatives
    that were drawn for the query. Passages of other queries are no negatives.

    Args:
        queries: float32 [m, d].
        passages: float32 [p, d].
        groups: The passages that were drawn for each query, the positive first: int64 [m, g].
        temperature: Similarities are divided by it.
        ignored: Passages that also answer a query, and are no negatives of it: bool [m, p]; None: there are none.

    Returns:
        The loss, a scalar.
    """
    from torch.nn.functional import cross_entropy

    scores = _scores(queries, passages, temperature, ignored).gather(1, groups)
    return cross_entropy(scores, groups.new_zeros(len(groups)))


def _scores(
    queries: torch.Tensor, passages: torch.Tensor, temperature: float, ignored: torch.Tensor | None
) -> torch.Tensor:
    """Returns similarities divided by the temperature, [m, p]; -inf for ignored passages."""
    scores = queries @ passages.T / temperature
    return scores if ignored is None else scores.masked_fill(ignored, float("-inf"))


CONTRASTIVE = LossFunction(
    "contrastive", "softmax of each query over the passages of the batch (DPTDR)", contrastive_loss
)
SYMMETRIC = LossFunction(
    "symmetric",
    "the mean of that and of a softmax of each positive over the queries of the batch",
    symmetric_loss,
    is_symmetric=True,
)
SYMMETRIC_SUM = LossFunction("symmetric-sum", "the sum of both (GTR)", both_directions_loss, is_symmetric=True)
