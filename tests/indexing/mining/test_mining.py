"""Pooling, denoising and drawing, compared with plain loops over one query at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from riptide.base.errors import InputError
from riptide.indexing.exact import Hits
from riptide.indexing.mining import pools as mining
from riptide.indexing.mining import sampling
from riptide.indexing.mining.sampling import NegativeOptions

SOURCES = ("bm25", "exact:minilm", "a+b:c")
CORPUS = 60
THRESHOLD = 0.1
Known = Callable[[str, int], float]


class Case:
    """Queries with random hits and positives; some have none of either."""

    def __init__(self, seed: int, queries: int = 25, width: int = 20):
        draw = np.random.default_rng(seed)
        self.ids = [f"q{number}-é" for number in range(queries)]
        self.found = {source: self._hits(draw, queries, width) for source in SOURCES}
        counts = draw.integers(0, 6, queries)
        self.positives = [np.sort(draw.choice(CORPUS, count, replace=False)) for count in counts]

    @staticmethod
    def _hits(draw: np.random.Generator, queries: int, width: int) -> Hits:
        rows = np.full((queries, width), -1, np.int64)
        scores = np.full((queries, width), -np.inf, np.float32)
        for number in range(1, queries):  # no source finds anything for the first
            count = draw.integers(0, width + 1)
            rows[number, :count] = draw.choice(CORPUS, count, replace=False)
            scores[number, :count] = np.sort(draw.normal(size=count))[::-1]
        return Hits(scores, rows)

    def part(self, start: int, end: int) -> Case:
        part = object.__new__(Case)
        part.ids, part.positives = self.ids[start:end], self.positives[start:end]
        part.found = {s: Hits(h.scores[start:end], h.rows[start:end]) for s, h in self.found.items()}
        return part

    def pool(self, depth: int = 15) -> pa.Table:
        return mining.pool_hits(self.ids, self.found, self.positives, depth)


def probability(query_id: str, row: int) -> float:
    """A re-ranker's: about half of the pairs below the threshold."""
    return float(np.float32((xxhash.xxh3_64_intdigest(f"{query_id} {row}".encode()) % 1000) / 1000) ** np.float32(3))


def known_of(table: pa.Table, which: Known = probability) -> np.ndarray:
    pairs = zip(table["query_id"].to_pylist(), table["row"].to_pylist(), strict=True)
    return np.array([which(query_id, row) for query_id, row in pairs], np.float32)


def by_query(table: pa.Table) -> dict[str, list[int]]:
    """Query's id -> positions in the pool."""
    positions: dict[str, list[int]] = {}
    for position, query_id in enumerate(table["query_id"].to_pylist()):
        positions.setdefault(query_id, []).append(position)
    return positions


def order_key(seed: int, stream: int, query_id: str, row: int) -> int:
    return splitmix64(xxhash.xxh3_64_intdigest(f"{stream} {query_id}".encode(), seed), row + 1)


