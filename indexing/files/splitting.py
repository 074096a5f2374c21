"""Splits documents into passages with a maximum number of words, which end at sentence borders where possible."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from sentencex import get_sentence_boundaries

from riptide.base.errors import InputError
from riptide.base.unicode import word_runs
from riptide.base.wording import Parameter

# Characters per call of sentencex, which takes quadratic time for unclosed quotes.
_BLOCK = 4_096
# Replaces multi-byte white space: after a capital letter and before a full stop, sentencex 1.0.32 panics on it.
_SPACES = dict.fromkeys((code for code in range(128, 0x3001) if chr(code).isspace()), " ")
BYTES_PER_WORD = 6  # mean bytes of an English word in UTF-8, with the space


@dataclass(frozen=True)
class DocumentSplit:
    """The parameters by which documents are split into passages.

    Attributes:
        words: Maximum number of words of a passage. A word is a run of characters between white space, or a character
            of a script without spaces.
        overlap: Maximum number of words that a passage shares with the one before it; less than `words`.
    """

    words: int
    overlap: int = 0

    def __post_init__(self) -> None:
        """Raises InputError if `words` is below 1 or `overlap` is not from 0 to words - 1."""
        if self.words < 1:
            raise InputError(f"{Parameter('split_words', self.words)}: expected at least 1")
        if not 0 <= self.overlap < self.words:
            raise InputError(
                f"{Parameter('overlap', self.overlap)}: expected 0 to {self.words - 1} words, fewer than "
                f"{Parameter('split_words', self.words)}"
            )

    def __str__(self) -> str:
        """Returns the names and values of the parameters, for messages."""
        return f"{Parameter('split_words', self.words)}, {Parameter('overlap', self.overlap)}"


def passage_spans(text: str, split: DocumentSplit) -> Iterator[tuple[int, int]]:
    """Yields the character range (start, end) of each passage of a text; nothing for a text without words.

    A passage ends at the last sentence border in its second half, otherwise after `split.words` words. The next passage
    starts at the first sentence border among the last `split.overlap` words, otherwise `split.overlap` words before the
    end. Every word is in a passage, and each passage has a word that no earlier one has.
    """
    words = np.fromiter((run.span() for run in word_runs(text)), np.dtype((np.int64, 2)))
    if len(words) <= split.words:
        if len(words):
            yield int(words[0, 0]), int(words[-1, 1])
        return
    starts = np.fromiter(_sentence_starts(text), np.int64)
    borders = [0, *np.unique(np.searchsorted(words[:, 0], starts)).tolist()]  # index of each sentence's first word
    first, shortest = 0, max((split.words + 1) // 2, split.overlap + 1)
    while True:
        end = min(first + split.words, len(words))
        if end < len(words) and (border := borders[bisect.bisect_right(borders, end) - 1]) >= first + shortest:
            end = border
        yield int(words[first, 0]), int(words[end - 1, 1])
        if end == len(words):
            return
        following = bisect.bisect_left(borders, end - split.overlap)
        has_border = following < len(borders) and borders[following] < end
        first = borders[following] if has_border else end - split.overlap


def _sentence_starts(text: str) -> Iterator[int]:
    """Yields the start position of each sentence of a text, in time linear in the length of the text.

    The text is read in blocks. A block starts at the last sentence of the one before it, or at the end of that one if
    the sentence is longer than half a block.
    """
    first, is_sentence = 0, True
    while first < len(text):
        block = text[first : first + _BLOCK].translate(_SPACES)
        starts = [sentence["start_index"] for sentence in get_sentence_boundaries("en", block)]
        yield from (first + start for start in starts if start or is_sentence)
        is_sentence = starts[-1] > _BLOCK // 2
        first += starts[-1] if is_sentence else len(block)


def document_spans(texts: Iterable[str], split: DocumentSplit) -> np.ndarray:
    """Returns (document number, start, end) of each passage, in characters: int64 [passages, 3].

    A document without a word has one empty passage.
    """

    def spans() -> Iterator[tuple[int, int, int]]:
        for number, text in enumerate(texts):
            has_word = False
            for first, end in passage_spans(text, split):
                has_word = True
                yield number, first, end
            if not has_word:
                yield number, 0, 0

    return np.fromiter(spans(), np.dtype((np.int64, 3)))


def passages_size(documents: pa.Table, spans: np.ndarray, repeated: Sequence[str] = ("id", "title", "metadata")) -> int:
    """Returns the total number of characters in the texts of passages and in the columns that repeat for each."""
    columns = (documents[name].to_pylist() for name in repeated)
    lengths = np.array([sum(map(len, values)) for values in zip(*columns, strict=True)], np.int64)
    return int(lengths[spans[:, 0]].sum() + (spans[:, 2] - spans[:, 1]).sum())


def take_passages(
    documents: pa.Table, spans: np.ndarray, describe: Callable[[str, np.ndarray], list[str]] | None = None
) -> pa.Table:
    """Builds the table of passages from documents and character ranges.

    Args:
        documents: Columns id, title, text and others, one row per document.
        spans: The result of `document_spans`.
        describe: Returns the metadata of the passages of a document from its own and from their starts and ends,
            int64 [passages, 2]; None: each passage has the document's.

    Returns:
        The same columns, with the id `DOCUMENT#NUMBER` and the text of each passage; the others are repeated. Then
        `document`, the id of the document, and `start` and `end`, int64, the characters of its text.
    """
    owners, starts, ends = spans.T
    first = np.flatnonzero(np.diff(owners, prepend=-1))
    numbers = np.arange(len(owners)) - np.repeat(first, np.diff(first, append=len(owners)))
    names, texts = documents["id"].to_pylist(), documents["text"].to_pylist()
    values = {
        "id": [f"{names[owner]}#{number}" for owner, number in zip(owners.tolist(), numbers.tolist(), strict=True)],
        "text": [texts[owner][start:end] for owner, start, end in spans.tolist()],
    }
    if describe is not None:
        ranges = np.split(spans[:, 1:], first[1:])[: len(names)]
        pairs = zip(documents["metadata"].to_pylist(), ranges, strict=True)
        values["metadata"] = [text for metadata, own_spans in pairs for text in describe(metadata, own_spans)]
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    for field in documents.schema:
        if field.name in values:
            columns[field.name] = pa.array(values[field.name], field.type)
        else:
            columns[field.name] = documents[field.name].take(pa.array(owners))
        if field.name == "metadata":
            columns["document"] = documents["id"].take(pa.array(owners))
            columns |= {"start": pa.array(starts), "end": pa.array(ends)}
    return pa.table(columns)
