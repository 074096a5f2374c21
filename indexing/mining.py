"""Hard negatives from many sources (DPTDR, section 3.3): pooled, denoised, drawn. Pure functions on Arrow tables.

A pool holds one row for each question and passage that some source found:

    query int32 (the question's number in its part), query_id, row int64, and for each source S
    `rank:S` int32 (from 1, as found) and `score:S` float32, null where S did not find the passage

ordered by question, then by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import xxhash

from indexing.exact import Hits
from retriever.errors import InputError

SCORING, DRAWING = 0, 1  # streams of random numbers
_SHIFT = 44  # bits of a row, in a number made of question and row
MOST_QUESTIONS = 1 << (63 - _SHIFT)  # of a pool


def pool(query_ids: Sequence[str], found: Mapping[str, Hits], positives: Sequence[np.ndarray], depth: int) -> pa.Table:
    """The first `depth` hits of every source, joined, less each question's positives (int64 rows).

    Raises InputError for more questions than MOST_QUESTIONS, whose numbers would not fit beside a row.
    """
    if len(query_ids) > MOST_QUESTIONS:
        raise InputError(f"{len(query_ids):,} questions in one pool: at most {MOST_QUESTIONS:,}, cut them into parts")
    keys = {}
    for source, hits in found.items():
        rows = hits.rows[:, :depth]
        questions, ranks = np.nonzero(rows >= 0)
        keys[source] = (_key(questions, rows[questions, ranks]), ranks + 1, hits.scores[questions, ranks])
    answering = _key(
        np.repeat(np.arange(len(query_ids)), [len(rows) for rows in positives]),
        np.concatenate([*positives, np.empty(0, np.int64)]),
    )
    joined = np.sort(np.concatenate([np.empty(0, np.int64), *(key for key, _, _ in keys.values())]))
    joined = joined[np.diff(joined, prepend=-1) != 0]  # np.unique hashes: most of the time of all this
    joined = joined[~np.isin(joined, answering)]
    questions = joined >> _SHIFT
    columns: dict[str, pa.Array] = {
        "query": pa.array(questions.astype(np.int32)),
        "query_id": pa.array(query_ids, pa.string()).take(pa.array(questions)),
        "row": pa.array(joined & ((1 << _SHIFT) - 1)),
    }
    for source, (key, ranks, scores) in keys.items():
        places = np.searchsorted(joined, key)
        inside = (
            (places < len(joined)) & (joined[np.minimum(places, len(joined) - 1)] == key)
            if len(joined)
            else (np.zeros(len(key), bool))
        )
        missing = np.ones(len(joined), bool)
        missing[places[inside]] = False
        rank, score = np.zeros(len(joined), np.int32), np.zeros(len(joined), np.float32)
        rank[places[inside]], score[places[inside]] = ranks[inside], scores[inside]
        columns[f"rank:{source}"] = pa.array(rank, mask=missing)
        columns[f"score:{source}"] = pa.array(score, mask=missing)
    return pa.table(columns)


def sources_of(table: pa.Table) -> list[str]:
    """The sources of a pool, in the order of its columns."""
    return [name.removeprefix("rank:") for name in table.column_names if name.startswith("rank:")]


def without_answers(table: pa.Table, contains: Callable[[int, np.ndarray], np.ndarray]) -> pa.Table:
    """The pool without the passages that answer: contains(question's number, rows int64 [n]) -> bool [n]."""
    rows = table["row"].to_numpy()
    dropped = np.zeros(len(table), bool)
    for question, start, end in _questions(table):
        dropped[start:end] = contains(question, rows[start:end])
    return table.filter(pa.array(~dropped))


def seeded_order(seed: int, query_ids: Sequence[str] | pa.Array, rows: np.ndarray, stream: int = 0) -> np.ndarray:
    """Random numbers uint64 [n], a function of (seed, stream, question's id, row) alone: sorting by them shuffles.

    So a question's order depends on no other question, no part and no machine. splitmix64 over xxh3 of the id.
    """
    ids = pa.array(query_ids, pa.string()).dictionary_encode()  # each is hashed once
    hashes = [xxhash.xxh3_64_intdigest(f"{stream} {id}".encode(), seed) for id in ids.dictionary.to_pylist()]
    state = np.array(hashes, np.uint64)[ids.indices.to_numpy()]
    with np.errstate(over="ignore"):
        state = state + (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def to_score(
    table: pa.Table, known: np.ndarray, *, wanted: int, threshold: float, seed: int, all_pairs: bool = False
) -> np.ndarray:
    """Which pairs a re-ranker is to score next: positions int64, none when it is done.

    known: float32 [pairs], NaN for what is not scored. Each question's pairs are scored in its seeded order, as many
    at a time as are sure to be needed, until the first `wanted` below the threshold are known or all are scored. So
    what `sample` draws is the same whatever was scored before, with another seed or threshold too.
    """
    fresh = np.isnan(known)
    if all_pairs:
        return np.flatnonzero(fresh)
    hopeful = fresh | (known < threshold)
    keys = seeded_order(seed, table["query_id"].combine_chunks(), table["row"].to_numpy(), SCORING)
    chosen = []
    for _, start, end in _questions(table):
        order = start + np.argsort(keys[start:end], kind="stable")
        # At best the first `wanted` that are not known to fail are the ones: every unknown among them is needed.
        needed = np.cumsum(hopeful[order]) <= wanted
        chosen.append(order[needed & fresh[order]])
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)


def sample(
    table: pa.Table,
    known: np.ndarray | None,
    *,
    query_ids: Sequence[str],
    positives: Sequence[np.ndarray],
    undenoised: int,
    denoised: int,
    threshold: float,
    seed: int,
) -> pa.Table:
    """Each question's negatives: `undenoised` from its whole pool, `denoised` more from what is below the threshold.

    The denoised ones are the first in the order that they were scored in, the others the first in an order of their
    own, less the denoised ones: no passage comes twice. One row for each question, an empty list where it has no
    candidate:

        query_id, positives list<int64>, negatives list<int64>, denoised list<bool>, probability list<float32>
        (null: never scored), and for each source S `rank:S` list<int32> (null: not found)
    """
    sources = sources_of(table)
    rows = table["row"].to_numpy()
    ids = table["query_id"].combine_chunks()
    scoring, drawing = (seeded_order(seed, ids, rows, stream) for stream in (SCORING, DRAWING))
    scored = np.full(len(table), np.nan, np.float32) if known is None else known
    chosen: list[np.ndarray] = [np.empty(0, np.int64)] * len(query_ids)
    clean: list[np.ndarray] = [np.empty(0, bool)] * len(query_ids)
    for question, start, end in _questions(table):
        order = start + np.argsort(scoring[start:end], kind="stable")
        low = order[scored[order] < threshold][:denoised]
        order = start + np.argsort(drawing[start:end], kind="stable")
        rest = order[~np.isin(order, low)][:undenoised]
        chosen[question] = np.concatenate([low, rest])
        clean[question] = np.arange(len(low) + len(rest)) < len(low)
    counts = [len(places) for places in chosen]
    every = np.concatenate([*chosen, np.empty(0, np.int64)])
    probability = scored[every]

    def lists(values: pa.Array, lengths: Sequence[int]) -> pa.Array:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), values)

    columns = {
        "query_id": pa.array(query_ids, pa.string()),
        "positives": lists(pa.array(np.concatenate([*positives, np.empty(0, np.int64)])), [len(p) for p in positives]),
        "negatives": lists(pa.array(rows[every]), counts),
        "denoised": lists(pa.array(np.concatenate([*clean, np.empty(0, bool)])), counts),
        "probability": lists(pa.array(probability, mask=np.isnan(probability)), counts),
    }
    for source in sources:
        ranks = table[f"rank:{source}"].combine_chunks().take(pa.array(every))
        columns[f"rank:{source}"] = lists(ranks, counts)
    return pa.table(columns)


def short(table: pa.Table, asked: int) -> list[str]:
    """Ids of the questions that `sample` had fewer than `asked` negatives for."""
    counts = np.diff(table["negatives"].combine_chunks().offsets.to_numpy())
    ids = table["query_id"].to_pylist()
    return [ids[number] for number in np.flatnonzero(counts < asked)]


def _key(questions: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return (questions.astype(np.int64) << _SHIFT) | rows


def _questions(table: pa.Table) -> list[tuple[int, int, int]]:
    """(question's number, first position, end) of each question that has candidates."""
    questions = table["query"].to_numpy()
    starts = np.flatnonzero(np.diff(questions, prepend=-1)) if len(questions) else np.empty(0, np.int64)
    ends = np.append(starts, len(questions))[1:]
    return [(int(questions[a]), int(a), int(b)) for a, b in zip(starts, ends, strict=True)]
