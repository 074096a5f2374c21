"""The documents of erasures: the plan of the one in progress, and the receipts of those that are complete.

erasures/begun.json       what is to be done, written before anything is changed; removed last; see `progress`
erasures/eNNNN-HEX.json   what was done; sealed like a manifest. It has no ids: a salted, slow hash of all of them tells
                          a command that is repeated that it is done
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.maintenance.verification import Finding
from riptide.indexing.storage.cache import CorruptError, MissingFileError
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.keys import BEGUN_ERASURE, ERASURES
from riptide.indexing.store.sealed_json import PROVENANCE, check_own_hash, fingerprint_of, format_utc, parse_utc
from riptide.indexing.store.store import Store

CLOCK_SKEW_S = 600.0  # largest expected difference between the clocks of two hosts
# The fields of a document, and those of each of its artifacts, with their types.
_FIELDS = {
    "erasure": str,
    "salt": str,
    "ids": str,
    "started": str,
    "rows": list,
    "covers": list,
    "artifacts": list,
    "judgements": dict,
    "remains": list,
}
_ENTRY_FIELDS = {"artifact": str, "fingerprint": str, "content": str, "action": str, "parts": int, "bytes": int}


def receipt_file(name: str) -> str:
    """Returns the file of the receipt of an erasure."""
    return f"{ERASURES}/{name}.json"


def read_document(store: Store, file: str) -> dict[str, Any] | None:
    """Reads a document of an erasure; None if it is missing. Raises CorruptError if it is damaged."""
    with contextlib.suppress(FileNotFoundError):
        return parse_document(store.storage.read(file), f"{store.url}/{file}")
    return None


def parse_document(data: bytes, name: str) -> dict[str, Any]:
    """Parses a document of an erasure. Raises CorruptError if it is damaged, or not what an erasure writes."""
    document = check_own_hash(data, name)
    if not _is_erasure(document):
        raise CorruptError(
            f"{name}: found other fields or types than those of an erasure; restore it from a copy of the store"
        )
    return document


def _is_erasure(document: Mapping[str, Any]) -> bool:
    """Returns whether a document has the fields of an erasure."""
    with contextlib.suppress(ValueError):
        if _has_types(document, _FIELDS):
            bytes.fromhex(document["salt"])
            parse_utc(document["started"])
            return (
                all(isinstance(entry, dict) and _has_types(entry, _ENTRY_FIELDS) for entry in document["artifacts"])
                and all(entry["action"] in ("rewritten", "removed") for entry in document["artifacts"])
                and all(type(row) is int and 0 <= row < 1 << 63 for row in document["rows"])
                and all(type(name) is str for name in document["covers"])
                and all(type(count) is int for count in document["judgements"].values())
            )
    return False


def _has_types(document: Mapping[str, Any], types: Mapping[str, type]) -> bool:
    return all(type(document.get(name)) is kind for name, kind in types.items())


def receipts(store: Store) -> list[str]:
    """Returns the files of the receipts, oldest first."""
    files = (file for file, _ in store.storage.list(ERASURES))
    return sorted(file for file in files if file.startswith(f"{ERASURES}/e") and file.endswith(".json"))


class Erasure(NamedTuple):
    """The passages of an erasure.

    Attributes:
        file: Its receipt, or the plan of the one in progress.
        name: Its name.
        corpus: The fingerprints of the generations of the corpus that had the passages, by key.
        rows: Their rows, ascending.
    """

    file: str
    name: str
    corpus: dict[str, str]
    rows: list[int]

    def is_of(self, fingerprints: Mapping[str, str]) -> bool:
        """Returns whether the rows are those of a corpus. fingerprints: its generations by key, and other artifacts."""
        return any(fingerprints.get(key) == fingerprint for key, fingerprint in self.corpus.items())


def erasures(store: Store, known: Sequence[Erasure] = ()) -> tuple[Erasure, ...]:
    """Returns the erasures of a store, oldest first; the one in progress, if any, is the last one.

    Args:
        store: The store.
        known: Erasures that were read before, whose receipts are not read again.
    """
    # The plan is removed after its receipt was written, so it is read before the receipts are listed.
    plan = read_document(store, BEGUN_ERASURE)
    complete = {each.file: each for each in known if each.file != BEGUN_ERASURE}
    result = []
    for file in receipts(store):
        if file in complete:
            result.append(complete[file])
        elif document := read_document(store, file):
            result.append(_erasure_of(file, document))
    return (*result, _erasure_of(BEGUN_ERASURE, plan)) if plan else tuple(result)


def _erasure_of(file: str, document: Mapping[str, Any]) -> Erasure:
    entries = {entry["artifact"]: entry["fingerprint"] for entry in document["artifacts"]}
    corpus = {key: fingerprint for key, fingerprint in entries.items() if key.startswith("corpus/")}
    return Erasure(file, document["erasure"], corpus, document["rows"])


def new_plan(store: Store, ids: Iterable[str], **values: Any) -> dict[str, Any]:
    """Returns the plan of the next erasure.

    Args:
        store: The store.
        ids: The erased ids.
        values: Further fields.
    """
    salt = secrets.token_hex(16)
    name = f"e{len(receipts(store)):04d}-{salt[:8]}"  # unique, also among those of the store of which this is a copy
    started = format_utc(time.time())
    return {"erasure": name, "salt": salt, "ids": _hash_of_ids(ids, salt), "started": started, **values}


def has_ids(document: Mapping[str, Any], ids: Iterable[str]) -> bool:
    """Returns whether an erasure was of exactly these ids."""
    return bool(document["ids"] == _hash_of_ids(ids, document["salt"]))


def _hash_of_ids(ids: Iterable[str], salt: str) -> str:
    """Returns a hash of a set of ids that takes about 50 ms, so that guesses at the ids are slow."""
    text = "\n".join(sorted(set(ids))).encode()
    return _slow_hash(hashlib.sha256(text).digest(), salt)


@functools.lru_cache(maxsize=1024)
def _slow_hash(digest: bytes, salt: str) -> str:
    return hashlib.scrypt(digest, salt=bytes.fromhex(salt), n=1 << 14, r=8, p=1, dklen=16).hex()


def check_receipts(store: Store) -> Iterator[Finding]:
    """Yields a Finding for each receipt (does the store still lack the passages?), and for an erasure in progress."""
    if store.storage.size(BEGUN_ERASURE) is not None:
        again = f"run the same import-corpus {Parameter('erase', 'FILE')} again"
        yield Finding(
            BEGUN_ERASURE, f"{store.url}/{BEGUN_ERASURE}: an erasure is in progress or was interrupted; {again}"
        )
    for file in receipts(store):
        try:
            receipt = read_document(store, file)
        except CorruptError as error:
            yield Finding(file, f"{error}")
            continue
        problems = list(restored(store, receipt)) if receipt else []
        yield from (Finding(file, f"{store.url}/{problem}") for problem in problems)
        if not problems:
            yield Finding(file)


def restored(store: Store, receipt: Mapping[str, Any]) -> Iterator[str]:
    """Yields a problem for each artifact that holds passages again, as an older copy of it was restored."""
    name, is_same_corpus = receipt["erasure"], True
    again = f"holds what {receipt_file(name)} says was erased, as an older copy was restored: erase the ids again"
    for entry in receipt["artifacts"]:
        key = entry["artifact"]
        artifact = None
        with contextlib.suppress(CorruptError, FileNotFoundError):  # `verify` has reported a damaged one
            artifact = Artifact(store.storage, store.cache, key)
        is_same = artifact is not None and artifact.fingerprint == entry["fingerprint"]
        if artifact is not None and is_same:
            is_earlier = _finished_s(store, key) < parse_utc(receipt["started"]) + CLOCK_SKEW_S
            if name not in artifact.erasures and is_earlier and content_hash(artifact) == entry["content"]:
                yield f"{key}: {again}"
        is_same_corpus &= is_same or not key.startswith("corpus/")
    if not is_same_corpus:
        return
    with contextlib.suppress(CorruptError, MissingFileError):  # reported, too
        passages = Corpus.open(store).passages(np.array(receipt["rows"], np.int64))
        if any(passage.id or passage.title or passage.text or passage.metadata_json for passage in passages):
            yield f"corpus: {again}"


def content_hash(artifact: Artifact) -> str:
    """Returns a hash of the files of an artifact. One that is made again after an erasure has another one."""
    return fingerprint_of([[part.name, part.sha256] for part in artifact.parts])


def _finished_s(store: Store, key: str) -> float:
    """Returns when an artifact was made, in seconds since 1970; infinity if its provenance cannot be read."""
    with contextlib.suppress(CorruptError, FileNotFoundError):
        file = f"{key}/{PROVENANCE}"
        return parse_utc(check_own_hash(store.storage.read(file), file)["finished"])
    return math.inf
