"""Runs: the hits of a search as an artifact (Parquet, one part per block of queries) or as a TREC file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from indexing.corpus.corpus import Corpus
from indexing.exact import Hits
from indexing.files.raw import Lines
from indexing.files.rows import text_lines
from indexing.store.artifact import Artifact
from indexing.store.result_files import atomic_file
from retriever.cuts import Cuts
from retriever.errors import InputError

SCHEMA = pa.schema([("query_id", pa.string()), ("id", pa.string()), ("row", pa.int64()), ("score", pa.float32())])


def hits_table(query_ids: Sequence[str], hits: Hits, ids: np.ndarray) -> pa.Table:
    """Returns hits as rows in the order of queries and ranks.

    Args:
        query_ids: Ids of the q queries.
        hits: Scores and rows [q, k]; row -1 means no hit.
        ids: Ids of the passages, object [q, k].
    """
    is_hit = hits.rows >= 0
    queries = np.repeat(np.asarray(query_ids, object), is_hit.sum(axis=1))
    columns = [pa.array(queries), pa.array(ids[is_hit]), pa.array(hits.rows[is_hit]), pa.array(hits.scores[is_hit])]
    return pa.table(columns, schema=SCHEMA)


def write_parquet(table: pa.Table, path: Path) -> None:
    """Writes a block of queries as a part of a run."""
    pq.write_table(table, path, compression="zstd", use_dictionary=["query_id", "id"])


def read_run(artifact: Artifact) -> Iterator[pa.Table]:
    """Yields the blocks of queries of a run, in order."""
    for part in artifact.numbered_parts("part"):
        # pq.read_table would import pyarrow.dataset, which takes 0.3 s.
        with pq.ParquetFile(artifact.local_path(part)) as file:
            yield file.read().select(SCHEMA.names).cast(SCHEMA)


def is_run_of_documents(run: Artifact) -> bool:
    """Returns whether the hits of a run are documents, each as its best passage."""
    return run.config.get("by") == "document"


def read_hits(run: Artifact, corpus: Corpus) -> Iterator[pa.Table]:
    """Yields the blocks of queries of a run as `read_run`, with ids of documents if the hits are documents."""
    for block in read_run(run):
        if is_run_of_documents(run):
            ids = corpus.documents(block["row"].to_numpy())
            block = block.set_column(1, "id", pa.array(ids, pa.string()))
        yield block


class SearchCuts(NamedTuple):
    """Counts of the texts of a search that were cut to a length limit.

    Attributes:
        queries: The queries, by the embeddings that they were searched in.
        pairs: The pairs of a query and a passage that a re-ranker scored.
    """

    queries: dict[str, Cuts]
    pairs: Cuts


def search_cuts(facts: Iterable[Mapping[str, Any]]) -> SearchCuts:
    """Returns the counts in the facts of the parts of a run or of candidates; earlier releases did not count."""
    queries: dict[str, Cuts] = {}
    pairs = Cuts()
    for each in facts:
        for name, counts in each.get("query_cuts", {}).items():
            queries[name] = queries.get(name, Cuts()) + Cuts(**counts)
        pairs += Cuts(**each.get("pair_cuts", {}))
    return SearchCuts(queries, pairs)


def write_trec(tables: Iterable[pa.Table], path: str, tag: str, *, overwrite: bool = False) -> None:
    """Writes `query Q0 passage rank score tag` lines; the file appears when it is complete.

    Tools that read TREC files sort by score and order equal scores in their own way. So a score that equals the
    previous one is written as the next smaller float32.

    Args:
        tables: Blocks of a run, in order.
        path: The file.
        tag: Name of the run.
        overwrite: Replace a file that has other content.

    Raises:
        InputError: If an id is empty or contains white space, or if the file exists with other content.
    """
    with atomic_file(path, overwrite=overwrite) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for table in tables:
            query_ids, ids = table["query_id"].to_pylist(), table["id"].to_pylist()
            starts = _first_positions(query_ids)
            ranks = np.arange(len(ids)) - np.repeat(starts, np.diff([*starts, len(ids)]))
            scores = strictly_falling(table["score"].to_numpy(), ranks)
            for query, id, rank, score in zip(query_ids, ids, ranks, scores, strict=True):
                line = f"{query} Q0 {id} {rank + 1} {score} {tag}\n"
                if len(line.split()) != 6:
                    raise InputError(
                        f"{path}: query id {query!r} or passage id {id!r} is empty or has white space: no TREC file"
                    )
                file.write(line)


def strictly_falling(scores: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Returns float32 scores that decrease strictly within each query; an equal score becomes the next lower float32.

    Args:
        scores: Scores in the order of queries and ranks, [n].
        ranks: Rank of each score, [n]; 0 starts a query.
    """
    fallen = scores.astype(np.float32).copy()
    equal = (fallen[1:] >= fallen[:-1]) & (ranks[1:] > 0)
    while equal.any():
        for at in np.flatnonzero(equal) + 1:
            if fallen[at] >= fallen[at - 1]:
                fallen[at] = np.nextafter(fallen[at - 1], np.float32(-np.inf))
        equal = (fallen[1:] >= fallen[:-1]) & (ranks[1:] > 0)
    return fallen


def read_trec(path: str) -> pa.Table:
    """Returns a TREC run file as columns query_id, id, score. Raises InputError with the line for a bad file."""
    lines = Lines(path)
    queries: list[str] = []
    ids: list[str] = []
    scores: list[float] = []
    while piece := lines.take(1 << 18):
        for number, line in text_lines(piece):
            fields = line.split(maxsplit=6)
            try:
                query, _, id, _, score, _ = fields
                scores.append(float(score))
                if math.isnan(scores[-1]):
                    raise ValueError
            except ValueError:
                raise InputError(
                    f"{path}:{number}: found {line[:60]!r}, expected `query Q0 passage rank score tag`; fix the line"
                ) from None
            queries.append(query)
            ids.append(id)
    if not queries:
        raise InputError(f"{path}: the run is empty; search again")
    table = pa.table({"query_id": queries, "id": ids, "score": pa.array(scores, pa.float64())})
    # A number per pair of query and passage; group_by of pyarrow would import pyarrow.dataset, which takes 0.3 s.
    query_codes, id_codes = (table[name].combine_chunks().dictionary_encode() for name in ("query_id", "id"))
    pairs = query_codes.indices.to_numpy().astype(np.int64) * len(id_codes.dictionary) + id_codes.indices.to_numpy()
    if len(np.unique(pairs)) < len(table):
        seen: set[tuple[str, str]] = set()
        for number, hit in enumerate(zip(queries, ids, strict=True), 1):
            if hit in seen:
                query, id = hit
                raise InputError(f"{path}:{number}: passage {id!r} comes a second time for query {query!r}; remove one")
            seen.add(hit)
    return table


def _first_positions(query_ids: Sequence[str]) -> np.ndarray:
    """Returns the position of the first hit of each query."""
    return np.array([i for i, query in enumerate(query_ids) if i == 0 or query != query_ids[i - 1]], np.int64)
