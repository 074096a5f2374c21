"""Renders the examples on the page of a comparison: won and lost queries with their passages. Every text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from riptide.indexing.search.snippets import MatchMarks, QueryWords, snippet
from riptide.jobs.comparison.shown_passages import ShownPassage
from riptide.jobs.comparison.values import ComparedQuery, ComparedRuns, RunResult

_MAX_RELEVANT = 3  # relevant passages that an example shows; further ones are only counted
_MAX_CHARACTERS = 1_000  # characters of a passage; a longer one is cut to the part with the most words of the query
_UNMARKED = MatchMarks("", "")


def colour_name(side: str, name: str) -> str:
    """Returns the name of a run as HTML in the run's colour. `side`: first or second."""
    return f"<b class='{side}'>{html.escape(name)}</b>"


def render_examples(comparison: ComparedRuns, number: int) -> Iterator[str]:
    """Yields HTML of the most won and the most lost queries, each in a row that opens to show its passages.

    Args:
        comparison: The comparison.
        number: Number of the won queries, and of the lost ones.
    """
    metric = comparison.metrics[0]
    kinds = (("won", comparison.won(number), metric.won), ("lost", comparison.lost(number), metric.lost))
    for outcome, rows, total in kinds:
        yield f"<h2>Queries {outcome} by {colour_name('second', comparison.second)}</h2>"
        if not rows:
            yield f"<p class='dim'>No query is {outcome}.</p>"
            continue
        yield (
            f"<p class='dim'>The {len(rows):,} of {total:,} queries with the largest differences in "
            f"{html.escape(comparison.metric)}. Words of the query are marked.</p>"
        )
        yield "<div class='heads'><span></span><span>difference</span><span class='query'>query</span>"
        yield f"<span>{html.escape(comparison.metric)}</span><span>first relevant at</span></div>"
        for position, row in enumerate(rows):
            yield from _render_query(comparison, row, is_open=position == 0)


def _render_query(comparison: ComparedRuns, row: ComparedQuery, *, is_open: bool) -> Iterator[str]:
    """Yields HTML of a query with its relevant passages and the first hit of each run."""
    results = {"first": row.first, "second": row.second}
    names = {"first": comparison.first, "second": comparison.second}
    values = [f"{result.values[comparison.metric]:.4f}" for result in results.values()]
    ranks = ["none" if each.relevant_rank is None else f"{each.relevant_rank:,}" for each in results.values()]
    yield f"<details{' open' if is_open else ''}><summary>"
    yield f"<span class='difference {'second' if row.difference > 0 else 'first'}'>{row.difference:+.4f}</span>"
    yield f"<span class='query' dir='auto' title='{html.escape(row.id)}'>{html.escape(row.text)}</span>"
    facts = "".join(f"<span class='facts'>{_coloured_pair(texts)}</span>" for texts in (values, ranks))
    yield f"{facts}</summary>"
    words = QueryWords(row.text)
    yield f"<div class='passages'><section>{_render_relevant(row.relevant, words)}</section>"
    for side, result in results.items():
        heading = f"first hit of {colour_name(side, names[side])}"
        yield f"<section class='{side}'>{_render_top(heading, result, row.relevant, words)}</section>"
    yield "</div></details>"


def _coloured_pair(texts: Sequence[str]) -> str:
    """Returns HTML of two values, each in the colour of its run."""
    return f"<span class='first'>{texts[0]}</span> → <span class='second'>{texts[1]}</span>"


def _render_relevant(relevant: Sequence[ShownPassage], words: QueryWords) -> str:
    """Returns HTML of the first relevant passages, and the number of further ones."""
    number = len(relevant)
    heading = (
        "relevant passage" if number == 1 else f"{number:,} relevant passages" if number else "no relevant passage"
    )
    passages = [_render_passage(passage, words, with_grade=True) for passage in relevant[:_MAX_RELEVANT]]
    more = number - _MAX_RELEVANT
    return f"<h3>{heading}</h3>{''.join(passages)}" + (f"<p class='dim'>and {more:,} more</p>" if more > 0 else "")


def _render_top(heading: str, result: RunResult, relevant: Sequence[ShownPassage], words: QueryWords) -> str:
    """Returns HTML of a run's first hit. Its text is left out if it is one of the shown relevant passages."""
    top = result.top
    if top is None:
        return f"<h3>{heading}</h3><p class='dim'>no hit</p>"
    is_relevant = result.relevant_rank == 1
    badge = "relevant" if is_relevant else "not judged" if top.grade is None else f"judged {top.grade}"
    heading = f"<h3>{heading}<span class='badge{' relevant' if is_relevant else ''}'>{badge}</span></h3>"
    if any(top == passage for passage in relevant[:_MAX_RELEVANT]):
        where = "the relevant passage" if len(relevant) == 1 else "one of the relevant passages"
        return f"{heading}{_render_title(top)}<p class='dim'>It is {where}.</p>"
    return heading + _render_passage(top, words)


def _render_title(passage: ShownPassage) -> str:
    """Returns HTML of a passage's title, or of its id if it has no title."""
    return f"<h4 dir='auto' title='{html.escape(passage.id)}'>{html.escape(passage.title or passage.id)}</h4>"


def _render_passage(passage: ShownPassage, words: QueryWords, *, with_grade: bool = False) -> str:
    """Returns HTML of a passage: title, a grade above 1 if requested, and the text with marked words of the query."""
    grade = f"<span class='badge'>grade {passage.grade}</span>" if with_grade and (passage.grade or 0) > 1 else ""
    if passage.text is None:
        return f"{_render_title(passage)}{grade}<p class='dim'>The corpus lacks this passage.</p>"
    text = passage.text
    if len(text) > _MAX_CHARACTERS:
        text = snippet(text, words, _MAX_CHARACTERS, _UNMARKED)
    return f"{_render_title(passage)}{grade}<p dir='auto'>{_mark_words(text, words)}</p>"


def _mark_words(text: str, words: QueryWords) -> str:
    """Returns a text as HTML with the words of the query marked."""
    pieces, end = [], 0
    for token in words.matches(text):
        word = html.escape(text[token.start : token.end])
        pieces += [html.escape(text[end : token.start]), f"<mark>{word}</mark>"]
        end = token.end
    return "".join([*pieces, html.escape(text[end:])])
