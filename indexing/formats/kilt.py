"""The KILT format: kilt_knowledgesource.json, with a page per line, and task files with queries."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from riptide.base.errors import InputError
from riptide.indexing.files import limits
from riptide.indexing.files.columns import PassageColumns, QueryColumns
from riptide.indexing.files.raw import FilePiece, short_repr
from riptide.indexing.files.rows import BadRows, Row, integer_id, json_objects, row_error, wrong_text_error
from riptide.indexing.files.start import FileStart
from riptide.indexing.formats.format import CorpusFormat
from riptide.indexing.formats.jsonl import ENDINGS

# The fields of a provenance entry that queries keep, in addition to its page.
EVIDENCE_FIELDS = {
    "title": str,
    "start_paragraph_id": int,
    "start_character": int,
    "end_paragraph_id": int,
    "end_character": int,
}
_MAX_NUMBER = 1 << 31  # of a paragraph or a character
FEVER_LABELS = ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")
_BORDER = "\n\n"  # between two paragraphs in the text of a page
_SPLIT = re.compile(r"-(train|dev|test)[_.-]")


class Kilt(CorpusFormat):
    """The KILT format. Task files share ids, so each is imported by its path, as a separate query set."""

    name = "kilt"
    title = "KILT"
    endings = ENDINGS
    corpus_files = ("kilt_knowledgesource.json",)
    has_one_passage_per_row = False
    describes_passages = True
    has_provenance = True
    section = r"""
The knowledge source: a JSON object per page with `wikipedia_id`, `wikipedia_title` and `text`, a list of paragraphs.
Every paragraph with text is a passage with the id PAGE-PARAGRAPH; paragraph 0 (the title) and headings are not.
Metadata: `wikipedia_id`, `paragraph`, `section`.

With `--split-words 100`, a page is one document with its `wikipedia_id` as the id, and its paragraphs become passages
of at most 100 words that end at sentence borders, as in KILT's own passages ([long documents](#long-documents)). KILT
counts spaCy's tokens and ends a passage with its section; here white space separates words and a passage may continue
in the next section. Metadata: `wikipedia_id`, and `paragraphs`: each paragraph that the passage has text of, and the
character of the page's text at which it starts (two line breaks separate paragraphs).

Task files: a JSON object per line with `id`, `input` (the query) and `output`, a list of answers with provenance. This
is the form of all eleven tasks: FEVER, AIDA CoNLL-YAGO, WNED-WIKI, WNED-CWEB, T-REx, zero-shot RE, Natural Questions,
HotpotQA, TriviaQA, ELI5 and Wizard of Wikipedia. KILT's files of TriviaQA name questions by id alone: run its
`scripts/get_triviaqa_input.py` first. The input is kept as it is, with the markers `[START_ENT]` and `[END_ENT]` of
entity linking and a line for each turn of a dialogue. Metadata of queries:

- `answers`; in their place `labels` in FEVER and `entities`, titles of pages, in entity linking, because these are not
  texts whose passages answer the query (`mine-negatives --drop-answers`, `evaluate --metrics Answer@20`).
- `provenance`: the page ids of each output that has some. `evidence`: the distinct entries of the provenance with a
  title or a span, with `wikipedia_id`, `title`, `start_paragraph_id`, `start_character`, `end_paragraph_id` and
  `end_character`.
- All other fields of the line, such as `meta`.

`import-queries --provenance` says what the provenance judges, by the metadata of the passages of the store's corpus:

- `span`, the default: the passages with text of a span. A passage counts if at least half of it is in the span, or if
  it has at least half as much of the span as the passage that has most of it. An entry without a span, or whose span
  no passage has text of (a title, a heading), judges all passages of the page, unless another entry of the query has a
  span in that page. If the import split the page, the judgement names the page, and training takes the passages of the
  span as positives; without a span, the one that fits the query best by BM25.
