"""Passages whose words come from planted topics, for tests of topic models."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from runners import InlineRunner

from riptide.indexing.store.store import Store
from riptide.indexing.topics.topic_options import FitOptions
from riptide.indexing.topics.topics_reader import Topics
from riptide.indexing.topics.topics_work import FitTopicsWork
from riptide.indexing.work.work import run_work

PLANTED = (
    ("star", "galaxy", "orbit", "planet", "telescope", "comet"),
    ("gene", "protein", "cell", "enzyme", "tissue", "genome"),
    ("court", "judge", "statute", "lawyer", "verdict", "appeal"),
)
SHARED = ("study", "report", "table", "figure", "author")
SMALL = FitOptions(min_passages=2, most_frequent=2, iterations=30, gamma=1.0, eta=0.5, seed=3, words=4)


def planted_texts(count: int, seed: int = 0, topics: Sequence[Sequence[str]] = PLANTED) -> tuple[list[str], np.ndarray]:
    """Returns texts of 12 to 20 words, two thirds of them of one planted topic; and that topic, int64 [count]."""
    draw = random.Random(seed)
    truth = np.arange(count, dtype=np.int64) % len(topics)
    texts = []
    for topic in truth:
        length = draw.randint(12, 20)
        words = [draw.choice(topics[topic] if draw.random() < 0.67 else SHARED) for _ in range(length)]
        texts.append(" ".join(words))
    return texts, truth


def purity(assigned: Iterable[int], truth: Iterable[int]) -> float:
    """Returns the share of the texts that are in the largest planted topic of their assigned topic."""
    pairs = list(zip(assigned, truth, strict=True))
    best = {f: max({t for _, t in pairs}, key=lambda t, f=f: pairs.count((f, t))) for f in {f for f, _ in pairs}}
    return sum(best[f] == t for f, t in pairs) / len(pairs)


def fit_small(root: Path, name: str = "topics", options: FitOptions = SMALL, limit: int | None = None) -> Topics:
    """Fits topics to the corpus of the store `root`/store, or makes their next generation."""
    store = Store(str(root / "store"))
    work = FitTopicsWork(store, name, options, limit=limit)
    if not work.is_complete:
        run_work(store, work, InlineRunner())
    return Topics.open(store, name)
