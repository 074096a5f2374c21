"""Looking into a store, removing from it, clearing it."""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from samples import files_of, make_passages, write_beir

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.maintenance import retention
from riptide.indexing.storage import storage
from riptide.indexing.storage.s3 import S3Storage
from riptide.indexing.storage.storage import LocalStorage
from riptide.indexing.store.live_release import LiveRecord
from riptide.indexing.store.model_artifacts import StoredCheckpoint, commit_files
from riptide.indexing.store.store import Store
from riptide.jobs.store_actions.transfer import copy_whole


def test_list_shows_each_artifact_with_size_rows_and_lineage(world, done) -> None:
    heading, *lines, totals = done("store", "list", "--store", world.store).splitlines()
    assert heading.split() == ["artifact", "size", "rows", "made", "from"]
    assert [line.split()[0] for line in lines] == [
        "corpus/g0000",
        "embeddings/enc/g0000",
        "index/idx/g0000",
        "queries/tiny",
        "runs/dense",
        "runs/exact",
    ]
    assert re.fullmatch(r"corpus/g0000 +[\d.]+ kB +240  \d{4}-\d\d-\d\d \d\d:\d\d  -", lines[0])
    assert lines[2].endswith("  embeddings/enc/g0000")
    assert "corpus/g0000" in lines[5]
    starts = {line.rindex(line.split()[-1]) for line in (heading, lines[0], lines[2])}
    assert len(starts) == 1, "the inputs begin in one column"
    assert re.fullmatch(r"6 artifacts, [\d.]+ kB; corpus: 240 passages", totals)
    limited = done("store", "list", "--store", world.store, "--limit", 2).splitlines()
    assert (len(limited), limited[-1].split(",")[0]) == (4, "2 of 6 artifacts")
    (world.store / "runs/dense/manifest.json").unlink()
    assert re.search(r"^runs/dense +incomplete", done("store", "list", "--store", world.store), re.MULTILINE)


def test_the_size_of_a_corpus_is_the_same_everywhere(tmp_path: Path, done) -> None:
    """In the lines of the jobs and in Python: passages and documents that are not deleted."""
    text = " ".join(f"word{number}" for number in range(30))
    (tmp_path / "raw.jsonl").write_text("".join(f'{{"id": "d{n}", "text": "{text} {n}"}}\n' for n in range(3)))
    store = tmp_path / "store"
    done("import_corpus", "--store", store, "--source", tmp_path / "raw.jsonl", "--split-words", 10)
    (tmp_path / "gone").write_text("d1\n")
    printed = done("import_corpus", "--store", store, "--delete", tmp_path / "gone")
    corpus = Corpus.open(Store(str(store)))
    passages = len(corpus.deleted)
    assert (len(corpus), corpus.num_documents) == (2 * passages, 2)
    size = f"{2 * passages} passages of 2 documents, without {passages} deleted passages"
    assert repr(corpus) == f"Corpus({size})"
    assert printed.splitlines()[-1] == f"{store}/corpus/g0001: {size}; 1 part"
    assert f"; corpus: {size}\n" in done("store", "list", "--store", store)
    assert f"corpus       {size}, of all generations\n" in done("store", "show", "corpus", "--store", store)


def test_show_tells_what_an_artifact_is_made_of_and_needed_by(world, done, refused) -> None:
    out = done("store", "show", "embeddings/enc/g0000", "--store", world.store)
    artifact = Store(str(world.store)).open("embeddings", "enc/g0000")
    assert f"fingerprint  {artifact.fingerprint}" in out
    assert "input        corpus: corpus/g0000" in out
    for needed_by in ("index/idx/g0000", "runs/dense", "runs/exact"):
        assert f"needed by    {needed_by}" in out
    assert re.search(rf"^versions     .*python {platform.python_version()}, .*tokenizers \d", out, re.MULTILINE)
    assert '"pooling": "mean"' in out
    assert all(part.file in out for part in artifact.parts)
    line = refused("store", "show", "embeddings/none/g0000", "--store", world.store)
    assert line.endswith(f"no such artifact; riptide store list --store {world.store} shows what there is")
    line = refused("store", "show", "--store", world.store)
    assert line.endswith(f"expected an artifact; riptide store list --store {world.store} shows what there is")


