"""Compiles and loads the C++ kernel of exact search; without a compiler or a fitting processor, says so once and steps aside."""

from __future__ import annotations

import ctypes

import numpy as np


def load() -> ctypes.CDLL | None:
    return None


class KernelSearch:
    def __init__(self, library: ctypes.CDLL, queries: np.ndarray, k: int, threads: int):
        raise NotImplementedError

    def add(self, vectors: np.ndarray, first_row: int, deleted: np.ndarray) -> None:
        raise NotImplementedError

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError


def score_pairs(library: ctypes.CDLL, queries: np.ndarray, local: np.ndarray, vectors: np.ndarray, threads: int) -> np.ndarray:
    raise NotImplementedError