def splitmix64(state: int, number: int) -> int:
    """The number-th output, from 1 (Steele, Lea and Flood 2014), in Python's own integers."""
    mask = (1 << 64) - 1
    z = (state + number * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def sample(case: Case, table: pa.Table, known: np.ndarray | None, **changed: Any) -> pa.Table:
    given: dict[str, Any] = {"pool_negatives": 5, "denoised_negatives": 4, "seed": 3, **changed}
    options = NegativeOptions(denoise_threshold=THRESHOLD, **given)
    return sampling.sample_negatives(table, known, options, query_ids=case.ids, positives=case.positives)


def score_until_done(
    table: pa.Table,
    known: np.ndarray,
    reranker: Known = probability,
    *,
    wanted: int = 4,
    seed: int = 3,
    threshold: float = THRESHOLD,
    all_pairs: bool = False,
) -> tuple[np.ndarray, list[int]]:
    """(what is known in the end, positions in the order that they were asked for)."""
    known = known.copy()
    asked: list[int] = []
    answers = known_of(table, reranker)
    options = NegativeOptions(0, wanted, threshold, all_pairs, seed)
    for _ in range(len(table) + 1):
        chosen = sampling.pairs_to_score(table, known, options)
        if not len(chosen):
            return known, asked
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        assert np.isnan(known[chosen]).all(), "a pair is scored once"
        known[chosen] = answers[chosen]
        asked += chosen.tolist()
    raise AssertionError("to_score does not end")


@pytest.mark.parametrize("depth", [1, 7, 15, 50])
@pytest.mark.parametrize("seed", range(4))
def test_pool_is_the_union_of_the_first_hits_less_the_positives(seed: int, depth: int) -> None:
    case = Case(seed)
    expected = []
    for number, query_id in enumerate(case.ids):
        candidates: dict[int, dict] = {}
        for source, hits in case.found.items():
            for rank, (row, score) in enumerate(zip(hits.rows[number], hits.scores[number], strict=True), 1):
                if rank <= depth and row >= 0 and row not in case.positives[number]:
                    candidates.setdefault(int(row), {}).update({f"rank:{source}": rank, f"score:{source}": score})
        for row in sorted(candidates):
            fields = {"query": number, "query_id": query_id, "row": row}
            for source in SOURCES:
                for name in (f"rank:{source}", f"score:{source}"):
                    fields[name] = candidates[row].get(name)
                hits = case.found[source]
                scores = dict(zip(hits.rows[number, :depth].tolist(), hits.scores[number, :depth], strict=True))
                own = [float(scores.get(int(row), -np.inf)) for row in case.positives[number]]
                fields[f"positive:{source}"] = min(own, default=None)
            expected.append(fields)
    table = case.pool(depth)
    assert table.to_pylist() == expected
    assert mining.sources_of(table) == list(SOURCES)
    assert [str(field.type) for field in table.schema] == ["int32", "string", "int64", *["int32", "float", "float"] * 3]


def test_rows_of_a_large_corpus_and_many_queries() -> None:
    """Billions of passages; the last query of the largest pool; neighbours in all of their bits."""
    rows = np.array([0, 1, (1 << 20) + 1, (1 << 31) - 1, 1 << 31, (1 << 32) + 1, (1 << 44) - 1])
    queries = 3000
    found = {
        "bm25": Hits(np.zeros((queries, len(rows)), np.float32), np.tile(rows, (queries, 1))),
        "exact:minilm": Hits(np.zeros((queries, 2), np.float32), np.tile(rows[[-1, 2]], (queries, 1))),
    }
    positives = [rows[[number % len(rows)]] for number in range(queries)]
    table = mining.pool_hits([f"q{number}" for number in range(queries)], found, positives, 10)
    expected = [(n, row) for n in range(queries) for at, row in enumerate(rows.tolist()) if at != n % len(rows)]
    assert list(zip(table["query"].to_pylist(), table["row"].to_pylist(), strict=True)) == expected
    ranks = {row: rank for rank, row in enumerate(rows.tolist(), 1)}
    assert table["rank:bm25"].to_pylist() == [ranks[row] for _, row in expected]
    ranks = {int(rows[-1]): 1, int(rows[2]): 2}
    assert table["rank:exact:minilm"].to_pylist() == [ranks.get(row) for _, row in expected]


def test_more_queries_than_numbers() -> None:
    most = mining.MAX_QUERIES
    last = np.full((most, 1), -1, np.int64)
    last[-1] = (1 << 44) - 1
    found = {"bm25": Hits(np.zeros((most, 1), np.float32), last)}
    table = mining.pool_hits(["q"] * most, found, [np.empty(0, np.int64)] * most, 1)
    assert (table["query"].to_pylist(), table["row"].to_pylist()) == ([most - 1], [(1 << 44) - 1])
    with pytest.raises(InputError, match="524,289 queries in one pool: at most 524,288"):
        mining.pool_hits(["q"] * (most + 1), found, [], 1)


def test_no_source_finds_nothing() -> None:
    table = mining.pool_hits(["a"], {}, [np.array([3])], 5)
    assert (len(table), table.column_names) == (0, ["query", "query_id", "row"])


def test_an_empty_pool_goes_all_the_way() -> None:
    rows = np.full((2, 3), -1, np.int64)
    positives = [np.array([4], np.int64), np.empty(0, np.int64)]
    table = mining.pool_hits(["a", "b"], {"bm25": Hits(np.full((2, 3), -np.inf, np.float32), rows)}, positives, 3)
    assert len(table) == 0
    known = np.empty(0, np.float32)
    assert len(sampling.pairs_to_score(table, known, NegativeOptions(denoised_negatives=3))) == 0
    drawn = sampling.sample_negatives(
        table,
        known,
        NegativeOptions(pool_negatives=2, denoised_negatives=2, denoise_threshold=0.1, seed=0),
        query_ids=["a", "b"],
        positives=positives,
    )
    assert drawn.select(["query_id", "positives", "negatives"]).to_pylist() == [
        {"query_id": "a", "positives": [4], "negatives": []},
        {"query_id": "b", "positives": [], "negatives": []},
    ]
    assert len(mining.without_answers(table, lambda query, rows: np.ones(len(rows), bool))) == 0


def test_without_answers_asks_once_for_each_query() -> None:
    case = Case(0)
    table = case.pool()
    asked = []

    def contains(query: int, rows: np.ndarray) -> np.ndarray:
        asked.append(query)
        return (rows + query) % 3 == 0

    kept = mining.without_answers(table, contains)
    assert kept.to_pylist() == [fields for fields in table.to_pylist() if (fields["row"] + fields["query"]) % 3]
    assert asked == sorted({fields["query"] for fields in table.to_pylist()})


def test_seeded_order_is_splitmix64_of_the_query() -> None:
    assert [splitmix64(0, number) for number in (1, 2, 3)] == [  # published for the state 0
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    ids, rows = ["q", "q", "é", "q"], np.array([0, 7, 7, 1 << 40])
    for seed, stream in itertools.product((0, 5), (0, 1)):
        found = mining.seeded_order(seed, ids, rows, stream)
        assert found.dtype == np.uint64
        assert found.tolist() == [order_key(seed, stream, id, int(row)) for id, row in zip(ids, rows, strict=True)]


def test_seeded_order_is_uniform_and_its_streams_are_independent() -> None:
    """Chi-square over all 120 orders of 5 rows, and over the pairs of first rows in two streams or seeds."""
    queries, rows = 12_000, np.array([3, 4, 5, 1000, 1 << 33])
    ids = [f"q{number}" for number in range(queries) for _ in rows]
    orders = {}
    for seed, stream in ((0, 0), (0, 1), (1, 0)):
        keys = mining.seeded_order(seed, ids, np.tile(rows, queries), stream).reshape(queries, -1)
        orders[seed, stream] = np.argsort(keys, axis=1)

    def chi_square(categories: np.ndarray, count: int) -> float:
        expected = queries / count
        return float(((np.bincount(categories, minlength=count) - expected) ** 2 / expected).sum())

    for order in orders.values():
        numbers = order @ 5 ** np.arange(5)
        _, categories = np.unique(numbers, return_inverse=True)
        assert chi_square(categories, 120) < 119 + 4 * np.sqrt(2 * 119)
    for one, other in itertools.combinations(orders.values(), 2):
        assert chi_square(one[:, 0] * 5 + other[:, 0], 25) < 24 + 4 * np.sqrt(2 * 24)


def needed(table: pa.Table, positions: list[int], *, wanted: int, seed: int, threshold: float) -> list[int]:
    """One query's pairs in order, one by one, until `wanted` are below the threshold."""
    rows, ids = table["row"].to_pylist(), table["query_id"].to_pylist()
    passed, scored = 0, []
    for at in sorted(positions, key=lambda at: order_key(seed, mining.SCORING, ids[at], rows[at])):
        if passed == wanted:
            break
        scored.append(at)
        passed += bool(probability(ids[at], rows[at]) < np.float32(threshold))
    return scored


@pytest.mark.parametrize("wanted", [0, 1, 4, 100])
@pytest.mark.parametrize("seed", range(3))
def test_to_score_takes_as_few_as_one_by_one_would(seed: int, wanted: int) -> None:
    table = Case(seed).pool()
    expected = [
        at
        for positions in by_query(table).values()
        for at in needed(table, positions, wanted=wanted, seed=seed, threshold=THRESHOLD)
    ]
    _, asked = score_until_done(table, np.full(len(table), np.nan, np.float32), wanted=wanted, seed=seed)
    assert sorted(asked) == sorted(expected)
    if wanted == 4:
        assert 0 < len(asked) < len(table)


def test_what_was_scored_before_spares_work_and_changes_nothing() -> None:
    case = Case(1)
    table = case.pool()
    nothing = np.full(len(table), np.nan, np.float32)
    fresh, first = score_until_done(table, nothing)
    expected = sample(case, table, fresh).select(["query_id", "negatives", "is_denoised"])
    histories = {
        "another seed": score_until_done(table, nothing, seed=8)[0],
        "a lower threshold": score_until_done(table, nothing, threshold=0.01)[0],
        "a higher threshold": score_until_done(table, nothing, threshold=0.5)[0],
        "fewer": score_until_done(table, nothing, wanted=2)[0],
        "all": known_of(table),
    }
    for what, history in histories.items():
        known, asked = score_until_done(table, history)
        assert set(asked) == {at for at in first if np.isnan(history[at])}, what
        assert sample(case, table, known).select(expected.column_names).equals(expected), what


def test_a_reranker_that_rejects_or_accepts_everything() -> None:
    table = Case(2).pool()
    nothing = np.full(len(table), np.nan, np.float32)
    sizes = [len(positions) for positions in by_query(table).values()]
    _, asked = score_until_done(table, nothing, lambda *_: 0.9)
    assert sorted(asked) == list(range(len(table)))
    _, asked = score_until_done(table, nothing, lambda *_: 0.0)
    assert len(asked) == sum(min(4, size) for size in sizes)
    _, asked = score_until_done(table, nothing, lambda *_: float(np.float32(THRESHOLD)))  # equal is not below
    assert len(asked) == len(table)
    half = nothing.copy()
    half[::2] = 0.5
    assert score_until_done(table, half, all_pairs=True)[1] == list(range(1, len(table), 2))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("pool_negatives", "denoised_negatives"), [(5, 4), (0, 3), (3, 0), (1000, 1000)])
def test_sample_is_what_a_loop_draws(seed: int, pool_negatives: int, denoised_negatives: int) -> None:
    case = Case(seed)
    table = case.pool()
    known = known_of(table)
    known[:: seed + 2] = np.nan  # not all are scored
    known[1::5] = THRESHOLD  # which is not below it
    drawn = sample(case, table, known, pool_negatives=pool_negatives, denoised_negatives=denoised_negatives, seed=seed)
    pool, positions = table.to_pylist(), by_query(table)
    keys = [[order_key(seed, stream, pair["query_id"], pair["row"]) for pair in pool] for stream in (0, 1)]
    for number, fields in enumerate(drawn.to_pylist()):
        query_id = case.ids[number]
        mine = positions.get(query_id, [])
        first, second = (sorted(mine, key=each.__getitem__) for each in keys)
        low = [at for at in first if known[at] < np.float32(THRESHOLD)][:denoised_negatives]
        from_pool = second[:pool_negatives]
        others = [at for at in from_pool if at not in low]
        expected = {
            "query_id": query_id,
            "positives": case.positives[number].tolist(),
            "copies": [],
            "negatives": [pool[at]["row"] for at in low + others],
            "is_denoised": [True] * len(low) + [False] * len(others),
            "is_from_pool": [at in from_pool for at in low + others],
            "probability": [None if np.isnan(known[at]) else known[at] for at in low + others],
        }
        for source in SOURCES:
            expected[f"rank:{source}"] = [pool[at][f"rank:{source}"] for at in low + others]
        assert fields == expected | {"dropped": [], "dropped_by": []}
        # And what a user relies on, in its own words.
        negatives = fields["negatives"]
        assert not set(negatives) & set(fields["positives"])
        assert len(set(negatives)) == len(negatives)
        assert sum(fields["is_from_pool"]) == min(len(mine), pool_negatives)
        assert all(
            p < np.float32(THRESHOLD) for p, d in zip(fields["probability"], fields["is_denoised"], strict=True) if d
        )
    assert len(drawn) == len(case.ids)


def test_without_a_reranker_nothing_is_denoised() -> None:
    case = Case(0)
    drawn = sample(case, case.pool(), None, denoised_negatives=4)
    for fields in drawn.to_pylist():
        assert not any(fields["is_denoised"])
        assert set(fields["probability"]) <= {None}
    assert drawn.equals(sample(case, case.pool(), None, denoised_negatives=0))


@pytest.mark.parametrize("size", [1, 4, 7, 24])
def test_the_same_whatever_the_parts_are(size: int) -> None:
    case = Case(5)
    pools, tables, scored = [], [], 0
    for start in [None, *range(0, len(case.ids), size)]:
        part = case if start is None else case.part(start, start + size)
        table = part.pool()
        known, asked = score_until_done(table, np.full(len(table), np.nan, np.float32))
        drawn = sample(part, table, known)
        if start is None:
            whole_pool, whole, all_asked = table.drop(["query"]), drawn, len(asked)
        else:
            pools.append(table.drop(["query"]))
            tables.append(drawn)
            scored += len(asked)
    assert pa.concat_tables(pools).combine_chunks().equals(whole_pool.combine_chunks())
    assert pa.concat_tables(tables).combine_chunks().equals(whole.combine_chunks())
    assert scored == all_asked


def test_a_pool_in_chunks_as_parquet_gives_it() -> None:
    case = Case(4)
    table = case.pool()
    chunks = pa.concat_tables([table.slice(start, 9) for start in range(0, len(table), 9)])
    assert chunks["query_id"].num_chunks > 10
    nothing = np.full(len(table), np.nan, np.float32)
    known, asked = score_until_done(table, nothing)
    chunked, chunks_asked = score_until_done(chunks, nothing)
    assert (chunked.tobytes(), chunks_asked) == (known.tobytes(), asked)
    assert sample(case, chunks, known).equals(sample(case, table, known))
    odd = [lambda query, rows: rows % 2 == 1] * 2
    kept, expected = map(mining.without_answers, (chunks, table), odd)
    assert kept.equals(expected)
    assert sampling.queries_with_too_few(sample(case, chunks, known), 5, 4) == sampling.queries_with_too_few(
        sample(case, table, known), 5, 4
    )


def test_other_seeds_draw_others() -> None:
    case = Case(0)
    table = case.pool()
    drawn = [sample(case, table, known_of(table), seed=seed)["negatives"].to_pylist() for seed in range(3)]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


def test_short_names_the_queries_with_too_few() -> None:
    case = Case(0)
    drawn = sample(case, case.pool(), None, pool_negatives=20)
    counts = [len(negatives) for negatives in drawn["negatives"].to_pylist()]
    assert len(set(counts)) > 3
    for asked in range(22):
        expected = [id for id, count in zip(case.ids, counts, strict=True) if count < asked]
        assert sampling.queries_with_too_few(drawn, asked, 0) == expected
        assert sampling.queries_with_too_few(drawn.slice(3), asked, 0) == [id for id in expected if id in case.ids[3:]]


def test_un_denoised_negatives_are_a_uniform_sample_of_the_whole_pool() -> None:
    """Ten of twenty candidates are below the threshold, and so are five of ten draws from the pool, on average."""
    queries = [f"q{number}" for number in range(400)]
    rows = np.tile(np.arange(20), (len(queries), 1))
    positives = [np.array([99])] * len(queries)
    table = mining.pool_hits(queries, {"bm25": Hits(-rows.astype(np.float32), rows)}, positives, 20)
    known = np.where(table["row"].to_numpy() < 10, np.float32(0.01), np.float32(0.9))
    drawn = sampling.sample_negatives(
        table,
        known,
        NegativeOptions(pool_negatives=10, denoised_negatives=6, denoise_threshold=0.1, seed=0),
        query_ids=queries,
        positives=positives,
    ).to_pylist()
    for line in drawn:
        assert sum(line["is_from_pool"]) == 10
        assert sum(line["is_denoised"]) == 6
        assert len(line["negatives"]) == len({*line["negatives"]}), "a passage of both draws is one negative"
    below = [
        sum(row < 10 for row, pool in zip(line["negatives"], line["is_from_pool"], strict=True) if pool)
        for line in drawn
    ]
    assert np.mean(below) == pytest.approx(5, abs=0.3)  # 2.9 if denoised negatives left the pool before the draw


def test_copies_of_positives_are_not_pooled() -> None:
    rows = np.array([[5, 6, 7, 8], [5, 6, 7, 8]])
    found = {"bm25": Hits(np.array([[4, 3, 2, 1]] * 2, np.float32), rows)}
    positives = [np.array([6]), np.array([8])]
    copies = [np.array([5, 9]), np.empty(0, np.int64)]
    table = mining.pool_hits(["a", "b"], found, positives, 4, copies)
    assert list(zip(table["query_id"].to_pylist(), table["row"].to_pylist(), strict=True)) == [
        ("a", 7),
        ("a", 8),
        ("b", 5),
        ("b", 6),
        ("b", 7),
    ]
    drawn = sampling.sample_negatives(
        table,
        None,
        NegativeOptions(pool_negatives=4, denoised_negatives=0, denoise_threshold=0.1, seed=0),
        query_ids=["a", "b"],
        positives=positives,
        copies=copies,
    )
    assert drawn["copies"].to_pylist() == [[5, 9], []]


def dropped(scores: list[float], positive: float, **limits: float) -> list[str]:
    """Which of some scores exceed a limit, by its name; "" for none."""
    found = [""] * len(scores)
    known = np.array(scores, np.float32)
    for name, exceeds in mining.ScoreMargins(**limits).exceeded_limits(
        known, np.full(len(scores), positive, np.float32)
    ):
        for place in np.flatnonzero(exceeds):
            found[place] = found[place] or name
    return found


def test_margins_are_those_of_sentence_transformers() -> None:
    """By hand, after its mine_hard_negatives: scores equal to a limit stay."""
    assert dropped([0.25, 0.5, 0.75, 1.0], 1.0, absolute_margin=0.25) == ["", "", "", "absolute_margin"]
    assert dropped([0.25, 0.5, 0.75, 1.0], 1.0, relative_margin=0.5) == ["", "", *["relative_margin"] * 2]
    assert dropped([-3.0, -2.5, -2.0], -2.0, relative_margin=0.25) == ["", "", "relative_margin"]  # below -2 - 0.5
    assert dropped([0.25, 0.5, 0.75], 1.0, max_score=0.5) == ["", "", "max_score"]
    every = dropped([0.1, 0.5, 0.7, 0.8], 1.0, absolute_margin=0.25, relative_margin=0.4, max_score=0.3)
    assert every == ["", "max_score", "relative_margin", "absolute_margin"]
    assert dropped([-9.0, float("nan")], -np.inf, relative_margin=0.0) == ["relative_margin", ""]
    assert dropped([9.0], float("nan"), absolute_margin=0.0, relative_margin=0.0) == [""], "a query without a positive"


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"max_score": float("nan")}, "parameter max_score nan: expected a finite number"),
        ({"relative_margin": -0.1}, "parameter relative_margin -0.1: expected 0 or more"),
        ({"absolute_margin": float("inf")}, "parameter absolute_margin inf: expected a finite number"),
    ],
)
def test_bad_margins(limits: dict[str, float], told: str) -> None:
    with pytest.raises(InputError) as raised:
        mining.ScoreMargins(**limits)
    assert str(raised.value) == told


