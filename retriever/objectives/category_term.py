"""The loss over positives that share a category (Topic-DPR, Eq. 3, 4, 6, 7); it replaces that of judged pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from riptide.base.errors import InputError
from riptide.base.option_fields import option
from riptide.base.wording import Parameter
from riptide.retriever.objectives.loss_term import LossTerm, StepBatch, query_and_passage_vectors
from riptide.retriever.objectives.tune_options import PlannedRun, TermOptions, TuneOptions
from riptide.retriever.training.system import Batch

if TYPE_CHECKING:
    import torch

FIELD = "categories"  # default metadata field of a passage that lists its categories


@dataclass(frozen=True, kw_only=True)
class CategoryOptions(TermOptions):
    """Options of training with passages that share a category as positives (Topic-DPR)."""

    GROUP: ClassVar = "positives of categories"
    NAME: ClassVar = "categories"

    weight: float = option(0.1, flag="category-weight")
    """With --positives categories: the weight alpha of the loss of pairs of queries, which share the categories of
    their passages; the loss of queries and passages has the weight 1 - 2 alpha. 0 leaves it out; at most 0.5. (Our
    choice: a tenth for each of the two further terms of the loss; the paper does not print its own.)"""
    field: str = option(FIELD, flag="categories-field")
    """With --positives categories: the metadata field of a passage with its categories, a list of names."""

    def resolve(self, run: PlannedRun) -> CategoryOptions | None:
        """Returns these options if passages with a common category are positives, otherwise None."""
        return self if run.by_category else None

    def check(self, tuning: TuneOptions) -> None:
        """Raises InputError for a value or for training options that do not fit positives with a common category."""
        positives = f"{Parameter('positives', 'categories')}"
        if tuning.loss != "contrastive":
            raise InputError(
                f"{positives} {Parameter('loss', tuning.loss)}: positives by category have a separate loss, which "
                f"uses no mined negatives and no teacher scores: leave out {Parameter('loss')}, or give "
                f"{Parameter('positives', 'judged')}"
            )
        if tuning.negatives_from != "batch" or tuning.negatives_per_query:
            name = "negatives_from" if tuning.negatives_from != "batch" else "negatives_per_query"
            raise InputError(
                f"{positives} {Parameter(name, getattr(tuning, name))}: the negatives of a query are the passages of "
                f"the batch without a common category, and none is mined: leave out {Parameter(name)}, or give "
                f"{Parameter('positives', 'judged')}"
            )
        if tuning.batch < 2:
            raise InputError(
                f"{positives} {Parameter('batch', tuning.batch)}: expected at least 2 queries, whose passages are the "
                "negatives of each other"
            )
        if not 0 <= self.weight <= 0.5:
            raise InputError(
                f"{Parameter('category_weight', f'{self.weight:g}')}: expected 0 to 0.5, because the loss of queries "
                "and passages has the weight 1 - 2 times it"
            )
        if not self.field:
            raise InputError(f"{Parameter('categories_field', repr(''))}: expected the name of a metadata field")


def category_overlap(members: torch.Tensor, others: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the category overlap of each pair (Topic-DPR, Eq. 6): 0 to 1, float32 [n, m].

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
    """Returns the mean over queries of the loss over their weighted positives (Topic-DPR, Eq. 3 and 4).

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
    import torch

    is_positive, is_negative = rho > 0, rho == 0
    if not is_self_positive:
        itself = torch.eye(*rho.shape, dtype=torch.bool, device=rho.device)
        is_positive, is_negative = is_positive & ~itself, is_negative & ~itself
    if ignored is not None:
        is_negative = is_negative & ~ignored
    # The logarithm of an empty sum is -inf with an undefined gradient; the smallest number gives a loss of 0 instead.
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
    """Returns the loss of queries and passages that share categories (Topic-DPR, Eq. 7 without its last term).

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
    if positives is not None:  # A query has the categories of its positive.
        rho = rho[:, positives]
        ignored = None if ignored is None else ignored[:, positives]
    return loss + alpha * weighted_positives_loss(queries @ queries.T / temperature, rho, False, ignored)


class CategoryTerm(LossTerm[CategoryOptions]):
    """The loss in which all passages of a batch that share a category with a query's own positive are its positives."""

    OPTIONS = CategoryOptions

    def add_to(self, step: StepBatch) -> None:
        """Adds the category overlap between each query's positive and each passage: float32 [m, p]."""
        import torch

        data = self.system.data
        assert data is not None
        assert data.categories is not None, "positives by category need the categories of passages"
        rho = category_overlap(torch.from_numpy(data.categories.multi_hot(step.passages)))
        step.arguments["rho"] = rho[torch.from_numpy(step.positives)]

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Returns `category_loss` over the vectors of the batch, a scalar."""
        both = query_and_passage_vectors(outputs, batch)
        rho, positives, ignored = (batch.arguments[name].to(both[0].device) for name in ("rho", "positives", "ignored"))
        return category_loss(*both, rho, self.system.similarity_temperature, self.options.weight, positives, ignored)
