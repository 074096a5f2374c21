"""Splitting of documents into passages, compared with a slow loop over sentences that are known."""

from __future__ import annotations

import itertools
import random

import pyarrow as pa
import pytest

from riptide.base.errors import InputError
from riptide.indexing.files.splitting import DocumentSplit, document_spans, passage_spans, passages_size, take_passages

ODD = [
    "naïve",
    "e\u0301te\u0301",
    "👩\u200d🚀",
    "\u202eشلوم",
    "«a»",
    "“b”",
    "U.S.",
    "3.14",
    "x",
    "--",
    "(z)",
    "[1]",
    "é.",
]
GAPS = [" ", "  ", "\n", "\n\n", "\t", "\u00a0", " \n \n"]

POOL = pa.proxy_memory_pool(pa.default_memory_pool())  # Arrow needs it as long as any memory that it has allocated


def passages(text: str, words: int, overlap: int = 0) -> list[str]:
    return [text[start:end] for start, end in passage_spans(text, DocumentSplit(words, overlap))]


def known_sentences(draw: random.Random, count: int, longest: int) -> list[list[str]]:
    """Sentences that start with a capital letter and end with a full stop, so that their borders are certain."""
    sentences = []
    for _ in range(count):
        size = draw.randint(1, longest)
        words = [f"w{draw.randrange(10**6)}x" for _ in range(size)]
        words[0] = "The" + words[0]
        words[-1] += "."
        sentences.append(words)
    return sentences


