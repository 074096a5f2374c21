"""Lists the files of a folder, local or in a cloud, and computes the identity of a file from its content."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.fs as pafs

from riptide.base.errors import InputError
from riptide.indexing.files.raw import (
    check_path,
    filesystem_of,
    is_remote,
    open_input,
    refuse_special_files,
    unreadable_error,
)


class FolderFile(NamedTuple):
    """A file in a folder or one of its subfolders.

    Attributes:
        name: Its path within the folder.
        size: Its size in bytes.
        unread: "" for a file to read; "link" for a link that leads out of the folder, to a folder or to nothing;
            "special" for a pipe, a socket or a device.
        changed_ns: The time of the last change in nanoseconds since 1970, of a regular file to which a path of a local
            folder leads, also by a link; otherwise None.
    """

    name: str
    size: int
    unread: str = ""
    changed_ns: int | None = None


_SOURCE = "a folder or a file with a corpus or queries"


def list_files(path: str, expected: str = _SOURCE) -> tuple[str, list[str] | None]:
    """Lists the files of a folder and its subfolder qrels, or recognises a single file.

    Args:
        path: A folder or a file, local or in a cloud.
        expected: What is expected there, for the error.

    Returns:
        The path, absolute because workers may have another working directory; and the names of the files of the folder
        and of its subfolder qrels ("qrels/NAME"), sorted. None if the path is a file.

    Raises:
        InputError: If nothing is there, or if it cannot be read.
    """
    check_path(path)
    path = path.rstrip("/") if is_remote(path) else os.path.abspath(path)
    filesystem, key = filesystem_of(path)
    try:
        info = filesystem.get_file_info(key)
        if info.type == pafs.FileType.NotFound:
            raise InputError(f"{path}: found nothing, expected {expected}; check the path")
        if info.type == pafs.FileType.File:
            return path, None
        if not is_remote(path):
            refuse_special_files(path)
            return path, _local_names(path)
        below = filesystem.get_file_info(pafs.FileSelector(key))
        below += filesystem.get_file_info(pafs.FileSelector(f"{key}/qrels", allow_not_found=True))
    except OSError as error:
        raise unreadable_error(path, error) from None
    return path, sorted(entry.path[len(key) :].lstrip("/") for entry in below if entry.type == pafs.FileType.File)


def walk_files(folder: str) -> list[FolderFile]:
    """Lists the files of a folder and of all its subfolders.

    Args:
        folder: A folder, local or in a cloud, as `list_files` returns it.

    Returns:
        The files, sorted by path.

    Raises:
        InputError: If it is not a folder, or if it cannot be read.
    """
    filesystem, key = filesystem_of(folder)
    try:
        if filesystem.get_file_info(key).type == pafs.FileType.File:
            raise InputError(f"{folder}: found a file, expected a folder of documents; name its folder")
        if not is_remote(folder):
            return sorted(_walk_local(folder))
        below = filesystem.get_file_info(pafs.FileSelector(key, recursive=True))
    except OSError as error:
        raise unreadable_error(folder, error) from None
    return sorted(
        FolderFile(entry.path[len(key) :].lstrip("/"), entry.size)
        for entry in below
        if entry.type == pafs.FileType.File
    )


FileStates = Mapping[str, tuple[int, int]]
"""The size in bytes and the time of the last change, in nanoseconds since 1970, of each file of a source, by name."""


def file_states(path: str) -> FileStates:
    """Returns the states of the files of a local folder and its subfolders, without hidden ones, or of a single file.

    Links to files are followed, links to folders are not.

    Raises:
        InputError: If the path is missing or cannot be read, or if the folder has no files.
    """
    try:
        refuse_special_files(path)
        if not os.path.isdir(path):
            status = os.stat(path)
            return {"": (status.st_size, status.st_mtime_ns)}
        files = list(_walk_local(path, with_hidden=False))
    except OSError as error:
        raise unreadable_error(path, error) from None
    states = {file.name: (file.size, file.changed_ns) for file in files if file.changed_ns is not None}
    if not states:
        raise InputError(f"{path}: found no files, expected those of a corpus; check that the folder is mounted")
    return states


def file_identity(file: str) -> dict[str, Any]:
    """Returns the name, size and hash of three samples of a raw file, by which a resume detects changes."""
    with open_input(file) as source:
        size = source.size()
        digest = hashlib.sha256()
        for offset in (0, size // 2, max(0, size - (1 << 20))):
            source.seek(offset)
            digest.update(source.read(1 << 20))
    return {"file": Path(file).name, "bytes": size, "samples": digest.hexdigest()}


def is_file(path: str) -> bool:
    """Returns whether a file exists at a path, local or in a cloud."""
    filesystem, key = filesystem_of(path)
    return bool(filesystem.get_file_info(key).type == pafs.FileType.File)


def _local_names(folder: str) -> list[str]:
    """Lists the regular files of a local folder and its qrels/. Not by pyarrow, which fails for names not in UTF-8."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if os.path.isfile(entry.path)]
    if os.path.isdir(f"{folder}/qrels"):
        with os.scandir(f"{folder}/qrels") as entries:
            names += [f"qrels/{entry.name}" for entry in entries if os.path.isfile(entry.path)]
    return sorted(names)


def _walk_local(folder: str, *, with_hidden: bool = True) -> Iterator[FolderFile]:
    """Yields the files below a local folder. Links to folders are not followed, which avoids endless loops."""
    root = os.path.realpath(folder)
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(f"{folder}/{prefix}") as entries:
            for entry in entries:
                name = f"{prefix}{entry.name}"
                if entry.name.startswith(".") and not with_hidden:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{name}/")
                    continue
                status = None
                with contextlib.suppress(OSError):  # a link to nothing, or a file that was removed since it was listed
                    status = entry.stat()
                size, changed_ns = 0, None
                if status is not None and stat.S_ISREG(status.st_mode):
                    size, changed_ns = status.st_size, status.st_mtime_ns
                if entry.is_symlink() and not _links_to_file_within(root, entry.path):
                    yield FolderFile(name, size, "link", changed_ns)
                elif changed_ns is not None:
                    yield FolderFile(name, size, changed_ns=changed_ns)
                elif status is not None:
                    yield FolderFile(name, 0, "special")


def _links_to_file_within(root: str, link: str) -> bool:
    """Returns whether a link leads to a regular file below `root`, a path without links."""
    target = os.path.realpath(link)
    return target.startswith(root.rstrip("/") + "/") and os.path.isfile(target)
