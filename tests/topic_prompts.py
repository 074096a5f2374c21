"""A small topic model over the words of tiny backbones, and random prompts of its topics."""

from __future__ import annotations

import numpy as np
import torch

from riptide.retriever.forward.prompt_rows import PromptShape
from riptide.retriever.options.topics import Wordless
from riptide.retriever.topics.model import TopicModel
from riptide.retriever.topics.saved import SavedTopics

SHAPE = PromptShape(layers=2, heads=4, head_dim=8)  # of tiny backbones
TOPIC_WORDS = (("river", "water", "flows"), ("money", "bank"), ("question", "answer", "query"))


def small_topics(words: tuple[tuple[str, ...], ...] = TOPIC_WORDS) -> TopicModel:
    """Returns a model with a path for each topic, and one more for the last topic.

    A word is ten times as probable under the paths of its topic as under others.
    """
    vocabulary = tuple(word for own in words for word in own)
    path_topics = np.array([*range(len(words)), len(words) - 1], np.int64)
    weights = np.array([[10.0 if word in words[topic] else 1.0 for word in vocabulary] for topic in path_topics])
    prior = np.arange(2.0, 2.0 + len(path_topics))
    log_words = np.log(weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return TopicModel(vocabulary, words, path_topics, np.log(prior / prior.sum()).astype(np.float32), log_words)


def random_saved_topics(
    length: int = 5,
    seed: int = 0,
    shape: PromptShape = SHAPE,
    model: TopicModel | None = None,
    wordless: Wordless = "refuse",
) -> SavedTopics:
    """Returns random prompts of the topics of a model, by default those of `small_topics`."""
    model = model or small_topics()
    layers, heads, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(model.num_topics, layers, 2, heads, length, head_dim, generator=generator)
    return SavedTopics(model, numbers, wordless)