- `page`: all passages of a page; if the import split it, the page.
- `none`: no judgements. Needed for passages without `wikipedia_id`.

The split is SPLIT of a file named NAME-SPLIT-kilt.jsonl, otherwise `test`; `--split` names another one. Pages that the
corpus lacks are refused with their number and the first one; `--skip-unknown` leaves them out and counts them. Queries
without provenance, as in the test files, whose answers are hidden, are in the split `all` only.

`evaluate --split all --metrics PageRprec` measures KILT's page-level R-precision from `provenance` and the
`wikipedia_id` of the passages. A page ranks by its first passage in the run. For a provenance set of R pages, the
value is the fraction of them among the first R distinct pages; for a query, it is the largest value of its sets, and
0 without provenance. Another split has only the queries that are judged.
`Rprec`, as in ir-measures, is the R-precision of judged passages. Other corpora and query sets can be measured too if
their metadata have these two fields. `jobs/recipes/pipeline-kilt.yaml` trains and measures HYPER on seven tasks.

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

`fever-dev-kilt.jsonl`
```json
{"id": "75397", "input": "Wind makes waves.", "output": [{"answer": "SUPPORTS", "provenance": [{"wikipedia_id": "3"}]}]}
{"id": "75398", "input": "Water rises.", "output": [{"answer": "REFUTES", "provenance": [{"wikipedia_id": "2"}]}]}
{"id": "75399", "input": "The moon is a fruit.", "output": [{"answer": "REFUTES"}]}
```
```bash
riptide import-queries --store data/kilt --source fever-dev-kilt.jsonl
```

Queries:
```json
{"id": "75397", "text": "Wind makes waves.", "metadata": {"labels": ["SUPPORTS"], "provenance": [["3"]]}}
{"id": "75398", "text": "Water rises.", "metadata": {"labels": ["REFUTES"], "provenance": [["2"]]}}
{"id": "75399", "text": "The moon is a fruit.", "metadata": {"labels": ["REFUTES"]}}
```

