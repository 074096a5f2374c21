"""Reads small text files, and reports any mistake in one line."""

from __future__ import annotations

from pathlib import Path

from riptide.base.errors import InputError

MAX_BYTES = 16 << 20  # maximum bytes of a small text file


def read_small_text(path: str | Path, expected: str) -> str:
    """Reads a text file of at most MAX_BYTES, in UTF-8.

    Args:
        path: The file.
        expected: What the file is for, for the message if it cannot be read: `expected a JSON file`.

    Raises:
        FileNotFoundError: If there is no such file.
        UnicodeDecodeError: If it is not UTF-8.
        InputError: If it cannot be read or is too large; a device such as /dev/zero has no end.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # A ValueError means a path with a NUL character.
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}; {expected}") from error
    if len(data) > MAX_BYTES:
        raise InputError(f"{path}: more than {MAX_BYTES:,} bytes; {expected}, of up to {MAX_BYTES:,} bytes")
    return data.decode()
