"""Lists the files of a folder, local or on S3."""

from __future__ import annotations

import os

import pyarrow.fs as pafs

from indexing.files.raw import check_path, filesystem_of, refuse_irregular, unreadable
from retriever.errors import InputError


def list_files(path: str) -> tuple[str, list[str] | None]:
    """Returns a path and the files of its folder.

    Args:
        path: A folder or a file, local or s3://.

    Returns:
        The path, absolute because workers may have another working directory; and the names of the files of the folder
        and of its subfolder qrels ("qrels/NAME"), sorted. None if the path is a file.

    Raises:
        InputError: If nothing is there, or if it cannot be read.
    """
    check_path(path)
    path = path.rstrip("/") if path.startswith("s3://") else os.path.abspath(path)
    filesystem, key = filesystem_of(path)
    try:
        info = filesystem.get_file_info(key)
        if info.type == pafs.FileType.NotFound:
            raise InputError(
                f"{path}: found nothing, expected a folder or a file with a corpus or queries; check the path"
            )
        if info.type == pafs.FileType.File:
            return path, None
        if not path.startswith("s3://"):
            refuse_irregular(path)
            return path, _local_names(path)
        below = filesystem.get_file_info(pafs.FileSelector(key))
        below += filesystem.get_file_info(pafs.FileSelector(f"{key}/qrels", allow_not_found=True))
    except OSError as error:
        raise unreadable(path, error) from None
    return path, sorted(entry.path[len(key) :].lstrip("/") for entry in below if entry.type == pafs.FileType.File)


def is_file(path: str) -> bool:
    """Returns whether a path is that of a file."""
    filesystem, key = filesystem_of(path)
    return bool(filesystem.get_file_info(key).type == pafs.FileType.File)


def _local_names(folder: str) -> list[str]:
    """Returns the regular files of a local folder and of its qrels/. pyarrow fails if a name is not UTF-8."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_file()]
    if os.path.isdir(f"{folder}/qrels"):
        with os.scandir(f"{folder}/qrels") as entries:
            names += [f"qrels/{entry.name}" for entry in entries if entry.is_file()]
    return sorted(names)
