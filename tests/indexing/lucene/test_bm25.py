"""BM25 over a corpus with shards, appended generations and deletions, against a single index and the formula."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runners import InlineRunner, tallied
from small_stores import build_bm25, extend_corpus, shuffled, shuffling_runner
from word_passages import assert_same_hits, expected_hits, pairs, word_passages

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus, passage_contents
from riptide.indexing.exact import Hits
from riptide.indexing.lucene import bm25_index as module
from riptide.indexing.lucene import segment_search, segments
from riptide.indexing.lucene.bm25_index import Bm25, BuildBm25Work, FillLuceneTask
from riptide.indexing.lucene.bm25_index import search_bm25 as search_with
from riptide.indexing.lucene.lucene import lucene_versions
from riptide.indexing.lucene.segment_search import search_among, search_undeleted
from riptide.indexing.storage.cache import CorruptError
from riptide.indexing.store.store import Store
from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.work import WorkUnit, run_work
from riptide.indexing.work.worker_tasks import Allocation, ignore_progress

NOTHING = np.empty(0, np.int64)


def search_bm25(bm25: Bm25, queries: Sequence[str], k: int, deleted: np.ndarray) -> Hits:
    """Searches with three workers at most."""
    return search_with(bm25, queries, k, deleted, shuffling_runner())


def cut(passages: Sequence[str], *sizes: int) -> list[list[str]]:
    bounds = np.cumsum([0, *sizes])
    assert bounds[-1] == len(passages)
    return [list(passages[a:b]) for a, b in itertools.pairwise(bounds)]


def equal(one: Hits, other: Hits) -> None:
    """Asserts equal rows and scores, to the bit, and at least one hit."""
    assert (one.rows >= 0).any()
    np.testing.assert_array_equal(one.rows, other.rows)
    np.testing.assert_array_equal(one.scores, other.scores)


QUERIES = [f"w{n} w{n // 2} w7" for n in range(40)]


def test_what_is_indexed_is_title_and_text_of_each_row_once(tmp_path: Path) -> None:
    passages = ["w1 a b", "", "lone", "w2 c", "w3 d", "w4 e f", "w5 g"]
    extend_corpus(tmp_path, cut(passages[:5], 2, 0, 3), titles=True)
    corpus = extend_corpus(tmp_path, [passages[5:]], titles=True)
    assert corpus.passages([0])[0][2:4] == ("w1", "a b")
    for first in range(8):
        for end in range(first, 8):
            assert list(passage_contents(corpus.parts, first, end)) == passages[first:end]


def test_hits_are_those_of_the_formula_over_parts_shards_and_titles(tmp_path: Path) -> None:
    passages = word_passages(240, seed=1)
    corpus = extend_corpus(tmp_path, cut(passages, 100, 1, 139), titles=True)
    found = build_bm25(corpus, tmp_path, shards=3)
    assert [(part.facts["first_row"], part.facts["end"]) for _, part in found.shards] == [
        (0, 80),
        (80, 160),
        (160, 240),
    ]
    hits = search_bm25(found, QUERIES, 240, NOTHING)
    for number, query in enumerate(QUERIES):
        assert_same_hits(pairs(hits, number), expected_hits(passages, query, k1=0.9, b=0.4))
    other = build_bm25(corpus, tmp_path, "other", shards=1, k1=1.5, b=0.9)
    assert_same_hits(
        pairs(search_bm25(other, ["w1 w9"], 240, NOTHING)), expected_hits(passages, "w1 w9", k1=1.5, b=0.9)
    )


@pytest.mark.parametrize(
    ("rows", "shards", "expected"), [(25, None, 3), (20, None, 2), (1, None, 1), (4, 9, 4), (9, 2, 2)]
)
def test_each_row_is_in_one_shard(tmp_path: Path, monkeypatch, rows: int, shards: int | None, expected: int) -> None:
    monkeypatch.setattr(module, "SHARD_ROWS", 10)
    work = BuildBm25Work(
        Store(str(tmp_path / "store")), extend_corpus(tmp_path, [["w1"] * rows]), "bm25", shards=shards
    )
    [stage] = work.stages
    units = list(stage.units([{}]))
    assert len(units) == work.num_shards == expected
    assert [row for unit in units for row in range(*unit.payload)] == list(range(rows))
    assert max(unit.rows for unit in units) - min(unit.rows for unit in units) <= 1


def test_growth_adds_shards_and_equals_what_is_built_in_one_go(tmp_path: Path) -> None:
    passages = word_passages(300, seed=2)
    store = Store(str(tmp_path / "store"))
    corpus = extend_corpus(tmp_path, cut(passages[:120], 70, 50))
    first = build_bm25(corpus, tmp_path, shards=2)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "store/bm25").rglob("*") if path.is_file()}
    corpus = extend_corpus(tmp_path, [passages[120:200]])
    corpus = extend_corpus(tmp_path, cut(passages[200:], 1, 99))
    with pytest.raises(InputError) as raised:
        Bm25.open(store, None, corpus)
    assert f"{store.url}/bm25/bm25 covers 120 of the corpus' 300 passages: run riptide build-bm25 --name bm25" in str(
        raised.value
    )
    work = BuildBm25Work(store, corpus, "bm25", shards=2)
    assert (work.is_complete, work.first_row, work.end) == (False, 120, 300)
    grown = build_bm25(corpus, tmp_path, shards=2)
    assert [artifact.key for artifact in grown.generations] == ["bm25/bm25/g0000", "bm25/bm25/g0002"]
    assert grown.generations[1].inputs["previous"]["fingerprint"] == first.generations[0].fingerprint
    assert [part.facts["end"] for _, part in grown.shards] == [60, 120, 210, 300]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert BuildBm25Work(store, corpus, "bm25", shards=2).is_complete

    once = build_bm25(corpus, tmp_path, "once", shards=1)
    equal(search_bm25(grown, QUERIES, 60, NOTHING), search_bm25(once, QUERIES, 60, NOTHING))
    (tmp_path / "anew").mkdir()
    anew = build_bm25(extend_corpus(tmp_path / "anew", [passages]), tmp_path / "anew", shards=5)
    equal(search_bm25(grown, QUERIES, 60, NOTHING), search_bm25(anew, QUERIES, 60, NOTHING))
    assert_same_hits(
        pairs(search_bm25(grown, ["w3 w40"], 300, NOTHING)), expected_hits(passages, "w3 w40", k1=0.9, b=0.4)
    )


@pytest.mark.parametrize("share", [0.02, 0.5, 0.97])
def test_deleted_passages_never_appear_and_k_are_found_without_them(tmp_path: Path, share: float) -> None:
    """The best hits of every query are deleted; the other passages keep their scores."""
    passages = word_passages(400, seed=3)
    extend_corpus(tmp_path, [passages])
    store = Store(str(tmp_path / "store"))
    before = build_bm25(Corpus.open(store), tmp_path, shards=3)
    whole = search_bm25(before, QUERIES, 400, NOTHING)
    gone = {int(row) for row in whole.rows[:, :2].ravel()} | set(range(int(400 * share)))
    corpus = extend_corpus(tmp_path, [], sorted(gone))
    assert BuildBm25Work(store, corpus, "bm25", shards=3).is_complete
    found = Bm25.open(store, "bm25", corpus)
    for k in (1, 10, 400):
        hits = search_bm25(found, QUERIES, k, corpus.deleted)
        for number in range(len(QUERIES)):
            assert pairs(hits, number) == [pair for pair in pairs(whole, number) if pair[0] not in gone][:k]
    assert not set(search_bm25(found, QUERIES, 400, corpus.deleted).rows.ravel().tolist()) & gone


def test_all_passages_deleted_find_nothing(tmp_path: Path) -> None:
    extend_corpus(tmp_path, [["w1", "w1 w2"]])
    corpus = extend_corpus(tmp_path, [], [0, 1])
    hits = search_bm25(build_bm25(corpus, tmp_path), ["w1", "w2"], 5, corpus.deleted)
    assert [pairs(hits, n) for n in range(2)] == [[], []]


class Ranked:
    """A searcher whose hits for query n are the rows from n on, best first; it records the calls."""

    num_documents = 1_000

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def search(self, queries: Sequence[str], k: int, *, threads: int) -> Hits:
        self.asked.append((len(queries), k))
        rows = np.array([np.arange(int(query), int(query) + k) for query in queries], np.int64)
        rows[rows >= self.num_documents] = -1
        return Hits(np.where(rows < 0, -np.inf, -rows).astype(np.float32), rows)


def test_only_the_queries_that_lack_hits_are_asked_again_and_deeper() -> None:
    deleted = np.arange(0, 300, dtype=np.int64)
    searcher = Ranked()
    hits = search_undeleted(searcher, ["0", "290", "500", "995"], 10, deleted, 1)  # type: ignore[arg-type]
    expected = [range(300, 310), range(300, 310), range(500, 510), range(995, 1_000)]
    assert [[row for row, _ in pairs(hits, n)] for n in range(4)] == [list(rows) for rows in expected]
    assert [queries for queries, _ in searcher.asked] == [4, 1, 1, 1, 1]
    depths = [depth for _, depth in searcher.asked]
    assert depths == [26, 52, 104, 208, 416]


def test_deep_searches_are_split_so_that_few_hits_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_search, "MAX_LUCENE_HITS", 1_200)
    searcher, rows = Ranked(), np.array([200, 900], np.int64)
    hits = search_among(searcher, ["0", "100", "300", "950"], 2, rows, 1)  # type: ignore[arg-type]
    assert [[row for row, _ in pairs(hits, n)] for n in range(4)] == [[200, 900], [200, 900], [900], []]
    assert searcher.asked == [(1, 1_000)] * 4


def test_pieces_of_queries_come_back_in_their_order(tmp_path: Path, monkeypatch) -> None:
    found = build_bm25(extend_corpus(tmp_path, [word_passages(100, seed=4)]), tmp_path)
    once = search_bm25(found, QUERIES, 20, NOTHING)
    monkeypatch.setattr(segment_search, "BLOCK_QUERIES", 13)
    here = shuffling_runner()
    equal(search_with(found, QUERIES, 20, NOTHING, here), once)
    blocks = [(first, first + len(texts)) for first, texts in here.items("SearchBm25Task")]
    assert blocks != sorted(blocks)
    assert sorted(blocks) == [(0, 13), (13, 26), (26, 40)]
    assert search_bm25(found, [], 20, NOTHING).rows.shape == (0, 20)


def test_shards_stay_open_for_the_next_search(tmp_path: Path) -> None:
    corpus = extend_corpus(tmp_path, [["w1"]])
    found = build_bm25(corpus, tmp_path)
    again = Bm25.open(Store(str(tmp_path / "store")), None, corpus)
    assert found.searcher() is found.searcher() is again.searcher()


def test_without_a_name_it_is_the_one_called_bm25_or_the_only_one(tmp_path: Path) -> None:
    corpus, store = extend_corpus(tmp_path, [["w1"]]), Store(str(tmp_path / "store"))
    with pytest.raises(InputError, match=r"there is no such artifact \(complete bm25: none\)"):
        Bm25.open(store, None, corpus)
    build_bm25(corpus, tmp_path, "a")
    assert Bm25.open(store, None, corpus).name == "a"
    build_bm25(corpus, tmp_path, "b")
    with pytest.raises(InputError, match="has several BM25 indexes: a, b; say which with bm25:NAME"):
        Bm25.open(store, None, corpus)
    build_bm25(corpus, tmp_path)
    assert Bm25.open(store, None, corpus).name == "bm25"
    assert Bm25.open(store, "b", corpus).name == "b"


def test_what_is_committed_is_kept_and_the_rest_is_filled(tmp_path: Path) -> None:
    passages = word_passages(90, seed=5)
    corpus = extend_corpus(tmp_path, [passages])
    store = Store(str(tmp_path / "store"))
    work = BuildBm25Work(store, corpus, "bm25", shards=4)
    work.pin_versions(shuffling_runner())
    dying = InlineRunner(order=shuffled, fail_after=2, error=RuntimeError("power cut"))
    with pytest.raises(RuntimeError, match="power cut"):
        run_work(store, work, dying)
    done = [unit.payload for unit in dying.items("FillLuceneTask")]
    assert len(done) == 2
    assert store.incomplete_keys() == ["bm25/bm25/g0000"]
    with pytest.raises(InputError, match="bm25/bm25/g0000 was begun and is not complete: run the command that makes"):
        Bm25.open(store, "bm25", corpus)
    folder = tmp_path / "store/bm25/bm25/g0000"
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("shard-*")}
    assert len(kept) == 4

    resuming = shuffling_runner()
    _, counts = tallied(store, work, resuming)
    filled = [unit.payload for unit in resuming.items("FillLuceneTask")]
    assert sorted(filled + done) == [(0, 22), (22, 45), (45, 67), (67, 90)]
    for kept_before, ranges in ((True, done), (False, filled)):
        found = [rows for was_kept, rows in counts["index text"] if was_kept == kept_before]
        assert sorted(found) == sorted(end - first for first, end in ranges)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    resumed = Bm25.open(store, "bm25", corpus)
    equal(
        search_bm25(resumed, QUERIES, 90, NOTHING),
        search_bm25(build_bm25(corpus, tmp_path, "whole"), QUERIES, 90, NOTHING),
    )


def test_java_is_called_by_one_thread_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyjnius calls a method of the object that any thread looked it up on last, so shards would mix passages."""
    passages = word_passages(40, seed=7)
    corpus = extend_corpus(tmp_path, [passages])
    threads: set[int] = set()
    for owner, name in ((module, "write_shard"), (segments, "lucene_versions")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *a, real=real, **k: (threads.add(threading.get_ident()), real(*a, **k))[1]
        )
    store, here = Store(str(tmp_path / "store")), LocalRunner(cores=4)
    work = BuildBm25Work(store, corpus, "bm25", shards=4)
    work.pin_versions(here)
    run_work(store, work, here)
    assert threads == {threading.get_ident()}
    assert sum(part.rows for _, part in Bm25.open(store, "bm25", corpus).shards) == 40


