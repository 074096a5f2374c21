"""Formats a comparison as lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from riptide.indexing.measures.metrics import BOOTSTRAP_DRAWS, RESAMPLES
from riptide.indexing.search.snippets import shorten
from riptide.jobs.comparison.values import ComparedQuery, ComparedRuns

MAX_ID = 24  # maximum length of a printed id; a longer one, such as a hash, would leave no room for the text
_WIDTH = 120  # maximum width of a query's line, whose text is cut
_NAME = 24  # maximum width of a run's name


def print_lines(comparison: ComparedRuns, examples: int) -> Iterator[str]:
    """Yields the table of means, the description of the tests, and the most won and lost queries."""
    yield from format_means(comparison)
    yield from ("", *describe_tests(comparison))
    for title, rows in (("won", comparison.won(examples)), ("lost", comparison.lost(examples))):
        if rows:
            yield ""
            yield f"most {title} by {comparison.second}, by {comparison.metric}:"
            yield from format_queries(comparison, rows)


def format_means(comparison: ComparedRuns) -> list[str]:
    """Returns the lines of a table with a row per metric."""
    names = [shorten_name(name, _NAME) for name in (comparison.first, comparison.second)]
    head = [*names, "difference", "95% interval", "p-value", "won", "equal", "lost"]
    table = [["", *head]]
    for each in comparison.metrics:
        means = [f"{each.first:.4f}", f"{each.second:.4f}", f"{each.difference:+.4f}"]
        counts = [f"{number:,}" for number in (each.won, each.equal, each.lost)]
        table.append(
            [each.metric, *means, f"{each.low:+.4f} to {each.high:+.4f}", f"{each.adjusted_p_value:.4f}", *counts]
        )
    return _align_columns(table)


def describe_tests(comparison: ComparedRuns) -> list[str]:
    """Returns sentences that explain the columns of the table."""
    number = len(comparison.metrics)
    corrected = f", adjusted for {number} metrics (Holm)" if number > 1 else ""
    return [
        f"Means of {len(comparison.rows):,} queries. Won: {comparison.second} has the higher value.",
        f"P-value: two-sided paired randomisation test with {RESAMPLES:,} sign patterns{corrected}.",
        f"Interval: bootstrap of the queries with {BOOTSTRAP_DRAWS:,} draws.",
    ]


def format_queries(comparison: ComparedRuns, rows: Sequence[ComparedQuery]) -> list[str]:
    """Returns a line per query: values of both runs, ranks of the first relevant hit, id unless it is long, text."""
    names = [shorten_name(name, _NAME) for name in (comparison.first, comparison.second)]
    table = [["difference", *names, "first relevant"]]
    for row in rows:
        values = [f"{result.values[comparison.metric]:.4f}" for result in (row.first, row.second)]
        ranks = [f"{result.relevant_rank or '-'}" for result in (row.first, row.second)]
        table.append([f"{row.difference:+.4f}", *values, " > ".join(ranks)])
    queries = ["query", *(f"{row.id}  {row.text}" if len(row.id) <= MAX_ID else row.text for row in rows)]
    columns = zip(_align_columns(table), queries, strict=True)
    return [f"  {cells}  {shorten(query, max(20, _WIDTH - len(cells)))}" for cells, query in columns]


def shorten_name(name: str, width: int) -> str:
    """Cuts the name of a run to its last `width` characters, in which files of one folder differ."""
    return name if len(name) <= width else f"…{name[1 - width :]}"


def _align_columns(table: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table with aligned columns; the first column is left-aligned."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
