"""Requests, reads and open files that do not grow with the number of parts of an artifact."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcs_server import PAGE, GcsServer

from benchmarks import many_parts
from benchmarks.common.counting_s3 import counting_s3, take_counts
from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import save_array
from riptide.indexing.dense.building import FillTask
from riptide.indexing.dense.faiss_filling import train_quantizer
from riptide.indexing.dense.faiss_index import write_index
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.storage import object_store
from riptide.indexing.storage.remote import skip_numbered_parts
from riptide.indexing.storage.s3 import S3Storage
from riptide.indexing.storage.storage import LocalStorage
from riptide.indexing.store import draft as draft_module
from riptide.indexing.store.chain import OpenFiles
from riptide.indexing.store.sealed_json import record_list
from riptide.indexing.store.store import Store, open_storage
from riptide.indexing.work.work import WorkUnit
from riptide.indexing.work.worker_tasks import Allocation

PARTS = 600  # two kinds of parts are more than a page of a listing


def test_listings_skip_the_parts_of_artifacts(tmp_path: Path) -> None:
    names = [f"{kind}-{number:05d}.json" for kind in ("hashes", "part") for number in range(PARTS)]
    for key in ("corpus/g0000", "corpus/g0001", "runs/part-00001", "topics/t/g0000"):
        (tmp_path / key).mkdir(parents=True)
        for name in ["manifest.json", "manifest.begun.json", *(names if key == "corpus/g0000" else [])]:
            (tmp_path / key / name).touch()
    local = LocalStorage(str(tmp_path))
    with counting_s3(tmp_path):
        remote = S3Storage("s3://store")
        for prefix in ("", "corpus", "corpus/g0000", "topics"):
            take_counts()
            found = remote.find(prefix, {"manifest.json"})
            assert list(found) == list(local.find(prefix, {"manifest.json"}))
            assert take_counts()["LIST"] <= 3
            assert set(local.find(prefix, {"manifest.json"})) == {
                key for key, _ in local.list(prefix) if key.endswith("/manifest.json")
            }
        assert len(remote.find("", {"manifest.json"})) == 4


def test_listings_of_other_clouds_skip_parts_too(
    gcs: GcsServer, gs_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "LISTED", PAGE)
    storage = open_storage(f"{gs_bucket}/store")
    parts = [f"corpus/g0000/{kind}-{number:05d}.json" for kind in ("hashes", "part") for number in range(4 * PAGE)]
    manifests = ["corpus/g0000/manifest.json", "runs/r/manifest.json"]
    for key in [*parts, *manifests]:
        storage.put(key, b"")
    before = gcs.requests
    assert list(storage.find("", {"manifest.json"})) == manifests
    assert gcs.requests - before <= 3
    assert list(storage.find("runs", {"manifest.json"}).values()) == [pytest.approx(time.time(), abs=60)]


@pytest.mark.parametrize(
    ("key", "after"),
    [
        ("p/corpus/g0000/part-00999-0a.arrow", "p/corpus/g0000/part-:"),
        ("runs/a/part-100000.json", "runs/a/part-:"),
        ("corpus/g0000/manifest.json", "corpus/g0000/manifest.json"),
        ("runs/part-00001", "runs/part-00001"),  # may be the name of an artifact
    ],
)
def test_a_listing_continues_after_the_parts_of_a_kind(key: str, after: str) -> None:
    assert skip_numbered_parts(key) == after


def test_each_step_of_the_benchmark_is_within_its_budget_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIPTIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(draft_module, "RECORDS_PER_LIST", 5)
    lists: list[str] = []
    monkeypatch.setattr(draft_module, "record_list", lambda *parts: lists.append("list") or record_list(*parts))
    many_parts.write_store(tmp_path / "store", many_parts.StoreShape(parts=30))
    with counting_s3(tmp_path / "store"):
        for step, budget in many_parts.STEPS.items():
            figures = many_parts.run_step(step, "s3://store", tmp_path)
            assert "requests" not in budget.excess(30, figures), figures
            if step == "resume":
                assert figures["GET"] < 40, figures  # 20 records are in 4 lists; 48 without lists
                assert len(lists) == 4 + 2
        assert Store("s3://store").names("embeddings") == ["E"]


class Counted:
    """A storage that counts the documents that are read."""

    def __init__(self, storage: Any):
        self._storage, self.reads = storage, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def read(self, key: str) -> bytes:
        self.reads += 1
        data: bytes = self._storage.read(key)
        return data


def test_the_record_of_a_part_is_read_once(tmp_path: Path) -> None:
    worker = Store(str(tmp_path)).create("index", "d")
    for number in range(3):
        worker.commit(f"part-{number:05d}", ".bin", lambda path: path.write_bytes(b"x"), rows=1)
    store = Store(str(tmp_path))
    store.storage = counted = Counted(store.storage)  # type: ignore[assignment]
    draft = store.create("index", "d")
    counted.reads = 0
    assert draft.has_parts()
    assert counted.reads == 1
    counted.reads = 0
    assert list(draft.committed_parts()) == ["part-00000", "part-00001", "part-00002"]
    assert counted.reads == 3
    worker.commit("part-00003", ".bin", lambda path: path.write_bytes(b"x"), rows=1)
    assert len(draft.committed_parts()) == 4
    assert counted.reads == 4
    Store(str(tmp_path)).remove("index/d")  # another command makes the same draft with other bytes
    other = Store(str(tmp_path)).create("index", "d")
    other.commit("part-00000", ".bin", lambda path: path.write_bytes(b"other"), rows=1)
    assert [part.bytes for part in draft.committed_parts().values()] == [5]


def test_lists_of_records_replace_the_reads_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_module, "RECORDS_PER_LIST", 3)
    folder, names = tmp_path / "index/d", [f"part-{number:05d}" for number in range(8)]
    worker, driver = (Store(str(tmp_path)).create("index", "d") for _ in range(2))

    def commit(name: str, content: bytes) -> None:
        worker.commit(name, ".bin", lambda path: path.write_bytes(content), rows=1)

    for name in names[:7]:
        commit(name, b"x")
        driver.list_records([name])
    lists = sorted(folder.glob("*.list"))
    assert len(lists) == 2

    def reads(expected: dict[str, bytes]) -> int:
        """Returns the number of documents that a command reads which resumes and finds these parts."""
        store = Store(str(tmp_path))
        store.storage = counted = Counted(store.storage)  # type: ignore[assignment]
        draft = store.create("index", "d")
        counted.reads = 0
        parts = draft.committed_parts()
        assert {name: (folder / part.file).read_bytes() for name, part in parts.items()} == expected
        return counted.reads

    parts = dict.fromkeys(names[:7], b"x")
    assert reads(parts) == 2 + 1
    listed = lists[0].read_bytes()
    for other in (listed[:-9], record_list("another draft", driver.committed_parts().values())[1]):
        lists[0].write_bytes(other)  # damaged, or of a draft that this one replaced
        assert reads(parts) == 2 + 4
    lists[0].write_bytes(listed)
    (folder / "part-00001.json").unlink()
    assert reads({name: data for name, data in parts.items() if name != names[1]}) == 2 + 1
    commit(names[1], b"other")  # in addition to the file that the list names
    assert reads(parts | {names[1]: b"other"}) == 2 + 2
    for path in lists:  # a store of an earlier version
        path.unlink()
    draft = Store(str(tmp_path)).create("index", "d")
    assert len(draft.committed_parts()) == 7
    draft.list_records()
    assert len(list(folder.glob("*.list"))) == 2
    assert reads(parts | {names[1]: b"other"}) == 2 + 2
    draft.finish()
    assert list(folder.glob("*.list")) == []
    complete = Store(str(tmp_path)).open("index", "d")
    assert [part.bytes for part in complete.parts] == [1, 5, 1, 1, 1, 1, 1]
    draft = Store(str(tmp_path)).create("index", "e")
    Store(str(tmp_path)).remove("index/e")
    with pytest.raises(InputError, match="removed while it was being made"):
        draft.list_records(names)
    with pytest.raises(ValueError, match=r"suffix \.list: expected another one"):
        draft.commit("part-00000", ".list", lambda path: path.touch(), rows=1)


def test_a_shard_is_filled_with_one_open_part_at_a_time(tmp_path: Path) -> None:
    store, parts, rows = Store(str(tmp_path)), 40, 16
    vectors = np.random.default_rng(0).normal(size=(parts, rows, 8)).astype(np.float16)
    config = {"encoder": {"dim": 8}}
    with store.create("embeddings", "e/g0000", config=config) as made:
        made.add_notes(encoder="none", options={}, dim=8, similarity="dot")
        for number in range(parts):
            name = f"part-{number:05d}"
            made.commit(name, ".npy", lambda path, v=vectors[number]: save_array(v, path), rows=rows)
    embeddings = Embeddings("e", store.generations("embeddings", "e"))
    draft = store.create("index", "i")
    trained = train_quantizer(vectors.reshape(-1, 8), "IVF4,SQ8", seed=0, threads=1)
    quantizer = draft.commit("quantizer", ".faiss", lambda path: write_index(trained, path), rows=1)
    before, mapped = len(os.listdir("/proc/self/fd")), []
    task = FillTask(draft, embeddings, (draft, quantizer)).open(Allocation(1))
    unit = WorkUnit(("shard-00000",), parts * rows, (0, parts * rows))
    task(unit, lambda rows: mapped.append(len(os.listdir("/proc/self/fd")) - before))
    assert len(mapped) == parts
    assert max(mapped) <= 4  # of 40 parts


def test_open_files_are_bounded_and_end_with_their_owner() -> None:
    class Chain:
        """An owner."""

    files, owners, opened = OpenFiles(2), [Chain()], []

    def get(name: str) -> str:
        return files.get(owners[0], name, lambda: opened.append(name) or name)  # type: ignore[func-returns-value]

    assert [get(name) for name in "abab"] == list("abab")
    assert opened == ["a", "b"]
    assert [get(name) for name in "cab"] == list("cab")
    assert opened == ["a", "b", "c", "a", "b"]
    assert len(files._files) == 2
    owners.clear()
    assert len(files._files) == 0
