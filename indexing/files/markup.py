"""Extracts the title and the text of documents in plain text, Markdown or HTML."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from riptide.base.errors import RowError

if TYPE_CHECKING:
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

LONG_DOCUMENT = 65_536  # longer Markdown and HTML, in characters, is parsed in another process
# Maximum CPU time for parsing a document. Ordinary Markdown takes 0.6 s per MiB, HTML 0.1 s.
PARSE_SECONDS = 10
PARSE_SECONDS_PER_MIB = 20
PR_SET_PDEATHSIG = 1  # option of Linux's prctl: sends a process a signal when the thread that started it ends
# Elements whose text is not part of the document. Sphinx and MkDocs mark the link of a heading as headerlink.
LEFT_OUT = "script, style, noscript, template, svg, nav, footer, .headerlink"
MAIN = "main, [role=main]"
# Elements before and after which a line ends.
LINES = (
    "address, article, aside, blockquote, body, caption, dd, details, div, dl, dt, fieldset, figcaption, figure, form, "
    "h1, h2, h3, h4, h5, h6, header, hr, li, main, ol, p, section, summary, table, tr, ul"
)
CELLS = "td, th"
LINE_END = "\x1e"  # marks line ends of the text, since line ends of the source count as spaces

# Limits of HTML: the time of parsers is quadratic in both. No browser nests elements more than 512 deep.
MAX_NESTED = 2_000
MAX_ATTRIBUTES = 1_000
LONG_TAG = 4_000  # attributes are counted in tags with more characters than this
_TAG = re.compile(
    r"<!--(?:-?>|.*?(?:--!?>|\Z))|<(?P<raw>script|style|xmp|textarea|title|iframe|noembed|noframes)\b.*?(?:</(?P=raw)|\Z)|"
    r"<(?P<end>/?)(?P<name>[a-z][^\s/>]*)(?P<rest>(?:=\s*\"[^\"]*\"|=\s*'[^']*'|[^>])*+)",
    re.DOTALL | re.IGNORECASE,
)
_ATTRIBUTE = re.compile(r"[^\s/=]+(?:\s*=\s*(?:\"[^\"]*\"|'[^']*'|[^\s>]*))?")
# Elements that need no end tag, so their start tags do not count as nesting.
_ENDED_BY_OTHERS = re.compile(
    "a|area|base|body|br|col|colgroup|dd|dt|embed|head|hr|html|img|input|li|link|meta|optgroup|option|p|param|source|"
    "tbody|td|tfoot|th|thead|tr|track|wbr"
)
# As in Pandoc, `---` before an empty line is a horizontal rule and does not begin front matter.
_FRONT_MATTER = re.compile(r"---[ \t]*\n(?![ \t]*\n)(?:.*?\n)??(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
MAX_MARKDOWN_NESTED = 100  # levels; a list and its item are two
# Tags whose content, up to the end tag, a browser hides or shows as raw text; and starts of comments.
_HIDING = re.compile(
    r"<(?P<end>/?)(?P<name>script|style|noscript|template|svg(?![^<>]*/>)|nav|footer|title|textarea|xmp|iframe|noembed|"
    r"noframes|plaintext)(?=[\s/>])|<!--",
    re.IGNORECASE,
)


def read_document(file: str, ending: str, source: str) -> tuple[str, str]:
    """Extracts the title and the text of a document; the title is "" if the document has none.

    A long document of Markdown or HTML is parsed in another process, which ends if it takes too long: the parsers need
    time in the square of the length for some inputs, and one of them cannot be interrupted.

    Args:
        file: The file, for messages.
        ending: Its ending, one of READERS.
        source: Its content.

    Raises:
        RowError: If it is malformed, or takes too long to parse.
    """
    if ending == "txt" or len(source) <= LONG_DOCUMENT:
        return READERS[ending](file, source)
    return _PROCESS.read(file, ending, source)


def read_plain(file: str, source: str) -> tuple[str, str]:
    """Returns an empty title and the unchanged text of a plain-text document."""
    return "", source


def read_markdown(file: str, source: str) -> tuple[str, str]:
    """Extracts the title and the text of Markdown (CommonMark with tables).

    The title is the first heading of level 1; "" without one. YAML before the text (front matter) is left out.

    Args:
        file: The file, for messages.
        source: Its content.

    Raises:
        RowError: If quotes, lists or the HTML within it are nested too deep.
    """
    from markdown_it import MarkdownIt

    source = source.replace("\r\n", "\n")
    front = _FRONT_MATTER.match(source)
    first_line = 1
    if front and _is_yaml_mapping(front[0]):
        first_line += front[0].count("\n")
        source = source[front.end() :]
    parser = MarkdownIt("commonmark", {"maxNesting": MAX_MARKDOWN_NESTED}).enable("table")
    parser.inline.ruler.at("link", _parse_link)
    parser.inline.ruler.at("image", _parse_image)
    tokens = parser.parse(source)
    for token in tokens:  # an error, because the parser drops the text of deeper levels
        if token.type in ("blockquote_open", "list_item_open") and token.level >= MAX_MARKDOWN_NESTED - 1:
            raise RowError(
                f"{file}:{first_line + (token.map or [0])[0]}: found block quotes and lists nested more than "
                f"{MAX_MARKDOWN_NESTED} levels deep (a list and its item are two); reduce the nesting"
            )
    _show_unclosed(tokens)
    return _read_page(file, parser.renderer.render(tokens, parser.options, {}))


def _is_yaml_mapping(front: str) -> bool:
    """Returns whether the lines between `---` are a YAML mapping or empty."""
    import yaml

    body = front.split("\n", 1)[1].rstrip().removesuffix("---").removesuffix("...")
    try:
        events = [type(event) for event in yaml.parse(body, Loader=yaml.CSafeLoader)]
    except yaml.YAMLError:
        return False
    return yaml.MappingStartEvent in events[2:3] or not body.strip() or len(events) == 2


def _show_unclosed(tokens: Sequence[Token]) -> None:
    """Escapes start tags and comments that lack an end and would hide the rest of the document; changes `tokens`."""
    inner = [child for token in tokens for child in [token, *(token.children or [])]]
    ends: Counter[str] = Counter()
    for token in reversed([each for each in inner if each.type in ("html_inline", "html_block")]):
        content, pieces, cut = token.content, [], len(token.content)
        for tag in reversed(list(_HIDING.finditer(content))):
            name = (tag["name"] or "").lower()
            if tag["end"]:
                ends[name] += 1
            elif ends[name]:
                ends[name] -= 1
            elif name or tag.start() > content.rfind("-->"):
                pieces += [content[tag.start() + 1 : cut], "&lt;"]
                cut = tag.start()
        token.content = content[:cut] + "".join(reversed(pieces))


def _parse_link(state: StateInline, silent: bool) -> bool:
    """Parses a link as markdown-it does, but skips the slow search if no closing bracket follows."""
    if state.src[state.pos] != "[" or not _has_bracket(state):
        return False
    from markdown_it.rules_inline import link

    return link(state, silent)


def _parse_image(state: StateInline, silent: bool) -> bool:
    """Parses an image as markdown-it does, but skips the slow search if no closing bracket follows."""
    if state.src[state.pos] != "!" or not _has_bracket(state):
        return False
    from markdown_it.rules_inline import image

    return image(state, silent)


def _has_bracket(state: StateInline) -> bool:
    """Returns whether a closing bracket follows; searches for the last bracket once per text."""
    if state.env.get("text") is not state.src:
        state.env["text"], state.env["last bracket"] = state.src, state.src.rfind("]")
    return bool(state.env["last bracket"] > state.pos)


def read_html(file: str, source: str) -> tuple[str, str]:
    """Extracts the title and the text of HTML.

    The title is that of `<title>`, otherwise of the first `<h1>`; "" without both. The text is that of `<main>`,
    otherwise of `<body>`, without scripts, navigation and footers, a line for each paragraph.

    Args:
        file: The file, for messages.
        source: Its content.

    Raises:
        RowError: If it has no tag, or is nested too deep.
    """
    if not _TAG.search(source):
        raise RowError(f"{file}: found no tag, expected HTML; rename the file to .txt if it is plain text")
    return _read_page(file, source)


# File extension -> function that extracts the title and the text.
READERS = {"txt": read_plain, "md": read_markdown, "html": read_html, "htm": read_html}


class ParserProcess(threading.local):
    """Manages one parser process per thread, which parses the documents of this thread and ends with it.

    It starts with the first document, and again after one that ended it. A forked process starts its own.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, file: str, ending: str, source: str) -> tuple[str, str]:
        """Extracts the title and the text of a document in the parser process; see `read_document`."""
        seconds = round(PARSE_SECONDS + PARSE_SECONDS_PER_MIB * len(source) / (1 << 20))
        process = self._process = self._process or _start_process()
        try:
            answer = _exchange(process, orjson.dumps([file, ending, source, seconds]) + b"\n")
        except BaseException:  # so that an interrupted job does not wait for the parser
            self._end(process)
            raise
        if answer:
            title, text = orjson.loads(answer)
            if title is None:
                raise RowError(text)
            return title, text
        self._end(process)
        if process.returncode == -signal.SIGXCPU:
            raise RowError(
                f"{file}: found a document that takes more than {seconds:,} s to parse, expected less for its "
                f"{len(source):,} characters; cut it, repair its markup (often tags or brackets without an end), or "
                "remove it"
            )
        raise RowError(f"{file}: found a document that ends its parser (exit {process.returncode}); remove it")

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kills the process unless it has ended, and waits for it, so that its exit status is known."""
        self._process = None
        try:
            process.wait(0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def forget(self) -> None:
        """Forgets the process without ending it: after a fork, it belongs to the parent."""
        self._process = None


def _start_process() -> subprocess.Popen[bytes]:
    """Starts `_answer_documents` in a process of a new session, which signals of a terminal do not reach."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "riptide.indexing.files.markup", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """Sends a request line to a process and returns its response line; b"" if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return process.stdout.readline()


