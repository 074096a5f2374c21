"""Titles and texts of Markdown and HTML, and pages that a parser would take too long for."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

import psutil
import pytest

from riptide.base.errors import InputError
from riptide.indexing.files import markup
from riptide.indexing.files.markup import read_document, read_html, read_markdown


@pytest.mark.parametrize(
    ("source", "title", "text"),
    [
        ("<title>A &amp; b</title><h1>A  &amp;\n<i>b</i></h1><p>x <b>bo</b>ld<p>y", "A & b", "x bold\ny"),
        ("<title>Site</title><body><h1>Head</h1>x", "Site", "Head\nx"),
        ("<body><h1>Head <a class=headerlink>¶</a></h1>x", "Head", "x"),
        ("<h1>Only</h1>", "Only", "Only"),
        ("<div>a<div>b</div>c</div>d<br>e", "", "a\nb\nc\nd\ne"),
        ("<pre>if x:\n    <b>y</b></pre>", "", "if x:\ny"),
        ("<table><tr><td>1<td>2<tr><td>3</table>", "", "1 2\n3"),
        ("<nav>n<nav>m</nav></nav><script>1<2</script><footer>f<footer>g</footer></footer>x", "", "x"),
        ("<div>menu</div><main><p>x</main><div>end</div>", "", "x"),
        ("<svg><title>drawing</title><text>t</text></svg><p>x", "", "x"),
    ],
)
def test_html(source: str, title: str, text: str) -> None:
    assert read_html("f", source) == (title, text)


@pytest.mark.parametrize(
    ("source", "title", "text"),
    [
        ("---\ntitle: x\n---\n# Head *a*\n\nPara\nwrapped.\n", "Head a", "Para wrapped."),
        ("Intro\n\n# Head\n\n# Second", "Head", "Intro\nSecond"),
        ("## Sub\n\n- a\n  - b\n\n```py\nx = 1\ny\n```", "", "Sub\na\nb\nx = 1\ny"),
        ("| a | b |\n|---|---|\n| 1 | 2 |\n\n[link](u) `c < d` <b>raw</b>", "", "a b\n1 2\nlink c < d raw"),
        ("- " * 40 + "deep", "", "deep"),
        ("---\nnot front matter", "", "not front matter"),
        ("---\ntitle: X\n---\n# Head\nText", "Head", "Text"),
        ("---\r\ntitle: X\r\n---\r\n# Head\r\nText", "Head", "Text"),
        ("---\n---\nFirst\n\n---\nSecond", "", "First\nSecond"),
        ("---\n\nFirst\n\n---\nSecond", "", "First\nSecond"),
    ],
)
def test_markdown(source: str, title: str, text: str) -> None:
    assert read_markdown("f", source) == (title, text)


@pytest.mark.parametrize("source", ["<div>" * 100_000, "<div></b>" * 100_000, "<p>\n" + "<b><i>" * 50_000])
def test_deep_nesting_is_refused_before_it_is_parsed(source: str) -> None:
    with pytest.raises(InputError, match=r"f:[12]: found elements nested more than 2,000 deep"):
        read_html("f", source)


def test_many_attributes_are_refused_but_not_a_long_one() -> None:
    with pytest.raises(InputError, match=r"f:2: found a tag with more than 1,000 attributes"):
        read_html("f", "<p>\n<p " + " ".join(f'a{number}=">"' for number in range(100_000)) + ">x")
    assert read_html("f", f"<img src='data:{'a/ ' * 100_000}'>x") == ("", "x")


def test_elements_without_end_tags_are_not_deep() -> None:
    assert read_html("f", "<ul>" + "<li>x<br>" * 5_000)[1] == "\n".join(["x"] * 5_000)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("<script>var a = '<svg>'</script><p>kept<svg><text>t</text></svg><p>z", "kept\nz"),
        ("<!-- <svg> --><p>kept<svg></svg>", "kept"),
        ("<p title='<svg'>kept</p><svg></svg>", "kept"),
        ("<svg-icon>icon</svg-icon><p>kept<svg></svg>", "icon\nkept"),
    ],
)
def test_an_svg_image_is_dropped_and_nothing_before_it(source: str, text: str) -> None:
    assert read_html("f", source) == ("", text)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("the <template> element\n\nrest", "the <template> element\nrest"),
        ("the <script> element\n\nrest", "the <script> element\nrest"),
        ("a <textarea> b\n\nrest", "a <textarea> b\nrest"),
        ("<nav>\n\nmenu\n\n</nav>\n\nrest", "rest"),
        ("a <template>x</template> b <template>\n\nrest", "a b <template>\nrest"),
        ("<!-- open\n\nrest", "<!-- open rest"),
        ("<!-- closed --> rest", "rest"),
        ("---\nNo YAML: at: all\n---\nrest", "No YAML: at: all\nrest"),
        ("---\nA sentence.\n---\nrest", "A sentence.\nrest"),
        ("---\n# a comment\n---\nrest", "rest"),
    ],
)
def test_markdown_keeps_the_text_after_html_without_end_tag_and_front_matter_that_is_no_yaml(
    source: str, text: str
) -> None:
    assert read_markdown("f", source) == ("", text)


@pytest.mark.parametrize("line", ["> " * 120 + "deep", "- " * 60 + "deep", "> - " * 40 + "deep"])
def test_markdown_that_is_nested_deeper_than_its_parser_reads_is_refused(line: str) -> None:
    with pytest.raises(InputError, match="f:5: found block quotes and lists nested more than 100 levels deep"):
        read_markdown("f", f"---\ntitle: x\n---\nbefore\n{line}")


def test_a_long_document_that_takes_too_long_is_refused_and_the_next_one_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(markup, "PARSE_SECONDS", 1)
    monkeypatch.setattr(markup, "PARSE_SECONDS_PER_MIB", 0)
    with pytest.raises(InputError, match="f: found a document that takes more than 1 s to parse, expected less for"):
        read_document("f", "md", "![l" * 100_000 + "]")
    with pytest.raises(InputError, match="f:1: found elements nested more than 2,000 deep"):
        read_document("f", "html", "<div><xmp></div></xmp>" * 200_000)
    assert read_document("f", "html", "<title>T</title>" + "<p>é" * 20_000) == ("T", "\n".join("é" * 20_000))


LONG = "<title>T</title>" + "<p>é" * 20_000

# Reads a long document, forks, and reads it in both processes; prints the ids of the fork and of the two parsers.
IMPORTER = """
import os, signal
from riptide.indexing.files.markup import _PROCESS, read_document

