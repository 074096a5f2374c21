"""Sparse vectors in CSR format: conversion from dense vectors, selection and concatenation; imports only numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SparseVectors:
    """Sparse vectors over a vocabulary in CSR format, which stores only non-zero values.

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
        """The number of non-zero words per vector, int64 [vectors]."""
        return np.diff(self.offsets)

    def dense(self) -> np.ndarray:
        """Returns the vectors as a dense matrix, float32 [vectors, width]."""
        matrix = np.zeros((len(self), self.width), np.float32)
        matrix[np.repeat(np.arange(len(self)), self.counts), self.indices] = self.values
        return matrix

    def between(self, first: int, end: int) -> SparseVectors:
        """Returns the vectors [first, end) as a view of the same values."""
        offsets = self.offsets[first : end + 1]
        numbers = slice(int(offsets[0]), int(offsets[-1]))
        return SparseVectors(self.indices[numbers], self.values[numbers], offsets - offsets[0], self.width)

    def take(self, rows: np.ndarray) -> SparseVectors:
        """Returns the vectors at `rows`, int64 [n], in this order."""
        counts = self.counts[rows]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        places = np.repeat(self.offsets[:-1][rows] - offsets[:-1], counts) + np.arange(offsets[-1])
        return SparseVectors(self.indices[places], self.values[places], offsets, self.width)


def from_dense(matrix: np.ndarray) -> SparseVectors:
    """Converts the rows of a dense matrix, float [vectors, width], to sparse vectors."""
    rows, words = np.nonzero(matrix)
    offsets = np.searchsorted(rows, np.arange(len(matrix) + 1)).astype(np.int64)
    return SparseVectors(words.astype(np.int32), matrix[rows, words].astype(np.float32), offsets, matrix.shape[1])


def concatenate_sparse_vectors(pieces: Sequence[SparseVectors], width: int) -> SparseVectors:
    """Concatenates the vectors of all pieces in order. `width` is the size of the vocabulary."""
    counts = [np.zeros(1, np.int64), *(piece.counts for piece in pieces)]
    indices = [np.empty(0, np.int32), *(piece.indices for piece in pieces)]
    values = [np.empty(0, np.float32), *(piece.values for piece in pieces)]
    offsets = np.cumsum(np.concatenate(counts))
    return SparseVectors(np.concatenate(indices), np.concatenate(values), offsets, width)
