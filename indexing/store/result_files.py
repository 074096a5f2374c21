"""Writes result files or a result folder atomically."""

from __future__ import annotations

import contextlib
import errno
import filecmp
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from riptide.base.errors import InputError
from riptide.base.wording import Parameter


def write_folder(source: Path, target: Path, *, plan: bool = False) -> None:
    """Copies the files of a folder to `target`, which appears only when it is complete.

    A folder with the same files may exist already, so that a command can be repeated.

    Args:
        source: The folder with the files.
        target: The folder to make; folders above it are created.
        plan: Only check.

    Raises:
        InputError: If no folder can be written there, or if it exists and holds anything else.
    """
    if target.exists() and not target.is_dir():
        raise InputError(f"{target}: is there and is no folder: name another one")
    if target.exists() and any(target.iterdir()):
        expected, actual = _list_files(source), _list_files(target)
        _, different, failed = filecmp.cmpfiles(source, target, expected & actual, shallow=False)
        if expected != actual or different or failed:
            raise InputError(f"{target}: holds other files, and is kept: name another folder")
        return
    if plan:
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
            shutil.copytree(source, Path(temporary, target.name)).replace(target)
    except OSError as error:
        raise InputError(f"{target}: no folder can be written there: {error.strerror or error}") from error


def json_lines(rows: Iterable[Mapping[str, object]]) -> str:
    """Returns objects as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_files(contents: Sequence[tuple[str, str | bytes]], *, overwrite: bool = False) -> None:
    """Writes (path, content) pairs as files; writes none if one of them cannot be written.

    Args:
        contents: The path and the content of each file; text is written as UTF-8.
        overwrite: Replace files that have other content.

    Raises:
        InputError: As `atomic_files`.
    """
    with atomic_files([path for path, _ in contents], overwrite=overwrite) as files:
        for file, (_, content) in zip(files, contents, strict=True):
            file.write_bytes(content if isinstance(content, bytes) else content.encode())


@contextlib.contextmanager
def atomic_files(paths: Sequence[str], *, overwrite: bool = False) -> Iterator[list[Path]]:
    """Yields temporary files, which are renamed to `paths` at the end of the block, or removed after an exception.

    A file with the same content may exist already, so that a command can be repeated. If one of the files is refused,
    none is renamed.

    Args:
        paths: The files to make; their folders are created if necessary.
        overwrite: Replace files that have other content.

    Raises:
        InputError: If no file can be written there, if a file with other content exists, or if two paths are the same
            file.
    """
    targets = [result_path(path) for path in paths]
    for path, target in zip(paths, targets, strict=True):
        if targets.count(target) > 1:
            raise InputError(f"{path}: two results have this file; name another file for one of them")
    temporary: list[Path] = []
    try:
        for path, target in zip(paths, targets, strict=True):
            temporary.append(_new_file(path, target.parent))
        yield temporary
        equal = [
            target.exists() and filecmp.cmp(file, target, shallow=False)
            for target, file in zip(targets, temporary, strict=True)
        ]
        for path, target, is_equal in zip(paths, targets, equal, strict=True):
            if not overwrite and target.exists() and not is_equal:
                raise _taken_error(path, "a file with other content")
        for target, file, is_equal in zip(targets, temporary, equal, strict=True):
            if not is_equal:
                os.replace(file, target)
    finally:
        for file in temporary:
            file.unlink(missing_ok=True)


def _new_file(path: str, folder: Path) -> Path:
    """Makes an empty file of a random name in a folder of a result, in which others may have left links.

    Raises:
        InputError: If no file can be written there. path: the result, for the message.
    """
    file = folder / f".riptide-{secrets.token_hex(8)}"
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    except OSError as error:
        raise _folder_error(path, folder, error.strerror) from error
    return file


def _taken_error(path: str, content: str) -> InputError:
    """Returns the error for a file that exists. content: describes the existing file."""
    return InputError(
        f"{path}: {content} is there, and is kept: name another file, or give {Parameter('overwrite')} to replace it"
    )


def _folder_error(path: str, folder: Path, reason: str | None) -> InputError:
    """Returns the error for a file that cannot be written in a folder."""
    return InputError(f"{path}: no file can be written in {folder}: {reason}; name another file")


def check_result_file(path: str, *, overwrite: bool) -> None:
    """Raises InputError before the work for a path that `atomic_files` would refuse after it; creates nothing.

    Args:
        path: The file to make.
        overwrite: Whether a file may exist already.

    Raises:
        InputError: If no file can be written there, or if the file exists and is not to be replaced.
    """
    target = _checked_path(path)
    folder = next(folder for folder in target.parents if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        reason = os.strerror(errno.EACCES if folder.is_dir() else errno.ENOTDIR)
        raise _folder_error(path, target.parent, reason)
    if target.exists() and not overwrite:
        raise _taken_error(path, "a file")


def result_path(path: str) -> Path:
    """Creates the folder of a result file and returns the file's path with links resolved.

    Raises:
        InputError: If no file can be written there.
    """
    target = _checked_path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _folder_error(path, target.parent, error.strerror) from error
    return target


def _checked_path(path: str) -> Path:
    """Resolves links in the path of a result file. Raises InputError if it exists and is not a regular file."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"path {path!r}: expected the name of a file")
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise InputError(f"{path}: this is a folder; name a file")
    if target.exists() and not target.is_file():
        raise InputError(f"{path}: this is a device or a pipe, which a result file cannot replace; name a file")
    return target


def _list_files(folder: Path) -> set[str]:
    """Returns the paths of all files below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
