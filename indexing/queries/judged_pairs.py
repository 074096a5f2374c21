"""Reads the relevant passages of each query of a split from its judgements.

In a corpus of split documents, judgements name documents. The relevant passages of a judged document are then those
that the judgement names by their rows, as an import by provenance does, or else the one that fits the query best by
BM25.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import regex

from riptide.base.errors import InputError
from riptide.base.unicode import UNSPACED
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.queries.queries import ALL, Queries

K1, B = 0.9, 0.4  # the defaults of `build_bm25`
SAMPLE = 10_000  # evenly spaced passages from which document frequencies are estimated
_WORD = regex.compile(rf"(?V1)[{UNSPACED}]|[\w--[{UNSPACED}]]+")


@dataclass(frozen=True)
class JudgedPairs:
    """Queries with their relevant passages: passages of the corpus with a judgement above 0.

    Attributes:
        ids: Ids of the queries that have a relevant passage, in the order of the split.
        texts: Their texts.
        rows: Corpus rows of each query's relevant passages, int64 [any], in the order of the judgements.
        scores: The scores of these judgements, int64 [any].
        others: Rows of the other passages of the same documents, int64 [any]: none unless the corpus is split.
        num_queries: Number of queries of the split within the limit, those without a relevant passage included.
    """

    ids: list[str]
    texts: list[str]
    rows: list[np.ndarray]
    scores: list[np.ndarray]
    others: list[np.ndarray]
    num_queries: int


class _Judgement(NamedTuple):
    """The score of a judged document, and the rows of its relevant passages."""

    score: int
    rows: list[int]


def read_judged_pairs(corpus: Corpus, queries: Queries, split: str, limit: int | None = None) -> JudgedPairs:
    """Reads the queries of a split that have a relevant passage in the corpus, with these passages.

    Args:
        corpus: The corpus. Deleted passages, and those of later generations, are excluded.
        queries: The query set.
        split: A split with judgements.
        limit: Use only the first N queries of the split; None: all.

    Raises:
        InputError: If the query set has no such split.
    """
    judgements = queries.qrels(split)
    selected = queries.select(judgements, limit)
    named = (queries.judged_rows(split) if corpus.is_split else None) or [[]] * len(judgements)
    judgements = judgements.append_column("rows", pa.array(named, pa.list_(pa.int64())))
    qrels = judgements.filter(pc.field("score") > 0)
    ids = pc.cast(pa.array(selected.ids, pa.string()), qrels["query_id"].type)
    qrels = qrels.filter(pc.is_in(qrels["query_id"], ids))
    documents = qrels["corpus_id"].combine_chunks().dictionary_encode()
    firsts, ends = (
        each[documents.indices.to_numpy()] for each in corpus.rows_of_documents(documents.dictionary.to_pylist())
    )
    relevant: dict[str, dict[tuple[int, int], _Judgement]] = {}  # a dict, because a pair may be judged twice
    columns = (qrels[name].to_pylist() for name in ("query_id", "score", "rows"))
    for query, score, rows, first, end in zip(*columns, firsts.tolist(), ends.tolist(), strict=True):
        if first >= 0:
            relevant.setdefault(query, {})[first, end] = _Judgement(score, [row for row in rows if first <= row < end])
    chosen = [(id, text) for id, text in zip(*selected, strict=True) if id in relevant]
    if corpus.is_split:
        _choose_passages(corpus, chosen, relevant)
    pairs = [
        [(row, judgement.score) for range, judgement in relevant[id].items() for row in judgement.rows or range[:1]]
        for id, _ in chosen
    ]
    rows_of_queries = [np.array([row for row, _ in own], np.int64) for own in pairs]
    others = [np.empty(0, np.int64)] * len(chosen)
    if corpus.is_split:
        every = [np.concatenate([np.arange(*rows) for rows in relevant[id]]) for id, _ in chosen]
        others = [np.setdiff1d(rows, own) for rows, own in zip(every, rows_of_queries, strict=True)]
    return JudgedPairs(
        [id for id, _ in chosen],
        [text for _, text in chosen],
        rows_of_queries,
        [np.array([score for _, score in own], np.int64) for own in pairs],
        others,
        len(selected.ids),
    )


def _choose_passages(
    corpus: Corpus, queries: Sequence[tuple[str, str]], relevant: Mapping[str, Mapping[tuple[int, int], _Judgement]]
) -> None:
    """Chooses the passage of each judged document whose judgement names no rows."""
    pending = [
        (text, rows, judgement)
        for id, text in queries
        for rows, judgement in relevant[id].items()
        if not judgement.rows
    ]
    if not pending:
        return
    documents = np.array([rows for _, rows, _ in pending], np.int64)
    chosen = choose_passages(corpus, [text for text, _, _ in pending], documents)
    for (_, _, judgement), row in zip(pending, chosen.tolist(), strict=True):
        judgement.rows.append(row)


def choose_passages(corpus: Corpus, queries: Sequence[str], documents: np.ndarray) -> np.ndarray:
    """Returns the passage of each document with the highest BM25 score for its query; needs no index.

    The frequencies of words are those in SAMPLE passages of the corpus. Equal scores: the first passage.

    Args:
        corpus: The corpus.
        queries: Texts of the queries.
        documents: First row and end of the document of each query, int64 [n, 2].

    Returns:
        Rows, int64 [n].
    """
    sample = np.linspace(0, corpus.num_rows - 1, min(SAMPLE, corpus.num_rows)).astype(np.int64)
    counts = [_word_counts(passage.text) for passage in corpus.passages(sample)]
    frequencies = Counter(word for each in counts for word in each)
    mean_length = sum(each.total() for each in counts) / len(counts)
    rows = documents[:, 0].copy()
    order = np.argsort(documents[:, 0], kind="stable")
    for numbers in np.split(order, np.flatnonzero(np.diff(documents[order, 0])) + 1) if len(order) else []:
        first, end = documents[numbers[0]]
        counts = [_word_counts(passage.text) for passage in corpus.passages(np.arange(first, end))]
        norms = [K1 * (1 - B + B * each.total() / mean_length) for each in counts]
        for number in numbers:
            scores = np.zeros(len(counts))
            for word in _word_counts(queries[number]):
                weight = math.log((len(sample) + 1) / (frequencies[word] + 0.5))
                scores += [weight * each[word] / (each[word] + norm) for each, norm in zip(counts, norms, strict=True)]
            rows[number] = first + int(scores.argmax())
    return rows


def _word_counts(text: str) -> Counter[str]:
    return Counter(_WORD.findall(text.casefold()))


def positive_weights(
    corpus: Corpus, queries: Queries, split: str, query_ids: Sequence[str], rows: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns judgement scores as sampling weights of positives: float64 [any] per query, parallel to `rows`.

    Args:
        corpus: The corpus.
        queries: The query set.
        split: The split of the judgements; "all": those of every split.
        query_ids: Ids of the queries.
        rows: Corpus rows of each query's positives.

    Raises:
        InputError: If a positive has no judgement above 0.
    """
    scores: dict[str, dict[str, int]] = {}
    for name in queries.splits if split == ALL else [split]:
        qrels = queries.qrels(name)
        values = (qrels[column].to_pylist() for column in ("query_id", "corpus_id", "score"))
        for query, document, score in zip(*values, strict=True):
            if score > 0:
                scores.setdefault(query, {})[document] = score
    documents = corpus.documents(np.concatenate([*rows, np.empty(0, np.int64)])).tolist()
    weights, start = [], 0
    for id, own in zip(query_ids, rows, strict=True):
        known, names = scores.get(id, {}), documents[start : start + len(own)]
        start += len(own)
        if missing := [name for name in names if name not in known]:
            raise InputError(
                f"{queries.artifact.key} {split}: passage {missing[0]!r} is a positive of the query {id!r} without a "
                "judgement above 0, so it has no weight; mine the negatives again, or draw positives without weights"
            )
        weights.append(np.array([known[name] for name in names], np.float64))
    return weights
