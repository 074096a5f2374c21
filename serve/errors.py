"""The exceptions of a service, with failures of the service separated from mistakes of clients.

`InputError` says what a user can fix, often with a path. If a field of a request raises it, the response is 400. If a
part raises it while it reads its files, it is no mistake of the client: it becomes a `StoreError`, which is logged with
all details, and the response is 503 without details.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import pyarrow as pa

from riptide.base.errors import MAX_MESSAGE, InputError, list_first
from riptide.indexing.store.cache import CorruptError

SHOWN_TASKS = 10
STORE = "store"  # the name under which failures of the store itself are reported
_FOREIGN = ("botocore", "boto3", "urllib3", "jnius")  # packages whose exceptions are failures of the store or of Lucene
_MISSING = "the file is missing"  # part of a message of the node's cache
_PATH = re.compile(r"(?:s3:/|(?<![\w.:/…]))/[^\s:,;'\"()]+")
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b")


class StoreError(Exception):
    """A part cannot read what it serves.

    Args:
        part: The part's name, such as "dense"; "store" for the store itself.
        reason: A short reason for clients, without file names.
        detail: Details for the log.
    """

    def __init__(self, part: str, reason: str, detail: str = ""):
        super().__init__(part, reason, detail)
        self.part, self.reason, self.detail = part, reason, detail

    def __str__(self) -> str:
        return f"{self.part}: {self.reason}"


class LostError(Exception):
    """A leaf did not answer: its replica or its node is gone, or cannot be reached."""


class RefusedPromptError(InputError):
    """A prompt that its backbone cannot use: a mistake of the client that put it."""


class ExpiredError(Exception):
    """The deadline has passed."""


class OverloadedError(Exception):
    """The queue is full. retry_after: seconds until it should not be."""

    def __init__(self, retry_after: int):
        super().__init__(f"too many requests; try again in {retry_after} s")
        self.retry_after = retry_after


class NotReadyError(Exception):
    """No release is served yet, or the service is shutting down."""


class IncompleteError(Exception):
    """Not all shards answered, and the query did not allow a partial answer."""


class MemoryShortageError(Exception):
    """The check of a prompt needs more memory than is free at the moment."""


class UnknownTaskError(Exception):
    """A task that the live release does not have."""

    @classmethod
    def for_name(cls, name: str, tasks: Collection[str]) -> UnknownTaskError:
        """Returns the error for an unknown name; tasks: the names that the release has."""
        return cls(f"no task {name!r}; the tasks are {list_first(sorted(tasks), SHOWN_TASKS)}")


class UploadExpiredError(ExpiredError):
    """The check of an upload took too long."""


class ConflictError(Exception):
    """Other servers changed the live release at the same time in every attempt."""


def store_error(part: str, error: BaseException) -> StoreError:
    """Returns a StoreError of a part with the reason of `error`."""
    if isinstance(error, StoreError):
        return error
    return StoreError(part, reason_of(error), f"{type(error).__name__}: {error}")


def is_store_error(error: BaseException) -> bool:
    """Whether an exception, or one that caused it, is a failure of the store or of its files."""
    return any(_is_foreign(cause) for cause in _causes_of(error))


def reason_of(error: BaseException) -> str:
    """Returns a short reason why a part fails, without file names."""
    chain = list(_causes_of(error))
    if isinstance(error, StoreError):
        return error.reason
    if any(isinstance(cause, FileNotFoundError) or _MISSING in str(cause) for cause in chain):
        return "files are missing"
    if any(isinstance(cause, CorruptError | pa.ArrowException) for cause in chain):
        return "files are damaged"
    if any(_is_foreign(cause) for cause in chain):
        return "files cannot be read"
    if isinstance(error, LostError):
        return "no replica answers"
    if isinstance(error, InputError):
        return "artifacts are missing or not those of the release"
    return f"fails ({type(error).__name__})"


def without_locations(message: str, *places: str) -> str:
    """Returns a message for clients: without the given locations, other absolute paths, buckets and long digests.

    Args:
        message: Message of an exception.
        *places: Folders and URLs of the service, which become "the store".
    """
    message = message[: 4 * MAX_MESSAGE]  # the cost does not grow with a client's input
    for place in sorted(filter(None, places), key=len, reverse=True):
        message = message.replace(place, "the store")
    return _DIGEST.sub(r"\1…", _PATH.sub("…", message))


def _is_foreign(error: BaseException) -> bool:
    return isinstance(error, CorruptError | OSError | pa.ArrowException) or (
        type(error).__module__.partition(".")[0] in _FOREIGN
    )


def _causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ if error.__cause__ or error.__suppress_context__ else error.__context__
