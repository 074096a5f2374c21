"""Builds a FAISS index from embeddings: trains a quantizer, fills shards in parallel, measures recall."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.filters import group_queries
from riptide.indexing.dense.dense_search import merge_results, search_exact
from riptide.indexing.dense.factory import (
    candidate_depths,
    choose_factory,
    effort_name,
    search_efforts,
    training_size,
)
from riptide.indexing.dense.faiss_filling import fill_shard, train_quantizer
from riptide.indexing.dense.faiss_index import check_factory, read_index, write_index
from riptide.indexing.dense.faiss_search import Centroids
from riptide.indexing.dense.index import Index, IndexShard
from riptide.indexing.dense.kmeans import STRIDES
from riptide.indexing.dense.recall import draw_queries, recall_at
from riptide.indexing.dense.shard import OpenShard, OpenShards, are_all_scored
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.embeddings.vector_kind import IndexOptions, RecallQueries
from riptide.indexing.exact import Hits, pad_hits
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.keys import Key, checkpoint_names
from riptide.indexing.store.model_artifacts import StoredCheckpoint
from riptide.indexing.store.sealed_json import ArtifactPart, fingerprint_of
from riptide.indexing.store.store import Store
from riptide.indexing.work.growth import NextGenerationWork, count_shards
from riptide.indexing.work.work import Progress, TaskStage, WorkUnit, check_same_config, shard_units
from riptide.indexing.work.worker_tasks import ALL_CORES, ONE_CORE, Allocation, Report, Runner, WorkerResources

SAMPLE_QUERIES = 1_000  # corpus vectors that serve as queries to measure recall
SAMPLE_PARTS = 256  # the training sample is drawn from at most this number of parts
CHECKPOINT_S = 5.0  # smallest number of seconds between two checkpoints of a training
SEED = 0
KS = (10, 100, 200)


@dataclass(frozen=True)
class SearchSetting:
    """Search parameters of an index, with the recall that they reach."""

    effort: int  # nprobe, or efSearch of a graph
    depth: int  # candidates per shard whose exact scores are computed
    recall: dict[int, float]  # k -> recall@k against exact search
    at: float  # recall@100 (at the largest k if fewer), which is compared with the requested recall
    reached: bool


class BuildIndexWork(NextGenerationWork):
    """The work that makes index/NAME, or its next generation: train a quantizer, fill shards, measure recall.

    Attributes:
        factory: FAISS' factory string.
    """

    def __init__(
        self,
        store: Store,
        embeddings: Embeddings,
        name: str,
        options: IndexOptions,
        encode: Callable[[Sequence[str], Runner], np.ndarray] | None = None,
    ):
        """Checks the options, and that they match those of the existing generations.

        Args:
            store: The store.
            embeddings: The vectors to index.
            name: The name of the index.
            options: Its options.
            encode: Returns the vectors of texts of queries, float32 [q, dim]; needed with `options.queries`.

        Raises:
            InputError: If the factory does not fit the embeddings, or if the existing generations have other options.
        """
        super().__init__(store, "index", name, embeddings.generations)
        self.store, self.embeddings = store, embeddings
        first = self.previous[0].config if self.previous else None
        factory = options.factory
        if factory == "auto":
            factory = first["factory"] if first else _choose_factory(embeddings, options)
        if first is None:  # that of an existing index was checked when the index began
            check_factory(factory, embeddings.dim)
        self.config: dict[str, Any] = {
            "embeddings": embeddings.name,
            "factory": factory,
            "shards": options.shards,
            "recall": options.recall,
            "seed": SEED,
        }
        self.queries, self.encode = options.queries, encode
        if options.queries:
            self.config["queries"], self.config["split"] = options.queries.name, options.queries.split
            if options.queries.filter_field is not None:
                self.config["filter_field"] = options.queries.filter_field
        if options.memory_bytes is not None:
            self.config["memory_gb"] = options.memory_bytes / 1e9
        # Earlier releases trained with a number of threads that shaped the bytes. Their indexes keep it as they grow.
        if first and "training_threads" in first:
            self.config["training_threads"] = first["training_threads"]
        if self.previous:
            check_same_config(
                self.previous[0], dict.fromkeys(("memory_gb", "queries", "split", "filter_field")) | self.config
            )
        self.factory, self.recall = factory, options.recall
        self.end = embeddings.num_rows
        first_rows = self.previous[0].rows if self.previous else 0
        self.num_shards = count_shards(options.shards, self.end - self.first_row, first_rows)

    @property
    def stages(self) -> list[TaskStage]:
        """Returns the stages: training of the quantizer, for the first generation only, and filling of the shards."""
        units = shard_units(self.first_row, self.end, self.num_shards)
        fill = TaskStage("fill", "vectors", units, self._fill_task)
        if self.previous:
            return [fill]
        size = training_size(self.factory, self.embeddings.num_rows)
        trained = [WorkUnit(("quantizer",), size, self.factory)]
        return [TaskStage(f"train {self.factory}", "vectors", trained, self._train_task), fill]

    def _train_task(self, drafts: Sequence[Draft]) -> TrainTask:
        """Returns the task that trains the quantizer."""
        return TrainTask(drafts[0], self.embeddings, self._checkpoint(drafts[0]))

    def _checkpoint(self, draft: Draft) -> StoredCheckpoint:
        """Returns the handle to the centroids of an interrupted training."""
        name, _ = checkpoint_names(*Key.parse(draft.key))
        # Not the draft's identity: after an interruption, the next command may begin a new draft to continue.
        identity = fingerprint_of([[one.fingerprint for one in self.embeddings.generations], self.config, STRIDES])
        return StoredCheckpoint(self.store, name, identity)

    def has_checkpoint(self, drafts: Sequence[Draft]) -> bool:
        """Returns whether iterations of an interrupted training are kept."""
        return any(self._checkpoint(draft).step() is not None for draft in drafts)

    def _fill_task(self, drafts: Sequence[Draft]) -> FillTask:
        """Returns the task that fills shards with the quantizer of the first generation."""
        [draft] = drafts
        if self.previous:
            return FillTask(draft, self.embeddings, Index(self.name, self.previous).quantizer)
        return FillTask(draft, self.embeddings, (draft, draft.committed_parts()["quantizer"]))

    def prepare_completion(self, drafts: Sequence[Draft], runner: Runner, progress: Progress) -> None:
        """Measures recall, and adds notes with the search parameters that reach the requested recall."""
        [draft] = drafts
        self._checkpoint(draft).clear()
        count = min(SAMPLE_QUERIES, len(self.queries.texts) if self.queries else self.end)
        with progress("measure recall", count, "queries", draft.key) as counter:
            setting = self._choose_search_setting(draft, runner)
            counter.count(count)
        recall = {str(k): round(value, 6) for k, value in setting.recall.items()}
        effort = {effort_name(self.factory): setting.effort}
        draft.add_notes(**effort, depth=setting.depth, recall=recall, reaches_recall=setting.reached)

    def _choose_search_setting(self, draft: Draft, runner: Runner) -> SearchSetting:
        """Chooses search effort and depth by recall against exact search.

        Without queries, vectors of the corpus serve as queries. An index finds the neighbours of vectors that it
        holds more often than those of a query, which may lie far from all of them.
        """
        shards = list(Index(self.name, self.previous).shards) if self.previous else []
        for part in draft.committed_parts().values():
            if part.name.startswith("shard-"):
                shards.append(IndexShard(draft, part, part.facts["first_row"], part.facts["end"]))
        own_rows = None
        if self.queries and self.encode:
            sample = draw_queries(len(self.queries.texts), SAMPLE_QUERIES, SEED)
            vectors = self.encode([self.queries.texts[number] for number in sample.tolist()], runner)
            searches = self._filtered_searches(self.queries, sample, vectors, shards)
            draft.add_notes(queries=sum(len(queries) for queries, _ in searches))
            if self.queries.filter_field is not None:
                draft.add_notes(filters=sum(rows is not None for _, rows in searches))
        else:
            own_rows = draw_queries(self.end, SAMPLE_QUERIES, SEED)
            searches = [(self.embeddings.take(own_rows).astype(np.float32), None)]
        width = min(max(KS) + (own_rows is not None), self.end)
        exact = [
            search_exact(OpenShards(self.embeddings), queries, width, runner, allowed_rows=rows, end=self.end).rows
            for queries, rows in searches
        ]

        def search(effort: int) -> dict[int, np.ndarray]:
            depths = candidate_depths(self.factory, effort)
            results = [
                candidates_by_depth(
                    shards, SearchDepthsTask(self.embeddings, queries, width, effort, depths, rows), runner
                )
                for queries, rows in searches
            ]
            return {depth: without_own(np.concatenate([each[depth] for each in results])) for depth in depths}

        def without_own(rows: np.ndarray) -> np.ndarray:
            return rows if own_rows is None else without_own_row(rows, own_rows)

        efforts = search_efforts(self.factory)
        return choose_search_parameters(search, without_own(np.concatenate(exact)), efforts, self.recall)

    def _filtered_searches(
        self, queries: RecallQueries, sample: np.ndarray, vectors: np.ndarray, shards: Sequence[IndexShard]
    ) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Returns the vectors of sampled queries by filter, with the rows that match it; None: no filter.

        Queries are left out if no search parameter changes their hits, as all matching rows of each shard are scored.
        If this leaves none, all queries are measured without filters.
        """
        if not queries.filters:
            return [(vectors, None)]
        corpus, searches = Corpus.open(self.store), list[tuple[np.ndarray, np.ndarray | None]]()
        for filter, numbers in group_queries([queries.filters[number] for number in sample.tolist()]):
            rows = None if filter is None else filter.rows(corpus, end=self.end)
            if rows is not None:
                ends = np.searchsorted(rows, [(shard.first_row, shard.end) for shard in shards])
                if all(map(are_all_scored, np.diff(ends, axis=1).ravel().tolist())):
                    continue
            searches.append((vectors[numbers], rows))
        return searches or [(vectors, None)]


