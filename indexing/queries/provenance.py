"""Judges passages by the provenance of queries: the pages, or the spans of their paragraphs, that KILT's tasks name.

Queries name them in their metadata, as the import of KILT's task files stores it:

    {"provenance": [["12", "25"]], "evidence": [{"wikipedia_id": "12", "start_paragraph_id": 3, …}]}

Passages name their page in theirs, `wikipedia_id`, and their place in it: `paragraph`, the number of the paragraph that
the passage is, or, if the import split the page, `paragraphs`, each paragraph that the passage has text of and the
character of the page's text at which it starts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus, DocumentNumbers

SPAN, PAGE, NONE = LEVELS = ("span", "page", "none")
# The first value of the page in a metadata text, as JSON.
_PAGE_OF = r'"wikipedia_id": ?(?P<page>"(?:[^"\\]|\\.)*"|[^,}]*)'
_PARAGRAPH_SIZE = 1 << 32  # distance between two paragraphs that are passages; a row has fewer characters
_MAX_NUMBER = 1 << 31


class Span(NamedTuple):
    """A span of a page: paragraph and character at which it starts, and paragraph and character of its end.

    A character of 0 or less is unknown: the span starts with its first paragraph, or ends with its last one.
    """

    first: int
    start: int
    last: int
    end: int


class Judgements(NamedTuple):
    """Judgements by provenance.

    Attributes:
        qrels: Columns query_id, corpus_id and score (int32, 1); in a split corpus also `rows`, list<int64>: the
            relevant passages of the document, empty if any passage of it may be the relevant one.
        num_spans: Number of pages of a query that are judged by a span.
        num_pages: Number of pages of a query that are judged as a whole.
        num_missing: Number of pages of a query that the corpus lacks.
    """

    qrels: pa.Table
    num_spans: int
    num_pages: int
    num_missing: int


def judge_passages(file: str, queries: pa.Table, corpus: Corpus, level: str, *, partial: bool) -> Judgements:
    """Judges the passages of the corpus that the provenance of queries names.

    Args:
        file: The file of the queries, for messages.
        queries: Columns id and metadata.
        corpus: The corpus.
        level: SPAN: the passages with text of a span, and the whole page where a query names no span of it, or none
            that a passage has text of, as of the title or a heading; PAGE: all passages of a page.
        partial: Whether pages that the corpus lacks are left out.

    Raises:
        InputError: If no passage of the corpus names a page, or, unless `partial`, if the corpus lacks a page.
    """
    pages = sorted({page for metadata in queries["metadata"].to_pylist() for page in read_evidence(metadata)})
    text = PageText(corpus, pages)
    if pages and not text.has_pages:
        raise InputError(
            f"{file}: its provenance names pages, and no passage of the corpus has wikipedia_id in its metadata; "
            f"import KILT's knowledge source, or leave the judgements out by {Parameter('provenance', NONE)}"
        )
    documents = DocumentNumbers(corpus.parts) if corpus.is_split else None
    owners, judged, passages = array("q"), array("q"), []
    num_spans = num_pages = 0
    missing: list[tuple[str, str]] = []
    for number, (id, metadata) in enumerate(zip(*(queries[c].to_pylist() for c in ("id", "metadata")), strict=True)):
        for page, spans in read_evidence(metadata).items():
            whole = text.rows(page)
            if not len(whole):
                missing.append((id, page))
                continue
            span_rows = [text.rows_of_span(page, span) for span in spans] if level == SPAN else []
            rows = np.unique(np.concatenate([*span_rows, whole[:0]]))
            has_span = bool(len(rows))
            num_spans, num_pages = num_spans + has_span, num_pages + (not has_span)
            rows = rows if has_span else whole
            numbers = documents.numbers(rows) if documents else rows
            for document in np.unique(numbers).tolist():
                owners.append(number)
                judged.append(document)
                if documents:
                    passages.append(rows[numbers == document].tolist() if has_span else [])
    if missing and not partial:
        id, page = missing[0]
        more = f" (and {len(missing) - 1:,} more pages of queries like it)" if len(missing) > 1 else ""
        raise InputError(
            f"{file}: query {id!r} has its provenance in the page {page!r}{_title_of(queries, id, page)}, which is not "
            f"in the corpus{more}; add the page, or leave such judgements out by {Parameter('skip_unknown')}"
        )
    columns = {
        "query_id": queries["id"].take(pa.array(np.array(owners, np.int64))),
        "corpus_id": pa.array(corpus.documents(np.array(judged, np.int64)), pa.string()),
        "score": pa.array(np.ones(len(judged), np.int32)),
    }
    if documents:
        columns["rows"] = pa.array(passages, pa.list_(pa.int64()))
    return Judgements(pa.table(columns), num_spans, num_pages, len(missing))


def read_evidence(metadata: str) -> dict[str, list[Span]]:
    """Returns the pages that the metadata of a query name as its provenance, each with its spans, if any."""
    fields = orjson.loads(metadata) if metadata else {}
    pages: dict[str, list[Span]] = {page: [] for pages in fields.get("provenance", []) for page in pages}
    for entry in fields.get("evidence", []):
        first = entry.get("start_paragraph_id", -1)
        last = entry.get("end_paragraph_id", -1)
        if first >= 0:
            span = Span(first, entry.get("start_character", 0), max(first, last), entry.get("end_character", 0))
            pages[entry["wikipedia_id"]].append(span)
    return pages


def _title_of(queries: pa.Table, id: str, page: str) -> str:
    """Returns the title that a query names for a page, in brackets; "" without one."""
    [metadata] = queries.filter(pc.equal(queries["id"], id))["metadata"].to_pylist()
    entries = orjson.loads(metadata).get("evidence", [])
    title = next((entry["title"] for entry in entries if entry["wikipedia_id"] == page and "title" in entry), "")
    return f" ({title!r})" if title else ""


class PageText:
    """The passages of pages with their places in the text of the page.

    A place is a character of the page's text. If each paragraph is a passage, paragraph n starts at n * 2^32.

    Args:
        corpus: The corpus.
        pages: Ids of pages.

    Attributes:
        has_pages: Whether any passage of the corpus names a page.
    """

    def __init__(self, corpus: Corpus, pages: Sequence[str]):
        self._numbers = {page: number for number, page in enumerate(pages)}
        self.has_pages = False
        passages, paragraphs = array("q"), array("q")  # page, row, start, end; page, number, start
        for row, fields, start, end in self._passages(corpus):
            page = self._numbers.get(str(fields.get("wikipedia_id")).strip(), -1)
            if page >= 0:
                places = _paragraphs_of(fields, is_split=corpus.is_split)
                if places and not corpus.is_split:
                    start, end = places[0][1], places[0][1] + end
                passages.extend((page, row, start, end))
                for number, place in places:
                    paragraphs.extend((page, number, place))
        table = np.array(passages, np.int64).reshape(-1, 4)
        self._places = table[np.argsort(table[:, 0], kind="stable")]
        self._paragraphs = np.unique(np.array(paragraphs, np.int64).reshape(-1, 3), axis=0)

    def _passages(self, corpus: Corpus) -> Iterator[tuple[int, dict[str, Any], int, int]]:
        """Yields the row, the metadata, and the first character and end of passages that may be of the pages."""
        pages = pa.array([literal for page in self._numbers for literal in _literals(page)], pa.large_string())
        for part in corpus.parts if self._numbers else ():
            table = corpus.table(part)
            metadata = table["metadata"]
            named = pc.struct_field(pc.extract_regex(metadata, _PAGE_OF), "page").cast(pa.large_string())
            self.has_pages |= named.null_count < len(named)
            has_several = pc.greater(pc.count_substring(metadata, '"wikipedia_id"'), 1)
            local = np.flatnonzero(pc.or_(pc.is_in(named, pages), has_several).to_numpy())
            local = local[~np.isin(local + part.first_row, corpus.deleted)]
            chosen = table.take(pa.array(local))
            starts = chosen["start"].to_pylist() if corpus.is_split else [0] * len(local)
            ends = (chosen["end"] if corpus.is_split else pc.utf8_length(chosen["text"])).to_pylist()
            texts = chosen["metadata"].to_pylist()
            for row, text, start, end in zip((local + part.first_row).tolist(), texts, starts, ends, strict=True):
                fields = orjson.loads(text)
                if isinstance(fields, dict):
                    yield row, fields, start, end

    def rows(self, page: str) -> np.ndarray:
        """Returns the rows of the passages of a page, int64 [any], ascending; none if the corpus lacks the page."""
        return self._of(self._places, page)[:, 1]

    def rows_of_span(self, page: str, span: Span) -> np.ndarray:
        """Returns the rows of the passages with text of a span, int64 [any], ascending.

        A passage counts if at least half of it is in the span, or if it has at least half as much of the span as the
        passage that has most of it.
        """
        _, rows, starts, ends = self._of(self._places, page).T
        _, numbers, places = self._of(self._paragraphs, page).T
        first, last = np.searchsorted(numbers, span.first), np.searchsorted(numbers, span.last, side="right") - 1
        if first > last:
            return rows[:0]
        limits = np.append(places[1:], ends.max())
        start, end = places[first], limits[last]
        if numbers[first] == span.first:
            start = min(start + max(span.start, 0), limits[first])
        if numbers[last] == span.last and span.end > 0:
            end = min(places[last] + span.end, end)
        shared = np.minimum(ends, end) - np.maximum(starts, start)
        return rows[(shared > 0) & (2 * shared >= np.minimum(ends - starts, shared.max()))]

    def _of(self, table: np.ndarray, page: str) -> np.ndarray:
        """Returns the lines of a table, sorted by page, that are those of a page."""
        first, end = np.searchsorted(table[:, 0], [self._numbers[page], self._numbers[page] + 1])
        return table[first:end]


def _literals(page: str) -> list[str]:
    """Returns the forms of a page id in JSON: as a string, and as a number if it is one."""
    text = orjson.dumps(page).decode()
    return [text, page] if page.isascii() and page.isdecimal() else [text]


def _paragraphs_of(fields: Mapping[str, Any], *, is_split: bool) -> list[tuple[int, int]]:
    """Returns the number and the place of each paragraph that a passage has text of; none if its metadata lack them."""
    if not is_split:
        number = fields.get("paragraph")
        return [(number, number * _PARAGRAPH_SIZE)] if type(number) is int and 0 <= number < _MAX_NUMBER else []
    pairs = fields.get("paragraphs")
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return []
    is_valid = all(type(value) is int and 0 <= value < _MAX_NUMBER for pair in pairs for value in pair)
    return [(number, place) for number, place in pairs] if is_valid else []
