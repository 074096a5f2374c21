"""Formats hits as text tables, two lines per hit: first rank, score, id and title, then a snippet."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from riptide.indexing.search.snippets import (
    BOLD,
    PLAIN,
    MatchMarks,
    QueryWords,
    display_width,
    one_line,
    shorten,
    snippet,
)

PIPED_WIDTH = 100  # width in columns if the output is not a terminal
_MIN_COLUMNS = 20  # minimum width of a title or snippet in columns, however long the ids are


@dataclass(frozen=True)
class TableStyle:
    """The style of a table of hits: its width in columns, and the marks around words of the query."""

    width: int = PIPED_WIDTH
    marks: MatchMarks = PLAIN


@dataclass(frozen=True)
class ShownHit:
    """The data of a hit that a table shows.

    Attributes:
        rank: Rank from 1; None for a passage that the run lacks.
        score: Score in the run; None for a passage that the run lacks.
        id: Id of the passage.
        title: None if the passage cannot be read.
        text: None if the passage cannot be read.
        relevance: Relevance in the judgement; None if the passage is not judged.
        explanation: Lines below the snippet.
    """

    rank: int | None
    score: float | None
    id: str
    title: str | None
    text: str | None
    relevance: int | None = None
    explanation: Sequence[str] = ()


def style_for(stream: TextIO) -> TableStyle:
    """Returns the table style for a stream: its width, and bold marks on a terminal, `**word**` otherwise."""
    width = shutil.get_terminal_size((PIPED_WIDTH, 24)).columns
    on_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return TableStyle(width, BOLD if on_terminal else PLAIN)


def hit_table(hits: Sequence[ShownHit], query: str, style: TableStyle, *, with_judgements: bool = False) -> list[str]:
    """Formats hits as the lines of a text table.

    Args:
        hits: The hits, in display order.
        query: Its words are marked in the snippets.
        style: Width and marks.
        with_judgements: Adds a column with the relevance, `-` if a passage is not judged.
    """
    words = QueryWords(query)
    rows = [_cells_of_hit(hit, with_judgements) for hit in hits]
    names = ["rank", "score", *(["relevance"] if with_judgements else []), "id"]
    widths = [max(display_width(row[n]) for row in [names, *rows]) for n in range(len(names))]
    lines = [f"{_join_aligned(names, widths)}  title"]
    indent = widths[0] + 2
    for hit, row in zip(hits, rows, strict=True):
        start = _join_aligned(row, widths)
        room = max(_MIN_COLUMNS, style.width - display_width(start) - 2)
        lines.append(f"{start}  {_or_dash(hit.title, room)}".rstrip())
        if hit.text is not None and (text := snippet(hit.text, words, style.width - indent, style.marks)):
            lines.append(f"{' ' * indent}{text}")
        lines += [f"{' ' * indent}{line}" for line in hit.explanation]
    return lines


def _cells_of_hit(hit: ShownHit, with_judgements: bool) -> list[str]:
    rank = "-" if hit.rank is None else str(hit.rank)
    score = "-" if hit.score is None else f"{hit.score:.6g}"
    relevance = "-" if hit.relevance is None else str(hit.relevance)
    return [rank, score, *([relevance] if with_judgements else []), one_line(hit.id)]


def _join_aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Joins the cells of a row, all right-aligned except for the last one, the id."""
    padded = [" " * (width - display_width(cell)) for cell, width in zip(cells, widths, strict=True)]
    numbers = [f"{space}{cell}" for cell, space in zip(cells[:-1], padded[:-1], strict=True)]
    return "  ".join([*numbers, f"{cells[-1]}{padded[-1]}"])


def _or_dash(title: str | None, room: int) -> str:
    return shorten(title, room) if title else "-"
