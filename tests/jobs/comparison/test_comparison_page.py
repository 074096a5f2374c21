"""The page of a comparison: one well-formed file that loads nothing; texts are escaped; charts have every query."""

from __future__ import annotations

import itertools
import random
from html.parser import HTMLParser

import numpy as np
import pytest

from riptide.jobs.comparison.charts import draw_differences, draw_ranks, draw_recall, draw_values
from riptide.jobs.comparison.comparing import compare_means
from riptide.jobs.comparison.comparison import Comparison
from riptide.jobs.comparison.comparison_page import render_page
from riptide.jobs.comparison.shown_passages import ShownPassage
from riptide.jobs.comparison.svg import Axes, ticks
from riptide.jobs.comparison.values import ComparedQuery, RunResult

HOSTILE = "</script><script>alert(1)</script><img src='http://x/' onerror=\"alert(2)\">&amp;"
VOID = {"meta", "link", "img", "br", "hr", "input"}


def make_comparison(values: list[tuple[float, float]], *, text: str = "a river", hits: int = 10) -> Comparison:
    """Returns a comparison with a query for each pair of values; ranks are the inverse of the values."""
    rows = []
    for number, (first, second) in enumerate(values):
        relevant = ShownPassage(f"p{number}{text}", 1, text, f"{text} is the relevant passage")
        other = ShownPassage(f"o{number}", None, text, text)
        results = [
            RunResult({text: value}, round(1 / value) if value else None, relevant if value == 1 else other)
            for value in (first, second)
        ]
        rows.append(ComparedQuery(f"q{number}{text}", text, second - first, results[0], results[1], (relevant,)))
    columns = np.array(values).T
    recall = tuple(np.linspace(0.4, 1, hits))
    return Comparison(
        queries=f"queries/{text}",
        split=text,
        first=f"first {text}",
        second=f"second {text}",
        metrics=compare_means({text: columns[0]}, {text: columns[1]}),
        rows=tuple(sorted(rows, key=lambda row: -row.difference)),
        recall_first=recall,
        recall_second=recall,
    )


