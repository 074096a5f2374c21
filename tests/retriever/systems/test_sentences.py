"""Sentences and spans: nothing is lost, and the boundaries are where a reader sees them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import sentencex

from riptide.retriever.systems import sentences
from riptide.retriever.systems.sentences import count_words, split_into_spans, split_sentences

TEXT = (
    "Beyoncé (born September 4, 1981) is a singer. Dr. Smith paid $3.5 million to the U.S. Government. "
    '"Really?" he asked. It began in 1900. It ended later!'
)


def test_sentences_end_where_a_reader_sees_it() -> None:
    assert split_sentences(TEXT) == [
        "Beyoncé (born September 4, 1981) is a singer.",
        "Dr. Smith paid $3.5 million to the U.S. Government.",
        '"Really?" he asked.',
        "It began in 1900.",
        "It ended later!",
    ]
    assert split_sentences("私は学生です。彼は先生です。", "ja") == ["私は学生です。", "彼は先生です。"]
    assert split_sentences("") == split_sentences(" \n\n ") == []


def test_scraps_go_with_a_neighbour_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = ["1. ", "A sentence here.", ":20 ", "Another one is this.", "\n\n", ") "]
    monkeypatch.setattr(sentences, "_segment_sentences", lambda language, text: pieces)
    assert split_sentences("any") == ["1. A sentence here.:20", "Another one is this.\n\n)"]


def test_on_real_passages_nothing_is_lost(shared_data) -> None:  # type: ignore[no-untyped-def]
    import gzip
    import itertools

    with gzip.open(shared_data / "squad" / "corpus.jsonl.gz", "rt") as file:
        texts = [json.loads(line)["text"] for line in itertools.islice(file, 500)]
    found = [split_sentences(text) for text in texts]
    for text, own in zip(texts, found, strict=True):
        assert "".join("".join(own).split()) == "".join(text.split())
        assert all(own)
    assert 4 < np.mean([len(own) for own in found]) < 6.5  # a passage of SQuAD has some five
    assert sum(map(len, found)) < sum(len(list(sentencex.segment("en", text))) for text in texts)


@pytest.mark.parametrize("longest", [1, 3, 100])
def test_spans_cover_a_text_in_order_and_none_is_too_long(longest: int) -> None:
    seen = set()
    for seed in range(30):
        cut = split_into_spans(TEXT, longest, np.random.default_rng(seed))
        assert " ".join(cut) == TEXT
        sizes = [count_words(span) for span in cut]
        total = count_words(TEXT)
        assert len(cut) >= 2
        assert sum(sizes) == total
        assert max(sizes) <= min(longest, total // 2)
        seen.add(tuple(cut))
    assert len(seen) == (1 if longest == 1 else 30)
    assert split_into_spans(TEXT, longest, np.random.default_rng(7)) == split_into_spans(
        TEXT, longest, np.random.default_rng(7)
    )


@pytest.mark.parametrize("longest", [4, 8, 100])
@pytest.mark.parametrize("words", [15, 16, 17, 23, 24, 40, 201])
def test_no_span_is_too_short(longest: int, words: int) -> None:
    text = " ".join(f"w{number}." for number in range(words))
    for seed in range(30):
        cut = split_into_spans(text, longest, np.random.default_rng(seed), 8)
        assert " ".join(cut) == text
        sizes = [len(span.split()) for span in cut]
        assert len(sizes) == 1 if words < 16 else len(sizes) >= 2
        assert min(sizes) >= 8
        assert max(sizes) <= max(15, longest)


def test_words_are_counted_in_every_script() -> None:
    texts = ["", " - ! ", 'He said: "It\'s 3.5 - or so."', "漢字とかな。ABC", "दो शब्द", "한국어 문장"]
    assert [count_words(text) for text in texts] == [0, 0, 6, 6, 2, 2]


def test_spans_of_the_shortest_texts() -> None:
    draw = np.random.default_rng(0)
    assert split_into_spans("", 5, draw) == []
    assert split_into_spans(" - ", 5, draw) == []
    assert split_into_spans("one", 5, draw) == ["one"]
    assert split_into_spans("- one, ", 5, draw) == ["- one,"]
    assert split_into_spans("one, two", 5, draw) == ["one,", "two"]
    assert split_into_spans("漢字", 5, draw) == ["漢", "字"]
