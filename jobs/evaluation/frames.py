"""Tables for programs and notebooks: data frames of pandas and polars, imported only for them, and HTML."""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from riptide.base.errors import InputError, shorten

SHOWN_ROWS = 100  # of a table in a notebook
SHOWN_CHARACTERS = 300  # of a cell


def import_frames(library: Literal["pandas", "polars"]) -> Any:
    """Returns the module of a library of data frames. Raises InputError if it is not installed."""
    try:
        return importlib.import_module(library)
    except ImportError:
        raise InputError(f"a data frame needs {library}, which is not installed; run: pip install {library}") from None


def notebook_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table for a notebook, with its first rows; texts are escaped, and long ones are cut."""
    rows = list(rows)
    head = "".join(f"<th>{_escape(name)}</th>" for name in columns)
    lines = [f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[:SHOWN_ROWS]]
    more = f"<p>and {len(rows) - SHOWN_ROWS:,} more rows</p>" if len(rows) > SHOWN_ROWS else ""
    # The classes keep a notebook from reading $ in a text as a formula.
    return (
        f'<div class="tex2jax_ignore mathjax_ignore"><table><caption>{_escape(title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>{more}</div>"
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"<td>{value:.4f}</td>"
    return f'<td style="text-align: left">{_escape("" if value is None else str(value))}</td>'


def _escape(text: str) -> str:
    return html.escape(shorten(text, SHOWN_CHARACTERS))
