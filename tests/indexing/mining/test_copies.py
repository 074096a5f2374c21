"""Copies of given passages, compared with a loop over all pairs of texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from runners import InlineRunner

from riptide.indexing.corpus.corpus import Corpus, write_table
from riptide.indexing.formats.parse import CORPUS_SCHEMA
from riptide.indexing.mining.copies import CopyGroups, commit_copies, find_copies, read_copies, text_hashes
from riptide.indexing.store.store import Store

PART_ROWS = 40


@pytest.fixture
def texts() -> list[tuple[str, str]]:
    """Titles and texts of few words, so that many are equal but for their white space."""
    draw = np.random.default_rng(0)
    spaces = [" ", "  ", "\n", "\t ", "\u00a0", "\u3000"]

    def text(words: int) -> str:
        pieces = [f"{draw.choice(['a', 'b', 'Aé'])}{draw.choice(spaces)}" for _ in range(draw.integers(words + 1))]
        return draw.choice(["", " "]) + "".join(pieces)

    return [(text(1), text(2)) for _ in range(3 * PART_ROWS)]


@pytest.fixture
def corpus(tmp_path: Path, texts: list[tuple[str, str]]) -> Corpus:
    store = Store(str(tmp_path / "store"))
    with store.create("corpus", "g0000", config={"limit": None}) as draft:
        for first in range(0, len(texts), PART_ROWS):
            own = texts[first : first + PART_ROWS]
            ids = [f"d{first + number}" for number in range(len(own))]
            columns = [ids, [title for title, _ in own], [text for _, text in own], [""] * len(own)]
            table = pa.table(columns, schema=CORPUS_SCHEMA)
            name = f"part-{first // PART_ROWS:05d}"
            draft.commit(name, ".arrow", lambda path, t=table: write_table(t, path), rows=len(own))
    return Corpus.open(store)


def same(one: tuple[str, str], other: tuple[str, str]) -> bool:
    return [each.split() for each in one] == [each.split() for each in other]


def test_copies_are_the_other_passages_with_the_same_words(
    corpus: Corpus, texts: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted = np.array([5, 17, 60])
    monkeypatch.setattr(Corpus, "deleted", deleted)
    alive = [row for row in range(len(texts)) if row not in deleted]
    positives = [np.array(rows, np.int64) for rows in ([3], [8, 41, 3], [], [100], [2, 2])]
    counted: list[int] = []
    found = find_copies(corpus, np.concatenate(positives), InlineRunner(), counted.append)
    assert sum(counted) == len(texts)
    expected = [
        [row for row in alive if row not in rows and any(same(texts[row], texts[own]) for own in rows)]
        for rows in positives
    ]
    assert [rows.tolist() for rows in found.other_rows(positives)] == expected
    assert sum(map(len, expected)) > 20
    assert find_copies(corpus, np.empty(0, np.int64), InlineRunner()).rows.tolist() == []


def test_title_and_text_are_told_apart() -> None:
    hashes = text_hashes(["a b", "a", "", "a  b\n", "ab"], ["c", "b c", "a b c", " c", "c"])
    assert hashes[0] == hashes[3]
    assert len({*hashes.tolist()}) == 4


def test_committed_copies_are_read_again(tmp_path: Path, corpus: Corpus) -> None:
    found = find_copies(corpus, np.arange(10), InlineRunner())
    store = Store(str(tmp_path / "other"))
    with store.create("candidates", "pool", config={}) as draft:
        assert len(read_copies(draft).rows) == 0
        commit_copies(draft, found)
        assert read_copies(draft).rows.tolist() == found.rows.tolist()
    read = read_copies(store.open("candidates", "pool"))
    assert (read.hashes.tolist(), read.rows.tolist()) == (found.hashes.tolist(), found.rows.tolist())
    with store.create("candidates", "none", config={"other": 1}) as draft:
        pass
    none = read_copies(store.open("candidates", "none"))
    assert isinstance(none, CopyGroups)
    assert [rows.tolist() for rows in none.other_rows([np.array([1])])] == [[]]
