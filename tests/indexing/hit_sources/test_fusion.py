"""Fusion of several sources' hits, compared with sums in dictionaries, one passage at a time."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest

from riptide.base.errors import InputError
from riptide.indexing.exact import Hits
from riptide.indexing.hit_sources.fusion import reciprocal_rank, weighted

Normalize = Literal["minmax", "zscore", "none"]


def hits(*questions: dict[int, float], width: int | None = None) -> Hits:
    """Each question's {row: score}, in the order of the score, padded."""
    width = max((len(found) for found in questions), default=0) if width is None else width
    scores = np.full((len(questions), width), -np.inf, np.float32)
    rows = np.full((len(questions), width), -1, np.int64)
    for number, found in enumerate(questions):
        for rank, (row, score) in enumerate(sorted(found.items(), key=lambda item: (-item[1], item[0]))):
            scores[number, rank], rows[number, rank] = score, row
    return Hits(scores, rows)


def random_hits(draw: np.random.Generator, questions: int, width: int, passages: int, integers: bool) -> Hits:
    """Some lists empty, some full; scores negative too, with `integers` many of them equal."""
    found = []
    for _ in range(questions):
        rows = draw.choice(passages, draw.integers(0, width + 1), replace=False)
        scores = draw.integers(-3, 4, len(rows)) if integers else draw.normal(size=len(rows)).astype(np.float32) * 10
        found.append(dict(zip(rows.tolist(), scores.tolist(), strict=True)))
    return hits(*found, width=width)


def as_list(found: Hits, question: int) -> list[tuple[int, float]]:
    return [
        (row, score)
        for row, score in zip(*(array[question].tolist() for array in found[::-1]), strict=True)
        if row >= 0
    ]


def ranked(sums: dict[int, float], k: int) -> list[tuple[int, float]]:
    return sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:k]


def brute_reciprocal(
    found: list[Hits], question: int, k: int, constant: float, weights: list[float]
) -> list[tuple[int, float]]:
    sums: dict[int, float] = {}
    for source, weight in zip(found, weights, strict=True):
        for rank, (row, _) in enumerate(as_list(source, question), 1):
            sums[row] = sums.get(row, 0.0) + weight / (constant + rank)
    return ranked(sums, k)


def brute_weighted(
    found: list[Hits], question: int, k: int, weights: list[float], normalize: Normalize
) -> list[tuple[int, float]]:
    normal = []
    for source in found:
        scores = dict(as_list(source, question))
        values = list(scores.values())
        if values and normalize == "minmax":
            low, high = min(values), max(values)
            scores = {row: (s - low) / (high - low) if high > low else 1.0 for row, s in scores.items()}
        elif values and normalize == "zscore":
            mean = sum(values) / len(values)
            spread = math.sqrt(sum((s - mean) ** 2 for s in values) / len(values))
            scores = {row: (s - mean) / spread if spread else 0.0 for row, s in scores.items()}
        floor = min(scores.values(), default=0.0) if normalize != "minmax" else 0.0
        normal.append((scores, floor))
    rows = {row for scores, _ in normal for row in scores}
    return ranked(
        {
            row: sum(weight * scores.get(row, floor) for weight, (scores, floor) in zip(weights, normal, strict=True))
            for row in rows
        },
        k,
    )


def check_shape(found: Hits, questions: int, k: int) -> None:
    assert found.rows.shape == found.scores.shape == (questions, k)
    assert (found.rows.dtype, found.scores.dtype) == (np.int64, np.float32)
    missing = found.rows < 0
    assert (found.rows[missing] == -1).all()
    assert (found.scores[missing] == -np.inf).all()
    assert (missing[:, 1:] >= missing[:, :-1]).all(), "padding comes last"
    with np.errstate(invalid="ignore"):
        assert not (np.diff(found.scores, axis=1) > 0).any(), "scores fall"


@pytest.mark.parametrize("k", [1, 7, 100])  # 100: more than there is
def test_reciprocal_rank_is_the_sum_over_lists(k: int) -> None:
    draw = np.random.default_rng(k)
    for sources in (1, 2, 4):
        found = [random_hits(draw, 20, width, 25, False) for width in draw.integers(1, 20, sources)]
        for constant, weights in ((60.0, None), (1.0, [0.5] * sources), (60.0, draw.random(sources).tolist())):
            got = reciprocal_rank(found, k, constant=constant, weights=weights)
            check_shape(got, 20, k)
            for question in range(20):
                expected = brute_reciprocal(found, question, k, constant, weights or [1.0] * sources)
                assert as_list(got, question) == [(row, float(np.float32(score))) for row, score in expected]


