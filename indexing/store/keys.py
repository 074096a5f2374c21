"""Keys of artifacts, KIND/NAME."""

from __future__ import annotations

import re
from typing import NamedTuple


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
        """Returns the key that a text is; the name of a text without a slash is empty."""
        kind, _, name = text.partition("/")
        return cls(kind, name)


def without_generation(key: str) -> str:
    """Returns KIND/NAME of the key of a generation, KIND for the corpus; other keys unchanged."""
    return re.sub(r"/g\d{4}$", "", key)
