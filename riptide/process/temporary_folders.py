"""Temporary folders that a later process removes if their process was killed.

The process that makes a folder holds a lock on it, which the kernel drops when the process ends for any reason. A
process id alone would not do: containers may share a folder for temporary files, but not their process ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import shutil
import socket
import tempfile
import zlib
from pathlib import Path

PREFIX = "riptide-"
# The node is in the name, as the locks of some file systems hold on one node only. The suffix marks folders that have a
# lock: those of earlier versions have none and are never removed.
SUFFIX = f"-{zlib.crc32(socket.gethostname().encode()):08x}.tmp"
NAME = re.compile(rf"{PREFIX}[a-z-]+-[a-z0-9_]{{8}}{re.escape(SUFFIX)}")


class TemporaryFolder:
    """A new folder for temporary files of this process, which `close` or the end of a `with` block removes.

    The first one of a process also removes folders of this user whose processes have ended without removing them.

    Args:
        purpose: A word that is part of the folder's name.

    Attributes:
        path: The folder.
    """

    def __init__(self, purpose: str):
        remove_abandoned(tempfile.gettempdir())
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-", suffix=SUFFIX))
            self._descriptor = _lock(self.path, wait=True)
            if self._descriptor is not None:  # otherwise a process that removes abandoned folders was faster
                return

    def close(self) -> None:
        """Removes the folder and its files, as far as possible, and drops the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exception: object) -> None:
        self.close()


@functools.cache
def remove_abandoned(parent: str) -> None:
    """Removes this user's folders of this node in `parent` whose processes have ended; once per process."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if not NAME.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    descriptor = _lock(Path(entry.path), wait=False)
                    if descriptor is not None:
                        shutil.rmtree(entry.path, ignore_errors=True)
                        os.close(descriptor)


def _lock(folder: Path, *, wait: bool) -> int | None:
    """Locks a folder; returns the file descriptor that holds the lock.

    Args:
        folder: The folder.
        wait: Wait for a process that holds the lock, and do without the lock where the file system has none.

    Returns:
        None if the folder does not exist any more when the lock is held.

    Raises:
        OSError: If it cannot be opened, or, without `wait`, if a process holds the lock or there are no locks.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        with contextlib.suppress(*[OSError] * wait):
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            return descriptor
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
