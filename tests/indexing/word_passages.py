"""Passages of plain words, and BM25 over them in pure Python, to compare Lucene's hits with."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from riptide.indexing.exact import Hits

Best = list[tuple[int, float]]  # (row, score) of the hits of a query, in order


def word_passages(count: int, *, vocabulary: int = 60, seed: int = 0, longest: int = 120) -> list[str]:
    """Returns passages of words w0, w1, ..., of which the first are common; every ninth passage is empty."""
    draw = random.Random(seed)
    return [
        " ".join(f"w{int(vocabulary * draw.random() ** 2)}" for _ in range(draw.randint(1, longest))) if n % 9 else ""
        for n in range(count)
    ]


def expected_hits(passages: Sequence[str], query: str, *, k1: float, b: float) -> Best:
    """Returns all passages with a BM25 score above 0, by score, then row.

    Args:
        passages: Texts of words that no analyzer changes.
        query: Words, each of which counts as often as it occurs.
        k1: Term-frequency saturation.
        b: Length normalisation.
    """
    counts = [Counter(passage.split()) for passage in passages]
    lengths = [sum(count.values()) for count in counts]
    num_texts = sum(length > 0 for length in lengths)  # Lucene's statistics exclude passages without a word
    mean = sum(lengths) / max(1, num_texts)
    scores: dict[int, float] = {}
    for word, times in Counter(query.split()).items():
        rows = [row for row, count in enumerate(counts) if word in count]
        idf = math.log(1 + (num_texts - len(rows) + 0.5) / (len(rows) + 0.5))
        for row in rows:
            tf = counts[row][word]
            length = stored_length(lengths[row])
            scores[row] = scores.get(row, 0) + times * idf * tf / (tf + k1 * (1 - b + b * length / mean))
    return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))


def stored_length(length: int) -> int:
    """Returns a length as Lucene stores it in a byte: exact below 24, above it 24 and four significant bits."""
    if length < 24:
        return length
    dropped = max(0, (length - 24).bit_length() - 4)
    return 24 + ((length - 24) >> dropped << dropped)


def pairs(hits: Hits, query: int = 0) -> Best:
    """Returns the hits of a query without the padding, which must be at the end and -inf."""
    count = int((hits.rows[query] >= 0).sum())
    assert (hits.rows[query, count:] == -1).all()
    assert (hits.scores[query, count:] == -np.inf).all()
    return list(zip(hits.rows[query, :count].tolist(), hits.scores[query, :count].tolist(), strict=True))


def assert_same_hits(actual: Best, expected: Best, rel: float = 1e-4) -> None:
    """Asserts equal scores at each rank, and equal rows except where scores are equal in float32."""
    assert [score for _, score in actual] == pytest.approx([score for _, score in expected], rel=rel)
    scores = dict(expected)
    for (row, score), (expected_row, _) in zip(actual, expected, strict=True):
        assert row == expected_row or score == pytest.approx(scores[row], rel=1e-5)
