"""The node's cache: how often it hashes, and what it does when another process evicts at the same time."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from riptide.base.errors import InputError
from riptide.indexing.storage import cache as cache_module
from riptide.indexing.storage.cache import CorruptError, NodeCache, node_cache
from riptide.indexing.storage.storage import LocalStorage, describe_os_error

OLD = 1_000_000_000  # more than KEEP_S ago


class Remote:
    """As much of a remote storage as a cache uses; `while_fetching` runs once a file is written."""

    url = "remote"

    def __init__(self, **contents: bytes):
        self.contents = contents
        self.fetched: list[str] = []
        self.while_fetching: Callable[[str, Path], object] = lambda key, path: None

    def local_path(self, key: str) -> None:
        return None

    def fetch(self, key: str, path: Path) -> None:
        self.fetched.append(key)
        path.write_bytes(self.contents[key])
        self.while_fetching(key, path)


def open_part(cache: NodeCache, storage: object, key: str, content: bytes) -> Path:
    return cache.local_path(storage, key, len(content), hashlib.sha256(content).hexdigest())  # type: ignore[arg-type]


def leave_unused(path: Path) -> None:
    os.utime(path, (OLD, path.stat().st_mtime))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files hashed so far."""
    calls: list[Path] = []
    hash_file = cache_module.file_sha256
    monkeypatch.setattr(cache_module, "file_sha256", lambda path: calls.append(path) or hash_file(path))
    return calls


@pytest.mark.parametrize(("check", "times"), [("once", 1), ("always", 4), ("size", 0)])
def test_how_often_a_fetched_part_is_hashed(tmp_path: Path, hashed: list[Path], check: str, times: int) -> None:
    storage = Remote(a=b"vectors")
    for _ in range(4):
        assert open_part(NodeCache(tmp_path, 100, check), storage, "a", b"vectors").read_bytes() == b"vectors"  # type: ignore[arg-type]
    assert storage.fetched == ["a"]
    assert len(hashed) == times


def test_a_fetched_part_that_changes_is_fetched_again(tmp_path: Path, hashed: list[Path]) -> None:
    cache, storage = NodeCache(tmp_path, 100), Remote(a=b"vectors")
    path = open_part(cache, storage, "a", b"vectors")
    path.write_bytes(b"vectorz")
    assert open_part(cache, storage, "a", b"vectors").read_bytes() == b"vectors"
    assert storage.fetched == ["a", "a"]
    assert len(hashed) == 3
    storage.contents["a"] = b"vectorz"
    path.write_bytes(b"vectorz")
    with pytest.raises(CorruptError, match="remote/a: its sha256"):
        open_part(cache, storage, "a", b"vectors")


def test_a_fetched_part_that_a_loss_of_power_damaged_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks were not written although its size and times were; a file that is whole is hashed once."""
    cache, storage = NodeCache(tmp_path, 100), Remote(a=b"vectors")
    path = open_part(cache, storage, "a", b"vectors")
    before = path.stat()
    path.write_bytes(bytes(7))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    monkeypatch.setattr(cache_module, "_boot_id", lambda: "another start")
    assert open_part(cache, storage, "a", b"vectors").read_bytes() == b"vectors"
    assert storage.fetched == ["a", "a"]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE, errno.EINTR])
@pytest.mark.parametrize("call", ["mkdir", "utime", "replace", "unlink", "open"])
def test_a_call_of_a_fetch_that_fails_leaves_no_wrong_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    """The first such call; the error is one that a job describes in a line, and the next fetch succeeds."""

    def fail(*_: object, **options: object) -> None:
        raise OSError(error, os.strerror(error))

    cache, storage = NodeCache(tmp_path / "cache", 100), Remote(a=b"vectors")
    with monkeypatch.context() as patch, contextlib.suppress(OSError):
        patch.setattr(io if call == "open" else os, call, fail)
        open_part(cache, storage, "a", b"vectors")
    assert describe_os_error(OSError(error, ""), tmp_path)
    assert [path.read_bytes() for path in tmp_path.rglob("*.a")] in ([], [b"vectors"])
    assert open_part(cache, storage, "a", b"vectors").read_bytes() == b"vectors"


def test_a_local_file_that_changes_behind_its_time_is_noticed(tmp_path: Path, hashed: list[Path]) -> None:
    """A local store's file is not touched by the cache, so that its ctime tells of a change that hides its mtime."""
    storage = LocalStorage(str(tmp_path / "store"))
    storage.put_new("a", b"vectors")
    cache = NodeCache(tmp_path / "cache", 100)
    for _ in range(3):
        path = open_part(cache, storage, "a", b"vectors")
    assert len(hashed) == 1
    before = path.stat()
    path.write_bytes(b"vectorz")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CorruptError):
        open_part(cache, storage, "a", b"vectors")


