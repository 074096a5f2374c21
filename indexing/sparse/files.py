"""The file of a part of sparse embeddings: CSR vectors as a safetensors file; the same vectors give the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from retriever.errors import InputError
from retriever.sparse.vectors import SparseVectors

SUFFIX = ".safetensors"
_DTYPES = {"indices": np.int32, "values": np.float32, "offsets": np.int64}


def save_vectors(vectors: SparseVectors, path: Path) -> None:
    """Writes vectors to a file. Raises OSError if the bytes cannot be written."""
    arrays = {name: np.ascontiguousarray(getattr(vectors, name), dtype) for name, dtype in _DTYPES.items()}
    path.write_bytes(save(arrays, metadata={"width": str(vectors.width)}))


def read_vectors(path: Path, rows: int, width: int, label: str) -> SparseVectors:
    """Returns the vectors of a file.

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
        raise InputError(f"{label}: expected indices int32, values float32 and offsets int64, got "
                         f"{', '.join(sorted(names)) or 'nothing'}")  # fmt: skip
    if metadata.get("width") != str(width) or arrays["offsets"].shape != (rows + 1,):
        raise InputError(f"{label}: {arrays['offsets'].size - 1} vectors over {metadata.get('width')} words, expected "
                         f"{rows} over {width}")  # fmt: skip
    vectors = SparseVectors(width=width, **arrays)
    if not _is_csr(vectors):
        raise InputError(f"{label}: expected ascending words below {width} with weights above 0 in each vector")
    return vectors


def _is_csr(vectors: SparseVectors) -> bool:
    """Whether offsets rise to the number of values, words ascend in each vector, and weights are finite and above 0."""
    offsets, indices, values = vectors.offsets, vectors.indices, vectors.values
    if indices.ndim != 1 or indices.shape != values.shape or offsets[0] != 0 or offsets[-1] != len(indices):
        return False
    if (np.diff(offsets) < 0).any() or not np.isfinite(values).all() or (values <= 0).any():
        return False
    if len(indices) and (indices.min() < 0 or indices.max() >= vectors.width):
        return False
    keys = np.repeat(np.arange(len(vectors), dtype=np.int64), vectors.counts) * vectors.width + indices
    return bool((np.diff(keys) > 0).all())
