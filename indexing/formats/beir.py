"""The BEIR format: a folder with corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv."""

from __future__ import annotations

from collections.abc import Iterator

from riptide.indexing.files.columns import PassageColumns
from riptide.indexing.files.raw import FilePiece
from riptide.indexing.files.rows import Row, json_objects, read_document
from riptide.indexing.files.start import FileStart
from riptide.indexing.formats.format import CorpusFormat
from riptide.indexing.formats.jsonl import ENDINGS, read_json_table

FIELDS = {"_id", "title", "text", "metadata"}


class Beir(CorpusFormat):
    """The BEIR format; additional fields are metadata."""

    name = "beir"
    title = "BEIR"
    endings = ENDINGS
    corpus_files = ("corpus.jsonl",)
    query_files = ("queries.jsonl",)
    judgement_files = "qrels/*.tsv"
    section = r"""
A folder. In `corpus.jsonl`: `_id` (string or integer), `text` (string), `title` (string; may be missing or null); all
other fields are metadata, and so are the fields of an object `metadata`. In `queries.jsonl`: `_id`, `text`; all other
fields are metadata. In `qrels/SPLIT.tsv`: a header, then query id, passage id and an integer score, separated by
tabs; or TREC's four columns, without a header.

`scifact/corpus.jsonl`
```json
{"_id": "4983", "title": "Cortex", "text": "Water diffusion in white matter.", "metadata": {"year": 2001}}
{"_id": "5836", "title": "", "text": "Myelodysplasia in mice.", "lang": "en"}
{"_id": 7912, "text": "Stable gene expression."}
```

`scifact/queries.jsonl`
```json
{"_id": "0", "text": "Where does water diffuse?", "metadata": {"kind": "claim"}}
{"_id": "2", "text": "What is stable?"}
{"_id": "4", "text": "Which animals?"}
```

`scifact/qrels/test.tsv`
```tsv
query-id	corpus-id	score
0	4983	1
2	7912	2
```
```bash
riptide import-corpus --store data/scifact --source scifact
```

Passages:
```json
{"id": "4983", "title": "Cortex", "text": "Water diffusion in white matter.", "metadata": {"year": 2001}}
{"id": "5836", "title": "", "text": "Myelodysplasia in mice.", "metadata": {"lang": "en"}}
{"id": "7912", "title": "", "text": "Stable gene expression.", "metadata": {}}
```

Queries:
```json
{"id": "0", "text": "Where does water diffuse?", "metadata": {"kind": "claim"}}
{"id": "2", "text": "What is stable?", "metadata": {}}
{"id": "4", "text": "Which animals?", "metadata": {}}
```

Judgements of `test`:
```json
{"query": "0", "passage": "4983", "score": 1}
{"query": "2", "passage": "7912", "score": 2}
```
"""

    def detects_corpus(self, start: FileStart) -> bool:
        return self.has_ending(start) and self.matches_start(start)

    detects_queries = detects_corpus

    def matches_start(self, start: FileStart) -> bool:
        """Returns whether the first JSON object has an id and a text; True without an object, which parsing refuses."""
        return not start.document or ("_id" in start.document and "text" in start.document)

    def shown_columns(self, file: str, columns: PassageColumns | None) -> PassageColumns | None:
        """Returns the columns to print if the file has additional fields; None otherwise."""
        if not FileStart(file).document.keys() - FIELDS:
            return None
        table = read_json_table(file)
        return PassageColumns(table, "text", "_id", "title" if "title" in table.names else None)

    def read_passages(self, block: FilePiece, columns: PassageColumns | None) -> Iterator[Row]:
        for line, document in json_objects(block):
            yield read_document(block, line, document, "_id")

    def read_queries(self, block: FilePiece) -> Iterator[Row]:
        for line, document in json_objects(block):
            yield read_document(block, line, document, "_id", has_title=False)


BEIR = Beir()