def _end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when the thread that started it ends, even if that thread is killed.

    The end of its standard input is not enough, as a document may take minutes to parse.

    Args:
        parent: The process id of the parent, which may have ended already.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit()


def _answer_documents() -> None:
    """Reads documents from standard input and writes [title, text] or [null, error] of each as a line of JSON."""
    for line in sys.stdin.buffer:
        file, ending, source, seconds = orjson.loads(line)
        limit = int(time.process_time()) + 1 + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        try:
            answer: tuple[str | None, str] = READERS[ending](file, source)
        except RowError as error:
            answer = None, str(error)
        sys.stdout.buffer.write(orjson.dumps(answer) + b"\n")
        sys.stdout.buffer.flush()


def _read_page(file: str, source: str) -> tuple[str, str]:
    """Extracts the title and the text of HTML. The first `<h1>` is left out of the text if it equals the title."""
    from selectolax.lexbor import LexborHTMLParser

    _check_structure(file, source)
    tree = LexborHTMLParser(source)
    for node in reversed(tree.css(LEFT_OUT)):  # reversed, so that a node is removed before its parent
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
    """Inserts LINE_END into the tree where a line begins or ends, and a space after table cells."""
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
    """Returns the text of a node as lines, without empty lines and repeated white space."""
    lines = (" ".join(line.split()) for line in root.text(separator="").split(LINE_END))
    return "\n".join(line for line in lines if line)


def _line_of_node(node: Any) -> str:
    """Returns the text of a node as one line; "" for None."""
    return "" if node is None else " ".join(node.text(separator="").replace(LINE_END, " ").split())


def _check_structure(file: str, source: str) -> None:
    """Raises RowError if elements are nested too deep, or if a tag has too many attributes."""
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


_PROCESS = ParserProcess()
os.register_at_fork(after_in_child=_PROCESS.forget)

if __name__ == "__main__":
    _end_with_parent(int(sys.argv[1]))
    _answer_documents()
