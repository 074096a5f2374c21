"""Splits texts into pretraining units: sentences (RIP) or random spans (coCondenser)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from riptide.base.unicode import word_runs

# A piece with fewer letters is not a sentence: for example a closing bracket, a citation mark, an item number.
_MIN_LETTERS = 4


def split_sentences(text: str, language: str = "en") -> list[str]:
    """Splits a text into stripped sentences, in order, which contain all of the text except outer white space.

    A piece of fewer than four letters is joined to the sentence before it; at the start, to the one after it.

    Args:
        text: Any text.
        language: A code of sentencex, which knows some 300; it falls back on the rules of English for others.
    """
    sentences: list[str] = []
    for piece in _segment_sentences(language, text):
        if sentences and (_has_few_letters(piece) or _has_few_letters(sentences[-1])):
            sentences[-1] += piece
        else:
            sentences.append(piece)
    return [stripped for sentence in sentences if (stripped := sentence.strip())]


def count_words(text: str) -> int:
    """Counts the words of a text: runs between white space, or characters of scripts without spaces.

    Punctuation between two spaces is not a word.
    """
    return len(_word_starts(text))


def split_into_spans(text: str, max_words: int, rng: np.random.Generator, min_words: int = 1) -> list[str]:
    """Splits a text into contiguous spans of whole words, so that every word is in exactly one span.

    A span has a random number of words from `min_words` to `max_words`, or to half of the text's words if that is less.
    A size that would leave fewer than `min_words` words for the last span is changed. Words are those of `count_words`:
    the same for every backbone.

    Args:
        text: Any text.
        max_words: Maximum number of words of a span; the last span may have 2 * min_words - 1 words if that is more.
        rng: The random generator.
        min_words: Minimum number of words of a span; takes precedence over `max_words`.

    Returns:
        The spans; at least two if the text has 2 * min_words words, otherwise the text as it is, if it has a word.
    """
    starts = _word_starts(text)
    largest = max(min_words, min(max_words, len(starts) // 2))
    spans, first = [], 0
    while first < len(starts):
        remaining = len(starts) - first
        size = int(rng.integers(min_words, largest + 1)) if remaining >= min_words else remaining
        if remaining - size < min_words:
            size = remaining if remaining <= max(largest, 2 * min_words - 1) else remaining - min_words
        stop = first + size
        begin = starts[first] if first else 0
        spans.append(text[begin : starts[stop] if stop < len(starts) else len(text)].strip())
        first = stop
    return spans


def _word_starts(text: str) -> list[int]:
    """Returns the start offset of each word; punctuation before a word counts as part of it."""
    return [run.start() for run in word_runs(text) if any(character.isalnum() for character in run.group())]


# sentencex and regex are imported at their first use, because encoding and the training of prompts do not need them.


def _segment_sentences(language: str, text: str) -> Iterable[str]:
    from sentencex import segment

    pieces: Iterable[str] = segment(language, text)
    return pieces


def _has_few_letters(piece: str) -> bool:
    import regex

    letters = regex.finditer(r"\p{L}", piece)
    return sum(1 for _ in zip(range(_MIN_LETTERS), letters, strict=False)) < _MIN_LETTERS
