"""The store's contracts, on a local folder and on S3: commit, resume, races, lineage, corruption."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import subprocess
import time
from pathlib import Path

import pytest

from indexing import store as store_module
from indexing.artifact import Draft, Part
from indexing.cache import CorruptError, NodeCache
from indexing.s3 import S3Storage
from indexing.storage import LocalStorage
from indexing.store import Store, open_storage
from indexing.verify import verify
from retriever.errors import InputError


def write_part(draft: Draft, number: int, content: bytes) -> Part:
    return draft.commit(f"part-{number:05d}", ".bin", lambda path: path.write_bytes(content), rows=len(content))


def make(store: Store, name: str, contents: list[bytes], **config: object) -> None:
    with store.create("embeddings", name, config=config) as draft:
        for number, content in enumerate(contents):
            write_part(draft, number, content)


def test_a_complete_artifact_reads_back(store_url: str) -> None:
    store = Store(store_url)
    with store.create("corpus", config={"part_size": 3}) as draft:
        write_part(draft, 1, b"world")
        write_part(draft, 0, b"hello ")
        draft.note(seen=2)
    artifact = Store(store_url).open("corpus")
    assert b"".join(artifact.local(part).read_bytes() for part in artifact.group("part")) == b"hello world"
    assert artifact.rows == 11
    assert artifact.config == {"part_size": 3}
    assert artifact.notes == {"seen": 2}
    assert store.keys() == ["corpus"]
    assert all(finding.problem is None for finding in verify(store))


def test_what_is_not_complete_is_not_visible(store_url: str) -> None:
    store = Store(store_url)

    def interrupted() -> None:
        with store.create("corpus") as draft:
            write_part(draft, 0, b"hello")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    assert store.keys() == []
    assert store.incomplete() == ["corpus"]
    with pytest.raises(InputError, match="not complete: run the command that makes it again"):
        store.open("corpus")


@pytest.mark.parametrize("kind", ["index", "bm25", "embeddings"])
def test_a_first_generation_that_was_interrupted_is_told_by_the_name_without_it(tmp_path: Path, kind: str) -> None:
    store = Store(str(tmp_path / "store"))
    store.create(kind, "mini/g0000")
    for ask in (lambda: store.only(kind), lambda: store.only(kind, "mini"), lambda: store.open(kind, "mini")):
        with pytest.raises(InputError, match=rf"{kind}/mini/g0000 was begun and is not complete: run the command that"):
            ask()
    with pytest.raises(InputError, match=rf"{kind}/min: there is no such artifact \(complete {kind}: none\)"):
        store.only(kind, "min")


def test_resume_keeps_parts_and_refuses_other_options(store_url: str) -> None:
    store = Store(store_url)
    draft = store.create("embeddings", "e", config={"pooling": "mean", "deep": {"lengths": [1, 2]}})
    first = write_part(draft, 0, b"first")
    again = store.create("embeddings", "e", config={"pooling": "mean", "deep": {"lengths": [1, 2]}})
    assert again.committed() == {"part-00000": first}
    with pytest.raises(InputError, match=r'config\.pooling "mean", now "cls".*remove'):
        store.create("embeddings", "e", config={"pooling": "cls", "deep": {"lengths": [1, 2]}})


def test_the_fingerprint_covers_inputs_and_configuration(store_url: str) -> None:
    store = Store(store_url)
    for name, content, by_content in [("a", b"1", True), ("b", b"1", True), ("c", b"2", True)]:
        with store.create("queries", name, config={"source": name}, by_content=by_content) as draft:
            write_part(draft, 0, content)
    a, b, c = (store.open("queries", name) for name in "abc")
    assert a.fingerprint == b.fingerprint != c.fingerprint  # the same content from elsewhere is the same
    prints = set()
    for name, corpus, dim in [("d", a, 1), ("e", c, 1), ("f", a, 2)]:
        with store.create("embeddings", name, inputs={"corpus": corpus}, config={"dim": dim}):
            pass
        prints.add(store.open("embeddings", name).fingerprint)
    assert len(prints) == 3


def test_manifests_are_the_same_bytes_in_any_order_of_work(tmp_path: Path) -> None:
    manifests = []
    for name, order in [("x", [0, 1, 2]), ("y", [2, 0, 1])]:
        store = Store(str(tmp_path / name))
        with store.create("corpus", config={"n": 3}) as draft:
            for number in order:
                write_part(draft, number, bytes([number]))
        manifests.append((tmp_path / name / "corpus" / "manifest.json").read_bytes())
    assert manifests[0] == manifests[1]


def _race(url: str, content: bytes, barrier: object) -> None:
    draft = Store(url).create("embeddings", "raced")
    barrier.wait()  # type: ignore[attr-defined]
    for number in range(10):
        write_part(draft, number, content * (number + 1))


def test_two_committers_racing_on_the_same_parts(store_url: str) -> None:
    """Of two processes that write different bytes for ten parts, exactly one wins each, and nothing else is left."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    racers = [context.Process(target=_race, args=(store_url, c, barrier)) for c in (b"a", b"b")]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
        assert racer.exitcode == 0
    store = Store(store_url)
    store.create("embeddings", "raced").finish()
    artifact = store.open("embeddings", "raced")
    assert [part.name for part in artifact.parts] == [f"part-{n:05d}" for n in range(10)]
    for number, part in enumerate(artifact.parts):
        assert artifact.local(part).read_bytes() in (b"a" * (number + 1), b"b" * (number + 1))
    assert all(finding.problem is None for finding in verify(store))
    data = [key for key, _ in store.storage.list("embeddings/raced") if key.endswith(".bin")]
    assert len(data) == 10