def _choose_factory(embeddings: Embeddings, options: IndexOptions) -> str:
    """Returns the factory string of a new index. Raises InputError if no index fits into the memory limit."""
    return choose_factory(embeddings.num_rows, embeddings.dim, options.recall, options.memory_bytes, options.shards)


def choose_search_parameters(
    search: Callable[[int], Mapping[int, np.ndarray]], truth: np.ndarray, efforts: Iterable[int], recall: float
) -> SearchSetting:
    """Returns the first search effort, and with it the smallest depth, that reach a recall@100.

    Args:
        search: search(effort) returns the rows found, int64 [q, k], for each depth.
        truth: The exact rows, int64 [q, k].
        efforts: The values of nprobe or efSearch to try, in ascending order.
        recall: The recall to reach.

    Returns:
        The setting; the one with the best recall if none reaches it.
    """
    best: SearchSetting | None = None
    for effort in efforts:
        for depth, rows in sorted(search(effort).items()):
            measured = recall_at(rows, truth, [k for k in KS if k <= truth.shape[1]] or [truth.shape[1]])
            at = measured.get(100, list(measured.values())[-1])
            if best is None or at > best.at:
                best = SearchSetting(effort, depth, measured, at, at >= recall)
            if best.reached:
                return best
    assert best is not None
    return best


