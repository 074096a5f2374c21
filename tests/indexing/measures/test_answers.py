"""Whether a passage contains an answer, compared with Pyserini's copy of DPR's tokenizer and sliding window."""

from __future__ import annotations

import random

import numpy as np
import pytest
from pyserini.eval.evaluate_dpr_retrieval import SimpleTokenizer, has_answers

from riptide.indexing.measures.answers import AnswerMatcher, answers_of

DPR = SimpleTokenizer()

# Letters with accents in one and in two characters, Greek with its two small sigmas, marks, digits, punctuation,
# separators (no-break, ideographic), control and format characters, letters whose small form is longer.
ALPHABET = [
    *"aAbBéÉñ",
    "e\u0301",
    "E\u0301",
    *"ΣσςΑαΟο",
    *"12٣½",
    *".,-'’&$#_",
    *"  \u00a0\u3000\t\n",
    "\u200b\u00ad",
    *"İıßẞ語中",
    "ﬁ",
    "\U0001f600",
    "\u0345",
    *"≠=\u0338Å",
]


def found(passage: str, *answers: str) -> bool:
    return bool(AnswerMatcher().contains([passage], answers)[0])


@pytest.mark.parametrize(
    ("passage", "answer", "expected"),
    [
        ("It was in 2008.", "2008", True),
        ("It was in 20081.", "2008", False),  # whole tokens only
        ("The Great Sichuan Earthquake struck", "great sichuan earthquake", True),
        ("the great old sichuan", "great sichuan", False),
        ("Beyoncé sang", "Beyonce\u0301", True),  # composed and decomposed
        ("Beyoncé sang", "Beyonce", False),  # an accent counts
        ("the U.S. Army", "U.S.", True),
        ("the US Army", "U.S.", False),
        ("the U . S . Army", "U.S.", True),  # white space between tokens does not count
        ("state-of-the-art", "of the", False),  # punctuation is a token
        ("two\nlines\there", "two lines here", True),
        ("ΟΔΟΣ.ΑΒΓ", "οδος", True),  # the sigma at a token's end, whatever follows
        ("Α.Σ", "σ", True),
        ("a ≠ b", "=", True),  # decomposed before it is cut into tokens: = and the stroke
        ("a\u200bb", "a b", True),  # a format character separates
        ("", "a", False),
        ("a b", "a b c", False),
    ],
)
def test_cases_by_hand(passage: str, answer: str, expected: bool) -> None:
    assert found(passage, answer) == expected
    assert has_answers(passage, [answer], DPR) == expected


def test_random_texts_as_dpr() -> None:
    draw = random.Random(0)
    seen = {True: 0, False: 0}
    for _ in range(4000):
        passages = ["".join(draw.choices(ALPHABET, k=draw.randint(0, 30))) for _ in range(3)]
        whole = draw.choice(passages)
        start = draw.randint(0, len(whole))
        answers = [
            whole[start : start + draw.randint(1, 8)].swapcase(),
            "".join(draw.choices(ALPHABET, k=draw.randint(1, 5))),
        ]
        answers = [answer for answer in answers if DPR.tokenize(answer).words()]
        matcher = AnswerMatcher()
        for _ in range(2):  # the second time from what it remembers
            got = matcher.contains(passages, answers)
            assert got.dtype == bool
            assert got.tolist() == [has_answers(passage, answers, DPR) for passage in passages], (passages, answers)
        for hit in got.tolist():
            seen[hit] += 1
    assert min(seen.values()) > 1000


def test_an_answer_without_tokens_is_nowhere() -> None:
    """DPR finds it in every passage, which would leave a question no negative."""
    for answer in ("", " ", "\n", "\u200b"):
        assert has_answers("a passage", [answer], DPR)
        assert not found("a passage", answer)
        assert found("a passage", answer, "passage")
    assert AnswerMatcher().contains(["a", "b"], []).tolist() == [False, False]
    assert AnswerMatcher().contains([], ["a"]).dtype == np.bool_


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ("", []),
        ("{}", []),
        ('["a"]', []),
        ('{"answers": ["a", "b c"]}', ["a", "b c"]),
        ('{"answers": "a"}', ["a"]),
        ('{"answer": "é"}', ["é"]),
        ('{"answers": [2008, 1.5]}', ["2008", "1.5"]),
        ('{"answers": null}', []),  # not the word "None"
        ('{"answers": ["a", null]}', ["a"]),
        ('{"answers": []}', []),
    ],
)
def test_answers_in_metadata(metadata: str, expected: list[str]) -> None:
    assert answers_of(metadata) == expected