def test_compare_and_swap(store_url: str) -> None:
    storage = open_storage(store_url)
    key = "serving/current.json"
    assert storage.read_tagged(key) is None
    assert storage.swap(key, b"1", None)
    assert not storage.swap(key, b"2", None)
    _, tag = storage.read_tagged(key) or (b"", "")
    assert storage.swap(key, b"3", tag)
    assert not storage.swap(key, b"4", tag)
    assert storage.read(key) == b"3"


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_every_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    root = tmp_path / "store"
    store = Store(str(root))
    with store.create("corpus", config={"rows": 2}, by_content=True) as draft:
        write_part(draft, 0, b"some passages")
        write_part(draft, 1, b"more passages")
    with store.create("embeddings", "e", inputs={"corpus": store.open("corpus")}) as draft:
        write_part(draft, 0, b"vectors")
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    assert len(files) == 3 + 2 * 2 + 3 + 2
    for path in files:
        kept = path.read_bytes()
        for position in range(len(kept)) if damage == "flip" and len(kept) < 400 else [len(kept) // 2]:
            if damage == "flip":
                path.write_bytes(kept[:position] + bytes([kept[position] ^ 1]) + kept[position + 1 :])
            elif damage == "cut":
                path.write_bytes(kept[:position])
            else:
                path.unlink()
            named = {finding.file for finding in verify(store) if finding.problem}
            assert path.relative_to(root).as_posix() in named, (path, position)
            path.write_bytes(kept)
    assert not [finding for finding in verify(store) if finding.problem]


@pytest.mark.parametrize("damage", [b"vectorz", b"vec", b""])
def test_a_reader_never_returns_damaged_bytes(store_url: str, damage: bytes) -> None:
    store = Store(store_url)
    make(store, "e", [b"vectors"])
    artifact = store.open("embeddings", "e")
    part = artifact.parts[0]
    store.storage.put(f"embeddings/e/{part.file}", damage)
    fresh = Store(store_url, cache=NodeCache(Path(store.cache.folder) / f"fresh{time.time_ns()}", 10**9))
    with pytest.raises(CorruptError, match="embeddings/e/part-00000-"):
        fresh.open("embeddings", "e").local(part)


def test_a_file_that_changes_after_it_was_checked_is_checked_again(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    make(store, "e", [b"vectors"])
    artifact = store.open("embeddings", "e")
    path = artifact.local("part-00000")
    assert artifact.local("part-00000") == path
    path.write_bytes(b"vectorz")
    with pytest.raises(CorruptError, match="sha256"):
        artifact.local("part-00000")


def test_the_cache_is_bounded_and_shared(bucket: str, tmp_path: Path) -> None:
    cache = NodeCache(tmp_path / "cache", max_bytes=250)
    store = Store(bucket, cache=cache)
    make(store, "e", [bytes([n]) * 100 for n in range(5)])
    artifact = store.open("embeddings", "e")
    for part in artifact.parts:
        path = artifact.local(part)
        assert path.read_bytes() == bytes([int(part.name[-1])]) * 100
        os.utime(path, (0, path.stat().st_mtime))  # as if last used long ago
    cached = [path for path in (tmp_path / "cache" / "parts").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in cached) <= 250


def test_a_store_travels_to_a_worker(store_url: str) -> None:
    store = pickle.loads(pickle.dumps(Store(store_url)))
    draft = pickle.loads(pickle.dumps(store.create("corpus")))
    write_part(draft, 0, b"x")
    assert [part.name for part in store.create("corpus").committed().values()] == ["part-00000"]


def test_remove_refuses_what_another_needs(store_url: str) -> None:
    store = Store(store_url)
    make(store, "a", [b"x"])
    with store.create("index", "i", inputs={"embeddings": store.open("embeddings", "a")}):
        pass
    with pytest.raises(InputError, match="needed by index/i: remove those first"):
        store.remove("embeddings/a")
    store.remove("index/i")
    assert store.remove("embeddings/a") > 0
    assert list(store.storage.list("")) == []


def test_garbage_is_only_what_nothing_names(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    make(store, "e", [b"x", b"y"])
    loser = tmp_path / "store/embeddings/e/part-00000-0123456789abcdef.bin"
    loser.write_bytes(b"z")
    old = tmp_path / "store/.tmp/old"
    old.write_bytes(b"half")
    os.utime(old, (0, 0))
    (tmp_path / "store/.tmp/new").write_bytes(b"being written")
    assert [key for key, _ in store.garbage()] == ["embeddings/e/part-00000-0123456789abcdef.bin", ".tmp/old"]


def test_an_upload_that_was_killed_is_garbage_once_nothing_comes_to_it(bucket: str, monkeypatch) -> None:
    """Of this store alone, with the bytes that came; ended as a file is deleted. (moto's uploads all begin in 2010.)"""
    store = Store(f"{bucket}/some/prefix")
    make(store, "e", [b"x"])
    s3, name = store.storage.s3, store.storage.bucket  # type: ignore[attr-defined]

    def begin(key: str, *parts: bytes) -> str:
        upload = s3.create_multipart_upload(Bucket=name, Key=key)["UploadId"]
        for number, data in enumerate(parts, 1):
            s3.upload_part(Bucket=name, Key=key, UploadId=upload, PartNumber=number, Body=data)
        return upload

    silent = begin("some/prefix/embeddings/e/part-00001-aa.npy")
    alive = begin("some/prefix/embeddings/e/part-00002-bb.npy", b"x" * 5, b"y")
    other = begin("some/prefix2/embeddings/e/part-00001-aa.npy")
    named = f"embeddings/e/part-00001-aa.npy?uploadId={silent}"
    assert store.garbage() == [(named, 0)]
    monkeypatch.setattr(store_module, "TEMPORARY_AGE", -60.0)
    assert store.garbage() == [(named, 0), (f"embeddings/e/part-00002-bb.npy?uploadId={alive}", 6)]
    for key, _ in store.garbage():
        store.storage.delete(key)
        store.storage.delete(key)  # it ended meanwhile
    assert store.garbage() == []
    assert [u["UploadId"] for u in s3.list_multipart_uploads(Bucket=name)["Uploads"]] == [other]
    assert store.open("embeddings", "e").local("part-00000").read_bytes() == b"x"


def chain(store: Store, kind: str, *numbers: int, begun: tuple[int, ...]) -> None:
    """Generations of kind/x, each made from the last one that is complete; the `begun` ones are not ended."""
    previous = None
    for number in numbers:
        inputs = {"previous": previous} if previous else {}
        draft = store.create(kind, f"x/g{number:04d}", inputs=inputs)
        write_part(draft, 0, b"rows")
        if number not in begun:
            draft.finish()
            previous = store.open(kind, f"x/g{number:04d}")


def test_a_generation_that_a_later_one_took_the_rows_of_is_garbage_a_day_after_its_last_object(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(store_url)
    chain(store, "index", 0, 1, 2, 3, begun=(1, 3))  # 3 is the last one: its command goes on with it
    chain(store, "embeddings", 0, 1, 2, begun=(1,))  # a corpus generation's only embeddings
    before = dict(store.storage.list(""))
    assert store.superseded() == ["index/x/g0001"]
    assert store.garbage() == []  # it may be work in progress
    last = {key: store._modified(key) for key in before if key.startswith("index/x/g0001/")}
    monkeypatch.setattr(store_module.time, "time", lambda: max(last.values()) + 86_399)
    assert store.garbage() == []
    monkeypatch.setattr(store_module.time, "time", lambda: max(last.values()) + 86_401)
    names = [key for key, _ in store.garbage()]
    assert set(names) == set(last)
    assert names[0].endswith("part-00000.json")  # no record without its bytes, wherever it is stopped
    assert names[-1].endswith("manifest.begun.json")
    for key in names:
        store.storage.delete(key)
    assert dict(store.storage.list("")) == {key: size for key, size in before.items() if key not in last}
    assert store.incomplete() == ["embeddings/x/g0001", "index/x/g0003"]
    assert not [finding for finding in verify(store) if finding.problem]


def test_one_new_object_keeps_a_superseded_generation(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    chain(store, "bm25", 0, 1, begun=(0,))
    for path in (tmp_path / "bm25/x/g0000").iterdir():
        os.utime(path, (0, 0))
    assert len(store.garbage()) == 3
    write_part(store.create("bm25", "x/g0000"), 1, b"a shard that was long in the making")
    assert store.superseded() == ["bm25/x/g0000"]
    assert store.garbage() == []


def test_a_generation_that_lost_its_manifest_and_is_needed_is_no_garbage(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    chain(store, "index", 0, 1, begun=())
    (tmp_path / "index/x/g0000/manifest.json").unlink()
    for path in (tmp_path / "index/x/g0000").iterdir():
        os.utime(path, (0, 0))
    assert store.incomplete() == ["index/x/g0000"]
    assert store.superseded() == store.garbage() == []


@pytest.mark.parametrize("name", ["../up", "a/b/c", "", ".hidden", "with space", "a//b"])
def test_names_are_plain(tmp_path: Path, name: str) -> None:
    store = Store(str(tmp_path))
    if name in ("", "a//b"):
        store.create("embeddings", name)
    else:
        with pytest.raises(InputError, match="letters, digits"):
            store.create("embeddings", name)


def test_a_store_that_is_not_there(tmp_path: Path, bucket: str) -> None:
    for url in (str(tmp_path / "nowhere"), f"{bucket}/nowhere"):
        with pytest.raises(InputError, match="there is no store here"):
            Store(url).open("corpus")
    with pytest.raises(InputError, match="no bucket"):
        Store("s3://riptide-no-such-bucket").create("corpus")
    with pytest.raises(InputError, match="only a local folder or s3"):
        Store("gs://bucket")


def test_a_full_disk_is_one_clear_line_and_loses_nothing(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], capture_output=True)
    if mounted.returncode:
        pytest.fail(f"the test mounts a small tmpfs, which needs root: {mounted.stderr.decode()}")
    try:
        store = Store(str(small / "store"))
        draft = store.create("embeddings", "e")
        kept = write_part(draft, 0, b"x" * 50_000)
        with pytest.raises(InputError, match="No space left on device: free some space and run the same command"):
            write_part(draft, 1, b"x" * 300_000)
        assert draft.committed() == {"part-00000": kept}
        assert list((small / "store" / ".tmp").iterdir()) == []
        assert draft.local(kept).read_bytes() == b"x" * 50_000
    finally:
        subprocess.run(["umount", small], check=True)


def test_storages_agree(bucket: str, tmp_path: Path) -> None:
    """Whatever is asked, a folder and S3 answer the same."""
    for storage in (LocalStorage(str(tmp_path / "s")), S3Storage(bucket)):
        for key in ("a/2", "a/10", "b"):
            assert storage.put_new(key, key.encode())
        assert not storage.put_new("b", b"other")
        assert list(storage.list("")) == [("a/10", 4), ("a/2", 3), ("b", 1)]
        assert list(storage.list("a")) == [("a/10", 4), ("a/2", 3)]
        assert list(storage.list("none")) == []
        assert (storage.size("b"), storage.size("c")) == (1, None)
        with pytest.raises(FileNotFoundError):
            storage.read("c")
        storage.delete("b")
        storage.delete("b")
        assert storage.size("b") is None


def test_provenance_stands_beside(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    make(store, "e", [b"x"])
    provenance = json.loads((tmp_path / "embeddings/e/provenance.json").read_text())
    assert {"command", "host", "started", "finished", "versions"} <= set(provenance)


def test_a_removal_that_was_killed_leaves_no_record_without_its_bytes(tmp_path: Path) -> None:
    for survivors in range(1, 8):
        store = Store(str(tmp_path / str(survivors)))
        make(store, "e", [b"a", b"b"])
        deleted = []

        def delete(key: str, left: int = survivors, done: list[str] = deleted, store: Store = store) -> None:
            if len(done) == left:
                raise KeyboardInterrupt
            done.append(key)
            (tmp_path / str(left) / key).unlink()

        store.storage.delete = delete  # type: ignore[method-assign]
        with contextlib.suppress(KeyboardInterrupt):
            store.remove("embeddings/e")
        again = Store(store.url)
        assert again.keys() == []
        with again.create("embeddings", "e") as draft:
            for number in {0, 1} - {int(name[-1]) for name in draft.committed()}:
                write_part(draft, number, [b"a", b"b"][number])
        assert not [finding for finding in verify(again) if finding.problem]


def test_a_writer_that_outlives_the_removal_of_its_artifact_changes_nothing(store_url: str) -> None:
    store = Store(store_url)
    old = store.create("embeddings", "e", config={"pooling": "mean"})
    write_part(old, 0, b"old")
    store.remove("embeddings/e")
    write_part(old, 0, b"old")
    with pytest.raises(InputError, match="removed while it was being made"):
        old.finish()
    with store.create("embeddings", "e", config={"pooling": "cls"}) as new:
        assert new.committed() == {}
        write_part(new, 0, b"new")
    assert store.open("embeddings", "e").local("part-00000").read_bytes() == b"new"
    with pytest.raises(InputError, match="removed while it was being made"):
        old.finish()


def test_a_record_under_another_name_is_named(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    make(store, "e", [b"a", b"b"])
    folder = tmp_path / "embeddings/e"
    (folder / "part-00001.json").write_bytes((folder / "part-00000.json").read_bytes())
    assert "embeddings/e/part-00001.json" in {finding.file for finding in verify(store) if finding.problem}


def test_what_is_damaged_can_be_removed(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    make(store, "e", [b"a"])
    (tmp_path / "embeddings/e/manifest.begun.json").write_text("{}")
    store.remove("embeddings/e")
    assert store.keys() == store.incomplete() == []
