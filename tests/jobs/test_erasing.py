"""Erased passages are in no artifact of a store; what was made from it stays valid, or is made again by its command."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from samples import make_passages, make_queries, save_tiny_bert, write_beir

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.erasure.kinds import KINDS
from riptide.indexing.store.store import MADE_BY, Store

Done = Callable[..., str]
SECRETS = ("zanzibarine", "quillwort", "p7-secret", "1987654321", "rosewater", "x9")
IDS = "p7-secret\np9\n"
MADE_AGAIN = (
    ("build_index", "--embeddings", "enc", "--factory", "IVF2,SQ8"),
    ("build_bm25",),
    ("mine_negatives", "--sources", "bm25", "--depth", "30", "--denoised-negatives", "0"),
)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, call_job: Callable[..., int]) -> Path:
    """A store with artifacts of every kind that an erasure changes; an earlier version of a passage is deleted."""
    root = tmp_path_factory.mktemp("erasing")
    passages = make_passages(60)
    queries, judged = make_queries(passages, 12)
    passages[7] = {
        "_id": "p7-secret",
        "title": "",
        "text": "zanzibarine",
        "metadata": {"year": 1987654321, "tags": ["x9"]},
    }
    judged = [("q0", "p7-secret", 1), *(line for line in judged if line[1] != "p7")]
    first = write_beir(root / "first/source", passages, queries, {"train": judged})
    passages[7] = {**passages[7], "text": f"quillwort {passages[9]['text']}", "title": "rosewater"}
    second = write_beir(root / "second/source", passages, queries, {"train": judged})
    model = save_tiny_bert(root / "model")
    store = str(root / "store")
    numerics = ("--dtype", "float32", "--compile", "never")
    for command in (
        ("import_corpus", "--source", first, "--part-size", "25", "--filters", "year", "int64", "tags", "list[string]"),
        ("encode_corpus", "--encoder", model, "--name", "enc", *numerics),
        ("import_corpus", "--source", second, "--part-size", "25", "--sync"),
        ("encode_corpus", "--encoder", model, "--name", "enc", *numerics),
        *MADE_AGAIN[:2],
        ("fit_topics", "--min-passages", "2", "--most-frequent", "0", "--iterations", "3", "--merge-below", "0"),
        ("search", "--mode", "exact", "--embeddings", "enc", "--split", "train", "--k", "60"),
        MADE_AGAIN[2],
    ):
        assert call_job(command[0], "--store", store, *map(str, command[1:])) == 0, command
    (root / "ids.txt").write_text(IDS)
    return root


@pytest.fixture
def copied(filled: Path, tmp_path: Path) -> Path:
    """A copy of the store `filled`, with its file of ids."""
    return Path(shutil.copytree(filled, tmp_path / "copy"))


def contents(store: Path) -> Iterator[tuple[Path, bytes]]:
    """Yields the bytes of each file, and of a Parquet file its values."""
    for file in sorted(each for each in store.rglob("*") if each.is_file()):
        yield file, file.read_bytes()
        if file.suffix == ".parquet":
            yield file, str(pq.read_table(file).to_pydict()).encode()


def found_secrets(store: Path) -> list[str]:
    """Returns the files that hold a secret, but the queries, whose judgements stay."""
    return [
        f"{file.relative_to(store)}: {secret}"
        for file, data in contents(store)
        for secret in SECRETS
        if secret.encode() in data or (secret.isdigit() and int(secret).to_bytes(8, "little") in data)
        if file.relative_to(store).parts[0] != "queries"
    ]


def fingerprints(store: Store) -> dict[str, str]:
    """Returns the fingerprint of every artifact."""
    keys = store.keys()
    return {key: store.open(*key.split("/", 1)).fingerprint for key in keys}


def test_no_byte_of_an_erased_passage_is_in_the_store(copied: Path, done: Done) -> None:
    folder, store, rows = copied / "store", Store(str(copied / "store")), [7, 9, 60]
    assert {line.split("/")[0] for line in found_secrets(folder)} >= {"corpus", "runs"}
    before = fingerprints(store)
    vectors = np.load(store.generations("embeddings", "enc")[0].local_path("part-00000"))
    command = ("import_corpus", "--store", folder, "--erase", copied / "ids.txt")

    plan = done(*command, "--plan")
    assert "remove   bm25/bm25/g0001" in plan
    assert "rewrite  corpus/g0000" in plan
    assert found_secrets(folder)
    out = done(*command)
    assert "judgements name erased passages, which count as deleted ones" in out
    assert found_secrets(folder) == []
    corpus = Corpus.open(store)
    assert corpus.deleted.tolist() == rows
    assert {passage[1:] for passage in corpus.passages(rows)} == {("", "", "", "")}
    erased = np.load(store.generations("embeddings", "enc")[0].local_path("part-00000"))
    vectors[[7, 9]] = 0
    assert np.array_equal(erased, vectors)
    tables = {file: pq.read_table(file) for file in folder.rglob("*.parquet")}
    held = {file: set(table["row"].to_pylist()) for file, table in tables.items() if "row" in table.schema.names}
    assert len(held) >= 2
    assert not any(set(rows) & each for each in held.values())

    for job, *options in MADE_AGAIN:
        done(job, "--store", folder, *options)
    assert fingerprints(store) == before
    assert found_secrets(folder) == []
    assert "as they were committed" in done("verify", "--store", folder)
    assert done(*command) == f"nothing to make: {folder}/erasures/e0000.json is complete\n"


def test_every_kind_of_artifact_has_a_way_to_be_erased() -> None:
    assert set(KINDS) == set(MADE_BY)
