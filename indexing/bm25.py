"""BM25 over a corpus: Lucene shards built in parallel and searched as one, so that its statistics are global."""

from __future__ import annotations

import base64
import functools
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from indexing.artifact import Artifact, Draft
from indexing.chain import RowPart
from indexing.corpus import Corpus, open_table
from indexing.exact import Hits, nothing
from indexing.lucene import LuceneSearch, LuceneShard, analyzer, versions, write_shard
from indexing.store import Store, generation
from indexing.tasks import node_cores, num_slots, run_tasks
from retriever.errors import InputError

DEFAULT = "bm25"  # the name of one that was not given another
SHARD_ROWS = 1_000_000  # passages of a shard, at most, where their number is left open
LEAST_QUERIES = 256  # of one task: a smaller one is mostly its own start


class Bm25:
    """All complete generations of bm25/NAME, for reading."""

    def __init__(self, name: str, generations: Sequence[Artifact]):
        self.name = name
        self.generations = list(generations)
        self.shards = [(artifact, part) for artifact in generations for part in artifact.group("shard")]
        self.num_rows = sum(part.rows for _, part in self.shards)
        config = generations[0].config
        self.k1, self.b, self.language = float(config["k1"]), float(config["b"]), str(config["language"])

    @classmethod
    def open(cls, store: Store, name: str | None, corpus: Corpus) -> Bm25:
        """`name` may be left out: then it is the one that is called bm25, or the only one.

        Raises InputError where it was built from another corpus, or lacks passages that this one has.
        """
        names = store.names("bm25")
        if name is None and len(names) > 1:
            if DEFAULT not in names:
                raise InputError(f"{store.url} has several bm25: {', '.join(names)}; say which with bm25:NAME")
            name = DEFAULT
        name = store.only("bm25", name)
        generations = store.generations("bm25", name)
        check_lineage(generations, corpus)
        found = cls(name, generations)
        wanted = min(corpus.num_rows, generations[0].config["limit"] or corpus.num_rows)
        if found.num_rows < wanted:
            raise InputError(
                f"{store.url}/bm25/{name} covers {found.num_rows:,} of the corpus' {wanted:,} passages: run "
                f"jobs/build_bm25.py --name {name} again to add the new ones"
            )
        return found

    def searcher(self) -> LuceneSearch:
        """The shards, opened in this process; kept for the next call that asks for the same.

        Raises InputError where this Lucene is not the one that they were made with: its terms may be others.
        """
        check_versions(self.generations[0])
        files = []
        for artifact, part in self.shards:
            small = tuple((name, base64.b64decode(content)) for name, content in part.facts["small"].items())
            files.append((part.facts["bulk"], small, str(artifact.local(part))))
        return _searcher(tuple(files), self.k1, self.b, self.language)


@functools.lru_cache(maxsize=2)
def _searcher(
    files: tuple[tuple[str, tuple[tuple[str, bytes], ...], str], ...], k1: float, b: float, language: str
) -> LuceneSearch:
    shards = [(LuceneShard(bulk, dict(small)), Path(path)) for bulk, small, path in files]
    return LuceneSearch(shards, k1=k1, b=b, language=language)


def check_versions(of: Artifact | Draft) -> None:
    """Raises InputError where this process' Lucene is not the one that is pinned."""
    for package, version in versions().items():
        if of.config[package] != version:
            raise InputError(
                f"{of.url} was made with {package} {of.config[package]}, here is {version}: build another one "
                "(--name), or install that version of pyserini on every node"
            )


def check_lineage(generations: Sequence[Artifact], corpus: Corpus) -> None:
    """Raises InputError unless every generation was built from this corpus, both sides named."""
    made = {artifact.key: artifact.fingerprint for artifact in corpus.generations}
    for artifact in generations:
        for role, entry in artifact.inputs.items():
            if role != "previous" and made.get(entry["artifact"]) != entry["fingerprint"]:
                there = made.get(entry["artifact"])
                raise InputError(
                    f"{artifact.url} was built from {entry['artifact']} {entry['fingerprint'][:12]}, the corpus "
                    f"{f'is now {there[:12]}' if there else 'has no such generation'}: build another one (--name)"
                )


