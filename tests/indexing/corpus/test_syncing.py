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
from riptide.indexing.corpus.syncing import Difference, StoredHashes, SyncCorpusWork
from riptide.indexing.files.splitting import DocumentSplit
from riptide.indexing.formats.sources import detect_source
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.indexing.work import work as work_module
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
    store: Store, source: str, options: ImportOptions, runner: Runner | None = None, max_removed: float = 0.9
) -> Difference:
    work = SyncCorpusWork(store, detect_source(source), options, max_removed=max_removed)
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
        assert (difference.added, difference.changed, difference.removed, difference.unchanged) == numbers
        fresh = Store(str(tmp_path / f"fresh{step}"))
        import_first(fresh, source, options)
        assert contents(store) == contents(fresh)
        assert len(Corpus.open(store)) == len(Corpus.open(fresh))
        parts = store.generations("corpus")[-1].numbered_parts("part")
        assert all(part.rows <= 20 for part in parts)
        assert sum(part.facts.get("documents", part.rows) for part in parts) == numbers[0] + numbers[1]


def test_an_equal_source_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.Random(3)
    rows = [make_row(number, seed) for number in range(20)]
    store, options = Store(str(tmp_path / "store")), SHAPES["passages"]
    import_first(store, write(tmp_path / "raw", rows), options)
    hashes = [StoredHashes(Corpus.open(store)).contents.tolist() for _ in range(2)]
    assert not set(hashes[0]) & set(hashes[1]), "texts with equal hashes of an unknown seed cannot be constructed"
    before = sorted(tmp_path.glob("store/**/*"))
    files: list[str] = []
    local_path = Artifact.local_path
    monkeypatch.setattr(Artifact, "local_path", lambda *args: files.append(args[1].file) or local_path(*args))
    difference = sync(store, write(tmp_path / "moved", rows[::-1]), options)
    assert sum(file.endswith(".arrow") for file in files) == 3, "each part is read once, in any order of the source"
    assert f"{difference}" == "0 added, 0 changed, 0 removed, 20 unchanged"
    assert sorted(tmp_path.glob("store/**/*")) == before
    source = write(tmp_path / "raw", rows[1:])
    assert f"{sync(store, source, options)}" == "0 added, 0 changed, 1 removed, 19 unchanged"
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


@pytest.mark.parametrize("number", [0, 1], ids=["unchanged", "changed"])
def test_an_id_that_comes_twice_is_refused(tmp_path: Path, number: int) -> None:
    seed, options = random.Random(5), SHAPES["passages"]
    rows = [make_row(number, seed) for number in range(12)]
    store = Store(str(tmp_path / "store"))
    import_first(store, write(tmp_path / "raw", rows), options)
    copies = [rows[3], {**rows[3], "text": "other"}]
    rows[3] = copies[number]
    for copy in copies:
        with pytest.raises(InputError, match="id 'd3' comes a second time; remove one"):
            sync(store, write(tmp_path / "raw", [*rows, copy]), options)
    assert len(store.generations("corpus")) == 1


def test_duplicates_are_dropped_as_an_import_drops_them(tmp_path: Path) -> None:
    seed, options = random.Random(8), ImportOptions(part_size=4, drop_duplicates=True)
    rows = [make_row(number, seed) for number in range(12)]
    rows += [{**rows[3], "year": 1}, {**rows[5], "year": 2}]
    store = Store(str(tmp_path / "store"))
    import_first(store, source := write(tmp_path / "raw", rows), options)
    assert sync(store, source, options).is_empty
    rows[3] = rows[12] = {**rows[3], "text": "changed"}
    write(tmp_path / "raw", rows)
    assert f"{sync(store, source, options)}" == "0 added, 1 changed, 0 removed, 11 unchanged"
    assert sync(store, source, options).is_empty
    with pytest.raises(InputError, match="id 'd5' comes a second time with another title or text"):
        sync(store, write(tmp_path / "raw", [*rows, {**rows[5], "text": "another"}]), options)


def test_another_order_of_the_fields_is_no_difference(tmp_path: Path) -> None:
    store, options = Store(str(tmp_path / "store")), ImportOptions()
    rows = [{"id": f"d{number}", "text": "reef", "year": 1, "place": "sea"} for number in range(3)]
    import_first(store, write(tmp_path / "raw", rows), options)
    assert sync(store, write(tmp_path / "raw", [dict(sorted(row.items())) for row in rows]), options).is_empty


def test_a_source_that_lacks_too_much_is_refused(tmp_path: Path) -> None:
    seed, options = random.Random(6), SHAPES["passages"]
    rows = [make_row(number, seed) for number in range(12)]
    store = Store(str(tmp_path / "store"))
    import_first(store, write(tmp_path / "raw", rows), options)
    source = write(tmp_path / "raw", rows[:3])
    with pytest.raises(InputError, match="9 of 12 ids of the corpus are not in the source, expected at most 50%"):
        sync(store, source, options, max_removed=0.5)
    sync(store, source, options, max_removed=1)
    assert len(Corpus.open(store)) == 3


@pytest.mark.parametrize("change", ["another row", "a shorter source", "a source without differences"])
def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path, change: str) -> None:
    seed, options = random.Random(7), ImportOptions(part_size=4)
    rows = [make_row(number, seed) for number in range(12)]
    store = Store(str(tmp_path / "store"))
    import_first(store, write(tmp_path / "raw", rows), options)
    late = [*rows[1:], make_row(12, seed)]
    early = [{**rows[0], "text": "early"}] if change == "a shorter source" else []
    source = write(tmp_path / "raw", [*early, *late])
    work = SyncCorpusWork(store, detect_source(source), options, max_removed=0.5)
    write(tmp_path / "raw", [*late[:-1], make_row(13, seed)] if change == "another row" else [*early, *late][:4])
    with pytest.raises(InputError, match="changed after it was compared with the corpus"):
        run_work(store, work, InlineRunner())
    assert len(store.generations("corpus")) == 1
    assert not sync(store, write(tmp_path / "raw", [*early, *late]), options).is_empty


def test_the_draft_of_an_earlier_source_is_replaced_once_nobody_works_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, options = random.Random(9), ImportOptions(part_size=4)
    rows = [make_row(number, seed) for number in range(30)]
    store = Store(str(tmp_path / "store"))
    import_first(store, source := write(tmp_path / "raw", rows), options)
    write(tmp_path / "raw", [{**row, "text": "changed"} for row in rows])
    with pytest.raises(SystemExit):  # as a kill, it leaves no mark
        sync(store, source, options, InlineRunner(fail_after=2, error=SystemExit()))
    write(tmp_path / "raw", rows[:1] + [{**row, "text": "changed again"} for row in rows[1:]])
    for mark in tmp_path.glob("store/corpus/g0001/failed.json"):
        mark.unlink()
    with pytest.raises(InputError, match="another command is making it"):
        sync(store, source, options)
    monkeypatch.setattr(work_module, "ABANDONED_S", -1.0)
    assert sync(store, source, options).changed == 29
    assert sum(passage.text == "changed again" for passage in Corpus.open(store)) == 29
    assert sync(store, source, options).is_empty
