"""Losses over positives that share categories with a query's passage (Topic-DPR, Eq. 3 to 7)."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint


def category_overlap(members: torch.Tensor, others: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the overlap of the categories of each pair (Topic-DPR, Eq. 6): 0 to 1, float32 [n, m].

    rho(i, j) = |C_i ∩ C_j| / |C_i ∪ C_j|, where C_i is the set of the categories of i; 0 if both are empty. The paper
    prints C_i ∩ C_i.

    Args:
        members: Whether i has a category: bool [n, c].
        others: The same of the second of each pair: bool [m, c]; None: `members`.
    """
    first = members.float()
    second = first if others is None else others.float()
    shared = first @ second.T
    either = first.sum(1)[:, None] + second.sum(1)[None] - shared
    return shared / either.clamp(min=1)


def weighted_positives_loss(
    similarities: torch.Tensor,
    rho: torch.Tensor,
    is_self_positive: bool = True,
    ignored: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the mean over queries of the loss of their weighted positives (Topic-DPR, Eq. 3 and 4).

    A query q_i with the positives x+_1 to x+_n, all x_j with rho(i, j) > 0, and the negatives x-_j, all others, has

    -(1/n) sum_z rho(q_i,x+_z) log(e^s(q_i,x+_z) / (e^s(q_i,x+_z) + sum_j e^s(q_i,x-_j)))

    so each positive is compared with the negatives alone. The loss of a query without positives, or without negatives,
    is 0.

    Args:
        similarities: Cosines divided by the temperature, float [m, p].
        rho: The overlap of the categories of q_i and x_j, float [m, p].
        is_self_positive: True: x_i counts like any other (Eq. 4, of passages). False: x_i is q_i itself, neither a
            positive nor a negative of it (Eq. 3, of queries).
        ignored: Pairs that are positives for another reason: bool [m, p]. They are no negatives. None: there are none.

    Returns:
        The loss, a scalar.
    """
    is_positive, is_negative = rho > 0, rho == 0
    if not is_self_positive:
        itself = torch.eye(*rho.shape, dtype=torch.bool, device=rho.device)
        is_positive, is_negative = is_positive & ~itself, is_negative & ~itself
    if ignored is not None:
        is_negative = is_negative & ~ignored
    # The logarithm of an empty sum is -inf, whose gradient is undefined: the smallest number gives a loss of 0 too.
    smallest = torch.finfo(similarities.dtype).min
    negatives = similarities.masked_fill(~is_negative, smallest).logsumexp(1, keepdim=True)
    terms = -rho.to(similarities.dtype) * torch.nn.functional.logsigmoid(similarities - negatives)
    of_queries = terms.masked_fill(~is_positive, 0.0).sum(1) / is_positive.sum(1).clamp(min=1)
    return of_queries.mean()


def category_loss(
    queries: torch.Tensor,
    passages: torch.Tensor,
    rho: torch.Tensor,
    temperature: float = 1.0,
    alpha: float = 0.0,
    positives: torch.Tensor | None = None,
    ignored: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the loss of queries and passages whose positives share categories (Topic-DPR, Eq. 7 without its last
    term).

    (1 - 2 alpha) q-p + alpha q-q, where q-p is the loss of queries and passages (Eq. 4), and q-q that of queries and
    queries (Eq. 3), both as `weighted_positives_loss`, with s(a, b) = a.b / temperature. The last term of Eq. 7 is
    alpha times `topic_loss`.

    Args:
        queries: float32 [m, d]; of length 1, so that s is a cosine.
        passages: float32 [p, d].
        rho: `category_overlap` of the categories of each query's own passage and of each passage: float32 [m, p].
        temperature: Similarities are divided by it (gamma).
        alpha: The weight of the loss of queries and queries, 0 to 0.5.
        positives: The own passage of each query, int64 [m]; None: passage i is that of query i.
        ignored: Passages that answer a query, with or without a common category: bool [m, p]. They are no negatives of
            it. None: there are none.

    Returns:
        The loss, a scalar.
    """
    loss = (1 - 2 * alpha) * weighted_positives_loss(queries @ passages.T / temperature, rho, ignored=ignored)
    if not alpha:
        return loss
    if positives is not None:  # a query has the categories of its passage
        rho = rho[:, positives]
        ignored = None if ignored is None else ignored[:, positives]
    return loss + alpha * weighted_positives_loss(queries @ queries.T / temperature, rho, False, ignored)


def topic_loss(vectors: torch.Tensor, margin: float) -> torch.Tensor:
    """Returns the loss that separates the vectors under different prompts (Topic-DPR, Eq. 5).

    Two passages that are encoded with the same prompt have to be more similar, by a margin, than if one of them is
    encoded with another prompt.

    The mean over the K prompts k of

    1/((K-1) N^2) sum_{z != k} sum_{i,j} max(margin - s(p_i^k, p_j^k) + s(p_i^k, p_j^z), 0)

    where p_i^k is passage i under prompt k, s is the cosine, and i = j is included; 0 with one prompt.

    Args:
        vectors: The vectors of N passages under each of K prompts, of any length: float32 [K, N, d].
        margin: The margin.

    Returns:
        The loss, a scalar.
    """
    num_prompts, num_passages, _ = vectors.shape
    unit_vectors = torch.nn.functional.normalize(vectors, dim=-1)
    total = 0.0 * vectors.sum()
    for number in range(num_prompts):
        # Without activation checkpointing, the graph would keep K (K - 1) N^2 numbers.
        total = total + checkpoint(
            _prompt_loss, unit_vectors, number, margin, use_reentrant=False, preserve_rng_state=False
        )
    return total / (num_prompts * max(num_prompts - 1, 1) * num_passages**2)


def _prompt_loss(unit_vectors: torch.Tensor, prompt_number: int, margin: float) -> torch.Tensor:
    """Returns the sum of the terms of one prompt k of Eq. 5, a scalar. unit_vectors: [K, N, d]."""
    of_prompt = unit_vectors[prompt_number]
    within = of_prompt @ of_prompt.T
    between = of_prompt @ torch.cat([unit_vectors[:prompt_number], unit_vectors[prompt_number + 1 :]]).transpose(
        1, 2
    )  # [K - 1, N, N]
    return (margin - within + between).relu().sum()
