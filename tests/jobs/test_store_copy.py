"""Copies of a store to a folder and to clouds, interrupted and resumed; models that are stored by hand."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import crash_points
import pytest
from crash_points import EXIT_STATUS, counted_writes
from local_cluster import LONG
from samples import files_of, save_tiny_bert

from riptide.base.errors import InputError, StorageError
from riptide.indexing.maintenance.copying import copy_artifacts, plan_copy
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.live_release import LiveRecord
from riptide.indexing.store.sealed_json import add_own_hash, manifest_bytes, read_manifest
from riptide.indexing.store.store import COPIES, Store
from riptide.jobs.common.starting import COMMAND_LINE

Done = Callable[..., str]


def fail() -> None:
    raise StorageError("a write failed")


def contents(url: str) -> dict[str, bytes]:
    storage = Store(url).storage
    return {key: storage.read(key) for key, _ in storage.list("")}


def damage(artifact: Artifact) -> None:
    file = artifact.local_path(artifact.parts[0])
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def usable_keys(target: Path) -> list[str]:
    """Returns the artifacts that appear in a target; each must be whole, and those that it was made from there."""
    store = Store(str(target))
    keys = store.keys()
    for key in keys:
        artifact = store.open(*key.split("/", 1))
        for part in artifact.parts:
            artifact.local_path(part)
        assert {entry["artifact"] for entry in artifact.inputs.values()} <= set(keys)
    return keys


def test_a_backup_in_a_cloud_is_restored_with_the_same_bytes(
    cloud_url: str, world: Any, tmp_path: Path, done: Done
) -> None:
    store, backup, restored = str(world.store), cloud_url, tmp_path / "restored"
    plan = done("store", "copy", "--store", store, "--to", backup, "--plan").splitlines()
    assert (plan[0].split(",")[0], plan[-1].split(",")[0]) == ("would copy corpus/g0000", "would copy 6 artifacts")
    assert contents(backup) == {}
    assert "copied index/idx/g0000, " in done("store", "copy", "--store", store, "--to", backup)
    assert contents(backup) == contents(store)
    done("store", "copy", "--store", backup, "--to", restored)
    assert files_of(restored, but=()) == contents(store)
    assert "6 artifacts are as they were committed" in done("verify", "--store", restored)


def test_an_artifact_is_copied_with_what_it_was_made_from(world: Any, tmp_path: Path, done: Done) -> None:
    """The live release is copied with the whole store only, into a store that has none."""
    store, at, target = Store(str(world.store)), ("--store", world.store), tmp_path / "target"
    with store.create("releases", "0" * 16, inputs={"index": store.open("index", "idx/g0000")}):
        pass
    record = LiveRecord("0" * 16, ()).document()
    store.storage.put("serving/current.json", record)
    done("store", "copy", "index/idx", *at, "--to", target)
    assert Store(str(target)).keys() == ["corpus/g0000", "embeddings/enc/g0000", "index/idx/g0000"]
    printed = done("store", "copy", *at, "--to", target)
    assert "copied serving/current.json: release 0000000000000000 is live" in printed
    assert "copied 4 artifacts" in printed
    assert "; 3 are there" in printed
    assert files_of(target, but=()) == files_of(world.store, but=())
    store.storage.put("serving/current.json", LiveRecord("1" * 16, ("0" * 16,)).document())
    assert "serving" not in done("store", "copy", *at, "--to", target)
    assert (target / "serving/current.json").read_bytes() == record


def test_a_copy_that_ends_at_any_write_is_completed_by_the_same_command(
    world: Any, tmp_path: Path, done: Done, refused: Callable[..., str], documented: Callable[..., None]
) -> None:
    """A write raises, or the process ends at it; what appears in the target until then can be used."""
    expected, told, target = files_of(world.store, but=()), "", tmp_path / "target"
    command = ("copy", "--store", world.store, "--to")
    with counted_writes(None, lambda: None) as counter:
        done("store", *command, tmp_path / "whole")
    for number in range(0, counter.count, 1 if LONG else 8):
        with counted_writes(number, fail, after=number % 16 == 8):
            assert refused("store", *command, target) == "error: a write failed"
        if "index/idx/g0000" not in usable_keys(target) and number > 4 and not told:
            told = refused("search", "--store", target, "--mode", "dense", "--k", 5, "--name", "new")
            assert "is not complete: continue it by riptide store copy --store" in told
        done("store", *command, target)
        assert files_of(target, but=()) == expected, f"after write {number}"
        shutil.rmtree(target)
    documented("Stores", "a store that was copied half", told, 1)
    for number in (17, counter.count - 3) if LONG else (counter.count // 2,):
        process = [sys.executable, crash_points.__file__, str(number), "after", "store", *map(str, command), target]
        ended = subprocess.run(process, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == EXIT_STATUS, ended.stderr
        usable_keys(target)
        assert [mark["keys"] for mark in Store(str(target)).copy_marks().values()] == [None]
        done("store", *command, target)
        assert files_of(target, but=()) == expected, f"after write {number}"
        shutil.rmtree(target)


def test_what_cannot_be_copied_is_one_line(
    world: Any, tmp_path: Path, done: Done, refused: Callable[..., str], documented: Callable[..., None]
) -> None:
    at, target = ("--store", world.store), tmp_path / "target"
    assert "copy: expected --to, the store to copy to" in refused("store", "copy", *at)
    assert "it is the store itself" in refused("store", "copy", *at, "--to", world.store)
    link = tmp_path / "link"
    link.symlink_to(world.store)
    assert "it is the store itself" in refused("store", "copy", *at, "--to", link)
    for inside_or_outside in (world.store / "backup", link / "backup", world.store.parent):
        line = refused("store", "copy", *at, "--to", inside_or_outside)
        assert "one store would be inside the other" in line
    done("store", "copy", "runs/exact", *at, "--to", target)
    store = Store(str(target))
    store.remove("runs/exact")
    with store.create("runs", "exact", config={"other": 1}):
        pass
    before = files_of(target, but=())
    line = refused("store", "copy", *at, "--to", target)
    documented("Stores", "`store copy` to a store with another artifact of the name", line, 1)
    assert files_of(target, but=()) == before
    damage(store.open("corpus", "g0000"))
    copied = done("store", "copy", "corpus", *at, "--to", target)
    assert "copied 0 artifacts" in copied
    assert copied.endswith("; 1 are there, not verified\n")
    line = refused("store", "copy", "corpus", *at, "--to", target, "--verify")
    documented("Stores", "`store copy --verify` to a store with a damaged file", line, 1)
    damage(Store(str(world.store)).open("corpus", "g0000"))
    line = refused("store", "copy", *at, "--to", tmp_path / "fresh")
    assert "its bytes are not the committed ones" in line
    assert Store(str(tmp_path / "fresh")).keys() == []


@pytest.mark.parametrize("name", ["manifest.begun.json", "provenance.json"])
def test_a_damaged_document_of_the_source_is_one_line(
    world: Any, tmp_path: Path, refused: Callable[..., str], name: str
) -> None:
    source, target = tmp_path / "a source", tmp_path / "target"
    shutil.copytree(world.store, source)
    (source / "runs/exact" / name).write_bytes(b"")
    copy = ("store", "copy", "runs/exact", "--store", source, "--to", target)
    assert f"runs/exact/{name}: its bytes are not those that were written" in refused(*copy)
    (source / "runs/exact" / name).unlink()
    line = refused(*copy)
    assert f"runs/exact/{name}: the file is missing; riptide verify --store '{source}' names" in line
    assert "runs/exact" not in usable_keys(target)


def test_a_copy_removes_the_marks_of_what_it_copies(world: Any, tmp_path: Path, done: Done) -> None:
    """A copy may be killed between its last artifact and its mark; another copy may remove the same mark."""
    source, target = Store(str(world.store)), Store(str(tmp_path / "target"))
    for _ in copy_artifacts(source, target, plan_copy(source, target), lambda part, is_kept: None):
        for mark in target.copy_marks():
            target.storage.delete(mark)
    assert target.keys() == source.keys()
    marks = {
        "source": {"source": source.url},  # of an earlier version
        "part": {"source": source.url, "keys": ["corpus/g0000"]},
        "later": {"source": source.url, "keys": ["corpus/g0000", "index/later"]},
        "other": {"source": "s3://bucket/another", "keys": None},
    }
    for key, kept in ((("corpus",), ["later", "other", "source"]), ((), ["later", "other"])):
        for name, mark in marks.items():
            target.storage.put(f"{COPIES}/{name}.json", add_own_hash(mark))
        done("store", "copy", *key, "--store", source.url, "--to", target.url)
        assert list(target.copy_marks()) == [f"{COPIES}/{name}.json" for name in kept]


def test_a_copy_of_one_artifact_completes_no_other_copy(
    world: Any, tmp_path: Path, done: Done, refused: Callable[..., str]
) -> None:
    """The error for a missing artifact names the copy that has not brought it, and no other one."""
    copy, target = ("store", "copy", "--store", world.store, "--to"), tmp_path / "target"

    def describe_missing(kind: str, name: str) -> str:
        with pytest.raises(InputError) as error:
            Store(str(target)).open(kind, name)
        return COMMAND_LINE.render(f"{error.value}")

    with counted_writes(2, fail):
        refused(*copy, target)
    done(*copy, target, "corpus")
    expected = f"is not complete: continue it by riptide store copy --store {world.store} --to {target}"
    assert describe_missing("embeddings", "enc/g0000").endswith(expected)
    shutil.rmtree(target)
    done(*copy, target, "corpus")
    with counted_writes(4, fail):
        assert "a write failed" in refused(*copy, target, "embeddings/enc")
    assert "riptide store copy embeddings/enc --store" in describe_missing("embeddings", "enc/g0000")
    assert "there is no such artifact" in describe_missing("index", "idx/g0000")


@pytest.mark.parametrize("place", ["part", "input"])
def test_a_store_of_others_is_not_copied_out_of_the_target(
    tmp_path: Path, refused: Callable[..., str], documented: Callable[..., None], place: str
) -> None:
    """Its manifests have the right hashes, and name a part or an input that leads out of the folder."""
    store, outside = Store(str(tmp_path / "others/store")), Store(str(tmp_path / "others"))
    with outside.create("corpus") as draft:
        draft.commit("part-00000", ".x", lambda path: path.write_bytes(b"x"), rows=1)
    with store.create("queries", "q", inputs={"corpus": outside.open("corpus")}):
        pass
    document, _ = read_manifest(store.storage, "queries/q")
    if place == "input":
        document["inputs"]["corpus"]["artifact"] = "../corpus"
        parts = []
    else:
        parts = [replace(outside.open("corpus").parts[0], name="../../../planted")]
        document["inputs"] = {}
        (tmp_path / "others/store/queries/q" / parts[0].file).write_bytes(b"x")
    store.storage.put("queries/q/manifest.json", manifest_bytes(document, parts))
    line = refused("store", "copy", "--store", store.url, "--to", tmp_path / "mine/store")
    assert "it leads out of the store, expected a key within it" in line
    assert {path for path in (tmp_path / "mine").rglob("*") if path.is_file()} <= {
        *(tmp_path / "mine/store").rglob("*")
    }
    documented("Stores", f"`store copy` of a store whose manifest names {place} outside of it", line, 1)


def test_a_stored_model_is_used_without_its_folder(
    world: Any, tmp_path: Path, done: Done, refused: Callable[..., str], documented: Callable[..., None]
) -> None:
    """Its vectors are those of the folder; it is taken from its own store and from another one."""
    folder = Path(save_tiny_bert(tmp_path / "bert"))
    (folder / "training_args.bin").write_bytes(b"pickled")
    at = ("--store", world.store)
    command = ("store", "import-model", *at, "--model", folder, "--name", "tiny")
    assert done(*command, "--plan").startswith("would import ")
    (unreadable := folder / "caf\udce9.json").touch()
    line = refused(*command)
    documented("Stores", "`store import-model` of a folder with a name that is not UTF-8", line, 1)
    unreadable.unlink()
    (broken := folder / "vocab.txt").symlink_to("missing")
    line = refused(*command)
    documented("Stores", "`store import-model` of a folder with a broken link", line, 1)
    broken.unlink()
    printed = done(*command)
    assert "left out training_args.bin" in printed
    assert done(*command) == printed
    options = ("--dtype", "float32", "--compile", "never")
    done("encode_corpus", *at, "--encoder", folder, "--name", "by-folder", *options)
    shutil.rmtree(folder)
    done("encode_corpus", *at, "--encoder", "models/tiny", "--name", "by-name", *options)
    other = tmp_path / "other"
    done("store", "copy", "corpus", *at, "--to", other)
    done("encode_corpus", "--store", other, "--encoder", f"{world.store}/models/tiny", "--name", "elsewhere", *options)
    made = [
        Store(str(url)).open("embeddings", f"{name}/g0000")
        for url, name in ((world.store, "by-folder"), (world.store, "by-name"), (other, "elsewhere"))
    ]
    assert [part.sha256 for part in made[1].parts] == [part.sha256 for part in made[0].parts]
    assert [part.sha256 for part in made[2].parts] == [part.sha256 for part in made[0].parts]
    assert made[1].inputs["model"]["artifact"] == "models/tiny"
    other_model = save_tiny_bert(tmp_path / "another", seed=1)
    line = refused("store", "import-model", *at, "--model", other_model, "--name", "tiny")
    documented("Stores", "`store import-model` of another model under a taken name", line, 1)
    (tmp_path / "empty").mkdir()
    line = refused("store", "import-model", *at, "--model", tmp_path / "empty", "--name", "none")
    documented("Stores", "`store import-model` of a folder without a model", line, 1)
    assert "expected --model and --name" in refused("store", "import-model", *at)
