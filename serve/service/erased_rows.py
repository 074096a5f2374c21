"""Tracks passages that are erased while a server runs, so that answers leave them out.

An open release holds files and memory of the time at which it was opened, also of passages that an erasure removes from
the store later.
"""

from __future__ import annotations

import numpy as np

from riptide.indexing.erasure.receipts import Erasure, erasures
from riptide.indexing.store.store import Store
from riptide.serve.release.release import Release

NO_ROWS = np.empty(0, np.int64)


class ErasedRows:
    """Tracks the erasures of a store, complete ones and that in progress.

    Args:
        store: The store.
    """

    def __init__(self, store: Store):
        self._store = store
        self._erasures: tuple[Erasure, ...] = ()
        self._rows: dict[str, np.ndarray] = {}  # by id of a release

    def refresh(self) -> bool:
        """Reads the erasures of the store, and returns whether there are any. Blocks.

        Raises:
            InputError, OSError: If they cannot be read.
        """
        newest = erasures(self._store, self._erasures)
        if newest != self._erasures:
            self._erasures, self._rows = newest, {}
        return bool(newest)

    def rows_of(self, release: Release) -> np.ndarray:
        """Returns the erased rows of the corpus of a release: int64, ascending. Thread-safe."""
        rows_by_release = self._rows
        if release.id not in rows_by_release:
            rows = [np.array(each.rows, np.int64) for each in self._erasures if each.is_of(release.fingerprints)]
            rows_by_release[release.id] = np.unique(np.concatenate([NO_ROWS, *rows]))
        return rows_by_release[release.id]
