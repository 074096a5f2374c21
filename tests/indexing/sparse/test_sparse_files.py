"""Files of sparse embeddings: read back as they were written; damaged and foreign ones are refused in one line."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from riptide.base.errors import InputError
from riptide.indexing.sparse import csr_file
from riptide.indexing.sparse.csr_file import open_spool, read_vectors, save_vectors
from riptide.retriever.encoding.sparse_vectors import SparseVectors, from_dense


def some_vectors(rows: int = 9, width: int = 40) -> SparseVectors:
    draw = np.random.default_rng(0)
    matrix = draw.random((rows, width)).astype(np.float32) * (draw.random((rows, width)) < 0.2)
    matrix[[0, rows - 1]] = 0
    return from_dense(matrix)


def test_vectors_are_read_as_they_were_written(tmp_path: Path) -> None:
    for number, vectors in enumerate((some_vectors(), some_vectors().take(np.empty(0, np.int64)))):
        csr_file = [tmp_path / f"{number}-{copy}" for copy in range(2)]
        for file in csr_file:
            save_vectors(vectors, file)
        assert csr_file[0].read_bytes() == csr_file[1].read_bytes()
        found = read_vectors(csr_file[0], len(vectors), 40, "it")
        for name in ("indices", "values", "offsets"):
            np.testing.assert_array_equal(getattr(found, name), getattr(vectors, name))


def whole_bytes(vectors: SparseVectors) -> bytes:
    """Returns the bytes of a file, by safetensors' own writer."""
    arrays = {name: getattr(vectors, name) for name in ("indices", "values", "offsets")}
    return save(arrays, metadata={"width": str(vectors.width)})


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_files_have_the_bytes_of_safetensors_own_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Of any block, also for vectors that come in another order; headers of several lengths."""
    monkeypatch.setattr(csr_file, "_BLOCK", block)
    for rows, width in ((9, 40), (0, 40), (1, 40), (70, 300)):
        vectors = some_vectors(rows, width) if rows > 1 else some_vectors().take(np.arange(rows))
        save_vectors(vectors, tmp_path / "f")
        assert (tmp_path / "f").read_bytes() == whole_bytes(vectors)
        order = np.random.default_rng(1).permutation(rows)
        with open_spool(tmp_path, width) as spool:
            for batch in np.array_split(order, 4):
                spool.add(batch, vectors.take(batch))
            spool.save(tmp_path / "g")
        assert (tmp_path / "g").read_bytes() == whole_bytes(vectors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "g"]


def test_memory_does_not_grow_with_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 vectors of 2,000 words: 32 MB of numbers."""
    monkeypatch.setattr(csr_file, "_BLOCK", 20_000)
    full = from_dense(np.ones((50, 2_000), np.float32))
    tracemalloc.start()
    with open_spool(tmp_path, 2_000) as spool:
        for first in range(0, 2_000, 50):
            spool.add(np.arange(first, first + 50)[::-1], full)
        spool.save(tmp_path / "f")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "f").stat().st_size > 32_000_000
    assert peak < 3_000_000


def test_reading_needs_less_than_twice_the_memory_of_the_file(tmp_path: Path) -> None:
    """2,000 vectors of 1,000 words: 16 MB."""
    save_vectors(from_dense(np.ones((2_000, 1_000), np.float32)), tmp_path / "f")
    tracemalloc.start()
    read_vectors(tmp_path / "f", 2_000, 1_000, "part")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * (tmp_path / "f").stat().st_size


@pytest.mark.parametrize(("first", "end"), [(0, 9), (0, 0), (3, 7), (8, 9), (9, 9)])
def test_a_range_of_vectors_shares_their_memory(first: int, end: int) -> None:
    vectors = some_vectors()
    piece, expected = vectors.between(first, end), vectors.take(np.arange(first, end))
    for name in ("indices", "values", "offsets"):
        np.testing.assert_array_equal(getattr(piece, name), getattr(expected, name))
    assert not len(piece.values) or np.shares_memory(piece.values, vectors.values)


@pytest.mark.parametrize("block", [1, 30, 1 << 20])
def test_blocks_cover_all_vectors_in_order(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(csr_file, "_BLOCK", block)
    vectors = some_vectors(70)
    pieces = list(csr_file.blocks(vectors.offsets))
    assert [row for first, end in pieces for row in range(first, end)] == list(range(70))
    assert all(end - first == 1 or vectors.counts[first:end].sum() <= block for first, end in pieces)


GOOD: dict[str, Any] = {
    "indices": np.array([1, 5, 2], np.int32),
    "values": np.array([0.5, 1.0, 2.0], np.float32),
    "offsets": np.array([0, 2, 2, 3]),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": np.array([5, 1, 2], np.int32)}, "expected ascending words below 8 with weights above 0"),
        ({"indices": np.array([1, 1, 2], np.int32)}, "expected ascending words below 8 with weights above 0"),
        ({"indices": np.array([1, 8, 2], np.int32)}, "expected ascending words below 8"),
        ({"values": np.array([0.5, 0.0, 2.0], np.float32)}, "expected ascending words below 8"),
        ({"values": np.array([0.5, np.inf, 2.0], np.float32)}, "expected ascending words below 8"),
        ({"offsets": np.array([0, 2, 1, 3])}, "expected ascending words below 8"),
        ({"offsets": np.array([0, 2, 2, 4])}, "expected ascending words below 8"),
        ({"offsets": np.array([0, 2, 3])}, "2 vectors over 8 words, expected 3 over 8"),
        ({"offsets": np.array(3)}, "0 vectors over 8 words, expected 3 over 8"),
        ({"values": np.array([0.5, 1.0, 2.0])}, "expected indices int32, values float32 and offsets int64, got"),
        ({"more": np.zeros(1)}, "got indices, more, offsets, values"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, change: dict[str, np.ndarray], message: str) -> None:
    save_file({**GOOD, **change}, tmp_path / "f", metadata={"width": "8"})
    with pytest.raises(InputError) as raised:
        read_vectors(tmp_path / "f", 3, 8, "part")
    assert message in str(raised.value)


def test_files_of_another_width_and_cut_ones_are_refused(tmp_path: Path) -> None:
    save_vectors(some_vectors(), tmp_path / "f")
    with pytest.raises(InputError, match="9 vectors over 40 words, expected 9 over 41"):
        read_vectors(tmp_path / "f", 9, 41, "part")
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:-3])
    with pytest.raises(InputError, match="part: cannot be read"):
        read_vectors(tmp_path / "f", 9, 40, "part")
