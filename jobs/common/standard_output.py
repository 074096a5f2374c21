"""Prints lines to standard output, with an error that names it if it takes no more."""

from __future__ import annotations

import os
import sys


def print_line(line: str) -> None:
    """Prints a line to stdout, whose encoding may not be UTF-8; an OSError names standard output as its file."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        error.filename = "standard output"
        with open(os.devnull, "w", encoding="utf-8") as devnull:
            os.dup2(devnull.fileno(), sys.stdout.fileno())  # At exit, Python writes its buffer again, which would fail.
        raise
