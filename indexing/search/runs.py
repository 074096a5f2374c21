"""Reads and writes runs: the hits of a search as an artifact (Parquet, one part per block of queries)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from riptide.base.cuts import Cuts
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.exact import Hits
from riptide.indexing.store.artifact import Artifact

SCHEMA = pa.schema([("query_id", pa.string()), ("id", pa.string()), ("row", pa.int64()), ("score", pa.float32())])


def hits_table(query_ids: Sequence[str], hits: Hits, ids: np.ndarray) -> pa.Table:
    """Converts hits to a table with a row per hit, ordered by query and rank; missing hits are left out.

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
    """Writes the table of a part as a Parquet file."""
    pq.write_table(table, path, compression="zstd", use_dictionary=["query_id", "id"])


def read_run(artifact: Artifact) -> Iterator[pa.Table]:
    """Yields the tables of a run, one per block of queries, in order."""
    for part in artifact.numbered_parts("part"):
        # ParquetFile, as pq.read_table would import pyarrow.dataset, which takes 0.3 s.
        with pq.ParquetFile(artifact.local_path(part)) as file:
            yield file.read().select(SCHEMA.names).cast(SCHEMA)


def is_run_of_documents(run: Artifact) -> bool:
    """Returns whether the hits of a run are documents, each represented by its best passage."""
    return run.config.get("by") == "document"


def read_hits(run: Artifact, corpus: Corpus) -> Iterator[pa.Table]:
    """Yields the tables of `read_run`; if the hits are documents, the ids are those of documents."""
    for block in read_run(run):
        if is_run_of_documents(run):
            ids = corpus.documents(block["row"].to_numpy())
            block = block.set_column(1, "id", pa.array(ids, pa.string()))
        yield block


class SearchCuts(NamedTuple):
    """The numbers of queries and pairs of a search that were cut to a length limit.

    Attributes:
        queries: The queries, by the embeddings that they were searched in.
        pairs: The pairs of a query and a passage that a re-ranker scored.
    """

    queries: dict[str, Cuts]
    pairs: Cuts


def search_cuts(facts: Iterable[Mapping[str, Any]]) -> SearchCuts:
    """Sums the counts in the facts of parts of a run or of candidates; parts of earlier releases have none."""
    queries: dict[str, Cuts] = {}
    pairs = Cuts()
    for each in facts:
        for name, counts in each.get("query_cuts", {}).items():
            queries[name] = queries.get(name, Cuts()) + Cuts(**counts)
        pairs += Cuts(**each.get("pair_cuts", {}))
    return SearchCuts(queries, pairs)
