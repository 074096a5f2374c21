"""Finds and removes unreferenced releases, and prompts that arrived over HTTP, once they are older than GRACE_S.

A release is saved before it is made live, which may take minutes, and any server of the store may be about to do that.
So nothing is removed until GRACE_S after its last object was written (saving a release again counts), by the times of
the storage. A removal looks again right before and right after: what was made live meanwhile stays, or is put back.
The server does the same from its side after the swap, so that one of the two restores what the other needs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from riptide.indexing.store.live_release import read_live_record
from riptide.indexing.store.sealed_json import MANIFEST
from riptide.indexing.store.store import Store

GRACE_S = 6 * 3600.0
GIVEN = "given"  # the key that marks the configuration of a prompt that arrived over HTTP


def newest_releases(store: Store) -> list[str]:
    """Returns the ids of the complete releases, the last saved one first."""
    saved = _last_write_times(store, "releases")
    complete = set(store.keys("releases"))
    keys = sorted((key for key in saved if key in complete), key=lambda key: (-saved[key], key))
    return [key.removeprefix("releases/") for key in keys]


def expired_releases(store: Store) -> list[str]:
    """Returns the keys of releases, complete or not, older than GRACE_S and not in `serving/current.json`.

    The list is empty if the store has no `serving/current.json`: if it was lost, it is made again from the releases.

    Raises:
        CorruptError: If `serving/current.json` is damaged, as any release may be the live one.
    """
    current = read_live_record(store.storage)
    if current is None:
        return []
    saved = _last_write_times(store, "releases")
    return sorted(key for key in saved.keys() - current.named if saved[key] < time.time() - GRACE_S)


def expired_prompts(store: Store, releases: Collection[str] = (), among: Collection[str] | None = None) -> list[str]:
    """Returns the keys of prompts that arrived over HTTP, are older than GRACE_S and are no input of an artifact.

    Args:
        store: The store.
        releases: Keys of the releases that are about to be removed; they need no prompts.
        among: Only these keys of prompts; None: all.
    """
    written = _last_write_times(store, "prompts")
    old = [key for key in sorted(written) if written[key] < time.time() - GRACE_S and (among is None or key in among)]
    with ThreadPoolExecutor(16) as threads:
        over_http = [
            key for key, own in zip(old, threads.map(store.manifest, old), strict=True) if _came_over_http(own)
        ]
        if not over_http:
            return []
        others = sorted({*store.keys(), *store.incomplete_keys()} - set(releases) - set(over_http))
        manifests = list(threads.map(store.manifest, others))
    needed = {entry["artifact"] for manifest in manifests if manifest for entry in manifest["inputs"].values()}
    if None in manifests:  # an artifact with two damaged manifests may need any prompt
        return []
    return [key for key in over_http if key not in needed]


def remove_release(store: Store, key: str) -> list[tuple[str, int]]:
    """Removes an expired release; returns (key, size in bytes) of the files, [] if it has become needed."""
    return _remove_unless_needed(store, key, lambda: _may_be_live(store, key))


def remove_prompt(store: Store, key: str) -> list[tuple[str, int]]:
    """Removes an expired prompt; returns (key, size in bytes) of the files, [] if it has become needed."""
    return _remove_unless_needed(store, key, lambda: bool(store.dependents(key)))


def _remove_unless_needed(store: Store, key: str, is_needed: Callable[[], bool]) -> list[tuple[str, int]]:
    """Removes a small artifact, and restores it if `is_needed` returns true after the removal."""
    files = store.files_in_removal_order(key)
    contents: dict[str, bytes] = {}
    for file, _ in files:
        with contextlib.suppress(FileNotFoundError):  # another process is removing it too
            contents[file] = store.storage.read(file)
    if is_needed() or max(store.storage.write_times(key).values(), default=0.0) >= time.time() - GRACE_S:
        return []
    needed = True
    try:
        for file, _ in files:
            store.storage.delete(file)
        needed = is_needed()
    finally:
        if needed:
            for file, content in sorted(contents.items(), key=lambda entry: entry[0].endswith(f"/{MANIFEST}")):
                store.storage.put_new(file, content)
    return [] if needed else files


def _came_over_http(manifest: dict[str, Any] | None) -> bool:
    """Returns whether a prompt arrived over HTTP; False if it was trained, or if its manifests are damaged."""
    return manifest is not None and GIVEN in manifest["config"]


def _may_be_live(store: Store, key: str) -> bool:
    """Returns whether a release is live or a previous one; True if `serving/current.json` is missing."""
    current = read_live_record(store.storage)
    return current is None or key in current.named


def _last_write_times(store: Store, kind: str) -> dict[str, float]:
    """Returns the time of the last write to each artifact of a kind, by key, in seconds since 1970."""
    last: dict[str, float] = {}
    for file, written in store.storage.write_times(kind).items():
        key = "/".join(file.split("/")[:2])
        last[key] = max(last.get(key, 0.0), written)
    return last
