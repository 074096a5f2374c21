"""The one exception for what a person can mend."""


class InputError(ValueError):
    """Bad input, in one line: what file (and line), what was found, what was expected, what to do.

    Jobs print it as that line and exit with status 1; anything else that is raised is our fault, with its traceback.
    """
