"""The erasure that is in progress: its plan in the store, which one command at a time carries out.

The command takes erasures/begun.json by compare-and-swap, with a random holder, and renews its time as one renews a
draft. Another command takes it over if it has no holder, as the command ended with an error, or if its time is older
than ABANDONED_S. A command that lost it, because it was suspended, is refused before it deletes anything.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

from riptide.base.errors import InputError
from riptide.indexing.erasure.receipts import parse_document, read_document, receipt_file
from riptide.indexing.store.draft import ABANDONED_S, keep_alive
from riptide.indexing.store.keys import BEGUN_ERASURE
from riptide.indexing.store.sealed_json import add_own_hash, format_utc
from riptide.indexing.store.store import Store

_HOLDER = "holder"


def interrupted_plan(store: Store) -> dict[str, Any] | None:
    """Returns the plan of the erasure that is in progress or was interrupted; None without one."""
    document = read_document(store, BEGUN_ERASURE)
    return document and {name: value for name, value in document.items() if name != _HOLDER}


class RunningErasure:
    """An erasure that this process carries out.

    Attributes:
        plan: The plan.
        created: Whether this process has stored the plan, and no earlier command.
    """

    is_complete = False

    def __init__(self, store: Store, plan: dict[str, Any]):
        self.store, self.plan, self.created = store, plan, False
        self._holder = secrets.token_hex(8)
        self._lock = threading.Lock()  # a renewal does not meet a plan that is being replaced

    def _bytes(self, holder: str) -> bytes:
        return add_own_hash({**self.plan, _HOLDER: holder})

    def take(self) -> None:
        """Stores the plan, or takes over that of a command that has ended.

        Raises:
            InputError: If another command carries out an erasure.
        """
        storage, url = self.store.storage, f"{self.store.url}/{BEGUN_ERASURE}"
        storage.require_conditional_writes()
        tag = None
        if existing := storage.read_tagged(BEGUN_ERASURE):
            tag = existing[1]
            document = parse_document(existing[0], url)
            age_s = 0.0
            with contextlib.suppress(FileNotFoundError):  # the other command has just ended
                age_s = time.time() - storage.write_time(BEGUN_ERASURE)
            if document["erasure"] != self.plan["erasure"] or (document.get(_HOLDER) and age_s <= ABANDONED_S):
                raise self._taken_error()
        data = self._bytes(self._holder)
        if not storage.compare_and_swap(BEGUN_ERASURE, data, tag) and not storage.touch_if_equal(BEGUN_ERASURE, data):
            raise self._taken_error()
        self.created = tag is None

    def _taken_error(self) -> InputError:
        return InputError(
            f"{self.store.url}/{BEGUN_ERASURE}: another command carries out an erasure: run this command again when "
            f"that one has ended (a killed command counts as ended after {ABANDONED_S:.0f} s)"
        )

    def renew(self) -> bool:
        """Renews its time; returns False if another command has taken it over."""
        with self._lock:
            return self.store.storage.touch_if_equal(BEGUN_ERASURE, self._bytes(self._holder))

    def require(self) -> None:
        """Raises InputError if another command has taken it over."""
        if not self.renew():
            raise self._taken_error()

    def extend(self, entries: list[dict[str, Any]]) -> None:
        """Adds artifacts to the plan."""
        with self._lock:
            existing = self.store.storage.read_tagged(BEGUN_ERASURE)
            if existing is None or existing[0] != self._bytes(self._holder):
                raise self._taken_error()
            self.plan = {**self.plan, "artifacts": [*self.plan["artifacts"], *entries]}
            if not self.store.storage.compare_and_swap(BEGUN_ERASURE, self._bytes(self._holder), existing[1]):
                raise self._taken_error()

    def finish(self, remains: list[str]) -> dict[str, Any]:
        """Writes the receipt, with what remains besides, and removes the plan; returns the receipt."""
        self.require()
        receipt = {**self.plan, "remains": [*self.plan["remains"], *remains], "finished": format_utc(time.time())}
        self.store.storage.put(receipt_file(self.plan["erasure"]), add_own_hash(receipt))
        self.store.storage.delete(BEGUN_ERASURE)
        return receipt

    def withdraw(self) -> None:
        """Removes the plan that this process has stored and not begun to carry out."""
        if self.renew():
            self.store.storage.delete(BEGUN_ERASURE)

    def release(self) -> None:
        """Lets the next command continue at once, after an error; errors of the storage are not raised."""
        with contextlib.suppress(InputError, OSError):
            existing = self.store.storage.read_tagged(BEGUN_ERASURE)
            if existing and existing[0] == self._bytes(self._holder):
                self.store.storage.compare_and_swap(BEGUN_ERASURE, self._bytes(""), existing[1])


@contextlib.contextmanager
def running_erasure(store: Store, plan: dict[str, Any]) -> Iterator[RunningErasure]:
    """Context in which this process carries out a plan. Raises InputError if another command does so."""
    running = RunningErasure(store, plan)
    try:
        running.take()
        with keep_alive([running]):
            yield running
    except BaseException:
        running.release()
        raise
