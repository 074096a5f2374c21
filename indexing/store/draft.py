"""Drafts: artifacts that any number of processes write part by part; see `riptide.indexing.store.artifact`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from riptide.base.errors import InputError
from riptide.base.wording import STORED, Command, Parameter
from riptide.indexing.storage.cache import BLOCK_BYTES, CorruptError, NodeCache, block_checksums, file_sha256
from riptide.indexing.storage.storage import Storage, explain_disk_errors
from riptide.indexing.store.artifact import CHECKSUMS, Artifact
from riptide.indexing.store.conflicts import Conflict, TakenNameError, find_conflict
from riptide.indexing.store.keys import BEGUN_ERASURE, without_generation
from riptide.indexing.store.sealed_json import (
    BEGUN,
    FAILED,
    LIST_SUFFIX,
    MANIFEST,
    PROVENANCE,
    RECORDS_PER_LIST,
    ArtifactPart,
    PartRecords,
    add_own_hash,
    check_own_hash,
    committed_parts,
    fingerprint_of,
    format_utc,
    has_part,
    manifest_bytes,
    pinned_content,
    provenance,
    read_begun,
    read_mark,
    read_record_lists,
    read_records,
    record_list,
    record_unless_removed,
    seconds_since_work,
)

log = logging.getLogger(__name__)

ABANDONED_S = 120.0  # seconds without a renewal after which a draft is abandoned
RENEWAL_S = 20.0  # seconds between two renewals of a draft


class Draft:
    """An artifact that is being written. It can be sent to workers, each of which commits its own parts.

    with store.create(...) as draft: the manifest is written if the block succeeds; after an exception the parts stay
    for a resume.

    Replacing. `begin` replaces a draft that was marked by `fail`, and a draft of other inputs or configuration that has
    no part (or has the setting `replaces`) and that no process works on. A process that works on a draft renews the
    time of its manifest.begun.json every RENEWAL_S seconds (`keep_alive`); if that time is older than `abandoned_s`,
    the process has ended, is suspended, or cannot reach the storage. In the last two cases it may still write to the
    draft later, so replacing it must be harmless:

    - It is one compare-and-swap of manifest.begun.json. If several commands try it at once, one succeeds; the
      others find its document, and join it or are refused.
    - Nothing is deleted before the new draft is finished. The document counts the attempts, so each attempt has a
      separate identity. A record holds the identity of its writer: a record of an earlier attempt is not part of
      this one, and is overwritten.
    - A process that still writes to the replaced draft is refused at its next `commit`, or at the latest by
      `finish`, with "removed while it was being made". A record that it writes between that check and the swap has
      the old identity, so it does not count.
    - `finish` refuses to complete a draft that is no longer the pinned one. If another process completes a draft
      during the swap, `begin` restores that draft's document.
    """

    def __init__(
        self, storage: Storage, cache: NodeCache, key: str, begun: dict[str, Any], replaces: str | None = None
    ):
        self.key = key
        self._storage, self._cache, self._replaces = storage, cache, replaces
        self._pin(begun)
        self._notes: dict[str, Any] = {}
        self._started = time.time()
        self.is_complete = False
        self.created = False  # whether `begin` wrote manifest.begun.json instead of joining a draft

    def _pin(self, begun: dict[str, Any]) -> None:
        self._begun = begun
        # Every record has the identity, so that parts of another draft with this name do not count.
        self._identity = fingerprint_of(begun)
        self._known = PartRecords()  # its parts whose records were read or written here
        self._unlisted: dict[str, None] = {}  # names of committed parts that no list of records has

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": PartRecords(), "_unlisted": {}}  # workers find the few parts that they need

    @property
    def url(self) -> str:
        return f"{self._storage.url}/{self.key}"

    @property
    def config(self) -> dict[str, Any]:
        return self._begun["config"]

    def begin(self, *, abandoned_s: float | None = None) -> Self:
        """Begins the draft: pins its inputs and configuration, or joins an existing draft with equal ones.

        Args:
            abandoned_s: A draft of other inputs or configuration that has no part is replaced if no process has renewed
                it for this many seconds, or if it is marked as abandoned. None: never.

        Raises:
            InputError: If other inputs or another configuration are pinned and the draft may not be replaced, or if an
                erasure is in progress and the artifact is not complete.
            StorageError: If the storage ignores conditional writes.
        """
        self._storage.require_conditional_writes()
        path = f"{self.key}/{BEGUN}"
        while not self._storage.put_new(path, add_own_hash(self._begun)):
            existing = self._storage.read_tagged(path)
            if existing is None:  # another command has just removed the draft
                continue
            pinned = check_own_hash(existing[0], f"{self._storage.url}/{path}")
            if self._is_replaceable(pinned, abandoned_s):
                if self._replace(pinned, *existing):
                    self.created = True
                    break
            else:
                self._join(pinned)
                break
        else:
            self.created = True
        self.is_complete = self._has_manifest()
        if not self.is_complete:
            self._refuse_during_erasure()
            if not self.created:
                self.renew()
        return self

    def _refuse_during_erasure(self) -> None:
        """Raises InputError, and removes a draft that `begin` has just created, if an erasure is in progress.

        The erasure would not find the passages of this artifact. It looks for incomplete artifacts after it has written
        its plan, and `begin` looks for the plan after it has written the draft, so one of them finds the other.
        """
        if self._storage.size(BEGUN_ERASURE) is None:
            return
        if self.created:
            self._storage.delete(f"{self.key}/{BEGUN}")
        erase = f"{Command('import-corpus')} with {Parameter('erase', 'FILE')}"
        raise InputError(
            f"{self.url}: an erasure of passages is in progress or was interrupted ({BEGUN_ERASURE}): run this command "
            f"again when {erase} has ended"
        )

    def check(self, *, abandoned_s: float | None = None) -> None:
        """Checks without writing: raises the InputError that `begin` would raise now, and sets `is_complete`."""
        with contextlib.suppress(FileNotFoundError):
            pinned = read_begun(self._storage, self.key)
            if not self._is_replaceable(pinned, abandoned_s):
                self._join(pinned)
                self.is_complete = self._has_manifest()
        if not self.is_complete:
            self._refuse_during_erasure()

    def _join(self, pinned: dict[str, Any]) -> None:
        """Continues the pinned draft. Raises InputError if its inputs or its configuration differ."""
        if pinned_content(pinned) != pinned_content(self._begun):
            error = TakenNameError if pinned["config"] != self._begun["config"] else InputError
            raise error(self._describe_conflict(find_conflict(pinned, self._begun)))
        self._pin(pinned)

    def _describe_conflict(self, conflict: Conflict) -> str:
        """Returns the error message for a taken name: the differences, and what the user can do."""
        if self._has_manifest():
            if conflict.makes_next_generation:
                return (
                    f"{self.url}: another command has made it meanwhile, otherwise: {conflict.differences}; run this "
                    "command again"
                )
            remove = remove_command(self._storage, without_generation(self.key))
            return (
                f"{self.url} was made otherwise: {conflict.differences}; give {conflict.remedies}, or, if nobody needs "
                f"it, remove it: {remove}"
            )
        idle_s = seconds_since_work(self._storage, self.key)
        if idle_s is not None and idle_s <= ABANDONED_S:
            give = "" if conflict.makes_next_generation else f"give {conflict.remedies}, or "
            return (
                f"{self.url}: another command is making it, otherwise: {conflict.differences}; {give}run this command "
                f"again when that one has ended (a killed command counts as ended after {ABANDONED_S:.0f} s)"
            )
        remove = remove_command(self._storage, self.key)
        return (
            f"{self.url} was begun otherwise: {conflict.differences}; give {conflict.remedies}, or remove it, as it is "
            f"incomplete and no command works on it: {remove}"
        )

    def _is_empty(self, pinned: dict[str, Any]) -> bool:
        """Returns whether the pinned draft is incomplete and has no part."""
        return not self._has_manifest() and not has_part(self._storage, self.key, fingerprint_of(pinned))

    def _has_manifest(self) -> bool:
        """Returns whether the artifact is complete, by its manifest in the storage."""
        return self._storage.size(f"{self.key}/{MANIFEST}") is not None

    def _is_replaceable(self, pinned: dict[str, Any], abandoned_s: float | None) -> bool:
        """Returns whether this draft may replace the pinned one, which failed or was abandoned; see the class."""
        if self._has_manifest():
            return False
        mark = read_mark(self._storage, self.key, pinned)
        if mark is not None and not mark.get("abandoned"):
            return True
        if self._replaces in pinned["config"] and pinned["config"] != self._begun["config"]:
            idle_s = seconds_since_work(self._storage, self.key)
            return idle_s is None or (abandoned_s is not None and idle_s > abandoned_s)
        is_same = pinned_content(pinned) == pinned_content(self._begun)
        if mark is not None and (is_same or abandoned_s is not None):
            return self._is_empty(pinned)
        if abandoned_s is None or is_same:
            return False
        with contextlib.suppress(FileNotFoundError):
            age = time.time() - self._storage.write_time(f"{self.key}/{BEGUN}")
            return age > abandoned_s and self._is_empty(pinned)
        return False

    def _replace(self, pinned: dict[str, Any], data: bytes, tag: str) -> bool:
        """Replaces the pinned draft with this one; returns False if another command replaced it first."""
        path = f"{self.key}/{BEGUN}"
        self._pin({**self._begun, "attempt": pinned.get("attempt", 0) + 1})
        if not self._storage.compare_and_swap(path, add_own_hash(self._begun), tag):
            return False
        if self._has_manifest():
            self._storage.put(path, data)
            raise InputError(f"{self.url}: another command completed it at this moment; run the command again")
        return True

    def fail(self, error: str) -> None:
        """Marks the draft as failed because of bad input; the next `begin` replaces it, also with equal configuration.

        Does nothing if the draft is complete or was replaced. Errors of the storage are not raised: the caller has
        the first error to report, and a draft without the mark can still be removed by hand.
        """
        self._write_mark({"error": error})

    def abandon(self, error: BaseException) -> None:
        """Marks the draft as abandoned, if this object created it.

        Without a part, the next `begin` replaces it. Another command may have joined the draft: its next `renew`
        removes the mark.
        """
        if self.created:
            self._write_mark({"error": f"{error}" or "interrupted before its first part", "abandoned": True})

    def _write_mark(self, mark: dict[str, Any]) -> None:
        """Writes failed.json with the identity of this attempt, and the error in one line; see `fail`."""
        with contextlib.suppress(InputError, OSError):
            if self.is_pinned() and not self._has_manifest():
                error = " ".join(STORED.render(mark["error"]).split())
                document = {"begun": self._identity, "time": format_utc(time.time()), **mark, "error": error}
                self._storage.put(f"{self.key}/{FAILED}", add_own_hash(document))

    def is_pinned(self) -> bool:
        """Returns whether manifest.begun.json of the key is that of this draft."""
        with contextlib.suppress(FileNotFoundError):
            return read_begun(self._storage, self.key) == self._begun
        return False

    def renew(self) -> bool:
        """Renews the draft's time, so that it is not abandoned; returns False if the draft was removed or replaced."""
        is_pinned = self._storage.touch_if_equal(f"{self.key}/{BEGUN}", add_own_hash(self._begun))
        mark = read_mark(self._storage, self.key, self._begun) if is_pinned else None
        if mark is not None and mark.get("abandoned"):  # its first command has ended; this one continues
            self._storage.delete(f"{self.key}/{FAILED}")
        return is_pinned

    def require_pinned(self) -> None:
        """Raises InputError if the draft was removed or replaced."""
        if not self.is_pinned():
            raise self.removed_error()

    def removed_error(self) -> InputError:
        """Returns the error for a draft that was removed or replaced while a process wrote to it."""
        return InputError(f"{self.url}: it was removed while it was being made; run the command again")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and not self.is_complete:
            self.finish()

    def committed_parts(self) -> PartRecords:
        """Returns the committed parts by name, also those of earlier, interrupted runs and of other workers."""
        return self._committed_among(dict(self._storage.list(self.key)))

    def has_parts(self) -> bool:
        """Returns whether a part is committed; reads one record instead of all."""
        return has_part(self._storage, self.key, self._identity)

    def _committed_among(self, files: Mapping[str, int]) -> PartRecords:
        """Returns the committed parts by name. files: a listing of the artifact, sizes by key, ordered by key."""
        is_first = not self._known
        if is_first:
            lists = [path for path in files if path.endswith(LIST_SUFFIX)]
            for part in read_record_lists(self._storage, lists, self._identity):
                self._known.add(part)
        listed = self._known
        self._known = committed_parts(self._storage, self.key, self._identity, listed, files)
        if is_first:
            self._unlisted = dict.fromkeys(name for name in self._known if name not in listed)
        return self._known.select(self._known)

    def list_records(self, names: Iterable[str] = ()) -> None:
        """Writes the records of committed parts to lists of RECORDS_PER_LIST, so that a resume reads few files.

        Args:
            names: Parts that were committed since the last call, by this process or by a worker.

        Raises:
            InputError: If the draft was removed or replaced.
        """
        self._unlisted |= dict.fromkeys(names)
        while len(self._unlisted) >= RECORDS_PER_LIST and not self.is_complete:
            batch = list(itertools.islice(self._unlisted, RECORDS_PER_LIST))
            unknown = [name for name in batch if name not in self._known]
            for part in read_records(self._storage, self.key, self._identity, unknown):
                self._known.add(part)
            known = [name for name in batch if name in self._known]  # the other records were removed
            file, data = record_list(self._identity, self._known.select(known).values())
            self.require_pinned()
            self._storage.put(f"{self.key}/{file}", data)
            for name in batch:
                del self._unlisted[name]

    def find_part(self, name: str) -> ArtifactPart | None:
        """Returns the part `name` if it is committed, otherwise None.

        It may have been committed by an earlier attempt whose acknowledgement was lost, or by another writer.
        """
        record = record_unless_removed(self._storage, f"{self.key}/{name}.json")
        return record[0] if record is not None and record[1] == self._identity else None

    def commit(
        self,
        name: str,
        suffix: str,
        write: Callable[[Path], object],
        *,
        rows: int,
        has_ranges: bool = False,
        **facts: Any,
    ) -> ArtifactPart:
        """Calls `write(path)` to make a file and commits the file as a part.

        Takes two steps: the bytes are stored under a unique name, then the record is written unless one exists. If
        another writer was first and its bytes differ, the bytes of this writer are deleted again. A failure between
        the steps leaves at most bytes without a record, which are not a part; the next attempt replaces them.

        Args:
            name: Name of the part.
            suffix: Suffix of the file; not that of records (".json") or of their lists.
            write: Writes the file at a given path.
            rows: Number of rows in the part.
            has_ranges: Record a checksum of each block, so that readers may fetch ranges of the file.
            facts: Further data about the part, stored in its record.

        Returns:
            The committed part; the existing one if it was committed before.

        Raises:
            InputError: If the draft was removed or replaced.
        """
        if suffix in (".json", LIST_SUFFIX):
            raise ValueError(f"suffix {suffix}: expected another one, as records or their lists end in it")
        if done := self.find_part(name):
            return done
        with self._storage.temporary_file(suffix) as path:
            with explain_disk_errors(path):
                write(path)
                digest, size = file_sha256(path), path.stat().st_size
                if has_ranges and size > BLOCK_BYTES:
                    facts[CHECKSUMS] = block_checksums(path)
            file = f"{name}-{digest[:16]}{suffix}"
            self.require_pinned()
            self._storage.put(f"{self.key}/{file}", path)
        part = ArtifactPart(name, file, rows, size, digest, facts)
        record, document = f"{self.key}/{name}.json", add_own_hash({**part.document(), "begun": self._identity})
        other = None
        while other is None:
            if self._storage.put_new(record, document):
                self._known.add(part)
                log.info("committed %s rows, %s bytes", rows, size, extra={"artifact": self.key, "part": name})
                return part
            other = record_unless_removed(self._storage, record)
        winner, identity = other
        if identity != self._identity:  # the record of another draft: one that this one replaced, or that replaced it
            self.require_pinned()
            self._storage.put(record, document)
            return part
        if winner.file != file:
            self._storage.delete(f"{self.key}/{file}")
        return winner

    def local_path(self, part: ArtifactPart) -> Path:
        return self._cache.local_path(self._storage, f"{self.key}/{part.file}", part.bytes, part.sha256)

    def add_notes(self, **notes: Any) -> None:
        """Adds measured values (recall, statistics) to the manifest; the fingerprint does not cover them."""
        self._notes |= notes

    def touch(self) -> None:
        """Rewrites provenance.json of a complete artifact, so that its write time shows the last use."""
        self._storage.put(f"{self.key}/{PROVENANCE}", add_own_hash(provenance(self._started)))

    def finish(self, provenance_json: bytes | None = None, copied: Artifact | None = None) -> None:
        """Completes the artifact by writing its manifest; only an erasure of passages changes it afterwards.

        Args:
            provenance_json: The bytes of provenance.json, for a copy; None: those of this process.
            copied: The artifact that this one is a copy of. If passages were erased from it, its fingerprint is kept.
        """
        sizes = dict(self._storage.list(self.key))
        parts = self._check_finished(sizes)
        identity = {
            "kind": self._begun["kind"],
            "inputs": {role: entry["fingerprint"] for role, entry in self._begun["inputs"].items()},
        }
        if self._begun["by_content"]:
            identity["content"] = [[part.name, part.sha256] for part in parts.values()]
        else:
            identity["config"] = self._begun["config"]
        manifest = {k: v for k, v in self._begun.items() if k not in ("by_content", "attempt", "models")}
        manifest |= {"fingerprint": fingerprint_of(identity), "notes": self._notes}
        if copied is not None and copied.erasures:
            manifest |= {"fingerprint": copied.fingerprint, "erasures": copied.erasures}
        if not self._has_manifest():
            if "attempt" in self._begun:
                self._remove_earlier_attempts(parts.values())
            if provenance_json is None:
                provenance_json = add_own_hash(provenance(self._started))
            self._storage.put(f"{self.key}/{PROVENANCE}", provenance_json)
            if self._storage.put_new(f"{self.key}/{MANIFEST}", manifest_bytes(manifest, parts.values())):
                self.is_complete = True
                self._storage.delete_all([path for path in sizes if path.endswith(LIST_SUFFIX)])
                return
        with contextlib.suppress(FileNotFoundError):  # another process has removed the complete artifact
            if Artifact(self._storage, self._cache, self.key).fingerprint != manifest["fingerprint"]:
                raise self.removed_error()  # another process completed the draft that this one had replaced
        self.is_complete = True

    def _remove_earlier_attempts(self, parts: Iterable[ArtifactPart]) -> None:
        """Deletes the records, files and marks of the attempts that this draft replaced."""
        part_names = [name for part in parts for name in (part.file, f"{part.name}.json")]
        needed_names = {MANIFEST, BEGUN, PROVENANCE, *part_names}
        for key, _ in list(self._storage.list(self.key)):
            name = key.removeprefix(f"{self.key}/")
            if "/" not in name and name not in needed_names:
                self._storage.delete(key)

    def _check_finished(self, sizes: Mapping[str, int]) -> PartRecords:
        """Returns the committed parts; raises InputError if the draft, or the file of a part, was removed.

        Args:
            sizes: A listing of the artifact, sizes by key.
        """
        parts = self._committed_among(sizes)
        self.require_pinned()
        for part in parts.values():
            if sizes.get(f"{self.key}/{part.file}") != part.bytes:
                raise CorruptError(f"{self.url}/{part.file}: missing or cut; remove {self.key} and make it again")
        return parts


def remove_command(storage: Storage, key: str) -> str:
    """Returns the text of the command that removes an artifact; it asks before it removes a complete one."""
    return f"{Command('store', 'remove', key, store=shlex.quote(storage.url))}"


class Renewable(Protocol):
    """What a process renews while it works on it: a draft, or an erasure."""

    is_complete: bool

    def renew(self) -> bool:
        """Renews its time; returns False if it was removed or replaced."""


@contextlib.contextmanager
def keep_alive(drafts: Sequence[Renewable]) -> Iterator[None]:
    """Renews drafts every RENEWAL_S seconds within the block, so that no other command considers them abandoned."""
    ended = threading.Event()

    def renew() -> None:
        current = [draft for draft in drafts if not draft.is_complete]
        while current and not ended.wait(RENEWAL_S):
            for draft in tuple(current):
                # Ignored here: if the storage keeps failing, the work itself fails.
                with contextlib.suppress(InputError, OSError):
                    if not draft.renew():
                        current.remove(draft)

    thread = threading.Thread(target=renew, name="riptide-renewal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # during interpreter shutdown a renewal could not start threads
