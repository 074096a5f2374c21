"""Sparse vectors in CSR form: conversion from dense ones, selection and concatenation; needs numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SparseVectors:
    """Vectors over a vocabulary, of which only the non-zero numbers are stored.

    Attributes:
        indices: The words of each vector, ascending: int32 [numbers].
        values: Their weights: float32 [numbers].
        offsets: Where the numbers of each vector begin, and the end of the last one: int64 [vectors + 1].
        width: Number of words of the vocabulary.
    """

    indices: np.ndarray
    values: np.ndarray
    offsets: np.ndarray
    width: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> np.ndarray:
        """The number of non-zero words of each vector, int64 [vectors]."""
        return np.diff(self.offsets)

    def dense(self) -> np.ndarray:
        """Returns the vectors with all zeros, float32 [vectors, width]."""
        matrix = np.zeros((len(self), self.width), np.float32)
        matrix[np.repeat(np.arange(len(self)), self.counts), self.indices] = self.values
        return matrix

    def between(self, first: int, end: int) -> SparseVectors:
        """Returns the vectors [first, end), without a copy of their numbers."""
        offsets = self.offsets[first : end + 1]
        numbers = slice(int(offsets[0]), int(offsets[-1]))
        return SparseVectors(self.indices[numbers], self.values[numbers], offsets - offsets[0], self.width)

    def take(self, rows: np.ndarray) -> SparseVectors:
        """Returns some of the vectors, in the order of `rows`, int64 [n]."""
        counts = self.counts[rows]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        places = np.repeat(self.offsets[:-1][rows] - offsets[:-1], counts) + np.arange(offsets[-1])
        return SparseVectors(self.indices[places], self.values[places], offsets, self.width)


def from_dense(matrix: np.ndarray) -> SparseVectors:
    """Returns the rows of a matrix, float [vectors, width], as sparse vectors."""
    rows, words = np.nonzero(matrix)
    offsets = np.searchsorted(rows, np.arange(len(matrix) + 1)).astype(np.int64)
    return SparseVectors(words.astype(np.int32), matrix[rows, words].astype(np.float32), offsets, matrix.shape[1])


def concatenate(pieces: Sequence[SparseVectors], width: int) -> SparseVectors:
    """Returns the vectors of all pieces, in order. `width` is the size of the vocabulary."""
    counts = [np.zeros(1, np.int64), *(piece.counts for piece in pieces)]
    indices = [np.empty(0, np.int32), *(piece.indices for piece in pieces)]
    values = [np.empty(0, np.float32), *(piece.values for piece in pieces)]
    offsets = np.cumsum(np.concatenate(counts))
    return SparseVectors(np.concatenate(indices), np.concatenate(values), offsets, width)
