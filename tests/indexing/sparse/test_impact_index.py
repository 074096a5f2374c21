"""The index of impacts against a brute-force product of the same whole weights: ranking, scores, growth, limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from runners import InlineRunner
from small_stores import extend_corpus, shuffling_runner
from sparse_stores import WIDTH, add_embeddings, build_index, random_vectors

from riptide.base.errors import InputError, TextsError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.exact import Hits, merge_hits
from riptide.indexing.sparse.impacts import EMPTY, document_texts, quantise, query_texts
from riptide.indexing.sparse.index import ImpactIndex, search_impacts
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.sparse_vectors import SparseVectors, from_dense

NOTHING = np.empty(0, np.int64)


def whole(vectors: SparseVectors) -> np.ndarray:
    """Returns rint(100 v), word by word in Python's numbers, int64 [rows, WIDTH]."""
    return np.array([[round(100 * float(value)) for value in row] for row in vectors.dense()], np.int64)


def brute_force(queries: SparseVectors, passages: SparseVectors, k: int, deleted: np.ndarray = NOTHING) -> Hits:
    """Returns the top k by the product of whole weights: by score, then by row; a score of 0 is no hit."""
    scores = whole(queries) @ whole(passages).T
    expected = Hits(np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1, np.int64))
    for number, line in enumerate(scores.tolist()):
        rows = [row for row, score in enumerate(line) if score and row not in set(deleted.tolist())]
        for place, row in enumerate(sorted(rows, key=lambda row: (-line[row], row))[:k]):
            expected.scores[number, place], expected.rows[number, place] = line[row], row
    return expected


def equal(actual: Hits, expected: Hits) -> None:
    assert (expected.rows >= 0).any()
    np.testing.assert_array_equal(actual.rows, expected.rows)
    np.testing.assert_array_equal(actual.scores, expected.scores)


@pytest.mark.parametrize("shards", [1, 4])
def test_the_ranking_is_that_of_a_brute_force_product(tmp_path: Path, shards: int) -> None:
    vectors, queries = random_vectors(700), random_vectors(60, seed=1)
    add_embeddings(tmp_path, [vectors.take(np.arange(first, first + 100)) for first in range(0, 700, 100)])
    index = build_index(tmp_path, shards)
    assert len(index.shards) == shards
    assert index.largest == whole(vectors).max()
    for k in (1, 10, 700):
        equal(index.search(queries, k, NOTHING, threads=2), brute_force(queries, vectors, k))
    allowed_rows = np.arange(5, 700, 9)
    others = np.setdiff1d(np.arange(700), allowed_rows)
    equal(index.search(queries, 30, NOTHING, allowed_rows=allowed_rows), brute_force(queries, vectors, 30, others))
    equal(search_impacts(index, queries, 20, NOTHING, shuffling_runner()), brute_force(queries, vectors, 20))
    assert index.search(queries.take(NOTHING), 3, NOTHING).rows.shape == (0, 3)


def test_many_equal_scores_are_ordered_by_row(tmp_path: Path) -> None:
    """Weights that round to 1 or 2, so that most scores are equal."""
    vectors, queries = random_vectors(900, largest=0.02), random_vectors(40, seed=1, largest=0.02)
    add_embeddings(tmp_path, [vectors])
    expected = brute_force(queries, vectors, 30)
    assert (expected.scores[1:, 1:] == expected.scores[1:, :-1]).mean() > 0.7
    for shards in (1, 4):
        equal(build_index(tmp_path, shards).search(queries, 30, NOTHING), expected)


def test_a_grown_index_finds_what_one_built_anew_finds(tmp_path: Path) -> None:
    vectors, queries = random_vectors(500), random_vectors(30, seed=1)
    add_embeddings(tmp_path / "grown", [vectors.take(np.arange(300))])
    build_index(tmp_path / "grown", 3)
    deleted = np.array([2, 77, 250, 301, 499])
    add_embeddings(tmp_path / "grown", [vectors.take(np.arange(300, 500))], deleted=[2, 77, 250])
    store = Store(str(tmp_path / "grown/store"))
    embeddings = build_index(tmp_path / "grown", 3).embeddings
    grown = ImpactIndex.open(store, "i3", embeddings)
    assert [(part.facts["first_row"], part.facts["end"]) for _, part in grown.shards] == [
        (0, 100),
        (100, 200),
        (200, 300),
        (300, 400),
        (400, 500),
    ]
    add_embeddings(tmp_path / "anew", [vectors])
    anew = build_index(tmp_path / "anew", 3)
    for rows in (NOTHING, deleted):
        expected = brute_force(queries, vectors, 40, rows)
        equal(grown.search(queries, 40, rows), expected)
        runs = [grown.searcher(run) for run in (slice(0, 2), slice(2, 5))]
        equal(merge_hits([grown.search(queries, 40, rows, searcher=run) for run in runs], 40), expected)
        equal(anew.search(queries, 40, rows), expected)


