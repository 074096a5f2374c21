"""The tables of tests/bad_input.md: each row is an input, the answer to it, and the exit or HTTP status.

A test states a row through the fixture `documented`. The row must stand in the page as the test saw it;
`RIPTIDE_WRITE_TABLES=1` writes the rows of the tests that run into the page instead.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
DESCRIPTION = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"
HEADER = "| input | answer | status | test |\n| --- | --- | --- | --- |\n"
_ROW = re.compile(r"\| (?P<case>.+?) \| (?P<answer>.*?) \| (?P<status>\S+) \| `(?P<test>\S+)` \|")


@dataclass(frozen=True)
class Row:
    """One row of the page. test: `FILE::FUNCTION`, relative to tests/."""

    area: str
    case: str
    answer: str
    status: str
    test: str

    @property
    def line(self) -> str:
        return f"| {self.case} | {self.answer} | {self.status} | `{self.test}` |"


class StatedRows:
    """The rows that the items of each test have stated.

    Args:
        num_items: The number of items of each test of which all run.
    """

    def __init__(self, num_items: Mapping[str, int]):
        self._num_items = num_items
        self._by_item: dict[str, list[set[Row]]] = defaultdict(list)

    def add(self, test: str, rows: set[Row]) -> list[Row]:
        """Adds the rows of an item of a test. Returns the rows of the page that none of its items states.

        Empty unless this is the last item of the test, and each has stated a row.
        """
        self._by_item[test].append(rows)
        items = self._by_item[test]
        if len(items) != self._num_items.get(test) or not all(items):
            return []
        return [row for row in read_page() if row.test == test and row not in set().union(*items)]


def readable(answer: str, *folders: Path) -> str:
    """Returns an answer as a table cell: folders of this run, long digests and free ports are replaced by `…`."""
    line = " ".join(answer.split()).removeprefix("error: ")
    for folder in sorted(map(str, folders), key=len, reverse=True):
        line = line.replace(folder, "…")
    line = re.sub(r"\b[0-9a-f]{12,64}\b", "…", line)
    line = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:…", line)
    line = line if len(line) <= 240 else f"{line[:237]}..."
    return line.replace("|", "\\|")


def read_page(page: Path = PAGE) -> list[Row]:
    """Returns the rows of a page, in order."""
    return list(_rows(page.read_text(encoding="utf-8")))


def _rows(text: str) -> Iterator[Row]:
    area = ""
    for line in text.splitlines():
        if line.startswith("## "):
            area = line.removeprefix("## ")
        elif (found := _ROW.fullmatch(line)) and area:
            yield Row(area, **found.groupdict())


def write_rows(rows: list[Row]) -> None:
    """Puts rows into the page: a row of the same area and case is replaced, others stay."""
    text = PAGE.read_text(encoding="utf-8")
    introduction = text.partition("\n## ")[0].rstrip() + "\n"
    merged = {(row.area, row.case): row for row in [*_rows(text), *rows]}
    for area in sorted({row.area for row in merged.values()}):
        lines = [row.line for row in sorted(merged.values(), key=lambda row: row.case) if row.area == area]
        introduction += f"\n## {area}\n\n{HEADER}" + "\n".join(lines) + "\n"
    PAGE.write_text(introduction, encoding="utf-8")
