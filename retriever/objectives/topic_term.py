"""The topic loss: passages are more similar under one topic's prompt than under two prompts (Topic-DPR, Eq. 5).

Its options are those of prompts of topics (`TopicOptions`), and its weight is that of `CategoryOptions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from riptide.base.errors import InputError
from riptide.retriever.objectives.category_term import CategoryOptions
from riptide.retriever.objectives.loss_term import BATCH_VECTORS, LossTerm, StepBatch
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.training.system import Batch, BatchOutput

if TYPE_CHECKING:
    import torch

    from riptide.retriever.model.recipe import Recipe

TOPICS = "topics"  # name of the batch output with the vectors of its passages under each sampled topic


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
    from torch.nn.functional import normalize
    from torch.utils.checkpoint import checkpoint

    num_prompts, num_passages, _ = vectors.shape
    unit_vectors = normalize(vectors, dim=-1)
    total = 0.0 * vectors.sum()
    for number in range(num_prompts):
        # Without activation checkpointing, the graph would keep K (K - 1) N^2 numbers.
        total = total + checkpoint(
            _prompt_loss, unit_vectors, number, margin, use_reentrant=False, preserve_rng_state=False
        )
    return total / (num_prompts * max(num_prompts - 1, 1) * num_passages**2)


def _prompt_loss(unit_vectors: torch.Tensor, prompt_number: int, margin: float) -> torch.Tensor:
    """Returns the sum of the terms of prompt k in Eq. 5, a scalar. unit_vectors: [K, N, d]."""
    import torch

    of_prompt = unit_vectors[prompt_number]
    within = of_prompt @ of_prompt.T
    between = of_prompt @ torch.cat([unit_vectors[:prompt_number], unit_vectors[prompt_number + 1 :]]).transpose(
        1, 2
    )  # [K - 1, N, N]
    return (margin - within + between).relu().sum()


def num_topics_of_loss(tuning: TuneOptions, num_topics: int) -> int:
    """Returns the number of topics under which the topic loss encodes each passage of a step; 0 if it is not used."""
    if tuning.topics is None or not TopicTerm.is_used(tuning) or num_topics < 2:
        return 0
    return min(tuning.topics.sample or num_topics, num_topics)


class TopicTerm(LossTerm[None]):
    """The topic loss: each step encodes the batch's passages under all topics, or under randomly sampled topics."""

    @classmethod
    def is_used(cls, tuning: TuneOptions) -> bool:
        """Whether prompts of topics are trained with the topic loss, with a positive category weight."""
        categories = tuning.term_options(CategoryOptions)
        return bool(tuning.topics and tuning.topics.loss and categories and categories.weight)

    @classmethod
    def check(cls, recipe: Recipe, tuning: TuneOptions) -> None:
        """Raises InputError for the topic loss without positives that share a category, which provide its weight."""
        if tuning.topics is not None and tuning.topics.loss and tuning.term_options(CategoryOptions) is None:
            raise InputError(
                "parametrisation topics: the loss of topics has the weight of the loss of pairs of queries, which is "
                "for positives with a common category: expected positives categories, or no loss of topics"
            )

    def add_to(self, step: StepBatch) -> None:
        """Adds chunks of the passages under each sampled topic; row k N + i is passage i of N under sample k."""
        from riptide.retriever.topics.training import TrainingTopics

        system, options, topics_of_texts = self.system, self.system.tuning, self.system.assignment
        assert isinstance(topics_of_texts, TrainingTopics)
        assert options.topics is not None
        if not num_topics_of_loss(options, topics_of_texts.model.num_topics):
            return
        topics = topics_of_texts.sample(options.topics, options.seed, step.number)
        texts, passages = system.compose(step.passages), len(step.passages)
        rows = np.arange(step.rank, len(topics) * passages, step.world)
        step.outputs[TOPICS] = BatchOutput(system.dim, len(topics) * passages)
        step.arguments["topics"] = len(topics)
        step.chunks += system.chunks(
            [texts[row % passages] for row in rows], "passage", rows, topics[rows // passages], TOPICS
        )

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Returns the weighted topic loss over the batch, a scalar; 0 if there is only one topic."""
        import torch

        topics, categories = self.system.tuning.topics, self.system.tuning.term_options(CategoryOptions)
        assert topics is not None
        assert categories is not None
        if TOPICS not in outputs:  # The topic loss needs at least two topics.
            return torch.zeros((), device=outputs[BATCH_VECTORS].device)
        under_topics = outputs[TOPICS].unflatten(0, (batch.arguments["topics"], -1))
        return categories.weight * topic_loss(under_topics, topics.margin)
