"""Whether a passage contains an answer, as DPR decides it: the same tokens in a row, whatever their case."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import regex

from indexing.measures.hits import ranked_hits
from retriever.unicode import normalize

if TYPE_CHECKING:
    from indexing.corpus.corpus import Corpus

_BLOCK = 512  # questions whose passages are held at once
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")  # DPR's SimpleTokenizer


class AnswerMatcher:
    """Looks for answers in passages, and remembers the passages' tokens: for passages that come again and again."""

    def __init__(self) -> None:
        self._passages: dict[str, str] = {}

    def contains(self, passages: Sequence[str], answers: Sequence[str]) -> np.ndarray:
        """Whether each passage has the tokens of some answer in a row: bool [passages]. An empty answer is nowhere."""
        wanted = [tokens for tokens in map(joined_tokens, answers) if tokens != " "]
        found = np.zeros(len(passages), bool)
        for number, passage in enumerate(passages):
            tokens = self._passages.get(passage)
            if tokens is None:
                tokens = self._passages[passage] = joined_tokens(passage)
            for answer in wanted:  # not any(): a generator takes longer than the search itself
                if answer in tokens:
                    found[number] = True
                    break
        return found


def joined_tokens(text: str) -> str:
    """Lower-case tokens of a text with a space before and after each, so that a row of them is a substring."""
    tokens = _TOKEN.findall(normalize("NFD", text))
    # Lower-cased as single tokens, as DPR does: what follows a Greek Σ in the text decides its small letter.
    return f" {' '.join(tokens)} ".lower() if tokens else " "


def answers_of(metadata: str) -> list[str]:
    """The answers in a question's metadata, JSON text: its `answers` (a list) or `answer`; none where it has none."""
    if not metadata:
        return []
    fields = json.loads(metadata)
    given = fields.get("answers", fields.get("answer", [])) if isinstance(fields, dict) else []
    return [str(answer) for answer in (given if isinstance(given, list) else [given]) if answer is not None]


def answer_ranks(run: pa.Table, answers: Mapping[str, Sequence[str]], corpus: Corpus, depth: int) -> dict[str, int]:
    """The rank, from 1, of each question's first hit that contains one of its answers (DPR); 0: none of `depth` does.

    run: query_id, id, score, ranked by score as ir-measures does, equal ones by id. A hit that the corpus does not
    have counts as one without an answer.
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