def test_remove_takes_what_nothing_needs(world, done, refused) -> None:
    before = files_of(world.store, but=())
    at = ("--store", world.store)
    line = refused("store", "remove", "embeddings/enc/g0000", *at)
    assert "embeddings/enc/g0000 is needed by index/idx/g0000, runs/dense, runs/exact: remove those first" in line
    assert "no such artifact" in refused("store", "remove", "runs/none", *at)
    assert "remove: expected an artifact" in refused("store", "remove", *at)
    done("store", "remove", "runs/exact", *at, "--plan")
    assert files_of(world.store, but=()) == before
    assert "removed runs/exact" in done("store", "remove", "runs/exact", "--yes", *at)
    assert files_of(world.store, but=()) == {k: v for k, v in before.items() if not k.startswith("runs/exact/")}
    for key in ("runs/dense", "index/idx/g0000", "embeddings/enc/g0000", "queries/tiny", "corpus/g0000"):
        done("store", "remove", key, "--yes", *at)
    assert files_of(world.store, but=()) == {}


def test_a_name_without_a_generation_is_its_newest_one_or_all_of_them(world, done, refused) -> None:
    at, store = ("--store", world.store), Store(str(world.store))
    with store.create("index", "idx/g0001", inputs={"previous": store.open("index", "idx/g0000")}):
        pass
    store.create("index", "idx/g0002", inputs={"previous": store.open("index", "idx/g0001")})  # is not complete
    assert done("store", "show", "index/idx", *at).startswith(f"{world.store}/index/idx/g0001\n")
    assert done("store", "show", "corpus/", *at).startswith(f"{world.store}/corpus/g0000\n")
    assert "index/id: no such artifact" in refused("store", "show", "index/id", *at)
    assert "index/idx is needed by runs/dense: remove those first" in refused("store", "remove", "index/idx", *at)
    done("store", "remove", "runs/dense", "--yes", *at)
    planned = done("store", "remove", "index/idx", *at, "--plan").splitlines()
    assert [line.split(",")[0] for line in planned] == [
        "would remove index/idx/g0002",
        "would remove index/idx/g0001",
        "would remove index/idx/g0000",
        "would remove 3 artifacts",
    ]
    done("store", "remove", "index/idx", "--yes", *at)
    assert store.keys("index") == []


