"""Exceptions with messages for users."""

import contextlib
from collections.abc import Iterator, Mapping

from riptide.base.wording import LIBRARY, cut_words, rename_parameters


class InputError(ValueError):
    """Invalid input; the message is one line: file (and line), actual value, expected value, and remedy.

    Jobs print it as that line and exit with status 1; anything else that is raised is our fault, with its traceback.
    `str(error)` has parameters and commands in the words of the library; within another message, `f"{error}"` keeps
    them as values, which a front end writes in its own words (`riptide.base.wording`).
    """

    def __str__(self) -> str:
        return LIBRARY.render(cut_words(f"{self}"))

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
