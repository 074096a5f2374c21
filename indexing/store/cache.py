"""Local files for parts: a bounded, hash-checked cache on each node; a local store's own files where they lie."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from indexing.store.storage import TEMPORARY, Storage
from retriever.errors import InputError

KEEP_SECONDS = 600  # a file handed out this recently is not evicted: its reader may not have opened it yet


class CorruptError(InputError):
    """A file whose bytes are not those that were committed; the message starts with the file."""


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file, streamed."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class NodeCache:
    """`folder` holds about `max_bytes` of fetched parts, the least recently used go first. What was handed out in the
    last KEEP_SECONDS stays, so `max_bytes` may be overrun by as much as was read in these minutes.

    check: "once" hashes a file when this node fetches or first opens it, and again whenever its inode, size or time of
    modification (a local store's own file: or of status change) has changed; "always" hashes at every opening; "size"
    only compares sizes.
    """

    folder: Path
    max_bytes: int
    check: Literal["once", "always", "size"] = "once"

    def local(self, storage: Storage, key: str, size: int, sha256: str) -> Path:
        """A local file with the bytes of `key`. Raises CorruptError (InputError) where they are not those."""
        name = f"{storage.url}/{key}"
        if (own := storage.local_path(key)) is not None:
            try:
                self._verify(own, name, size, sha256, own=True)
            except FileNotFoundError as error:
                raise _missing(name) from error
            return own
        path = self.folder / "parts" / sha256[:2] / f"{sha256}{Path(key).suffix}"
        try:
            status = path.stat()
            if status.st_size == size:
                os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))  # first of all: from here on it is not evicted
                self._verify(path, name, size, sha256, own=False)
                return path
        except FileNotFoundError:
            pass  # never fetched, or evicted by another process since
        self._fetch(storage, key, path, size, sha256)
        return path

    def _fetch(self, storage: Storage, key: str, path: Path, size: int, sha256: str) -> None:
        name = f"{storage.url}/{key}"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._make_room(size)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}{TEMPORARY}")
        try:
            storage.fetch(key, temporary)
            os.utime(temporary)  # a long fetch has just been used, whatever the mount does to access times
            status = _sized(temporary, name, size)
            if self.check != "size":
                _hashed(temporary, name, sha256)
            os.replace(temporary, path)
        except FileNotFoundError as error:
            raise _missing(name) from error
        finally:
            temporary.unlink(missing_ok=True)
        if self.check != "size":
            self._stamp(sha256, status, _seen(status, own=False))

    def _verify(self, path: Path, name: str, size: int, sha256: str, *, own: bool) -> None:
        status = _sized(path, name, size)
        if self.check == "size":
            return
        seen = _seen(status, own=own)
        if self.check == "once":
            with contextlib.suppress(OSError):
                if self._stamp_file(sha256, status).read_text() == seen:
                    return
        _hashed(path, name, sha256)
        self._stamp(sha256, status, seen)

    def _stamp_file(self, sha256: str, status: os.stat_result) -> Path:
        return self.folder / "verified" / sha256[:2] / f"{sha256}-{status.st_dev}-{status.st_ino}"

    def _stamp(self, sha256: str, status: os.stat_result, seen: str) -> None:
        stamp = self._stamp_file(sha256, status)
        with contextlib.suppress(OSError):  # without a stamp the next opening hashes again
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.write_text(seen)

    def _make_room(self, size: int) -> None:
        files = []
        for path in (self.folder / "parts").glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                files.append((path, path.stat()))
        excess = sum(status.st_size for _, status in files) + size - self.max_bytes
        for path, status in sorted(files, key=lambda file: _used(*file)):
            if excess <= 0 or _used(path, status) > time.time() - KEEP_SECONDS:
                return
            with contextlib.suppress(FileNotFoundError):
                if _used(path, path.stat()) != _used(path, status):
                    continue  # handed out since it was listed
            path.unlink(missing_ok=True)  # a reader that has it open or mapped keeps its bytes
            with contextlib.suppress(OSError):
                self._stamp_file(path.name.partition(".")[0], status).unlink()
            excess -= status.st_size


def node_cache() -> NodeCache:
    """The cache of this node: RIPTIDE_CACHE (default ~/.cache/riptide), RIPTIDE_CACHE_BYTES (default 100 GB)."""
    folder = Path(os.environ.get("RIPTIDE_CACHE", "~/.cache/riptide")).expanduser()
    size = os.environ.get("RIPTIDE_CACHE_BYTES", "100000000000")
    check = os.environ.get("RIPTIDE_CHECK", "once")
    if not re.fullmatch("[0-9]{1,18}", size) or check not in ("once", "always", "size"):
        raise InputError(f"RIPTIDE_CACHE_BYTES={size} RIPTIDE_CHECK={check}: expected digits, and once, always or size")
    return NodeCache(folder, int(size), check)  # type: ignore[arg-type]


_RESTORE = "jobs/verify.py names every such file; restore it, or remove the artifact and make it anew"


def _missing(name: str) -> InputError:
    return InputError(f"{name}: the file is missing; {_RESTORE}")


def _sized(path: Path, name: str, size: int) -> os.stat_result:
    status = path.stat()
    if status.st_size != size:
        raise CorruptError(f"{name}: {status.st_size} bytes, {size} were committed; {_RESTORE}")
    return status


def _hashed(path: Path, name: str, sha256: str) -> None:
    if file_sha256(path) != sha256:
        raise CorruptError(f"{name}: its sha256 is not the committed one; {_RESTORE}")


def _seen(status: os.stat_result, *, own: bool) -> str:
    """What a stamp holds. A file in the cache is touched whenever it is handed out, which changes its ctime."""
    return f"{status.st_mtime_ns} {status.st_ctime_ns}" if own else f"{status.st_mtime_ns}"


def _used(path: Path, status: os.stat_result) -> float:
    """When a file in the cache was last used: handed out or, while it is being fetched, written to."""
    return max(status.st_atime, status.st_mtime) if path.suffix == TEMPORARY else status.st_atime
