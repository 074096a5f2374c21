"""Renders the page on which an assessor judges pairs by keyboard: one file that loads nothing, with escaped texts."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from riptide.base.html_page import html_page

_BUTTONS = {"relevant": "Relevant (r)", "not": "Not relevant (n)", "skip": "Skip (s)"}


def render_page(pairs: Sequence[Mapping[str, str]], identity: str) -> str:
    """Returns the HTML page of pairs to judge.

    Args:
        pairs: query_id, id, query, title and text of each pair.
        identity: A hash of the judging, by which the browser keeps its verdicts.
    """
    style, script = (
        Path(__file__).with_name(f"judging.{ending}").read_text(encoding="utf-8") for ending in ("css", "js")
    )
    buttons = [f"<button data-verdict='{verdict}'>{text}</button>" for verdict, text in _BUTTONS.items()]
    body = [
        "<header><h1>Is the passage relevant for the query?</h1><p id='progress'></p></header>",
        f"<main data-identity='{html.escape(identity)}'>",
        *map(_render_pair, pairs),
        "</main><footer>",
        *buttons,
        "<button id='back'>Back (left arrow)</button><button id='save'>Save verdicts</button></footer>",
    ]
    return html_page("Judge passages", body, style, script)


def _render_pair(pair: Mapping[str, str]) -> str:
    """Returns the HTML element of a pair, which the script shows when it is its turn."""
    text, title, passage = (html.escape(pair[name]) for name in ("query", "title", "text"))
    heading = f"<h3>{title}</h3>" if title else ""
    ids = html.escape(json.dumps([pair["query_id"], pair["id"]]))  # ASCII, so that no character of an id is replaced
    return f"<article hidden data-pair='{ids}'><h2>{text}</h2>{heading}<p>{passage}</p></article>"
