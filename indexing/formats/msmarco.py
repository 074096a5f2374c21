"""The MS MARCO format: a folder with collection.tsv, queries.SPLIT.tsv and qrels.SPLIT.tsv."""

from __future__ import annotations

from collections.abc import Iterator

from riptide.indexing.files.columns import PassageColumns, is_passage_header, is_query_header
from riptide.indexing.files.raw import FilePiece
from riptide.indexing.files.rows import Row, integer_id, text_lines, wrong_columns_error
from riptide.indexing.files.start import FileStart
from riptide.indexing.formats.format import CorpusFormat


class MsMarco(CorpusFormat):
    """The MS MARCO format: lines of an id and a text, separated by a tab, without header and quoting."""

    name = "msmarco"
    title = "MS MARCO"
    endings = ("tsv",)
    corpus_files = ("collection.tsv",)
    query_files = ("queries.*.tsv", "queries.tsv")
    judgement_files = "qrels.*.tsv"
    title_files = ("para.title.txt", "para.title.txt.gz")
    section = r"""
A folder. `collection.tsv`: id and text. `queries.SPLIT.tsv`: id and query. `qrels.SPLIT.tsv`: query id, a column that
is ignored, passage id and score. All are separated by tabs, without header and without quoting. If `para.title.txt`
(RocketQA's file: id, title; also `.gz`) is in the folder, its titles are joined. Its lines are in the order of
`collection.tsv`; a passage without a line has no title.

`marco/collection.tsv`
```tsv
0	The presence of communication.
1	The Manhattan Project was "secret".
2	Essay on the project.
```

`marco/queries.dev.tsv`
```tsv
1048585	what is paula deen's brother
2	what was the manhattan project
3	who wrote the essay
```

`marco/qrels.dev.tsv`
```tsv
2	0	1	1
2	0	2	1
3	0	2	1
```
```bash
riptide import-corpus --store data/marco --source marco
```

Passages:
```json
{"id": "0", "title": "", "text": "The presence of communication.", "metadata": {}}
{"id": "1", "title": "", "text": "The Manhattan Project was \"secret\".", "metadata": {}}
{"id": "2", "title": "", "text": "Essay on the project.", "metadata": {}}
```

Judgements of `dev`:
```json
{"query": "2", "passage": "1", "score": 1}
{"query": "2", "passage": "2", "score": 1}
{"query": "3", "passage": "2", "score": 1}
```
"""

    def detects_corpus(self, start: FileStart) -> bool:
        return self.has_ending(start) and not is_passage_header(start.fields)

    def detects_queries(self, start: FileStart) -> bool:
        """Returns whether the file has tab-separated columns without a header; its extension may also be .csv."""
        is_tsv = self.has_ending(start)
        return (
            (is_tsv or start.ending == "csv")
            and not is_query_header(start.fields)
            and (is_tsv or len(start.fields) > 1)
        )

    def read_passages(self, block: FilePiece, columns: PassageColumns | None) -> Iterator[Row]:
        for line, row in text_lines(block):
            id, _, text = row.partition("\t")
            if row.count("\t") != 1:
                raise wrong_columns_error(block, line, row, row.count("\t") + 1, "2: id<TAB>text")
            yield (line, id or integer_id(block, line, "", "id"), "", text, {})

    def read_queries(self, block: FilePiece) -> Iterator[Row]:
        return self.read_passages(block, None)


MSMARCO = MsMarco()
