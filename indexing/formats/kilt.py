"""The KILT format: kilt_knowledgesource.json, with a page per line, and task files with queries."""

from __future__ import annotations

from collections.abc import Iterator

from riptide.indexing.files import limits
from riptide.indexing.files.columns import PassageColumns
from riptide.indexing.files.raw import FilePiece, short_repr
from riptide.indexing.files.rows import Row, integer_id, json_objects, row_error, wrong_text_error
from riptide.indexing.files.start import FileStart
from riptide.indexing.formats.format import CorpusFormat
from riptide.indexing.formats.jsonl import ENDINGS


class Kilt(CorpusFormat):
    """The KILT format. Task files name no split and share ids, so each is imported by its path."""

    name = "kilt"
    title = "KILT"
    endings = ENDINGS
    corpus_files = ("kilt_knowledgesource.json",)
    has_one_passage_per_row = False
    section = r"""
The knowledge source: a JSON object per page with `wikipedia_id`, `wikipedia_title` and `text`, a list of paragraphs.
Every paragraph with text is a passage with the id PAGE-PARAGRAPH; paragraph 0 (the title) and headings are not.
Metadata: `wikipedia_id`, `paragraph`, `section`. Task files: a JSON object per line with `id`, `input` (the query)
and `output` (a list of answers with provenance); metadata: `answers`, `provenance` (the page ids of each output that
has some), and all other fields.

With `--split-words 100`, a page is one document with its `wikipedia_id` as the id, and its paragraphs become passages
of at most 100 words that end at sentence borders, as in KILT's own passages ([long documents](#long-documents)). KILT
counts spaCy's tokens and ends a passage with its section; here white space separates words and a passage may continue
in the next section. The metadata is `wikipedia_id`.

`evaluate --split all --metrics PageRprec` measures KILT's page-level R-precision from `provenance` and the
`wikipedia_id` of the passages. A page ranks by its first passage in the run. For a provenance set of R pages, the
value is the fraction of them among the first R distinct pages; for a query, it is the largest value of its sets, and
0 without provenance. `Rprec`, as in ir-measures, is the R-precision of judged passages. Other corpora and query sets
can be measured too if their metadata have these two fields.

`kilt_knowledgesource.json`
```json
{"wikipedia_id": "1", "wikipedia_title": "Moon", "text": ["Moon\n", "It pulls the sea.\n"]}
{"wikipedia_id": "2", "wikipedia_title": "Tide", "text": ["Tide\n", "Section::::Ebb\n", "It falls.\n"]}
{"wikipedia_id": "3", "wikipedia_title": "Wave", "text": ["Wave\n", "Wind makes it.\n"]}
```
```bash
riptide import-corpus --store data/kilt --source kilt_knowledgesource.json
```

Passages:
```json
{"id": "1-1", "title": "Moon", "text": "It pulls the sea.", "metadata": {"wikipedia_id": "1", "paragraph": 1}}
{"id": "2-2", "title": "Tide", "text": "It falls.", "metadata": {"wikipedia_id": "2", "paragraph": 2, "section": "Ebb"}}
{"id": "3-1", "title": "Wave", "text": "Wind makes it.", "metadata": {"wikipedia_id": "3", "paragraph": 1}}
```

`fever-dev.jsonl`
```json
{"id": "75397", "input": "Wind makes waves.", "output": [{"answer": "SUPPORTS", "provenance": [{"wikipedia_id": "3"}]}]}
{"id": "75398", "input": "Water rises.", "output": [{"answer": "REFUTES", "provenance": [{"wikipedia_id": "2"}]}]}
{"id": "75399", "input": "The moon is a fruit.", "output": [{"answer": "REFUTES"}]}
```
```bash
riptide import-queries --store data/kilt --source fever-dev.jsonl
```

Queries:
```json
{"id": "75397", "text": "Wind makes waves.", "metadata": {"answers": ["SUPPORTS"], "provenance": [["3"]]}}
{"id": "75398", "text": "Water rises.", "metadata": {"answers": ["REFUTES"], "provenance": [["2"]]}}
{"id": "75399", "text": "The moon is a fruit.", "metadata": {"answers": ["REFUTES"]}}
```
"""

    def detects_corpus(self, start: FileStart) -> bool:
        return self.has_ending(start) and "wikipedia_title" in start.document

    def detects_queries(self, start: FileStart) -> bool:
        return self.has_ending(start) and "input" in start.document

    def read_passages(self, block: FilePiece, columns: PassageColumns | None) -> Iterator[Row]:
        """Yields one passage per paragraph with text, with the id PAGE-PARAGRAPH as in KILT's provenance.

        As in KILT's own passages, paragraph 0 (the title) and the "Section::::" headings are not passages; a heading
        becomes metadata of its paragraphs. Anchors, categories and history of the page are left out.
        """
        for line, page_id, title, paragraphs in _parse_pages(block):
            heading_lengths = [len(paragraph) for paragraph in paragraphs if paragraph.startswith("Section::::")]
            repeated = (len(title) + len(page_id) + max(heading_lengths, default=0)) * len(paragraphs)
            if repeated > limits.MAX_ROW_BYTES:
                actual = f"a title, id and heading that take {repeated:,} characters in {len(paragraphs):,} paragraphs"
                raise row_error(block, line, actual, f"at most {limits.MAX_ROW_BYTES:,}", "shorten them")
            for index, section, text in _paragraph_texts(paragraphs):
                fields = {"wikipedia_id": page_id, "paragraph": index}
                yield line, f"{page_id}-{index}", title, text, fields | {"section": section} if section else fields

    def read_documents(self, block: FilePiece, columns: PassageColumns | None) -> Iterator[Row]:
        """Yields each page as a document whose text joins its paragraphs; omits pages without text."""
        for line, page_id, title, paragraphs in _parse_pages(block):
            text = "\n\n".join(text for _, _, text in _paragraph_texts(paragraphs))
            if text:
                yield line, page_id, title, text, {"wikipedia_id": page_id}

    def read_queries(self, block: FilePiece) -> Iterator[Row]:
        """Yields the queries of a task file.

        Their metadata are the answers, the page ids of each output with provenance, and the other fields of the task.
        """
        for line, doc in json_objects(block):
            id, text, outputs = doc.pop("id", None), doc.pop("input", None), doc.pop("output", None) or []
            if type(id) is not str or not id:
                id = integer_id(block, line, id, "id")
            if type(text) is not str:
                raise wrong_text_error(block, line, "input", text)
            try:
                answers = list(dict.fromkeys(entry["answer"] for entry in outputs if entry.get("answer") is not None))
                pages = [[str(page["wikipedia_id"]) for page in entry.get("provenance") or []] for entry in outputs]
                is_valid = type(outputs) is list and all(type(answer) is str for answer in answers)
            except (TypeError, AttributeError, KeyError):
                is_valid = False
            if not is_valid:
                expected = "a list of {answer, provenance: [{wikipedia_id}]}"
                raise row_error(block, line, f"output {short_repr(outputs)}", expected, "fix the line")
            outcome = {"answers": answers, "provenance": [list(dict.fromkeys(page)) for page in pages if page]}
            yield (line, id, "", text, {name: value for name, value in outcome.items() if value} | doc)


