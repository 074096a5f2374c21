"""Splits texts into units for pretraining: sentences (RIP) or random spans (coCondenser)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

# A piece with fewer letters is no sentence: a closing bracket, a citation mark, the number of an item.
_MIN_LETTERS = 4
_LETTER = r"\p{L}"
# A character of a script without spaces, or a run of other characters; it is a word if it holds a letter or a digit.
UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_RUN = rf"[{UNSPACED}]|[^\s{UNSPACED}]+"


def split_sentences(text: str, language: str = "en") -> list[str]:
    """Returns the sentences of a text in their order, stripped; together they are the text without outer white space.

    A piece of fewer than four letters is joined to the sentence before it; at the start, to the one after it.

    Args:
        text: Any text.
        language: A code of sentencex, which knows some 300; it falls back on the rules of English for others.
    """
    found: list[str] = []
    for piece in _segment(language, text):
        if found and (_is_scrap(piece) or _is_scrap(found[-1])):
            found[-1] += piece
        else:
            found.append(piece)
    return [stripped for sentence in found if (stripped := sentence.strip())]


def count_words(text: str) -> int:
    """Returns the number of words of a text: runs between white space, or the characters of scripts without spaces.

    Punctuation between two spaces is not a word.
    """
    return len(_word_starts(text))


def split_into_spans(text: str, longest: int, draw: np.random.Generator, shortest: int = 1) -> list[str]:
    """Returns a text in contiguous spans of whole words: every word is in exactly one span.

    The size of a span is drawn uniformly from `shortest` to `longest`, or to half of the text's words if that is less.
    A size that would leave fewer than `shortest` words for the last span is changed. Words are those of `count_words`:
    the same for every backbone.

    Args:
        text: Any text.
        longest: Maximum number of words of a span; the last span may have 2 * shortest - 1 words if that is more.
        draw: The random generator.
        shortest: Minimum number of words of a span; takes precedence over `longest`.

    Returns:
        The spans; at least two if the text has 2 * shortest words, otherwise the text as it is, if it has a word.
    """
    starts = _word_starts(text)
    most = max(shortest, min(longest, len(starts) // 2))
    found, first = [], 0
    while first < len(starts):
        remaining = len(starts) - first
        size = int(draw.integers(shortest, most + 1)) if remaining >= shortest else remaining
        if remaining - size < shortest:
            size = remaining if remaining <= max(most, 2 * shortest - 1) else remaining - shortest
        stop = first + size
        begin = starts[first] if first else 0
        found.append(text[begin : starts[stop] if stop < len(starts) else len(text)].strip())
        first = stop
    return found


def word_runs(text: str) -> Iterator[Any]:
    """Yields a match for each run of characters between white space, and each character of scripts without spaces."""
    return _pattern(_RUN).finditer(text)


def _word_starts(text: str) -> list[int]:
    """Returns the position of each word's first character; punctuation before it counts as part of the word."""
    return [run.start() for run in word_runs(text) if any(character.isalnum() for character in run.group())]


# sentencex and regex are imported at their first use: what encodes and trains prompts runs without them.


def _segment(language: str, text: str) -> Iterable[str]:
    from sentencex import segment

    pieces: Iterable[str] = segment(language, text)
    return pieces


@functools.cache
def _pattern(expression: str) -> Any:
    import regex

    return regex.compile(expression)


def _is_scrap(piece: str) -> bool:
    letters = _pattern(_LETTER).finditer(piece)
    return sum(1 for _ in zip(range(_MIN_LETTERS), letters, strict=False)) < _MIN_LETTERS
