"""The DPR format: psgs_w100.tsv, and files of queries with lists of answers."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from riptide.base.errors import InputError
from riptide.indexing.files import limits
from riptide.indexing.files.columns import PassageColumns, TableColumns, is_query_header
from riptide.indexing.files.raw import FilePiece, Lines, short_repr, split_tsv_line
from riptide.indexing.files.rows import Row, RowReader, integer_id, quoted_rows, row_error
from riptide.indexing.files.start import FileStart
from riptide.indexing.formats.format import CorpusFormat

HEADER = ["id", "text", "title"]


class Dpr(CorpusFormat):
    """The DPR format. Query files name no split and have line numbers as ids, so each is imported by its path."""

    name = "dpr"
    title = "DPR"
    endings = ("tsv", "csv")
    corpus_files = ("psgs_w100.tsv",)
    section = r"""
Passages: the header `id text title`, then these three columns, separated by tabs, quoted as by Python's csv module,
one row per line. Queries: the query, a tab, and a Python list of answers; they have the ids q0, q1, … and the
metadata `answers`, which `evaluate` uses for `Answer@K`.

`psgs_w100.tsv`
```tsv
id	text	title
1	"Aaron is a ""prophet""."	Aaron
2	He was the brother of Moses.	Aaron
```
```bash
riptide import-corpus --store data/wiki --source psgs_w100.tsv
```

Passages:
```json
{"id": "1", "title": "Aaron", "text": "Aaron is a \"prophet\".", "metadata": {}}
{"id": "2", "title": "Aaron", "text": "He was the brother of Moses.", "metadata": {}}
```

`nq-dev.qa.csv`
```tsv
who was aaron	['a prophet', "Moses' brother"]
whose brother was he	['Moses']
where did he live	['Egypt']
```
```bash
riptide import-queries --store data/wiki --source nq-dev.qa.csv --queries nq-dev
```

Queries:
```json
{"id": "q0", "text": "who was aaron", "metadata": {"answers": ["a prophet", "Moses' brother"]}}
{"id": "q1", "text": "whose brother was he", "metadata": {"answers": ["Moses"]}}
{"id": "q2", "text": "where did he live", "metadata": {"answers": ["Egypt"]}}
```
"""

    def detects_corpus(self, start: FileStart) -> bool:
        return start.ending == "tsv" and start.fields == HEADER

    def detects_queries(self, start: FileStart) -> bool:
        if not self.has_ending(start) or is_query_header(start.fields):
            return False
        last = start.fields[-1]
        return len(start.fields) > 1 and last.startswith("[") and last.endswith("]")

    def open_rows(self, file: str, table: TableColumns | None = None) -> RowReader:
        """Returns a reader that starts after the header. Raises InputError if the header is another one."""
        lines = Lines(file)
        header = lines.take(1)
        if header and split_tsv_line(f"{file}:1", (header.data or b"").decode("utf-8", "replace")) != HEADER:
            raise InputError(
                f"{file}:1: found {short_repr(header.data)}, expected DPR's header id<TAB>text<TAB>title; "
                "add it or name another format"
            )
        return lines

    def read_passages(self, block: FilePiece, columns: PassageColumns | None) -> Iterator[Row]:
        for line, (id, text, title) in quoted_rows(block, "3: id<TAB>text<TAB>title", 3):
            yield (line, id or integer_id(block, line, "", "id"), title, text, {})

    def read_queries(self, block: FilePiece) -> Iterator[Row]:
        for line, (query, literal) in quoted_rows(block, "2: question<TAB>['answer', ...]", 2):
            try:
                answers = ast.literal_eval(literal) if len(literal) <= limits.MAX_ANSWERS else None
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                answers = None
            if type(answers) is not list or not all(type(answer) is str for answer in answers):
                raise row_error(
                    block, line, f"answers {short_repr(literal)}", "a Python list of strings", "fix the line"
                )
            yield (line, f"q{line - 1}", "", query, {"answers": answers})


DPR = Dpr()
