"""Computes mean weights of the basic prompts over query sets, for a task with synthesised prompts (HYPER, Fig. 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.embeddings.named_encoders import EncoderSpec, find_encoder_spec
from riptide.indexing.measures.distributions import cosines, divergences
from riptide.indexing.store.store import Store
from riptide.indexing.work.worker_tasks import ALL_CORES, Allocation, Report, Runner, WorkerResources
from riptide.retriever.options import EncoderOptions


@dataclass(frozen=True)
class AttentionWeightsTask:
    """A worker task that computes the weights of the basic prompts for a list of queries: float32 [q, N]."""

    spec: EncoderSpec
    resources: WorkerResources = ALL_CORES
    stays_open: bool = True

    def open(self, allocation: Allocation) -> Callable[[list[str], Report], np.ndarray]:
        """Opens the encoder and returns a function that computes the weights of queries."""
        encoder = self.spec.open(side="query", device=allocation.device, threads=allocation.cores)
        assert self.spec.task is not None
        task = self.spec.task
        return lambda texts, report: encoder.prompt_weights(texts, task=task)


@dataclass(frozen=True)
class MeanAttention:
    """The mean weights of the basic prompts for each query set.

    Attributes:
        labels: The name of each query set.
        means: Mean weights, float64 [sets, N], rows of sum 1.
        num_queries: Number of queries of each set that have a prompt.
        num_without: Number of queries of each set without a word that the backbone knows; they do not count.
    """

    labels: tuple[str, ...]
    means: np.ndarray
    num_queries: tuple[int, ...]
    num_without: tuple[int, ...]

    def document(self) -> dict[str, Any]:
        """Returns the means, their cosines and Jensen-Shannon divergences (nats), as a JSON-able dictionary."""
        return {
            "sets": list(self.labels),
            "num_queries": list(self.num_queries),
            "num_without_words": list(self.num_without),
            "mean_attention": self.means.tolist(),
            "cosine": cosines(self.means).tolist(),
            "divergence": divergences(self.means).tolist(),
        }


class MeasureAttentionWork:
    """Measures the attention of a task with synthesised prompts; the constructor checks the task.

    Args:
        store: The store with prompts/TASK.
        task: Name of the task.

    Raises:
        InputError: If there is no such prompt, if all queries have the same prompt, or if all have the same weights.
    """

    def __init__(self, store: Store, task: str):
        spec = find_encoder_spec(store, None, task, EncoderOptions(compile="never"))
        prompt = spec.prompt()
        if prompt is None or prompt.synthesis is None:
            raise InputError(
                f"{Parameter('task', task)}: its queries have no prompt, or all have the same one: expected a task "
                "whose prompts are computed from each query; name one that was trained with "
                f"{Parameter('prompt', 'synthesised')}"
            )
        if prompt.synthesis.options.attention == "uniform":
            raise InputError(
                f"{Parameter('task', task)}: it was trained with uniform attention, so the weights of all queries are "
                "equal, and there is nothing to compare; name a task with learned attention"
            )
        self.num_prompts = prompt.synthesis.options.prompts
        self._task = AttentionWeightsTask(spec)

    def weights(self, texts: Sequence[str], runner: Runner) -> np.ndarray:
        """Computes the weights of the basic prompts per query: float32 [q, N], NaN for a query without known words."""
        [(_, weights)] = runner.run(self._task, [list(texts)])
        return np.asarray(weights, np.float32)

    def run(self, sets: Mapping[str, Sequence[str]], runner: Runner) -> MeanAttention:
        """Computes the mean attention weights of the basic prompts for each query set.

        Args:
            sets: The texts of the queries of each set, by the set's name.
            runner: Where the weights are computed.

        Raises:
            InputError: If no query of a set has a word that the backbone knows.
        """
        means, num_queries, num_without = [], [], []
        for label, texts in sets.items():
            weights = self.weights(texts, runner)
            known = weights[~np.isnan(weights).any(axis=1)]
            if not len(known):
                raise InputError(
                    f"query set {label}: none of its {len(texts):,} queries has a word that the backbone knows; give a "
                    "query set in the backbone's language"
                )
            means.append(known.astype(np.float64).mean(axis=0))
            num_queries.append(len(known))
            num_without.append(len(texts) - len(known))
        return MeanAttention(tuple(sets), np.stack(means), tuple(num_queries), tuple(num_without))