def test_a_retried_shard_is_not_made_again(tmp_path: Path, monkeypatch) -> None:
    corpus = extend_corpus(tmp_path, [["w1", "w2"]])
    store = Store(str(tmp_path / "store"))
    draft = store.create("bm25", "bm25/g0000", config=lucene_versions())
    fill = FillLuceneTask(draft, corpus.parts, "en").open(Allocation(1))
    unit = WorkUnit(("shard-00000",), 2, (0, 2))
    fill(unit, ignore_progress)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store/bm25").rglob("*")}
    monkeypatch.setattr(module, "write_shard", lambda *_, **__: pytest.fail("made again"))
    fill(unit, ignore_progress)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store/bm25").rglob("*")} == before


def test_a_shard_is_not_filled_by_another_lucene(tmp_path: Path, monkeypatch) -> None:
    """As on a node with another pyserini than the node that began it."""
    corpus = extend_corpus(tmp_path, [["w1", "w2"]])
    store = Store(str(tmp_path / "store"))
    draft = store.create("bm25", "bm25/g0000", config={**lucene_versions(), "lucene": "8.0.0"})
    monkeypatch.setattr(module, "write_shard", lambda *_, **__: pytest.fail("filled"))
    with pytest.raises(
        InputError, match=rf"g0000 was made with lucene 8\.0\.0, here is {lucene_versions()['lucene']}: build"
    ):
        FillLuceneTask(draft, corpus.parts, "en").open(Allocation(1))
    assert draft.committed_parts() == {}


