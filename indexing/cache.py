"""Local files for parts: a bounded, hash-checked cache on each node; a local store's own files where they lie."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from indexing.storage import LocalStorage, Storage
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
    """`folder` holds at most about `max_bytes` of fetched parts, the least recently used go first.

    check: "once" hashes a file when this node first opens it, and again whenever its inode, size or time has
    changed; "always" hashes at every opening; "size" only compares sizes.
    """

    folder: Path
    max_bytes: int
    check: Literal["once", "always", "size"] = "once"

    def local(self, storage: Storage, key: str, size: int, sha256: str) -> Path:
        """A local file with the bytes of `key`. Raises CorruptError (InputError) where they are not those."""
        path = (
            storage.path(key)
            if isinstance(storage, LocalStorage)
            else self._fetched(storage, key, size, sha256)
        )
        self._verify(path, f"{storage.url}/{key}", size, sha256)
        return path

    def _fetched(self, storage: Storage, key: str, size: int, sha256: str) -> Path:
        path = self.folder / "parts" / sha256[:2] / f"{sha256}{Path(key).suffix}"
        if path.exists() and path.stat().st_size == size:
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._make_room(size)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            storage.fetch(key, temporary)
            self._verify(temporary, f"{storage.url}/{key}", size, sha256)
            os.replace(temporary, path)
        except FileNotFoundError as error:
            raise _missing(f"{storage.url}/{key}") from error
        finally:
            temporary.unlink(missing_ok=True)
        return path

    def _verify(self, path: Path, name: str, size: int, sha256: str) -> None:
        try:
            status = path.stat()
        except FileNotFoundError as error:
            raise _missing(name) from error
        if status.st_size != size:
            raise CorruptError(f"{name}: {status.st_size} bytes, {size} were committed; {_RESTORE}")
        if self.check == "size":
            return
        stamp = self.folder / "verified" / sha256[:2] / f"{sha256}-{status.st_dev}-{status.st_ino}"
        seen = f"{status.st_mtime_ns} {status.st_ctime_ns}"
        if self.check == "once":
            with contextlib.suppress(OSError):
                if stamp.read_text() == seen:
                    return
        if file_sha256(path) != sha256:
            raise CorruptError(f"{name}: its sha256 is not the committed one; {_RESTORE}")
        with contextlib.suppress(OSError):  # without a stamp the next opening hashes again
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.write_text(seen)

    def _make_room(self, size: int) -> None:
        files = []
        for path in (self.folder / "parts").glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                files.append((status.st_atime, status.st_size, path))
        excess = sum(entry[1] for entry in files) + size - self.max_bytes
        for used, bytes_, path in sorted(files):
            if excess <= 0 or used > time.time() - KEEP_SECONDS:
                return
            path.unlink(missing_ok=True)  # a reader that has it open or mapped keeps its bytes
            excess -= bytes_


def node_cache() -> NodeCache:
    """The cache of this node: RIPTIDE_CACHE (default ~/.cache/riptide), RIPTIDE_CACHE_BYTES (default 100 GB)."""
    folder = Path(os.environ.get("RIPTIDE_CACHE", "~/.cache/riptide")).expanduser()
    size = os.environ.get("RIPTIDE_CACHE_BYTES", "100_000_000_000")
    check = os.environ.get("RIPTIDE_CHECK", "once")
    if not size.replace("_", "").isdigit() or check not in ("once", "always", "size"):
        raise InputError(f"RIPTIDE_CACHE_BYTES={size} RIPTIDE_CHECK={check}: expected bytes, and once, always or size")
    return NodeCache(folder, int(size), check)  # type: ignore[arg-type]


_RESTORE = "jobs/verify.py names every such file; restore it, or remove the artifact and make it anew"


def _missing(name: str) -> InputError:
    return InputError(f"{name}: the file is missing; {_RESTORE}")
