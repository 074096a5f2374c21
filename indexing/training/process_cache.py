"""A cache of the data of a training job, within one process."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Value = TypeVar("Value")


class ProcessCache:
    """Keeps the data that a job opens, so that the check of a training run and the run itself open it once.

    A pickled cache is empty: a worker in another process opens its own data.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def __reduce__(self) -> tuple[type[ProcessCache], tuple[()]]:
        return ProcessCache, ()

    def get(self, key: Hashable, open_value: Callable[[], Value]) -> Value:
        """Returns the value of a key, and calls `open_value` for it the first time."""
        if key not in self._values:
            self._values[key] = open_value()
        value: Value = self._values[key]
        return value

    def clear(self) -> None:
        """Removes all values, which frees their memory."""
        self._values.clear()
