"""Data frames of pandas and polars, which are imported only when needed, and HTML tables for notebooks."""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from riptide.base.errors import InputError
from riptide.base.wording import shorten

SHOWN_ROWS = 100  # maximum number of rows that a table in a notebook shows
SHOWN_CHARACTERS = 300  # maximum number of characters that a cell shows


def import_frames(library: Literal["pandas", "polars"]) -> Any:
    """Imports pandas or polars. Raises InputError if the package is not installed."""
    try:
        return importlib.import_module(library)
    except ImportError:
        raise InputError(f"a data frame needs {library}, which is not installed; run: pip install {library}") from None


def notebook_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns an HTML table for a notebook, with the first SHOWN_ROWS rows; texts are escaped and long ones cut."""
    rows = list(rows)
    head = "".join(f"<th>{_escape(name)}</th>" for name in columns)
    lines = [f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[:SHOWN_ROWS]]
    more = f"<p>and {len(rows) - SHOWN_ROWS:,} more rows</p>" if len(rows) > SHOWN_ROWS else ""
    # The classes prevent MathJax in notebooks from rendering $ in a text as a formula.
    return (
        f'<div class="tex2jax_ignore mathjax_ignore"><table><caption>{_escape(title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>{more}</div>"
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"<td>{value:.4f}</td>"
    return f'<td style="text-align: left">{_escape("" if value is None else str(value))}</td>'


def _escape(text: str) -> str:
    return html.escape(shorten(" ".join(text.split()), SHOWN_CHARACTERS))
