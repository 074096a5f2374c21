"""Imports that make the corpus equal to its source: what they change, count and refuse, and what a kill leaves."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runners import InlineRunner

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.importing import ImportCorpusWork, ImportOptions
from riptide.indexing.corpus.syncing import Difference, SyncCorpusWork
from riptide.indexing.files.splitting import DocumentSplit
from riptide.indexing.formats.sources import detect_source
from riptide.indexing.store.store import Store
from riptide.indexing.work.work import run_work
from riptide.indexing.work.worker_tasks import Runner

Row = dict[str, Any]
SHAPES = {
    "passages": ImportOptions(part_size=7, filters={"year": "int64"}),
    "documents": ImportOptions(part_size=7, filters={"year": "int64"}, split=DocumentSplit(5, 2)),
}


def write(folder: Path, rows: list[Row], kind: str = "jsonl") -> str:
    """Writes a source without queries, and returns its path."""
    folder.mkdir(exist_ok=True)
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file := folder / "docs.parquet", row_group_size=5)
    else:
        (file := folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def import_first(store: Store, source: str, options: ImportOptions) -> None:
    run_work(store, ImportCorpusWork(store, detect_source(source), options, append=False), InlineRunner())


def sync(
    store: Store, source: str, options: ImportOptions, runner: Runner | None = None, max_gone: float = 0.9
) -> Difference:
    work = SyncCorpusWork(store, detect_source(source), options, max_gone=max_gone)
    if not work.is_complete:
        run_work(store, work, runner or InlineRunner())
    return work.difference


def contents(store: Store) -> set[tuple[str, ...]]:
    """Returns id, title, text and metadata of each passage that is not deleted."""
    return {passage[1:] for passage in Corpus.open(store)}


def make_row(number: int, seed: random.Random) -> Row:
    text = " ".join(seed.choices(["reef", "tide", "kelp", "gull", "sand."], k=seed.randint(1, 30)))
    return {"id": f"d{number}", "title": seed.choice(["", "Sea"]), "text": text, "year": seed.randint(1990, 2020)}


def edit(rows: list[Row], seed: random.Random) -> tuple[list[Row], tuple[int, int, int, int]]:
    """Changes, removes, adds and moves rows; returns them and the numbers of added, changed, gone and same rows."""
    edited, numbers = [], [0, 0, 0, 0]
    for row in rows:
        kind = seed.choice(["changed", "gone", *["same"] * 6])
        numbers[["added", "changed", "gone", "same"].index(kind)] += 1
        if kind == "changed":
            key = seed.choice(["title", "text", "year"])
            row = {**row, key: row[key] + (1 if key == "year" else " changed")}
        if kind != "gone":
            edited.append(row)
    first = 1 + max(int(row["id"][1:]) for row in rows)
    numbers[0] = seed.randint(0, 9)
    edited += [make_row(number, seed) for number in range(first, first + numbers[0])]
    seed.shuffle(edited)
    return edited, tuple(numbers)  # type: ignore[return-value]


@pytest.mark.parametrize(("shape", "kind"), [("passages", "jsonl"), ("documents", "parquet")])
def test_the_corpus_equals_the_source_after_each_of_many_changes(tmp_path: Path, shape: str, kind: str) -> None:
    seed, options = random.Random(f"{shape} {kind}"), SHAPES[shape]
    rows = [make_row(number, seed) for number in range(40)]
    store, source = Store(str(tmp_path / "store")), write(tmp_path / "raw", rows, kind)
    import_first(store, source, options)
    for step in range(2):
        rows, numbers = edit(rows, seed)
        write(tmp_path / "raw", rows, kind)
        difference = sync(store, source, options)
        assert (difference.added, difference.changed, difference.gone, difference.same) == numbers
        fresh = Store(str(tmp_path / f"fresh{step}"))
        import_first(fresh, source, options)
        assert contents(store) == contents(fresh)
        assert len(Corpus.open(store)) == len(Corpus.open(fresh))
        parts = store.generations("corpus")[-1].numbered_parts("part")
        assert all(part.rows <= 20 for part in parts)
        assert sum(part.facts.get("documents", part.rows) for part in parts) == numbers[0] + numbers[1]


def test_an_equal_source_writes_nothing(tmp_path: Path) -> None:
    seed = random.Random(3)
    rows = [make_row(number, seed) for number in range(20)]
    store, options = Store(str(tmp_path / "store")), SHAPES["passages"]
    import_first(store, write(tmp_path / "raw", rows), options)
    before = sorted(tmp_path.glob("store/**/*"))
    difference = sync(store, write(tmp_path / "moved", rows[::-1]), options)
    assert f"{difference}" == "0 added, 0 changed, 0 gone, 20 the same"
    assert sorted(tmp_path.glob("store/**/*")) == before
    source = write(tmp_path / "raw", rows[1:])
    assert f"{sync(store, source, options)}" == "0 added, 0 changed, 1 gone, 19 the same"
    assert not store.generations("corpus")[-1].numbered_parts("part")
    assert sync(store, source, options).is_empty
    assert len(store.generations("corpus")) == 2


def test_a_killed_sync_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    seed, options = random.Random(4), ImportOptions(part_size=2)
    rows = [make_row(number, seed) for number in range(30)]
    folders = [tmp_path / "killed", tmp_path / "whole"]
    for folder in folders:
        import_first(Store(str(folder)), write(tmp_path / "raw", rows), options)
    source = write(tmp_path / "raw", edit(rows, seed)[0])
    for number in range(3):
        with pytest.raises(KeyboardInterrupt):
            sync(Store(str(folders[0])), source, options, InlineRunner(fail_after=number, error=KeyboardInterrupt()))
    for folder in folders:
        sync(Store(str(folder)), source, options)
    manifests = [(folder / "corpus/g0001/manifest.json").read_bytes() for folder in folders]
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("same", [True, False], ids=["same", "changed"])
def test_an_id_that_comes_twice_is_refused(tmp_path: Path, same: bool) -> None:
    seed, options = random.Random(5), SHAPES["passages"]
    rows = [make_row(number, seed) for number in range(12)]
    store = Store(str(tmp_path / "store"))
    import_first(store, write(tmp_path / "raw", rows), options)
    repeated = rows[3] if same else {**rows[3], "text": "other"}
    with pytest.raises(InputError, match=r"d3' (comes a second time|is in the corpus already)"):
        sync(store, write(tmp_path / "raw", [*rows, repeated]), options)
    assert len(store.generations("corpus")) == 1


def test_a_source_that_lacks_too_much_is_refused(tmp_path: Path) -> None:
    seed, options = random.Random(6), SHAPES["passages"]
    rows = [make_row(number, seed) for number in range(12)]
    store = Store(str(tmp_path / "store"))
    import_first(store, write(tmp_path / "raw", rows), options)
    source = write(tmp_path / "raw", rows[:3])
    with pytest.raises(InputError, match="9 of 12 ids of the corpus are not in the source, expected at most 50%"):
        sync(store, source, options, max_gone=0.5)
    sync(store, source, options, max_gone=1)
    assert len(Corpus.open(store)) == 3


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    seed, options = random.Random(7), SHAPES["passages"]
    rows = [make_row(number, seed) for number in range(12)]
    store = Store(str(tmp_path / "store"))
    import_first(store, write(tmp_path / "raw", rows), options)
    source = write(tmp_path / "raw", [*rows, make_row(12, seed)])
    work = SyncCorpusWork(store, detect_source(source), options, max_gone=0.5)
    write(tmp_path / "raw", [*rows, make_row(13, seed)])
    with pytest.raises(InputError, match="changed while it was compared with the corpus"):
        run_work(store, work, InlineRunner())
