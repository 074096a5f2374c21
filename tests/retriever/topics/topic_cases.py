"""A system with prompts of topics over training data with categories, and a case for two workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from category_data import category_table
from topic_prompts import small_topics
from training_cases import CPU, dual_system, make_data

from riptide.retriever.objectives.category_term import CategoryOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.options.topics import TopicOptions
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.topics.training import TrainingTopics
from riptide.retriever.training.loop import Trainer

WORDS = (("w1", "w2", "w3", "w4"), ("w5", "w6"), ("w7", "w8", "w9"))
TOPICS = TopicOptions(hidden=6, margin=0.2)
ALPHA = 0.2


def random_topics(count: int, seed: int) -> np.ndarray:
    """Returns random topics of `count` texts, int64 [count], as many texts of each."""
    return np.random.default_rng(seed).permutation(np.arange(count, dtype=np.int64) % len(WORDS))


def random_training_topics(*, judged: bool = False) -> TrainingTopics:
    """Returns random topics of the texts of `make_data`, as a control has them."""
    data = make_data()
    passages = random_topics(data.num_passages, 0)
    queries = None if judged else random_topics(len(data.queries), 1)
    return TrainingTopics(small_topics(WORDS), passages, queries)


def topic_system(
    bert: Path, *, chunk: int | None = None, dropout: float | None = 0.0, judged: bool = False, **tuning: Any
) -> DualEncoderSystem:
    """Returns a system over `make_data` with random topics and with categories.

    Args:
        bert: Folder of the backbone.
        chunk: Tokens per chunk.
        dropout: As of `dual_system`.
        judged: Queries have the topic of their passage.
        **tuning: Options of TuneOptions.
    """
    values: dict[str, Any] = {
        "parametrisation": "topics",
        "topics": TOPICS,
        "negatives_per_query": 0,
        "terms": (CategoryOptions(weight=ALPHA),),
        **tuning,
    }
    system = dual_system(bert, dropout=dropout, chunk=chunk, given=random_training_topics(judged=judged), **values)
    assert system.data is not None
    system.data = replace(system.data, categories=category_table())
    return system


def four_steps_of_topics(rank: int, patch: pytest.MonkeyPatch, bert: Path, world: int) -> dict[str, Any]:
    """Returns the last loss, and weights and moments, after four steps."""
    system = topic_system(bert, chunk=200, topics=replace(TOPICS, sample=2))
    trainer = Trainer(system, LoopOptions(steps=6, lr=1e-2), device=CPU, dtype=torch.float32, rank=rank, world=world)
    losses = [trainer.step(number) for number in range(4)]
    return {"loss": losses[-1], **trainer.stepper.state()}


def unit_vectors(system: DualEncoderSystem, passages: np.ndarray, topic: int) -> np.ndarray:
    """Returns the vectors of passages under the prompt of a topic, scaled to length 1: float64 [n, dim]."""
    texts = system.compose(passages)
    vectors = system.encode(texts, "passage", prompt_numbers=np.full(len(texts), topic)).astype(np.float64)
    scaled: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return scaled