@pytest.mark.parametrize("normalize", ["minmax", "zscore", "none"])
@pytest.mark.parametrize("k", [1, 7, 100])
def test_weighted_is_the_sum_over_lists(normalize: Normalize, k: int) -> None:
    draw = np.random.default_rng(k)
    for sources in (1, 2, 4):
        for integers in (False, True):
            found = [random_hits(draw, 20, width, 25, integers) for width in draw.integers(1, 20, sources)]
            weights = draw.random(sources).tolist()
            got = weighted(found, k, weights, normalize=normalize)
            check_shape(got, 20, k)
            for question in range(20):
                everything = dict(brute_weighted(found, question, 1000, weights, normalize))
                expected = ranked(everything, k)
                mine = as_list(got, question)
                assert [score for _, score in mine] == pytest.approx([s for _, s in expected], rel=1e-6, abs=1e-6)
                # Sums that agree to 1e-9 may come in either order: floats do not add up the same in any grouping.
                for (row, _), (_, score) in zip(mine, expected, strict=True):
                    assert everything[row] == pytest.approx(score, abs=1e-9)
                assert len({row for row, _ in mine}) == len(mine)


def test_ties_go_to_the_smaller_row() -> None:
    first, second = hits({9: 2.0, 4: 1.0}), hits({4: 2.0, 9: 1.0})
    for got in (
        reciprocal_rank([first, second], 3),
        weighted([first, second], 3, [1, 1]),
        weighted([first, second], 3, [0.5, 0.5], normalize="none"),
        weighted([first, second], 3, [1, 1], normalize="zscore"),
    ):
        assert got.rows.tolist() == [[4, 9, -1]]
        assert got.scores[0, 0] == got.scores[0, 1]


def test_a_passage_that_one_source_missed_has_its_smallest_score_there() -> None:
    first, second = hits({1: -2.0, 2: -6.0}), hits({3: 100.0, 1: 20.0})
    got = weighted([first, second], 5, [1.0, 0.5], normalize="none")
    assert as_list(got, 0) == [(3, -6 + 50), (1, -2 + 10), (2, -6 + 10)]
    got = weighted([first, second], 5, [1.0, 0.5])
    assert as_list(got, 0) == [(1, 1.0), (3, 0.5), (2, 0.0)]


def test_all_equal_scores() -> None:
    same, none = hits({5: 3.0, 2: 3.0}), hits({}, width=2)
    assert as_list(weighted([same, none], 3, [0.25, 1]), 0) == [(2, 0.25), (5, 0.25)]
    assert as_list(weighted([same, none], 3, [0.25, 1], normalize="zscore"), 0) == [(2, 0.0), (5, 0.0)]
    assert as_list(weighted([none, none], 3, [1, 1]), 0) == []


def test_scores_are_rounded_once() -> None:
    """Large scores that nearly cancel: the sum in float64, and only then float32."""
    found = [hits({1: -16777215.0, 2: -16777216.0}), hits({1: 16777216.0, 3: 1.0})]
    got = weighted(found, 1, [1 / 3, 1 / 3], normalize="none")
    assert got.rows.tolist() == [[1]]
    assert got.scores[0, 0] == pytest.approx(1 / 3, rel=1e-6)


def test_a_large_score_that_all_passages_share_hides_no_small_one() -> None:
    """The passages that the first source missed have its smallest score, 1e20, beside which float64 has no 0.1."""
    first, second = hits({1: 1e20}), hits({2: 0.4, 4: 0.5, 3: 0.6})
    got = weighted([first, second], 4, [1, 1], normalize="none")
    assert got.rows.tolist() == [[3, 4, 1, 2]]
    assert got.scores.tolist() == [[float(np.float32(1e20))] * 4]


def test_questions_do_not_mix_and_may_be_none() -> None:
    draw = np.random.default_rng(0)
    found = [random_hits(draw, 12, 9, 15, False) for _ in range(3)]
    for fuse in (lambda part: reciprocal_rank(part, 6), lambda part: weighted(part, 6, [0.2, 0.3, 0.5])):
        whole = fuse(found)
        for number in range(12):
            part = fuse([Hits(s.scores[number : number + 1], s.rows[number : number + 1]) for s in found])
            assert part.rows.tolist() == whole.rows[number : number + 1].tolist()
            assert part.scores.tobytes() == whole.scores[number : number + 1].tobytes()
        assert fuse([Hits(s.scores[:0], s.rows[:0]) for s in found]).rows.shape == (0, 6)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0, 1.0], [0.0, 0.0], [1.0, -0.1], [1.0, math.inf], [math.nan, 1.0]])
def test_bad_weights(weights: list[float]) -> None:
    found = [hits({1: 1.0}), hits({2: 1.0})]
    with pytest.raises(InputError, match="2 sources with the weights"):
        reciprocal_rank(found, 3, weights=weights)
    with pytest.raises(InputError, match="2 sources with the weights"):
        weighted(found, 3, weights)


def test_no_source() -> None:
    with pytest.raises(InputError, match="0 sources"):
        reciprocal_rank([], 3)
    with pytest.raises(InputError, match="0 sources"):
        weighted([], 3, [])
