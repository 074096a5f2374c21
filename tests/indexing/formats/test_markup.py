"""Titles and texts of Markdown and HTML, and pages that a parser would take too long for."""

from __future__ import annotations

import pytest

from indexing.files.markup import read_html, read_markdown
from retriever.errors import InputError


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
