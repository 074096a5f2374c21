"""Lucene's BM25 against the formula in pure Python: scores, order, and texts with special characters."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from word_passages import assert_same_hits, expected_hits, pairs, stored_length, word_passages

from riptide.base.errors import InputError
from riptide.indexing.exact import merge_hits
from riptide.indexing.lucene.lucene import (
    LuceneSearch,
    LuceneSegmentFiles,
    lucene_jvm,
    lucene_versions,
    open_shard,
    write_shard,
)
from riptide.indexing.lucene.stop_words import STOP_WORDS

MARKS = ("+", "-", "&&", "||", "!", "(", ")", "{", "}", "[", "]", "^", '"', "~", "*", "?", ":", "\\", "/")


def write(folder: Path, passages: Sequence[str], shards: int = 1) -> list[tuple[LuceneSegmentFiles, Path]]:
    made = []
    for number, some in enumerate(np.array_split(np.array(passages, object), shards)):
        at = folder / f"{len(list(folder.glob('*')))}-{number}"
        at.mkdir(parents=True)
        shard = write_shard(some.tolist(), at)
        made.append((shard, at / shard.bulk))
    return made


def searcher(folder: Path, passages: Sequence[str], shards: int = 1, k1: float = 0.9, b: float = 0.4) -> LuceneSearch:
    return LuceneSearch(write(folder, passages, shards), k1=k1, b=b)


@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (1.2, 0.75), (0.0, 0.4), (2.0, 0.0), (0.5, 1.0)])
def test_scores_are_those_of_the_formula(tmp_path: Path, k1: float, b: float) -> None:
    passages = word_passages(300)
    queries = ["w1", "w59 w3", "w7 w7 w7 w40", "w5 nowhere w50 w51", "w0 w1 w2 w3 w4 w5"]
    hits = searcher(tmp_path, passages, 2, k1, b).search(queries, 300)
    for number, query in enumerate(queries):
        expected = expected_hits(passages, query, k1=k1, b=b)
        assert len(expected) > 10
        assert_same_hits(pairs(hits, number), expected)


def test_lengths_are_kept_in_a_byte_as_in_lucene(tmp_path: Path) -> None:
    """One word in passages of 1 to 100,000 words: the score shows how the length is rounded."""
    lengths = [*range(1, 200), 255, 256, 1_000, 1_023, 4_095, 4_096, 40_000, 100_000]
    passages = [" ".join(["w1", *["w2"] * (length - 1)]) for length in lengths]
    assert_same_hits(
        pairs(searcher(tmp_path, passages).search(["w1"], 300)), expected_hits(passages, "w1", k1=0.9, b=0.4), rel=1e-5
    )
    assert [stored_length(length) for length in (23, 24, 39, 40, 41, 42, 56, 59)] == [23, 24, 39, 40, 40, 42, 56, 56]


def test_some_of_the_shards_are_searched_with_the_statistics_of_all(tmp_path: Path) -> None:
    """The hits of disjoint runs of shards, merged, equal those of all; two threads share one searcher."""
    passages = word_passages(211, seed=1)
    queries = [f"w{n} w{n // 2} w{n // 3}" for n in range(60)]
    shards = write(tmp_path, passages, 7)
    whole = LuceneSearch(shards, k1=0.9, b=0.4).search(queries, 50)
    runs = [slice(0, 1), slice(1, 5), slice(5, 7)]
    some = [LuceneSearch(shards, k1=0.9, b=0.4, shard_range=run) for run in runs]
    assert [searcher.num_documents for searcher in some] == [31, 120, 60]
    merged = merge_hits([searcher.search(queries, 50, threads=2) for searcher in some], 50)
    np.testing.assert_array_equal(merged.rows, whole.rows)
    np.testing.assert_array_equal(merged.scores, whole.scores)


@pytest.mark.parametrize("shards", [2, 4, 7])
def test_shards_are_searched_as_one(tmp_path: Path, shards: int) -> None:
    """Scores are equal to the bit: statistics are those of all shards, and rows continue from shard to shard."""
    passages = word_passages(211, seed=1)
    queries = [f"w{n} w{n // 2} w{n // 3}" for n in range(60)]
    one = searcher(tmp_path, passages).search(queries, 50)
    many = searcher(tmp_path, passages, shards).search(queries, 50)
    assert one.rows.max() > 200
    np.testing.assert_array_equal(many.rows, one.rows)
    np.testing.assert_array_equal(many.scores, one.scores)


@pytest.mark.parametrize("shards", [1, 4])
def test_equal_scores_are_ordered_by_row_whichever_k(tmp_path: Path, shards: int) -> None:
    passages = [f"w1 w{2 + n % 3}" for n in range(3_000)]
    found = searcher(tmp_path, passages, shards)
    for k in (1, 10, 1_000, 3_000):
        hits = found.search(["w1", "w3"], k)
        assert [row for row, _ in pairs(hits, 0)] == list(range(k))
        assert [row for row, _ in pairs(hits, 1)] == list(range(1, 3_000, 3))[:k]
        assert len({score for _, score in pairs(hits)}) == 1


def test_rows_are_those_of_the_passages_through_many_flushes(tmp_path: Path, monkeypatch) -> None:
    """A small buffer, which is flushed often, gives many segments, which are merged in order."""
    monkeypatch.setattr("riptide.indexing.lucene.lucene.BUFFER_MB", 0.1)
    draw = random.Random(2)
    passages = [f"unique{n} " + " ".join(f"w{draw.randrange(5_000)}" for _ in range(40)) for n in range(4_000)]
    made = write(tmp_path, passages)
    assert sorted(made[0][0].small)[-1].startswith("segments_")
    hits = LuceneSearch(made, k1=0.9, b=0.4).search([f"unique{n}" for n in range(4_000)], 2)
    np.testing.assert_array_equal(hits.rows, [[n, -1] for n in range(4_000)])


def test_empty_passages_keep_their_row(tmp_path: Path) -> None:
    passages = ["", "", "w1", "", "the of", "w1 w2", "!?", ""]
    for shards in (1, 3):
        found = searcher(tmp_path, passages, shards)
        assert found.num_documents == 8
        assert [row for row, _ in pairs(found.search(["w1"], 8))] == [2, 5]
    for shards in (1, 2):  # shards, or a whole index, without a word
        found = searcher(tmp_path, ["", "", "", "w1"], 4 // shards)
        assert pairs(found.search(["w1"], 4))[0][0] == 3
        assert pairs(searcher(tmp_path, ["", "the", "!", ""], shards).search(["w1", "the"], 4)) == []


def test_no_passage_at_all_is_no_shard(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="0 passages made no segment"):
        write_shard([], tmp_path)


def test_odd_characters_are_no_end_and_no_error(tmp_path: Path) -> None:
    passages = [
        "w1\0w2",
        "\0",
        "w3\0",
        "\U0001f600 w4",
        "\U0001f600\U0001f600",
        "na\u00efve w5",
        "w6\ufffe\uffff w7",
        "\u202ew8\u200b",
        "\u4e2d\u6587 w9",
        "w10\r\nw11\tw12",
        "\U00020000",
    ]
    found = searcher(tmp_path, passages)
    asked = {
        "w2": [0],
        "w1\0": [0],
        "\0w3": [2],
        "\0": [],
        "w4": [3],
        "\U0001f600": [3, 4],
        "na\u00efve": [5],
        "w7": [6],
        "w8": [7],
        "\u6587": [8],
        "w11": [9],
        "w12": [9],
        "\U00020000": [10],
    }
    hits = found.search(list(asked), 11)
    assert {query: sorted(row for row, _ in pairs(hits, n)) for n, query in enumerate(asked)} == asked


def test_a_very_long_passage_counts_all_its_words(tmp_path: Path) -> None:
    """A million words, and one word of three million letters, which the tokenizer cuts every 255."""
    passages = [" ".join([*(f"w{n % 997}" for n in range(1_000_000)), "last"]), "last w1", "x" * 3_000_000]
    cut = [*passages[:2], " ".join("x" * min(255, 3_000_000 - at) for at in range(0, 3_000_000, 255))]
    hits = searcher(tmp_path, passages).search(["last w5", "x" * 255], 3)
    assert_same_hits(pairs(hits), expected_hits(cut, "last w5", k1=0.9, b=0.4))
    assert_same_hits(pairs(hits, 1), expected_hits(cut, "x" * 255, k1=0.9, b=0.4))


def test_query_syntax_is_punctuation(tmp_path: Path) -> None:
    passages = word_passages(100, seed=3)
    plain = "w1 w2 w30"
    queries = [plain, *(f"{mark}w1 {mark} w2{mark} {mark}{mark}w30" for mark in MARKS)]
    queries += [f"w1 {mark} w2 {mark} w30" for mark in ("AND", "OR", "NOT", "TO")]  # in Lucene's list of stop words
    queries += ['"w1 w2" w30', "(w1 AND (w2 NOT w30))", "[w1 TO w2] w30", "-w1 +w2^ !w30"]
    hits = searcher(tmp_path, passages).search(queries, 100)
    expected = expected_hits(passages, plain, k1=0.9, b=0.4)
    assert_same_hits(pairs(hits), expected)
    for number, query in enumerate(queries):
        assert pairs(hits, number) == pairs(hits), query
    # Field names, wildcards and fuzzy words are plain text too: they are tokenised, and may match nothing.
    odd = searcher(tmp_path, ["w1 2", "w12", "contents"]).search(["contents:w1", "w1*", "w1~2", "w1?", *MARKS], 5)
    assert [[row for row, _ in pairs(odd, n)] for n in range(4)] == [[], [0], [0], [0]]
    assert (odd.rows[4:] == -1).all()


def test_the_stop_words_are_those_of_lucene(tmp_path: Path) -> None:
    words = lucene_jvm().type("org.apache.lucene.analysis.en.EnglishAnalyzer").ENGLISH_STOP_WORDS_SET.iterator()
    expected = set()
    while words.hasNext():
        expected.add("".join(words.next()))
    assert expected == STOP_WORDS
    hits = searcher(tmp_path, ["w1", " ".join(sorted(STOP_WORDS))]).search(sorted(STOP_WORDS), 2)
    assert (hits.rows == -1).all()  # by Anserini's analyzer, which BM25 uses


@pytest.mark.parametrize("query", ["", " ", "the of and", "nowhere", "?!", "\0"])
def test_a_query_without_an_indexed_word_finds_nothing(tmp_path: Path, query: str) -> None:
    found = searcher(tmp_path, ["w1 the", "w2 of"])
    hits = found.search([query, "w1", query], 3)
    assert [len(pairs(hits, n)) for n in range(3)] == [0, 1, 0]


def test_a_query_of_thousands_of_words(tmp_path: Path) -> None:
    """More distinct words than the 1,024 clauses that Lucene accepts by default."""
    draw = random.Random(4)
    passages = [" ".join(f"w{draw.randrange(6_000)}" for _ in range(60)) for _ in range(200)]
    query = " ".join(f"w{n}" for n in range(5_000))
    assert_same_hits(
        pairs(searcher(tmp_path, passages, 2).search([query], 200)), expected_hits(passages, query, k1=0.9, b=0.4)
    )


def test_no_query_and_more_hits_than_passages(tmp_path: Path) -> None:
    found = searcher(tmp_path, ["w1", "w1 w2"])
    assert found.search([], 5).rows.shape == (0, 5)
    hits = found.search(["w1"], 1_000)
    assert hits.rows.shape == hits.scores.shape == (1, 1_000)
    assert (hits.rows.dtype, hits.scores.dtype) == (np.int64, np.float32)
    assert [row for row, _ in pairs(hits)] == [0, 1]


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_any_number_of_threads_finds_the_same(tmp_path: Path, threads: int) -> None:
    """Repeated searches in threads that end: each must detach from the JVM."""
    found = searcher(tmp_path, word_passages(200, seed=5), 3)
    queries = [f"w{n} w{n + 1}" for n in range(50)]
    one = found.search(queries, 20)
    for _ in range(5):
        many = found.search(queries, 20, threads=threads)
        np.testing.assert_array_equal(many.rows, one.rows)
        np.testing.assert_array_equal(many.scores, one.scores)
    few = found.search(queries[:2], 20, threads=threads)
    np.testing.assert_array_equal(few.rows, one.rows[:2])


def test_words_are_stemmed_in_their_language(tmp_path: Path) -> None:
    """Forms of a word in English and German; in Chinese, which has no spaces, pairs of characters."""
    known = {
        "en": (["the running dogs", "he runs", "nothing here"], "a dog is running", {0, 1}),
        "de": (["viele Häuser", "ein Haus", "keine Katze"], "die haeuser", {0, 1}),
        "zh": (["北京大学", "上海", "北京"], "北京", {0, 2}),
    }
    for language, (passages, query, expected) in known.items():
        folder = tmp_path / language
        folder.mkdir()
        shard = write_shard(passages, folder, language=language)
        found = LuceneSearch([(shard, folder / shard.bulk)], k1=0.9, b=0.4, language=language)
        assert {row for row, _ in pairs(found.search([query], 3))} == expected, language
    for language in ("xx", "", "English"):
        with pytest.raises(InputError, match=f"language '{language}': Anserini has no analyzer for it"):
            write_shard(["w1"], tmp_path, language=language)


def test_versions_are_those_of_the_jar() -> None:
    found = lucene_versions()
    assert found["lucene"].split(".")[0].isdigit()
    assert found["anserini"].split(".")[0].isdigit()
    assert set(found) == {"lucene", "anserini"}


@pytest.mark.parametrize("damage", ["empty", "cut", "start", "end", "removed", "text", "small"])
def test_a_damaged_file_is_refused_by_name_and_the_process_lives(tmp_path: Path, damage: str) -> None:
    [(shard, path)] = write(tmp_path, word_passages(100))
    data = bytearray(path.read_bytes())
    if damage == "removed":
        path.unlink()
    elif damage == "small":
        shard = LuceneSegmentFiles(
            shard.bulk, {name: content[: len(content) // 2] for name, content in shard.small.items()}
        )
    else:
        changed = {"empty": b"", "cut": data[: len(data) // 2], "text": b"<html>no segment</html>" * 500}
        for where, at in (("start", 0), ("end", len(data) - 16)):
            flipped = bytearray(data)
            flipped[at] ^= 0xFF
            changed[where] = bytes(flipped)
        path.write_bytes(changed[damage])
    with pytest.raises(InputError, match="Lucene cannot read it: ") as raised:
        open_shard(shard, path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)
    [good] = write(tmp_path, ["w1"])
    assert pairs(LuceneSearch([good], k1=0.9, b=0.4).search(["w1"], 1))[0][0] == 0


def test_opening_and_searching_leave_no_folder_behind(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    made = write(tmp_path / "shards", word_passages(50), 2)
    found = LuceneSearch(made, k1=0.9, b=0.4)
    assert list((tmp_path / "scratch").iterdir()) == []
    assert pairs(found.search(["w1"], 5))
    with pytest.raises(InputError):
        open_shard(made[0][0], tmp_path / "nowhere")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_full_disk_is_told_in_a_line(tmp_path: Path) -> None:
    """A process with a file size limit of 3,000 bytes; it continues when the limit is lifted."""
    code = """