class Bm25Building:
    """bm25/NAME, or its next generation, begun: which shards are left to fill."""

    def __init__(
        self,
        store: Store,
        corpus: Corpus,
        name: str,
        *,
        k1: float = 0.9,
        b: float = 0.4,
        language: str = "en",
        shards: int | None = None,
        limit: int | None = None,
    ):
        """Raises InputError for values that BM25 does not take, and where others were pinned."""
        if not (0 <= k1 < float("inf") and 0 <= b <= 1):
            raise InputError(f"--k1 {k1} --b {b}: expected k1 >= 0 and 0 <= b <= 1")
        if shards is not None and shards < 1:
            raise InputError(f"--shards {shards}: expected at least 1")
        self.store, self.corpus = store, corpus
        self.name = name if limit is None else f"{name}-limit{limit}"
        self.language = language
        self.previous = store.generations("bm25", self.name)
        check_lineage(self.previous, corpus)
        config = {"k1": k1, "b": b, "language": language, "shards": shards, "limit": limit, "title": "space"}
        first = self.previous[0].config if self.previous else None
        if first and {**first, **config} != first:
            changed = ", ".join(f"{key} {first[key]}, now {config[key]}" for key in config if first[key] != config[key])
            raise InputError(
                f"{store.url}/bm25/{self.name} was built otherwise ({changed}): give the same options or another --name"
            )
        self.first_row = Bm25(self.name, self.previous).num_rows if self.previous else 0
        self.end = min(corpus.num_rows, limit or corpus.num_rows)
        rows = self.end - self.first_row
        self.num_shards = max(1, min(shards or -(-rows // SHARD_ROWS), rows))
        self._config = config
        self._draft: Draft | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return bool(self.previous) and self.first_row >= self.end

    def ranges(self) -> list[tuple[int, int, int]]:
        """(number, first row, end) of each shard to be."""
        bounds = np.linspace(self.first_row, self.end, self.num_shards + 1).astype(np.int64)
        return [(n, int(bounds[n]), int(bounds[n + 1])) for n in range(self.num_shards)]

    def fill(self) -> Iterator[tuple[bool, int]]:
        """Fill the shards that are left; yields (kept from an earlier run, passages) for each; then it is complete."""
        [(_, made)] = run_tasks(made_with, [self.language])
        before = {key: self.previous[0].config[key] for key in made} if self.previous else made
        if before != made:
            raise InputError(
                f"{self.store.url}/bm25/{self.name} was built with {before}, this is {made}, whose terms may differ: "
                "build another one (--name)"
            )
        inputs = {f"corpus/{n}": artifact for n, artifact in enumerate(self.corpus.generations)}
        if self.previous:
            inputs["previous"] = self.previous[-1]
        number = len(self.corpus.generations) - 1
        key = f"{self.name}/{generation(number)}"
        with self.store.create("bm25", key, inputs=inputs, config={**self._config, **made}) as draft:
            committed = draft.committed()
            todo = [entry for entry in self.ranges() if f"shard-{entry[0]:05d}" not in committed]
            yield True, sum(end - first for n, first, end in self.ranges() if f"shard-{n:05d}" in committed)
            for (_, first, end), _ in run_tasks(fill_shard, todo, draft, self.corpus.parts, self.language):
                yield False, end - first


def made_with(language: str) -> dict[str, str]:
    """One task: whether this Java works and knows the language, and whose terms it makes."""
    analyzer(language)
    return versions()


def fill_shard(shard: tuple[int, int, int], draft: Draft, parts: Sequence[RowPart], language: str) -> None:
    """One task: the passages of the rows [first, end) into their own shard. Raises InputError for another Lucene."""
    number, first, end = shard
    if draft.find(f"shard-{number:05d}"):  # by an earlier try whose end nobody heard of
        return
    check_versions(draft)
    with tempfile.TemporaryDirectory(prefix="riptide-lucene-") as folder:
        made = write_shard(contents(parts, first, end), Path(folder), language=language)
        small = {name: base64.b64encode(content).decode() for name, content in sorted(made.small.items())}
        draft.commit(
            f"shard-{number:05d}", ".cfs", lambda path: shutil.move(Path(folder) / made.bulk, path), rows=end - first,
            first_row=first, end=end, bulk=made.bulk, small=small,
        )  # fmt: skip


def contents(parts: Sequence[RowPart], first: int, end: int) -> Iterator[str]:
    """Title and text of the rows [first, end) in one string, as Anserini's flat collections have them."""
    for part in parts:
        if part.first_row < end and part.end > first:
            start = max(first, part.first_row)
            table = open_table(part).slice(start - part.first_row, min(end, part.end) - start)
            for batch in table.select(["title", "text"]).to_batches():
                for title, text in zip(batch["title"].to_pylist(), batch["text"].to_pylist(), strict=True):
                    yield f"{title} {text}" if title else text


def search_bm25(bm25: Bm25, queries: Sequence[str], k: int, deleted: np.ndarray) -> Hits:
    """The top k of some questions, less the `deleted` rows (int64, ascending), by tasks on the cluster."""
    cores = node_cores()
    pieces = max(1, min(num_slots(cores), len(queries) // LEAST_QUERIES))
    bounds = np.linspace(0, len(queries), pieces + 1).astype(int)
    ranges = [(int(a), int(b)) for a, b in itertools.pairwise(bounds)]
    found = dict(run_tasks(bm25_block, ranges, list(queries), bm25, k, deleted, cores, num_cpus=cores))
    return Hits(*(np.concatenate(column) for column in zip(*(found[piece] for piece in ranges), strict=True)))


def bm25_block(
    block: tuple[int, int], queries: Sequence[str], bm25: Bm25, k: int, deleted: np.ndarray, threads: int
) -> Hits:
    """One task of `search_bm25`. Deleted passages still count in the statistics: they keep their rows."""
    return search_alive(bm25.searcher(), queries[block[0] : block[1]], k, deleted, threads)


def search_alive(searcher: LuceneSearch, queries: Sequence[str], k: int, deleted: np.ndarray, threads: int) -> Hits:
    """The top k without the deleted rows: asked for a few more, and for twice as many where that was not enough."""
    if not len(deleted):
        return searcher.search(queries, k, threads=threads)
    depth = k + min(len(deleted), max(16, k // 8))
    return _deepened(searcher, queries, k, depth, lambda rows: ~np.isin(rows, deleted), threads)


def search_among(searcher: LuceneSearch, queries: Sequence[str], k: int, rows: np.ndarray, threads: int) -> Hits:
    """The top k among some rows, int64, ascending: asked for as many as should hold k of them, then twice as many."""
    if not len(rows):
        return nothing(len(queries), k)
    depth = int(min(searcher.num_documents, 1.5 * k * searcher.num_documents / max(1, len(rows)) + 16))
    return _deepened(searcher, queries, k, depth, lambda found: np.isin(found, rows), threads, most=len(rows))


def _deepened(
    searcher: LuceneSearch, queries: Sequence[str], k: int, depth: int, taken: Callable[[np.ndarray], np.ndarray],
    threads: int, most: int | None = None,
) -> Hits:  # fmt: skip
    """The top k of the rows that are taken (int64 -> bool), from a depth on that doubles until there are k. most: how
    many can be taken, where that is known."""
    wanted = k if most is None else min(k, most)
    scores, rows = nothing(len(queries), k)
    left = np.arange(len(queries))
    while len(left):
        found = searcher.search([queries[int(number)] for number in left], depth, threads=threads)
        alive = (found.rows >= 0) & taken(found.rows)
        order = np.argsort(~alive, axis=1, kind="stable")[:, :k]
        kept = np.take_along_axis(alive, order, axis=1)
        width = order.shape[1]
        rows[left, :width] = np.where(kept, np.take_along_axis(found.rows, order, axis=1), -1)
        scores[left, :width] = np.where(kept, np.take_along_axis(found.scores, order, axis=1), -np.inf)
        enough = (alive.sum(axis=1) >= wanted) | (found.rows[:, -1] < 0) | (depth >= searcher.num_documents)
        left, depth = left[~enough], min(2 * depth, searcher.num_documents)
    return Hits(scores, rows)
