"""docs/data.md: its table of formats and the sections of formats are those of the modules.

With RIPTIDE_WRITE_TABLES=1 they are written there instead. tests/jobs/test_data_page.py imports their examples.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from toy_format import toy_format

from riptide.indexing.formats.format import CorpusFormat
from riptide.indexing.formats.registry import FORMATS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "data.md"


def listed_files(format: CorpusFormat, patterns: tuple[str, ...]) -> str:
    return ", ".join(f"`{format.describe_files([pattern]).removesuffix('[.gz]')}`" for pattern in patterns)


def table_row(format: CorpusFormat) -> str:
    anchor = format.title.lower().replace(" ", "-")
    queries = listed_files(format, format.query_files) or "by the path of their file"
    judgements = [listed_files(format, (format.judgement_files,))] if format.judgement_files else []
    if format.has_columns:
        judgements.insert(0, "[in the table of queries](#queries-and-judgements-in-tables)")
    if format.has_provenance:
        judgements.append("by the provenance of queries")
    columns = "any; named by options or recognised" if format.has_columns else "fixed"
    cells = [
        f"[{format.title}](#{anchor})",
        listed_files(format, format.corpus_files),
        queries,
        " or ".join(judgements),
    ]
    return f"| {' | '.join([*cells, columns])} |"


def sections(*, has_columns: bool) -> str:
    chosen = [format for format in FORMATS if format.has_columns == has_columns]
    return "\n\n".join(f"### {format.title}\n\n{format.section.strip()}" for format in chosen)


def written_page(page: str) -> str:
    """Returns the page with the parts that come from the modules."""
    header = ["| format | passages | queries | judgements | columns |", "| --- | --- | --- | --- | --- |"]
    parts = {
        "table of formats": "\n".join([*header, *map(table_row, FORMATS)]),
        "formats with any columns": sections(has_columns=True),
        "formats with fixed columns": sections(has_columns=False),
    }
    for name, text in parts.items():
        begin, end = f"<!-- {name}: written by a test from indexing/formats -->", f"<!-- end of {name} -->"
        assert page.count(begin) == page.count(end) == 1
        page = page[: page.index(begin)] + f"{begin}\n\n{text}\n\n" + page[page.index(end) :]
    return page


def test_the_page_has_the_sections_of_the_modules() -> None:
    page = PAGE.read_text(encoding="utf-8")
    expected = written_page(page)
    if os.environ.get("RIPTIDE_WRITE_TABLES"):
        PAGE.write_text(expected, encoding="utf-8")
        page = expected
    assert page == expected


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_section_has_a_file_a_command_and_its_passages(format: CorpusFormat) -> None:
    assert re.search(r"^`\S+`$", format.section, re.MULTILINE)
    assert "```bash\nriptide import-corpus " in format.section
    assert "\nPassages:\n" in format.section


def test_a_new_format_gets_a_row_and_a_section() -> None:
    page = PAGE.read_text(encoding="utf-8")
    with toy_format() as format:
        written = written_page(page)
    row = "| [Toy](#toy) | `corpus.toy` | `queries.toy` | `qrels/SPLIT.tsv` | fixed |\n"
    section = f"\n\n### Toy\n\n{format.section.strip()}"
    assert written.replace(row, "").replace(section, "") == page != written