def test_scores_that_float32_rounds_are_ordered_exactly(tmp_path: Path) -> None:
    """Scores around 2^24 and far above it; many of them are equal in float32 and not as whole numbers."""
    draw = np.random.default_rng(0)
    matrix = (20 + 0.02 * draw.random((400, WIDTH))).astype(np.float32)
    matrix[:50] = matrix[50]  # equal scores too
    matrix[50:60] = 0
    matrix[60:100] *= draw.random((40, 1)) / 10
    asked = (8 + 8 * draw.random((8, WIDTH))).astype(np.float32)
    asked[:, 0] = 0.01  # so that the 100 best passages differ by less than float32 tells
    matrix[100:200] = 20.03
    matrix[100:200, 0] = 20 + draw.permutation(100) % 50 / 100
    vectors, queries = from_dense(matrix), from_dense(asked)
    add_embeddings(tmp_path, [vectors])
    exact = np.sort(whole(queries) @ whole(vectors).T)
    assert exact.max() > 3 * 2**24
    assert (np.diff(exact.astype(np.float32)) == 0).sum() > (np.diff(exact) == 0).sum() + 20
    for shards in (1, 4):
        index = build_index(tmp_path, shards)
        for k in (1, 7, 390, 400):
            equal(index.search(queries, k, np.array([55, 120])), brute_force(queries, vectors, k, np.array([55, 120])))
            allowed_rows = np.arange(3, 400, 3)
            others = np.setdiff1d(np.arange(400), allowed_rows)
            equal(
                index.search(queries, k, NOTHING, allowed_rows=allowed_rows), brute_force(queries, vectors, k, others)
            )


def test_queries_may_have_more_words_than_lucenes_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 clauses by default; here 6,000 words, of which the last ones decide."""
    import sparse_stores

    width = 6_000
    monkeypatch.setattr(sparse_stores, "WIDTH", width)
    matrix = np.zeros((5, width), np.float32)
    matrix[0, -10:], matrix[1, :10], matrix[2], matrix[3, 2_000:4_000] = 2, 1, 0.05, 0.5
    query = from_dense(np.full((1, width), 0.3, np.float32))
    add_embeddings(tmp_path, [from_dense(matrix)])
    hits = build_index(tmp_path, 1).search(query, 5, NOTHING)
    assert hits.rows.tolist() == [[3, 2, 0, 1, -1]]
    expected = {0: 30 * 200 * 10, 1: 30 * 100 * 10, 2: 30 * 5 * width, 3: 30 * 50 * 2_000}
    assert dict(zip(hits.rows[0, :4].tolist(), hits.scores[0, :4].tolist(), strict=True)) == expected


def test_empty_texts_are_documents_and_empty_queries_find_nothing(tmp_path: Path) -> None:
    matrix = np.zeros((4, WIDTH), np.float32)
    matrix[2, 7] = 0.004  # rounds to 0
    add_embeddings(tmp_path, [from_dense(matrix)])
    index = build_index(tmp_path, 1)
    assert index.searcher().num_documents == 4
    queries = from_dense(np.concatenate([matrix, np.ones((1, WIDTH), np.float32)]))
    assert (index.search(queries, 4, NOTHING).rows == -1).all()
    impacts = quantise(from_dense(matrix), str)
    assert list(document_texts(impacts)) == [EMPTY] * 4
    assert query_texts(impacts) == [""] * 4


def test_rounding_is_to_the_nearest_whole_number() -> None:
    values = np.array([[0.0049, 0.0051, 0.995, 1.0, 2.344999, 0.125]], np.float32)
    expected = [round(100 * float(value)) for value in values[0]]
    impacts = quantise(from_dense(values), str)
    assert dict(zip(impacts.words.tolist(), impacts.impacts.tolist(), strict=True)) == {
        word: value for word, value in enumerate(expected) if value
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            [1.0, 3e7],
            "embeddings/s: passage 1: the weight 3e+07 of word 1 does not fit an impact: expected 0 to 21,474,836",
        ),
        (
            [2e7, 2e7],
            "embeddings/s: passage 1: its weights sum to 40,000,000, expected at most 21,474,836: Lucene counts",
        ),
    ],
)
def test_weights_that_overflow_are_refused(tmp_path: Path, values: list[float], message: str) -> None:
    matrix = np.zeros((2, WIDTH), np.float32)
    matrix[1, :2] = values
    add_embeddings(tmp_path, [from_dense(matrix)])
    with pytest.raises(InputError) as raised:
        build_index(tmp_path, 1)
    assert message in str(raised.value)


def test_a_product_that_lucene_would_round_is_refused(tmp_path: Path) -> None:
    add_embeddings(tmp_path, [from_dense(np.full((2, WIDTH), 100.0, np.float32))])
    index = build_index(tmp_path, 1)
    equal(
        index.search(from_dense(np.full((1, WIDTH), 16.0, np.float32)), 2, NOTHING),
        Hits(np.full((1, 2), 4.8e9, np.float32), np.array([[0, 1]])),
    )
    with pytest.raises(InputError, match="query 0: a word has the impact 1,700, and one of a passage of index/i1 has"):
        index.search(from_dense(np.full((1, WIDTH), 17.0, np.float32)), 2, NOTHING)


def test_a_query_that_overflows_is_named_by_its_number_among_all_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("riptide.indexing.lucene.segment_search.BLOCK_QUERIES", 2)
    add_embeddings(tmp_path, [random_vectors(20)])
    queries = np.full((8, WIDTH), 1.0, np.float32)
    queries[6, 3] = 3e7
    with pytest.raises(TextsError, match="query 6: the weight 3e\\+07 of word 3 does not fit an impact") as raised:
        search_impacts(build_index(tmp_path, 1), from_dense(queries), 2, NOTHING, InlineRunner())
    assert list(raised.value.reasons) == [6]


def test_another_index_is_refused(tmp_path: Path) -> None:
    add_embeddings(tmp_path, [random_vectors(30)])
    index = build_index(tmp_path, 2)
    with pytest.raises(InputError, match=r"index/i2/g0000 was built otherwise \(parameter shards 2, now 3\)"):
        build_index(tmp_path, 3, "i2")
    extend_corpus(tmp_path, [["more"]])
    store = Store(str(tmp_path / "store"))
    with pytest.raises(InputError, match="embeddings/s covers 30 of the corpus' 31 passages"):
        type(index.embeddings).open(store, "s", Corpus.open(store))
