"""The store's contracts, on a local folder and in all clouds: commit, resume, races, lineage, corruption."""

from __future__ import annotations

import builtins
import contextlib
import errno
import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from botocore.exceptions import ClientError, ResponseStreamingError
from local_cluster import LONG

from riptide.base.errors import BusyStorageError, InputError, StorageError
from riptide.base.wording import LIBRARY, Command, Parameter
from riptide.indexing.maintenance.verification import verify
from riptide.indexing.storage import storage as storage_module
from riptide.indexing.storage.cache import CorruptError, NodeCache
from riptide.indexing.storage.s3 import BLOCK_BYTES
from riptide.indexing.storage.storage import LocalStorage
from riptide.indexing.store import store as store_module
from riptide.indexing.store.draft import Draft, keep_alive
from riptide.indexing.store.sealed_json import ArtifactPart, manifest_bytes, read_manifest
from riptide.indexing.store.store import MADE_BY, MAX_NAME, Store, commands_that_make, generation, open_storage

JOBS = Path(__file__).parents[3] / "jobs"


def write_part(draft: Draft, number: int, content: bytes) -> ArtifactPart:
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
        draft.add_notes(seen=2)
    artifact = Store(store_url).open("corpus")
    assert (
        b"".join(artifact.local_path(part).read_bytes() for part in artifact.numbered_parts("part")) == b"hello world"
    )
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
    assert store.incomplete_keys() == ["corpus"]
    with pytest.raises(InputError, match="not complete: run the command that makes it again"):
        store.open("corpus")


@pytest.mark.parametrize("kind", MADE_BY)
def test_a_missing_artifact_names_the_command_that_makes_it(tmp_path: Path, kind: str) -> None:
    store = Store(str(tmp_path / "store"))
    with store.create("queries", "q"):
        pass
    with pytest.raises(InputError) as error:
        store.open(kind, "none")
    names = "q" if kind == "queries" else "none"
    told = (
        f"/{kind}/none: there is no such artifact (complete {kind}: {names}); "
        f"{LIBRARY.render(commands_that_make(kind))} makes one"
    )
    assert str(error.value).endswith(told)
    assert all((JOBS / f"{job.replace('-', '_')}.py").is_file() for job in MADE_BY[kind])


@pytest.mark.parametrize("kind", ["index", "bm25", "embeddings"])
def test_a_first_generation_that_was_interrupted_is_told_by_the_name_without_it(tmp_path: Path, kind: str) -> None:
    store = Store(str(tmp_path / "store"))
    store.create(kind, "mini/g0000")
    for ask in (lambda: store.only_name(kind), lambda: store.only_name(kind, "mini"), lambda: store.open(kind, "mini")):
        with pytest.raises(InputError, match=rf"{kind}/mini/g0000 was begun and is not complete: run the command that"):
            ask()
    with pytest.raises(InputError, match=rf"{kind}/min: there is no such artifact \(complete {kind}: none\)"):
        store.only_name(kind, "min")


def test_resume_keeps_parts_and_refuses_other_options(store_url: str) -> None:
    store = Store(store_url)
    draft = store.create("embeddings", "e", config={"pooling": "mean", "deep": {"lengths": [1, 2]}})
    first = write_part(draft, 0, b"first")
    again = store.create("embeddings", "e", config={"pooling": "mean", "deep": {"lengths": [1, 2]}})
    assert again.committed_parts() == {"part-00000": first}
    with pytest.raises(InputError, match=r"is making it, otherwise: parameter pooling mean, now cls;"):
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
        assert artifact.local_path(part).read_bytes() in (b"a" * (number + 1), b"b" * (number + 1))
    assert all(finding.problem is None for finding in verify(store))
    data = [key for key, _ in store.storage.list("embeddings/raced") if key.endswith(".bin")]
    assert len(data) == 10


