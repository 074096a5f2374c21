"""Runs: what a search found, as an artifact (Parquet by block of queries) and as a TREC file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from indexing.artifact import Artifact
from indexing.exact import Hits
from indexing.formats import text_lines
from indexing.raw import Lines
from retriever.errors import InputError

SCHEMA = pa.schema([("query_id", pa.string()), ("id", pa.string()), ("row", pa.int64()), ("score", pa.float32())])


def hits_table(query_ids: Sequence[str], hits: Hits, ids: np.ndarray) -> pa.Table:
    """Hits as rows in the order of queries and ranks. ids: the passages', object [q, k]; a row of -1 is no hit."""
    kept = hits.rows >= 0
    queries = np.repeat(np.asarray(query_ids, object), kept.sum(axis=1))
    columns = [pa.array(queries), pa.array(ids[kept]), pa.array(hits.rows[kept]), pa.array(hits.scores[kept])]
    return pa.table(columns, schema=SCHEMA)


def write_parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd", use_dictionary=["query_id", "id"])


def read_run(artifact: Artifact) -> Iterator[pa.Table]:
    """A run's blocks of queries, in order."""
    for part in artifact.group("part"):
        yield pq.read_table(artifact.local(part), schema=SCHEMA)


def write_trec(tables: Iterable[pa.Table], path: str, tag: str) -> None:
    """Export `query Q0 passage rank score tag` lines; the file appears when it is whole.

    The tools that read such files sort by score, equal ones in an order of their own: so a score that equals the one
    before it is printed as the next smaller float32. Raises InputError for ids with white space.
    """
    target = result_path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            for table in tables:
                query_ids, ids = table["query_id"].to_pylist(), table["id"].to_pylist()
                starts = _starts(query_ids)
                ranks = np.arange(len(ids)) - np.repeat(starts, np.diff([*starts, len(ids)]))
                scores = falling(table["score"].to_numpy(), ranks)
                for query, id, rank, score in zip(query_ids, ids, ranks, scores, strict=True):
                    line = f"{query} Q0 {id} {rank + 1} {score} {tag}\n"
                    if len(line.split()) != 6:
                        raise InputError(
                            f"{path}: query id {query!r} or passage id {id!r} is empty or has white space: no TREC file"
                        )
                    file.write(line)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def result_path(path: str) -> Path:
    """Where a file of results goes, its folder made. Raises InputError where no file can be."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: no folder {target.parent}: {error.strerror}; name another file") from error
    if target.is_dir():
        raise InputError(f"{path}: this is a folder; name a file")
    return target


def falling(scores: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """float32 scores made strictly falling within each query (rank 0 starts one), by the least there is."""
    fallen = scores.astype(np.float32).copy()
    equal = (fallen[1:] >= fallen[:-1]) & (ranks[1:] > 0)
    while equal.any():
        for at in np.flatnonzero(equal) + 1:
            if fallen[at] >= fallen[at - 1]:
                fallen[at] = np.nextafter(fallen[at - 1], np.float32(-np.inf))
        equal = (fallen[1:] >= fallen[:-1]) & (ranks[1:] > 0)
    return fallen


def read_trec(path: str) -> pa.Table:
    """A TREC run file as query_id, id, score. Raises InputError with its line."""
    lines = Lines(path)
    queries: list[str] = []
    ids: list[str] = []
    scores: list[float] = []
    while piece := lines.take(1 << 18):
        for number, line in text_lines(piece):
            fields = line.split()
            try:
                query, _, id, _, score, _ = fields
                scores.append(float(score))
                if math.isnan(scores[-1]):
                    raise ValueError
            except ValueError:
                raise InputError(
                    f"{path}:{number}: found {line[:60]!r}, expected `query Q0 passage rank score tag`; mend the line"
                ) from None
            queries.append(query)
            ids.append(id)
    if not queries:
        raise InputError(f"{path}: the run is empty; search again")
    table = pa.table({"query_id": queries, "id": ids, "score": pa.array(scores, pa.float64())})
    if len(table.group_by(["query_id", "id"]).aggregate([])) < len(table):
        seen: set[tuple[str, str]] = set()
        for number, hit in enumerate(zip(queries, ids, strict=True), 1):
            if hit in seen:
                query, id = hit
                raise InputError(f"{path}:{number}: passage {id!r} comes a second time for query {query!r}; remove one")
            seen.add(hit)
    return table


def _starts(query_ids: Sequence[str]) -> np.ndarray:
    return np.array([i for i, query in enumerate(query_ids) if i == 0 or query != query_ids[i - 1]], np.int64)