class Elements(HTMLParser):
    """Reads a page: its elements with their attributes, its text; fails if elements are not closed in order."""

    def __init__(self, page: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self.open += [tag] * (tag not in VOID)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_every_text_is_escaped_and_the_page_loads_nothing() -> None:
    page = Elements(render_page(make_comparison([(0, 1), (1, 0.5), (0.5, 0.5)], text=HOSTILE), 10))
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "link", "iframe", "object", "use", "image"}
    names = {name for _, attributes in page.elements for name in attributes}
    assert not {name for name in names if name.startswith("on") or name in ("src", "href", "action")}
    assert HOSTILE in page.text
    [policy] = [a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_the_page_has_the_most_won_and_the_most_lost_queries() -> None:
    values = [(0.5, 1), (1, 0.25), (0, 0), (0.25, 1), (1, 0.5)]
    page = Elements(render_page(make_comparison(values), 1))
    rows = [attributes for tag, attributes in page.elements if tag == "details"]
    assert len(rows) == 2
    shown = [attributes["class"] for _, attributes in page.elements if "difference" in class_of(attributes)]
    assert shown == ["difference second", "difference first"]
    assert "+0.7500a river0.2500 → 1.0000" in page.text.replace("\n", "")
    assert "-0.7500a river1.0000 → 0.2500" in page.text.replace("\n", "")
    assert "The 1 of 2 queries with the largest differences" in page.text
    assert page.text.count("It is the relevant passage.") == 2
    marks = sum(tag == "mark" for tag, _ in page.elements)
    assert marks >= 2
    only_won = Elements(render_page(make_comparison([(0, 1)]), 3))
    assert "No query is lost." in only_won.text


def test_a_long_passage_is_cut_to_the_part_with_the_words_of_the_query() -> None:
    comparison = make_comparison([(0, 0.5)], text="rare")
    [row] = comparison.rows
    long = ShownPassage("x", None, "", "filler " * 2_000 + "a rare word " + "filler " * 2_000)
    result = RunResult(row.second.values, 2, long)
    row = ComparedQuery(row.id, row.text, row.difference, row.first, result, row.relevant)
    page = render_page(Comparison(**{**vars(comparison), "rows": (row,)}), 1)
    assert "a <mark>rare</mark> word" in page
    assert len(page) < 40_000


def test_every_query_is_in_the_charts() -> None:
    draw = random.Random(1)
    grades = (0, 0.1, 0.25, 0.5, 1)
    comparison = make_comparison([(draw.choice(grades), draw.choice(grades)) for _ in range(200)])
    values = Elements(draw_values(comparison))
    assert sum(numbers_of(values.text)) == 200
    assert sum(numbers_of(Elements(draw_ranks(comparison)).text)) == 200
    bars = [
        attributes for _, attributes in Elements(draw_differences(comparison)).elements if "bar" in class_of(attributes)
    ]
    counts = comparison.metrics[0]
    assert [sum(side in class_of(bar) for bar in bars) for side in ("second", "first")] == [counts.won, counts.lost]
    dots = [attributes for _, attributes in Elements(draw_recall(comparison)).elements if "dot" in class_of(attributes)]
    assert len(dots) == 2 * 4  # depths 1, 2, 5, 10 of two runs


def numbers_of(text: str) -> list[int]:
    """Returns the numbers of queries in the tooltips of a chart."""
    return [int(piece.rsplit(": ", 1)[1].replace(",", "")) for piece in text.split(" queries")[:-1]]


def class_of(attributes: dict[str, str | None]) -> str:
    return attributes.get("class") or ""


def test_the_size_of_the_page_does_not_grow_with_the_queries() -> None:
    draw = random.Random(1)
    values = [(draw.random(), draw.random()) for _ in range(30_000)]
    small, large = (len(render_page(make_comparison(values[:number], hits=1_000), 5)) for number in (3_000, 30_000))
    assert large < 1.5 * small
    assert large < 1_000_000


@pytest.mark.parametrize("values", [[(0.5, 0.5)], [(0, 0)], [(1, 1), (1, 1)], [(12, 3)]])
def test_comparisons_without_differences_and_of_any_range_have_a_page(values: list[tuple[float, float]]) -> None:
    for hits in (0, 1, 10, 150, 1_000):
        comparison = make_comparison(values, hits=hits)
        numbers = [
            float(value)
            for draw in (draw_differences, draw_ranks, draw_recall, draw_values)
            for _, attributes in Elements(draw(comparison)).elements
            for name, value in attributes.items()
            if name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height") and value
        ]
        assert np.isfinite(numbers).all()
        assert min(numbers) >= -20
        assert max(numbers) <= 600


def test_ticks_are_round_numbers_within_the_range() -> None:
    for low, high in [(0, 1), (-0.04, 1.04), (0.7, 1), (0, 3_088), (-1, 1), (-0.003, 0.003), (0, 7), (0, 100)]:
        values = ticks(low, high)
        assert 3 <= len(values) <= 7
        assert low - 1e-9 <= values[0]
        assert values[-1] <= high + 1e-9
        steps = [later - earlier for earlier, later in itertools.pairwise(values)]
        assert steps == pytest.approx([steps[0]] * len(steps))
        assert f"{steps[0]:e}"[0] in "125"


def test_axes_map_the_ends_of_a_range_to_the_plot_area() -> None:
    axes, logarithmic = Axes((0, 10), (0, 1)), Axes((1, 100), (0, 1), is_log=True)
    assert (axes.x(0), axes.x(10)) == (logarithmic.x(1), logarithmic.x(100))
    assert logarithmic.x(10) == pytest.approx(axes.x(5))
    assert axes.y(0) > axes.y(1)
