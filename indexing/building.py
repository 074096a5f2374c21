"""Embeddings to an index: the quantiser trained once, shards filled in parallel, recall measured and the dials set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from indexing.artifact import Artifact, Draft, Part
from indexing.embeddings import Embeddings
from indexing.exact import Hits
from indexing.faiss_index import (
    check_factory,
    choose_factory,
    draw_queries,
    fill_shard,
    num_lists,
    read_index,
    recall_at,
    search_shard,
    train_quantizer,
    training_size,
    write_index,
)
from indexing.index import Index, Shard, check_lineage
from indexing.searching import folded, rescore_pieces, search_exact
from indexing.store import Store, generation
from indexing.tasks import node_cores, run_tasks
from retriever.errors import InputError

SAMPLE_QUERIES = 1_000  # of the corpus' own vectors, to measure recall with
SAMPLE_PARTS = 256  # the training sample is drawn from at most so many parts
SEED = 0
DEPTHS = (200, 400, 800, 1600)
KS = (10, 100, 200)


@dataclass(frozen=True)
class IndexOptions:
    """What shapes an index."""

    factory: str = "auto"  # FAISS' factory string (`check_factory`); auto: from size, memory and recall
    shards: int = 4
    recall: float = 0.95  # of the exact top 100, after re-scoring
    memory_bytes: int | None = None  # for auto: of the whole first generation at most

    def chosen(self, embeddings: Embeddings) -> str:
        """The factory of a new index. Raises InputError where none fits the memory."""
        if self.factory != "auto":
            return self.factory
        return choose_factory(embeddings.num_rows, embeddings.dim, self.recall, self.memory_bytes, self.shards)


@dataclass(frozen=True)
class Dial:
    """What to search with, and what was measured with it."""

    nprobe: int
    depth: int  # candidates of each shard that are scored again
    recall: dict[int, float]  # k -> recall@k against exact search
    at: float  # the one that was to be reached, @100
    reached: bool


class Building:
    """An index, or its next generation, begun: which shards are left to fill."""

    def __init__(self, store: Store, embeddings: Embeddings, name: str, options: IndexOptions):
        """Raises InputError for a factory that does not fit, and where others were pinned."""
        self.store, self.embeddings, self.name = store, embeddings, name
        self.previous = store.generations("index", name)
        check_lineage(self.previous, embeddings)
        covered = Index(name, self.previous).num_rows if self.previous else 0
        first = self.previous[0].config if self.previous else None
        factory = options.factory
        if factory == "auto":
            factory = first["factory"] if first else options.chosen(embeddings)
        check_factory(factory, embeddings.dim)
        config = {
            "embeddings": embeddings.name,
            "factory": factory,
            "shards": options.shards,
            "recall": options.recall,
            "seed": SEED,
        }
        if options.memory_bytes is not None:
            config["memory_bytes"] = options.memory_bytes
        if first and first != config:
            keys = [k for k in {**first, **config} if first.get(k) != config.get(k)]
            changed = ", ".join(f"{k} {first.get(k)}, now {config.get(k)}" for k in keys)
            raise InputError(
                f"{store.url}/index/{name} was built otherwise ({changed}): give the same options or another --name"
            )
        self.factory = factory
        self.first_row, self.end = covered, embeddings.num_rows
        self.draft: Draft | None = None
        if covered < self.end or not self.previous:
            inputs = {f"embeddings/{n}": g for n, g in enumerate(embeddings.generations)}
            if self.previous:
                inputs["previous"] = self.previous[-1]
            number = len(embeddings.generations) - 1
            self.draft = store.create("index", f"{name}/{generation(number)}", inputs=inputs, config=config)
        share = 1.0 if not covered else (self.end - covered) / self.previous_rows
        self.num_shards = max(1, min(round(options.shards * share), self.end - covered))
        self.recall = options.recall
        self._quantizer: tuple[Artifact | Draft, Part] | None = None

    @property
    def previous_rows(self) -> int:
        """Rows of the first generation, which was cut into the shards asked for."""
        return max(1, Index(self.name, self.previous[:1]).num_rows)

    def ranges(self) -> list[tuple[int, int, int]]:
        """(number, first row, end) of each shard to be."""
        bounds = np.linspace(self.first_row, self.end, self.num_shards + 1).astype(np.int64)
        return [(n, int(bounds[n]), int(bounds[n + 1])) for n in range(self.num_shards)]

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.draft is None or self.draft.complete

    def train(self) -> int:
        """Train the quantiser, or find it: an earlier generation's, or an earlier run's. Returns the sample's size."""
        assert self.draft is not None
        if self.previous:
            self._quantizer = Index(self.name, self.previous).quantizer
            return 0
        cores, rows = node_cores(), 0
        if "quantizer" not in self.draft.committed():
            [(_, rows)] = run_tasks(train, [self.factory], self.draft, self.embeddings, cores, num_cpus=cores)
        self._quantizer = self.draft, self.draft.committed()["quantizer"]
        return rows

    def fill(self) -> Iterator[tuple[bool, int]]:
        """Fill the shards that are left; yields (kept from an earlier run, vectors) for each."""
        assert self.draft is not None
        committed = self.draft.committed()
        todo = [entry for entry in self.ranges() if f"shard-{entry[0]:05d}" not in committed]
        for number, start, end in self.ranges():
            if f"shard-{number:05d}" in committed:
                yield True, end - start
        for (_, start, end), _ in run_tasks(fill, todo, self.draft, self.embeddings, self._quantizer, num_cpus=1):
            yield False, end - start

    def finish(self) -> None:
        """Measure recall, set the dials, complete the artifact."""
        assert self.draft is not None
        dial = self._measure()
        recall = {str(k): round(value, 6) for k, value in dial.recall.items()}
        self.draft.note(nprobe=dial.nprobe, depth=dial.depth, recall=recall, reached=dial.reached)
        self.draft.finish()

    def _measure(self) -> Dial:
        """Recall against exact search, of the corpus' own vectors as queries (each without itself)."""
        assert self.draft is not None
        shards = list(Index(self.name, self.previous).shards) if self.previous else []
        for part in self.draft.committed().values():
            if part.name.startswith("shard-"):
                shards.append(Shard(self.draft, part, part.facts["first_row"], part.facts["end"]))
        own_rows = draw_queries(self.end, SAMPLE_QUERIES, SEED)
        queries = self.embeddings.take(own_rows).astype(np.float32)
        width = min(201, self.end)
        nothing = np.empty(0, np.int64)
        exact = search_exact(self.embeddings, queries, width, nothing, end=self.end)

        def search(nprobe: int) -> dict[int, np.ndarray]:
            found = probe(shards, self.embeddings, queries, width, nprobe)
            return {depth: without(rows, own_rows) for depth, rows in found.items()}

        return turn_dials(search, without(exact.rows, own_rows), max(1, num_lists(self.factory)), self.recall)


