"""Trains and measures runs, with one open backbone."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.models import MINILM
from benchmarks.transfer.runs import Run, store_of
from benchmarks.transfer.sets import EvaluationSet
from benchmarks.transfer.training import folder_of, train
from retriever.encoding.encoder import Encoder
from retriever.losses.divergence import mean_divergences
from retriever.options import EncoderOptions
from retriever.prompts.prompts import load_prompt

ATTENTION_QUERIES = 300  # per set, for divergences


class Measurement:
    """Trains runs, and measures prompts and models on the splits of the sets.

    Args:
        options: The options of the benchmark.
    """

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._encoder_options = EncoderOptions(query_length=options.query_length, passage_length=options.passage_length)
        self._sets = {data: EvaluationSet(data, store_of(data, options)) for data in options.sets}
        self._encoder = Encoder(MINILM, self._encoder_options, threads=options.cpus, tasks={})

    def measure(self, run: Run, sets: Sequence[str], split: str) -> dict[str, dict[str, list[float]]]:
        """Trains a run, unless it is trained, and measures it on a split of some sets.

        Args:
            run: The run.
            sets: The sets.
            split: The split.

        Returns:
            The metrics of each query by set and metric.
        """
        train(run, self._options)
        folders = {data: folder_of(run, run.name_for(data), self._options) for data in sets}
        measure = self._of_model if run.kind == "models" else self.of_prompt
        return {data: measure(folder, data, split) for data, folder in folders.items()}

    def of_prompt(self, folder: Path | None, data: str, split: str) -> dict[str, list[float]]:
        """Returns the metrics of each query of a set's split, with a prompt, or without one if `folder` is None."""
        texts = self._sets[data].texts(split)
        if folder is None:
            queries = self._encoder.encode(texts, side="query")
        else:
            self._encoder.put_task("task", load_prompt(folder))
            queries = self._encoder.encode(texts, side="query", task="task")
            self._encoder.drop_task("task")
        return self._sets[data].measure(split, queries, None, self._options.cpus)

    def _of_model(self, folder: Path, data: str, split: str) -> dict[str, list[float]]:
        """Returns the metrics of each query of a set's split, with queries and passages encoded by a model."""
        model = Encoder(str(folder), self._encoder_options, threads=self._options.cpus)
        texts = model.compose(*self._sets[data].passages())
        passages = model.encode(texts, side="passage").astype(np.float16)
        queries = model.encode(self._sets[data].texts(split), side="query")
        return self._sets[data].measure(split, queries, passages, self._options.cpus)

    def divergence(self, run: Run) -> dict[str, Any]:
        """Returns how much the weights of a trained run differ between test queries; see `divergence_figures`."""
        self._encoder.put_task("task", load_prompt(folder_of(run, run.name, self._options)))
        weights = {}
        for data, evaluation_set in self._sets.items():
            texts = evaluation_set.texts("test")[:ATTENTION_QUERIES]
            of_queries = self._encoder.prompt_weights(texts, task="task")
            weights[data] = of_queries[np.isfinite(of_queries).all(1)]  # without queries that have no known word
        self._encoder.drop_task("task")
        return divergence_figures(weights)


def divergence_figures(weights: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns mean Jensen-Shannon divergences of the weights of two queries, in nats, within and between sets.

    Also the cosines of the mean weights of two sets, and the effective number of basic prompts: the mean over the sets
    of the exponential of the entropy of their mean weights.

    Args:
        weights: The weights of the basic prompts by set, float32 [n, N].
    """
    sets = list(weights)
    set_numbers = torch.tensor(np.repeat(np.arange(len(sets)), [len(weights[data]) for data in sets]))
    joined = torch.from_numpy(np.concatenate([weights[data] for data in sets])).double()
    within, between = mean_divergences(joined, set_numbers)
    means = np.stack([weights[data].mean(0) for data in sets]).astype(np.float64)
    unit = means / np.linalg.norm(means, axis=1, keepdims=True)
    return {
        "within": float(within),
        "between": float(between),
        "cosine_of_means": {"sets": sets, "values": np.round(unit @ unit.T, 4).tolist()},
        "effective_prompts": float(np.exp(-(means * np.log(np.maximum(means, 1e-30))).sum(1)).mean()),
    }
