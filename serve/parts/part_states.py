"""The state of each part of a service, which `/readyz` reports."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from riptide.serve.release.release import Release

log = logging.getLogger("riptide.serve")

ENCODER, PASSAGES, RERANKER = "encoder", "passages", "reranker"  # the parts that search no sources


class PartStates:
    """Records the failed parts of a service and the reasons. Thread-safe."""

    def __init__(self) -> None:
        self._failures: dict[str, str] = {}
        self._lock = threading.Lock()

    def mark_failed(self, part: str, reason: str, detail: str = "") -> None:
        """Marks a part as failed, until `mark_working` is called for it."""
        with self._lock:
            previous = self._failures.get(part)
            self._failures[part] = reason
        if previous is None:
            log.error("part %s cannot be used: %s%s", part, reason, f" ({detail})" if detail else "")

    def mark_working(self, part: str) -> None:
        """Marks a part as working, if it had failed."""
        with self._lock:
            previous = self._failures.pop(part, None)
        if previous is not None:
            log.warning("part %s can be used again", part)

    def failures(self, parts: Iterable[str]) -> dict[str, str]:
        """Returns {part: reason} of the failed parts among the given ones."""
        with self._lock:
            return {part: self._failures[part] for part in parts if part in self._failures}

    def report(self, parts: Iterable[str], otherwise: str) -> dict[str, dict[str, str]]:
        """Returns {part: {"state": ..., "reason": ...}}; only failed parts have a reason.

        Args:
            parts: Names of the parts.
            otherwise: State of the parts that have not failed.
        """
        names = list(parts)
        failures = self.failures(names)
        return {
            name: {"state": "failed", "reason": failures[name]} if name in failures else {"state": otherwise}
            for name in names
        }


def parts_of(release: Release) -> list[str]:
    """Returns the names of the parts that a release uses."""
    searches = dict.fromkeys(source.kind.online for task in release.tasks for source in task.served_sources())
    has_encoder = release.encoder is not None or any(online.encodes for online in searches)
    names = [*([ENCODER] if has_encoder else []), *(online.name for online in searches), PASSAGES]
    return names + ([RERANKER] if release.reranker is not None else [])
