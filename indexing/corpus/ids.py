"""Finds the rows of passage ids by sorted 64-bit hashes. Hashes can collide, so callers compare the ids too.

Hashes are in buckets by their upper bits, a file for each bucket: an .npy of uint64 [2, n] with the hashes in ascending
order and the row of each one. Equal hashes are in the order of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

BUCKET_ROWS = 1 << 24  # rows of a bucket, which is sorted in memory and takes 256 MB


def hash_ids(ids: Sequence[str]) -> np.ndarray:
    """Returns the 64-bit XXH3 hash of the UTF-8 bytes of each id: uint64 [n]."""
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(id.encode()) for id in ids), np.uint64, len(ids))


def sorted_hashes(ids: Sequence[str]) -> np.ndarray:
    """Returns the sorted hashes of the ids of a part, with their rows in the part: uint64 [2, n]."""
    hashes = hash_ids(ids)
    order = np.argsort(hashes, kind="stable")
    return np.stack([hashes[order], order.astype(np.uint64)])


def num_buckets(num_rows: int) -> int:
    """Returns the number of buckets for the ids of `num_rows` rows: a power of two."""
    return 1 << max(0, (num_rows - 1) // BUCKET_ROWS).bit_length()


def merge_bucket(files: Sequence[tuple[Path, int]], bucket: int, buckets: int) -> np.ndarray:
    """Merges the hashes of a bucket from all parts, with corpus rows: uint64 [2, n], sorted by hash.

    Only the bucket is in memory: the files are memory-mapped and sorted, so a bucket is a slice of each.

    Args:
        files: The files of `sorted_hashes` of all parts, each with the first row of its part in the corpus.
        bucket: Number of the bucket.
        buckets: Number of buckets.
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


def repeated_hashes(ids: np.ndarray) -> np.ndarray:
    """Returns pairs of rows with equal, adjacent hashes, int64 [n, 2]; the ids are equal, or the hashes collide."""
    same = np.flatnonzero(ids[0][1:] == ids[0][:-1])
    return np.stack([ids[1][same], ids[1][same + 1]], axis=1).astype(np.int64)


def rows_with_hashes(files: Sequence[np.ndarray], hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds the rows of the given id hashes.

    Args:
        files: The buckets, in order.
        hashes: The hashes, uint64 [n].

    Returns:
        Positions in `hashes`, ascending, and the row of each: two int64 [m].
    """
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