def turn_dials(search: Callable[[int], Mapping[int, np.ndarray]], truth: np.ndarray, most: int, recall: float) -> Dial:
    """The smallest nprobe (a power of two), then the smallest depth, whose recall@100 is enough, or else the best.

    search(nprobe) gives the rows found, int64 [q, k], for each depth; truth: the exact ones; most: the number of lists.
    """
    best: Dial | None = None
    for nprobe in sorted({min(1 << i, most) for i in range(most.bit_length() + 1)}):
        for depth, rows in sorted(search(nprobe).items()):
            measured = recall_at(rows, truth, [k for k in KS if k <= truth.shape[1]] or [truth.shape[1]])
            at = measured.get(100, list(measured.values())[-1])
            if best is None or at > best.at:
                best = Dial(nprobe, depth, measured, at, at >= recall)
            if best.reached:
                return best
    assert best is not None
    return best


def without(rows: np.ndarray, own_rows: np.ndarray) -> np.ndarray:
    """int64 [q, k] less each query's own row [q]: [q, k - 1], the rest moved up."""
    own = rows == own_rows[:, None]
    return np.take_along_axis(rows, np.argsort(own, axis=1, kind="stable"), axis=1)[:, : max(1, rows.shape[1] - 1)]


def train(factory: str, draft: Draft, embeddings: Embeddings, threads: int) -> int:
    """One task: train on a seeded sample of the vectors, commit the empty index. Returns the sample's size."""
    rows = sample_rows(embeddings, training_size(factory, embeddings.num_rows))
    sample = embeddings.take(rows).astype(np.float32)
    trained = train_quantizer(sample, factory, seed=SEED, threads=threads)
    draft.commit("quantizer", ".faiss", lambda path: write_index(trained, path), rows=len(rows))
    return len(rows)


def sample_rows(embeddings: Embeddings, count: int) -> np.ndarray:
    """`count` rows, ascending int64, drawn with SEED from at most SAMPLE_PARTS parts (more where those are too few)."""
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


def fill(
    shard: tuple[int, int, int], draft: Draft, embeddings: Embeddings, quantizer: tuple[Artifact | Draft, Part]
) -> None:
    """One task: a shard's vectors into a copy of the trained index."""
    number, first_row, end = shard
    owner, part = quantizer
    vectors = (piece for _, piece in embeddings.between(first_row, end))
    filled = fill_shard(read_index(owner.local(part)), vectors, first_row, threads=1)
    draft.commit(
        f"shard-{number:05d}", ".faiss", lambda path: write_index(filled, path), rows=end - first_row,
        first_row=first_row, end=end,
    )  # fmt: skip


def probe(
    shards: Sequence[Shard], embeddings: Embeddings, queries: np.ndarray, k: int, nprobe: int
) -> dict[int, np.ndarray]:
    """The rows of the best k over all shards, int64 [q, k], for each of DEPTHS; one shard's hits wait at a time."""
    cores = node_cores()
    tasks = run_tasks(probe_shard, shards, embeddings, queries, k, nprobe, DEPTHS, cores, num_cpus=cores)
    best = folded((hits for _, hits in tasks), k)
    return dict(zip(DEPTHS, np.split(best.rows, len(DEPTHS)), strict=True))


def probe_shard(
    shard: Shard, embeddings: Embeddings, queries: np.ndarray, k: int, nprobe: int, depths: Sequence[int], threads: int
) -> Hits:
    """One task of the measurement: the re-scored top k [depths * q, k], those at the first depth first."""
    rows = search_shard(
        read_index(shard.artifact.local(shard.part)), queries, max(depths), nprobe=nprobe, threads=threads
    )
    pieces = embeddings.between(shard.first_row, shard.end)
    found = [rescore_pieces(queries, rows[:, :depth], pieces, k, threads) for depth in depths]
    return Hits(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))
