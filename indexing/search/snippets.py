"""Makes snippets: the part of a passage with the most words of the query, cut to a width, with marked words."""

from __future__ import annotations

import bisect
import itertools
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import regex

from riptide.base.unicode import UNSPACED, normalize
from riptide.indexing.lucene.stop_words import STOP_WORDS

ELLIPSIS = "…"
_GAP = 2  # columns for an ellipsis and a space
_WORD = rf"[[\p{{L}}\p{{M}}\p{{N}}_]--[{UNSPACED}]]"
# In scripts without spaces each character is a token, and a query matches pairs of adjacent characters.
# An English contraction ("don't") is one word; the s of a genitive ("Dracula's") is not a word.
_TOKEN = regex.compile(
    rf"(?V1i)(?P<character>[{UNSPACED}])|(?<={_WORD}['’])s(?!{_WORD})(*SKIP)(*FAIL)"
    rf"|{_WORD}+(?:['’](?:t|m|re|ve|ll|d)(?!{_WORD}))?"
)
# Pieces that are never cut: a character of a script without spaces, or other characters up to white space; punctuation
# belongs to the preceding character.
_PIECE = regex.compile(rf"(?V1)[{UNSPACED}][\p{{P}}\p{{M}}]*|[\S--[{UNSPACED}]]+")
_INVISIBLE = regex.compile(r"[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]")


class MatchMarks(NamedTuple):
    """The strings printed before and after a matched word."""

    start: str
    end: str


PLAIN = MatchMarks("**", "**")
BOLD = MatchMarks("\x1b[1m", "\x1b[0m")  # ANSI escape sequences, for a terminal


class Token(NamedTuple):
    """A word, or a character of a script without spaces, with its span [start, end) and its normalised form."""

    start: int
    end: int
    key: str
    is_character: bool


class QueryWords:
    """The normalised words of a query, for matching in passages: whole words, in any case, in any script.

    English stop words do not count, unless the query has nothing else. `serve/page/marks.js` follows the same rules.
    """

    def __init__(self, query: str):
        tokens = list(tokens_of(query))
        if any(token.key not in STOP_WORDS for token in tokens):
            tokens = [token for token in tokens if token.key not in STOP_WORDS]
        self.words = {token.key for token in tokens if not token.is_character}
        runs = _runs_of_characters(tokens)
        self.characters = {run[0].key for run in runs if len(run) == 1}
        self.pairs = {(a.key, b.key) for run in runs for a, b in itertools.pairwise(run)}

    def matches(self, text: str) -> list[Token]:
        """Returns the tokens of a text that match words of the query, in order."""
        tokens = list(tokens_of(text))
        matches = {token.start: token for token in tokens if token.key in self._single_characters(token)}
        if self.pairs:
            for run in _runs_of_characters(tokens):
                for a, b in itertools.pairwise(run):
                    if (a.key, b.key) in self.pairs:
                        matches |= {a.start: a, b.start: b}
        return [matches[start] for start in sorted(matches)]

    def _single_characters(self, token: Token) -> set[str]:
        return self.characters if token.is_character else self.words


def tokens_of(text: str) -> Iterator[Token]:
    """Yields the tokens of a text; keys are case-folded after Unicode compatibility composition (NFKC)."""
    for match in _TOKEN.finditer(text):
        key = normalize("NFKC", normalize("NFKC", match[0]).casefold()).replace("’", "'")
        yield Token(match.start(), match.end(), key, match["character"] is not None)


def _runs_of_characters(tokens: Sequence[Token]) -> list[list[Token]]:
    """Groups adjacent characters of scripts without spaces; other tokens are left out."""
    runs: list[list[Token]] = []
    for token in tokens:
        if token.is_character:
            if runs and runs[-1][-1].end == token.start:
                runs[-1].append(token)
            else:
                runs.append([token])
    return runs


def snippet(text: str, words: QueryWords, width: int, marks: MatchMarks = PLAIN) -> str:
    """Returns the part of a text with the most words of a query as one line, with marked words.

    The part with the most distinct words of the query is chosen, then the one with the most occurrences, then the
    first. Context is added on both sides up to the width. A text that fits is returned whole; without a match, the
    start of the text is returned. Words are not cut, except for a word that alone is wider than the width.

    Args:
        text: A passage; white space and control characters become single spaces.
        words: The words of the query.
        width: Terminal columns, at least 1. Marks are not counted: on a terminal they take no columns.
        marks: The strings around each matched word.
    """
    text = one_line(text)
    cuts = _Cuts(text, width)
    if not cuts.pieces:
        return ""
    matches = words.matches(text)
    first, last = cuts.extend(*cuts.best(matches))
    start, end = cuts.pieces[first][0], cuts.pieces[last][1]
    marked = _mark_matches(text, start, end, [m for m in matches if m.start >= start and m.end <= end], marks)
    before = f"{ELLIPSIS} " if first > 0 else ""
    after = f" {ELLIPSIS}" if last + 1 < len(cuts.pieces) else ""
    return f"{before}{marked}{after}"


