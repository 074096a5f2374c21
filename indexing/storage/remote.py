"""The base class of the storage backends for clouds: keys below a prefix, and the probe of conditional writes."""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from riptide.base.errors import InputError, StorageError
from riptide.indexing.storage.storage import TEMPORARY, Storage
from riptide.process.temporary_folders import TemporaryFolder
from riptide.telemetry.phases import measured

DELETERS = 16  # objects that are removed at the same time
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Services and buckets, with their addresses, whose conditional writes a probe of this process has found to work.
PROBED: set[tuple[str | None, ...]] = set()


class RemoteStorage(Storage):
    """The base class of the backends for a bucket and prefix in a cloud.

    A subclass makes `put_new` and `compare_and_swap` conditional writes of its service, and has `page`.

    Attributes:
        url: The address, without a slash at its end.
        scheme: What is before `://` in it.
        bucket: The name of the bucket.
        prefix: The folder of the store in the bucket; "": the whole bucket.
        CONDITIONS: The names of these conditions, for an error message.
        REMEDY: What to use instead of a server that ignores them.
        ENDPOINTS: The environment variables that may name another address of the service.

    Args:
        url: `SCHEME://bucket/prefix`.
    """

    CONDITIONS: str
    REMEDY: str
    ENDPOINTS: tuple[str, ...]

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.scheme, _, place = url.partition("://")
        self.bucket, _, self.prefix = place.rstrip("/").partition("/")
        if not self.bucket:
            raise InputError(f"store {url}: expected {self.scheme}://bucket/prefix")
        folders = self.prefix.split("/") if self.prefix else []
        if any(folder in ("", ".", "..") or _CONTROL.search(folder) for folder in folders):
            raise InputError(f"store {url!r}: expected a prefix of names between slashes, none empty or made of dots")

    def key(self, key: str) -> str:
        """Returns the name in the bucket of an object of the store."""
        return f"{self.prefix}/{key}" if self.prefix else key

    def local_path(self, key: str) -> None:
        return None

    @contextlib.contextmanager
    def temporary_file(self, suffix: str = "") -> Iterator[Path]:
        with TemporaryFolder("write") as folder:
            yield folder / f"file{suffix}"

    def delete_all(self, keys: Sequence[str]) -> None:
        with ThreadPoolExecutor(DELETERS) as threads:
            deque(threads.map(self.delete, keys), maxlen=0)

    @measured("commit")
    def touch_if_equal(self, key: str, data: bytes) -> bool:
        """Writes the same bytes again to renew the object's time; returns False if the object differs from `data`."""
        existing = self.read_tagged(key)
        return existing is not None and existing[0] == data and self.compare_and_swap(key, data, existing[1])

    def page(self, prefix: str, after: str) -> tuple[list[tuple[str, float]], bool]:
        """Lists a page of the objects under the folder `prefix` whose keys follow `after`.

        Returns:
            (key, time of its last write) of each object, ordered by key, and whether it is the last page.
        """
        raise NotImplementedError

    @measured("read")
    def find(self, prefix: str, names: Collection[str]) -> dict[str, float]:
        times: dict[str, float] = {}
        after = ""
        while True:
            entries, is_last = self.page(prefix, after)
            times |= {key: written for key, written in entries if key.rpartition("/")[2] in names}
            if is_last or not entries:
                return times
            after = skip_numbered_parts(entries[-1][0])

    def require_conditional_writes(self) -> None:
        """Writes an object, writes it again with each condition, and removes it: once for a bucket in this process."""
        place = (self.scheme, self.bucket, *map(os.environ.get, self.ENDPOINTS))
        if place in PROBED:
            return
        key = f"{TEMPORARY}/probe-{uuid.uuid4().hex}"
        self.put_new(key, b"probe")
        try:
            is_ignored = self.put_new(key, b"probe") or self.compare_and_swap(key, b"probe", self.wrong_tag())
        finally:
            with contextlib.suppress(StorageError):  # a writer may lack the right to delete; `gc` removes the object
                self.delete(key)
        if is_ignored:
            raise StorageError(
                f"{self.url}: its server ignores the conditions {self.CONDITIONS} of writes, without which "
                f"two commands could overwrite the work of each other: use {self.REMEDY} or a server that honours them"
            )
        PROBED.add(place)

    def abandoned_writes(self, older_than: float) -> list[tuple[str, int]]:
        """Returns the objects of probes whose process was killed before it removed them."""
        latest = time.time() - older_than
        return [(key, 0) for key, written_s in self.write_times(TEMPORARY).items() if written_s < latest]

    def wrong_tag(self) -> str:
        """Returns a well-formed version tag that no object has."""
        return '"0"'


def skip_numbered_parts(key: str) -> str:
    """Returns the key after which a listing continues if it needs no further part of the kind of `key`.

    A part is PREFIX-00000…, so what follows all of its kind is greater than `PREFIX-:`. Other keys are returned as
    they are.
    """
    numbered = re.fullmatch(r"(.+/[^/]+/[a-z]+-)[0-9]{5}[^/]*", key)
    return f"{numbered[1]}:" if numbered else key
