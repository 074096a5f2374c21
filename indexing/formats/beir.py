"""BEIR: a folder with corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv."""

from __future__ import annotations

from collections.abc import Iterator

from indexing.files.columns import PassageColumns
from indexing.files.raw import Piece
from indexing.files.rows import Row, objects, read_document
from indexing.files.start import FileStart
from indexing.formats.format import CorpusFormat
from indexing.formats.jsonl import ENDINGS, read_json_table

FIELDS = {"_id", "title", "text", "metadata"}


class Beir(CorpusFormat):
    """BEIR. Additional fields are metadata."""

    name = "beir"
    title = "BEIR"
    endings = ENDINGS
    corpus_files = ("corpus.jsonl",)
    query_files = ("queries.jsonl",)
    judgement_files = "qrels/*.tsv"
    section = r"""SECTION"""

    def detects_corpus(self, start: FileStart) -> bool:
        return self.has_ending(start) and self.accepts(start)

    def detects_queries(self, start: FileStart) -> bool:
        return self.has_ending(start) and self.accepts(start)

    def accepts(self, start: FileStart) -> bool:
        """Returns whether the first line has an id and a text. A line that is not an object is refused by parsing."""
        return not start.document or ("_id" in start.document and "text" in start.document)

    def shown_columns(self, file: str, columns: PassageColumns | None) -> PassageColumns | None:
        """Returns the columns of a file with additional fields; None for other files."""
        if not FileStart(file).document.keys() - FIELDS:
            return None
        table = read_json_table(file)
        return PassageColumns(table, "text", "_id", "title" if "title" in table.names else None)

    def read_passages(self, block: Piece, columns: PassageColumns | None) -> Iterator[Row]:
        for line, document in objects(block):
            yield read_document(block, line, document, "_id")

    def read_queries(self, block: Piece) -> Iterator[Row]:
        for line, document in objects(block):
            yield read_document(block, line, document, "_id", has_title=False)


BEIR = Beir()