source = "<p>x" * 20_000
read_document("f", "html", source)
mine = _PROCESS._process.pid
reader, writer = os.pipe()
if (fork := os.fork()) == 0:
    read_document("f", "html", source)
    os.write(writer, str(_PROCESS._process.pid).encode())
    signal.pause()
print(fork, mine, os.read(reader, 20).decode(), flush=True)
signal.pause()
"""


def test_a_parser_ends_with_its_importer_and_a_fork_has_its_own() -> None:
    """A parser that is stopped does not see the end of its input, like one that is busy."""
    importer = subprocess.Popen([sys.executable, "-c", IMPORTER], stdout=subprocess.PIPE, text=True)
    assert importer.stdout is not None
    fork, mine, other = (psutil.Process(int(pid)) for pid in importer.stdout.readline().split())
    try:
        assert mine != other
        mine.suspend()
        importer.kill()
        importer.wait()
        assert psutil.wait_procs([mine], timeout=30)[1] == []
        assert other.is_running()
    finally:
        for process in (importer, fork):
            process.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            mine.kill()
        assert psutil.wait_procs([other, mine], timeout=30)[1] == []
        importer.stdout.close()


def test_a_parser_ends_with_the_thread_that_uses_it() -> None:
    pids = list[int]()

    def read() -> None:
        assert read_document("f", "html", LONG)[0] == "T"
        process = markup._PROCESS._process
        assert process is not None
        pids.append(process.pid)

    for _ in range(2):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert len(set(pids)) == 2
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(30)
