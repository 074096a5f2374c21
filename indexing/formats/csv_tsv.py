"""The CSV and TSV formats, with any columns, which a header names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import orjson

from riptide.indexing.files import limits
from riptide.indexing.files.columns import PassageColumns, QueryColumns, TableColumns
from riptide.indexing.files.delimited import DelimitedRows, delimited_blocks, read_fields, read_header, row_ends
from riptide.indexing.files.raw import FilePiece, short_repr
from riptide.indexing.files.rows import (
    Row,
    RowReader,
    decode_entities,
    file_and_line,
    halve_text,
    integer_id,
    merge_metadata_fields,
    metadata_text,
    row_error,
)
from riptide.indexing.formats.tables import QueryRow, TableFormat, id_from_content


class DelimitedText(TableFormat):
    """A format of text whose fields are separated by a delimiter and quoted by RFC 4180.

    Attributes:
        delimiter: The delimiter; "": the one that the header has most often.
    """

    delimiter: ClassVar[str]
    is_generic = True
    has_text_values = True

    def read_table(self, file: str) -> TableColumns:
        return read_header(file, self.delimiter)

    def open_rows(self, file: str, table: TableColumns | None = None) -> RowReader:
        assert table is not None
        rows = DelimitedRows(file, table.delimiter)
        rows.take(1)
        return rows

    def blocks(self, piece: FilePiece, columns: PassageColumns | None = None) -> Iterator[FilePiece]:
        assert columns is not None
        return delimited_blocks(piece, columns.table)

    def halve(self, block: FilePiece) -> tuple[FilePiece, FilePiece]:
        return halve_text(block, row_ends(block.data or b""))

    def query_blocks(self, piece: FilePiece, table: TableColumns) -> Iterator[FilePiece]:
        return delimited_blocks(piece, table)

    def read_passages(self, block: FilePiece, columns: PassageColumns | None) -> Iterator[Row]:
        assert columns is not None
        number_of = {name: number for number, name in enumerate(columns.table.names)}
        used = columns.role_columns
        rest = list(dict.fromkeys(columns.metadata or ()))
        if columns.metadata is None:
            rest = [name for name in number_of if name not in used]
        text, title, id = columns.text, columns.title or columns.text, columns.id or columns.text
        lines, values = read_fields(block, columns.table, [number_of[name] for name in (id, title, text, *rest)])
        ids, titles, texts = values[:3]
        if not columns.title:
            titles = [""] * len(texts)
        if columns.decode_entities:
            titles, texts = (list(map(decode_entities, each)) for each in (titles, texts))
        if not columns.id:
            ids = [id_from_content(text, title) for title, text in zip(titles, texts, strict=True)]
        elif "" in ids:
            integer_id(block, lines[ids.index("")], "", columns.id)
        if not rest:
            for line, id, title, text in zip(lines, ids, titles, texts, strict=True):
                yield line, id, title, text, {}
            return
        for line, id, title, text, *others in zip(lines, ids, titles, texts, *values[3:], strict=True):
            fields: dict[str, Any] = {name: value for name, value in zip(rest, others, strict=True) if value}
            if "metadata" in fields:
                fields["metadata"] = metadata_text(block, line, fields["metadata"])
                fields = merge_metadata_fields(block, line, fields)
            yield line, id, title, text, fields

    def query_rows(self, block: FilePiece, table: TableColumns, columns: QueryColumns) -> Iterator[QueryRow]:
        lines, values = read_fields(block, table, range(len(table.names)))
        for line, *fields in zip(lines, *values, strict=True):
            row: dict[str, Any] = {name: value for name, value in zip(table.names, fields, strict=True) if value}
            row.setdefault(columns.text, "")
            if columns.relevant in row:
                row[columns.relevant] = _split_ids(block, line, row[columns.relevant], columns.relevant)
            if "metadata" in row:
                row["metadata"] = metadata_text(block, line, row["metadata"])
            yield line, row


class Csv(DelimitedText):
    """The CSV format; the delimiter is detected from the header."""

    name = "csv"
    title = "CSV"
    delimiter = ""
    endings = ("csv",)
    corpus_files = ("corpus.csv", "passages.csv", "documents.csv")
    query_files = ("queries.csv", "queries.*.csv")
    section = r"""
The first line names the columns. Here all options are given:

`faq.csv`
```csv
number,heading,answer,topic,author
1,Returns,"Send it back
within 30 days, ""as new"".",orders,Ann
2,,We answer within a day.,support,
```
```bash
riptide import-corpus --store data/faq --source faq.csv \
    --id number --title heading --text answer --metadata topic
```

The import prints which column is taken as what, and which are left out:

```text
columns of …/faq.csv: id = number, title = heading, text = answer, metadata = topic, left out = author
```

Passages:
```json
{"id": "1", "title": "Returns", "text": "Send it back\nwithin 30 days, \"as new\".", "metadata": {"topic": "orders"}}
{"id": "2", "title": "", "text": "We answer within a day.", "metadata": {"topic": "support"}}
```

