"""Decides whether a passage contains an answer, as DPR does: its tokens in a row, regardless of case."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import regex

from riptide.base.errors import InputError
from riptide.base.unicode import normalize
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.measures.metadata_metric import MetadataMetric, cutoff_of
from riptide.indexing.measures.ranked_lists import ranked_hits
from riptide.indexing.queries.queries import Queries

_BLOCK = 512  # number of queries whose passages are in memory at once
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")  # DPR's SimpleTokenizer


class AnswerMatcher:
    """Finds answers in passages; caches the tokens of passages, which are hits of several queries."""

    def __init__(self) -> None:
        self._passages: dict[str, str] = {}

    def contains(self, passages: Sequence[str], answers: Sequence[str]) -> np.ndarray:
        """Returns whether each passage has the tokens of an answer in a row, bool [passages]; ignores empty answers."""
        answer_tokens = [tokens for tokens in map(joined_tokens, answers) if tokens != " "]
        is_match = np.zeros(len(passages), bool)
        for number, passage in enumerate(passages):
            tokens = self._passages.get(passage)
            if tokens is None:
                tokens = self._passages[passage] = joined_tokens(passage)
            for answer in answer_tokens:  # a loop, as any() with a generator takes longer than the search itself
                if answer in tokens:
                    is_match[number] = True
                    break
        return is_match


def joined_tokens(text: str) -> str:
    """Returns the lower-case tokens of a text, with a space before and after each, so that an answer is a substring."""
    tokens = _TOKEN.findall(normalize("NFD", text))
    # Lower-cased after the join: the space after a final Σ makes it ς, as in DPR, which lower-cases each token alone.
    return f" {' '.join(tokens)} ".lower() if tokens else " "


def answers_of(metadata: str) -> list[str]:
    """Returns the answers in the metadata of a query (JSON text): its `answers`, a list, or its `answer`."""
    if not metadata:
        return []
    fields = json.loads(metadata)
    values = fields.get("answers", fields.get("answer", [])) if isinstance(fields, dict) else []
    return [str(answer) for answer in (values if isinstance(values, list) else [values]) if answer is not None]


def answer_ranks(run: pa.Table, answers: Mapping[str, Sequence[str]], corpus: Corpus, depth: int) -> dict[str, int]:
    """Returns for each query the rank of its first hit that contains one of its answers (DPR).

    Args:
        run: Columns query_id, id, score; see `ranked_hits`.
        answers: The answers of each query.
        corpus: The corpus. A hit that it lacks counts as one without an answer.
        depth: Number of hits per query.

    Returns:
        Ranks from 1, by query; 0 if none of the hits contains an answer.
    """
    ranked = ranked_hits(run, answers, depth)
    ranks = dict.fromkeys(answers, 0)
    matcher = AnswerMatcher()
    queries = list(answers)
    for start in range(0, len(queries), _BLOCK):
        block = queries[start : start + _BLOCK]
        ids = sorted({id for query in block for id in ranked[query]})
        rows = corpus.rows_of(ids)
        known = np.flatnonzero(rows >= 0)
        order = known[np.argsort(rows[known])]
        passages = corpus.passages(rows[order])
        texts = {ids[place]: passage.text for place, passage in zip(order.tolist(), passages, strict=True)}
        for query in block:
            for rank, id in enumerate(ranked[query], 1):
                if id in texts and matcher.contains([texts[id]], answers[query])[0]:
                    ranks[query] = rank
                    break
    return ranks


class AnswerMetric(MetadataMetric):
    """A metric of the rank of the first hit that contains an answer.

    Args:
        form: How it is written, such as Answer@K.
        summary: What it measures, for --help.
        value: Returns the values, float64 [queries], of ranks, int64 [queries]. Rank 0: no hit up to the cutoff has an
            answer.
    """

    metadata_name = "answers"

    def __init__(self, form: str, summary: str, value: Callable[[np.ndarray], np.ndarray]):
        self.form, self.summary, self._value = form, summary, value

    def read(self, queries: Queries, ids: Sequence[str]) -> dict[str, list[str]]:
        """Returns the answers of each query by id. Raises InputError if no query has answers."""
        metadata = dict(zip(*(queries.table[column].to_pylist() for column in ("id", "metadata")), strict=True))
        answers = {id: answers_of(metadata[id]) for id in ids}
        if not any(answers.values()):
            raise InputError(
                f'no query of {queries.artifact.key} has answers: they are its metadata, {{"answers": ["a", "b"]}}'
            )
        return answers

    def values(
        self, run: pa.Table, metadata: Mapping[str, Sequence[str]], corpus: Corpus, names: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Returns the values of each query; see MetadataMetric."""
        ranks = answer_ranks(run, metadata, corpus, max(map(cutoff_of, names)))
        first = np.array([ranks[id] for id in metadata])
        return {name: self._value(np.where(first <= cutoff_of(name), first, 0)) for name in names}


ANSWER_ACCURACY = AnswerMetric(
    "Answer@K",
    "whether one of the first K hits contains an answer of the query (DPR's top-K accuracy)",
    lambda ranks: (ranks > 0).astype(float),
)
ANSWER_RANK = AnswerMetric(
    "AnswerRR@K",
    "1 divided by the rank of the first hit that contains an answer of the query, 0 beyond K",
    lambda ranks: np.divide(1.0, ranks, out=np.zeros(len(ranks)), where=ranks > 0),
)
