"""Keys of artifacts, KIND/NAME."""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

MAX_NAME = 128  # characters: file systems allow 255, and the names of parts and checkpoints need some of them


class Key(NamedTuple):
    """The key of an artifact: `store.open(*Key.parse(text))` opens it. A generation is named NAME/gNNNN.

    Attributes:
        kind: The kind of the artifact.
        name: Its name; the corpus has none, and its generations are named gNNNN.
    """

    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Key:
        """Returns the key of KIND/NAME; the name is empty if the text has no slash."""
        kind, _, name = text.partition("/")
        return cls(kind, name)


def without_generation(key: str) -> str:
    """Returns KIND/NAME of the key of a generation, KIND for the corpus; other keys unchanged."""
    return re.sub(r"/g\d{4}$", "", key)


def checkpoint_names(kind: str, name: str) -> tuple[str, str]:
    """Returns the names of the checkpoints of a training of KIND/NAME: of the last one, and of the best one."""
    return f"{name}.{kind}", f"{name}.{kind}.best"


def default_name(*pieces: str) -> str:
    """Returns pieces joined by dashes; a name that would be too long is cut, and ends with a hash of the whole."""
    name = "-".join(pieces)
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME // 2]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
