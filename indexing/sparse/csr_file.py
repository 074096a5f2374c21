"""Reads and writes CSR vectors as safetensors files, one per part; equal vectors give equal bytes."""

from __future__ import annotations

import contextlib
import json
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from riptide.base.errors import InputError
from riptide.retriever.encoding.sparse_vectors import SparseVectors

SUFFIX = ".safetensors"
NUMBER_BYTES = 8  # size of a number of a vector: a word (int32) and its weight (float32)
_DTYPES = {"indices": np.int32, "values": np.float32, "offsets": np.int64}
_LAYOUT = {"offsets": "I64", "values": "F32", "indices": "I32"}  # in the order in which safetensors writes entries
_BLOCK = 1 << 20  # maximum number of non-zero values that are written or converted at a time


def save_vectors(vectors: SparseVectors, path: Path, rows: np.ndarray | None = None) -> None:
    """Writes vectors to a file, block by block, as the bytes that `safetensors.numpy.save` returns.

    safetensors' own writers need all bytes in memory, or do not raise OSError on a full disk.

    Args:
        vectors: The vectors; their arrays may be memory-mapped.
        path: The file.
        rows: The vectors to write, in this order: int64 [n]. None: all.

    Raises:
        OSError: If the bytes cannot be written.
    """
    rows = np.arange(len(vectors)) if rows is None else rows
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(vectors.counts[rows])])
    sizes = {"offsets": len(offsets), "values": int(offsets[-1]), "indices": int(offsets[-1])}
    entries: dict[str, Any] = {"__metadata__": {"width": str(vectors.width)}}
    starts, end = {}, 0
    for name, size in sizes.items():
        starts[name], end = end, end + size * np.dtype(_DTYPES[name]).itemsize
        entries[name] = {"dtype": _LAYOUT[name], "shape": [size], "data_offsets": [starts[name], end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        data = file.tell()
        file.write(np.ascontiguousarray(offsets, np.int64).data)
        for first, last in blocks(offsets):
            block = vectors.take(rows[first:last])
            for name in ("values", "indices"):
                array = np.ascontiguousarray(getattr(block, name), _DTYPES[name])
                file.seek(data + starts[name] + int(offsets[first]) * array.itemsize)
                file.write(array.data)


def blocks(offsets: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields (first vector, end) of blocks with at most _BLOCK non-zero values, or with a single vector.

    offsets: where the numbers of each vector begin, and the end of the last one, int64 [vectors + 1].
    """
    first = 0
    while first < len(offsets) - 1:
        last = int(np.searchsorted(offsets, offsets[first] + _BLOCK, "right")) - 1
        yield first, max(first + 1, last)
        first = max(first + 1, last)


@contextlib.contextmanager
def open_spool(folder: Path, width: int) -> Iterator[VectorSpool]:
    """Opens a spool over unnamed temporary files, which are deleted at the latest when the process ends.

    Args:
        folder: The folder of the files.
        width: The number of words of the vocabulary.

    Raises:
        OSError: If the files cannot be created.
    """
    with tempfile.TemporaryFile(dir=folder) as indices, tempfile.TemporaryFile(dir=folder) as values:
        yield VectorSpool(indices, values, width)


class VectorSpool:
    """Collects sparse vectors, which arrive in any order, in temporary files, and then writes all in order of rows.

    Memory holds only the block of vectors that is added or written.
    """

    def __init__(self, indices: IO[bytes], values: IO[bytes], width: int):
        """Starts an empty spool. indices, values: empty files. width: size of the vocabulary."""
        self._indices, self._values, self._width = indices, values, width
        self._rows: list[np.ndarray] = [np.empty(0, np.int64)]
        self._counts: list[np.ndarray] = [np.zeros(1, np.int64)]

    def add(self, rows: np.ndarray, vectors: SparseVectors) -> None:
        """Adds the vectors of `rows`, int64 [n]. Raises OSError if they cannot be written."""
        self._rows.append(rows)
        self._counts.append(vectors.counts)
        self._indices.write(np.ascontiguousarray(vectors.indices, np.int32).data)
        self._values.write(np.ascontiguousarray(vectors.values, np.float32).data)

    def save(self, path: Path) -> None:
        """Writes all vectors to a file, in the order of their rows. Raises the errors of `save_vectors`."""
        offsets = np.cumsum(np.concatenate(self._counts))
        indices, values = _map_numbers(self._indices, np.int32), _map_numbers(self._values, np.float32)
        save_vectors(SparseVectors(indices, values, offsets, self._width), path, np.argsort(np.concatenate(self._rows)))


def _map_numbers(file: IO[bytes], dtype: type[np.generic]) -> np.ndarray:
    """Memory-maps a file as an array; returns an empty array for an empty file, which cannot be mapped."""
    file.flush()
    return np.memmap(file, dtype, "r") if file.seek(0, 2) else np.empty(0, dtype)


def read_vectors(path: Path, rows: int, width: int, label: str) -> SparseVectors:
    """Reads and checks the vectors of a file.

    Args:
        path: The file.
        rows: The number of vectors that it must hold.
        width: The number of words of their vocabulary.
        label: The name of the file in messages.

    Raises:
        InputError: If the file is damaged, or is not what `rows` and `width` say.
    """
    try:
        with safe_open(path, "np") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
            arrays = {name: file.get_tensor(name) for name in _DTYPES if name in names}
    except SafetensorError as error:
        raise InputError(f"{label}: cannot be read: {' '.join(str(error).split())[:200]}") from error
    if names != set(_DTYPES) or any(arrays[name].dtype != dtype for name, dtype in _DTYPES.items()):
        raise InputError(
            f"{label}: expected indices int32, values float32 and offsets int64, got "
            f"{', '.join(sorted(names)) or 'nothing'}"
        )
    if metadata.get("width") != str(width) or arrays["offsets"].shape != (rows + 1,):
        raise InputError(
            f"{label}: {arrays['offsets'].size - 1} vectors over {metadata.get('width')} words, expected "
            f"{rows} over {width}"
        )
    vectors = SparseVectors(width=width, **arrays)
    if not _is_csr(vectors):
        raise InputError(f"{label}: expected ascending words below {width} with weights above 0 in each vector")
    return vectors


def map_vectors(path: Path, rows: int, width: int, label: str) -> SparseVectors:
    """Checks the vectors of a file by `read_vectors` and memory-maps them; same arguments and errors."""
    read_vectors(path, rows, width, label)
    with open(path, "rb") as file:
        [size] = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    arrays = {}
    for name, dtype in _DTYPES.items():
        start, end = header[name]["data_offsets"]
        shape = tuple(header[name]["shape"])
        arrays[name] = np.memmap(path, dtype, "r", 8 + size + start, shape) if end > start else np.empty(shape, dtype)
    return SparseVectors(width=width, **arrays)


def _is_csr(vectors: SparseVectors) -> bool:
    """Returns whether vectors are valid CSR: rising offsets, ascending words per vector, weights finite and above 0."""
    offsets, indices, values = vectors.offsets, vectors.indices, vectors.values
    if indices.ndim != 1 or indices.shape != values.shape or offsets[0] != 0 or offsets[-1] != len(indices):
        return False
    if (np.diff(offsets) < 0).any() or not np.isfinite(values).all() or (values <= 0).any():
        return False
    if len(indices) and (indices.min() < 0 or indices.max() >= vectors.width):
        return False
    ascends = np.diff(indices) > 0
    first_numbers = offsets[1:-1]  # positions where each vector but the first begins
    ascends[first_numbers[(first_numbers > 0) & (first_numbers < len(indices))] - 1] = True
    return bool(ascends.all())
