"""A run of the experiment: an arm on a set, with a backbone, a seed and settings; its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

PROTOCOLS = ("own", "judged")
METRICS = ("Acc@1", "Acc@10", "MRR@100", "MAP@10", "MAP@50")
CHOSEN_BY = "MAP@50"
TOPIC_CONTROLS = ("random", "shuffled", "swapped", "alpha-0", "no-topic-loss", "lda")
PROMPTS_OF_TOPICS = ("topic", *TOPIC_CONTROLS)  # arms with a prompt for each topic
ONE_PROMPT = ("dptdr", "dptdr-mlp")  # arms with one prompt for all texts, trained with the loss of queries and passages
SAME_TOPIC = "same-topic"  # dptdr, and a weight for passages of the query's topic
CONTROLS = (SAME_TOPIC, "dptdr-mlp", *TOPIC_CONTROLS, "dptdr-queries")
WITH_PROMPTS_OF = {"shuffled": "topic", "swapped": "topic", SAME_TOPIC: "dptdr"}  # controls that train nothing
WITH_WORDS = ("words", "random-words")  # arms with words of topics in front of the texts
ALL_WEIGHTS = ("fine-tune", *WITH_WORDS)  # arms that train all weights


@dataclass(frozen=True)
class Run:
    """A run of the experiment.

    Attributes:
        name: Its name, also of what is trained.
        arm: The arm.
        data: The set.
        model: minilm or small; "" for bm25.
        seed: The seed of the training run.
        protocol: own or judged; None for an arm without topics.
        split: dev or test.
        steps: Steps of the training run.
        settings: lr, temperature, alpha, margin and length; weight for `same-topic`.
    """

    name: str
    arm: str
    data: str
    model: str
    seed: int
    protocol: str | None
    split: str
    steps: int
    settings: Mapping[str, float]

    @property
    def topics(self) -> str:
        """The name of the topics of the arm."""
        return "lda" if self.arm == "lda" else "topics"


@dataclass(frozen=True)
class Values:
    """What is measured of a run.

    Attributes:
        metrics: The values of each query by metric, float64 [queries].
        random_ranking: The expected values of a random ranking by metric.
        vectors: Alignment, uniformity and cosines of the vectors; None if they are not measured.
    """

    metrics: dict[str, np.ndarray]
    random_ranking: dict[str, float]
    vectors: dict[str, Any] | None


def run_name(model: str, data: str, arm: str, protocol: str | None, seed: int) -> str:
    """Returns the name of a run on the test split; the arguments are those of a Run."""
    return "-".join([word for word in (model, data, arm, protocol) if word] + [str(seed)])
