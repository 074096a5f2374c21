"""Tables of hits: their columns, widths and marks."""

from __future__ import annotations

import io

import pytest

from riptide.indexing.search.hit_tables import ShownHit, TableStyle, hit_table, style_for
from riptide.indexing.search.snippets import BOLD, PLAIN


def test_columns_are_aligned_and_what_is_unknown_is_a_dash() -> None:
    hits = [
        ShownHit(1, 12.5, "p1", "Bram\nStoker", "He wrote Dracula.", 2),
        ShownHit(10, -0.25, "東京", "", "No match here.", None),
        ShownHit(None, None, "p3", None, None, 1),
    ]
    assert hit_table(hits, "dracula", TableStyle(80, PLAIN), with_judgements=True) == [
        "rank  score  relevance  id    title",
        "   1   12.5          2  p1    Bram Stoker",
        "      He wrote **Dracula**.",
        "  10  -0.25          -  東京  -",
        "      No match here.",
        "   -      -          1  p3    -",
    ]
    assert hit_table(hits[:1], "", TableStyle(80, PLAIN))[:2] == [
        "rank  score  id  title",
        "   1   12.5  p1  Bram Stoker",
    ]


def test_titles_and_snippets_fit_the_width() -> None:
    hit = ShownHit(1, 1.0, "p1", "title " * 20, "text " * 40 + "bell " * 3 + "text " * 40)
    lines = hit_table([hit], "bell", TableStyle(60, PLAIN))
    assert [len(line.replace("*", "")) <= 60 for line in lines] == [True] * 3
    assert lines[2].count("**bell**") == 3


@pytest.mark.parametrize(
    ("terminal", "term", "marks"), [(True, "xterm", BOLD), (True, "dumb", PLAIN), (False, "xterm", PLAIN)]
)
def test_marks_are_bold_on_a_terminal_alone(monkeypatch, terminal: bool, term: str, marks: object) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "72")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    assert style_for(stream) == TableStyle(72, marks)