def test_dependents_are_removed_first_and_a_removal_can_be_interrupted(
    world, job, done, refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every number of deletions, each complete artifact has its inputs, and the same command removes the rest."""
    command, store = (
        ("store", "remove", "embeddings/enc", "--with-dependents", "--yes", "--store", world.store),
        world.store,
    )
    before = files_of(store, but=())
    line = refused(*command[:3], *command[5:])
    assert line.endswith(
        "remove those first, or give --with-dependents, which removes everything that was made from it"
    )
    planned = done(*command, "--plan").splitlines()
    assert files_of(store, but=()) == before
    keys = [line.removeprefix("would remove ").split(",")[0] for line in planned[:-1]]
    assert sorted(keys) == ["embeddings/enc/g0000", "index/idx/g0000", "runs/dense", "runs/exact"]
    assert keys[-1] == "embeddings/enc/g0000"
    assert keys.index("runs/dense") < keys.index("index/idx/g0000")
    number = sum(1 for key in before if any(key.startswith(f"{each}/") for each in keys))
    assert planned[-1].startswith(f"would remove 4 artifacts, {number} files, ")
    real = LocalStorage.delete
    for count in range(1, number, 3):
        left = [count]

        def delete(storage: LocalStorage, key: str, left: list[int] = left) -> None:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            real(storage, key)

        with monkeypatch.context() as interrupted:
            interrupted.setattr(LocalStorage, "delete", delete)
            assert job(*command).status == 130
        opened = Store(str(store))
        complete = {*opened.keys(), *opened.incomplete_keys()}
        needed = {entry["artifact"] for key in complete for entry in opened.inputs(key).values()}
        assert needed <= complete, count
        for name, content in before.items():
            (store / name).parent.mkdir(parents=True, exist_ok=True)
            (store / name).write_bytes(content)
    done(*command)
    kept = {key: content for key, content in before.items() if not key.startswith(("embeddings/", "index/", "runs/"))}
    assert files_of(store, but=()) == kept
    assert "--with-dependents: only remove" in refused("store", "gc", "--with-dependents", "--store", store)


def test_the_live_release_is_removed_after_the_record_that_names_it(world, done, refused) -> None:
    store = Store(str(world.store))
    with store.create("releases", "0" * 16, inputs={"index": store.open("index", "idx/g0000")}):
        pass
    store.storage.compare_and_swap("serving/current.json", LiveRecord("0" * 16, ()).document(), None)
    line = refused("store", "remove", "index/idx", "--with-dependents", "--store", world.store)
    assert line.endswith(
        f"serving/current.json, as releases/{'0' * 16} is live: serve another release, or end its servers and remove "
        f"serving (riptide store remove serving --store {world.store})"
    )
    at = ("--store", world.store)
    assert "remove the artifacts after it" in refused("store", "remove", "serving", "--with-dependents", *at)
    assert done("store", "remove", "serving", *at, "--plan").startswith("would remove serving/current.json, ")
    assert done("store", "remove", "serving", "--yes", *at).startswith("removed serving/current.json, ")
    assert not (world.store / "serving/current.json").exists()
    assert refused("store", "remove", "serving", *at).endswith(": no release is live")
    done("store", "remove", "index/idx", "--yes", "--with-dependents", *at)
    assert store.keys("releases") == []


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
    assert done("store", "gc", *at) == "nothing to remove\n"


def test_gc_ends_what_a_later_generation_took_the_rows_of(world, done) -> None:
    before = files_of(world.store, but=())
    at = ("--store", world.store)
    store = Store(str(world.store))
    store.create("index", "idx/g0001", inputs={"previous": store.open("index", "idx/g0000")})
    assert re.search(r"^index/idx/g0001 +incomplete", done("store", "list", *at), re.MULTILINE)
    later = world.store / "index/idx/g0002"
    with store.create("index", "idx/g0002", inputs={"previous": store.open("index", "idx/g0000")}):
        pass
    listed = done("store", "list", *at)
    assert re.search(r"^index/idx/g0001 +superseded: a later generation has its rows", listed, re.MULTILINE)
    assert done("store", "gc", *at) == "nothing to remove\n"
    os.utime(world.store / "index/idx/g0001/manifest.begun.json", (0, 0))
    assert "removed index/idx/g0001/manifest.begun.json" in done("store", "gc", *at)
    assert not (world.store / "index/idx/g0001").exists()
    shutil.rmtree(later)
    assert files_of(world.store, but=()) == before


def test_checkpoints_end_with_their_model(world, done) -> None:
    before = files_of(world.store, but=())
    at, store = ("--store", world.store), Store(str(world.store))

    def checkpoint(name: str) -> None:
        StoredCheckpoint(store, name, "identity").save(1, lambda path: path.write_bytes(b"weights"))

    store.create("models", "ce")
    for name in ("ce.models", "ce.models.best", "gone.models"):
        checkpoint(name)
    assert done("store", "gc", *at, "--plan").count("would remove checkpoints/gone.models/") == 2
    out = done("store", "gc", *at)
    assert out.startswith("removed checkpoints/gone.models/latest.json, ")
    assert re.fullmatch(r"removed 2 files, \d+ B in total", out.splitlines()[2])
    assert out.count("\n") == 3
    for name in ("ce-more.models", "ce.prompts"):
        checkpoint(name)
    done("store", "remove", "models/ce", "--yes", *at)
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
    assert f"--to {to}: it exists and is not an empty folder" in refused(
        "store", "export", "prompts/legal", "--to", to, *at
    )
    assert "export prompts/legal: expected --to, the folder for its files" in refused(
        "store", "export", "prompts/legal", *at
    )
    other = refused("store", "export", "corpus/g0000", "--to", tmp_path / "other", *at)
    assert "corpus/g0000: expected models/NAME or prompts/TASK" in other
    (tmp_path / "file").write_text("")
    under = refused("store", "export", "prompts/legal", "--to", tmp_path / "file" / "legal", *at)
    assert "Not a directory" in under or "File exists" in under
    done("store", "remove", "prompts/legal", "--yes", *at)


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
    assert "only export and copy take it" in refused("store", "gc", "--to", "x", *at)
    assert "only copy takes it" in refused("store", "gc", "--verify", *at)
    assert "takes no artifact" in refused("store", "gc", "models/a", *at)
    assert "taken whole" in refused("store", "remove", "models/a", "--limit", 1, *at)
    assert files_of(world.store, but=()) == before


def test_gc_ends_uploads_that_were_killed(bucket: str, done) -> None:
    storage = S3Storage(f"{bucket}/s")
    storage.put("corpus/g0000/x", b"x")
    upload = storage.s3.create_multipart_upload(Bucket=storage.bucket, Key="s/corpus/g0000/part-00000-aa.arrow")
    at = ("--store", f"{bucket}/s")
    name = f"corpus/g0000/part-00000-aa.arrow?uploadId={upload['UploadId']}, 0 B"
    assert done("store", "gc", *at, "--plan") == f"would remove {name}\nwould remove 1 file, 0 B in total\n"
    assert done("store", "gc", *at) == f"removed {name}\nremoved 1 file, 0 B in total\n"
    assert done("store", "gc", *at) == "nothing to remove\n"


def test_a_store_that_is_not_there_is_told(tmp_path: Path, refused) -> None:
    for action in ("list", "gc"):
        assert "there is no store here" in refused("store", action, "--store", tmp_path / "none")
    assert not (tmp_path / "none").exists()


MISTYPED = {
    "`--store s3:/bucket/x`": "s3:/bucket/x",
    "`--store S3://bucket/x`": "S3://bucket/x",
    "`--store hdfs://host/x`": "hdfs://host/x",
    "`--store file:///data/x`": "file:///data/x",
    "`--store` below the home directory of an unknown user": "~no-such-user/x",
}


@pytest.mark.parametrize("case", MISTYPED)
def test_a_mistyped_store_is_refused(case: str, tmp_path: Path, monkeypatch, refused, documented) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused("store", "list", "--store", MISTYPED[case])
    assert list(tmp_path.iterdir()) == []
    documented("Stores", case, line, 1)


def test_a_current_folder_that_was_removed_is_told(tmp_path: Path, monkeypatch, refused, documented) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    documented("Stores", "a command in a folder that was removed", refused("store", "list", "--store", "s"), 1)


def test_a_place_that_cannot_hold_a_store_is_named(tmp_path: Path, refused, documented) -> None:
    (tmp_path / "file").write_text("")
    source = write_beir(tmp_path / "raw", make_passages(5))
    documented("Stores", "`--store` is a file", refused("verify", "--store", tmp_path / "file"), 1)
    line = refused("import_corpus", "--store", tmp_path / "file/s", "--source", source)
    documented("Stores", "`--store` lies below a file", line, 1)
    line = refused("import_corpus", "--store", "/proc/store", "--source", source)
    documented("Stores", "`--store` lies where no folder can be made", line, 1)
    line = refused("verify", "--store", tmp_path / "none")
    documented("Stores", "`--store` does not exist, to be read", line, 1)
    (tmp_path / "fixed").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", tmp_path / "fixed"], check=True)
    try:
        line = refused("import_corpus", "--store", tmp_path / "fixed/s", "--source", source)
        assert "there is no store here" in refused("verify", "--store", tmp_path / "fixed/s")
    finally:
        subprocess.run(["umount", tmp_path / "fixed"], check=True)
    documented("Stores", "`--store` lies on a read-only file system", line, 1)


def test_a_file_system_without_hard_links_is_refused(tmp_path: Path, monkeypatch, refused, documented) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(source), None, str(target))

    source = write_beir(tmp_path / "raw", make_passages(5))
    monkeypatch.setattr(storage.os, "link", refuse)
    line = refused("import_corpus", "--store", tmp_path / "s", "--source", source)
    assert [path.name for path in (tmp_path / "s").iterdir()] == [".tmp"]
    documented("Stores", "the file system has no hard links", line, 1)


def test_a_nul_character_in_a_recipe_is_refused(tmp_path: Path, refused, documented) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('store: "a\\0b"\n')
    documented("Stores", "a NUL character in `store` of a recipe", refused("verify", "--config", recipe), 1)
    recipe.write_text('store: s\nfilters: {"a\\0b": string}\n')
    assert "--filters 'a\\x00b': expected text without NUL" in refused("import_corpus", "--config", recipe)


def test_names_of_300_characters_are_refused(world, refused, documented) -> None:
    before, at, name = files_of(world.store, but=()), ("--store", world.store), "x" * 300
    line = refused("search", *at, "--mode", "exact", "--k", 3, "--name", name)
    documented("Stores", "a name of 300 characters", line, 1)
    assert f"name '{'x' * 40}'...: found 300 characters" in refused("store", "remove", f"runs/{name}", *at)
    refused("serve_search", *at, "--tasks", name, "--plan")
    assert files_of(world.store, but=()) == before


def test_an_error_of_the_operating_system_is_one_line(world, monkeypatch, refused) -> None:
    """Of the errors that a user can fix, in a job's own code."""

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(world.store))

    monkeypatch.setattr(Store, "incomplete_keys", fail)
    line = refused("verify", "--store", world.store)
    assert line == f"error: {world.store}: Too many open files: raise the limit (ulimit -n)"