def test_compare_and_swap(store_url: str) -> None:
    storage = open_storage(store_url)
    key = "serving/current.json"
    assert storage.read_tagged(key) is None
    assert storage.compare_and_swap(key, b"1", None)
    assert not storage.compare_and_swap(key, b"2", None)
    _, tag = storage.read_tagged(key) or (b"", "")
    assert storage.compare_and_swap(key, b"3", tag)
    assert not storage.compare_and_swap(key, b"4", tag)
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
        step = 1 if LONG else 5
        for position in range(0, len(kept), step) if damage == "flip" and len(kept) < 400 else [len(kept) // 2]:
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
        fresh.open("embeddings", "e").local_path(part)


def test_a_file_that_changes_after_it_was_checked_is_checked_again(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    make(store, "e", [b"vectors"])
    artifact = store.open("embeddings", "e")
    path = artifact.local_path("part-00000")
    assert artifact.local_path("part-00000") == path
    path.write_bytes(b"vectorz")
    with pytest.raises(CorruptError, match="sha256"):
        artifact.local_path("part-00000")


def test_the_cache_is_bounded_and_shared(bucket: str, tmp_path: Path) -> None:
    cache = NodeCache(tmp_path / "cache", max_bytes=250)
    store = Store(bucket, cache=cache)
    make(store, "e", [bytes([n]) * 100 for n in range(5)])
    artifact = store.open("embeddings", "e")
    for part in artifact.parts:
        path = artifact.local_path(part)
        assert path.read_bytes() == bytes([int(part.name[-1])]) * 100
        os.utime(path, (0, path.stat().st_mtime))  # as if last used long ago
    cached = [path for path in (tmp_path / "cache" / "parts").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in cached) <= 250


def test_a_store_travels_to_a_worker(store_url: str) -> None:
    store = pickle.loads(pickle.dumps(Store(store_url)))
    draft = pickle.loads(pickle.dumps(store.create("corpus")))
    write_part(draft, 0, b"x")
    assert [part.name for part in store.create("corpus").committed_parts().values()] == ["part-00000"]


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


def test_an_artifact_that_was_made_again_from_its_dependents_is_removed_with_them(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for made, source in (("models", None), ("negatives", "models"), ("models", "negatives")):
        shutil.rmtree(tmp_path / made, ignore_errors=True)  # by hand, as `remove` refuses it
        with store.create(made, "m", inputs={"source": store.open(source, "m")} if source else {}):
            pass
    assert set(store.files_to_remove("models/m", with_dependents=True)) == {"models/m", "negatives/m"}


def test_garbage_is_only_what_nothing_names(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    make(store, "e", [b"x", b"y"])
    loser = tmp_path / "store/embeddings/e/part-00000-0123456789abcdef.bin"
    loser.write_bytes(b"z")
    old = tmp_path / "store/.tmp/old"
    old.write_bytes(b"half")
    os.utime(old, (0, 0))
    (tmp_path / "store/.tmp/new").write_bytes(b"being written")
    assert [key for key, _ in store.garbage_files()] == ["embeddings/e/part-00000-0123456789abcdef.bin", ".tmp/old"]


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
    assert store.garbage_files() == [(named, 0)]
    monkeypatch.setattr(store_module, "TEMPORARY_AGE", -60.0)
    assert store.garbage_files() == [(named, 0), (f"embeddings/e/part-00002-bb.npy?uploadId={alive}", 6)]
    for key, _ in store.garbage_files():
        store.storage.delete(key)
        store.storage.delete(key)  # it ended meanwhile
    assert store.garbage_files() == []
    assert [u["UploadId"] for u in s3.list_multipart_uploads(Bucket=name)["Uploads"]] == [other]
    assert store.open("embeddings", "e").local_path("part-00000").read_bytes() == b"x"


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
    assert store.superseded_drafts() == ["index/x/g0001"]
    assert store.garbage_files() == []  # it may be work in progress
    last = {key: store.storage.write_time(key) for key in before if key.startswith("index/x/g0001/")}
    monkeypatch.setattr(store_module.time, "time", lambda: max(last.values()) + 86_399)
    assert store.garbage_files() == []
    monkeypatch.setattr(store_module.time, "time", lambda: max(last.values()) + 86_401)
    names = [key for key, _ in store.garbage_files()]
    assert set(names) == set(last)
    assert names[0].endswith("part-00000.json")  # no record without its bytes, wherever it is stopped
    assert names[-1].endswith("manifest.begun.json")
    for key in names:
        store.storage.delete(key)
    assert dict(store.storage.list("")) == {key: size for key, size in before.items() if key not in last}
    assert store.incomplete_keys() == ["embeddings/x/g0001", "index/x/g0003"]
    assert not [finding for finding in verify(store) if finding.problem]


def test_one_new_object_keeps_a_superseded_generation(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    chain(store, "bm25", 0, 1, begun=(0,))
    for path in (tmp_path / "bm25/x/g0000").iterdir():
        os.utime(path, (0, 0))
    assert len(store.garbage_files()) == 3
    write_part(store.create("bm25", "x/g0000"), 1, b"a shard that was long in the making")
    assert store.superseded_drafts() == ["bm25/x/g0000"]
    assert store.garbage_files() == []


def test_a_generation_that_lost_its_manifest_and_is_needed_is_no_garbage(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    chain(store, "index", 0, 1, begun=())
    (tmp_path / "index/x/g0000/manifest.json").unlink()
    for path in (tmp_path / "index/x/g0000").iterdir():
        os.utime(path, (0, 0))
    assert store.incomplete_keys() == ["index/x/g0000"]
    assert store.superseded_drafts() == store.garbage_files() == []


@pytest.mark.parametrize("name", ["../up", "a/b/c", "", ".hidden", "with space", "a//b"])
def test_names_are_plain(tmp_path: Path, name: str) -> None:
    store = Store(str(tmp_path))
    if not name:
        store.create("embeddings", name)
    else:
        with pytest.raises(InputError, match=r"letters, digits|without '/'"):
            store.create("embeddings", name)


def test_a_generation_that_no_reader_finds_is_refused() -> None:
    assert generation(9_999) == "g9999"
    with pytest.raises(InputError, match="g10000: an artifact has at most 10,000 generations; import the source"):
        generation(10_000)


@pytest.mark.parametrize("place", ["part", "input"])
def test_verify_continues_after_a_manifest_that_leads_out_of_the_store(tmp_path: Path, place: str) -> None:
    store = Store(str(tmp_path / "store"))
    with store.create("corpus") as draft:
        draft.commit("part-00000", ".x", lambda path: path.write_bytes(b"x"), rows=1)
    with store.create("queries", "q", inputs={"corpus": store.open("corpus")}):
        pass
    document, parts = read_manifest(store.storage, "corpus")
    key = "../corpus/manifest.json" if place == "input" else "corpus/../../planted"
    if place == "input":
        document["inputs"] = {"raw": {"artifact": "../corpus", "fingerprint": "0" * 64}}
    else:
        parts = [replace(parts[0], file="../../planted")]
    store.storage.put("corpus/manifest.json", manifest_bytes(document, parts))
    findings = list(verify(store))
    outside = [finding for finding in findings if "it leads out of the store" in str(finding.problem)]
    assert [finding.problem for finding in outside] == [
        f"{store.url}/corpus/manifest.json: {store.url}: '{key}': it leads out of the store, expected a key within it"
    ]
    assert "queries/q/manifest.json" in {finding.file for finding in findings if finding.problem is None}


def test_a_missing_setting_names_the_manifest(tmp_path: Path) -> None:
    """The manifest's own hash is right. Before, this was a KeyError."""
    store = Store(str(tmp_path))
    with store.create("embeddings", "e", config={"limit": None}):
        pass
    config = pickle.loads(pickle.dumps(store.open("embeddings", "e").config))
    assert config == {"limit": None}
    with pytest.raises(CorruptError, match=r"embeddings/e/manifest\.json: config\.encoder: missing; restore the file"):
        config["encoder"]


def test_a_store_that_is_moved_while_it_is_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder of temporary files is gone between two steps. Before, this was a FileNotFoundError."""
    storage = LocalStorage(str(tmp_path / "store"))
    monkeypatch.setattr(storage, "_make_folder", lambda folder: None)
    with pytest.raises(StorageError, match="removed, or the store was moved: put the store back"):
        storage.put("queries/q/manifest.json", b"{}")


def test_threads_that_use_s3_for_the_first_time_share_a_client(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code could not tell the errors of a client by the types of another one."""
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)  # as in a new process
    storage, together = open_storage(bucket), threading.Barrier(8)

    def read(_: int) -> None:
        together.wait()
        with pytest.raises(FileNotFoundError):
            storage.read("missing")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(read, range(8)))


def test_a_store_that_is_not_there(store_url: str) -> None:
    with pytest.raises(InputError, match="there is no store here"):
        Store(f"{store_url}/nowhere").open("corpus")
    scheme, is_cloud, _ = store_url.partition("://")
    if is_cloud:
        with pytest.raises(StorageError, match=r"there is no (bucket|container) riptide-no-such: create it first"):
            Store(f"{scheme}://riptide-no-such").create("corpus")


def test_a_name_that_contains_503_is_not_taken_for_an_answer_of_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # no server listens on this port
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    storage = Store("s3://bucket/x").storage
    for call in (lambda: storage.put("runs/first-503/a", b""), lambda: storage.read("runs/first-503/a")):
        with pytest.raises(StorageError, match="check AWS_ENDPOINT_URL") as caught:
            call()
        assert not isinstance(caught.value, BusyStorageError)


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
        assert draft.committed_parts() == {"part-00000": kept}
        assert list((small / "store" / ".tmp").iterdir()) == []
        assert draft.local_path(kept).read_bytes() == b"x" * 50_000
    finally:
        subprocess.run(["umount", small], check=True)


def test_storages_agree(store_url: str, tmp_path: Path) -> None:
    """A folder and all clouds return the same to every call."""
    storage = open_storage(store_url)
    assert storage.is_empty()
    storage.require_conditional_writes()
    names = [f"many/{number:02d}" for number in range(20)]
    for key in ("a/2", "a/10", "ab", "b", *names):
        assert storage.put_new(key, key.encode())
    assert not storage.is_empty()
    assert not storage.put_new("b", b"other")
    assert list(storage.list(""))[:4] == [("a/10", 4), ("a/2", 3), ("ab", 2), ("b", 1)]
    assert list(storage.list("a")) == [("a/10", 4), ("a/2", 3)]
    assert [key for key, _ in storage.list("many")] == names
    assert list(storage.list("none")) == []
    assert (storage.size("b"), storage.size("c")) == (1, None)
    large = os.urandom(9 << 20)
    with storage.temporary_file(".bin") as file:
        file.write_bytes(large)
        storage.put("large", file)
    assert not file.exists()
    assert storage.read("large") == large
    assert storage.sha256("large") == hashlib.sha256(large).hexdigest()
    storage.fetch("large", tmp_path / "large")
    assert (tmp_path / "large").read_bytes() == large
    assert abs(storage.write_time("large") - time.time()) < 60
    assert storage.write_times("")["large"] == pytest.approx(storage.write_time("large"), abs=1)
    for missing in (storage.read, storage.write_time, storage.sha256, lambda key: storage.fetch(key, tmp_path / "c")):
        with pytest.raises(FileNotFoundError):
            missing("c")
    assert not storage.compare_and_swap("c", b"new", (storage.read_tagged("b") or (b"", ""))[1])
    storage.delete("b")
    storage.delete("b")
    assert storage.size("b") is None
    storage.delete_all([*names, "a/2", "b"])
    assert [*storage.list("a"), *storage.list("many")] == [("a/10", 4)]


def test_after_a_break_only_the_remaining_bytes_of_an_object_are_requested(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connections of all requests but the last break after a block."""
    storage = open_storage(f"{bucket}/prefix")
    data = os.urandom(3 * BLOCK_BYTES)
    storage.put("a", data)
    ranges: list[str | None] = []
    original = storage.s3.get_object  # type: ignore[attr-defined]

    def get_object(**request: str) -> dict[str, Any]:
        ranges.append(request.get("Range"))
        answer = original(**request)
        if len(ranges) < 3:
            block = answer["Body"].read(BLOCK_BYTES)
            answer["Body"] = Mock(read=Mock(side_effect=[block, ResponseStreamingError(error="broken")]))
        return answer

    monkeypatch.setattr(storage.s3, "get_object", get_object)  # type: ignore[attr-defined]
    storage.fetch("a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == data
    assert ranges == [None, f"bytes={BLOCK_BYTES}-", f"bytes={2 * BLOCK_BYTES}-"]
    ranges.clear()
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    with pytest.raises(StorageError, match=r"s3://.*/prefix/a: .*broken"):
        storage.sha256("a")


def test_objects_that_a_request_for_many_does_not_delete_are_deleted_alone(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some servers lack this request, and a busy one answers it for each key."""
    storage = open_storage(f"{bucket}/prefix")
    refusal = ClientError({"Error": {"Code": "NotImplemented"}}, "DeleteObjects")
    busy = {"Errors": [{"Key": f"prefix/{key}", "Code": "SlowDown"} for key in "ab"]}
    for mock in (Mock(side_effect=refusal), Mock(return_value=busy)):
        for key in "abc":
            storage.put(key, b"x")
        with monkeypatch.context() as patch:
            patch.setattr(storage.s3, "delete_objects", mock)  # type: ignore[attr-defined]
            storage.delete_all(["a", "b"])
        mock.assert_called_once()
        assert list(storage.list("")) == [("c", 1)]


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
            for number in {0, 1} - {int(name[-1]) for name in draft.committed_parts()}:
                write_part(draft, number, [b"a", b"b"][number])
        assert not [finding for finding in verify(again) if finding.problem]


def test_a_writer_that_outlives_the_removal_of_its_artifact_changes_nothing(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(store_url)
    old = store.create("embeddings", "e", config={"pooling": "mean"})
    write_part(old, 0, b"old")
    store.remove("embeddings/e")
    with pytest.raises(InputError, match="removed while it was being made"):
        write_part(old, 0, b"old")
    assert list(store.storage.list("")) == []
    monkeypatch.setattr(old, "require_pinned", lambda: None)  # the draft is removed after the check
    write_part(old, 0, b"old")
    monkeypatch.undo()
    with pytest.raises(InputError, match="removed while it was being made"):
        old.finish()
    with store.create("embeddings", "e", config={"pooling": "cls"}) as new:
        assert new.committed_parts() == {}
        write_part(new, 0, b"new")
    assert store.open("embeddings", "e").local_path("part-00000").read_bytes() == b"new"
    with pytest.raises(InputError, match="removed while it was being made"):
        old.finish()


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_the_stored_error_of_a_draft_has_the_words_of_the_command_line(tmp_path: Path, is_abandoned: bool) -> None:
    store = Store(str(tmp_path))
    draft = store.create("queries", "q", config={})
    error = InputError(f"{Parameter('hold_out', 0)}: expected at least 1;\n run {Command('import-queries', append='')}")
    if is_abandoned:
        draft.abandon(error)
    else:
        draft.fail(f"{error}")
    stored = json.loads((tmp_path / "queries/q/failed.json").read_text())["error"]
    assert stored == "--hold-out 0: expected at least 1; run riptide import-queries --append"
    assert store.failed_drafts() == {"queries/q": stored}


def test_a_failed_draft_is_replaced_and_its_writers_change_nothing(store_url: str) -> None:
    """Whatever the order of the two: parts and records of the failed draft are neither used nor kept."""
    store = Store(store_url)
    old = store.create("queries", "q", config={"source": "bad"}, by_content=True)
    for number in range(3):
        write_part(old, number, b"old")
    old.fail("file:7: found nonsense")
    assert store.failed_drafts() == {"queries/q": "file:7: found nonsense"}
    new = store.create("queries", "q", config={"source": "good"}, by_content=True)
    assert store.failed_drafts() == new.committed_parts() == {}
    for call in (lambda: write_part(old, 3, b"old"), old.finish):
        with pytest.raises(InputError, match="removed while it was being made"):
            call()
    old.fail("too late")
    assert store.failed_drafts() == {}
    for number in range(2):
        write_part(new, number, b"new")
    new.finish()
    with pytest.raises(InputError, match="removed while it was being made"):
        old.finish()
    artifact = store.open("queries", "q")
    assert [artifact.local_path(part).read_bytes() for part in artifact.parts] == [b"new", b"new"]
    files = {part.file for part in artifact.parts} | {f"{part.name}.json" for part in artifact.parts}
    files |= {"manifest.json", "manifest.begun.json", "provenance.json"}
    assert {key for key, _ in store.storage.list("queries/q")} == {f"queries/q/{file}" for file in files}
    assert not [finding for finding in verify(store) if finding.problem]
    plain = Store(f"{store_url}-plain")
    with plain.create("queries", "q", config={"source": "good"}, by_content=True) as draft:
        for number in range(2):
            write_part(draft, number, b"new")
    assert plain.storage.read("queries/q/manifest.json") == store.storage.read("queries/q/manifest.json")


def test_the_same_command_replaces_its_failed_draft_too(store_url: str) -> None:
    """A file that is corrected may look the same to what pins it: only its size and three samples are compared."""
    store = Store(store_url)
    for attempt in range(3):
        draft = store.create("queries", "q", config={"source": "same"})
        assert draft.committed_parts() == {}
        write_part(draft, 0, bytes([attempt]))
        draft.fail(f"error {attempt}")
        assert store.failed_drafts() == {"queries/q": f"error {attempt}"}


def test_of_two_commands_that_replace_a_failed_draft_at_once_one_succeeds(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one swaps after the second one has read the failed draft, and before it swaps itself."""
    first, second = Store(store_url), Store(store_url)
    for name, config in (("same", {"source": "a"}), ("other", {"source": "b"})):
        first.create("queries", name, config={"source": "bad"}).fail("nonsense")
        swap, winners = second.storage.compare_and_swap, []

        def late(key: str, *arguments: object, swap=swap, winners=winners, name=name) -> bool:
            if not winners:
                winners.append(first.create("queries", name, config={"source": "a"}))
                write_part(winners[0], 0, b"first")
            return swap(key, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(second.storage, "compare_and_swap", late)
            if name == "same":
                assert list(second.create("queries", name, config=config).committed_parts()) == ["part-00000"]
            else:
                with pytest.raises(InputError, match="is making it, otherwise: parameter source a, now b"):
                    second.create("queries", name, config=config)
        winners[0].finish()
        assert second.open("queries", name).local_path("part-00000").read_bytes() == b"first"


def test_a_failed_draft_that_is_completed_at_this_moment_is_kept(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes ran one command; one of them failed, and the other one did not."""
    first, second = Store(store_url), Store(store_url)
    draft = first.create("queries", "q", config={"source": "a"})
    write_part(draft, 0, b"first")
    draft.fail("nonsense")
    swap = second.storage.compare_and_swap

    def late(key: str, *arguments: object) -> bool:
        draft.finish()
        return swap(key, *arguments)

    monkeypatch.setattr(second.storage, "compare_and_swap", late)
    with pytest.raises(InputError, match="another command completed it at this moment; run the command again"):
        second.create("queries", "q", config={"source": "b"})
    assert second.open("queries", "q").local_path("part-00000").read_bytes() == b"first"
    assert not [finding for finding in verify(second) if finding.problem]
    with pytest.raises(InputError, match="was made otherwise"):
        second.create("queries", "q", config={"source": "b"})


def test_a_replaced_draft_that_is_completed_after_all_keeps_its_bytes(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer passes its last check before it is replaced, and writes the manifest afterwards."""
    store = Store(store_url)
    old = store.create("queries", "q", config={"source": "a"})
    write_part(old, 0, b"old")
    old.fail("nonsense")
    new = store.create("queries", "q", config={"source": "b"})
    write_part(new, 1, b"new")
    monkeypatch.setattr(old, "require_pinned", lambda: None)
    old.finish()
    with pytest.raises(InputError, match="removed while it was being made"):
        new.finish()
    artifact = store.open("queries", "q")
    assert [artifact.local_path(part).read_bytes() for part in artifact.parts] == [b"old"]


def test_a_draft_without_parts_is_replaced_once_it_is_old(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may belong to a process that is about to commit its first part; with a part it is never replaced."""
    store = Store(store_url)
    old = store.create("queries", "q", config={"n": 1})
    now = time.time()

    def begin(n: int, age: float, abandoned_s: float | None = 600.0) -> Draft:
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now + age)
            return store.create("queries", "q", config={"n": n}, abandoned_s=abandoned_s)

    remedy = rf"remove it.*: riptide store remove queries/q --store {store_url}$"
    for age, abandoned_s in ((500.0, 600.0), (1e6, None)):
        with pytest.raises(InputError, match=remedy):
            begin(2, age, abandoned_s)
    new = begin(2, 700.0)
    with pytest.raises(InputError, match="removed while it was being made"):
        write_part(old, 0, b"old")
    assert begin(2, 1e6).committed_parts() == {}
    write_part(new, 0, b"new")
    with pytest.raises(InputError, match=remedy):
        begin(3, 1e6)
    new.finish()
    assert store.open("queries", "q").local_path("part-00000").read_bytes() == b"new"


def test_a_command_that_joined_an_abandoned_draft_keeps_its_parts(store_url: str) -> None:
    store = Store(store_url)
    first, second = (store.create("queries", "q", config={"n": 1}, abandoned_s=600.0) for _ in range(2))
    assert (first.created, second.created) == (True, False)
    first.abandon(KeyboardInterrupt())
    assert store.failed_drafts() == {"queries/q": "interrupted before its first part"}
    write_part(second, 0, b"part")
    assert store.failed_drafts() == {}
    again = store.create("queries", "q", config={"n": 1}, abandoned_s=600.0)
    assert list(again.committed_parts()) == ["part-00000"]
    with pytest.raises(InputError, match="another command is making it"):
        store.create("queries", "q", config={"n": 2}, abandoned_s=0.0)
    second.finish()
    assert store.open("queries", "q").local_path("part-00000").read_bytes() == b"part"


def test_a_command_that_joined_an_abandoned_draft_removes_the_mark(store_url: str) -> None:
    store = Store(store_url)
    first, second = (store.create("queries", "q", config={"n": 1}, abandoned_s=600.0) for _ in range(2))
    first.abandon(KeyboardInterrupt())
    with pytest.raises(InputError, match="was begun otherwise"):  # None: something outside the draft depends on it
        store.create("queries", "q", config={"n": 2}, abandoned_s=None)
    assert second.renew()
    assert store.failed_drafts() == {}
    with pytest.raises(InputError, match="another command is making it"):
        store.create("queries", "q", config={"n": 2}, abandoned_s=600.0)
    second.fail("bad input")
    assert second.renew()
    assert store.failed_drafts() == {"queries/q": "bad input"}


def test_the_renewal_of_drafts_ends_with_its_block(store_url: str) -> None:
    draft = Store(store_url).create("queries", "q", config={"n": 1})
    with keep_alive([draft]):
        assert any(thread.name == "riptide-renewal" for thread in threading.enumerate())
    assert not any(thread.name == "riptide-renewal" for thread in threading.enumerate())


def test_a_touch_renews_the_time_of_an_object_unless_it_has_other_bytes(store_url: str) -> None:
    storage = Store(store_url).storage
    assert not storage.touch_if_equal("a/b", b"1")
    assert storage.size("a/b") is None
    storage.put("a/b", b"1")
    if isinstance(storage, LocalStorage):
        os.utime(storage.local_path("a/b"), (0, 0))
    before = storage.write_time("a/b")
    assert not storage.touch_if_equal("a/b", b"2")
    assert storage.write_time("a/b") == before
    assert storage.touch_if_equal("a/b", b"1")
    assert storage.read("a/b") == b"1"
    assert [key for key, _ in storage.list("a")] == ["a/b"]
    assert storage.write_time("a/b") >= before + isinstance(storage, LocalStorage)


def test_a_failed_draft_is_garbage_after_an_hour(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(store_url)
    draft = store.create("queries", "q", config={"source": "a"})
    write_part(draft, 0, b"x")
    draft.fail("nonsense")
    assert store.garbage_files() == []  # its command may be running again at this moment
    last = max(store.storage.write_time(key) for key, _ in store.storage.list("queries/q"))
    monkeypatch.setattr(store_module.time, "time", lambda: last + 3_601)
    names = [key.removeprefix("queries/q/") for key, _ in store.garbage_files()]
    assert names[0] == "part-00000.json"
    assert names[-2:] == ["failed.json", "manifest.begun.json"]  # no longer failed only once the parts are gone
    for name in names:
        store.storage.delete(f"queries/q/{name}")
    assert list(store.storage.list("")) == []


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
    assert store.keys() == store.incomplete_keys() == []


def _commit_many(url: str, worker: int, count: int) -> None:
    store = Store(url)
    for number in range(count):
        with store.create("runs", f"w{worker}-{number}") as draft:
            write_part(draft, 0, b"x" * 100)
            write_part(draft, 1, b"y" * 100)


def test_commits_beside_gc_and_remove_all_succeed(tmp_path: Path) -> None:
    """What two processes complete is removed at once, with old temporary files: folders become empty all the time."""
    store, context = Store(str(tmp_path / "store")), multiprocessing.get_context("spawn")
    workers = [context.Process(target=_commit_many, args=(store.url, worker, 60)) for worker in range(2)]
    for worker in workers:
        worker.start()
    removed, rounds = 0, 0
    while removed < 120 and (any(worker.is_alive() for worker in workers) or store.keys()):
        with store.storage.temporary_file() as old:
            old.write_bytes(b"")
            os.utime(old, (0, 0))
            for key, _ in store.garbage_files():
                assert key == f".tmp/{old.name}"
                store.storage.delete(key)
        for key in store.keys("runs"):
            store.remove(key)
            removed += 1
        store.incomplete_keys(), store.superseded_drafts(), store.describe_damaged()
        rounds += 1
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert removed == 120
    assert rounds > 10
    assert list(store.storage.list("")) == []


@pytest.mark.parametrize("call", ["link", "replace"])
def test_a_folder_that_is_removed_before_the_commit_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As if `remove` ran between the writer's mkdir and its link or rename."""
    store, real, races = Store(str(tmp_path)), getattr(os, call), []

    def remove_first(source: Path, target: Path) -> None:
        if len(races) < 3:
            target.parent.rmdir()
            target.parent.parent.rmdir()
        races.append(target)
        real(source, target)

    monkeypatch.setattr(storage_module.os, call, remove_first)
    if call == "link":
        assert store.storage.put_new("a/b/c", b"x")
        assert not store.storage.put_new("a/b/c", b"y")  # nothing to race for
    else:
        store.storage.put("a/b/c", b"x")
    assert len(races) == (5 if call == "link" else 4)
    assert store.storage.read("a/b/c") == b"x"
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_the_folder_of_temporary_files_stays(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    with storage.temporary_file() as path:
        storage.put_new("a/b", b"")
        storage.delete(".tmp/none")
        storage.delete("a/b")
        assert [entry.name for entry in tmp_path.iterdir()] == [".tmp"]
        path.write_bytes(b"x")
        storage.put("c", path)
    assert storage.read("c") == b"x"


def test_a_link_whose_acknowledgement_was_lost_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS repeats such a call, which then fails on its own link."""
    real = os.link

    def repeat(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists", str(source))

    storage = LocalStorage(str(tmp_path))
    with monkeypatch.context() as network:
        network.setattr(storage_module.os, "link", repeat)
        assert storage.put_new("a", b"x")
    assert not storage.put_new("a", b"y")


class Vanishing:
    """A storage in which an artifact is removed right after the listing number `moment`, before it is read."""

    def __init__(self, storage: Any, key: str, moment: int):
        self._storage, self._key, self._listings, self._moment = storage, key, 0, moment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        yield from self._then_remove(list(self._storage.list(prefix)))

    def find(self, prefix: str, names: Collection[str]) -> builtins.list[str]:
        return self._then_remove(self._storage.find(prefix, names))

    def _then_remove(self, listed: builtins.list[Any]) -> builtins.list[Any]:
        if self._listings == self._moment:
            for key, _ in self._storage.list(self._key):
                self._storage.delete(key)
        self._listings += 1
        return listed


SCANS: dict[str, Callable[[Store], Any]] = {
    "generations": lambda store: store.generations("embeddings", "e"),
    "garbage": lambda store: store.garbage_files(),
    "superseded": lambda store: store.superseded_drafts(),
    "damaged": lambda store: store.describe_damaged(),
    "dependents": lambda store: store.dependents("embeddings/other/g0000"),
    "removable": lambda store: store.files_to_remove("embeddings/other/g0000")["embeddings/other/g0000"],
    "verify": lambda store: [finding.problem for finding in verify(store) if finding.problem],
    "committed": lambda store: store.create("index", "d").committed_parts(),
}


@pytest.mark.parametrize("scan", SCANS)
def test_what_disappears_during_a_scan_is_left_out(tmp_path: Path, scan: str) -> None:
    key = "index/d" if scan == "committed" else "embeddings/e/g0000"
    results = []
    for moment in range(6):
        store = Store(str(tmp_path / str(moment)))
        make(store, "other/g0000", [b"x"])
        if scan == "committed":
            write_part(store.create("index", "d"), 0, b"x")
        else:
            make(store, "e/g0000", [b"x", b"y"])
        store.storage = Vanishing(store.storage, key, moment)
        results.append(SCANS[scan](store))
    files_of_other = 5
    assert len(results[0]) == (files_of_other if scan == "removable" else 0)
    if scan not in ("removable", "generations", "committed"):  # which find what is removed after they have read it
        assert not any(results)


def test_files_that_disappear_while_they_are_listed_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, real = LocalStorage(str(tmp_path)), os.scandir
    for key in ("a/1", "a/2", "b/1"):
        storage.put_new(key, b"x")

    def scandir(folder: Path) -> list[os.DirEntry[str]]:
        entries = list(real(folder))
        if folder.name == "a":
            for path in (tmp_path / "a/1", tmp_path / "b/1"):
                path.unlink(missing_ok=True)
        return entries

    monkeypatch.setattr(storage_module.os, "scandir", scandir)
    assert list(storage.list("")) == [("a/2", 1)]
    assert list(storage.find("", {"1", "2"})) == ["a/2"]


def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    storage.put_new("a/1", b"x")
    (tmp_path / "a").chmod(0)
    with as_other_user(tmp_path), pytest.raises(PermissionError):
        list(storage.list(""))


@contextlib.contextmanager
def as_other_user(folder: Path) -> Iterator[None]:
    """Code in this context has the rights of a user who may look into the folder; root may do everything."""
    opened = [path for path in (folder, *folder.parents) if path.stat().st_uid == os.getuid() and path != Path("/")]
    modes = [path.stat().st_mode for path in opened]
    for path, mode in zip(opened, modes, strict=True):
        path.chmod(mode | 0o055)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        for path, mode in zip(opened, modes, strict=True):
            path.chmod(mode)


def test_a_store_that_may_not_be_read_or_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "fixed").mkdir(mode=0o755)
    with as_other_user(tmp_path):
        with pytest.raises(InputError, match=r"store .*/closed/s: Permission denied; expected a folder or s3://"):
            Store(str(tmp_path / "closed/s"))
        with pytest.raises(InputError, match="/fixed/s: Permission denied: check the path and its permissions"):
            Store(str(tmp_path / "fixed/s")).create("corpus")
        with pytest.raises(InputError, match="/fixed/s: there is no store here"):
            Store(str(tmp_path / "fixed/s")).open("corpus")
    assert list((tmp_path / "fixed").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (errno.ENOTSUP, "cannot hold a store, as it has no hard links .*: use a folder on another one .*or s3://"),
        (errno.EPERM, "cannot hold a store, as it has no hard links .*: use a folder on another one .*or s3://"),
        (errno.ENOSYS, "cannot hold a store, as it has no hard links .*: use a folder on another one .*or s3://"),
        (errno.EXDEV, "the store's folders are on several file systems: keep the whole store on one"),
        (errno.ESTALE, "Stale file handle: check the disk or the network file system, then run the same command again"),
    ],
)
def test_a_file_system_without_hard_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, line: str
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(source), None, str(target))

    monkeypatch.setattr(storage_module.os, "link", refuse)
    with pytest.raises(InputError, match=line):
        Store(str(tmp_path / "store")).create("corpus")
    left = [path.relative_to(tmp_path / "store").as_posix() for path in (tmp_path / "store").rglob("*")]
    assert left == [".tmp"]


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("s3:/bucket/x", "did you mean s3://bucket/x?"),
        ("s3:bucket/x", "did you mean s3://bucket/x?"),
        ("s3//bucket/x", "did you mean s3://bucket/x?"),
        ("S3://bucket/x", "did you mean s3://bucket/x?"),
        ("s3a://bucket/x", "did you mean s3://bucket/x?"),
        (" s3://bucket/x", "did you mean s3://bucket/x?"),
        ("s3:", "did you mean s3://bucket/prefix?"),
        ("gcs://bucket/x", "did you mean gs://bucket/x?"),
        ("gs:/bucket/x", "did you mean gs://bucket/x?"),
        ("gs://", "expected gs://bucket/prefix"),
        ("az://box/a//b", "expected a prefix of names between slashes"),
        ("gs://bucket//a", "expected a prefix of names between slashes"),
        ("s3://bucket/../a", "expected a prefix of names between slashes"),
        ("gs://bucket/a\nb", "expected a prefix of names between slashes"),
        ("abfss://box/x", "did you mean az://box/x?"),
        (
            "hdfs://host/x",
            "a local folder or a prefix of a bucket, s3:// or gs:// or az://bucket/prefix, can hold a store, not hdfs:",
        ),
        ("http://127.0.0.1/x", "can hold a store, not http:"),
        ("file:///data/x", "a local folder is written as a plain path, such as /data/x"),
        ("zip://x", "can hold a store, not zip:"),
        ("", "expected a folder or s3://bucket/prefix"),
        ("a\0b", "expected a folder or s3://bucket/prefix"),
        ("caf\udce9", "expected a folder or s3://bucket/prefix"),
        ("s3://bucket/a\0b", "expected a folder or s3://bucket/prefix"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_mistyped_store_is_refused_with_the_right_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as told:
        Store(url)
    assert line in str(told.value)
    assert "\n" not in str(told.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_colon_in_its_name_is_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("runs:2026-11", "./s3:x", "C:x"):
        make(Store(url), "e", [b"x"])
        assert (tmp_path / url / "embeddings/e/manifest.json").exists()


def test_what_is_in_the_way_of_a_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"/file: this is a file; expected a folder or s3://bucket/prefix"):
        Store(str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"/file/s: Not a directory; expected a folder"):
        Store(str(tmp_path / "file/s"))
    with pytest.raises(InputError, match=r"/proc/s/.tmp: this folder cannot be made: No such file or directory"):
        Store("/proc/s").create("corpus")
    (tmp_path / "embeddings").write_text("")
    with pytest.raises(InputError, match=r"Not a directory: check the path"):
        Store(str(tmp_path)).create("embeddings", "e")
    with pytest.raises(InputError, match=r"/embeddings: Not a directory: check the path"):
        Store(str(tmp_path)).storage.compare_and_swap("embeddings/x", b"", None)


def test_names_that_no_file_system_takes_are_refused(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    line = rf"name 'x{{40}}'\.\.\.: found 300 characters, expected at most {MAX_NAME}"
    for kind, name in (("embeddings", "x" * 300), ("embeddings", f"{'x' * 300}/g0000"), ("x" * 300, "")):
        for call in (store.create, store.open):
            with pytest.raises(InputError, match=line):
                call(kind, name)
    assert not (tmp_path / "store").exists()
    make(store, "x" * MAX_NAME, [b"x"])


def test_files_whose_names_are_not_text_do_no_harm(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    make(store, "e", [b"x"])
    files = dict(store.storage.list(""))
    for place in (b"", b"/embeddings/e", b"/.tmp"):
        with open(os.fsencode(tmp_path) + place + b"/\xff.json", "wb") as file:
            file.write(b"{}")
    os.mkdir(os.fsencode(tmp_path) + b"/index\xff")
    os.mkfifo(tmp_path / "embeddings/e/pipe.json")
    assert dict(store.storage.list("")) == files
    assert not [finding for finding in verify(store) if finding.problem]
    os.utime(os.fsencode(tmp_path) + b"/.tmp/\xff.json", (0, 0))
    [(key, _)] = store.garbage_files()
    store.storage.delete(key)
    assert store.garbage_files() == []
    store.remove("embeddings/e")
    assert store.keys() == []


def test_garbage_of_other_artifacts_goes_beside_a_damaged_one(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for name in ("bad", "good"):
        make(store, name, [b"x"])
        (tmp_path / f"embeddings/{name}/part-00000-0123456789abcdef.bin").write_bytes(b"z")
    (tmp_path / "embeddings/bad/manifest.json").write_bytes(b"{}")
    assert [key for key, _ in store.garbage_files()] == ["embeddings/good/part-00000-0123456789abcdef.bin"]
    [line] = store.describe_damaged()
    assert line.startswith(f"{tmp_path}/embeddings/bad/manifest.json: ")


def test_a_generation_is_not_superseded_by_a_damaged_one(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    chain(store, "index", 0, 1, 2, begun=(1,))
    assert store.superseded_drafts() == ["index/x/g0001"]
    (tmp_path / "index/x/g0002/manifest.json").write_bytes(b"{}")
    assert store.superseded_drafts() == []
