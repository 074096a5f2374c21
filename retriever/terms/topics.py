"""The loss that keeps passages closer under one topic's prompt than under two (Topic-DPR, Eq. 5)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from riptide.retriever.losses import topic_loss
from riptide.retriever.options.tuning import TuneOptions
from riptide.retriever.terms.term import BATCH_VECTORS, LossTerm, StepBatch
from riptide.retriever.topics.training import TrainingTopics
from riptide.retriever.training.system import Batch, BatchOutput

TOPICS = "topics"  # the output of a batch that holds the vectors of its passages under each of some topics


class TopicTerm(LossTerm):
    """Each step encodes the passages of the batch under all topics, or under some that are drawn at random."""

    @classmethod
    def is_used(cls, tuning: TuneOptions) -> bool:
        """See LossTerm."""
        return tuning.has_topic_loss

    def add_to(self, step: StepBatch) -> None:
        """Adds chunks of the passages under each sampled topic; row k N + i is passage i of N under topic k."""
        system, options, topics_of_texts = self.system, self.system.tuning, self.system.assignment
        assert isinstance(topics_of_texts, TrainingTopics)
        assert options.topics is not None
        if not options.num_topics_of_loss(topics_of_texts.model.num_topics):
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
        """See LossTerm."""
        topics, categories = self.system.tuning.topics, self.system.tuning.categories
        assert topics is not None
        assert categories is not None
        if TOPICS not in outputs:  # there is one topic
            return torch.zeros((), device=outputs[BATCH_VECTORS].device)
        under_topics = outputs[TOPICS].unflatten(0, (batch.arguments["topics"], -1))
        return categories.weight * topic_loss(under_topics, topics.margin)
