"""Unicode normal forms: those of unicodedata for ordinary text, and time linear in the length of any text."""

from __future__ import annotations

import random
import sys
import unicodedata
from typing import get_args

import pytest

from riptide.base import unicode
from riptide.base.unicode import MAX_MARKS, PIECE, Form, normalize

FORMS: tuple[Form, ...] = get_args(Form)
JOINER = "\u034f"
# Characters that move, compose or decompose: Latin, Greek, Hangul (syllables, jamo of three kinds, also the wide and
# compatibility ones), Indic vowel signs, kana with its marks, ligatures, musical symbols, and marks of many classes.
ALPHABET = [
    *"ae c\nÅéǖΣϓ",
    *"가각한ᄀ하ᅵᆨᇂㄱㅏㅠﾡￂ",
    *"কোোোொௌൊෞේෝ",
    *"かがハﾊﾞﾟ゙゚",
    *"ﬁ½①㌀ﷺ語😀",
    *"\u0301\u0300\u0308\u0323\u0327\u031b\u0338\u0345\u0344\u0f73\u0f81\u05bf\u0651\u3099\u302e",
    *"\U0001d15e\U0001d165\U0001d16e\U0001109a\U000110ba\ufb2c\ud800",
    JOINER,
]


def alternating(count: int) -> str:
    """Returns a letter and marks of two classes in turns, which are all sorted."""
    return "a" + "\u0301\u0323" * (count // 2)


@pytest.mark.parametrize("form", FORMS)
def test_random_text_has_the_form_of_unicodedata(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are cut after every few characters here, so that borders lie between all kinds of characters."""
    monkeypatch.setattr(unicode, "PIECE", 5)
    draw = random.Random(form)
    for _ in range(1_500):
        text = "".join(draw.choices(ALPHABET, k=draw.randint(MAX_MARKS + 1, 80)))
        assert normalize(form, text) == unicodedata.normalize(form, text), ascii(text)


def test_no_character_composes_over_a_border() -> None:
    """No character before which a text may be cut begins with one that composes with what precedes it, or is moved."""
    composed = filter(is_composed, map(chr, range(sys.maxunicode + 1)))
    second = {unicodedata.normalize("NFD", character)[-1] for character in composed}
    assert {"\u0301", "\u09be", "\u1175", "\u11a8"} <= second
    kinds = unicode._kinds()
    for point in range(sys.maxunicode + 1):
        if point > unicode._LAST or kinds[point] == unicode._PLAIN:
            begin = unicodedata.normalize("NFKD", chr(point))[0]
            assert begin not in second, hex(point)
            assert not unicodedata.combining(begin), hex(point)


def is_composed(character: str) -> bool:
    """Returns whether a character is the composition of at least two."""
    parts = unicodedata.normalize("NFD", character)
    return len(parts) > 1 and unicodedata.normalize("NFC", parts) == character


@pytest.mark.parametrize("form", FORMS)
def test_every_character_has_the_form_of_unicodedata_in_a_long_text(form: Form) -> None:
    """Each one stands after a letter and a mark, in a text that is cut. Above U+2FFFF there are no such characters."""
    for start in range(0, 0x30000, 1 << 15):
        text = "".join(f"{chr(point)}e\u0323" for point in range(start, start + (1 << 15)))
        assert normalize(form, text) == unicodedata.normalize(form, text)


@pytest.mark.parametrize("form", FORMS)
def test_runs_of_marks_are_cut_after_thirty(form: Form) -> None:
    marks = "\u0301\u0323" * 15
    assert len(marks) == MAX_MARKS
    for count in range(4):
        text = f"x{marks * count}e\u0301 y"
        expected = unicodedata.normalize(form, f"x{JOINER.join([marks] * count)}e\u0301 y")
        assert normalize(form, text) == expected
        assert unicodedata.is_normalized(form, normalize(form, text))
    assert JOINER not in normalize(form, f"x{marks}y{marks}" * 500)
    assert normalize(form, f"x{marks}\u0301").count(JOINER) == 1


def test_a_call_gets_a_bounded_piece() -> None:
    """One call holds the GIL until it ends."""
    for text in (alternating(100_000), "é" * 100_000, "한국어 " * 25_000):
        assert max(map(len, unicode._pieces(text))) <= PIECE + PIECE // MAX_MARKS + 1
