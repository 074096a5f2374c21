"""A corpus format that the project does not have: lines `ID: TEXT`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from riptide.indexing.files.columns import PassageColumns
from riptide.indexing.files.raw import FilePiece, short_repr
from riptide.indexing.files.rows import Row, row_error, text_lines
from riptide.indexing.formats.format import CorpusFormat


class Toy(CorpusFormat):
    name = "toy"
    title = "Toy"
    endings = ("toy",)
    corpus_files = ("corpus.toy",)
    query_files = ("queries.toy",)
    judgement_files = "qrels/*.tsv"
    section = """
A line per passage or query.

`corpus.toy`

```text
p1: Blue paint
```

```bash
riptide import-corpus --store data/toy --source corpus.toy
```

Passages:

```json
{"id": "p1", "title": "", "text": "Blue paint", "metadata": {}}
```
"""

    def read_passages(self, block: FilePiece, columns: PassageColumns | None) -> Iterator[Row]:
        for line, row in text_lines(block):
            id, colon, text = row.partition(": ")
            if not id or not colon:
                raise row_error(block, line, f"the line {short_repr(row)}", "ID: TEXT", "fix the line")
            yield line, id, "", text, {"line": line}

    def read_queries(self, block: FilePiece) -> Iterator[Row]:
        return self.read_passages(block, None)


TOY = Toy()


@contextmanager
def toy_format() -> Iterator[Toy]:
    """Registers the format, and nothing else, while the context is open."""
    from riptide.indexing.formats.registry import FORMATS  # not above: a registry may import this module

    FORMATS.append(TOY)
    try:
        yield TOY
    finally:
        FORMATS.remove(TOY)