def without_own_row(rows: np.ndarray, own_rows: np.ndarray) -> np.ndarray:
    """Removes the own row of each query, int64 [q], from its hits, rows int64 [q, k]; returns int64 [q, k - 1]."""
    own = rows == own_rows[:, None]
    return np.take_along_axis(rows, np.argsort(own, axis=1, kind="stable"), axis=1)[:, : max(1, rows.shape[1] - 1)]


@dataclass(frozen=True)
class TrainTask:
    """The task that trains the quantizer on a random sample (fixed seed) of the vectors and commits the empty index.

    It saves the centroids of iterations of k-means; an interrupted training continues from the last ones.
    """

    draft: Draft
    embeddings: Embeddings
    checkpoint: StoredCheckpoint
    resources: WorkerResources = ALL_CORES
    reports_progress: bool = True

    def open(self, allocation: Allocation) -> Callable[[WorkUnit, Report], None]:
        """Returns the function that processes a work unit."""

        def train(unit: WorkUnit, report: Report) -> None:
            factory = unit.payload
            rows = sample_rows(self.embeddings, training_size(factory, self.embeddings.num_rows))
            centroids = SavedCentroids(self.draft, self.checkpoint, lambda share: report(int(share * len(rows))))
            trained = train_quantizer(
                self.embeddings.take(rows), factory, seed=SEED, threads=allocation.cores, checkpoint=centroids
            )
            self.draft.commit("quantizer", ".faiss", lambda path: write_index(trained, path), rows=len(rows))

        return train


class SavedCentroids:
    """Saves the centroids of an iteration of k-means in the store, at most every CHECKPOINT_S seconds.

    Args:
        draft: The index.
        checkpoint: Where they are saved.
        report: Called with the finished share of the iterations.
    """

    def __init__(self, draft: Draft, checkpoint: StoredCheckpoint, report: Callable[[float], object]):
        self._draft, self._checkpoint, self._report = draft, checkpoint, report
        self._saved_at = time.monotonic()

    def load(self) -> tuple[int, np.ndarray] | None:
        """Returns the number of finished iterations and their centroids, float32 [k, dim]; None: there are none."""
        path = self._checkpoint.load()
        if path is None:
            return None
        try:
            tensors = load_file(path)
        finally:
            path.unlink()
        return int(tensors["iterations"]), tensors["centroids"]

    def save(self, iterations: int, centroids: np.ndarray) -> None:
        """Saves the centroids, float32 [k, dim]. Raises InputError if the draft was removed or replaced."""
        work = [1 / stride for stride in STRIDES]
        self._report(sum(work[:iterations]) / sum(work))
        if time.monotonic() - self._saved_at >= CHECKPOINT_S:
            self._draft.require_pinned()
            tensors = {"iterations": np.array(iterations), "centroids": centroids}
            self._checkpoint.save(iterations, lambda path: save_file(tensors, path))
            self._saved_at = time.monotonic()


