"""Unicode's tests: normal forms, the words of BM25, and splitting, which neither loses a character nor cuts a word."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator
from typing import get_args

import pytest
import regex
from foreign_suites import load_suite

from riptide.base.unicode import Form, normalize
from riptide.indexing.files.splitting import DocumentSplit, passage_spans
from riptide.indexing.lucene.lucene import lucene_jvm, make_analyzer
from riptide.indexing.lucene.stop_words import STOP_WORDS
from riptide.retriever.systems.sentences import split_sentences

SUITE = load_suite("unicode")
TEXTS = ["".join(pieces) for pieces in SUITE["words"] + SUITE["sentences"]]
# The columns of a row of the suite by form: the one with the normal form, and those that have it.
COLUMNS = {"NFC": ((1, (0, 1, 2)), (3, (3, 4))), "NFD": ((2, (0, 1, 2)), (4, (3, 4)))}
COLUMNS |= {"NFKC": ((3, range(5)),), "NFKD": ((4, range(5)),)}
# Words since Unicode 15, in two texts each, that Lucene's tokenizer, by Unicode 12, divides before the picture.
DIVIDED = {"a\u200d\U0001f6d1", "a\u200d\u2701"}


@pytest.mark.parametrize("form", get_args(Form))
def test_normal_forms_are_those_of_the_suite(form: Form) -> None:
    """Also those of all texts as one, which is cut into pieces."""
    rows = [row for row in SUITE["normalization"] if is_assigned("".join(row))]
    assert len(rows) > 1_900
    for expected, columns in COLUMNS[form]:
        for column in columns:
            texts, forms = [row[column] for row in rows], [row[expected] for row in rows]
            assert [normalize(form, text) for text in texts] == forms
            assert normalize(form, "\n".join(texts)) == "\n".join(forms)


def is_assigned(text: str) -> bool:
    """Returns whether the Unicode version of this Python has all characters of a text."""
    return all(unicodedata.category(character) != "Cn" for character in text)


def token_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yields the start and the end of each word of BM25, in code units of UTF-16."""
    java = lucene_jvm()
    stream = java.cast("org.apache.lucene.analysis.Analyzer", make_analyzer("en")).tokenStream("text", text)
    name = "org.apache.lucene.analysis.tokenattributes.OffsetAttribute"
    offsets = java.cast(name, stream.getAttribute(java.type("java.lang.Class").forName(name)))
    stream.reset()
    while stream.incrementToken():
        yield offsets.startOffset(), offsets.endOffset()
    stream.close()


def test_words_of_bm25_are_those_of_the_suite() -> None:
    """Each word with a letter or a digit is found, except stop words, and each that is found is one of the suite."""
    words, at = {}, 0
    for pieces in SUITE["words"]:
        for piece in (*pieces, "\n"):  # a border of words on both sides
            start, at = at, at + len(piece.encode("utf-16-le")) // 2
            words[start, at] = piece
    tokens = set(token_spans("\n".join("".join(pieces) for pieces in SUITE["words"])))
    expected = {span for span, word in words.items() if regex.search(r"[\p{L}\p{N}]", word)}
    missing = {words[span] for span in expected - tokens if words[span].lower() not in STOP_WORDS}
    assert missing == DIVIDED
    assert len(tokens - words.keys()) == 2 * len(DIVIDED)


def test_passages_cut_no_word_and_lose_no_character() -> None:
    for pieces in SUITE["words"]:
        borders, text = {0, *itertools.accumulate(map(len, pieces))}, "".join(pieces)
        spans = list(passage_spans(text, DocumentSplit(1)))
        inside = {at for span in spans for at in span} - borders
        # A mark after a space is a part of the word of the space.
        assert all(text[at - 1] == " " for at in inside), ascii(text)
    for text in TEXTS:
        passages = [text[start:end] for start, end in passage_spans(text, DocumentSplit(1))]
        assert "".join("".join(passages).split()) == "".join(text.split())


def test_sentences_lose_no_character() -> None:
    for text in TEXTS:
        assert "".join("".join(split_sentences(text)).split()) == "".join(text.split()), ascii(text)
