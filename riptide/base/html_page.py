"""HTML pages: each is one file that loads nothing else. All text is escaped, control characters too."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence

from riptide.base.wording import printable

STYLE = """body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .8em; text-align: left; vertical-align: top;
border-bottom: 1px solid #ccc } img { max-width: 100% } .number { text-align: right; white-space: nowrap }"""
# With this content security policy, the page can load nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def html_page(title: str, body: Iterable[str], style: str = STYLE, script: str = "") -> str:
    """Returns a complete HTML page.

    Args:
        title: Its title, plain text.
        body: Its elements.
        style: Its style sheet.
        script: Its JavaScript without control characters, which runs after the body; the page runs no other script.
    """
    policy, scripts = _POLICY, [f"<script>{script}</script>"] if script else []
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
    head = (
        "<meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<title>{html.escape(title)}</title>",
        f"<style>\n{style}</style>",
    )
    parts = ("<!doctype html>", "<html lang='en'><head>", *head, "</head><body>", *body, *scripts, "</body></html>", "")
    return printable("\n".join(parts), allowed="\n\r\t")


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int = 0) -> str:
    """Returns an HTML table.

    Args:
        head: The names of the columns, plain text.
        rows: The cells of each row, plain text.
        numbers: Number of the first columns that hold numbers, which are right-aligned.
    """
    lines = []
    for tag, row in (("th", head), *(("td", row) for row in rows)):
        classes = (" class='number'" if column < numbers else "" for column in range(len(row)))
        cells = (f"<{tag}{name}>{html.escape(cell)}</{tag}>" for name, cell in zip(classes, row, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "<table>" + "\n".join(lines) + "</table>"


def html_picture(description: str, png: bytes) -> str:
    """Returns an HTML element that embeds a PNG file; browsers without images show the description."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f"<p><img alt='{html.escape(description)}' src='{source}'></p>"
