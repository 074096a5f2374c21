"""Looking into a store, removing from it, clearing it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from jobs.store import copy_whole

import pytest
from samples import files_of

from indexing.models import Checkpoints, commit_files
from indexing.s3 import S3Storage
from indexing.store import Store


def test_list_shows_each_artifact_with_size_rows_and_lineage(world, done) -> None:
    lines = done("store", "list", "--store", world.store).splitlines()
    assert [line.split()[0] for line in lines] == [
        "corpus/g0000", "embeddings/enc/g0000", "index/idx/g0000", "queries/tiny", "runs/dense", "runs/exact",
    ]  # fmt: skip
    assert "240 rows" in lines[0]
    assert lines[0].endswith("from -")
    assert lines[2].endswith("from embeddings/enc/g0000")
    assert "queries/tiny, corpus/g0000, embeddings/enc/g0000" in lines[5] or "corpus/g0000" in lines[5]
    assert len(done("store", "list", "--store", world.store, "--limit", 2).splitlines()) == 2
    (world.store / "runs/dense/manifest.json").unlink()
    assert "runs/dense                       incomplete" in done("store", "list", "--store", world.store)


def test_show_tells_what_an_artifact_is_made_of_and_needed_by(world, done, refused) -> None:
    out = done("store", "show", "embeddings/enc/g0000", "--store", world.store)
    artifact = Store(str(world.store)).open("embeddings", "enc/g0000")
    assert f"fingerprint  {artifact.fingerprint}" in out
    assert "input        corpus: corpus/g0000" in out
    for needed_by in ("index/idx/g0000", "runs/dense", "runs/exact"):
        assert f"needed by    {needed_by}" in out
    assert '"pooling": "mean"' in out
    assert all(part.file in out for part in artifact.parts)
    assert "no such artifact" in refused("store", "show", "embeddings/none/g0000", "--store", world.store)
    assert "show: expected an artifact" in refused("store", "show", "--store", world.store)


def test_remove_takes_what_nothing_needs(world, done, refused) -> None:
    before = files_of(world.store, but=())
    at = ("--store", world.store)
    line = refused("store", "remove", "embeddings/enc/g0000", *at)
    assert "embeddings/enc/g0000 is needed by index/idx/g0000, runs/dense, runs/exact: remove those first" in line
    assert "no such artifact" in refused("store", "remove", "runs/none", *at)
    assert "remove: expected an artifact" in refused("store", "remove", *at)
    done("store", "remove", "runs/exact", *at, "--plan")
    assert files_of(world.store, but=()) == before
    assert "removed runs/exact" in done("store", "remove", "runs/exact", *at)
    assert files_of(world.store, but=()) == {k: v for k, v in before.items() if not k.startswith("runs/exact/")}
    for key in ("runs/dense", "index/idx/g0000", "embeddings/enc/g0000", "queries/tiny", "corpus/g0000"):
        done("store", "remove", key, *at)
    assert files_of(world.store, but=()) == {}


def test_gc_clears_what_nothing_names(world, done) -> None:
    before = files_of(world.store, but=())
    at = ("--store", world.store)
    loser = world.store / "corpus/g0000/part-00000-0123456789abcdef.arrow"
    loser.write_bytes(b"lost the race")
    old = world.store / ".tmp/old"
    old.write_bytes(b"half")
    os.utime(old, (0, 0))
    out = done("store", "gc", *at, "--plan")
    assert "would remove corpus/g0000/part-00000-0123456789abcdef.arrow, 13 B" in out
    assert loser.exists()
    assert old.exists()
    done("store", "gc", *at)
    assert not loser.exists()
    assert not old.exists()
    assert files_of(world.store, but=()) == before
    assert done("store", "gc", *at) == ""


def test_gc_ends_what_a_later_generation_took_the_rows_of(world, done) -> None:
    before = files_of(world.store, but=())
    at = ("--store", world.store)
    store = Store(str(world.store))
    store.create("index", "idx/g0001", inputs={"previous": store.open("index", "idx/g0000")})
    assert "index/idx/g0001                  incomplete" in done("store", "list", *at)
    later = world.store / "index/idx/g0002"
    with store.create("index", "idx/g0002", inputs={"previous": store.open("index", "idx/g0000")}):
        pass
    assert "index/idx/g0001                  superseded: a later generation has its rows" in done("store", "list", *at)
    assert done("store", "gc", *at) == ""
    os.utime(world.store / "index/idx/g0001/manifest.begun.json", (0, 0))
    assert "removed index/idx/g0001/manifest.begun.json" in done("store", "gc", *at)
    assert not (world.store / "index/idx/g0001").exists()
    shutil.rmtree(later)
    assert files_of(world.store, but=()) == before


def test_checkpoints_end_with_their_model(world, done) -> None:
    before = files_of(world.store, but=())
    at, store = ("--store", world.store), Store(str(world.store))

    def checkpoint(name: str) -> None:
        Checkpoints(store, name, "identity").save(1, lambda path: path.write_bytes(b"weights"))

    store.create("models", "ce")
    for name in ("ce.models", "ce.models.best", "gone.models"):
        checkpoint(name)
    assert done("store", "gc", *at, "--plan").count("would remove checkpoints/gone.models/") == 2
    out = done("store", "gc", *at)
    assert out.startswith("removed checkpoints/gone.models/latest.json, ")
    assert out.count("\n") == 2
    for name in ("ce-more.models", "ce.prompts"):
        checkpoint(name)
    done("store", "remove", "models/ce", *at)
    left = {*files_of(world.store, but=())} - {*before}
    assert {key.split("/")[1] for key in left} == {"ce-more.models", "ce.prompts"}, "the removed model's, and no others"
    done("store", "gc", *at)
    assert files_of(world.store, but=()) == before


def test_a_models_files_are_copied_out(world, done, refused, tmp_path: Path) -> None:
    at, store = ("--store", world.store), Store(str(world.store))
    (tmp_path / "made").mkdir()
    (tmp_path / "made/prompt.json").write_text("{}")
    with store.create("prompts", "legal") as draft:
        commit_files(draft, tmp_path / "made")
    to = tmp_path / "legal"
    assert "would copy prompts/legal, 2 B" in done("store", "export", "prompts/legal", "--to", to, *at, "--plan")
    assert not to.exists()
    to.mkdir()
    done("store", "export", "prompts/legal", "--to", to, *at)
    assert [(file.name, file.is_symlink(), file.read_text()) for file in to.iterdir()] == [("prompt.json", False, "{}")]
    assert f"--to {to}: is there and is no empty folder" in refused("store", "export", "prompts/legal", "--to", to, *at)
    assert "--to None: expected a folder" in refused("store", "export", "prompts/legal", *at)
    other = refused("store", "export", "corpus/g0000", "--to", tmp_path / "other", *at)
    assert "corpus/g0000: expected models/NAME or prompts/TASK" in other
    (tmp_path / "file").write_text("")
    under = refused("store", "export", "prompts/legal", "--to", tmp_path / "file" / "legal", *at)
    assert "Not a directory" in under or "File exists" in under
    done("store", "remove", "prompts/legal", *at)


def test_a_copy_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, to = tmp_path / "model", tmp_path / "to"
    folder.mkdir()
    for name in "ab":
        (folder / name).write_text(name)
    real = shutil.copyfile

    def copy(source: Path, target: Path, **kwargs: Any) -> object:
        if Path(source).name == "b":
            raise OSError(28, "No space left on device")
        return real(source, target, **kwargs)

    with monkeypatch.context() as full:
        full.setattr(shutil, "copyfile", copy)
        with pytest.raises(OSError, match="No space left"):
            copy_whole(folder, to)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    copy_whole(folder, to)
    assert sorted(path.name for path in to.iterdir()) == ["a", "b"]
    with pytest.raises(OSError, match="not empty"):
        copy_whole(folder, to)


def test_nothing_else_than_artifacts_is_removed(world, done, refused) -> None:
    at, before = ("--store", world.store), files_of(world.store, but=())
    for key in ("../models/other", "..", "serving", "checkpoints/ce.models", "models", "models/none"):
        for plan in ((), ("--plan",)):
            refused("store", "remove", key, *at, *plan)
    assert "only export takes" in refused("store", "gc", "--to", "x", *at)
    assert "takes no artifact" in refused("store", "gc", "models/a", *at)
    assert "taken whole" in refused("store", "remove", "models/a", "--limit", 1, *at)
    assert files_of(world.store, but=()) == before


def test_gc_ends_uploads_that_were_killed(bucket: str, done) -> None:
    storage = S3Storage(f"{bucket}/s")
    storage.put("corpus/g0000/x", b"x")
    upload = storage.s3.create_multipart_upload(Bucket=storage.bucket, Key="s/corpus/g0000/part-00000-aa.arrow")
    at = ("--store", f"{bucket}/s")
    name = f"corpus/g0000/part-00000-aa.arrow?uploadId={upload['UploadId']}, 0 B"
    assert done("store", "gc", *at, "--plan") == f"would remove {name}\n"
    assert done("store", "gc", *at) == f"removed {name}\n"
    assert done("store", "gc", *at) == ""


def test_a_store_that_is_not_there_is_told(tmp_path: Path, refused) -> None:
    for action in ("list", "gc"):
        assert "there is no store here" in refused("store", action, "--store", tmp_path / "none")
    assert not (tmp_path / "none").exists()
