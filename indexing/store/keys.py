"""Parses and builds keys of artifacts, KIND/NAME."""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

MAX_NAME = 128  # maximum length of a name: file systems allow 255 characters, of which names of checkpoints need some
ERASURES = "erasures"  # folder of the receipts of erasures
BEGUN_ERASURE = f"{ERASURES}/begun.json"  # the plan of an erasure that is in progress or was interrupted


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
        """Parses KIND/NAME; the name is empty if the text has no slash."""
        kind, _, name = text.partition("/")
        return cls(kind, name)


def without_generation(key: str) -> str:
    """Removes /gNNNN from the key of a generation: returns KIND/NAME, or KIND for the corpus."""
    return re.sub(r"/g\d{4}$", "", key)


def checkpoint_names(kind: str, name: str) -> tuple[str, str]:
    """Returns the names of the last and of the best checkpoint of the training of KIND/NAME; they have no slash."""
    name = name.replace("/", ".")
    return f"{name}.{kind}", f"{name}.{kind}.best"


def default_name(*pieces: str) -> str:
    """Joins pieces by dashes; a name longer than MAX_NAME is cut and ends with a hash of the whole name."""
    name = "-".join(pieces)
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME // 2]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
