"""Whether the store has newer artifacts than the live release, for `/v1/info`, a metric, the page and the log."""

from __future__ import annotations

import logging
import time

from riptide.base.errors import InputError
from riptide.indexing.store.store import Store
from riptide.serve.release.release import Release
from riptide.serve.release.renewal import newer_artifacts

log = logging.getLogger("riptide.serve")

INTERVAL_S = 10.0  # seconds between two looks at the store


class Staleness:
    """Tracks the artifacts of a store that are newer than the live release.

    Args:
        store: The store.
    """

    def __init__(self, store: Store):
        self._store = store
        self._last: tuple[str, list[str] | None] = ("", None)  # id of a release, and its newer artifacts
        self._next_look = 0.0
        self._is_failing = False
        self._is_older = False  # whether the last successful look found newer artifacts

    def newer_artifacts(self, release: Release) -> list[str] | None:
        """Returns the keys of artifacts that are newer than a release; None before the first successful look for it."""
        id, keys = self._last
        return keys if id == release.id else None

    def look(self, release: Release) -> None:
        """Looks for newer artifacts, unless the last look for this release is less than INTERVAL_S old. Blocks.

        Logs when they appear, and the first of several errors of the store.
        """
        if release.id == self._last[0] and time.monotonic() < self._next_look:
            return
        keys = self.newer_artifacts(release)
        try:
            keys = newer_artifacts(self._store, release)
        except (InputError, OSError) as error:
            if not self._is_failing:
                log.warning("%s cannot be read, so newer artifacts are not noticed: %s", self._store.url, error)
            self._is_failing = True
        else:
            self._is_failing = False
        if keys and not self._is_older:
            log.warning(
                "release %s is older than %s, which also has %s: PUT /v1/release, or start the server again, once all "
                "of its artifacts have grown",
                release.id,
                self._store.url,
                ", ".join(keys),
            )
        if keys is not None:
            self._is_older = bool(keys)
        self._last = release.id, keys
        self._next_look = time.monotonic() + INTERVAL_S