def test_a_store_on_another_file_system_than_temporary_files(tmp_path: Path, monkeypatch) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs /dev/shm on a file system of its own")
    import tempfile

    with tempfile.TemporaryDirectory(dir=shm) as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        found = build_bm25(extend_corpus(tmp_path, [["w1", "w2 w1"]]), tmp_path)
        assert [row for row, _ in pairs(search_bm25(found, ["w1"], 5, NOTHING))] == [0, 1]


def test_other_options_are_refused_with_both_sides_named(tmp_path: Path) -> None:
    corpus = extend_corpus(tmp_path, [["w1", "w2"]])
    build_bm25(corpus, tmp_path, shards=1)
    store = Store(str(tmp_path / "store"))
    given: dict[str, Any] = {"k1": 0.9, "b": 0.4, "language": "en", "shards": 1}
    assert BuildBm25Work(store, corpus, "bm25", **given).is_complete
    for key, other in {"k1": 1.2, "b": 0.75, "language": "de", "shards": 2}.items():
        with pytest.raises(InputError, match="bm25/bm25/g0000 was built otherwise") as raised:
            BuildBm25Work(store, corpus, "bm25", **{**given, key: other})
        assert f"(parameter {key} {given[key]}, now {other})" in str(raised.value)


def test_that_of_another_corpus_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    for name, text in (("a", "w1"), ("b", "w2")):
        (tmp_path / name).mkdir()
        extend_corpus(tmp_path / name, [[text]])
    stores = {name: Store(str(tmp_path / name / "store")) for name in "ab"}
    corpora = {name: Corpus.open(store) for name, store in stores.items()}
    build_bm25(corpora["a"], tmp_path / "a")
    prints = {name: corpus.generations[0].fingerprint[:12] for name, corpus in corpora.items()}
    assert prints["a"] != prints["b"]
    told = f"bm25/bm25/g0000 was built from corpus/g0000 {prints['a']}, the corpus is now {prints['b']}"
    with pytest.raises(InputError, match=told):
        Bm25.open(stores["a"], "bm25", corpora["b"])
    with pytest.raises(InputError, match=told):
        BuildBm25Work(stores["a"], corpora["b"], "bm25")
    grown = extend_corpus(tmp_path / "a", [["w3"]])
    build_bm25(grown, tmp_path / "a")
    with pytest.raises(InputError, match=r"built from corpus/g0001 .*the corpus has no such generation"):
        Bm25.open(stores["a"], "bm25", corpora["a"])


