"""Finds the rows of passage ids by sorted 64-bit hashes. Hashes can collide, so callers compare the ids too.

Hashes are in buckets by their upper bits, a file for each bucket: an .npy of uint64 [2, n] with the hashes in ascending
order and the row of each one. Equal hashes are in the order of their rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from riptide.indexing.storage.cache import BLOCK_BYTES, RangeFile
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.sealed_json import ArtifactPart

READERS = 16  # threads that read blocks of a remote bucket
BLOCK_SHARE = 1 / 4  # largest share of a bucket that is fetched by blocks instead of its file
HASH_BLOCKS = 3  # blocks that a look-up of one hash reads: one or two with hashes, one with rows
WINDOW = 2_048  # hashes that a look-up reads first; a position in a full bucket has a standard deviation of 2,048
BUCKET_ROWS = 1 << 24  # rows of a bucket, which is sorted in memory and takes 256 MB


def hash_ids(ids: Sequence[str]) -> np.ndarray:
    """Returns the 64-bit XXH3 hash of the UTF-8 bytes of each id: uint64 [n]."""
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(id.encode()) for id in ids), np.uint64, len(ids))


def hash_texts(texts: pa.Array | pa.ChunkedArray, seed: int = 0) -> np.ndarray:
    """Returns the 64-bit XXH3 hash of the UTF-8 bytes of each text: uint64 [n]; with seed 0 that of `hash_ids`."""
    ends, data = text_bytes(texts)
    view, digest = memoryview(data), xxhash.xxh3_64_intdigest
    pairs = itertools.pairwise(ends.tolist())
    return np.fromiter((digest(view[start:end], seed) for start, end in pairs), np.uint64, len(texts))


def text_bytes(texts: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, Any]:
    """Returns the UTF-8 bytes of texts, and where each begins and the last one ends: int64 [n + 1]."""
    texts = texts.cast(pa.large_string())
    array = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    return ends, data or b""


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


def open_buckets(artifact: Artifact, hashes: np.ndarray) -> list[np.ndarray]:
    """Opens the buckets of a generation of the corpus, to look up hashes.

    A bucket that this node does not have is not fetched for a few hashes: only blocks with them are, and are compared
    with their checksums.

    Args:
        artifact: The generation.
        hashes: The hashes, uint64 [n].

    Returns:
        The buckets, in order: uint64 [2, m]. Of one that this node does not have, the entries with the hashes suffice.
    """
    parts = artifact.numbered_parts("ids")
    span = (1 << 64) // max(1, len(parts))
    if all(map(artifact.has_file, parts)):
        return [np.load(artifact.local_path(part), mmap_mode="r") for part in parts]
    wanted = np.sort(hashes)
    wanted = wanted[np.concatenate([wanted[:1] == wanted[:1], wanted[1:] != wanted[:-1]])]  # np.unique is far slower
    buckets = []
    for number, part in enumerate(parts):
        low, high = np.uint64(number * span), np.uint64(number * span + (span - 1))
        in_bucket = wanted[np.searchsorted(wanted, low, "left") : np.searchsorted(wanted, high, "right")]
        is_few = HASH_BLOCKS * BLOCK_BYTES * len(in_bucket) <= part.bytes * BLOCK_SHARE
        if not len(in_bucket):
            buckets.append(np.empty((2, 0), np.uint64))
        elif is_few and not artifact.has_file(part) and artifact.open_ranges(part) is not None:
            buckets.append(_fetch_entries(artifact, part, in_bucket, span))
        else:
            buckets.append(np.load(artifact.local_path(part), mmap_mode="r"))
    return buckets


def _fetch_entries(artifact: Artifact, part: ArtifactPart, hashes: np.ndarray, span: int) -> np.ndarray:
    """Fetches the entries of a remote bucket with the given hashes: uint64 [2, m].

    Args:
        artifact: The generation of the corpus.
        part: The bucket, whose record has checksums.
        hashes: The hashes, uint64 [n], ascending, at least one.
        span: The number of values that a hash of the bucket can have.
    """

    def read(piece: np.ndarray) -> list[np.ndarray]:
        file = artifact.open_ranges(part)
        assert file is not None
        return [_entries_of_hash(file, part, hash, span) for hash in piece.tolist()]

    with ThreadPoolExecutor(READERS) as threads:
        pieces = threads.map(read, np.array_split(hashes, min(READERS, len(hashes))))
        return np.concatenate([entries for piece in pieces for entries in piece], axis=1)


def _entries_of_hash(file: RangeFile, part: ArtifactPart, hash: int, span: int) -> np.ndarray:
    """Reads the entries of one hash from a bucket: uint64 [2, m]. Hashes are uniform, so their positions are known."""
    header = part.bytes - 16 * part.rows

    def read(line: int, first: int, end: int) -> np.ndarray:
        file.seek(header + 8 * (line * part.rows + first))
        return np.frombuffer(file.read(8 * (end - first)), np.uint64)

    middle, width = hash % span * part.rows // span, WINDOW
    first, end = max(0, middle - width // 2), min(part.rows, middle + width // 2)
    values = read(0, first, end)
    while (first > 0 and values[0] >= hash) or (end < part.rows and values[-1] <= hash):
        width *= 2
        if values[0] >= hash:
            first = max(0, first - width)
        if values[-1] <= hash:
            end = min(part.rows, end + width)
        values = read(0, first, end)
    start, stop = (first + int(np.searchsorted(values, np.uint64(hash), side)) for side in ("left", "right"))
    if start == stop:
        return np.empty((2, 0), np.uint64)
    return np.stack([values[start - first : stop - first], read(1, start, stop)])


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
