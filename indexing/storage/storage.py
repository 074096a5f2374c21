"""The interface of storage backends, with atomic commits, and the backend for a local folder."""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import hashlib
import io
import itertools
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from riptide.base.arguments import expand_home
from riptide.base.errors import InputError, StorageError
from riptide.base.wording import printable, shown
from riptide.telemetry.phases import Phase, measured

TEMPORARY = ".tmp"  # folder for temporary files of a local store; never listed, cleaned by `gc`
ATTEMPTS = 100  # attempts to move a file into a folder that other processes remove when it is empty

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EISDIR, errno.ELOOP}
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class Storage(Protocol):
    """The interface of a storage backend. Keys are relative paths with '/'. Writes are atomic."""

    url: str

    def read(self, key: str) -> bytes:
        """Returns the bytes of `key`. Raises FileNotFoundError."""

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Returns the bytes [start, end) of `key`, fewer if it is shorter. Raises FileNotFoundError."""
        return self.read(key)[start:end]

    def size(self, key: str) -> int | None:
        """Returns the size of `key` in bytes; None if it does not exist."""

    def write_time(self, key: str) -> float:
        """Returns the time at which `key` was last written, in seconds since 1970. Raises FileNotFoundError."""

    def sha256(self, key: str) -> str:
        """Computes the sha256 (hex) of the bytes of `key`, read in blocks. Raises FileNotFoundError."""

    def fetch(self, key: str, path: Path) -> None:
        """Copies `key` to the local file `path`. Raises FileNotFoundError."""

    def put(self, key: str, source: Path | bytes) -> None:
        """Atomically moves a local file, or writes bytes, to `key`; replaces an existing object."""

    def put_new(self, key: str, data: bytes) -> bool:
        """Writes a small object unless `key` exists, in which case it returns False."""

    def require_conditional_writes(self) -> None:
        """Checks, by a temporary object, that the storage honours the conditions of `put_new` and `compare_and_swap`.

        Raises:
            StorageError: If it ignores one of them.
        """

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yields (key, size in bytes) of every object under the folder `prefix`, ordered by key.

        Objects that other processes remove during the scan may be left out.
        """

    def find(self, prefix: str, names: Collection[str]) -> dict[str, float]:
        """Finds the objects with these file names under the folder `prefix`; skips the parts of artifacts.

        Args:
            prefix: The folder.
            names: File names of documents such as manifest.json, not of parts.

        Returns:
            The time of the last write of each object, in seconds since 1970, by key, ordered by key.
        """

    def write_times(self, prefix: str) -> dict[str, float]:
        """Returns the write time of each object under the folder `prefix`, in seconds since 1970, by key."""

    def is_empty(self) -> bool:
        """Returns whether the storage holds no object."""

    def delete(self, key: str) -> None:
        """Removes `key`; does nothing if it does not exist."""

    def delete_all(self, keys: Sequence[str]) -> None:
        """Removes keys as `delete` does, in any order; not the names of `abandoned_writes`."""

    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        """Reads the bytes and the version tag of a mutable object; returns None if it does not exist."""

    def compare_and_swap(self, key: str, data: bytes, tag: str | None) -> bool:
        """Replaces a mutable object if its tag is still `tag` (None: if it does not exist). Returns False otherwise."""

    def touch_if_equal(self, key: str, data: bytes) -> bool:
        """Sets the modification time of a small object to now if its bytes equal `data`; otherwise returns False."""

    def temporary_file(self, suffix: str = "") -> contextlib.AbstractContextManager[Path]:
        """Yields the path of a new file, which `put` moves without a copy if possible, and removes it at the end."""

    def local_path(self, key: str) -> Path | None:
        """Returns the path at which a local storage keeps `key`; None for other backends."""

    def abandoned_writes(self, older_than: float) -> builtins.list[tuple[str, int]]:
        """Returns (key, size in bytes) of unfinished writes idle for `older_than` seconds, which `list` omits."""


