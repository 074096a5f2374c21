"""Opens dev splits, on which training measures quality: a pool of passages to search, or lists to re-rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.categories import categories_of_rows
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.lucene.bm25_index import Bm25, search_bm25
from riptide.indexing.queries.judged_pairs import JudgedPairs, read_judged_pairs
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.sealed_json import ArtifactReference
from riptide.indexing.store.store import Store
from riptide.indexing.training.process_cache import ProcessCache
from riptide.indexing.work.worker_tasks import Runner
from riptide.retriever.training.dev import DevLists, DevSet, read_blocks
from riptide.retriever.training.training_data import TrainingData

Compose = Callable[[Sequence[str], Sequence[str]], list[str]]  # (n titles, n texts) -> n passage texts for the encoder
Vectors = Callable[[np.ndarray], np.ndarray]  # corpus rows int64 [n] -> float16 or float32 [n, dim]


@dataclass(frozen=True)
class DevSplit:
    """The specification of a dev split: names and sizes.

    Attributes:
        queries: Name of the query set.
        split: Its split that measures quality.
        limit: Use only the first N queries; None: all.
        passages: Number of passages in which each query is searched, or that are re-ranked for each query.
    """

    queries: str
    split: str
    limit: int | None
    passages: int


def open_dev_pairs(corpus: Corpus, queries: Queries, split: str, limit: int | None, cache: ProcessCache) -> JudgedPairs:
    """Opens the queries of a dev split with their relevant passages, or returns them from the cache.

    Args:
        corpus: The corpus.
        queries: The query set.
        split: The split.
        limit: Use only its first N queries; None: all.
        cache: The cache of the job.

    Raises:
        InputError: If no query has a relevant passage in the corpus.
    """
    key = ("dev pairs", corpus.generations[-1].url, queries.artifact.url, queries.artifact.fingerprint, split, limit)
    pairs = cache.get(key, lambda: read_judged_pairs(corpus, queries, split, limit))
    if not pairs.ids:
        raise InputError(
            f"{queries.artifact.url}: no query of the dev split {split!r} has an answer in the corpus; name another "
            "split, or import the passages"
        )
    return pairs


@dataclass(frozen=True)
class DevHits:
    """The hits of BM25 for the queries of a dev split, which are part of the pool. They are searched before training.

    Attributes:
        bm25: The index.
        deleted: The deleted rows of its corpus, int64, ascending.
        num_rows: The number of rows of the corpus of the training, which may be an earlier state of that corpus.
        queries: The texts of the queries.
        depth: Hits per query.
        store: URL of the store of the index; "": the store of the run.
    """

    bm25: Bm25
    deleted: np.ndarray
    num_rows: int
    queries: Sequence[str]
    depth: int
    store: str = ""

    @classmethod
    def open(cls, store: Store, corpus: Corpus, pairs: JudgedPairs, depth: int, *, url: str = "") -> DevHits:
        """Opens the BM25 index that the source `bm25` searches.

        Args:
            store: The store of the run.
            corpus: The corpus of the training.
            pairs: The queries of the dev split.
            depth: Hits per query.
            url: The store of the index; "": that of the run.

        Raises:
            InputError: If that store has no index of its corpus.
        """
        of_index = Store(url) if url else store
        latest = Corpus.open(of_index)
        try:
            bm25 = Bm25.open(of_index, None, latest)
        except InputError as error:
            raise InputError(f"{Parameter('dev_passages', f'hard:{depth}')}: {error}") from None
        return cls(bm25, latest.deleted, corpus.num_rows, pairs.texts, depth, url)

    def inputs(self, number: int = 1) -> dict[str, Artifact | ArtifactReference]:
        """Returns the generations of the index as inputs by role. number: that of the dev split, from 1."""
        role = "dev_bm25" if number == 1 else f"dev_bm25:{number}"
        return {
            f"{role}/{place}": ArtifactReference(each.url, each.fingerprint) if self.store else each
            for place, each in enumerate(self.bm25.generations)
        }

    def search(self, runner: Runner) -> np.ndarray:
        """Returns the rows of the hits of all queries, int64, ascending and distinct. runner: what searches."""
        rows = np.unique(search_bm25(self.bm25, self.queries, self.depth, self.deleted, runner).rows)
        return rows[(rows >= 0) & (rows < self.num_rows)].astype(np.int64)


def open_dev_set(
    corpus: Corpus,
    pairs: JudgedPairs,
    passages: int,
    compose: Compose,
    *,
    hits: np.ndarray | None = None,
    vectors: Vectors | None = None,
    categories_field: str | None = None,
    prompt_numbers: np.ndarray | None = None,
) -> DevSet:
    """Draws a pool of passages to search for a dev split, which is the same on every worker, and reads them.

    If the corpus is split, all passages of the judged documents are among them, and documents are ranked.

    Args:
        corpus: The corpus.
        pairs: The queries of the split; see `open_dev_pairs`.
        passages: Number of passages: the relevant ones, and random others.
        compose: Joins titles and texts, as the system does.
        hits: Rows of further passages, such as hits of BM25, int64 [any]; None: none.
        vectors: Reads the vectors of passages, which the system then does not encode; None: it encodes them.
        categories_field: Passages that share a category of this metadata field with a judged passage of a query are
            relevant too; None: the judged ones alone are.
        prompt_numbers: Which of several prompts each passage of the corpus has, int64 [rows]; None: there is one.

    Raises:
        InputError: If categories are needed and one of these passages has none.
    """
    relevant = [np.concatenate(rows) for rows in zip(pairs.rows, pairs.others, strict=True)]
    needed = np.unique(np.concatenate(relevant))
    others = np.setdiff1d(np.arange(corpus.num_rows), np.concatenate([needed, corpus.deleted]))
    count = max(0, min(passages - len(needed), len(others)))
    sample = np.random.default_rng(0).choice(others, count, replace=False)
    added = np.empty(0, np.int64) if hits is None else np.setdiff1d(hits, corpus.deleted)
    pool = np.unique(np.concatenate([needed, sample, added])).astype(np.int64)
    positives = [np.searchsorted(pool, np.sort(rows)) for rows in relevant]
    if categories_field is not None:
        members = categories_of_rows(corpus, categories_field, pool).multi_hot(pool)
        positives = [np.flatnonzero(members[:, members[own].any(axis=0)].any(axis=1)) for own in positives]
    documents = None
    if corpus.is_split:
        names = corpus.documents(pool)
        documents = np.flatnonzero(np.append(True, names[1:] != names[:-1]))
        positives = [np.unique(np.searchsorted(documents, own, side="right") - 1) for own in positives]
    if vectors is not None:
        dim = vectors(pool[:1]).shape[1]
        return DevSet(pairs.texts, positives, [], read_blocks(vectors, pool, dim), documents=documents)
    in_pool = corpus.passages(pool)
    composed = compose([passage.title for passage in in_pool], [passage.text for passage in in_pool])
    prompt_numbers = None if prompt_numbers is None else prompt_numbers[pool]
    return DevSet(pairs.texts, positives, composed, prompt_numbers=prompt_numbers, documents=documents)


def queries_with_negatives(data: TrainingData, split: str) -> list[int]:
    """Returns the numbers of the queries with negatives, which `open_dev_lists` uses.

    Raises:
        InputError: If there are none.
    """
    numbers = [number for number, negatives in enumerate(data.negatives) if len(negatives)]
    if not numbers:
        raise InputError(
            f"{Parameter('dev_split', split)}: none of its {len(data.queries):,} queries has negatives, so nothing can "
            f"be re-ranked; mine more of them, or name others with {Parameter('dev_negatives')}"
        )
    return numbers


def open_dev_lists(data: TrainingData, split: str, passages: int, compose: Compose) -> DevLists:
    """Opens a dev split as lists to re-rank: each query's positives and first negatives, the same on every worker.

    Args:
        data: The queries of the split with their positives and mined negatives. Queries without negatives are left out.
        split: The name of the split.
        passages: Maximum number of passages per query; there is at least one negative.
        compose: Joins titles and texts, as the system does.

    Raises:
        InputError: If no query has negatives.
    """
    numbers = queries_with_negatives(data, split)
    rows = [
        np.concatenate([own, data.negatives[number][: max(1, passages - len(own))]])
        for number in numbers
        for own in [data.positives[number]]
    ]
    distinct, places = np.unique(np.concatenate(rows), return_inverse=True)
    texts = compose(*data.passages(distinct))
    ends = np.cumsum([len(each) for each in rows])
    return DevLists(
        [data.queries[number] for number in numbers],
        [np.arange(len(data.positives[number])) for number in numbers],
        [[texts[place] for place in piece] for piece in np.split(places, ends[:-1])],
    )
