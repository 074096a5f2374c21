"""Texts cut into what the intermediate pretraining pairs: sentences (RIP), or random spans (coCondenser); no model."""

from __future__ import annotations

import numpy as np
import regex
from sentencex import segment

# A closing bracket, a citation's mark, an item's number: they make no sentence.
_FEWEST_LETTERS = 4
_LETTER = regex.compile(r"\p{L}")
# What a span is counted in: words, punctuation marks, and the characters of scripts without spaces.
_TOKEN = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}]|\w+|[^\w\s]")


def split_sentences(text: str, language: str = "en") -> list[str]:
    """The sentences of a text in their order, stripped; end to end they are the text, but for white space.

    A piece of fewer than four letters goes with the sentence before it (the first one: with the one behind it).
    language: a code of sentencex, which knows some 300; it falls back on English's rules for others.
    """
    found: list[str] = []
    for piece in segment(language, text):
        if found and (_is_scrap(piece) or _is_scrap(found[-1])):
            found[-1] += piece
        else:
            found.append(piece)
    return [stripped for sentence in found if (stripped := sentence.strip())]


def spans(text: str, longest: int, draw: np.random.Generator) -> list[str]:
    """A text's tokens cut into contiguous spans: no token is left out, none is in two, and none is cut.

    A span has at most `longest` tokens and at most half of the text's, so that there are two of them in any text of two
    tokens; each size is drawn uniformly from 1 to that, the last is what is left. Tokens are words, punctuation marks,
    and the characters of Chinese, Japanese and Thai: the same for every backbone.
    """
    ends = [match.span() for match in _TOKEN.finditer(text)]
    most = max(1, min(longest, len(ends) // 2))
    found, start = [], 0
    while start < len(ends):
        stop = min(start + int(draw.integers(1, most + 1)), len(ends))
        found.append(text[ends[start][0] : ends[stop - 1][1]])
        start = stop
    return found


def _is_scrap(piece: str) -> bool:
    letters = _LETTER.finditer(piece)
    return sum(1 for _ in zip(range(_FEWEST_LETTERS), letters, strict=False)) < _FEWEST_LETTERS
