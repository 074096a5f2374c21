"""Rows and cells of tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping


def header(*titles: str) -> list[str]:
    """Returns the two lines above the rows of a table."""
    return [row(*titles), "| --- " * len(titles) + "|"]


def row(*cells: object) -> str:
    """Returns the line of a row."""
    return f"| {' | '.join(map(str, cells))} |"


def interval_text(interval: Mapping[str, float], decimals: int) -> str:
    """Returns the cell of a mean difference with its interval: mean, low, high."""
    mean, low, high = (f"{interval[key]:+.{decimals}f}" for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"
