"""Re-ranking on the cluster: pairs of questions and passages scored by tasks that keep their model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from indexing.artifact import Artifact
from indexing.corpus import Corpus
from indexing.exact import Hits
from indexing.models import resolve_model
from indexing.store import Store
from indexing.tasks import node_cores, run_tasks
from retriever.errors import InputError
from retriever.reranker import Reranker, RerankerOptions, describe_reranker, expected_reranker_numerics

OPTIONS = RerankerOptions()  # eager: compiling showed no gain that would pay for its start
BLOCK_QUERIES = 64  # of one task, always: a score's last bits depend on the pairs beside it


def open_reranker(store: Store, name: str) -> tuple[RerankerOptions, dict[str, Any]]:
    """(options, configuration) of a re-ranker; `models/NAME` is one of the store's, read as it was trained.

    Raises InputError.
    """
    options = OPTIONS
    if inputs := reranker_inputs(store, name):
        trained = inputs["reranker"].config.get("training", {})
        if trained.get("loss", "bce") != "bce":
            raise InputError(
                f"{name} was trained with the loss {trained['loss']}: its scores are no probabilities; train with bce"
            )
        options = replace(options, title=trained.get("title", options.title))
    return options, describe_reranker(resolve_model(store, name), options)


def reranker_inputs(store: Store, name: str) -> dict[str, Artifact]:
    """The store's model that a re-ranker is, as an input of what it scores; nothing for one from elsewhere."""
    kind, _, own = name.partition("/")
    return {"reranker": store.open(kind, own)} if kind == "models" and own else {}


def rerank_resources() -> dict[str, Any]:
    """What a task that re-ranks asks for: a GPU where there are some, else a node's cores."""
    import ray

    if ray.cluster_resources().get("GPU", 0) >= 1:
        return {"num_cpus": min(4, node_cores()), "num_gpus": 1}
    return {"num_cpus": node_cores()}


def numerics_of_reranker() -> str:
    """The numerics class of the cluster's re-rankers, asked of one of them."""
    import ray

    resources = rerank_resources()
    device = "cuda" if resources.get("num_gpus") else "cpu"
    return ray.get(ray.remote(**resources)(expected_reranker_numerics).remote(OPTIONS, device))


@dataclass(frozen=True)
class RerankWorker:
    """A re-ranker as it travels to a task: opened there once in a process, and checked against what is pinned."""

    store: Store
    name: str  # resolved on each node: a model of the store lies in every node's own cache
    options: RerankerOptions
    config: dict[str, Any]
    numerics: str

    def score(self, questions: Sequence[str], corpus: Corpus, rows: np.ndarray) -> np.ndarray:
        """The probability of each pair (questions[i], the passage in rows[i]): float32 [pairs]."""
        model = self._open()
        wanted, inverse = np.unique(rows, return_inverse=True)
        passages = corpus.passages(wanted)
        texts = model.compose([p.title for p in passages], [p.text for p in passages])
        return model.score(questions, [texts[number] for number in inverse])

    def _open(self) -> Reranker:
        model = _opened(resolve_model(self.store, self.name), self.options)
        if model.config != self.config:
            raise InputError(f"the re-ranker {self.name} on this node is not the pinned one: give all nodes the same")
        if model.numerics != self.numerics:
            raise InputError(
                f"scores are of the numerics class `{self.numerics}`, this worker's is `{model.numerics}`: "
                "one artifact has one class; use workers of one kind"
            )
        return model


@functools.lru_cache(maxsize=1)
def _opened(name: str, options: RerankerOptions) -> Reranker:
    import ray

    resources = ray.get_runtime_context().get_assigned_resources() if ray.is_initialized() else {}
    device = "cuda" if resources.get("GPU") else "cpu"
    return Reranker(name, options, device=device, threads=int(resources.get("CPU", 0)) or None)


def rerank(hits: Hits, texts: Sequence[str], depth: int, corpus: Corpus, worker: RerankWorker) -> Hits:
    """The first `depth` hits of each question in the order of their probability, which becomes their score.

    The hits below keep their order under them, with -rank for a score: a run stays as deep as it was.
    """
    resources = rerank_resources()
    size = BLOCK_QUERIES
    filled = np.argsort(hits.rows < 0, axis=1, kind="stable")  # a hit that was dropped leaves a hole
    scores, rows = (np.take_along_axis(column, filled, axis=1) for column in hits)
    items = [
        (start, list(texts[start : start + size]), rows[start : start + size, :depth])
        for start in range(0, len(texts), size)
    ]
    scores[:, depth:] = np.where(rows[:, depth:] >= 0, -np.arange(depth + 1, rows.shape[1] + 1), -np.inf)
    for (start, _, top), found in run_tasks(rerank_block, items, corpus, worker, **resources):
        end = start + len(top)
        order = np.lexsort((top, -found), axis=1)  # equal probabilities by row
        rows[start:end, :depth] = np.take_along_axis(top, order, axis=1)
        scores[start:end, :depth] = np.take_along_axis(found, order, axis=1)
    return Hits(scores, rows)


def rerank_block(item: tuple[int, list[str], np.ndarray], corpus: Corpus, worker: RerankWorker) -> np.ndarray:
    """One task of `rerank`: float32 [questions, depth], -inf where there is no hit."""
    _, texts, rows = item
    found = np.full(rows.shape, -np.inf, np.float32)
    queries, _ = there = np.nonzero(rows >= 0)
    if len(queries):
        found[there] = worker.score([texts[number] for number in queries], corpus, rows[there])
    return found
