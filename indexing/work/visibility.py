"""Checks that the nodes of a cluster see the folder of the driver's store."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from riptide.base.errors import InputError, StorageError
from riptide.indexing.storage.storage import TEMPORARY
from riptide.indexing.store.store import Store
from riptide.indexing.work.polling import call_repeatedly

RENEWAL_S = 300.0  # seconds between two renewals of a marker, as `gc` deletes temporary files after an hour
CONTENT = b"riptide"


@dataclass(frozen=True)
class StoreMarker:
    """A marker file with a random name, which the driver keeps in the store while workers may open.

    A folder with the path of the store is not enough: a worker would commit its parts to a disk of its node.

    Attributes:
        store: The store, a folder.
        key: The key of the file.
    """

    store: Store
    key: str

    def is_visible(self) -> bool:
        """Returns whether this process sees the marker file."""
        return self.store.storage.size(self.key) is not None

    def check(self, node: str = "this node") -> None:
        """Raises StorageError if this process does not see the store. node: name of its node for the message."""
        if not self.is_visible():
            raise StorageError(self.describe_blind(node))

    def describe_blind(self, node: str) -> str:
        """Returns the error message for a node that does not see the store."""
        return (
            f"{node} does not see the store {self.store.url}: put it on a file system that all nodes mount at this "
            "path, or on S3 (s3://bucket/prefix)"
        )

    def renew(self) -> None:
        """Sets the time of the marker file to now; writes the file again if it was deleted."""
        with contextlib.suppress(InputError, OSError):  # if the storage keeps failing, the work itself fails
            if not self.store.storage.touch_if_equal(self.key, CONTENT):
                self.store.storage.put(self.key, CONTENT)


@contextlib.contextmanager
def mark_store(store: Store | None) -> Iterator[StoreMarker | None]:
    """Keeps a marker file in a store and renews it within the block.

    Args:
        store: The store.

    Yields:
        The marker; None if there is nothing to check: without a store, and for one on S3. A store that this process
        cannot write to has no marker either, so that jobs that only read it run.
    """
    marker = StoreMarker(store, f"{TEMPORARY}/visible-{uuid.uuid4().hex}") if store else None
    if marker is None or marker.store.storage.local_path(marker.key) is None:
        yield None
        return
    try:
        marker.store.storage.put(marker.key, CONTENT)
    except InputError:
        yield None
        return
    try:
        with call_repeatedly(marker.renew, RENEWAL_S):
            yield marker
    finally:
        with contextlib.suppress(OSError):
            marker.store.storage.delete(marker.key)
