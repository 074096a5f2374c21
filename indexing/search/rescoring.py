"""Re-ranks hits: a cross-encoder scores pairs of queries and passages, in tasks that keep the model open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from riptide.base.cuts import Cuts
from riptide.base.errors import InputError, renamed_parameters
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.exact import Hits
from riptide.indexing.hit_sources.grammar import source_label
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.model_artifacts import resolve_model, stored_model
from riptide.indexing.store.store import Store
from riptide.indexing.work.required_device import pinned_gpus
from riptide.indexing.work.worker_tasks import Allocation, Report, Runner, WorkerResources
from riptide.retriever.options import EncoderPrecision, RerankerOptions

if TYPE_CHECKING:
    from riptide.retriever.encoding.reranker import Reranker

BLOCK_QUERIES = 64  # queries per task; fixed, as the rounding of a score depends on the other pairs of its batch


def open_reranker(store: Store, name: str, dtype: EncoderPrecision = "auto") -> RerankerSpec:
    """Returns the specification of a re-ranker, without a numerics class; models/NAME uses titles as in its training.

    Args:
        store: The store.
        name: A Hugging Face name, a folder, or models/NAME of the store.
        dtype: The dtype of its matrix products, which errors call `rerank_dtype`.

    Raises:
        InputError: If it is missing or damaged, its scores are no probabilities, or it cannot be computed in int8.
    """
    from riptide.retriever.encoding.reranker import describe_reranker

    with _caller_names():
        options = RerankerOptions(dtype=dtype)  # not compiled: the gain did not outweigh the time to compile
        if inputs := reranker_inputs(store, name):
            trained = inputs["reranker"].config.get("training", {})
            if trained.get("loss", "bce") != "bce":
                raise InputError(
                    f"{name} was trained with the loss {trained['loss']}: its scores are no probabilities; train with "
                    "bce"
                )
            options = replace(options, title=trained.get("title", options.title))
        return RerankerSpec(store, name, options, describe_reranker(resolve_model(store, name), options), inputs=inputs)


def _caller_names() -> AbstractContextManager[None]:
    """Returns a context in which errors of a re-ranker name the options of jobs."""
    return renamed_parameters(dtype="rerank_dtype")


def reranker_inputs(store: Store, name: str) -> dict[str, Artifact]:
    """Returns {"reranker": artifact} for a re-ranker of the store (models/NAME); {} for any other re-ranker."""
    artifact = stored_model(store, name)
    return {} if artifact is None else {"reranker": artifact}


@dataclass(frozen=True)
class RerankerNumericsTask:
    """A worker task that returns the numerics class of the worker's re-ranker, without loading weights.

    Attributes:
        resources: The resources of a worker.
        options: The options of the re-ranker.
        model_type: The architecture of the re-ranker.
        pinned: The class of existing scores; None: there are none.
    """

    resources: WorkerResources
    options: RerankerOptions
    model_type: str
    pinned: str | None = None

    def open(self, allocation: Allocation) -> Callable[[None, Report], str]:
        """Returns a function that returns the numerics class."""
        from riptide.retriever.forward.numerics import expected_numerics

        def find(item: None, report: Report) -> str:
            with _caller_names():
                return expected_numerics(self.options, allocation.device, self.model_type, self.pinned)

        return find


@dataclass(frozen=True)
class RerankerSpec:
    """The name and the pinned configuration of a re-ranker. It is sent to workers, which open it on their node.

    Attributes:
        store: The store that the name refers to.
        name: A Hugging Face name, a folder, or models/NAME of the store.
        options: The options of the re-ranker.
        config: The pinned configuration.
        numerics: The pinned numerics class; None: any.
        inputs: The artifacts of the store that it consists of; see `reranker_inputs`.
    """

    store: Store
    name: str
    options: RerankerOptions
    config: dict[str, Any]
    numerics: str | None = None
    inputs: Mapping[str, Artifact] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The last part of the name, for the names of artifacts."""
        return source_label(self.name.rstrip("/").rpartition("/")[2])

    @property
    def resources(self) -> WorkerResources:
        """The resources of a worker: all cores, or the GPU of its numerics class."""
        return WorkerResources(cores=None, gpus=pinned_gpus(self.numerics, None, ""))

    def check_machine(self) -> None:
        """Raises InputError if this machine lacks the dtype: int8 needs a kernel, and every machine has the others."""
        from riptide.retriever.forward.numerics import choose_device, choose_dtype

        with _caller_names():
            choose_dtype(self.options.dtype, choose_device("cpu"), measure=False)

    def with_numerics(self, runner: Runner, count: int, pinned: str | None = None, place: str = "") -> RerankerSpec:
        """Returns it with the numerics class of the re-rankers that the runner opens.

        Scores of one class have the same rounding.

        Args:
            runner: The runner.
            count: The number of re-rankers that can work at the same time.
            pinned: The class of the parts that the artifact has, whose kind of device and dtype are used; None: it has
                none yet.
            place: The artifact, for errors.

        Raises:
            InputError: If the user requests another kind of device than the pinned one, or if workers cannot compute
                the dtype.
        """
        with _caller_names():
            gpus = pinned_gpus(pinned, runner.request.gpus, place, self.options.dtype)
        resources = WorkerResources(cores=None, gpus=gpus)
        task = RerankerNumericsTask(resources, self.options, self.config["model_type"], pinned)
        return replace(self, numerics=runner.run_on_first_available(task, None, count))

    def open(self, allocation: Allocation) -> PairScorer:
        """Opens the re-ranker. Raises InputError if its configuration or numerics class is not the pinned one."""
        from riptide.retriever.encoding.reranker import Reranker

        name, device = resolve_model(self.store, self.name), allocation.device
        if self.options.dtype == "int8":
            device = "cpu"
        with _caller_names():
            model = Reranker(name, self.options, device=device, threads=allocation.cores, pinned=self.numerics)
        if model.config != self.config:
            raise InputError(f"the re-ranker {self.name} on this node is not the pinned one: give all nodes the same")
        if self.numerics not in (None, model.numerics):
            raise InputError(
                f"scores are of the numerics class `{self.numerics}`, this worker's is `{model.numerics}`: "
                "one artifact has one class; use workers of one kind"
            )
        return PairScorer(model)


