"""Files of results: written whole, and several of them together or not at all."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from riptide.base.errors import InputError, StorageError
from riptide.indexing.storage.storage import LocalStorage
from riptide.indexing.store.result_files import atomic_files, write_files


def write(paths: list[Path], content: str, *, overwrite: bool = False) -> None:
    with atomic_files(list(map(str, paths)), overwrite=overwrite) as files:
        for file in files:
            file.write_text(content)


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.parametrize("existing", ["a", "b"])
def test_if_one_file_is_refused_none_is_written(tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).write_text("before")
    paths = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(InputError, match=f"{existing}: a file with other content is there, and is kept"):
        write(paths, "after")
    assert contents(tmp_path) == {existing: "before"}
    write(paths, "after", overwrite=True)
    assert contents(tmp_path) == {"a": "after", "b": "after"}
    write(paths, "after")  # the same content again


def test_threads_may_write_the_same_file(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    def write_one(content: str) -> None:
        with atomic_files([str(tmp_path / "a")], overwrite=True) as [file]:
            file.write_text(content)
            both.wait()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write_one, ["one", "two"]))
    assert contents(tmp_path) in ({"a": "one"}, {"a": "two"})


def test_a_link_that_others_left_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / f".a.{os.getpid()}-{threading.get_ident()}").symlink_to(victim)
    write([tmp_path / "a"], "x")
    assert victim.read_text() == "kept"
    assert (tmp_path / "a").stat().st_mode & 0o111 == 0
    storage = LocalStorage(str(tmp_path))
    (tmp_path / ".b.lock").symlink_to(victim)
    with pytest.raises(StorageError, match="Too many levels of symbolic links"):
        storage.compare_and_swap("b", b"x", None)
    assert victim.read_text() == "kept"


def write_half(paths: list[Path]) -> None:
    with atomic_files(list(map(str, paths))) as [first, _]:
        first.write_text("half")
        raise KeyError


def test_after_an_error_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        write_half([tmp_path / "a", tmp_path / "b"])
    assert contents(tmp_path) == {}


def test_two_results_cannot_have_the_same_file(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    with pytest.raises(InputError, match="two results have this file; name another file for one of them"):
        write([tmp_path / "a", link], "x")
    assert not (tmp_path / "a").exists()


def test_one_file(tmp_path: Path) -> None:
    with atomic_files([str(tmp_path / "folder" / "a")]) as [file]:
        file.write_text("x")
        assert contents(tmp_path / "folder") == {file.name: "x"}
    assert contents(tmp_path / "folder") == {"a": "x"}


def test_texts_and_bytes_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    files = [(str(tmp_path / "new" / "a"), "ä"), (str(tmp_path / "new" / "b"), b"\xff")]
    write_files(files)
    assert (tmp_path / "new" / "a").read_bytes() == "ä".encode()
    assert (tmp_path / "new" / "b").read_bytes() == b"\xff"
    with pytest.raises(InputError, match="b: a file with other content is there"):
        write_files([(str(tmp_path / "new" / "c"), "c"), (files[1][0], "other")])
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a", "b"]
