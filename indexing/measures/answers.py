"""Decides whether a passage contains an answer, as DPR does: the same tokens in a row, regardless of case."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import regex

from riptide.base.unicode import normalize
from riptide.indexing.measures.hits import ranked_hits

if TYPE_CHECKING:
    from riptide.indexing.corpus.corpus import Corpus

_BLOCK = 512  # queries whose passages are in memory at once
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")  # DPR's SimpleTokenizer


class AnswerMatcher:
    """Looks for answers in passages; keeps the tokens of the passages, as the same ones come again."""

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
            for answer in answer_tokens:  # not any(): a generator takes longer than the search itself
                if answer in tokens:
                    is_match[number] = True
                    break
        return is_match


def joined_tokens(text: str) -> str:
    """Returns the lower-case tokens of a text, with a space before and after each, so that an answer is a substring."""
    tokens = _TOKEN.findall(normalize("NFD", text))
    # Each token is lower-cased alone, as in DPR: the lower case of a Greek Σ depends on the character after it.
    return f" {' '.join(tokens)} ".lower() if tokens else " "


def answers_of(metadata: str) -> list[str]:
    """Returns the answers in the metadata of a query (JSON text): its `answers`, a list, or its `answer`."""
    if not metadata:
        return []
    fields = json.loads(metadata)
    values = fields.get("answers", fields.get("answer", [])) if isinstance(fields, dict) else []
    return [str(answer) for answer in (values if isinstance(values, list) else [values]) if answer is not None]


def answer_ranks(run: pa.Table, answers: Mapping[str, Sequence[str]], corpus: Corpus, depth: int) -> dict[str, int]:
    """Returns the rank of the first hit of each query that contains one of its answers (DPR).

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
