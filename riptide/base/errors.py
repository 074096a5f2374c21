"""Exceptions with messages for users, and functions that shorten names and texts in messages."""

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping

from riptide.base.wording import LIBRARY, rename_parameters

MAX_MESSAGE = 2_000  # maximum characters of a message, even if it quotes long input


def printable(text: str) -> str:
    """Escapes unpaired surrogates, so that every output accepts the text."""
    return text.encode(errors="backslashreplace").decode()


def shorten(text: str, max_characters: int = MAX_MESSAGE) -> str:
    """Returns a printable text of at most `max_characters`; "…" replaces the middle of a longer text."""
    return _cut(printable(_cut(text, max_characters)), max_characters)


def list_first(names: Collection[str], max_names: int = 3, max_characters: int = 120) -> str:
    """Lists the first names, each cut to a number of characters, and the count of the others."""
    shown = [shorten(name, max_characters) for name in itertools.islice(names, max_names)]
    return ", ".join(shown) + (f" and {len(names) - max_names:,} more" if len(names) > max_names else "")


def _cut(text: str, max_characters: int) -> str:
    end = (max_characters - 1) // 3
    return text if len(text) <= max_characters else f"{text[: max_characters - 1 - end]}…{text[len(text) - end :]}"


class InputError(ValueError):
    """Invalid input; the message is one line: file (and line), actual value, expected value, and remedy.

    Jobs print it as that line and exit with status 1; anything else that is raised is our fault, with its traceback.
    `str(error)` has parameters and commands in the words of the library; within another message, `f"{error}"` keeps
    them as values, which a front end writes in its own words (`riptide.base.wording`).
    """

    def __str__(self) -> str:
        return LIBRARY.render(f"{self}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __format__(self, spec: str) -> str:
        return str(self.args[0]) if self.args else ""


@contextlib.contextmanager
def renamed_parameters(**names: str) -> Iterator[None]:
    """Context in which errors for bad input name parameters as the caller does: `dtype="rerank_dtype"`."""
    try:
        yield
    except InputError as error:
        error.args = (rename_parameters(f"{error}", names), *error.args[1:])
        raise


class StorageError(InputError):
    """A store or a source cannot be read or written at this moment; its contents may be intact.

    A command that ends with it can be repeated as it is and keeps what is committed.
    """


class BusyStorageError(StorageError):
    """A storage service temporarily rejects requests from all nodes: it throttles them, or fails internally."""


class RowError(InputError):
    """A row of a file cannot be used; the other rows of the file can be read."""


class TextsError(InputError):
    """Some texts of a call cannot be used; the same call without them succeeds.

    Args:
        message: What is wrong with the first of them, by its name or number.
        reasons: At least one reason why a text cannot be used, by the number of the text in the call, from 0.
    """

    def __init__(self, message: str, reasons: Mapping[int, str]):
        super().__init__(message, reasons)  # All arguments are passed, so that pickle can rebuild the exception.
        self.reasons = dict(reasons)


class DivergedError(InputError):
    """The loss, gradient or weights of a training run are not finite, for example because of a high learning rate."""