@pytest.mark.parametrize("moment", ["before it is touched", "after it is touched"])
def test_a_part_evicted_while_it_is_opened_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    cache, storage = NodeCache(tmp_path, 100), Remote(a=b"vectors")
    cached = open_part(cache, storage, "a", b"vectors")
    touch = os.utime

    def evicted(path: Path, *args: object, **kwargs: object) -> None:
        monkeypatch.setattr(os, "utime", touch)
        if moment == "before it is touched":
            cached.unlink()
        touch(path, *args, **kwargs)  # type: ignore[arg-type]
        cached.unlink()

    monkeypatch.setattr(os, "utime", evicted)
    assert open_part(cache, storage, "a", b"vectors").read_bytes() == b"vectors"
    assert storage.fetched == ["a", "a"]


def test_eviction_takes_the_stamp_along(tmp_path: Path) -> None:
    cache, storage = NodeCache(tmp_path, 10), Remote(a=b"a" * 8, b=b"b" * 8)
    first = open_part(cache, storage, "a", b"a" * 8)
    leave_unused(first)
    second = open_part(cache, storage, "b", b"b" * 8)
    assert not first.exists()
    assert [stamp.name[:64] for stamp in (tmp_path / "verified").glob("*/*")] == [second.stem]


def test_what_was_just_handed_out_overruns_the_bound(tmp_path: Path) -> None:
    cache, storage = NodeCache(tmp_path, 10), Remote(a=b"a" * 8, b=b"b" * 8)
    paths = [open_part(cache, storage, key, storage.contents[key]) for key in "ab"]
    assert all(path.exists() for path in paths)


def test_eviction_spares_a_part_handed_out_since_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, storage = NodeCache(tmp_path, 10), Remote(a=b"a" * 8, b=b"b" * 8)
    path = open_part(cache, storage, "a", b"a" * 8)
    leave_unused(path)
    now = time.time

    def hand_out() -> float:  # the clock is read between the listing and the removal
        monkeypatch.setattr(time, "time", now)
        open_part(cache, storage, "a", b"a" * 8)
        return now()

    monkeypatch.setattr(time, "time", hand_out)
    open_part(cache, storage, "b", b"b" * 8)
    assert path.exists()


def test_eviction_spares_a_part_that_is_long_in_coming(tmp_path: Path) -> None:
    """A file still written to counts as used, and one just come too, where the mount never changes access times."""
    cache, storage = NodeCache(tmp_path, 10), Remote(a=b"a" * 8, b=b"b" * 8)

    def slow(key: str, path: Path) -> None:
        if key == "a":
            leave_unused(path)
            open_part(cache, storage, "b", b"b" * 8)

    storage.while_fetching = slow
    path = open_part(cache, storage, "a", b"a" * 8)
    assert path.stat().st_atime > time.time() - 60


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "the node's cache: found no home directory .*; set HOME, or RIPTIDE_CACHE to a folder"),
        ("~/c", "^~/c: found no home directory for ~"),
    ],
)
def test_a_cache_without_a_home_directory_is_refused(
    value: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RIPTIDE_CACHE", raising=False)
    if value is not None:
        monkeypatch.setenv("RIPTIDE_CACHE", value)

    def expand_user(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", expand_user)
    with pytest.raises(InputError, match=message):
        node_cache()


@pytest.mark.parametrize("size", ["1__0", "1_000", "_", "\u00b2", "1e9", "-1", "", " 5", "9" * 5_000])
def test_a_size_of_the_cache_that_is_no_number_is_refused_in_one_line(
    size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIPTIDE_CACHE_BYTES", size)
    with pytest.raises(InputError, match=r"RIPTIDE_CACHE_BYTES=.*: expected digits"):
        node_cache()
    monkeypatch.setenv("RIPTIDE_CACHE_BYTES", "1000")
    assert node_cache().max_bytes == 1_000


def test_a_cache_is_listed_once_per_share_of_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "KEEP_S", -1)
    listings, real = [], Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: listings.append(path) or real(path, pattern))
    cache, storage = NodeCache(tmp_path / "cache", 64 * 100), Remote()
    for number in range(300):
        storage.contents[f"{number}"] = content = f"{number:025d}".encode()
        open_part(cache, storage, f"{number}", content)
        if number % 50 == 49:
            assert len(list(real(tmp_path / "cache/parts", "*/*"))) <= 65 * 4 + 1  # the limit, and a share
    assert len(listings) == 300 / 5  # four files are a share
