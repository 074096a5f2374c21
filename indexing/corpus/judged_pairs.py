"""Reads the relevant passages of each query of a split from its judgements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from indexing.corpus.corpus import Corpus
from indexing.corpus.queries import ALL, Queries
from retriever.errors import InputError


@dataclass(frozen=True)
class JudgedPairs:
    """Queries with their relevant passages: those with a judgement above 0 that the corpus has.

    Attributes:
        ids: Ids of the queries that have a relevant passage, in the order of the split.
        texts: Their texts.
        rows: Corpus rows of each query's relevant passages, int64 [any], in the order of the judgements.
        scores: The scores of these judgements, int64 [any].
        num_queries: Number of queries of the split within the limit, those without a relevant passage included.
    """

    ids: list[str]
    texts: list[str]
    rows: list[np.ndarray]
    scores: list[np.ndarray]
    num_queries: int


def judged_pairs(corpus: Corpus, queries: Queries, split: str, limit: int | None = None) -> JudgedPairs:
    """Returns the queries of a split that have a relevant passage in the corpus.

    Args:
        corpus: The corpus. Deleted passages, and those of later generations, are excluded.
        queries: The query set.
        split: A split with judgements.
        limit: Use only the first N queries of the split; None: all.

    Raises:
        InputError: If the query set has no such split.
    """
    selected = queries.split(split, limit)
    qrels = queries.qrels(split).filter(pc.field("score") > 0)
    ids = pc.cast(pa.array(selected.ids, pa.string()), qrels["query_id"].type)
    qrels = qrels.filter(pc.is_in(qrels["query_id"], ids))
    passages = qrels["corpus_id"].combine_chunks().dictionary_encode()
    rows = corpus.rows_of(passages.dictionary.to_pylist())[passages.indices.to_numpy()]
    relevant: dict[str, dict[int, int]] = {}  # a pair may be judged twice
    for query, row, score in zip(qrels["query_id"].to_pylist(), rows.tolist(), qrels["score"].to_pylist(), strict=True):
        if row >= 0:
            relevant.setdefault(query, {})[row] = score
    chosen = [(id, text) for id, text in zip(*selected, strict=True) if id in relevant]
    return JudgedPairs(
        [id for id, _ in chosen],
        [text for _, text in chosen],
        [np.array([*relevant[id]], np.int64) for id, _ in chosen],
        [np.array([*relevant[id].values()], np.int64) for id, _ in chosen],
        len(selected.ids),
    )


def positive_weights(
    corpus: Corpus, queries: Queries, split: str, query_ids: Sequence[str], rows: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns the scores of judgements as sampling weights of positives: float64 [any] per query, as `rows`.

    Args:
        corpus: The corpus.
        queries: The query set.
        split: The split of the judgements; "all": those of every split.
        query_ids: Ids of the queries.
        rows: Corpus rows of each query's positives.

    Raises:
        InputError: If a positive has no judgement above 0.
    """
    scores: dict[str, dict[int, int]] = {}
    for name in queries.splits if split == ALL else [split]:
        pairs = judged_pairs(corpus, queries, name)
        for id, own, values in zip(pairs.ids, pairs.rows, pairs.scores, strict=True):
            scores.setdefault(id, {}).update(zip(own.tolist(), values.tolist(), strict=True))
    weights = []
    for id, own in zip(query_ids, rows, strict=True):
        known = scores.get(id, {})
        if missing := [row for row in own.tolist() if row not in known]:
            raise InputError(
                f"{queries.artifact.key} {split}: passage {corpus.passages(missing[:1])[0].id!r} is a positive of the "
                f"query {id!r} without a judgement above 0, so it has no weight; mine the negatives again, or draw "
                "positives without weights"
            )
        weights.append(np.array([known[row] for row in own.tolist()], np.float64))
    return weights
