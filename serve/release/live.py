"""The live release and the previous releases, which `serving/current.json` names.

It is changed only by compare-and-swap. Other servers of the store may change it at any moment.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from riptide.base.errors import InputError, StorageError
from riptide.indexing.maintenance.retention import (
    expired_prompts,
    expired_releases,
    newest_releases,
    remove_prompt,
    remove_release,
)
from riptide.indexing.storage.cache import CorruptError
from riptide.indexing.storage.storage import Storage
from riptide.indexing.store.live_release import CURRENT, LiveRecord, parse_live_record, unreadable_release_error
from riptide.indexing.store.sealed_json import MANIFEST
from riptide.indexing.store.store import Store
from riptide.serve.release.release import Release

log = logging.getLogger("riptide.serve")

KEPT = 10  # number of previous releases that current.json names, to which a server can switch back


def live_release_id(store: Store) -> tuple[str, str] | None:
    """Returns the id of the live release and the tag for compare-and-swap; None if no release was ever live.

    Raises:
        CorruptError: If `serving/current.json` is damaged; the message says how to make a new release.
    """
    tagged = store.storage.read_tagged(CURRENT)
    return None if tagged is None else (parse_live_record(store.storage, tagged[0]).release, tagged[1])


def read_live_release(store: Store) -> tuple[Release | None, str | None]:
    """Returns the live release and the tag for compare-and-swap; (None, None) if no release was ever live.

    Raises:
        CorruptError: If it is missing or damaged; the message says how to make a new release.
    """
    live = live_release_id(store)
    if live is None:
        return None, None
    try:
        return _load_release(store, live[0]), live[1]
    except CorruptError as error:
        raise unreadable_release_error(store.storage, live[0], error) from error


def release_to_repair_from(store: Store) -> tuple[Release | None, str | None]:
    """Returns the release from which a store is repaired, and the tag for replacing the live one with compare-and-swap.

    The release is the first that is neither missing nor damaged, in this order: the live one, the previous ones, all
    others from the newest to the oldest. None if there is no such release.
    """
    tagged = store.storage.read_tagged(CURRENT)
    if tagged is None:
        return None, None
    for id in dict.fromkeys([*_live_and_previous_ids(store, tagged[0]), *newest_releases(store)]):
        try:
            return _load_release(store, id), tagged[1]
        except CorruptError as error:
            log.warning("%s", error)
    return None, tagged[1]


def save_as_live(store: Store, release: Release, tag: str | None) -> bool:
    """Saves a release and makes it live; `current.json` also names the previous KEPT releases.

    Another server may remove the release, or one of its prompts that came over HTTP, at the same moment. Therefore both
    are checked again after the swap: a missing release is written again, and a missing prompt undoes the swap.

    Args:
        store: The store.
        release: The release. Its artifacts are in the store.
        tag: The tag that `live_release_id` returned when the release was made; None if no release was ever live.

    Returns:
        True if the release is live. False if another release became live since, or if an artifact of this one was
        removed: then make the release again.

    Raises:
        StorageError: If the store does not answer; the release may be live.
    """
    before = store.storage.read_tagged(CURRENT)
    if (before[1] if before else None) != tag or missing_artifacts(store, release.fingerprints):
        return False
    release.save(store)
    history = [id for id in (_live_and_previous_ids(store, before[0]) if before else ()) if id != release.id]
    document = LiveRecord(release.id, tuple(history[:KEPT])).document()
    if not _swap(store.storage, document, tag):
        return False
    if missing_artifacts(store, [f"releases/{release.id}"]):
        release.save(store)
    if missing := missing_artifacts(store, release.fingerprints):
        log.warning("release %s lacks %s, which another server removed", release.id, ", ".join(missing))
        now = store.storage.read_tagged(CURRENT)
        if before and now and now[0] == document:
            store.storage.compare_and_swap(CURRENT, before[0], now[1])
        return False
    _remove_expired(store)
    return True


def _swap(storage: Storage, document: bytes, tag: str | None) -> bool:
    """Replaces current.json by compare-and-swap; returns whether it has these bytes now.

    The answer to a successful attempt may be lost: the attempt fails, or its repetition by the client of the storage,
    which finds another tag.
    """

    def is_current() -> bool:
        tagged = storage.read_tagged(CURRENT)
        return tagged is not None and tagged[0] == document

    try:
        return storage.compare_and_swap(CURRENT, document, tag) or is_current()
    except (StorageError, OSError):
        if not is_current():
            raise
        return True


def discard_release(store: Store, id: str) -> None:
    """Discards a release that did not become live; it is removed hours after it was saved.

    Other servers may be about to make it live, so it is removed only hours after it was saved: by this call if that
    time has passed, otherwise by a later change of the live release or by `gc`.
    """
    _remove_expired(store, f"releases/{id}")


def _remove_expired(store: Store, only: str | None = None) -> None:
    """Removes the expired releases (or only one of them) and those of their uploaded prompts that nothing uses.

    It runs after a change that has already succeeded or failed, so an error is logged and the next call tries again.
    """
    try:
        expired = [key for key in expired_releases(store) if only in (None, key)]
        prompts = {entry["artifact"] for key in expired for entry in store.inputs(key).values()}
        if live := live_release_id(store):
            prompts -= {entry["artifact"] for entry in store.inputs(f"releases/{live[0]}").values()}
        for key in expired:
            remove_release(store, key)
        for key in expired_prompts(store, among=prompts) if expired else ():
            remove_prompt(store, key)
    except (InputError, OSError) as error:
        log.warning("old releases could not be removed: %s", error)


def _load_release(store: Store, id: str) -> Release:
    """Reads a release. Raises CorruptError if it is missing or damaged."""
    if store.storage.size(f"releases/{id}/{MANIFEST}") is None:
        raise CorruptError(f"{store.url}/releases/{id}: there is no such release")
    return Release.load(store, id)


def _live_and_previous_ids(store: Store, data: bytes) -> list[str]:
    """Returns the ids of the live and the previous releases; if `current.json` is damaged, all ids, newest first."""
    try:
        current = parse_live_record(store.storage, data)
    except CorruptError:
        return newest_releases(store)
    return [current.release, *current.before]


def missing_artifacts(store: Store, keys: Collection[str], file: str = MANIFEST) -> list[str]:
    """Returns the keys whose artifacts lack a file; default: the manifest, without which an artifact is incomplete."""
    with ThreadPoolExecutor(16) as threads:
        sizes = threads.map(store.storage.size, [f"{key}/{file}" for key in keys])
        return [key for key, size in zip(keys, sizes, strict=True) if size is None]