Judgements of `dev`:
```json
{"query": "75397", "passage": "3-1", "score": 1}
{"query": "75398", "passage": "2-2", "score": 1}
```
"""

    def detects_corpus(self, start: FileStart) -> bool:
        return self.has_ending(start) and "wikipedia_title" in start.document

    def detects_queries(self, start: FileStart) -> bool:
        """Also detects KILT's files of TriviaQA, which have no `input`; reading them says so."""
        document = start.document
        is_triviaqa = {"id"} <= document.keys() <= {"id", "output", "meta"} and type(document.get("output", [])) is list
        return self.has_ending(start) and ("input" in document or is_triviaqa)

    def split_of(self, file: str) -> str | None:
        """Returns the split in the name of a task file, such as fever-train-kilt.jsonl; None if it has none."""
        match = _SPLIT.search(file.rpartition("/")[2])
        return match and match[1]

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
        """Yields each page as a document whose text joins its paragraphs; omits pages without text.

        Its metadata has the number of each paragraph with the character of the text at which it starts.
        """
        for line, page_id, title, paragraphs in _parse_pages(block):
            numbers, texts = [], []
            for number, _, text in _paragraph_texts(paragraphs):
                numbers.append(number)
                texts.append(text)
            if texts:
                lengths = [len(text) + len(_BORDER) for text in texts]
                starts = itertools.accumulate(lengths[:-1], initial=0)
                fields = {"wikipedia_id": page_id, "paragraphs": [*map(list, zip(numbers, starts, strict=True))]}
                yield line, page_id, title, _BORDER.join(texts), fields

    def passage_metadata(self, metadata: str, spans: np.ndarray) -> list[str]:
        """Returns the metadata of the passages of a page, each with the paragraphs that it has text of."""
        fields = orjson.loads(metadata)
        starts = np.array([start for _, start in fields["paragraphs"]])
        firsts = np.searchsorted(starts, spans[:, 0], side="right") - 1
        ends = np.searchsorted(starts, spans[:, 1])
        return [
            orjson.dumps(fields | {"paragraphs": fields["paragraphs"][first:end]}).decode()
            for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)
        ]

    def read_query_files(
        self, files: Sequence[str], columns: QueryColumns | None, qrels: Mapping[str, str], bad_rows: BadRows
    ) -> tuple[pa.Table, dict[str, pa.Table]]:
        """Reads task files. Raises InputError for KILT's files of TriviaQA, which lack the questions."""
        for file in files:
            first = FileStart(file).document  # empty if the first line is no JSON object, which the parser refuses
            if first and "input" not in first:
                raise InputError(
                    f"{file}: found no input, expected a query in each line; KILT's files of TriviaQA name its "
                    "questions by id alone: scripts/get_triviaqa_input.py of KILT adds their texts"
                )
        return super().read_query_files(files, columns, qrels, bad_rows)

    def read_queries(self, block: FilePiece) -> Iterator[Row]:
        """Yields the queries of a task file.

        Their metadata are the answers (`labels` in fact checking, `entities` in entity linking), the page ids of each
        output with provenance, its distinct entries with a title or a span, and the other fields of the task.
        """
        for line, doc in json_objects(block):
            id, text, outputs = doc.pop("id", None), doc.pop("input", None), doc.pop("output", None) or []
            if type(id) is not str or not id:
                id = integer_id(block, line, id, "id")
            if type(text) is not str:
                raise wrong_text_error(block, line, "input", text)
            try:
                answers = list(dict.fromkeys(entry["answer"] for entry in outputs if entry.get("answer") is not None))
                sets = [[_read_provenance(each) for each in entry.get("provenance") or []] for entry in outputs]
                is_valid = type(outputs) is list and all(type(answer) is str for answer in answers)
            except (TypeError, AttributeError, KeyError):
                is_valid = False
            if not is_valid:
                expected = (
                    "a list of {answer, provenance: [{wikipedia_id}]}, in which a title is a string, and paragraphs "
                    "and characters of a span are integers below 2^31"
                )
                raise row_error(block, line, f"output {short_repr(outputs)}", expected, "fix the line")
            if names := sorted(doc.keys() & {"provenance", "evidence"}):
                expected = "it in the entries of output, from which the import makes metadata of this name"
                raise row_error(block, line, f"a field {names[0]} of the line", expected, "rename or remove it")
            pages = [list(dict.fromkeys(each["wikipedia_id"] for each in entries)) for entries in sets]
            distinct = {tuple(each.items()): each for entries in sets for each in entries if len(each) > 1}
            outcome = {
                _kind_of_answers(text, answers): answers,
                "provenance": [each for each in pages if each],
                "evidence": list(distinct.values()),
            }
            yield (line, id, "", text, {name: value for name, value in outcome.items() if value} | doc)


def _read_provenance(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the page, the title and the span of an entry of a provenance.

    Raises KeyError or TypeError if it names no page, or if a value has another type.
    """
    page = entry["wikipedia_id"]
    if type(page) not in (str, int) or page == "":
        raise TypeError("wikipedia_id")
    fields: dict[str, Any] = {"wikipedia_id": str(page)}
    for name, kind in EVIDENCE_FIELDS.items():
        if (value := entry.get(name)) is not None:
            if type(value) is not kind or (isinstance(value, int) and abs(value) >= _MAX_NUMBER):
                raise TypeError(name)
            fields[name] = value
    return fields


def _kind_of_answers(text: str, answers: list[str]) -> str:
    """Returns the metadata field of the answers; only those of `answers` are texts that a passage may contain."""
    if all(answer in FEVER_LABELS for answer in answers):
        return "labels"
    is_entity_linking = "[START_ENT]" in text and "[END_ENT]" in text
    return "entities" if is_entity_linking else "answers"


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