@dataclass(frozen=True)
class PairScorer:
    """An opened re-ranker that scores pairs of a query and a passage of a corpus."""

    model: Reranker

    def score(self, queries: Sequence[str], corpus: Corpus, rows: np.ndarray) -> tuple[np.ndarray, Cuts]:
        """Returns the probability of each pair (queries[i], passage at rows[i]), float32 [pairs], and the counts
        of the pairs that were cut."""
        wanted, inverse = np.unique(rows, return_inverse=True)
        passages = corpus.passages(wanted)
        texts = self.model.compose([p.title for p in passages], [p.text for p in passages])
        tokens, types = self.model.tokenize(queries, [texts[number] for number in inverse])
        with _caller_names():
            return self.model.forward(tokens, types), tokens.count_cuts()


@dataclass(frozen=True)
class RerankTask:
    """Scores the first d hits of a block of queries; an item is (number of first query, texts, rows int64 [q, d])."""

    spec: RerankerSpec
    corpus: Corpus
    stays_open: bool = True

    @property
    def resources(self) -> WorkerResources:
        """The resources of a worker: all cores, or the GPU of the re-ranker's numerics class."""
        return self.spec.resources

    def open(
        self, allocation: Allocation
    ) -> Callable[[tuple[int, list[str], np.ndarray], Report], tuple[np.ndarray, Cuts]]:
        """Returns a function that returns scores float32 [q, d] (-inf for missing hits) and the counts of cut pairs."""
        scorer = self.spec.open(allocation)

        def score(block: tuple[int, list[str], np.ndarray], report: Report) -> tuple[np.ndarray, Cuts]:
            _, texts, rows = block
            scores, cuts = np.full(rows.shape, -np.inf, np.float32), Cuts()
            queries, _ = pairs = np.nonzero(rows >= 0)
            if len(queries):
                scores[pairs], cuts = scorer.score([texts[number] for number in queries], self.corpus, rows[pairs])
            return scores, cuts

        return score


def rerank(hits: Hits, texts: Sequence[str], depth: int, task: RerankTask, runner: Runner) -> tuple[Hits, Cuts]:
    """Re-ranks the first `depth` hits of each query by the re-ranker's probability, which becomes their score.

    The hits below follow as `reorder_hits` says. Returns the counts of the pairs that were cut, too.

    Args:
        hits: The hits of the queries.
        texts: The texts of the queries.
        depth: Hits per query to re-rank.
        task: The task that scores a block of queries.
        runner: What spreads the blocks over workers.
    """
    size = BLOCK_QUERIES
    filled = np.argsort(hits.rows < 0, axis=1, kind="stable")  # a dropped hit leaves a hole: missing hits go to the end
    scores, rows = (np.take_along_axis(column, filled, axis=1) for column in hits)
    blocks = [
        (start, list(texts[start : start + size]), rows[start : start + size, :depth])
        for start in range(0, len(texts), size)
    ]
    probabilities, cuts = np.empty((len(rows), min(depth, rows.shape[1])), np.float32), Cuts()
    for (start, _, top), (found, cut) in runner.run(task, blocks):
        probabilities[start : start + len(top)] = found
        cuts += cut
    return reorder_hits(Hits(scores, rows), probabilities), cuts


def reorder_hits(hits: Hits, probabilities: np.ndarray) -> Hits:
    """Sorts the first d hits of each query by the re-ranker's probabilities, which become their scores.

    The hits below keep their order, with -rank as their score, so a run stays as deep as it was. Equal probabilities
    are ordered by row.

    Args:
        hits: Hits [q, k] without holes: missing hits are last.
        probabilities: float32 [q, d] of the first d hits of each query; -inf for missing hits.
    """
    depth = probabilities.shape[1]
    top, below = hits.rows[:, :depth], hits.rows[:, depth:]
    order = np.lexsort((top, -probabilities), axis=1)
    ranks = np.arange(depth + 1, hits.rows.shape[1] + 1)
    scores = [np.take_along_axis(probabilities, order, axis=1), np.where(below >= 0, -ranks, -np.inf)]
    rows = np.concatenate([np.take_along_axis(top, order, axis=1), below], axis=1)
    return Hits(np.concatenate(scores, axis=1).astype(np.float32), rows)
