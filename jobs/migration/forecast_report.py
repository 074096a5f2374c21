"""The forecast of a migration as lines for the terminal, as JSON values and as a page."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from riptide.base.html_page import html_page, html_table
from riptide.jobs.migration.forecasting import Choice, Forecast
from riptide.process.memory import format_bytes


def forecast_lines(forecast: Forecast) -> Iterator[str]:
    """Yields the tables of the maps and of the choices, and what the interval covers."""
    yield sample_line(forecast)
    yield from ("", *_aligned(map_rows(forecast)), "", *_aligned(choice_rows(forecast)), "", *remarks(forecast))


def sample_line(forecast: Forecast) -> str:
    """Returns a line with the sizes of the sample."""
    return (
        f"{forecast.num_random:,} random and {forecast.num_chosen:,} judged or hard passages of "
        f"{forecast.num_passages:,}; {forecast.num_queries:,} queries of {forecast.queries} {forecast.split}"
    )


def map_rows(forecast: Forecast) -> list[list[str]]:
    """Returns the head and the rows of the table of the maps."""
    rows = [["map", "cosine", "common neighbours"]]
    return rows + [[each.name, f"{each.cosine:.4f}", f"{each.neighbours:.4f}"] for each in forecast.maps]


def choice_rows(forecast: Forecast) -> list[list[str]]:
    """Returns the head and the rows of the table of the choices."""
    rows = [["choice", forecast.metric, "difference", "95% interval", "passages", "bytes", "time here"]]
    for each in forecast.choices:
        gain = ["", ""]
        if each.difference is not None:
            mean, low, high = each.difference
            gain = [f"{mean:+.4f}", f"{low:+.4f} to {high:+.4f}"]
        rows.append([each.name, f"{each.value:.4f}", *gain, *_costs(each)])
    return rows


def remarks(forecast: Forecast) -> Iterator[str]:
    """Yields sentences that explain the tables."""
    yield (
        f"Maps are measured on held-out texts; {forecast.best_map.name} has the most common neighbours. Mapped queries "
        "search all existing vectors exactly."
    )
    yield ("Intervals cover the draw of the queries; that of `encode all` also covers the draw of the random passages.")
    last = forecast.choices[-1].difference
    if last is not None and last.low <= 0 <= last.high:
        yield "The forecast cannot tell whether the new encoder is better or worse than the old one on these queries."


def forecast_document(forecast: Forecast) -> dict[str, Any]:
    """Returns the forecast as JSON values, without the weights of the maps."""
    document = asdict(forecast)
    for each in document["maps"]:
        del each["weights"], each["offset"]
    for each in document["choices"]:
        each["difference"] = each["difference"] and dict(zip(("mean", "low", "high"), each["difference"], strict=True))
    return document | {"best_map": forecast.best_map.name}


def forecast_page(forecast: Forecast) -> str:
    """Returns the HTML page of the forecast."""
    title = f"From {forecast.old} to {forecast.new}"
    tables = [html_table(rows[0], rows[1:]) for rows in (choice_rows(forecast), map_rows(forecast))]
    texts = [f"<p>{html.escape(text)}</p>" for text in (sample_line(forecast), *remarks(forecast))]
    return html_page(title, [f"<h1>{html.escape(title)}</h1>", texts[0], *tables, *texts[1:]])


def _costs(choice: Choice) -> list[str]:
    """Returns the cells of the passages, the bytes and the time of a choice."""
    if not choice.passages:
        return ["0", "0", "0 h"]
    return [f"{choice.passages:,}", format_bytes(choice.size_bytes), f"{choice.seconds / 3600:.3g} h"]


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the rows of a table with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()