def test_files_whose_names_are_not_text_are_told_or_left_alone(world, done) -> None:
    at = ("--store", world.store)
    before = done("store", "list", *at)
    for place in (b"", b"/runs/dense", b"/.tmp"):
        with open(os.fsencode(world.store) + place + b"/\xff.json", "wb") as file:
            file.write(b"{}")
        os.utime(file.name, (0, 0))
    assert done("store", "list", *at).splitlines()[:-1] == before.splitlines()[:-1], "all but the number of files"
    assert "6 artifacts are as they were committed" in done("verify", *at)
    out = done("store", "gc", *at, "--plan")
    assert out == done("store", "gc", *at).replace("removed", "would remove")
    out.encode()
    assert done("store", "gc", *at) == "nothing to remove\n"


def test_a_damaged_manifest_is_one_line_and_nothing_else_is_lost(world, job, done, refused, documented) -> None:
    at = ("--store", world.store)
    manifest = world.store / "runs/dense/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    for run in ("dense", "exact"):
        (world.store / f"runs/{run}/part-00000-0123456789abcdef.parquet").write_bytes(b"lost the race")
    before = files_of(world.store, but=())
    listed = job("store", "list", *at)
    assert listed.status == 1
    assert re.search(r"^runs/dense +damaged: its manifest cannot be read", listed.out, re.MULTILINE)
    assert "runs/exact" in listed.out
    [bad] = [line for line in listed.out.splitlines() if line.startswith("bad: ")]
    assert bad.startswith(f"bad: {manifest}: its bytes are not those that were written")
    documented("Stores", "`store list` with a damaged manifest", listed.err, 1)
    gc = job("store", "gc", *at)
    assert gc.status == 1
    removed = "removed runs/exact/part-00000-0123456789abcdef.parquet, 13 B"
    assert gc.out.splitlines() == [removed, "removed 1 file, 13 B in total", bad]
    after = files_of(world.store, but=())
    assert before.keys() - after.keys() == {"runs/exact/part-00000-0123456789abcdef.parquet"}
    documented("Stores", "`store gc` with a damaged manifest", gc.err, 1)
    for action in (("show", "runs/dense"), ("export", "runs/dense", "--to", world.store / "to")):
        line = refused("store", *action, *at)
        assert str(manifest) in line
    documented("Stores", "`store export` of an artifact with a damaged manifest", line, 1)
    assert files_of(world.store, but=()) == after
    (world.store / "runs/exact/provenance.json").write_bytes(b"")
    documented("Stores", "`store show` with an empty provenance.json", refused("store", "show", "runs/exact", *at), 1)
    (world.store / "runs/exact/provenance.json").unlink()
    assert "provenance.json: the file is missing; restore it" in refused("store", "show", "runs/exact", *at)
    done("store", "remove", "runs/dense", "--yes", *at)
    assert {key.split("/")[1] for key in after.keys() - files_of(world.store, but=()).keys() if "runs" in key} == {
        "dense",
        "exact",
    }


