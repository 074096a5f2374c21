"""Passage id -> row: sorted 64-bit hashes, in buckets by the hash's upper bits; collisions are checked by the reader.

An ids file is an .npy of uint64 [2, n]: the hashes, ascending, and the row of each (equal hashes: by row).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

BUCKET_ROWS = 1 << 24  # 256 MB of hashes and rows are sorted at once


def hash_ids(ids: Sequence[str]) -> np.ndarray:
    """XXH3 of each id's UTF-8 bytes: uint64 [n]."""
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(id.encode()) for id in ids), np.uint64, len(ids))


def sorted_hashes(ids: Sequence[str]) -> np.ndarray:
    """One part's ids file, its rows local to the part: uint64 [2, n]."""
    hashes = hash_ids(ids)
    order = np.argsort(hashes, kind="stable")
    return np.stack([hashes[order], order.astype(np.uint64)])


def num_buckets(num_rows: int) -> int:
    """Into how many files so many rows' ids go: a power of two."""
    return 1 << max(0, (num_rows - 1) // BUCKET_ROWS).bit_length()


def merge_bucket(files: Sequence[tuple[Path, int]], bucket: int, buckets: int) -> np.ndarray:
    """One bucket's ids, of all parts: `files` are the parts' ids files, each with its first global row. uint64 [2, n].

    Holds only the bucket: the files are memory-mapped and sorted, so a bucket is a slice of each.
    """
    span = (1 << 64) // buckets
    low, high = np.uint64(bucket * span), np.uint64(bucket * span + (span - 1))
    slices = []
    for path, first_row in files:
        part = np.load(path, mmap_mode="r")
        start, end = np.searchsorted(part[0], low, "left"), np.searchsorted(part[0], high, "right")
        piece = np.array(part[:, start:end])
        piece[1] += np.uint64(first_row)
        slices.append(piece)
    merged = np.concatenate(slices, axis=1) if slices else np.empty((2, 0), np.uint64)
    return np.ascontiguousarray(merged[:, np.argsort(merged[0], kind="stable")])


def repeated(ids: np.ndarray) -> np.ndarray:
    """Rows int64 [n, 2] of neighbours with the same hash: doubles, or (rarely) collisions."""
    same = np.flatnonzero(ids[0][1:] == ids[0][:-1])
    return np.stack([ids[1][same], ids[1][same + 1]], axis=1).astype(np.int64)


def candidates(files: Sequence[np.ndarray], hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All (position in `hashes`, row) whose hashes agree, by position: two int64 [m]. `files`: buckets, in order."""
    positions, rows = [], []
    owner = (hashes >> np.uint64(65 - len(files).bit_length())).astype(np.int64) if len(files) > 1 else None
    for bucket, ids in enumerate(files):
        mine = np.arange(len(hashes)) if owner is None else np.flatnonzero(owner == bucket)
        start = np.searchsorted(ids[0], hashes[mine], "left")
        end = np.searchsorted(ids[0], hashes[mine], "right")
        count = end - start
        positions.append(np.repeat(mine, count))
        offsets = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        rows.append(np.asarray(ids[1][np.repeat(start, count) + offsets]).astype(np.int64))
    all_positions = np.concatenate(positions) if positions else np.empty(0, np.int64)
    order = np.argsort(all_positions, kind="stable")
    return all_positions[order], (np.concatenate(rows)[order] if rows else np.empty(0, np.int64))
