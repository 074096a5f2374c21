"""The categories of each passage of a corpus."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class CategoryTable:
    """The categories of each row, in compressed sparse rows.

    Attributes:
        names: The names of the categories by number, in the order of the alphabet.
        offsets: The categories of row r are `values[offsets[r] : offsets[r + 1]]`: int64 [rows + 1].
        values: Numbers of categories, rising within a row, each once: int32 [any].
    """

    names: tuple[str, ...]
    offsets: np.ndarray
    values: np.ndarray

    @property
    def num_rows(self) -> int:
        """The number of rows, those without categories included."""
        return len(self.offsets) - 1

    def of_row(self, row: int) -> np.ndarray:
        """Returns the categories of a row, int32 [any]."""
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def multi_hot(self, rows: np.ndarray) -> np.ndarray:
        """Returns which categories each of some rows has: bool [n, c].

        The columns are the c categories that at least one of these rows has, in the order of their numbers.

        Args:
            rows: int64 [n]; a row may come several times.
        """
        of_rows = [self.of_row(row) for row in rows.tolist()]
        places = np.repeat(np.arange(len(rows)), [len(each) for each in of_rows])
        categories, columns = np.unique(np.concatenate([*of_rows, np.empty(0, np.int32)]), return_inverse=True)
        result = np.zeros((len(rows), len(categories)), bool)
        result[places, columns] = True
        return result
