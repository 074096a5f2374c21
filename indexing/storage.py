"""Where bytes live: a local folder or an S3 bucket, behind a few operations that commit atomically."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from retriever.errors import InputError

TEMPORARY = ".tmp"  # files being written to a local store; never listed, cleared by `gc`


class Storage(Protocol):
    """Keys are relative paths with '/'. A key that exists holds all of its bytes: writes are atomic."""

    url: str

    def read(self, key: str) -> bytes:
        """The bytes of `key`. Raises FileNotFoundError."""

    def size(self, key: str) -> int | None:
        """Bytes of `key`, None where there is none."""

    def sha256(self, key: str) -> str:
        """sha256 (hex) of what is stored under `key`, streamed. Raises FileNotFoundError."""

    def fetch(self, key: str, path: Path) -> None:
        """Copy `key` to the local file `path`. Raises FileNotFoundError."""

    def put(self, key: str, source: Path | bytes) -> None:
        """Move a local file, or write bytes, to `key`, whole or not at all; one that is there is replaced."""

    def put_new(self, key: str, data: bytes) -> bool:
        """Write a small object unless `key` exists: False when somebody was first."""

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """(key, bytes) of all that lies under the folder `prefix`, in the order of the keys."""

    def empty(self) -> bool:
        """Whether nothing is there at all."""

    def delete(self, key: str) -> None:
        """Remove `key`; nothing happens where there is none."""

    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        """Bytes and version tag of a mutable object, None where there is none."""

    def swap(self, key: str, data: bytes, tag: str | None) -> bool:
        """Replace a mutable object if its tag is still `tag` (None: if there is none): False when it is not."""

    def scratch(self, suffix: str = "") -> Path:
        """A path for a new temporary file from which `put` is cheap."""


class LocalStorage:
    """A folder. Commit: temporary file, fsync, then rename or (put_new) link, which fails where the name exists."""

    def __init__(self, root: str):
        self.root = Path(root).expanduser().absolute()
        self.url = str(self.root)

    def path(self, key: str) -> Path:
        return self.root / key

    def read(self, key: str) -> bytes:
        return self.path(key).read_bytes()

    def size(self, key: str) -> int | None:
        try:
            return self.path(key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sha256(self, key: str) -> str:
        with open(self.path(key), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def fetch(self, key: str, path: Path) -> None:
        shutil.copyfile(self.path(key), path)

    def put(self, key: str, source: Path | bytes) -> None:
        target = self.path(key)
        path = self._write_temporary(source, target) if isinstance(source, bytes) else source
        with full_disk(target):
            _sync(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
            _sync(target.parent)

    def put_new(self, key: str, data: bytes) -> bool:
        target = self.path(key)
        temporary = self._write_temporary(data, target)
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        _sync(target.parent)
        return True

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        found = []
        for folder, subfolders, files in os.walk(self.path(prefix)):
            subfolders[:] = [subfolder for subfolder in subfolders if subfolder != TEMPORARY]
            for file in files:
                path = Path(folder) / file
                with contextlib.suppress(FileNotFoundError):
                    found.append((path.relative_to(self.root).as_posix(), path.stat().st_size))
        yield from sorted(found)

    def empty(self) -> bool:
        return not self.root.is_dir() or not any(entry.name != TEMPORARY for entry in self.root.iterdir())

    def delete(self, key: str) -> None:
        path = self.path(key)
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a folder that is not empty stays
            for folder in path.parents:
                if folder == self.root:
                    break
                folder.rmdir()

    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        try:
            data = self.read(key)
        except FileNotFoundError:
            return None
        return data, hashlib.sha256(data).hexdigest()

    def swap(self, key: str, data: bytes, tag: str | None) -> bool:
        target = self.path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.parent / f".{target.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            current = self.read_tagged(key)
            if (current[1] if current else None) != tag:
                return False
            self.put(key, data)
        return True

    def scratch(self, suffix: str = "") -> Path:
        folder = self.root / TEMPORARY
        with full_disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{uuid.uuid4().hex}{suffix}"

    def _write_temporary(self, data: bytes, target: Path) -> Path:
        temporary = self.scratch()
        try:
            with full_disk(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_bytes(data)
                _sync(temporary)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary


@contextlib.contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Turn 'no space left' and 'read-only' into one line that names the place: the error's own, else `path`."""
    try:
        yield
    except OSError as error:
        path = error.filename or path
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise InputError(
                f"{path}: {os.strerror(error.errno)}: free some space and run the same command again; "
                "what is committed is kept"
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR):
            raise InputError(f"{path}: cannot be written: {os.strerror(error.errno)}") from error
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
