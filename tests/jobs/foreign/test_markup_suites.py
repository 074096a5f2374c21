"""html5lib's tests and the examples of CommonMark as documents: no shown word is lost, and no script is text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from foreign_suites import load_suite, refusal
from selectolax.lexbor import LexborHTMLParser

from riptide.indexing.files.markup import read_html, read_markdown

ROOT = Path(__file__).resolve().parents[3]
LEFT_OUT = {"script", "style", "noscript", "template", "nav", "footer", "svg", "head", "frameset"}
NODE = re.compile(r"^\| ( *)(.*(?:\n(?!\| ).*)*)", re.MULTILINE)
# Documents whose text is not that of the tree, by their test.
DIFFERENT = {
    **dict.fromkeys(("main-element:0", "main-element:1"), "only <main> is read"),
    **dict.fromkeys(("plain-text-unsafe:18", "plain-text-unsafe:19"), "an import refuses a zero byte"),
    "tests1:21": "the first <h1> is the title",
    **dict.fromkeys(
        ("tests10:16", "tests10:17"), "a <select> has elements by a later version of HTML; <svg> is left out"
    ),
    **dict.fromkeys(("tests18:13", "tests18:14"), "a <select> has elements by a later version of HTML"),
    **dict.fromkeys((*(f"tests18:{n}" for n in range(30, 34)), "webkit01:28"), "a page of frames has no text"),
}


def without_spaces(text: str) -> str:
    return "".join(text.split())


def shown_text(tree: str) -> str:
    """Returns the text of an expected tree, without that of elements that are left out."""
    texts, hidden = list[str](), None
    for spaces, node in NODE.findall(tree):
        if hidden is not None and len(spaces) <= hidden:
            hidden = None
        if node.startswith("<") and hidden is None and LEFT_OUT & set(node[1:-1].split()):
            hidden = len(spaces)
        elif node.startswith('"') and hidden is None:
            texts.append(node[1:-1])
    return "".join(texts)


def test_the_text_of_html_is_that_of_the_expected_tree() -> None:
    different, num_refused = set(), 0
    for name, (source, tree) in load_suite("html5lib_trees").items():
        message = refusal(read_html, "f", source)
        if message:
            assert message.startswith("f: found no tag"), name
            num_refused += 1
        elif without_spaces(read_html("f", source)[1]) != without_spaces(shown_text(tree)):
            different.add(name)
    assert different == DIFFERENT.keys()
    assert num_refused == 162


def test_characters_and_entities_are_those_of_the_expected_tokens() -> None:
    suite = load_suite("html5lib_characters").items()
    different = {name for name, (source, text) in suite if read_html("f", f"<p>{source}")[1].split() != text.split()}
    assert all("\0" in source for name, (source, _) in suite if name in different)  # an import refuses a zero byte
    assert len(different) == 3


@pytest.mark.long
def test_the_text_of_markdown_is_that_of_the_examples_of_its_specification() -> None:
    """The licence of the examples is CC BY-SA, so they are not copied here: `make azurite` installs them."""
    specification = ROOT / ".venv/node_modules/commonmark-spec/spec.txt"
    content = specification.read_text(encoding="utf-8").replace("→", "\t")
    examples = re.findall(r"^`{32} example\n(.*?)^\.\n(.*?)^`{32}$", content, re.MULTILINE | re.DOTALL)
    different = list[int]()
    for number, (source, html) in enumerate(examples, 1):
        tree = LexborHTMLParser(f"<div>{html}</div>")
        for node in tree.css("script, style"):
            node.decompose()
        assert tree.body is not None
        title, text = map(without_spaces, read_markdown("f", source))
        expected = sorted(without_spaces(tree.body.text(separator="")))  # the title may be any heading
        if expected not in (sorted(text), sorted(title + text)):
            different.append(number)
    # A <style> without an end tag is text, so that no word is lost.
    assert (len(examples), different) == (652, [173])
