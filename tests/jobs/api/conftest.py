"""A store that is made by the methods of the API: searched, measured and read by the tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import make_passages, make_queries

import riptide


@pytest.fixture(scope="session")
def make_store(model: str) -> Callable[[str | Path], riptide.Store]:
    """make_store(URL) makes a store of 240 passages and 30 queries with BM25, embeddings and an index."""

    def make(url: str | Path) -> riptide.Store:
        store = riptide.Store(url)
        passages = make_passages(240)
        rows = [
            {"id": each["_id"], "title": each["title"], "text": each["text"], **each["metadata"], "tags": ["a", "b"]}
            for each in passages
        ]
        store.import_corpus(rows, filters={"year": "int64"}, part_size=60)
        queries, judged = make_queries(passages, 30)
        positives = {query: passage for query, passage, _ in judged}
        store.import_queries(
            [{"id": each["_id"], "query": each["text"], "passage_id": positives[each["_id"]]} for each in queries],
            name="mine",
            split="test",
        )
        store.build_bm25()
        store.encode_corpus(model, name="enc", dtype="float32", compile="never")
        store.build_index("enc", name="idx", factory="IVF4,PQ8x4fs", shards=3)
        return store

    return make


@pytest.fixture(scope="session")
def _store_folder(tmp_path_factory: pytest.TempPathFactory, make_store: Callable[[str | Path], riptide.Store]) -> Path:
    return Path(make_store(tmp_path_factory.mktemp("made") / "store").url)


@pytest.fixture(scope="session")
def shared(_store_folder: Path) -> riptide.Store:
    """The store, for tests that change nothing."""
    return riptide.Store(_store_folder)


@pytest.fixture
def store(_store_folder: Path, tmp_path: Path) -> riptide.Store:
    """The store, copied for the test."""
    shutil.copytree(_store_folder, tmp_path / "store")
    return riptide.Store(tmp_path / "store")
