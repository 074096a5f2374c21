"""Unicode normal forms of texts, in time linear in their length, and the words of texts in any script.

`unicodedata.normalize` sorts the marks that follow a character in time quadratic in their number, and holds the GIL
until it has done so. `normalize` bounds both: it cuts texts into pieces, and no text has longer runs of marks than
Unicode's stream-safe text format allows (UAX #15, section 13).
"""

from __future__ import annotations

import functools
import itertools
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]

MAX_MARKS = 30  # maximum length of a run of combining marks without a joiner, as in the Stream-Safe Text Format
PIECE = 4096  # approximate number of characters normalised per call
_JOINER = "\u034f"  # COMBINING GRAPHEME JOINER, which is invisible and stops the reordering of marks
_PLAIN, _ATTACHED, _MARK = range(3)
_LAST = 0x1FFFF  # All characters above this one have the kind _PLAIN.
UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"  # scripts without spaces between words


def normalize(form: Form, text: str) -> str:
    """Normalises a text like `unicodedata.normalize`, except that runs of more than 30 marks are broken by joiners.

    In a longer run of marks, U+034F is inserted after each 30 of them, as in the stream-safe text format, and marks are
    not sorted across it. A mark is a character with a non-zero combining class, or one whose decomposition
    begins with one.
    """
    if text.isascii():
        return text
    if len(text) <= MAX_MARKS:
        return unicodedata.normalize(form, text)
    return "".join(unicodedata.normalize(form, piece) for piece in _pieces(text))


def _pieces(text: str) -> Iterator[str]:
    """Yields pieces of a text with bounded runs of marks; their joined normal forms are the normal form of the text.

    A piece has about PIECE characters; more if the text cannot be cut earlier.
    """
    start, size, joiner = 0, PIECE, ""
    while start < len(text):
        piece = text[start : start + size]
        kinds = _kinds_of(piece)
        joiner_positions = _find_joiner_positions(kinds == _MARK)
        end = len(piece)
        if start + end < len(text):
            is_border = kinds == _PLAIN
            is_border[joiner_positions] = True
            borders = np.flatnonzero(is_border[1:])
            if not len(borders):
                size *= 2
                continue
            end = int(borders[-1]) + 1
        cuts = [0, *joiner_positions[joiner_positions < end].tolist(), end]
        yield joiner + _JOINER.join(piece[a:b] for a, b in itertools.pairwise(cuts))
        joiner = _JOINER if end < len(piece) and kinds[end] == _MARK else ""
        start, size = start + end, PIECE


def _find_joiner_positions(marks: np.ndarray) -> np.ndarray:
    """Returns the positions at which joiners are inserted, int64: after every MAX_MARKS marks of a run."""
    positions = np.arange(len(marks))
    before = np.maximum.accumulate(np.where(marks, -1, positions))  # position of the last character that is not a mark
    return np.flatnonzero(marks & (positions - before > 1) & ((positions - before - 1) % MAX_MARKS == 0))


def _kinds_of(text: str) -> np.ndarray:
    """Returns the kind of each character, uint8: _PLAIN, _ATTACHED or _MARK."""
    points = np.frombuffer(text.encode(f"utf-32-{sys.byteorder[0]}e", "surrogatepass"), np.uint32)
    kinds: np.ndarray = _kinds()[np.minimum(points, _LAST)]
    return kinds


@functools.cache
def _kinds() -> np.ndarray:
    """Returns the kind of each character up to _LAST, uint8.

    A text may be cut before a plain character: it is not moved, and composes with nothing before it. Attached ones are
    not moved either, but may compose: vowel signs of Indic scripts, and vowels and final consonants of Hangul.
    """
    kinds = np.full(_LAST + 1, _PLAIN, np.uint8)
    for point in range(0x80, _LAST + 1):
        first = unicodedata.normalize("NFKD", chr(point))[0]
        if unicodedata.combining(first):
            kinds[point] = _MARK
        elif (unicodedata.category(first)[0] == "M" and first != _JOINER) or "\u1160" <= first <= "\u11ff":
            kinds[point] = _ATTACHED
    return kinds


def word_runs(text: str) -> Iterator[Any]:
    """Yields a regex match for each run between white space, and for each character of scripts without spaces."""
    import regex  # The import is here, because encoding and the training of prompts do not need it.

    runs: Iterator[Any] = regex.finditer(rf"[{UNSPACED}]|[^\s{UNSPACED}]+", text)
    return runs
