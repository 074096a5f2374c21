"""Erased passages are in no artifact of a store; what was made from it stays valid, or is made again by its command."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from job_outcome import Outcome
from samples import files_of, make_passages, make_queries, save_tiny_bert, write_beir

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.erasure.kinds import KINDS
from riptide.indexing.erasure.part_changes import embedding_changes
from riptide.indexing.erasure.replacing import replace_parts
from riptide.indexing.sparse.csr_file import SUFFIX, read_vectors, save_vectors
from riptide.indexing.storage.storage import TEMPORARY
from riptide.indexing.store.store import MADE_BY, Store
from riptide.retriever.encoding.sparse_vectors import from_dense

Done = Callable[..., str]
SECRETS = ("zanzibarine", "quillwort", "p7-secret", "1987654321", "rosewater", "saffron-tag")
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
        "metadata": {"year": 1987654321, "tags": ["saffron-tag"]},
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
        ("import_corpus", "--source", second, "--part-size", "25", "--sync"),
        ("encode_corpus", "--encoder", model, "--name", "enc", *numerics),
        *MADE_AGAIN[:2],
        ("fit_topics", "--min-passages", "2", "--most-frequent", "0", "--iterations", "3", "--merge-below", "0"),
        ("search", "--mode", "bm25", "--split", "train", "--k", "60"),
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


def receipts_of(store: Path) -> list[Path]:
    """Returns the receipts of a store, oldest first."""
    return sorted((store / "erasures").glob("*.json"))


def fingerprints(store: Store) -> dict[str, str]:
    """Returns the fingerprint of every artifact."""
    keys = store.keys()
    return {key: store.open(*key.split("/", 1)).fingerprint for key in keys}


@pytest.mark.slow
def test_no_byte_of_an_erased_passage_is_in_the_store(copied: Path, done: Done) -> None:
    folder, store, rows = copied / "store", Store(str(copied / "store")), [7, 9, 60]
    assert {line.split("/")[0] for line in found_secrets(folder)} >= {"corpus", "runs"}
    before = fingerprints(store)
    vectors = np.load(store.generations("embeddings", "enc")[0].local_path("part-00000"))
    command = ("import_corpus", "--store", folder, "--erase", copied / "ids.txt")

    temporary = folder / TEMPORARY / "left-by-a-killed-writer"
    temporary.parent.mkdir(exist_ok=True)
    temporary.write_text("zanzibarine")
    os.utime(temporary, (0, 0))
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
    assert "as they were committed" in done("verify", "--store", folder, "--encoders")
    assert done(*command) == f"nothing to make: {receipts_of(folder)[0]} is complete\n"


@pytest.fixture
def imported(tmp_path: Path, done: Done) -> Path:
    """A store with a split corpus of two generations: documents a, b and c of two passages, and d."""
    texts = {name: f"{name}one. {name}two." for name in "abcd"}
    for number, names in enumerate(("abc", "d")):
        source = write_beir(tmp_path / str(number) / "source", [{"_id": name, "text": texts[name]} for name in names])
        grows = ("--append",) if number else ("--split-words", 1)
        done("import_corpus", "--store", tmp_path / "store", "--source", source, *grows)
    return tmp_path / "store"


def erase_command(store: Path, ids: str) -> tuple[object, ...]:
    """Writes a file of ids; returns the command that erases them."""
    store.with_name("ids.txt").write_text(ids)
    return ("import_corpus", "--store", store, "--erase", store.with_name("ids.txt"))


def test_documents_of_a_split_corpus_are_erased_and_can_be_added_again(imported: Path, done: Done) -> None:
    assert "remains  the beginnings of rows that an import has left out" in done(*erase_command(imported, "b\nc\n"))
    corpus = Corpus.open(Store(str(imported)))
    assert [passage.text for passage in corpus] == ["aone.", "atwo.", "done.", "dtwo."]
    assert corpus.num_documents == 2
    assert corpus.rows_of_documents(["a", "b", "c", "d"])[0].tolist() == [0, -1, -1, 6]
    done(*erase_command(imported, "d\n"))
    source = write_beir(imported.with_name("again") / "source", [{"_id": "b", "text": "new."}])
    done("import_corpus", "--store", imported, "--source", source, "--append")
    assert [passage.text for passage in Corpus.open(Store(str(imported)))] == ["aone.", "atwo.", "new."]
    done(*erase_command(imported, "b\n"))
    assert len(Corpus.open(Store(str(imported)))) == 2
    assert "3 artifacts are as they were committed" in done("verify", "--store", imported)


def test_sparse_vectors_of_erased_passages_are_empty(tmp_path: Path) -> None:
    matrix = np.array([[0, 1, 2], [3, 0, 0], [0, 0, 4]], np.float32)
    store = Store(str(tmp_path))
    with store.create("embeddings", "sparse/g0000") as draft:
        draft.commit("part-00000", SUFFIX, lambda path: save_vectors(from_dense(matrix), path), rows=3)
    generations = store.generations("embeddings", "sparse")
    replace_parts(store, "embeddings/sparse/g0000", embedding_changes(generations, np.array([0, 2])), "e0000")
    [artifact] = store.generations("embeddings", "sparse")
    vectors = read_vectors(artifact.local_path("part-00000"), 3, 3, "part")
    matrix[[0, 2]] = 0
    assert np.array_equal(vectors.dense(), matrix)


def test_an_erasure_that_cannot_be_complete_is_refused(
    imported: Path, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    before = files_of(imported)
    line = refused(*erase_command(imported, "a\nnone\n"))
    documented("Importing", "import_corpus --erase with an id that the corpus lacks", line, 1)
    line = refused(*erase_command(imported, "a\n"), "--sync")
    documented("Importing", "import_corpus --erase with --sync", line, 1)
    assert "no such file" in refused("import_corpus", "--store", imported, "--erase", imported / "missing").lower()
    store = Store(str(imported))
    store.create("bm25", "bm25/g0001")
    line = refused(*erase_command(imported, "a\n"))
    documented("Importing", "import_corpus --erase beside an artifact that is not complete", line, 1)
    store.remove("bm25/bm25/g0001")
    assert files_of(imported) == before


def test_passages_that_a_copy_brings_back_are_found(
    imported: Path,
    tmp_path: Path,
    done: Done,
    refused: Done,
    job: Callable[..., Outcome],
    documented: Callable[..., None],
) -> None:
    backup, copy = tmp_path / "backup", tmp_path / "copied"
    done("store", "copy", "--store", imported, "--to", backup)
    done(*erase_command(imported, "b\n"))
    line = refused("store", "copy", "--store", imported, "--to", backup)
    documented("Stores", "`store copy` to a backup that still has erased passages", line, 1)
    done("store", "copy", "--store", imported, "--to", copy)
    assert files_of(copy / "corpus") == files_of(imported / "corpus")
    done(*erase_command(copy, "a\n"))
    assert [passage.text for passage in Corpus.open(Store(str(copy)))] == ["cone.", "ctwo.", "done.", "dtwo."]
    assert b"aone" not in b"".join(files_of(copy).values())
    shutil.rmtree(imported / "corpus")
    shutil.copytree(backup / "corpus", imported / "corpus")
    outcome = job("verify", "--store", imported)
    assert outcome.status == 1
    assert f"corpus/g0000: holds what {receipts_of(imported)[0].relative_to(imported)} says was erased" in outcome.out
    done(*erase_command(imported, "b\n"))
    assert "as they were committed" in done("verify", "--store", imported)


def test_every_kind_of_artifact_has_a_way_to_be_erased() -> None:
    assert set(KINDS) == set(MADE_BY)
