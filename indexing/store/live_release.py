"""Reads serving/current.json, a mutable object that names the live release and the previous ones.

It is replaced by compare-and-swap only, and contains its own sha256, as manifests do. Early versions wrote it without
the hash; such an object is read too, and the next swap replaces it by a sealed one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from riptide.base.wording import Command
from riptide.indexing.storage.cache import CorruptError
from riptide.indexing.storage.storage import Storage
from riptide.indexing.store.sealed_json import add_own_hash, check_own_hash

CURRENT = "serving/current.json"
_ID = re.compile(r"[0-9a-f]{16}")
_REMEDY = f"make a new release of what the store holds: the option renew of {Command('serve-search')}"


@dataclass(frozen=True)
class LiveRecord:
    """The content of `serving/current.json`: the ids of the live release and of the previous ones, newest first."""

    release: str
    before: tuple[str, ...]

    @property
    def named(self) -> set[str]:
        """The keys of the live release and of the previous ones."""
        return {f"releases/{id}" for id in (self.release, *self.before)}

    def document(self) -> bytes:
        """Returns the bytes of serving/current.json: the record as JSON, sealed with its hash."""
        return add_own_hash({"release": self.release, "before": list(self.before)})


def read_live_record(storage: Storage) -> LiveRecord | None:
    """Reads serving/current.json; returns None if no release was ever live. Raises CorruptError."""
    tagged = storage.read_tagged(CURRENT)
    return None if tagged is None else parse_live_record(storage, tagged[0])


def parse_live_record(storage: Storage, data: bytes) -> LiveRecord:
    """Parses the bytes of serving/current.json. Raises CorruptError, with a remedy, if they are damaged."""
    document = _read_document(data)
    if document is None:
        raise CorruptError(
            f"{storage.url}/{CURRENT}: {_describe_damage(data)}, so the live release is unknown; {_REMEDY}"
        )
    return LiveRecord(document["release"], tuple(document["before"]))


def unreadable_release_error(storage: Storage, id: str, error: CorruptError) -> CorruptError:
    """Returns the error for a live release that is missing or damaged."""
    return CorruptError(f"{storage.url}/{CURRENT} names releases/{id} as the live release: {error}; {_REMEDY}")


def _read_document(data: bytes) -> dict[str, Any] | None:
    """Decodes the JSON of serving/current.json, sealed or of an early unsealed version; None if it is damaged."""
    try:
        document = json.loads(data)
        if isinstance(document, dict) and "own_sha256" in document:
            document = check_own_hash(data, CURRENT)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.keys() != {"release", "before"}:
        return None
    ids = [document["release"], *document["before"]] if isinstance(document["before"], list) else [None]
    return document if all(isinstance(id, str) and _ID.fullmatch(id) for id in ids) else None


def _describe_damage(data: bytes) -> str:
    if not data.strip():
        return "the file is empty"
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return "the file is truncated or is not JSON"
    return "its bytes are not those that were written"
