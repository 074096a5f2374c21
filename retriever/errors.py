"""The exceptions for what a user can fix."""

from collections.abc import Mapping


class InputError(ValueError):
    """Bad input, in one line: what file (and line), what was found, what was expected, what to do.

    Jobs print it as that line and exit with status 1; anything else that is raised is our fault, with its traceback.
    """


class StorageError(InputError):
    """A store or a source cannot be read or written at this moment; its contents may be as they should be.

    A command that ends with it can be repeated as it is and keeps what is committed.
    """


class TextsError(InputError):
    """Some texts of a call cannot be used; the same call without them works.

    Args:
        message: What is wrong with the first of them, by its name or number.
        reasons: At least one reason why a text cannot be used, by the number of the text in the call, from 0.
    """

    def __init__(self, message: str, reasons: Mapping[int, str]):
        super().__init__(message, reasons)  # all arguments, so that pickle can make it again
        self.reasons = dict(reasons)

    def __str__(self) -> str:
        return str(self.args[0])


class Diverged(InputError):
    """A training run whose loss, gradient or weights are no longer finite, for example by too high a learning rate."""
