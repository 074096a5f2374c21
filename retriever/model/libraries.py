"""Imports transformers under a lock, because several threads may import it first at the same time."""

from __future__ import annotations

import threading
from typing import Any

_importing = threading.Lock()


def import_transformers() -> Any:
    """Imports transformers and returns the module.

    transformers replaces its module while it is imported. A thread that imports it in the meantime would get the module
    that was replaced, which has no classes.
    """
    with _importing:
        import transformers
    return transformers