- Fields are quoted as in RFC 4180: a field with the delimiter, a quote or a newline stands in quotes, and its own
  quotes are doubled. A stray quote, an unclosed quote, a wrong number of fields, an empty line within the file, a
  column without a name and two columns of the same name are refused with the line.
- The delimiter is `,` `;` `|` or a tab: the one that the header has most often.
- Every value is text. An empty field is an empty title or text, and no metadata. A column `metadata` holds a JSON
  object.

Queries with their judgements, a row per query:

`asked.csv`
```csv
query,relevant
how long can I return it,1
how fast do you answer,2
when will it be dealt with,1 2
```
```bash
riptide import-queries --store data/faq --source asked.csv --split dev
```
```text
columns of …/asked.csv: id = a hash of the text, text = query, relevant = relevant, score = 1, metadata = none
```

Queries:
```json
{"id": "956495afa6599dde5112027cecd28a36", "text": "how long can I return it", "metadata": {}}
{"id": "e0c6d4d970d01a04e0bb19468e80131b", "text": "how fast do you answer", "metadata": {}}
{"id": "09caa4bee444e2a2309a86d796e183c0", "text": "when will it be dealt with", "metadata": {}}
```

Judgements of `dev`:
```json
{"query": "956495afa6599dde5112027cecd28a36", "passage": "1", "score": 1}
{"query": "e0c6d4d970d01a04e0bb19468e80131b", "passage": "2", "score": 1}
{"query": "09caa4bee444e2a2309a86d796e183c0", "passage": "1", "score": 1}
{"query": "09caa4bee444e2a2309a86d796e183c0", "passage": "2", "score": 1}
```

A folder of both:

`shop/corpus.csv`
```csv
id,text
p1,Blue paint
p2,Red paint
```

`shop/queries.dev.csv`
```csv
qid,query,relevant
q1,something blue,p1
q2,any paint,"[""p1"", ""p2""]"
```
```bash
riptide import-corpus --store data/shop --source shop
```

Judgements of `dev`:
```json
{"query": "q1", "passage": "p1", "score": 1}
{"query": "q2", "passage": "p1", "score": 1}
{"query": "q2", "passage": "p2", "score": 1}
```
"""


class Tsv(DelimitedText):
    """The TSV format: fields are separated by tabs."""

    name = "tsv"
    title = "TSV"
    delimiter = "\t"
    endings = ("tsv",)
    corpus_files = ("corpus.tsv", "passages.tsv", "documents.tsv")
    query_files = ("queries.tsv", "queries.*.tsv")
    section = r"""
As CSV, with tabs, quotes included. Without options, the columns are recognised by [well-known
names](#which-column-is-what):

`passages.tsv`
```tsv
docid	title	contents	lang
a1	Tides	The moon pulls the sea.	en
a2	Ebbe	Das Wasser geht zurück.	de
```
```bash
riptide import-corpus --store data/tides --source passages.tsv --filters lang string
```
```text
columns of …/passages.tsv: id = docid, title = title, text = contents, metadata = lang
```

Passages:
```json
{"id": "a1", "title": "Tides", "text": "The moon pulls the sea.", "metadata": {"lang": "en"}}
{"id": "a2", "title": "Ebbe", "text": "Das Wasser geht zurück.", "metadata": {"lang": "de"}}
```

A `.tsv` without a header is MS MARCO's: two columns, id and text, without quoting. One with other columns needs a
header line.

Queries with their judgements, a row per judgement:

`judged.tsv`
```tsv
query_id	query	passage_id	score
q1	why is there a tide	a1	2
q1	why is there a tide	a2	0
q2	wann ist Ebbe	a2	1
```
```bash
riptide import-queries --store data/tides --source judged.tsv
```

Judgements of `test`:
```json
{"query": "q1", "passage": "a1", "score": 2}
{"query": "q1", "passage": "a2", "score": 0}
{"query": "q2", "passage": "a2", "score": 1}
```
"""


CSV, TSV = Csv(), Tsv()


def _split_ids(piece: FilePiece, line: int, text: str, name: str) -> list[Any]:
    """Splits a field into ids: separated by spaces, or a JSON list, whose ids may contain spaces."""
    if not text.startswith("["):
        ids = text.split(maxsplit=limits.MAX_VALUES)
        if len(ids) > limits.MAX_VALUES:
            actual = f"more than {limits.MAX_VALUES:,} ids in {name}"
            raise row_error(piece, line, actual, "fewer", "write a row per judgement")
        return ids
    limits.check_value_count(file_and_line(piece, line), text)
    try:
        return list(orjson.loads(text))
    except orjson.JSONDecodeError:
        raise row_error(
            piece, line, f"{name} {short_repr(text)}", "ids separated by spaces, or a JSON list", "fix it"
        ) from None