@pytest.mark.parametrize("seed", range(3))
def test_dropped_candidates_are_never_drawn_and_have_their_reason(seed: int) -> None:
    """By the scores of the sources, and by those of a re-ranker, against a loop over the pool."""
    case = Case(seed)
    table = case.pool()
    margins = mining.ScoreMargins(max_score=0.9, relative_margin=0.1, absolute_margin=0.5)
    known = known_of(table)
    lowest = np.array([0.2 + number / 50 for number in range(len(case.ids))], np.float32)
    lowest[3] = np.nan
    for reranked in (False, True):
        drawn = sampling.sample_negatives(
            table,
            known if reranked else None,
            NegativeOptions(
                pool_negatives=100, denoised_negatives=2, denoise_threshold=THRESHOLD, seed=seed, margins=margins
            ),
            query_ids=case.ids,
            positives=case.positives,
            reranked_positives=lowest if reranked else None,
        )
        expected: dict[str, dict[int, str]] = {id: {} for id in case.ids}
        for at, pair in enumerate(table.to_pylist()):
            scorers = [(source, pair[f"score:{source}"], pair[f"positive:{source}"]) for source in SOURCES]
            if reranked:
                scorers = [("reranker", float(known[at]), float(lowest[pair["query"]]))]
            for scorer, score, positive in scorers:
                if score is None:
                    continue
                p = float("nan") if positive is None else positive
                limits = {
                    "absolute_margin": p - 0.5,
                    "relative_margin": p - (abs(p) if abs(p) < 1e9 else 0) * 0.1,
                    "max_score": 0.9,
                }
                for name, limit in limits.items():
                    if score > limit:
                        expected[pair["query_id"]].setdefault(pair["row"], f"{name}:{scorer}")
        lines = drawn.to_pylist()
        assert {line["query_id"]: dict(zip(line["dropped"], line["dropped_by"], strict=True)) for line in lines} == (
            expected
        )
        assert sum(map(len, expected.values())) > 20
        for line, positions in ((line, by_query(table).get(line["query_id"], [])) for line in lines):
            assert {*line["negatives"]} == {table["row"][at].as_py() for at in positions} - {*line["dropped"]}