def _parse_pages(block: FilePiece) -> Iterator[tuple[int, str, str, list[str]]]:
    """Yields (line, id, title, paragraphs) of each page of a block. Raises RowError for a bad page."""
    for line, page in json_objects(block):
        page_id = page.get("wikipedia_id", page.get("_id"))
        if type(page_id) is not str or not page_id:
            page_id = integer_id(block, line, page_id, "wikipedia_id")
        title, paragraphs = page.get("wikipedia_title"), page.get("text")
        if type(title) is not str:
            raise wrong_text_error(block, line, "wikipedia_title", title)
        if type(paragraphs) is not list or not all(type(paragraph) is str for paragraph in paragraphs):
            raise row_error(
                block, line, f"text {short_repr(paragraphs)}", "a list of strings", "use KILT's knowledge source"
            )
        yield line, page_id, title, paragraphs


def _paragraph_texts(paragraphs: list[str]) -> Iterator[tuple[int, str, str]]:
    """Yields (number, section, text) of each paragraph with text, except the title and headings."""
    section = ""
    for index, paragraph in enumerate(paragraphs[1:], 1):
        if paragraph.startswith("Section::::"):
            section = paragraph.removeprefix("Section::::").strip()
        elif paragraph.strip():
            yield index, section, paragraph.rstrip("\n")  # no lstrip, so that offsets of KILT's anchors stay valid


KILT = Kilt()
