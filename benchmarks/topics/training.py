"""Trains the prompts or the model of a run, through the job `train_retriever`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from typing import Any

from jobs import train_retriever
from jobs.common.options import build
from jobs.training.opening import open_all
from jobs.training.options import TrainRetriever

from benchmarks.topics.runs import ALL_WEIGHTS, ONE_PROMPT, PROMPTS_OF_TOPICS, WITH_WORDS, Run
from indexing.store.store import Store
from indexing.training.tuning import TuneMaker
from retriever.topics.controls import random_topics


def train(run: Run, store: str, backbone: str, options: argparse.Namespace) -> None:
    """Trains prompts/NAME or models/NAME of a run, unless the store has it.

    Args:
        run: The run.
        store: The URL of the store with the training data.
        backbone: The backbone.
        options: The options of the benchmark.
    """
    job_options = training_options(run, store, backbone, options)
    if run.arm == "random":
        train_random_topics(Store(store), job_options)
    else:
        train_retriever.main(job_options)


def training_options(run: Run, store: str, backbone: str, options: argparse.Namespace) -> TrainRetriever:
    """Returns the options of the job that trains a run; the arguments are those of `train`."""
    trained: dict[str, Any]
    if run.arm in ALL_WEIGHTS:
        trained = {"train": "all"}
    else:
        prompt = "mlp" if run.arm == "dptdr-mlp" else "matrix"
        trained = {"train": "prompts", "prompt": prompt, "length": int(run.settings["length"])}
    if run.arm in PROMPTS_OF_TOPICS:
        trained |= topic_options(run, options)
    has_pairs_of_queries = run.arm not in ("alpha-0", *ONE_PROMPT, *ALL_WEIGHTS)
    return build(
        TrainRetriever,
        dict(
            store=store,
            task=run.name,
            backbone=backbone,
            positives="categories",
            negatives="none",
            category_weight=run.settings["alpha"] if has_pairs_of_queries else 0.0,
            temperature=run.settings["temperature"],
            lr=run.settings["lr"],
            steps=run.steps,
            batch=options.batch,
            seed=run.seed,
            cpus=options.cpus,
            checkpoint_every=100,
            **trained,
            **text_options(options, run.arm),
        ),
    )


def topic_options(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of the job for prompts of topics."""
    of_topics: dict[str, Any] = {
        "prompt": "topics",
        "topics": run.topics,
        "query_topics": run.protocol,
        "wordless_queries": "prior",
        "topic_loss": run.arm != "no-topic-loss",
    }
    if run.arm not in ("alpha-0", "no-topic-loss"):  # without this loss, the job refuses its options
        of_topics |= {"topic_sample": options.topic_sample or None, "topic_margin": run.settings["margin"]}
    return of_topics


def text_options(options: argparse.Namespace, arm: str) -> dict[str, Any]:
    """Returns how texts become vectors, as options of jobs; words in front of a text make it longer."""
    added_tokens = 2 * options.text_words if arm in WITH_WORDS else 0
    return {"pooling": "mean", "normalize": True, "passage_length": options.passage_length + added_tokens}


def train_random_topics(store: Store, options: TrainRetriever) -> None:
    """Trains prompts of topics whose texts have random topics, unless the store has them."""
    job = open_all(store, options)
    maker = RandomTopicsMaker(**{field.name: getattr(job.maker, field.name) for field in fields(job.maker)})
    config = job.config | {"control": "random topics"}
    train_retriever.train(store, options, replace(job, maker=maker, config=config))


@dataclass(frozen=True, kw_only=True)
class RandomTopicsMaker(TuneMaker):
    """Makes a system whose texts have random topics of equal sizes in training.

    Under the protocol judged, a query has the topic of its passage.
    """

    def make(self, **place: Any) -> Any:
        """Makes the system of a worker; see Maker."""
        system, evaluate, refresh = super().make(**place)
        topics = system.numbers
        assert topics is not None
        num_topics, seed = topics.model.num_topics, self.tuning.seed
        system.kind.numbers = replace(
            topics,
            passages=random_topics(len(topics.passages), num_topics, seed),
            queries=None if topics.queries is None else random_topics(len(topics.queries), num_topics, seed + 1_000),
        )
        return system, evaluate, refresh
