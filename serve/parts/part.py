"""The base class of service parts: opens releases by id, and answers requests until they are closed.

Work past its deadline is dropped before it starts. All parts are thread-safe.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np

from riptide.base.errors import InputError, TextsError
from riptide.indexing.hit_sources.query_encoder import select_queries
from riptide.indexing.storage.cache import CorruptError
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.store.store import Store
from riptide.process.memory import free_memory
from riptide.serve.parts.part_files import PartFiles
from riptide.serve.release.artifacts import ReleaseArtifacts
from riptide.serve.release.release import Release
from riptide.serve.service_errors import ExpiredError, RefusedPromptError, StoreError, is_store_error, store_error

T = TypeVar("T")
P = ParamSpec("P")
Result = TypeVar("Result")


def check_deadline(deadline: float | None) -> None:
    """Raises ExpiredError if the deadline has passed."""
    if deadline is not None and time.monotonic() > deadline:
        raise ExpiredError


def raises_store_errors(method: Callable[P, Result]) -> Callable[P, Result]:
    """Decorator of a part's methods: failures to open or read files are raised as StoreError."""

    @functools.wraps(method)
    def call(*arguments: P.args, **options: P.kwargs) -> Result:
        try:
            return method(*arguments, **options)
        except (StoreError, RefusedPromptError):
            raise
        except Exception as error:
            if isinstance(error, InputError) or is_store_error(error):
                part: Any = arguments[0]
                raise store_error(part.name, error) from error
            raise

    return call


class SharedObjects(Generic[T]):
    """Objects that releases share: opened once, and dropped when no release holds them any more."""

    def __init__(self) -> None:
        self._objects: dict[Any, tuple[T, set[str]]] = {}
        self._lock = threading.Lock()

    def get(self, key: Any, release: str, make: Callable[[], T]) -> T:
        """Returns the object of `key`, which it opens if necessary; the release holds the object from now on.

        Args:
            key: Identifies the object.
            release: Id of the release.
            make: Creates the object if it does not exist.
        """
        with self._lock:
            if key not in self._objects:
                self._objects[key] = (make(), set())
            value, holders = self._objects[key]
            holders.add(release)
            return value

    def get_existing(self, key: Any) -> T:
        """Returns the object of `key`, which must be open."""
        return self._objects[key][0]

    def release(self, release: str) -> list[Any]:
        """Releases the objects that a release holds; returns the keys of the objects that were dropped."""
        with self._lock:
            removed = []
            for key, (_, holders) in list(self._objects.items()):
                holders.discard(release)
                if not holders:
                    del self._objects[key]
                    removed.append(key)
            return removed


class PartControl(Protocol):
    """Opens, checks and closes releases in a part or in all of its replicas. All methods block."""

    def open_release(self, release_id: str) -> None: ...

    def close_release(self, release_id: str) -> None: ...

    def check(self, release_id: str) -> None: ...

    def read_files(self, release_id: str, max_bytes: int | None, max_seconds: float) -> int: ...


class _OpenRelease(NamedTuple):
    """A release that a part has opened.

    Attributes:
        content: What `_open` of the part has returned.
        files: The files that its requests read.
    """

    content: Any
    files: PartFiles


class ServicePart:
    """Base class of the parts, which open releases by id and answer requests for each of them.

    If its files are damaged, a part raises StoreError until `check` finds the files as they were committed.

    store: Where the artifacts are.
    """

    name = ""  # name of the part in /readyz and in errors

    def __init__(self, store: Store):
        self.store = store
        self._releases: dict[str, _OpenRelease] = {}
        self._damaged: dict[str, StoreError] = {}
        self._paths_read: set[Path] = set()  # files that have already been read into memory
        self._open_lock = threading.Lock()

    def open_release(self, release_id: str) -> None:
        """Opens the artifacts that this part needs of a release.

        Raises:
            InputError: If an artifact is missing, or has another fingerprint than in the release.
        """
        self._get_release(release_id)

    def close_release(self, release_id: str) -> None:
        """Closes a release and drops the objects that no other release holds."""
        with self._open_lock:
            for table in (self._releases, self._damaged):
                table.pop(release_id, None)
            self._forget(release_id)

    @raises_store_errors
    def read_files(self, release_id: str, max_bytes: int | None, max_seconds: float) -> int:
        """Reads files of a release that have not been read before, so that the operating system caches them.

        Args:
            release_id: Id of the release.
            max_bytes: Maximum bytes to read; None: half of the free memory, as other parts of the node read too.
            max_seconds: Maximum time to spend.

        Returns:
            Bytes read.
        """
        self._get_content(release_id)
        files = self._get_release(release_id).files
        return files.read(free_memory() // 2 if max_bytes is None else max_bytes, max_seconds, self._paths_read)

    @raises_store_errors
    def check(self, release_id: str) -> None:
        """Checks the files of a release, and answers a small request from it.

        Raises:
            StoreError: If a file is missing or damaged. Other failures of the request are raised as they are.
        """
        files = self._get_release(release_id).files
        try:
            files.check()
        except CorruptError as error:
            self._damaged[release_id] = store_error(self.name, error)
            raise
        self._damaged.pop(release_id, None)
        self._answer_probe(release_id)

    def _get_content(self, release_id: str) -> Any:
        release = self._get_release(release_id)
        if damaged := self._damaged.get(release_id):
            raise StoreError(*damaged.args)
        return release.content

    def _get_release(self, release_id: str) -> _OpenRelease:
        """Returns an open release. Opens it if this replica started after `open_release`, or if it has been closed."""
        if (release := self._releases.get(release_id)) is not None:
            return release  # without the lock, which another release holds while it is opened
        with self._open_lock:
            if release_id not in self._releases:
                artifacts = ReleaseArtifacts(self.store, Release.load(self.store, release_id))
                files = PartFiles(self.store, self._used_files(artifacts))
                self._releases[release_id] = _OpenRelease(self._open(artifacts), files)
            return self._releases[release_id]

    def _open(self, artifacts: ReleaseArtifacts) -> Any:
        raise NotImplementedError

    def _used_files(self, artifacts: ReleaseArtifacts) -> Iterable[tuple[Artifact | Draft, ArtifactPart]]:
        """Returns the files that requests read, in descending order of importance."""
        return []

    def _answer_probe(self, release_id: str) -> None:
        """Answers a small request, which fails if the part does not work."""

    def _forget(self, release_id: str) -> None:
        pass


class UsableQueries(NamedTuple, Generic[T]):
    """The result for the usable queries, and the reasons why others are unusable.

    Attributes:
        result: The result for them; None if there are none.
        numbers: Their numbers.
        unusable: Why the other queries cannot be used, by number.
    """

    result: T | None
    numbers: list[int]
    unusable: dict[int, str]


def call_with_usable_texts(function: Callable[[Any], T], queries: Any) -> UsableQueries[T]:
    """Calls a function with the queries that it can use: those for which it raises TextsError are left out.

    Args:
        function: Takes some of the queries.
        queries: Texts, vectors [q, dim], or sparse vectors.
    """
    unusable: dict[int, str] = {}
    numbers = list(range(len(queries)))
    while numbers:
        try:
            usable = queries if not unusable else select_queries(queries, np.array(numbers))
            return UsableQueries(function(usable), numbers, unusable)
        except TextsError as error:
            unusable |= {numbers[position]: reason for position, reason in error.reasons.items()}
            numbers = [number for number in numbers if number not in unusable]
    return UsableQueries(None, [], unusable)
