"""Writes an HTML page of topics and their tree."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from riptide.base.html_page import STYLE, html_page, html_table
from riptide.indexing.store.result_files import write_files
from riptide.indexing.topics.topics_reader import Topics
from riptide.indexing.topics.tree import TopicNode

SHOWN_WORDS = 20  # number of words shown per node
_STYLE = f"{STYLE}\nul {{ padding-left: 1.5em }} li {{ margin: .3em 0 }} .topic {{ font-weight: bold }}"


def write_page(topics: Topics, path: str, *, overwrite: bool = False) -> None:
    """Writes an HTML file with the sizes and words of the topics, and the tree.

    Args:
        topics: The topics.
        path: The file.
        overwrite: Replace a file that has other content.

    Raises:
        InputError: If no file can be written there, or if a file with other content exists.
    """
    write_files([(path, render_page(topics))], overwrite=overwrite)


def render_page(topics: Topics) -> str:
    """Returns the page as HTML; escapes the words."""
    sizes, rows = topics.passages_per_topic(), max(1, topics.num_rows)
    title = f"Topics {topics.name}"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{topics.model.num_topics} topics of {topics.num_rows:,} passages, of which "
        f"{topics.num_rows - int(sizes.sum()):,} have no topic, as none of their words counts. "
        f"{html.escape(_describe_fit(topics.generations[0].config))}</p>",
        html_table(
            ("topic", "passages", "share", "most probable words"),
            [
                (f"{number}", f"{size:,}", f"{size / rows:.1%}", _join_words(words))
                for number, (size, words) in enumerate(zip(sizes.tolist(), topics.model.words, strict=True))
            ],
            numbers=3,
        ),
        "<h2>Tree</h2>",
        "<p>Passages are those of the fit whose path has the node; the words are the most frequent ones of the node "
        "itself, without those of its children.</p>",
        *_nested_lists(topics.tree.nodes),
    ]
    return html_page(title, body, _STYLE)


def _describe_fit(config: Mapping[str, Any]) -> str:
    """Returns a sentence with the method and the options of the fit."""
    names = ("depth", "gamma", "eta", "alpha", "iterations", "seed")
    settings = ", ".join(f"{name} {config[name]}" for name in names if name in config)
    method = "hierarchical LDA" if config["method"] == "hlda" else "LDA"
    return f"Fitted by {method} (tomotopy {config['tomotopy']}) with {settings}."


def _nested_lists(nodes: Sequence[TopicNode]) -> Iterator[str]:
    """Yields the HTML of nested lists of nodes, children with many passages first."""
    children: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(number)
    pending: list[int | str] = [-1]
    while pending:  # no recursion, as a tree may be deeper than Python's recursion limit
        step = pending.pop()
        if isinstance(step, str):
            yield step
            continue
        if step >= 0:
            yield f"<li>{_describe_node(nodes[step])}"
            pending.append("</li>")
        if step in children:
            yield "<ul>"
            order = sorted(children[step], key=lambda number: -nodes[number].passages)
            pending += ["</ul>", *reversed(order)]


def _describe_node(node: TopicNode) -> str:
    if node.level == 0:
        name = "root"
    elif node.level == 1:
        name = f"topic {node.topic}" if not node.merged else f"merged into topic {node.topic}"
    else:
        name = f"level {node.level}"
    return f"<span class='topic'>{name}</span>, {node.passages:,} passages: {html.escape(_join_words(node.words))}"


def _join_words(words: Sequence[str]) -> str:
    return ", ".join(words[:SHOWN_WORDS])
