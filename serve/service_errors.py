"""The exceptions of a service, in which failures of the service differ from mistakes of clients.

`InputError` says what a user can fix, often with a path. Of these, clients see `RequestError` alone, whose messages
hold no path and no fingerprint of the service; any other `InputError` is logged, and the client gets a fixed sentence.
If a part raises `InputError` while it reads its files, it is no mistake of the client: it becomes a `StoreError`, which
is logged with all details, and the response is 503 without details.
"""

from __future__ import annotations

import contextlib
import itertools
import string
from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa

from riptide.base.errors import InputError
from riptide.base.wording import list_first
from riptide.indexing.storage.cache import CorruptError, MissingFileError

SHOWN_TASKS = 10
STORE = "store"  # name in errors for failures of the store itself
_FOREIGN = ("botocore", "boto3", "urllib3", "jnius")  # packages whose exceptions are failures of the store or of Lucene
# Minimum length of a run of hexadecimal digits that may be a fingerprint, which clients must not see.
_DIGEST_LENGTH = 32


class StoreError(Exception):
    """A part cannot read the files that it serves.

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


class EncoderDriftError(StoreError):
    """The encoder gives other vectors than those stored, which waiting does not change.

    Args:
        part: The part's name.
        problem: The embeddings and the similarity, for the log.
    """

    def __init__(self, part: str, problem: InputError):
        super().__init__(part, "the encoder gives other vectors than those stored", str(problem))
        self.__cause__ = problem

    def __reduce__(self) -> Any:
        return type(self), (self.part, self.__cause__)


class LostError(Exception):
    """A leaf did not answer: its replica or its node is lost or unreachable."""


class RequestError(InputError):
    """A mistake of a client, with a message that clients may see: it has no location and no fingerprint."""


class RefusedPromptError(RequestError):
    """The backbone cannot use a prompt: a mistake of the client that uploaded it."""


class ExpiredError(Exception):
    """The deadline of a request has passed."""


class OverloadedError(Exception):
    """A queue is full, or a client exceeds its rate, its quota or its share of a queue.

    Args:
        retry_after: Seconds after which the client should try again.
        reason: The limit that is exceeded.
    """

    def __init__(self, retry_after: int, reason: str = "too many requests"):
        super().__init__(f"{reason}; try again in {retry_after} s")
        self.retry_after = retry_after


class NotReadyError(Exception):
    """No release is live yet, or the service is shutting down."""


class IncompleteError(Exception):
    """Not all shards answered, and the query does not allow a partial answer."""


class MemoryShortageError(Exception):
    """The check of a prompt needs more memory than is free now."""


class UnknownTaskError(Exception):
    """The live release has no task of the requested name."""

    @classmethod
    def for_name(cls, name: str, tasks: Collection[str]) -> UnknownTaskError:
        """Returns the error for an unknown name. tasks: the names of the release's tasks."""
        return cls(f"no task {name!r}; the tasks are {list_first(sorted(tasks), SHOWN_TASKS)}")


class UploadExpiredError(ExpiredError):
    """The check of an upload took too long."""


class ConflictError(Exception):
    """The live release is not the one that a request names, or other servers changed it in every attempt."""


def store_error(part: str, error: BaseException) -> StoreError:
    """Returns a StoreError of a part, with the reason of `error`."""
    if isinstance(error, StoreError):
        return error
    return StoreError(part, reason_of(error), f"{type(error).__name__}: {error!s}")


def is_store_error(error: BaseException) -> bool:
    """Returns whether an exception, or one of its causes, is a failure of the store or of its files."""
    return any(_is_foreign(cause) for cause in _causes_of(error))


def reason_of(error: BaseException) -> str:
    """Returns a short reason for the failure of a part, without file names."""
    chain = list(_causes_of(error))
    if isinstance(error, StoreError):
        return error.reason
    if any(isinstance(cause, FileNotFoundError | MissingFileError) for cause in chain):
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


@contextlib.contextmanager
def request_errors(context: str = "") -> Iterator[None]:
    """Context that raises an InputError as RequestError, for code that reads only a request and public names.

    A value of the request may look like a path or a fingerprint: the client sent it, and may see it.

    Args:
        context: Text in front of the message.
    """
    try:
        yield
    except InputError as error:
        raise RequestError(f"{context}{error}") from error


def client_error(error: InputError, *places: str) -> InputError:
    """Converts the error of a service's artifacts to one that a client may see.

    Args:
        error: The error, whose message may name files.
        *places: Folders and URLs of the service, which become "the store".

    Returns:
        A RequestError; an InputError, which clients do not see, if the message shows another location or a fingerprint.
    """
    message = str(error)
    for place in sorted(filter(None, places), key=len, reverse=True):
        message = _without_place(message, place)
    return InputError(message) if _shows_location(message) or _shows_digest(message) else RequestError(message)


def _without_place(text: str, place: str) -> str:
    """Replaces a location in a text with "the store", except where a longer name starts with it."""
    shown, *others = text.split(place)
    for other in others:
        is_longer = other[:1].isalnum() or other.startswith(("_", "-", "."))
        shown += (place if is_longer else "the store") + other
    return shown


def _shows_location(text: str) -> bool:
    """Returns whether a text has a path or URL: a "/" that does not follow a name, as it does in index/NAME and 3/4."""
    before = (text[number - 1 : number] for number, character in enumerate(text) if character == "/")
    return any(not each.isalnum() and each not in tuple("_.-…") for each in before)


def _shows_digest(text: str) -> bool:
    """Returns whether a text has a long run of hexadecimal digits that is no decimal number."""
    runs = ("".join(run) for is_hex, run in itertools.groupby(text, string.hexdigits.__contains__) if is_hex)
    return any(len(run) >= _DIGEST_LENGTH and not run.isdecimal() for run in runs)


def _is_foreign(error: BaseException) -> bool:
    return isinstance(error, CorruptError | OSError | pa.ArrowException) or (
        type(error).__module__.partition(".")[0] in _FOREIGN
    )


def _causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception, then the exceptions that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ if error.__cause__ or error.__suppress_context__ else error.__context__
