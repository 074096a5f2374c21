"""The Parquet format with any columns: one file, or a folder of files with the same columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from riptide.base.errors import InputError
from riptide.indexing.files.columns import PassageColumns, PassageNames, QueryColumns, TableColumns, named_columns
from riptide.indexing.files.parquet_rows import (
    ParquetRows,
    decompressed_bytes,
    parquet_blocks,
    parquet_objects,
    read_parquet_columns,
)
from riptide.indexing.files.raw import FilePiece
from riptide.indexing.files.rows import Row, RowReader, halve_batch, read_document
from riptide.indexing.formats.tables import QueryRow, TableFormat, named_passages


class Parquet(TableFormat):
    """The Parquet format. If a corpus has the column names of BEIR, these are used and no columns are chosen."""

    name = "parquet"
    title = "Parquet"
    endings = ("parquet",)
    is_compressible = False
    corpus_files = ("*.parquet",)
    query_files = ("queries.parquet", "queries.*.parquet")
    has_many_files = True
    section = r"""
One file, or a folder of `*.parquet` files with the same columns (if some are called `corpus*`, only these). This
Python writes the example:

`manual.parquet`
```python
import pyarrow as pa
import pyarrow.parquet as pq

titles, texts = ["Sails", None, "Ropes"], ["Hoist.", "Reef.", "Coil."]
table = pa.table({"page": [7, 8, 9], "caption": titles, "passage": texts, "part": [1, 1, 2]})
pq.write_table(table, "manual.parquet")
```
```bash
riptide import-corpus --store data/manual --source manual.parquet --id page --title caption --filters part int64
```
Passages:
```json
{"id": "7", "title": "Sails", "text": "Hoist.", "metadata": {"part": 1}}
{"id": "8", "title": "", "text": "Reef.", "metadata": {"part": 1}}
{"id": "9", "title": "Ropes", "text": "Coil.", "metadata": {"part": 2}}
```

Titles and texts are string columns; nulls, and paths into structs, are treated as in JSON lines. NaN and
infinities count as null. A string column `metadata` holds a JSON object per row. If the columns are called as
in BEIR (`_id` or `id`, and `text`), no other column is recognised as the title than `title`.

Queries with their judgements; ids may be integers:

`judged.parquet`
```python
import pyarrow as pa
import pyarrow.parquet as pq

queries = ["how to hoist", "how to hoist", "how to coil"]
table = pa.table({"query_id": [1, 1, 2], "query": queries, "passage_id": [7, 8, 9], "score": [2, 1, 1]})
pq.write_table(table, "judged.parquet")
```
```bash
riptide import-queries --store data/manual --source judged.parquet
```

Judgements of `test`:
```json
{"query": "1", "passage": "7", "score": 2}
{"query": "1", "passage": "8", "score": 1}
{"query": "2", "passage": "9", "score": 1}
```
"""

    def find_corpus(self, names: Sequence[str]) -> list[str]:
        """Returns the Parquet files that are called corpus*; without any, all that are not queries."""
        files = self.match(names, self.corpus_files)
        queries = self.find_queries(files)
        return [name for name in files if name.startswith("corpus")] or [name for name in files if name not in queries]

    def read_table(self, file: str) -> TableColumns:
        return read_parquet_columns(file)

    def choose_columns(self, file: str, names: PassageNames) -> PassageColumns | None:
        if names == PassageNames() and _beir_id(self.read_table(file).names):
            return None
        return super().choose_columns(file, names)

    def shown_columns(self, file: str, columns: PassageColumns | None) -> PassageColumns | None:
        if columns is not None:
            return columns
        table = self.read_table(file)
        return PassageColumns(table, "text", _beir_id(table.names), "title" if "title" in table.names else None)

    def open_rows(self, file: str, table: TableColumns | None = None) -> RowReader:
        return ParquetRows(file)

    def blocks(self, piece: FilePiece, columns: PassageColumns | None = None) -> Iterator[FilePiece]:
        return parquet_blocks(piece, None if columns is None else columns.columns_to_read)

    def halve(self, block: FilePiece) -> tuple[FilePiece, FilePiece]:
        return halve_batch(block)

    def source_bytes(self, piece: FilePiece) -> int:
        return decompressed_bytes(piece)

    def query_blocks(self, piece: FilePiece, table: TableColumns) -> Iterator[FilePiece]:
        return parquet_blocks(piece)

    def read_passages(self, block: FilePiece, columns: PassageColumns | None) -> Iterator[Row]:
        names = block.batch.schema.names
        if columns is not None:
            wanted = columns.columns_to_read or columns.role_columns
            if any(name not in names for name in wanted):  # also true for a path to a nested field
                table = read_parquet_columns(block.file)
                if missing := table.missing(wanted):
                    raise InputError(
                        f"{block.file}: found {named_columns(table.shown)}, expected {missing[0]} as in the first "
                        "file; rename the column"
                    )
            yield from named_passages(block, parquet_objects(block), columns)
            return
        id_name = _beir_id(names)
        if id_name is None:
            raise InputError(f"{block.file}: found {named_columns(names)}, expected id or _id, and text; rename them")
        for line, document in parquet_objects(block):
            yield read_document(block, line, document, id_name)

    def query_rows(self, block: FilePiece, table: TableColumns, columns: QueryColumns) -> Iterator[QueryRow]:
        return parquet_objects(block)


PARQUET = Parquet()


def _beir_id(names: Sequence[str]) -> str | None:
    """Returns the id column, "_id" or "id", if the columns have the names of BEIR's fields; None otherwise."""
    return next((name for name in ("_id", "id") if name in names), None) if "text" in names else None
