"""While an erasure runs or after it was interrupted, nothing is lost, and nothing that it has to erase is made."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from crash_points import counted_writes
from job_outcome import Outcome
from samples import files_of, write_beir

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus, save_array
from riptide.indexing.erasure import erasing, progress
from riptide.indexing.erasure import receipts as receipts_module
from riptide.indexing.erasure.erasing import erase, plan_erasure
from riptide.indexing.erasure.progress import RunningErasure, running_erasure
from riptide.indexing.erasure.receipts import check_receipts, erasures, receipt_file, receipts
from riptide.indexing.storage.cache import CorruptError
from riptide.indexing.storage.storage import TEMPORARY
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.keys import BEGUN_ERASURE
from riptide.indexing.store.live_release import CURRENT, LiveRecord
from riptide.indexing.store.sealed_json import PROVENANCE, add_own_hash
from riptide.indexing.store.store import Store

Done = Callable[..., str]
VECTORS = np.arange(1, 9, dtype=np.float32).reshape(4, 2)


def passages(names: str) -> list[dict]:
    return [{"_id": name, "text": f"text of {name}"} for name in names]


def import_two_generations(folder: Path, store: object, done: Done) -> None:
    """Makes a corpus of the generations a, b, c and d."""
    for number, names in enumerate(("abc", "d")):
        source = write_beir(folder / str(number) / "source", passages(names))
        done("import_corpus", "--store", store, "--source", source, *(["--append"] * number))


@pytest.fixture
def folder(tmp_path: Path, done: Done) -> Path:
    import_two_generations(tmp_path, tmp_path / "store", done)
    (tmp_path / "ids.txt").write_text("b\n")
    return tmp_path / "store"


@pytest.fixture
def command(folder: Path) -> tuple[object, ...]:
    return ("import_corpus", "--store", folder, "--erase", folder.with_name("ids.txt"))


def plan_for(store: Store, folder: Path) -> erasing.Plan:
    plan = plan_erasure(store, str(folder.with_name("ids.txt")))
    assert plan is not None
    return plan


def add_embeddings(store: Store) -> None:
    with store.create("embeddings", "enc/g0000", inputs={"corpus": store.generations("corpus")[0]}) as draft:
        draft.commit("part-00000", ".npy", lambda path: save_array(VECTORS[:3], path), rows=3)


def add_index(store: Store) -> Artifact:
    with store.create("index", "enc/g0000") as draft:
        draft.commit("shard-00000", ".npy", lambda path: save_array(VECTORS, path), rows=3, first_row=0, end=3)
    return store.open("index", "enc/g0000")


def holders_of(store: Store, text: bytes) -> list[str]:
    """Returns the files or objects of a store that hold a text."""
    return [key for key, _ in store.storage.list("") if text in store.storage.read(key)]


def stored_vectors(store: Store) -> list[list[float]]:
    [artifact] = store.generations("embeddings", "enc")
    return np.load(artifact.local_path("part-00000")).tolist()


def test_gc_removes_no_file_of_an_erasure_in_progress(folder: Path) -> None:
    store, found = Store(str(folder)), []

    def collect(count: int) -> None:
        found.extend(store.garbage_files())

    erase(store, plan_for(store, folder), collect)
    assert found == []
    assert store.garbage_files() == []
    assert [passage.id for passage in Corpus.open(store)] == ["a", "c", "d"]


def test_a_lost_part_file_ends_an_erasure_before_the_manifest_names_it(folder: Path, done: Done) -> None:
    store = Store(str(folder))
    before = files_of(folder / "corpus")

    def lose(count: int) -> None:
        for file in folder.glob("corpus/g0000/*.arrow"):
            if f"g0000/{file.name}" not in before:
                file.unlink()

    with pytest.raises(CorruptError, match="missing or cut"):
        erase(store, plan_for(store, folder), lose)
    assert before.items() <= files_of(folder / "corpus").items()
    done("import_corpus", "--store", folder, "--erase", folder.with_name("ids.txt"))
    assert [passage.id for passage in Corpus.open(store)] == ["a", "c", "d"]


def test_no_command_begins_an_artifact_while_an_erasure_is_pending(
    folder: Path, command: tuple[object, ...], done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    store = Store(str(folder))
    draft = store.create("embeddings", "enc/g0000")
    store.remove("embeddings/enc/g0000")
    with running_erasure(store, plan_for(store, folder)):
        line = refused(*command)
        documented("Importing", "import_corpus --erase while another command erases passages", line, 1)
    os.utime(folder / BEGUN_ERASURE, (0, 0))  # the command was killed
    source = write_beir(folder.with_name("late") / "source", passages("be"))
    for options in ((), ("--plan",)):
        line = refused("import_corpus", "--store", folder, "--source", source, "--append", *options)
    documented("Importing", "import_corpus --append while an erasure is pending", line, 1)
    with pytest.raises(InputError, match="an erasure of passages is in progress or was interrupted"):
        add_embeddings(store)
    assert store.incomplete_keys() == []
    with pytest.raises(InputError, match="removed while it was being made"):
        draft.finish()
    assert "which is in progress or was interrupted" in done(*command)
    done("import_corpus", "--store", folder, "--source", source, "--append")
    assert [passage.id for passage in Corpus.open(store)] == ["a", "c", "d", "b", "e"]


def test_an_artifact_that_is_completed_after_the_plan_is_erased_too(folder: Path, done: Done) -> None:
    store = Store(str(folder))
    plan = plan_for(store, folder)
    add_embeddings(store)
    receipt = erase(store, plan)
    assert stored_vectors(store) == [[1, 2], [0, 0], [5, 6]]
    assert "embeddings/enc/g0000" in {entry["artifact"] for entry in receipt["artifacts"]}
    assert "as they were committed" in done("verify", "--store", folder)


def test_a_draft_that_is_begun_after_the_plan_ends_the_erasure_before_any_change(folder: Path) -> None:
    store = Store(str(folder))
    plan = plan_for(store, folder)
    store.create("bm25", "bm25/g0001")
    before = files_of(folder)
    with pytest.raises(InputError, match="is not complete and may hold the passages"):
        erase(store, plan)
    assert files_of(folder).keys() - before.keys() <= {"erasures/.begun.json.lock"}


def test_each_generation_has_the_deletions_of_its_own_rows(folder: Path, done: Done) -> None:
    folder.with_name("ids.txt").write_text("b\nd\n")
    done("import_corpus", "--store", folder, "--erase", folder.with_name("ids.txt"))
    generations = Store(str(folder)).generations("corpus")
    assert Corpus(generations[:1]).deleted.tolist() == [1]  # that of a release of the first generation
    assert Corpus(generations).deleted.tolist() == [1, 3]


def test_a_suspended_erasure_changes_nothing_after_another_command_has_taken_it_over(folder: Path, done: Done) -> None:
    store = Store(str(folder))
    plan = plan_for(store, folder)

    def take_over(count: int) -> None:
        if not receipts(store):
            with pytest.raises(InputError, match="another command carries out an erasure"):
                erase(store, plan)
            os.utime(folder / BEGUN_ERASURE, (0, 0))
            erase(store, plan)

    with pytest.raises(InputError, match=r"another command carries out an erasure|the file is missing"):
        erase(store, plan, take_over)
    assert [passage.id for passage in Corpus.open(store)] == ["a", "c", "d"]
    assert "as they were committed" in done("verify", "--store", folder)


def test_temporary_files_of_running_commands_stay(folder: Path, command: tuple[object, ...], done: Done) -> None:
    old, young = (folder / TEMPORARY / name for name in ("old", "young"))
    for file in (old, young):
        file.parent.mkdir(exist_ok=True)
        file.write_text("text of b")
    os.utime(old, (0, 0))
    assert "remains  1 temporary files of the last 60 minutes, which commands may use" in done(*command)
    assert (old.exists(), young.exists()) == (False, True)


def test_unfinished_uploads_are_aborted(
    tmp_path: Path, bucket: str, done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_two_generations(tmp_path, bucket, done)
    storage = Store(bucket).storage
    upload = {"Bucket": storage.bucket, "Key": storage.key("corpus/g0000/part-00000.arrow")}
    storage.s3.create_multipart_upload(**upload)
    monkeypatch.setattr(erasing, "TEMPORARY_AGE", -60.0)
    (tmp_path / "ids.txt").write_text("b\n")
    done("import_corpus", "--store", bucket, "--erase", tmp_path / "ids.txt")
    assert "Uploads" not in storage.s3.list_multipart_uploads(Bucket=storage.bucket)
    assert [passage.id for passage in Corpus.open(Store(bucket))] == ["a", "c", "d"]


@pytest.mark.parametrize(("place", "writes"), [("folder", 5), pytest.param("bucket", 12, marks=pytest.mark.slow)])
def test_an_erasure_that_is_killed_again_and_again_is_completed_by_the_same_command(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    job: Callable[..., Outcome],
    done: Done,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    writes: int,
) -> None:
    def kill() -> None:
        raise KeyboardInterrupt

    url = str(tmp_path / "store") if place == "folder" else request.getfixturevalue("bucket")
    import_two_generations(tmp_path, url, done)
    store = Store(url)
    add_embeddings(store)
    add_index(store)
    (tmp_path / "ids.txt").write_text("b\nd\n")
    command = ("import_corpus", "--store", url, "--erase", tmp_path / "ids.txt")
    monkeypatch.setattr(RunningErasure, "release", lambda running: None)  # a killed process marks nothing
    monkeypatch.setattr(progress, "ABANDONED_S", -1.0)
    assert holders_of(store, b"text of b")
    statuses = [130]
    while statuses[-1] == 130:  # each attempt ends later than the one before it
        with counted_writes(writes * len(statuses), kill, after=len(statuses) % 2 == 0, url=url):
            statuses.append(job(*command).status)
    assert statuses[-1] == 0
    assert len(statuses) > 3
    assert [*holders_of(store, b"text of b"), *holders_of(store, b"text of d")] == []
    assert [passage.id for passage in Corpus.open(store)] == ["a", "c"]
    assert stored_vectors(store) == [[1, 2], [0, 0], [5, 6]]
    assert store.keys("index") == []
    assert "as they were committed" in done("verify", "--store", url)
    assert "nothing to make" in done(*command)


def test_an_older_copy_of_embeddings_is_erased_by_the_same_command(
    folder: Path, command: tuple[object, ...], tmp_path: Path, done: Done, job: Callable[..., Outcome]
) -> None:
    store = Store(str(folder))
    add_embeddings(store)
    shutil.copytree(folder / "embeddings", tmp_path / "backup")
    done(*command)
    shutil.rmtree(folder / "embeddings")
    shutil.copytree(tmp_path / "backup", folder / "embeddings")
    assert "embeddings/enc/g0000: holds what" in job("verify", "--store", folder).out
    done(*command)
    assert stored_vectors(store) == [[1, 2], [0, 0], [5, 6]]
    assert "as they were committed" in done("verify", "--store", folder)
    assert "nothing to make" in done(*command)


def test_a_damaged_corpus_with_a_receipt_is_reported(
    folder: Path, command: tuple[object, ...], done: Done, job: Callable[..., Outcome]
) -> None:
    done(*command)
    [file] = folder.glob("corpus/g0000/part-*.arrow")
    file.unlink()
    outcome = job("verify", "--store", folder)
    assert outcome.status == 1
    assert outcome.out.count("bad: ") == 1
    assert "1 bad or missing files" in outcome.err


def test_an_index_of_the_live_release_is_removed_only_with_yes(
    folder: Path, command: tuple[object, ...], done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    store = Store(str(folder))
    index = add_index(store)
    store.create("releases", "0123456789abcdef", inputs={index.key: index}).finish()
    store.storage.put(CURRENT, LiveRecord("0123456789abcdef", ()).document())
    assert "remove   index/enc/g0000: 1 parts, 160 B; the live release needs it" in done(*command, "--plan")
    record = {"command": ["build_index.py", "--name", "my index"], "finished": "2026-01-01T00:00:00Z"}
    store.storage.put(f"{index.key}/{PROVENANCE}", add_own_hash(record))
    assert "make it again: riptide build-index --name 'my index'\n" in done(*command, "--plan")
    store.storage.put(f"{index.key}/{PROVENANCE}", b"damaged")
    assert "make it again" not in done(*command, "--plan")
    line = refused(*command)
    documented("Importing", "import_corpus --erase of a passage in an index of the live release", line, 1)
    assert not receipts(store)
    done(*command, "--yes")
    assert store.keys("index") == []
    line = refused("import_corpus", "--store", folder, "--delete", folder.with_name("ids.txt"), "--yes")
    documented("Importing", "import_corpus --yes without --erase", line, 1)
    line = refused(*command, "--part-size", 5)
    assert "--part-size with --erase: expected --erase alone" in line


def test_an_erasure_that_ends_while_the_erasures_are_read_is_among_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(folder))
    plan = plan_for(store, folder)
    with running_erasure(store, plan) as running:
        list_receipts = receipts_module.receipts

        def finish_after_listing(store: Store) -> list[str]:
            files = list_receipts(store)
            running.finish([])
            return files

        monkeypatch.setattr(receipts_module, "receipts", finish_after_listing)
        assert [each.name for each in erasures(store)] == [plan["erasure"]]


@pytest.mark.parametrize(
    "change",
    [
        {"artifacts": None},
        {"artifacts": ["corpus/g0000"]},
        {"artifacts": [{"artifact": "corpus/g0000"}]},
        {"rows": ["1"]},
        {"salt": "0x"},
        {"started": "yesterday"},
        {"judgements": {"queries/q": "1"}},
        {"erasure": 1},
    ],
)
def test_a_document_with_other_fields_is_refused_in_one_line(
    folder: Path, command: tuple[object, ...], refused: Done, change: dict
) -> None:
    store = Store(str(folder))
    plan = plan_for(store, folder)
    problem = "found other fields or types than those of an erasure"
    for file in (receipt_file(plan["erasure"]), BEGUN_ERASURE):
        store.storage.put(file, add_own_hash({**plan, **change}))
        assert problem in refused(*command)
        with pytest.raises(CorruptError, match=problem):  # as a server looks
            erasures(store)
        store.storage.delete(file)
    store.storage.put(receipt_file(plan["erasure"]), add_own_hash({**plan, **change}))
    assert [problem in str(finding.problem) for finding in check_receipts(store)] == [True]
    store.storage.put(BEGUN_ERASURE, add_own_hash({**plan, **change}))
    with pytest.raises(CorruptError, match=problem):
        erase(store, plan)
