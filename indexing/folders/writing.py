"""Writes a folder of files in one step, and keeps one that already exists."""

from __future__ import annotations

import filecmp
import shutil
import tempfile
from pathlib import Path

from retriever.errors import InputError


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
        expected, actual = _files(source), _files(target)
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


def _files(folder: Path) -> set[str]:
    """The paths of all files below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