def test_a_limited_index_is_complete(tmp_path: Path) -> None:
    passages = word_passages(50, seed=6)
    corpus = extend_corpus(tmp_path, [passages[:30]])
    found = build_bm25(corpus, tmp_path, limit=20)
    assert (found.name, found.num_rows) == ("bm25", 20)
    assert_same_hits(pairs(search_bm25(found, ["w1"], 50, NOTHING)), expected_hits(passages[:20], "w1", k1=0.9, b=0.4))
    corpus = extend_corpus(tmp_path, [passages[30:]])
    assert Bm25.open(Store(str(tmp_path / "store")), None, corpus).num_rows == 20
    assert build_bm25(corpus, tmp_path, "more", limit=40).num_rows == 40


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"k1": -0.1}, "parameter k1 -0.1"),
        ({"k1": float("nan")}, "parameter k1 nan"),
        ({"k1": float("inf")}, "parameter k1 inf"),
        ({"b": 1.01}, "parameter b 1.01"),
        ({"b": -1.0}, "parameter b -1.0"),
        ({"shards": 0}, "parameter shards 0"),
    ],
)
def test_values_that_bm25_does_not_take(tmp_path: Path, options: dict, told: str) -> None:
    corpus = extend_corpus(tmp_path, [["w1"]])
    with pytest.raises(InputError, match=told):
        BuildBm25Work(Store(str(tmp_path / "store")), corpus, "bm25", **options)
    assert Store(str(tmp_path / "store")).keys("bm25") == []


def test_an_unknown_language_leaves_nothing(tmp_path: Path) -> None:
    corpus = extend_corpus(tmp_path, [["w1"]])
    with pytest.raises(InputError, match="language 'xx': Anserini has no analyzer for it"):
        build_bm25(corpus, tmp_path, language="xx")
    assert not (tmp_path / "store/bm25").exists()


def test_a_flipped_byte_is_named_before_lucene_reads_it(tmp_path: Path) -> None:
    found = build_bm25(extend_corpus(tmp_path, [word_passages(50)]), tmp_path)
    [file] = (tmp_path / "store/bm25").rglob("*.cfs")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=f"{file.name}: its sha256 is not the committed one"):
        found.searcher()