def sample_rows(embeddings: Embeddings, count: int) -> np.ndarray:
    """Draws `count` rows, int64 ascending, with SEED from SAMPLE_PARTS parts, or more if those have too few rows."""
    random = np.random.default_rng(SEED)
    chosen: list[np.ndarray] = []
    available = 0
    for number, index in enumerate(random.permutation(len(embeddings.parts))):
        if number >= SAMPLE_PARTS and available >= count:
            break
        part = embeddings.parts[index]
        chosen.append(np.arange(part.first_row, part.end))
        available += part.part.rows
    rows = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
    return np.sort(random.choice(rows, min(count, len(rows)), replace=False))


@dataclass(frozen=True)
class FillTask:
    """The task that adds the vectors of a row range to a copy of the trained, empty index, and commits the shard."""

    draft: Draft
    embeddings: Embeddings
    quantizer: tuple[Artifact | Draft, ArtifactPart]
    resources: WorkerResources = ONE_CORE
    reports_progress: bool = True

    def open(self, allocation: Allocation) -> Callable[[WorkUnit, Report], None]:
        """Returns the function that processes a work unit."""
        return self._fill

    def _fill(self, unit: WorkUnit, report: Report) -> None:
        [name] = unit.names
        first, end = unit.payload
        owner, part = self.quantizer
        vectors = (piece for _, piece in self.embeddings.read_range(first, end))
        filled = fill_shard(read_index(owner.local_path(part)), report_rows(vectors, report), first, threads=1)
        self.draft.commit(
            name, ".faiss", lambda path: write_index(filled, path), rows=end - first, first_row=first, end=end
        )


def report_rows(pieces: Iterable[np.ndarray], report: Report) -> Iterator[np.ndarray]:
    """Yields the pieces, and before each reports the total number of rows yielded so far."""
    rows = 0
    for piece in pieces:
        report(rows)
        yield piece
        rows += len(piece)


def candidates_by_depth(shards: Sequence[IndexShard], task: SearchDepthsTask, runner: Runner) -> dict[int, np.ndarray]:
    """Returns, for each depth of the task, the rows of its top k over all shards, int64 [q, k].

    The hits of only one shard are in memory at a time.
    """
    best = merge_results((hits for _, hits in runner.run(task, shards)), task.k)
    return dict(zip(task.depths, np.split(best.rows, len(task.depths)), strict=True))


@dataclass(frozen=True)
class SearchDepthsTask:
    """The task that finds candidates in a shard and scores them exactly for each depth: Hits [depths * q, k]."""

    embeddings: Embeddings
    queries: np.ndarray
    k: int
    effort: int
    depths: Sequence[int]
    allowed_rows: np.ndarray | None = None
    resources: WorkerResources = ALL_CORES

    def open(self, allocation: Allocation) -> Callable[[IndexShard, Report], Hits]:
        """Returns the function that searches a shard."""

        query_lists = Centroids().query_lists()

        def probe(shard: IndexShard, report: Report) -> Hits:
            index = read_index(shard.artifact.local_path(shard.part))
            open_shard = OpenShard(self.embeddings, shard.first_row, shard.end, index=index)
            parameters: dict[str, Any] = {
                "effort": self.effort,
                "threads": allocation.cores,
                "query_lists": query_lists,
            }
            if self.allowed_rows is None:
                rows = open_shard.find_candidates(self.queries, max(self.depths), **parameters)
                hits = [
                    open_shard.rescore(self.queries, rows[:, :depth], self.k, allocation.cores) for depth in self.depths
                ]
            else:
                parameters["allowed_rows"] = self.allowed_rows
                hits = [
                    pad_hits(open_shard.search(self.queries, min(self.k, depth), depth=depth, **parameters), self.k)
                    for depth in self.depths
                ]
            return Hits(*(np.concatenate(arrays) for arrays in zip(*hits, strict=True)))

        return probe
