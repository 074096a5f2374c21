"""The exceptions for what a user can fix."""


class InputError(ValueError):
    """Bad input, in one line: what file (and line), what was found, what was expected, what to do.

    Jobs print it as that line and exit with status 1; anything else that is raised is our fault, with its traceback.
    """


class StorageError(InputError):
    """A store or a source cannot be read or written at this moment; its contents may be as they should be.

    A command that ends with it can be repeated as it is and keeps what is committed.
    """


class Diverged(InputError):
    """A training run whose loss, gradient or weights are no longer finite, for example by too high a learning rate."""
