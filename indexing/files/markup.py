"""The title and the text of a document: plain text, Markdown or HTML."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from retriever.errors import RowError

# Elements whose text is not that of the document. Sphinx and MkDocs mark the link of a heading as headerlink.
LEFT_OUT = "script, style, noscript, template, nav, footer, .headerlink"
MAIN = "main, [role=main]"
# Elements that begin a line and end one.
LINES = (
    "address, article, aside, blockquote, body, caption, dd, details, div, dl, dt, fieldset, figcaption, figure, form, "
    "h1, h2, h3, h4, h5, h6, header, hr, li, main, ol, p, section, summary, table, tr, ul"
)
CELLS = "td, th"
LINE_END = "\x1e"  # marks the end of a line of the text; line ends of the source are spaces

# Bounds of HTML: parsers take time in the square of both. No browser nests elements more than 512 deep.
MAX_NESTED = 2_000
MAX_ATTRIBUTES = 1_000
LONG_TAG = 4_000  # characters of a tag whose attributes are counted
_TAG = re.compile(
    r"<!--(?:-?>|.*?(?:--!?>|\Z))|<(?P<raw>script|style)\b.*?(?:</(?P=raw)|\Z)|"
    r"<(?P<end>/?)(?P<name>[a-z][^\s/>]*)(?P<rest>(?:=\s*\"[^\"]*\"|=\s*'[^']*'|[^>])*+)",
    re.DOTALL | re.IGNORECASE,
)
_SVG = re.compile(r"<svg\b.*?</svg>", re.DOTALL)
_ATTRIBUTE = re.compile(r"[^\s/=]+(?:\s*=\s*(?:\"[^\"]*\"|'[^']*'|[^\s>]*))?")
# Elements that need no end tag, so that an open one says nothing about the depth.
_ENDED_BY_OTHERS = re.compile(
    "a|area|base|body|br|col|colgroup|dd|dt|embed|head|hr|html|img|input|li|link|meta|optgroup|option|p|param|source|"
    "tbody|td|tfoot|th|thead|tr|track|wbr"
)
# As in Pandoc, `---` before an empty line is a horizontal line, and begins no front matter.
_FRONT_MATTER = re.compile(r"---[ \t]*\n(?![ \t]*\n)(?:.*?\n)??(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)


def read_plain(file: str, source: str) -> tuple[str, str]:
    """Returns the title, which is empty, and the text of plain text."""
    return "", source


def read_markdown(file: str, source: str) -> tuple[str, str]:
    """Returns the title and the text of Markdown (CommonMark and tables).

    The title is the first heading of level 1; "" without one. YAML before the text (front matter) is left out.

    Args:
        file: The file, for messages.
        source: Its content.

    Raises:
        InputError: If HTML within it is nested too deep.
    """
    from markdown_it import MarkdownIt

    source = source.replace("\r\n", "\n")
    if front := _FRONT_MATTER.match(source):
        source = source[front.end() :]
    parser = MarkdownIt("commonmark", {"maxNesting": 100}).enable("table")
    return _read_page(file, parser.render(source))


def read_html(file: str, source: str) -> tuple[str, str]:
    """Returns the title and the text of HTML.

    The title is that of `<title>`, otherwise of the first `<h1>`; "" without both. The text is that of `<main>`,
    otherwise of `<body>`, without scripts, navigation and footers, a line for each paragraph.

    Args:
        file: The file, for messages.
        source: Its content.

    Raises:
        InputError: If it has no tag, or is nested too deep.
    """
    if not _TAG.search(source):
        raise RowError(f"{file}: found no tag, expected HTML; rename the file to .txt if it is plain text")
    return _read_page(file, source)


def _read_page(file: str, source: str) -> tuple[str, str]:
    """Returns the title and the text of HTML. The heading that is the title is left out of the text."""
    from selectolax.lexbor import LexborHTMLParser

    if images_end := source.rfind("</svg>") + 1:  # their elements are many, and no text
        source = _SVG.sub("", source[: images_end + 5]) + source[images_end + 5 :]
    _check_structure(file, source)
    tree = LexborHTMLParser(source)
    for node in reversed(tree.css(LEFT_OUT)):  # reversed: a node is removed before the one that it is in
        node.decompose()
    root = tree.css_first(MAIN) or tree.body
    if root is None:
        return "", ""
    named = _line_of_node(tree.css_first("head > title"))
    heading = root.css_first("h1")
    title = named or _line_of_node(heading)
    _mark_lines(root)
    text = _text_of_node(root)
    if heading is not None and _line_of_node(heading) == title:
        heading.decompose()
        text = _text_of_node(root) or text
    return title, text


def _mark_lines(root: Any) -> None:
    """Writes LINE_END where a line begins or ends, and a space between cells."""
    for node in reversed(root.css("pre")):
        node.replace_with(LINE_END + node.text(separator="").replace("\n", LINE_END) + LINE_END)
    for node in root.css(LINES):
        node.insert_before(LINE_END)
        node.insert_after(LINE_END)
    for node in root.css("br"):
        node.insert_after(LINE_END)
    for node in root.css(CELLS):
        node.insert_after(" ")


def _text_of_node(root: Any) -> str:
    """Returns the text of a node in lines, without repeated white space and empty lines."""
    lines = (" ".join(line.split()) for line in root.text(separator="").split(LINE_END))
    return "\n".join(line for line in lines if line)


def _line_of_node(node: Any) -> str:
    """Returns the text of a node as one line; "" for None."""
    return "" if node is None else " ".join(node.text(separator="").replace(LINE_END, " ").split())


def _check_structure(file: str, source: str) -> None:
    """Raises InputError for elements that are nested too deep, or a tag with too many attributes."""
    open_tags: Counter[str] = Counter()
    depth = 0
    for tag in _TAG.finditer(source):
        name, rest = (tag["name"] or "").lower(), tag["rest"] or ""
        if len(rest) > LONG_TAG and sum(1 for _ in _ATTRIBUTE.finditer(rest)) > MAX_ATTRIBUTES:
            place = f"{file}:{source.count(chr(10), 0, tag.start()) + 1}"
            raise RowError(f"{place}: found a tag with more than {MAX_ATTRIBUTES:,} attributes; remove some of them")
        if not name or _ENDED_BY_OTHERS.fullmatch(name):
            continue
        if not tag["end"]:
            open_tags[name] += 1
            depth += 1
        elif open_tags[name]:
            open_tags[name] -= 1
            depth -= 1
        if depth > MAX_NESTED:
            place = f"{file}:{source.count(chr(10), 0, tag.start()) + 1}"
            raise RowError(
                f"{place}: found elements nested more than {MAX_NESTED:,} deep, expected fewer; close the open tags"
            )