import resource, sys
from pathlib import Path
from riptide.indexing.lucene.lucene import lucene_jvm, write_shard
from riptide.base.errors import InputError
lucene_jvm()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, hard))
try:
    write_shard((f"w{n}" for n in range(5_000)), Path(sys.argv[1]))
except InputError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
print(write_shard(["w1"], Path(sys.argv[2])).bulk)
"""
    folders = [tmp_path / "full", tmp_path / "free"]
    for folder in folders:
        folder.mkdir()
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", code, *map(str, folders)]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    told, bulk = ended.stdout.splitlines()
    assert told.startswith(f"{folders[0]}: Lucene cannot write there: File too large; free some space")
    assert bulk.endswith(".cfs")


def test_the_jvm_outlives_what_takes_its_signals(tmp_path: Path) -> None:
    """Like Ray, which restores the default action of a fault, the end of the process, when it shuts down."""
    code = """
import random, signal, sys
from pathlib import Path
from threading import Thread
from riptide.indexing.lucene.java import jvm
from riptide.indexing.lucene.lucene import LuceneSearch, write_shard

words = [f"w{number}" for number in range(2_000)]
texts = [" ".join(random.Random(number).choices(words, k=30)) for number in range(3_000)]
folder = Path(sys.argv[1])
shard = write_shard(texts, folder)
search = LuceneSearch([(shard, folder / shard.bulk)], k1=0.9, b=0.4)
before = search.search(texts, 20, threads=2)  # often enough to be compiled
for fault in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
    signal.signal(fault, signal.SIG_DFL)

def collect():
    for _ in range(20):
        jvm().type("java.lang.System").gc()
    jvm().detach()

thread = Thread(target=collect)
thread.start()
after = search.search(texts, 20, threads=2)
thread.join()
print((before.rows == after.rows).all())
"""
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr
