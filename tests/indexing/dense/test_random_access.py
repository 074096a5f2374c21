"""Random access to a remote store: what one query reads of parts that the node does not have, and how it is checked."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.common.counting_s3 import counting_s3, take_counts
from riptide.indexing.corpus import ids
from riptide.indexing.corpus.corpus import Corpus, read_rows, save_array, write_table
from riptide.indexing.corpus.ids import open_buckets, rows_with_hashes
from riptide.indexing.dense.shard import OpenShard
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.formats.parse import CORPUS_SCHEMA
from riptide.indexing.storage.cache import BLOCK_BYTES, CorruptError, MissingFileError, RangeFile, block_checksums
from riptide.indexing.storage.storage import LocalStorage
from riptide.indexing.store.store import Store

PARTS, ROWS, DIM = 3, 10_000, 16
QUERIES = np.random.default_rng(1).normal(size=(2, DIM)).astype(np.float32)
CANDIDATES = np.array([[5, 9_000, 10_003, 29_999], [6, 10_002, 10_003, -1]])


def write_store(root: Path) -> None:
    """Writes a corpus and embeddings of PARTS parts of ROWS rows."""
    store, random = Store(str(root)), np.random.default_rng(0)
    with store.create("corpus", "g0000", config={"filters": {}}) as corpus:
        for number in range(PARTS):
            rows = range(number * ROWS, (number + 1) * ROWS)
            columns = [[f"i{row}" for row in rows], [""] * ROWS, [f"text {row} " * 20 for row in rows], [""] * ROWS]
            table = pa.table(columns, schema=CORPUS_SCHEMA)
            name = f"part-{number:05d}"
            corpus.commit(name, ".arrow", lambda path, t=table: write_table(t, path), rows=ROWS, has_ranges=True)
    config = {"encoder": {"dim": DIM, "pooling": "mean"}}
    inputs = {"corpus": store.open("corpus", "g0000")}
    with store.create("embeddings", "e/g0000", inputs=inputs, config=config) as embeddings:
        embeddings.add_notes(encoder="none", options={}, dim=DIM, similarity="dot")
        for number in range(PARTS):
            vectors = random.normal(size=(ROWS, DIM)).astype(np.float16)
            name = f"part-{number:05d}"
            embeddings.commit(name, ".npy", lambda path, v=vectors: save_array(v, path), rows=ROWS)


def write_buckets(root: Path) -> None:
    """Writes an artifact with two buckets of id hashes, one of them with a collision."""
    random = np.random.default_rng(2)
    with Store(str(root)).create("topics", "hashes") as draft:
        for number, rows in enumerate((100_000, 120_000)):
            hashes = np.sort(random.integers(number << 63, (number + 1 << 63) - 1, rows, np.uint64))
            hashes[70_001] = hashes[70_000]
            entries = np.stack([hashes, random.permutation(rows).astype(np.uint64)])
            draft.commit(
                f"ids-{number:05d}", ".npy", lambda path, e=entries: save_array(e, path), rows=rows, has_ranges=True
            )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "store"
    write_store(folder)
    write_buckets(folder)
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[str]:
    with counting_s3(root) as url:
        yield url


@pytest.fixture
def remote(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store on S3, with an empty node cache."""
    monkeypatch.setenv("RIPTIDE_CACHE", str(tmp_path / "cache"))
    take_counts()
    return Store("s3://store")


def test_passages_of_a_few_rows_are_read_by_record_batches(remote: Store, root: Path) -> None:
    corpus, local = Corpus.open(remote), Corpus.open(Store(str(root)))
    rows = np.array([29_999, 0, 15_000])
    part_bytes = local.parts[0].part.bytes
    take_counts()
    assert corpus.passages(rows) == local.passages(rows)
    counts = take_counts()
    assert counts["bytes"] < 3 * part_bytes / 4
    assert corpus.ids(rows).tolist() == ["i29999", "i0", "i15000"]
    assert take_counts()["bytes"] <= 3 * 4 * BLOCK_BYTES  # the footer, and the ids of a batch
    assert not list(remote.cache.folder.rglob("*.arrow"))


def test_a_few_ids_are_found_without_the_file_of_their_bucket(
    remote: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ids, "BLOCK_SHARE", 1.0)
    local, distant = [store.open("topics", "hashes") for store in (Store(str(root)), remote)]
    stored = [np.load(local.local_path(part)) for part in local.parts]
    few = np.array([1 << 40, *stored[1][0][[-1, 70_000]], *stored[0][0][[-1, 0]]], np.uint64)
    many = stored[1][0][::10_000]
    for hashes, count in ((few[:0], 0), (few, 5), (many, len(many) + 1)):
        take_counts()
        found = rows_with_hashes(open_buckets(distant, hashes), hashes)
        assert [each.tolist() for each in found] == [each.tolist() for each in rows_with_hashes(stored, hashes)]
        assert len(found[0]) == count  # 70,000 and the next entry have the same hash
        files = len(list(remote.cache.folder.rglob("*.npy")))
        assert files == (hashes is many)
        assert files or take_counts().get("bytes", 0) <= ids.HASH_BLOCKS * len(hashes) * BLOCK_BYTES


def test_many_rows_of_a_part_fetch_its_file(remote: Store, root: Path) -> None:
    corpus, local = Corpus.open(remote), Corpus.open(Store(str(root)))
    rows = np.arange(0, ROWS, 100)
    assert corpus.ids(rows).tolist() == local.ids(rows).tolist()
    assert len(list(remote.cache.folder.rglob("*.arrow"))) == 1


def test_candidates_are_scored_from_their_own_bytes(remote: Store, root: Path) -> None:
    local = Store(str(root))
    parts = [Embeddings("e", store.generations("embeddings", "e")) for store in (remote, local)]
    take_counts()
    found, expected = [
        OpenShard(embeddings, 0, PARTS * ROWS).rescore(QUERIES, CANDIDATES, 3, 1) for embeddings in parts
    ]
    counts = take_counts()
    assert counts["bytes"] <= 8 * DIM * 2  # neighbours share a request
    assert (counts["GET"], counts.get("HEAD", 0)) == (4, 0)
    np.testing.assert_array_equal(found.rows, expected.rows)
    np.testing.assert_array_equal(found.scores, expected.scores)
    many = np.arange(2_000)[None]
    found, expected = [OpenShard(embeddings, 0, PARTS * ROWS).rescore(QUERIES[:1], many, 5, 1) for embeddings in parts]
    np.testing.assert_array_equal(found.scores, expected.scores)
    assert len(list(remote.cache.folder.rglob("*.npy"))) == 1


def test_a_part_without_checksums_is_fetched(remote: Store, root: Path) -> None:
    part = Corpus.open(remote).parts[1]
    part.part.facts.clear()  # as a release without them wrote it
    expected = read_rows(Corpus.open(Store(str(root))).parts[1], np.array([7, 3]), ["id"])
    assert read_rows(part, np.array([7, 3]), ["id"]) == expected
    assert len(list(remote.cache.folder.rglob("*.arrow"))) == 1


def test_a_file_of_ranges_reads_the_bytes_of_the_file_and_refuses_damaged_blocks(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(3 * BLOCK_BYTES + 100)
    (tmp_path / "a").write_bytes(data)
    checksums, storage = block_checksums(tmp_path / "a"), LocalStorage(str(tmp_path))
    assert len(checksums) == 4 * 8
    file = RangeFile(storage, "a", len(data), checksums)
    for start, end in [(5, 10), (BLOCK_BYTES - 3, BLOCK_BYTES + 3), (0, len(data)), (len(data) - 1, len(data) + 9)]:
        file.seek(start)
        assert file.read(end - start) == data[start:end]
    file.seek(-3, io.SEEK_END)
    assert (file.read(), file.read(1)) == (data[-3:], b"")
    with open(tmp_path / "a", "r+b") as damaged:
        damaged.seek(2 * BLOCK_BYTES)
        damaged.write(b"x" if data[2 * BLOCK_BYTES : 2 * BLOCK_BYTES + 1] != b"x" else b"y")
    file = RangeFile(storage, "a", len(data), checksums)
    assert file.read(BLOCK_BYTES) == data[:BLOCK_BYTES]
    file.seek(2 * BLOCK_BYTES)
    with pytest.raises(CorruptError, match="a: bytes 262144 and following are not the committed ones"):
        file.read(1)
    os.remove(tmp_path / "a")
    with pytest.raises(MissingFileError, match="a: the file is missing"):
        RangeFile(storage, "a", len(data), checksums).read(1)


def test_a_vector_file_that_is_cut_is_refused(root: Path, tmp_path: Path) -> None:
    [embeddings] = Store(str(root)).generations("embeddings", "e")
    part = embeddings.part("part-00000")
    with pytest.raises(CorruptError, match="are missing"):
        embeddings.read_range(part, part.bytes - 10, part.bytes + 10)