class _Cuts:
    """Splits a text into pieces [start, end) that are never cut, and finds windows of pieces that fit a width."""

    def __init__(self, text: str, width: int):
        self.width = max(width, 2 * _GAP + 2)
        columns = [0, *itertools.accumulate(map(_display_columns, text))]
        room = self.width - 2 * _GAP
        self.pieces = [
            span
            for match in _PIECE.finditer(text)
            for span in _pieces_within(match.start(), match.end(), columns, room)
        ]
        self._starts = [columns[start] for start, _ in self.pieces]
        self._ends = [columns[end] for _, end in self.pieces]
        self._first_characters = [start for start, _ in self.pieces]

    def best(self, matches: Sequence[Token]) -> tuple[int, int]:
        """Returns (first, last) piece of the smallest window with the matches of the best window of the width."""
        starts, ends = [match.start for match in matches], [match.end for match in matches]
        score, window = (0, 0), (0, 0)
        for first in sorted({0, *map(self._piece_at, starts)}):
            last = self._last_that_fits(first)
            low = bisect.bisect_left(starts, self.pieces[first][0])
            high = bisect.bisect_right(ends, self.pieces[last][1])
            window_matches = matches[low:high]
            value = (len({match.key for match in window_matches}), len(window_matches))
            if window_matches and value > score:
                score = value
                window = (self._piece_at(window_matches[0].start), self._piece_at(window_matches[-1].end - 1))
        return window

    def extend(self, first: int, last: int) -> tuple[int, int]:
        """Extends a window by pieces on both sides in turn while it fits, and returns (first, last) piece."""
        while True:
            before = first, last
            if last + 1 < len(self.pieces) and self._fits(first, last + 1):
                last += 1
            if first > 0 and self._fits(first - 1, last):
                first -= 1
            if (first, last) == before:
                return before

    def _piece_at(self, character: int) -> int:
        return bisect.bisect_right(self._first_characters, character) - 1

    def _fits(self, first: int, last: int) -> bool:
        gaps = _GAP * ((first > 0) + (last + 1 < len(self.pieces)))
        return self._ends[last] - self._starts[first] + gaps <= self.width

    def _last_that_fits(self, first: int) -> int:
        if self._fits(first, len(self.pieces) - 1):
            return len(self.pieces) - 1
        end = self._starts[first] + self.width - _GAP * (1 + (first > 0))
        return max(first, bisect.bisect_right(self._ends, end) - 1)


def _pieces_within(start: int, end: int, columns: Sequence[int], room: int) -> Iterator[tuple[int, int]]:
    """Yields [start, end) if it fits in `room` columns, otherwise consecutive spans that fit."""
    while columns[end] - columns[start] > room:
        cut = max(start + 1, bisect.bisect_right(columns, columns[start] + room, start, end) - 1)
        yield start, cut
        start = cut
    yield start, end


def _mark_matches(text: str, start: int, end: int, matches: Sequence[Token], marks: MatchMarks) -> str:
    """Returns text[start:end] with marks around matches; adjacent characters of a script without spaces share
    their marks."""
    spans: list[list[int]] = []
    for match in matches:
        if spans and match.is_character and spans[-1][1] == match.start:
            spans[-1][1] = match.end
        else:
            spans.append([match.start, match.end])
    pieces, at = [], start
    for first, last in spans:
        pieces += [text[at:first], marks.start, text[first:last], marks.end]
        at = last
    return "".join([*pieces, text[at:end]])


def one_line(text: str) -> str:
    """Removes control characters and repeated white space from a text, so that a terminal shows it unchanged."""
    return " ".join(_INVISIBLE.sub(" ", text).split())


def shorten(text: str, width: int) -> str:
    """Cuts a text to one line of at most `width` columns, with an ellipsis if it was longer."""
    text = one_line(text)
    if display_width(text) <= width:
        return text
    ends = [*itertools.accumulate(map(_display_columns, text))]
    return text[: bisect.bisect_right(ends, max(0, width - 1))].rstrip() + ELLIPSIS


def display_width(text: str) -> int:
    """Returns the width of a text in terminal columns: 2 for a wide character, 0 for a combining one."""
    return sum(map(_display_columns, text))


def _display_columns(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