def slow_split(sentences: list[list[str]], most: int, overlap: int) -> list[str]:
    words = [word for sentence in sentences for word in sentence]
    is_first = [number == 0 for sentence in sentences for number in range(len(sentence))]
    found, first = [], 0
    while True:
        end = min(first + most, len(words))
        if end < len(words):
            borders = [number for number in range(first + max(-(-most // 2), overlap + 1), end + 1) if is_first[number]]
            end = borders[-1] if borders else end
        found.append(" ".join(words[first:end]))
        if end == len(words):
            return found
        borders = [number for number in range(end - overlap, end) if is_first[number]]
        first = borders[0] if borders else end - overlap


@pytest.mark.parametrize(("most", "overlap"), [(120, 30), (20, 0), (20, 19), (7, 3), (1, 0), (2, 1), (1_000, 100)])
def test_passages_are_those_of_a_slow_loop_over_known_sentences(most: int, overlap: int) -> None:
    draw = random.Random(most)
    for longest in (3, 15, 60):
        sentences = known_sentences(draw, 120, longest)
        text = " ".join(" ".join(words) for words in sentences)
        assert passages(text, most, overlap) == slow_split(sentences, most, overlap)


def test_passages_end_at_sentence_borders_and_overlap_by_whole_sentences() -> None:
    text = "Dr. Smith came in 1994 to the U.S. office. He left at 5 p.m. today. Why? Nobody knows."
    assert passages(text, 9) == [
        "Dr. Smith came in 1994 to the U.S. office.",
        "He left at 5 p.m. today. Why? Nobody knows.",
    ]
    assert passages(text, 16, 8) == [
        "Dr. Smith came in 1994 to the U.S. office. He left at 5 p.m. today. Why?",
        "He left at 5 p.m. today. Why? Nobody knows.",
    ]
    # No sentence starts in the last three words of the first passage.
    assert passages(text, 9, 3)[1] == "the U.S. office. He left at 5 p.m. today."


@pytest.mark.parametrize("seed", range(20))
def test_every_word_of_any_text_is_in_a_passage_that_the_offsets_reproduce(seed: int) -> None:
    draw = random.Random(seed)
    words = draw.choices([*ODD, "Then", "it", "ends.", "No!"], k=draw.randrange(1, 600))
    text = "".join(word + draw.choice(GAPS) for word in words)
    most = draw.randint(1, 60)
    overlap = draw.randrange(most)
    spans = list(passage_spans(text, DocumentSplit(most, overlap)))
    places, position = [], 0
    for word in text.split():
        position = text.index(word, position)
        places.append((position, position + len(word)))
        position += len(word)
    assert all(any(start <= first and last <= end for start, end in spans) for first, last in places)
    for start, end in spans:
        passage = text[start:end]
        assert passage == passage.strip()
        assert 1 <= len(passage.split()) <= most
    for (start, end), (next_start, next_end) in itertools.pairwise(spans):
        assert start < next_start
        assert end < next_end
        assert len(text[next_start:end].split()) <= overlap
    assert spans[0][0] == places[0][0]
    assert spans[-1][1] == places[-1][1]


def test_a_text_without_sentence_borders_is_cut_by_words() -> None:
    words = [f"w{n}" for n in range(50)]
    assert passages(" ".join(words), 20) == [" ".join(words[n : n + 20]) for n in (0, 20, 40)]
    assert passages(" ".join(words), 20, 5) == [" ".join(words[n : n + 20]) for n in (0, 15, 30)]


@pytest.mark.parametrize("space", ["\u00a0", "\u3000", "\u2028", "\x85", "\u202f"])
def test_white_space_of_several_bytes_is_a_space(space: str) -> None:
    """sentencex itself fails at a capital letter before such a space and a full stop."""
    first, second = f"Vitamin{space}E{space}. is what they take.", f"They{space}are well."
    assert passages(f"{first}{space}{second}", 9) == [first, second]


def test_characters_of_scripts_without_spaces_are_words() -> None:
    sentence = "今天天气很好。"
    assert passages(sentence * 5, 20) == [sentence * 2, sentence * 2, sentence]
    assert passages("ภาษาไทย", 4) == ["ภาษา", "ไทย"]


def test_a_text_without_a_word_has_no_passage_and_its_document_an_empty_one() -> None:
    assert passages(" \n\u00a0", 5) == passages("", 5) == []
    assert document_spans(["", " a b ", "c d e"], DocumentSplit(2)).tolist() == [
        [0, 0, 0],
        [1, 1, 4],
        [2, 0, 3],
        [2, 4, 5],
    ]
    assert document_spans([], DocumentSplit(2)).tolist() == []


def test_sentences_are_found_across_blocks_of_the_text() -> None:
    sentences = known_sentences(random.Random(1), 3_000, 30)
    text = " ".join(" ".join(words) for words in sentences)
    assert len(text) > 80 * 4_096
    assert passages(text, 40, 10) == slow_split(sentences, 40, 10)


def test_columns_of_passages() -> None:
    documents = pa.table(
        {
            "id": ["a", "b#0", "c"],
            "title": ["A", "B", ""],
            "text": ["One two. Three four.", "", "Five."],
            "metadata": ['{"n":1}', "", "{}"],
            "filter.n": [1, None, 3],
        }
    )
    spans = document_spans(documents["text"].to_pylist(), DocumentSplit(3))
    table = take_passages(documents, spans)
    assert table.column_names == ["id", "title", "text", "metadata", "document", "start", "end", "filter.n"]
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        ("a#0", "A", "One two.", '{"n":1}', "a", 0, 8, 1),
        ("a#1", "A", "Three four.", '{"n":1}', "a", 9, 20, 1),
        ("b#0#0", "B", "", "", "b#0", 0, 0, None),
        ("c#0", "", "Five.", "{}", "c", 0, 5, 3),
    ]
    assert table.schema.field("document").type == pa.string()
    assert table.schema.field("start").type == table.schema.field("end").type == pa.int64()
    assert passages_size(documents, spans) == 2 * len('aA{"n":1}') + 8 + 11 + len("b#0B") + len("c{}Five.")
    assert take_passages(documents.slice(0, 0), spans[:0]).num_rows == 0


def test_the_text_of_a_document_is_not_repeated_in_memory() -> None:
    documents = pa.table([["a"], ["A"], ["word " * 60_000], [""]], ["id", "title", "text", "metadata"])
    spans = document_spans(documents["text"].to_pylist(), DocumentSplit(100))
    assert len(spans) == 600
    before = pa.default_memory_pool()
    pa.set_memory_pool(POOL)
    try:
        take_passages(documents, spans)
    finally:
        pa.set_memory_pool(before)
    assert 300_000 < POOL.max_memory() < 3_000_000


@pytest.mark.parametrize(
    ("words", "overlap", "message"),
    [
        (0, 0, "parameter split_words 0: expected at least 1"),
        (5, 5, "parameter overlap 5: expected 0 to 4 words, fewer than parameter split_words 5"),
        (5, -1, "parameter overlap -1: expected 0 to 4 words, fewer than parameter split_words 5"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(words: int, overlap: int, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}$"):
        DocumentSplit(words, overlap)
