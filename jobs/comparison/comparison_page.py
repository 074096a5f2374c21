"""Renders a comparison as one self-contained HTML file. Every text is escaped."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from pathlib import Path

from riptide.base.html_page import html_page
from riptide.jobs.comparison.charts import draw_differences, draw_ranks, draw_recall, draw_values
from riptide.jobs.comparison.examples import colour_name, render_examples
from riptide.jobs.comparison.printed_table import describe_tests
from riptide.jobs.comparison.values import ComparedRuns, MetricComparison

_STYLE = Path(__file__).with_name("style.css")


def render_page(comparison: ComparedRuns, examples: int) -> str:
    """Returns the HTML page of a comparison.

    Args:
        comparison: The comparison.
        examples: Number of the most won queries, and of the most lost ones.
    """
    first, second = colour_name("first", comparison.first), colour_name("second", comparison.second)
    title = f"{comparison.second} against {comparison.first}"
    body = [
        f"<header><h1>{second} against {first}</h1>",
        f"<p class='dim'>{len(comparison.rows):,} queries of {html.escape(comparison.queries)} "
        f"{html.escape(comparison.split)}. {first} is the baseline: a difference above 0 is a gain of {second}."
        "</p></header>",
        *_render_means(comparison, first, second),
        *_render_charts(comparison, first, second),
        *render_examples(comparison, examples),
        f"<footer>{html.escape(' '.join(describe_tests(comparison)))}</footer>",
    ]
    return html_page(title, body, _STYLE.read_text(encoding="utf-8"))


def _render_means(comparison: ComparedRuns, first: str, second: str) -> Iterator[str]:
    """Yields the HTML table of the metrics."""
    adjustment = " (Holm)" if len(comparison.metrics) > 1 else ""
    heads = ["", first, second, "difference", "95% interval", f"p-value{adjustment}"]
    yield "<div class='scroll'><table><thead><tr>"
    yield "".join(f"<th>{head}</th>" for head in heads)
    yield f"<th class='counts'>queries won by {second}, equal, lost</th></tr></thead><tbody>"
    for each in comparison.metrics:
        means = f"<td>{each.first:.4f}</td><td>{each.second:.4f}</td>"
        interval = f"<td>{each.low:+.4f} to {each.high:+.4f}</td><td>{each.adjusted_p_value:.4f}</td>"
        yield (
            f"<tr><td>{html.escape(each.metric)}</td>{means}<td class='strong'>{each.difference:+.4f}</td>{interval}"
            f"<td class='counts'>{_render_shares(each)}</td></tr>"
        )
    yield "</tbody></table></div>"


def _render_shares(metric: MetricComparison) -> str:
    """Returns HTML: a bar of the won, equal and lost queries of a metric, and their numbers."""
    counts = {"second": metric.won, "equal": metric.equal, "first": metric.lost}
    bars = "".join(f"<i class='{side}' style='flex: {count}'></i>" for side, count in counts.items() if count)
    numbers = f"<span class='second'>{metric.won:,}</span><span>{metric.equal:,}</span>"
    lost = f"<span class='first'>{metric.lost:,}</span>"
    return f"<div class='shares'>{bars}</div><div class='numbers'>{numbers}{lost}</div>"


def _render_charts(comparison: ComparedRuns, first: str, second: str) -> Iterator[str]:
    """Yields the charts and their captions as HTML."""
    metric = html.escape(comparison.metric)
    charts: list[tuple[str, str, Callable[[ComparedRuns], str]]] = [
        ("Recall by depth", "Mean share of the relevant passages among the first hits.", draw_recall),
        (
            "Difference by query",
            f"Each bar is a query: {metric} of {second} minus that of {first}.",
            draw_differences,
        ),
        (
            f"{metric} of both runs",
            f"Larger circles are more queries. Above the line, {second} is better.",
            draw_values,
        ),
        (
            "Rank of the first relevant hit",
            f"Number of queries by the rank in both runs. Below the diagonal, {second} finds it earlier.",
            draw_ranks,
        ),
    ]
    yield "<div class='charts'>"
    for title, caption, draw in charts:
        yield f"<figure><h2>{title}</h2><figcaption>{caption}</figcaption>{draw(comparison)}</figure>"
    yield "</div>"
