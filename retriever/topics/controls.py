"""Topics by chance, for comparisons with those of a topic model."""

from __future__ import annotations

import numpy as np


def shuffled_topics(topics: np.ndarray, seed: int) -> np.ndarray:
    """Returns topics with the same sizes at random places.

    Args:
        topics: int64 [n], the topic of each text; texts without a topic (-1) keep none.
        seed: Seed of the order.

    Returns:
        int64 [n].
    """
    shuffled = topics.copy()
    has_topic = topics >= 0
    shuffled[has_topic] = np.random.default_rng(seed).permutation(topics[has_topic])
    return shuffled


def random_topics(count: int, num_topics: int, seed: int) -> np.ndarray:
    """Returns random topics of `count` texts, int64 [count]; the sizes of two topics differ by at most 1."""
    return np.random.default_rng(seed).permutation(np.arange(count, dtype=np.int64) % num_topics)
