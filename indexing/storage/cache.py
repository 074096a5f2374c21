"""Provides the files of parts with checked bytes: local files, from a bounded cache per node or from a local store
itself, and ranges of remote ones."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import threading
import time
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from riptide.base.arguments import expand_home
from riptide.base.errors import InputError
from riptide.base.wording import Command
from riptide.indexing.storage.storage import TEMPORARY, RangeReader, Storage
from riptide.telemetry.phases import measured

KEEP_S = 600  # seconds after a file was returned in which it is not evicted, as its reader may not have opened it yet
BLOCK_BYTES = 128 << 10  # bytes of a block of a RangeFile
SCAN_SHARE = 1 / 64  # share of the cache's size that a process fetches between two listings of the cache
_fetched: dict[Path, int] = {}  # bytes that this process has fetched since it listed a cache, by folder
_fetching = threading.Lock()


class CorruptError(InputError):
    """Raised for a file whose bytes differ from the committed ones; the message starts with the file."""


class MissingFileError(InputError):
    """Raised for a file of an artifact that is missing in the store; the message starts with the file."""


def file_sha256(path: Path) -> str:
    """Computes the sha256 (hex) of a file, which it reads in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class NodeCache:
    """A bounded folder of fetched parts, with least-recently-used eviction.

    Attributes:
        folder: The folder.
        max_bytes: Bytes of all parts. Parts that were returned in the last KEEP_S seconds are not evicted, so the cache
            may exceed it by the bytes that were read in this time.
        check: "once" hashes a file when this node fetches or first opens it, and again if its inode, size or time of
            modification has changed (for a file of a local store, also the time of status change; for a fetched file,
            also after a reboot, as fetched bytes are not synced); "always" hashes at every
            opening; "size" only compares sizes.
    """

    folder: Path
    max_bytes: int
    check: Literal["once", "always", "size"] = "once"

    @measured("read")
    def local_path(self, storage: Storage, key: str, size: int, sha256: str) -> Path:
        """Returns the path of a local file with the bytes of an object, which is fetched if necessary.

        Args:
            storage: The storage.
            key: The key of the object.
            size: Its committed size in bytes.
            sha256: Its committed sha256 (hex).

        Raises:
            InputError: If the object is missing.
            CorruptError: If its bytes differ from the committed ones.
        """
        name = f"{storage.url}/{key}"
        if (file := storage.local_path(key)) is not None:
            try:
                self._check_file(file, name, size, sha256, in_store=True)
            except FileNotFoundError as error:
                raise missing_file_error(name) from error
            return file
        path = self._cached(key, sha256)
        try:
            status = path.stat()
            if status.st_size == size:
                os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))  # first: prevents eviction
                self._check_file(path, name, size, sha256, in_store=False)
                return path
        except (FileNotFoundError, CorruptError):
            pass  # never fetched, evicted by another process, or damaged, for example by a loss of power
        self._fetch(storage, key, path, size, sha256)
        return path

    def has_file(self, storage: Storage, key: str, size: int, sha256: str) -> bool:
        """Returns whether this machine has a file with the bytes of an object; arguments as for `local_path`."""
        if storage.local_path(key) is not None:
            return True
        try:
            return self._cached(key, sha256).stat().st_size == size
        except FileNotFoundError:
            return False

    def discard(self, file: str) -> None:
        """Removes the fetched bytes of a data file, whose name ends with the first 16 characters of its sha256.

        Does nothing for another file, for example a document or a lock.
        """
        digest = file.rpartition("-")[2].partition(".")[0]
        if not re.fullmatch("[0-9a-f]{16}", digest):
            return
        for path in (self.folder / "parts" / digest[:2]).glob(f"{digest}*"):
            path.unlink(missing_ok=True)

    def _cached(self, key: str, sha256: str) -> Path:
        """Returns the path at which the cache keeps an object."""
        return self.folder / "parts" / sha256[:2] / f"{sha256}{Path(key).suffix}"

    def _fetch(self, storage: Storage, key: str, path: Path, size: int, sha256: str) -> None:
        name = f"{storage.url}/{key}"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._make_room(size)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}{TEMPORARY}")
        try:
            storage.fetch(key, temporary)
            os.utime(temporary)  # sets the access time, which some mounts do not update
            status = _check_size(temporary, name, size)
            if self.check != "size":
                _check_hash(temporary, name, sha256)
            os.replace(temporary, path)
        except FileNotFoundError as error:
            raise missing_file_error(name) from error
        finally:
            temporary.unlink(missing_ok=True)
        if self.check != "size":
            self._stamp(sha256, status, _file_state(status, in_store=False))

    def _check_file(self, path: Path, name: str, size: int, sha256: str, *, in_store: bool) -> None:
        status = _check_size(path, name, size)
        if self.check == "size":
            return
        state = _file_state(status, in_store=in_store)
        if self.check == "once":
            with contextlib.suppress(OSError):
                if self._stamp_file(sha256, status).read_text(encoding="utf-8") == state:
                    return
        _check_hash(path, name, sha256)
        self._stamp(sha256, status, state)

    def _stamp_file(self, sha256: str, status: os.stat_result) -> Path:
        return self.folder / "verified" / sha256[:2] / f"{sha256}-{status.st_dev}-{status.st_ino}"

    def _stamp(self, sha256: str, status: os.stat_result, state: str) -> None:
        stamp = self._stamp_file(sha256, status)
        with contextlib.suppress(OSError):  # without a stamp the file is hashed again when it is next opened
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.write_text(state, encoding="utf-8")

    def _make_room(self, size: int) -> None:
        """Evicts files if the folder would exceed `max_bytes`.

        The folder is listed again after each SCAN_SHARE of `max_bytes` that this process has fetched, and as many bytes
        are evicted beyond the limit, so the time per file does not grow with the number of files. Each process of the
        node may exceed the limit by that share.
        """
        share = int(self.max_bytes * SCAN_SHARE)
        with _fetching:
            _fetched[self.folder] = _fetched.get(self.folder, share) + size
            if _fetched[self.folder] <= share:
                return
            _fetched[self.folder] = 0
        files = []
        for path in (self.folder / "parts").glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                files.append((path, path.stat()))
        excess = sum(status.st_size for _, status in files) + size - self.max_bytes
        excess += share if excess > 0 else 0
        for path, status in sorted(files, key=lambda file: _last_use(*file)):
            if excess <= 0 or _last_use(path, status) > time.time() - KEEP_S:
                return
            with contextlib.suppress(FileNotFoundError):
                if _last_use(path, path.stat()) != _last_use(path, status):
                    continue  # a reader has received it since it was listed
            path.unlink(missing_ok=True)  # readers with the file open or mapped keep the data
            with contextlib.suppress(OSError):
                self._stamp_file(path.name.partition(".")[0], status).unlink()
            excess -= status.st_size


