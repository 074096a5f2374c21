"""The files of a part: read into memory before the part is ready, and checked while it serves."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.store.store import Store

BLOCK = 8 << 20  # bytes that one read reads


class PartFiles:
    """The files of one release that a part reads.

    Args:
        store: The store.
        files: Artifacts and their files, in the order in which `read` reads them: the ones that searches use most
            first.
    """

    def __init__(self, store: Store, files: Iterable[tuple[Artifact | Draft, ArtifactPart]]):
        self._files = [(artifact, part) for artifact, part in files]
        paths = [store.storage.local_path(f"{artifact.key}/{part.file}") for artifact, part in self._files]
        self._paths = [path for path in paths if path is not None]
        self._statuses = [_status(path) for path in self._paths]

    def check(self) -> None:
        """Checks that the files of a local store exist and are unchanged; a file whose status changed is hashed again.

        Files that a node has fetched from S3 stay open or mapped, and are not checked.

        Raises:
            InputError: If a file is missing.
            CorruptError: If the bytes of a file differ from the committed ones.
        """
        for number, path in enumerate(self._paths):
            status = _status(path)
            if status is None or status != self._statuses[number]:
                artifact, part = self._files[number]
                artifact.local_path(part)
                self._statuses[number] = status

    def read(self, max_bytes: int, max_seconds: float, paths_read: set[Path]) -> int:
        """Reads files that have not been read before, so that the operating system caches them.

        Args:
            max_bytes: Maximum bytes to read.
            max_seconds: Maximum time to spend.
            paths_read: Files that were read before, which are skipped; this call adds the files that it reads.

        Returns:
            Bytes read.
        """
        ends, size_bytes = time.monotonic() + max_seconds, 0
        buffer = bytearray(BLOCK)
        for artifact, part in self._files:
            path = artifact.local_path(part)
            if path in paths_read:
                continue
            with open(path, "rb", buffering=0) as file:
                while size_bytes < max_bytes and time.monotonic() < ends and (size := file.readinto(buffer)):
                    size_bytes += size
            paths_read.add(path)
        return size_bytes


def _status(path: Path) -> tuple[int, int, int, int] | None:
    """Returns status values that change when a file is replaced or written; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