def test_gc_removes_old_releases_and_their_prompts(tmp_path: Path, job, done, refused, monkeypatch, documented) -> None:
    """Nothing of them while it is unknown which one is live."""
    store, at = Store(str(tmp_path / "s")), ("--store", tmp_path / "s")
    with store.create("prompts", "legal.1", config={"given": "legal.1"}):
        pass
    ids = [f"{number:016x}" for number in range(4)]
    for id in ids:
        with store.create("releases", id, inputs={"prompt": store.open("prompts", "legal.1")} if id == ids[3] else {}):
            pass
    current = LiveRecord(ids[0], (ids[1],)).document()
    store.storage.put("serving/current.json", current)
    assert done("store", "gc", *at) == "nothing to remove\n"
    monkeypatch.setattr(retention, "GRACE_S", -60.0)
    before = files_of(tmp_path / "s", but=())
    (tmp_path / "s/serving/current.json").write_bytes(current[:40])
    gc = job("store", "gc", *at)
    assert (gc.status, gc.out.count("\n")) == (1, 1)
    assert gc.out.startswith(f"bad: {tmp_path}/s/serving/current.json: the file is truncated or is not JSON, so the")
    line = refused("store", "remove", f"releases/{ids[3]}", *at)
    documented("Releases", "`store remove` of a release with a truncated current.json", line, 1)
    store.storage.put("serving/current.json", current)
    assert files_of(tmp_path / "s", but=()) == before
    keys = [f"releases/{ids[2]}", f"releases/{ids[3]}", "prompts/legal.1"]
    planned = done("store", "gc", *at, "--plan").splitlines()
    assert [line.split(", ")[0] for line in planned[:-1]] == [f"would remove {key}" for key in keys]
    assert files_of(tmp_path / "s", but=()) == before
    assert "releases/" + ids[2] in done("store", "gc", *at, "--limit", 1)
    out = done("store", "gc", *at).splitlines()
    assert [line.split(", ")[0] for line in out[:-1]] == [f"removed {key}" for key in keys[1:]]
    assert store.keys() == [f"releases/{ids[0]}", f"releases/{ids[1]}"]
    assert done("store", "gc", *at) == "nothing to remove\n"