class RangeFile(RangeReader):
    """An object that is read by blocks, each of which is fetched at its first use and compared with its checksum.

    Args:
        storage: The storage.
        key: The key of the object.
        size: Its committed size in bytes.
        checksums: The CRC-32 of each block of BLOCK_BYTES, as `block_checksums` returns them.
    """

    def __init__(self, storage: Storage, key: str, size: int, checksums: str):
        super().__init__(storage, key, size)
        self._checksums = checksums
        self._blocks: dict[int, bytes] = {}

    def read(self, size: int | None = -1) -> bytes:
        """Returns up to `size` bytes from the position; -1: up to the end. Raises CorruptError, MissingFileError."""
        start = self._position
        end = self._size if size is None or size < 0 else min(self._size, start + size)
        if end <= start:
            return b""
        first, last = start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        self._load(first, last)
        data = b"".join(self._blocks[number] for number in range(first, last + 1))
        self._position = end
        return data[start - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def _load(self, first: int, last: int) -> None:
        """Fetches the blocks first to last that are not loaded, in one request."""
        missing = [number for number in range(first, last + 1) if number not in self._blocks]
        if not missing:
            return
        start, end = missing[0] * BLOCK_BYTES, min(self._size, (missing[-1] + 1) * BLOCK_BYTES)
        name = f"{self._storage.url}/{self._key}"
        try:
            data = self._storage.read_range(self._key, start, end)
        except FileNotFoundError as error:
            raise missing_file_error(name) from error
        for number in range(missing[0], missing[-1] + 1):
            block = data[number * BLOCK_BYTES - start :][:BLOCK_BYTES]
            if f"{zlib.crc32(block):08x}" != self._checksums[8 * number : 8 * number + 8]:
                raise CorruptError(
                    f"{name}: bytes {number * BLOCK_BYTES} and following are not the committed ones; {_RESTORE}"
                )
            self._blocks[number] = block


def block_checksums(path: Path) -> str:
    """Returns the CRC-32 of each block of BLOCK_BYTES of a file: 8 hexadecimal digits a block, concatenated."""
    with open(path, "rb") as file:
        return "".join(f"{zlib.crc32(block):08x}" for block in iter(lambda: file.read(BLOCK_BYTES), b""))


def node_cache() -> NodeCache:
    """Opens the node's cache, configured by RIPTIDE_CACHE, RIPTIDE_CACHE_BYTES (default 100 GB) and RIPTIDE_CHECK."""
    try:
        folder = expand_home(os.environ.get("RIPTIDE_CACHE", "~/.cache/riptide"))
    except InputError:
        if "RIPTIDE_CACHE" in os.environ:
            raise
        raise InputError(
            "the node's cache: found no home directory for its default ~/.cache/riptide; set HOME, or RIPTIDE_CACHE to "
            "a folder"
        ) from None
    size = os.environ.get("RIPTIDE_CACHE_BYTES", "100000000000")
    mode = os.environ.get("RIPTIDE_CHECK", "once")
    if not re.fullmatch("[0-9]{1,18}", size) or mode not in ("once", "always", "size"):
        raise InputError(f"RIPTIDE_CACHE_BYTES={size} RIPTIDE_CHECK={mode}: expected digits, and once, always or size")
    return NodeCache(folder, int(size), mode)  # type: ignore[arg-type]


_RESTORE = (
    f"{Command('verify', store='STORE')} names every such file; restore it, or remove the artifact and make it again"
)


def missing_file_error(name: str) -> MissingFileError:
    """Returns the error for a file of an artifact that is missing in the store."""
    return MissingFileError(f"{name}: the file is missing; {_RESTORE}")


def _check_size(path: Path, name: str, size: int) -> os.stat_result:
    status = path.stat()
    if status.st_size != size:
        raise CorruptError(f"{name}: {status.st_size} bytes, {size} were committed; {_RESTORE}")
    return status


def _check_hash(path: Path, name: str, sha256: str) -> None:
    if file_sha256(path) != sha256:
        raise CorruptError(f"{name}: its sha256 is not the committed one; {_RESTORE}")


def _file_state(status: os.stat_result, *, in_store: bool) -> str:
    """Returns the content of a stamp: mtime, and ctime for a file in the store (each use changes a cached file's).

    For a cached file, which is not synced, it has the current boot instead.
    """
    return f"{status.st_mtime_ns} {status.st_ctime_ns if in_store else _boot_id()}"


@functools.lru_cache(maxsize=1)
def _boot_id() -> str:
    """Returns the identity of the machine's current boot; "" where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _last_use(path: Path, status: os.stat_result) -> float:
    """Returns the time at which a cached file was last returned or, while it is fetched, last written to."""
    return max(status.st_atime, status.st_mtime) if path.suffix == TEMPORARY else status.st_atime
