"""Snippets: against a brute-force search over all windows, and by hand for scripts, widths and marks."""

from __future__ import annotations

import random
import re

import pytest

from riptide.indexing.search.snippets import BOLD, QueryWords, display_width, one_line, shorten, snippet


def test_the_window_has_the_most_words_of_the_query_and_as_much_context_as_fits() -> None:
    """Every window between word boundaries is tried; its ellipses, one on each cut side, take two columns each."""
    draw = random.Random(0)
    found_with_gaps = 0
    for _ in range(300):
        words = [draw.choice(["a", "bb", "ccc", "dddd", "eeeee", "fox", "hen"]) for _ in range(draw.randint(1, 40))]
        width, query = draw.randint(12, 60), draw.choice(["fox", "fox hen", "hen ccc fox", "nothing"])
        wanted = set(query.split())

        def fits(first: int, end: int, words: list[str] = words, width: int = width) -> bool:
            gaps = 2 * (first > 0) + 2 * (end < len(words))
            return len(" ".join(words[first:end])) + gaps <= width

        windows = [(a, b) for a in range(len(words)) for b in range(a + 1, len(words) + 1) if fits(a, b)]
        value = {(a, b): (len(wanted & {*words[a:b]}), sum(w in wanted for w in words[a:b])) for a, b in windows}
        result = snippet(" ".join(words), QueryWords(query), width)
        bare = result.replace("*", "")
        before, after = bare.startswith("… "), bare.endswith(" …")
        inside = bare.removeprefix("… ").removesuffix(" …").split()
        places = [
            (a, b) for a, b in windows if words[a:b] == inside and (a > 0) == before and (b < len(words)) == after
        ]
        assert places, (words, query, width, result)
        assert max(value[place] for place in places) == max(value.values()), (words, query, width, result)
        assert len(bare) <= width
        assert any(not (a > 0 and fits(a - 1, b)) and not (b < len(words) and fits(a, b + 1)) for a, b in places), (
            "there is room for more context"
        )
        assert [w for w in result.split() if w.startswith("**")] == [f"**{w}**" for w in inside if w in wanted]
        found_with_gaps += before and after
    assert found_with_gaps > 50


@pytest.mark.parametrize(
    ("query", "text", "expected"),
    [
        ("who wrote DRACULA?", "Bram Stoker wrote “Dracula” in 1897.", "Bram Stoker **wrote** “**Dracula**” in 1897."),
        ("art", "The arts start with art, ART-house.", "The arts start with **art**, **ART**-house."),
        ("straße Ωmega", "STRASSE und ωMEGA", "**STRASSE** und **ωMEGA**"),
        ("café", "Cafe\u0301 and cafe", "**Cafe\u0301** and cafe"),
        ("Москва", "В МОСКВЕ, москва; Москвасити", "В МОСКВЕ, **москва**; Москвасити"),
        ("ＡＢＣ", "abc", "**abc**"),
        ("東京の天気", "京都の天気は東京と違う", "京都**の天気**は**東京**と違う"),
        ("猫", "黒猫がいる", "黒**猫**がいる"),
        ("don't", "I don’t, won't, t", "I **don’t**, won't, t"),
        ("Dracula's", "Emma's Dracula’s s", "Emma's **Dracula**’s s"),
        ("l'homme", "homme d'État", "**homme** d'État"),
        ("Who is the Count of Dracula?", "Dracula is the Count", "**Dracula** is the **Count**"),
        ("To be, or not to be", "It was not to be.", "It was **not** **to** **be**."),
        ("東京 in", "in 東京", "in **東京**"),
        ("?!", "what?! no", "what?! no"),
        ("x", "", ""),
        ("bell", "ring\tthe\n\nbell\x07\x1b[31m now", "ring the **bell** [31m now"),
    ],
)
def test_whole_words_are_marked_in_any_case_and_script(query: str, text: str, expected: str) -> None:
    assert snippet(text, QueryWords(query), 80) == expected


def test_marks_on_a_terminal_take_no_columns() -> None:
    assert snippet("the bell rings", QueryWords("bell"), 14, BOLD) == "the \x1b[1mbell\x1b[0m rings"


def test_wide_characters_count_twice_and_unspaced_scripts_are_cut_between_characters() -> None:
    text = "あ" * 50 + "東京" + "い" * 50
    found = snippet(text, QueryWords("東京"), 24)
    assert "**東京**" in found
    assert (found[:2], found[-2:]) == ("… ", " …")
    assert display_width(found.replace("*", "")) == 24


def test_a_word_wider_than_the_width_is_cut() -> None:
    found = snippet("http://" + "x" * 200 + " bell", QueryWords("bell"), 20)
    assert found.endswith("**bell**")
    assert display_width(found.replace("*", "")) <= 20
    assert re.fullmatch(r"http://x+ …", snippet("http://" + "x" * 200, QueryWords("bell"), 20))


def test_shortened_titles_and_widths() -> None:
    assert one_line(" a\r\n\x00b\u200b ") == "a b"
    assert (shorten("abcdef", 6), shorten("abcdef", 5), shorten("東京都", 5)) == ("abcdef", "abcd…", "東京…")
    assert (display_width("e\u0301"), display_width("東a")) == (1, 3)