class RangeReader(io.RawIOBase):
    """A file of ranges of an object; subclasses read from `_position`, and advance it.

    Args:
        storage: The storage.
        key: The key of the object.
        size: Its size in bytes.
    """

    def __init__(self, storage: Storage, key: str, size: int):
        self._storage, self._key, self._size, self._position = storage, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position


class OutsideKeyError(InputError):
    """A key leads out of the folder of a store."""


class LocalStorage:
    """The backend for a local folder: writes and fsyncs a temporary file, then renames or hard-links (`put_new`) it.

    A link fails if the name exists, so of two writers one wins. `delete` removes folders that become empty, so a
    writer makes the folder again if it vanishes before the rename or the link. The folder for temporary files stays.

    What a write has acknowledged survives a loss of power: the bytes, the file's entry in its folder, and the entries
    of the folders above were fsynced.
    """

    def __init__(self, root: str):
        self.root = expand_home(root).absolute()
        self.url = str(self.root)
        self._synced: set[Path] = set()  # folders whose entries in the folders above are on the disk

    def local_path(self, key: str) -> Path:
        """Returns the path of a key. Raises OutsideKeyError for one that leads out of the folder.

        Manifests that others have written may name one as a part or as an input.
        """
        if (".." in key and ".." in key.split("/")) or key.startswith("/"):
            raise OutsideKeyError(
                f"{self.url}: {shown(repr(key))}: it leads out of the store, expected a key within it"
            )
        return self.root / key

    @measured("read")
    def read(self, key: str) -> bytes:
        return self.local_path(key).read_bytes()

    @measured("read")
    def read_range(self, key: str, start: int, end: int) -> bytes:
        with open(self.local_path(key), "rb") as file:
            file.seek(start)
            return file.read(end - start)

    @measured("read")
    def size(self, key: str) -> int | None:
        try:
            return self.local_path(key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    @measured("read")
    def write_time(self, key: str) -> float:
        return self.local_path(key).stat().st_mtime

    @measured("read")
    def sha256(self, key: str) -> str:
        with open(self.local_path(key), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @measured("read")
    def fetch(self, key: str, path: Path) -> None:
        shutil.copyfile(self.local_path(key), path)

    @measured("write")
    def put(self, key: str, source: Path | bytes) -> None:
        target = self.local_path(key)
        path = self._write_temporary(source, target) if isinstance(source, bytes) else source
        try:
            with explain_disk_errors(target):
                _flush_to_disk(path)
                self._move_into_folder(path, target, os.replace)
        finally:
            if isinstance(source, bytes):
                path.unlink(missing_ok=True)

    @measured("commit")
    def put_new(self, key: str, data: bytes) -> bool:
        target = self.local_path(key)
        temporary = self._write_temporary(data, target)
        try:
            with explain_disk_errors(target):
                self._move_into_folder(temporary, target, self._link)
        except FileExistsError:
            # NFS may repeat a link request whose acknowledgement was lost; it then fails because of its first attempt.
            return temporary.stat().st_nlink == 2
        except InputError:
            self._remove_empty_folders(target)
            raise
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def require_conditional_writes(self) -> None:
        pass  # hard links (link(2)) refuse to replace a file

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        with Phase("read"):
            entries = sorted((key, status.st_size) for key, status in self._files(prefix))
        yield from entries

    @measured("read")
    def find(self, prefix: str, names: Collection[str]) -> dict[str, float]:
        times: dict[str, float] = {}

        def is_artifact(folder: str) -> bool:
            keys = [f"{folder}/{name}" if folder else name for name in names]
            files = [key for key in keys if self.local_path(key).is_file()]
            for key in files:
                with contextlib.suppress(FileNotFoundError):  # another process has removed it
                    times[key] = self.write_time(key)
            return bool(files)

        for _ in self._entries(prefix, is_artifact):
            pass
        return dict(sorted(times.items()))

    @measured("read")
    def write_times(self, prefix: str) -> dict[str, float]:
        return {key: status.st_mtime for key, status in self._files(prefix)}

    @measured("read")
    def is_empty(self) -> bool:
        try:
            return all(name == TEMPORARY for name in os.listdir(self.root))
        except FileNotFoundError:
            return True

    @measured("write")
    def delete(self, key: str) -> None:
        path = self.local_path(key)
        path.unlink(missing_ok=True)
        self._remove_empty_folders(path)

    def delete_all(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.delete(key)

    @measured("read")
    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        try:
            data = self.read(key)
        except FileNotFoundError:
            return None
        return data, hashlib.sha256(data).hexdigest()

    @measured("commit")
    def compare_and_swap(self, key: str, data: bytes, tag: str | None) -> bool:
        target = self.local_path(key)
        with explain_disk_errors(target):
            self._make_folder(target.parent)
            with open(target.parent / f".{target.name}.lock", "wb", opener=_open_without_links) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                current = self.read_tagged(key)
                if (current[1] if current else None) != tag:
                    return False
                self.put(key, data)
        return True

    @measured("commit")
    def touch_if_equal(self, key: str, data: bytes) -> bool:
        with contextlib.suppress(FileNotFoundError):
            if self.read(key) == data:
                os.utime(self.local_path(key))
                return True
        return False

    @contextlib.contextmanager
    def temporary_file(self, suffix: str = "") -> Iterator[Path]:
        path = self._temporary_path(suffix)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _temporary_path(self, suffix: str = "") -> Path:
        folder = self.root / TEMPORARY
        with explain_disk_errors(folder):
            self._make_folder(folder)
        return folder / f"{uuid.uuid4().hex}{suffix}"

    def abandoned_writes(self, older_than: float) -> builtins.list[tuple[str, int]]:
        stale, latest = [], time.time() - older_than
        for path in sorted((self.root / TEMPORARY).glob("*")):
            with contextlib.suppress(FileNotFoundError):  # the writer has finished or removed the file
                status = path.stat()
                if status.st_mtime < latest:
                    stale.append((f"{TEMPORARY}/{path.name}", status.st_size))
        return stale

    def _write_temporary(self, data: bytes, target: Path) -> Path:
        temporary = self._temporary_path()
        try:
            with explain_disk_errors(target):
                temporary.write_bytes(data)
                _flush_to_disk(temporary)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _make_folder(self, folder: Path) -> None:
        """Makes a folder; it survives a loss of power.

        The entry of each new folder is synced, and once per process those of the store's other folders down to this
        one, which another process may have made without having synced them yet.
        """
        folders = [folder, *folder.parents]
        new = set(itertools.takewhile(lambda level: not level.is_dir(), folders))
        existing = {level for level in folders if self.root in level.parents} - self._synced
        pending = [level for level in folders if level in new | existing]
        _make_folder(folder)
        for level in pending:
            # Another process may have removed the folder, or one above the store may not be readable.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                _flush_to_disk(level.parent)
        self._synced.update(pending)

    def _move_into_folder(self, source: Path, target: Path, move: Callable[[Path, Path], object]) -> None:
        """Calls `move(source, target)`; retries if another process removes the empty target folder."""
        for attempt in range(1, ATTEMPTS + 1):
            self._make_folder(target.parent)
            try:
                move(source, target)
                break
            except FileNotFoundError:
                if attempt == ATTEMPTS or not source.exists():
                    raise
        with contextlib.suppress(FileNotFoundError):  # another process has deleted the file and its folder
            _flush_to_disk(target.parent)

    def _link(self, source: Path, target: Path) -> None:
        """Makes a hard link. Raises InputError if the file system does not support hard links."""
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            raise InputError(
                f"{self.root}: this file system cannot hold a store, as it has no hard links ({error.strerror}): "
                "use a folder on another one (ext4, XFS, NFS), or s3://bucket/prefix"
            ) from error

    def _files(self, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yields (key, stat result) of the regular files under a folder, except for names that are not UTF-8."""
        for key, entry in self._entries(prefix):
            if (status := _regular_file_status(entry)) is not None:
                yield key, status

    def _entries(
        self, prefix: str, skips: Callable[[str], bool] = lambda folder: False
    ) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yields (key, entry) of what is no folder under a folder, except for names that are not UTF-8.

        Args:
            prefix: The folder.
            skips: Returns whether the scan skips a folder.
        """
        folders = [prefix.rstrip("/")]
        while folders:
            folder = folders.pop()
            if skips(folder):
                continue
            try:
                entries = builtins.list(os.scandir(self.local_path(folder)))
            except OSError as error:
                _raise_unless_gone(error)
                continue
            for entry in entries:
                if is_text(entry.name):
                    key = f"{folder}/{entry.name}" if folder else entry.name
                    if not entry.is_dir():
                        yield key, entry
                    elif entry.name != TEMPORARY and not entry.is_symlink():
                        folders.append(key)

    def _remove_empty_folders(self, path: Path) -> None:
        """Removes empty parent folders of a file, except for `.tmp` and the store's root."""
        with contextlib.suppress(OSError):
            for folder in path.parents:
                if folder in (self.root, self.root / TEMPORARY):
                    break
                folder.rmdir()


@contextlib.contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Converts a disk or permission error to a one-line StorageError that names the error's file, otherwise `path`."""
    try:
        yield
    except OSError as error:
        if problem := describe_os_error(error, path):
            raise StorageError(problem) from error
        raise


def describe_os_error(error: OSError, path: Path | str) -> str | None:
    """Describes in one line an error that a user can fix (disk, permissions, limits); None for other errors.

    Args:
        error: The error; the line names its file.
        path: Names the place if the error has no file.
    """
    file = error.filename
    if error.errno in _NO_SPACE and error.filename2 is not None:
        file = error.filename2  # an error of a copy names the source first
    name = printable(os.fsdecode(file) if isinstance(file, str | bytes) else str(path))
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _NO_SPACE:
        return f"{name}: {reason}: free some space and run the same command again; what is committed is kept"
    if error.errno in _NOT_WRITABLE:
        return f"{name}: {reason}: check the path and its permissions"
    if error.errno == errno.ENOENT and Path(name).parent.name == TEMPORARY:
        return (
            f"{name}: {reason}: this temporary file was removed, or the store was moved: put the store back, and run "
            "the same command again"
        )
    if error.errno == errno.EXDEV:
        return f"{name}: the store's folders are on several file systems: keep the whole store on one"
    if error.errno in (errno.ESTALE, errno.EIO, errno.EINTR):
        return f"{name}: {reason}: check the disk or the network file system, then run the same command again"
    if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP):
        return (
            f"{name}: {reason}: this file system cannot hold a store; use a folder on another one (ext4, XFS, NFS), "
            "or s3://bucket/prefix"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{name}: {reason}: raise the limit (ulimit -n)"
    return None


def is_text(name: str) -> bool:
    """Returns whether a file name is valid UTF-8; Python decodes others to surrogates, which cannot be printed."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _make_folder(folder: Path) -> None:
    """Makes a folder and its parents; retries if another process removes an empty one. Raises InputError, OSError."""
    for _ in range(ATTEMPTS):
        try:
            return folder.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError:
            continue
        except FileExistsError as error:
            if os.path.lexists(folder) and not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
    raise InputError(f"{folder}: this folder cannot be made: {os.strerror(errno.ENOENT)}")


def _regular_file_status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Returns the stat result of a regular file; None for anything else, or if another process has removed it."""
    try:
        status = entry.stat()
    except OSError as error:
        _raise_unless_gone(error)
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _raise_unless_gone(error: OSError) -> None:
    """Re-raises an error of a folder scan, unless it means that another process removed the file or folder."""
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        raise error


def _open_without_links(path: str, flags: int) -> int:
    """Opens a file of a known name; a link in its place, which another user may have left, is an error."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
