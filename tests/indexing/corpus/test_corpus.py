"""Reading a corpus of several generations, compared with plain lists."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from small_stores import build_corpus, passages_of

from riptide.base.errors import InputError
from riptide.indexing.corpus import corpus as corpus_module
from riptide.indexing.corpus.corpus import Corpus, open_table, write_table
from riptide.indexing.store.sealed_json import manifest_bytes, read_manifest
from riptide.indexing.store.store import Store

PARTS = [[["a", "b", "c"], ["d"]], [["e", "f"]]]
NAMES = ["a", "b", "c", "d", "e", "f"]


def test_a_corpus_whose_manifest_lists_no_parts_is_refused(tmp_path: Path) -> None:
    """Its own hash is right. Before, a search ended with an error of an index."""
    store = Store(build_corpus(tmp_path, PARTS, {}).generations[0].url.rpartition("/corpus")[0])
    document, _ = read_manifest(store.storage, "corpus/g0000")
    store.storage.put("corpus/g0000/manifest.json", manifest_bytes(document, []))
    with pytest.raises(InputError, match=r"corpus/g0000: holds no passages; restore its manifest\.json"):
        Corpus.open(store)


def test_passages_of_any_rows_in_any_order(tmp_path: Path) -> None:
    corpus = build_corpus(tmp_path, PARTS, {})
    assert corpus.num_rows == 6
    for rows in ([5, 0, 3, 3, 1], [2], []):
        assert [passage[:4] for passage in corpus.passages(rows)] == [
            (row, NAMES[row], f"T{NAMES[row]}", f"text {NAMES[row]}") for row in rows
        ]
    for rows in ([6], [0, -1]):
        with pytest.raises(IndexError, match="of a corpus of 6"):
            corpus.passages(rows)


def test_ids_of_rows_of_any_shape_and_none_for_no_row(tmp_path: Path) -> None:
    corpus = build_corpus(tmp_path, PARTS, {})
    assert corpus.ids(np.array([[5, -1, 0], [3, 3, 2]])).tolist() == [["f", "", "a"], ["d", "d", "c"]]
    assert corpus.ids(np.array([], np.int64)).tolist() == []
    assert corpus.ids(np.array([-1, -1])).tolist() == ["", ""]


def test_rows_of_ids_leave_out_the_deleted_and_find_the_replaced(tmp_path: Path) -> None:
    corpus = build_corpus(tmp_path, [[["a", "b", "c"]], [["b", "d"]], [["d"]]], {1: [1], 2: [0, 4]})
    assert corpus.deleted.tolist() == [0, 1, 4]
    assert corpus.rows_of(["a", "b", "c", "d", "x", "b"]).tolist() == [-1, 3, 2, 5, -1, 3]
    assert corpus.rows_of([]).tolist() == []


def test_ids_that_share_a_hash_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from riptide.indexing.corpus import ids

    def same(names: list[str]) -> np.ndarray:
        return np.zeros(len(names), np.uint64)

    monkeypatch.setattr(ids, "hash_ids", same)
    monkeypatch.setattr(corpus_module, "hash_ids", same)
    corpus = build_corpus(tmp_path, PARTS, {1: [2]})
    assert corpus.rows_of([*NAMES, "x"]).tolist() == [0, 1, -1, 3, 4, 5, -1]


def test_a_part_with_other_rows_than_its_record_is_refused(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    with store.create("corpus", "g0000") as draft:
        draft.commit("part-00000", ".arrow", lambda path: write_table(passages_of(["a", "b"]), path), rows=3)
    corpus = Corpus.open(store)
    with pytest.raises(InputError, match=r"corpus/g0000/part-00000-\w+\.arrow: 2 rows, its record says 3"):
        open_table(corpus.parts[0])


def test_a_look_up_touches_small_batches_of_a_mapped_file(tmp_path: Path) -> None:
    names = [f"p{n}" for n in range(5000)]
    write_table(passages_of(names), tmp_path / "x.arrow")
    with pa.memory_map(str(tmp_path / "x.arrow")) as mapped:
        reader = pa.ipc.open_file(mapped)
        assert reader.num_record_batches == 5
        before = pa.total_allocated_bytes()
        assert reader.read_all().column("id").take(pa.array([4999])).to_pylist() == ["p4999"]
        assert pa.total_allocated_bytes() - before < 10_000


def test_a_store_without_a_corpus_says_so(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    with pytest.raises(InputError, match="there is no store here"):
        Corpus.open(store)
    store.create("corpus", "g0000")
    with pytest.raises(InputError, match="begun and is not complete"):
        Corpus.open(store)
