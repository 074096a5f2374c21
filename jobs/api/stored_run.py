"""A run of a store: the hits of a query set, as data frames and as files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from riptide.base.arguments import refuse_unknown_names
from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.search.run_files import is_json_lines, write_json_lines, write_trec
from riptide.indexing.search.runs import SCHEMA, read_hits
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.jobs.evaluation.frames import import_frames

if TYPE_CHECKING:
    import pandas
    import polars


@refuse_unknown_names
class Run:
    """A stored run: the ranked hits of a query set.

    Attributes:
        name: Its name: runs/NAME of the store.
        source: The source that was searched, in the grammar of sources.
        split: The split of the queries.
        num_hits: The number of hits of all queries.
    """

    def __init__(self, store: Store, artifact: Artifact):
        self._store, self.artifact = store, artifact
        self.name, self.num_hits = artifact.name, int(artifact.notes["hits"])
        self.source, self.split = str(artifact.config["source"]), str(artifact.config["split"])

    def __repr__(self) -> str:
        return f"Run({self.name!r}, {self.source!r}, split={self.split!r}, {self.num_hits:,} hits)"

    def table(self) -> pa.Table:
        """Returns the hits in the order of queries and ranks: columns query_id, id, row and score (float32).

        Ids are those of documents if the search was by document.
        """
        blocks = list(read_hits(self.artifact, Corpus.open(self._store)))
        return pa.concat_tables(blocks) if blocks else SCHEMA.empty_table()

    def to_pandas(self) -> pandas.DataFrame:
        """Returns the hits as a data frame: columns query_id, rank (from 1), id, row and score.

        Raises:
            InputError: If pandas is not installed.
        """
        columns = {name: column.to_numpy() for name, column in self._columns().items()}
        return import_frames("pandas").DataFrame(columns)

    def to_polars(self) -> polars.DataFrame:
        """Returns the hits as `to_pandas` does. Raises InputError if polars is not installed."""
        frames = import_frames("polars")
        return frames.from_arrow(pa.table(self._columns()))

    def _columns(self) -> dict[str, pa.ChunkedArray]:
        """Returns the columns of the data frames by name: query_id, rank, id, row and score."""
        table = self.table()
        queries = table["query_id"].to_numpy()
        starts = np.flatnonzero(np.append(True, queries[1:] != queries[:-1])) if len(queries) else np.empty(0, np.int64)
        ranks = np.arange(len(queries)) - np.repeat(starts, np.diff(np.append(starts, len(queries)))) + 1
        columns: dict[str, Any] = {"query_id": table["query_id"], "rank": pa.chunked_array([ranks])}
        return columns | {name: table[name] for name in table.column_names}

    def write_trec(self, path: str, *, overwrite: bool = False) -> None:
        """Writes the hits to a TREC file.

        Raises:
            InputError: If the file exists with other content and may not be replaced, or if an id has white space.
        """
        write_trec(read_hits(self.artifact, Corpus.open(self._store)), path, self.name, overwrite=overwrite)

    def write_json_lines(self, path: str, *, overwrite: bool = False) -> None:
        """Writes the hits in the JSON Lines format, with query_id, id, rank and score. The file extension is .jsonl.

        Raises:
            InputError: If the file exists with other content and may not be replaced, or has another ending.
        """
        if not is_json_lines(path):
            raise InputError(f"{path}: expected the ending .jsonl, by which evaluate and compare know the form")
        write_json_lines(read_hits(self.artifact, Corpus.open(self._store)), path, overwrite=overwrite)
