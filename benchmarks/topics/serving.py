"""Measures tasks with random prompts of topics beside fixed and computed prompts, in mixed batches of one encoder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.common.models import MINILM
from benchmarks.query_prompts import (
    MIXES,
    computed_prompt,
    fixed_prompt,
    largest_difference,
    measure_traffic,
    read_texts,
)
from retriever.encoding.encoder import Encoder
from retriever.options import EncoderOptions
from retriever.prompts.prompts import TaskPrompt, backbone_of
from retriever.topics.model import TopicModel
from retriever.topics.saved import SavedTopics
from retriever.topics.words import topic_words

QUERIES = Path(__file__).resolve().parents[2] / "examples/squad/queries.jsonl.gz"
BATCH = 32  # queries
COMPARED = 128  # queries whose vectors are compared


def measure_serving(options: argparse.Namespace, num_tasks: int) -> dict[str, Any]:
    """Returns the throughput of mixed batches, and the largest difference of their vectors to those of single tasks.

    Args:
        options: The options of the benchmark: count, rounds, served_topics, served_length and cpus.
        num_tasks: Number of tasks of each kind.
    """
    texts = read_texts(str(QUERIES), options.count)
    random = np.random.default_rng(0)
    differences = {}
    for dtype in ("float32", "auto"):
        encoder, tasks = open_encoder(dtype, num_tasks, texts, random, options)
        differences[str(encoder.dtype).removeprefix("torch.")] = largest_difference(
            encoder, texts[:COMPARED], tasks["mixed"]
        )
    batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
    return {
        "topics": options.served_topics,
        "length": options.served_length,
        "numerics": encoder.numerics,
        "threads": options.cpus,
        "largest_difference": differences,
        "traffic": measure_traffic(encoder, batches, tasks, options.rounds, float("inf")),
    }


def open_encoder(
    dtype: Literal["float32", "auto"],
    num_tasks: int,
    texts: Sequence[str],
    random: np.random.Generator,
    options: argparse.Namespace,
) -> tuple[Encoder, dict[str, list[str]]]:
    """Opens an encoder with tasks of three kinds.

    Args:
        dtype: The dtype of the backbone.
        num_tasks: Number of tasks of each kind.
        texts: Texts whose words are those of the topics.
        random: Draws the topics.
        options: The options of the benchmark.

    Returns:
        The encoder, and the names of its tasks by kind: fixed; topics; mixed, which are all, computed ones too.
    """
    settings = EncoderOptions(dtype=dtype, compile="never", pooling="mean", normalize=True)
    encoder = Encoder(MINILM, settings, threads=options.cpus, tasks={})
    length = options.served_length
    vocabulary = tuple(sorted({word for text in texts for word in topic_words(text)}))
    tasks: dict[str, list[str]] = {"fixed": [], "topics": []}
    computed = []
    for number in range(num_tasks):
        encoder.put_task(f"fixed{number}", fixed_prompt(encoder, length, number))
        tasks["fixed"].append(f"fixed{number}")
        model = random_topic_model(vocabulary, options.served_topics, length, random)
        encoder.put_task(f"topics{number}", topic_prompt(encoder, model, length, 1_000 * (number + 1)))
        tasks["topics"].append(f"topics{number}")
    for number in range(num_tasks):
        mix = MIXES[number % len(MIXES)]
        encoder.put_task(f"{mix}{number}", computed_prompt(encoder, length, mix, number))
        computed.append(f"{mix}{number}")
    tasks["mixed"] = [*tasks["fixed"], *tasks["topics"], *computed]
    return encoder, tasks


def random_topic_model(
    vocabulary: tuple[str, ...], num_topics: int, num_words: int, random: np.random.Generator
) -> TopicModel:
    """Returns random topics, each with one path.

    Args:
        vocabulary: The words that count.
        num_topics: Number of topics.
        num_words: Number of the most probable words of a topic.
        random: Draws the topics.
    """
    probabilities = random.dirichlet(np.full(len(vocabulary), 0.1), num_topics)
    log_words = np.log(probabilities + 1e-6).astype(np.float32)
    return TopicModel(
        vocabulary,
        words=tuple(tuple(vocabulary[word] for word in np.argsort(-row)[:num_words]) for row in log_words),
        path_topics=np.arange(num_topics),
        log_prior=np.full(num_topics, -np.log(num_topics), np.float32),
        log_words=log_words,
    )


def topic_prompt(encoder: Encoder, model: TopicModel, length: int, seed: int) -> TaskPrompt:
    """Returns a task with a random prompt for each topic.

    Args:
        encoder: The encoder that the prompts are for.
        model: The topics.
        length: Tokens of a prompt.
        seed: Seed of the prompt of the first topic; each other one has the next seed.
    """
    matrices = [fixed_prompt(encoder, length, seed + topic).query for topic in range(model.num_topics)]
    saved = SavedTopics(model, torch.stack([matrix for matrix in matrices if matrix is not None]), "prior")
    return TaskPrompt(backbone_of(encoder.config), encoder.options, None, None, topics=saved)
