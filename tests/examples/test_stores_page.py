"""docs/stores.md and docs/backup.md: their commands run in order, and do what the pages say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.store.store import Store

ROOT = Path(__file__).resolve().parents[2]


def commands_by_section(page: str) -> dict[str, list[list[str]]]:
    """Returns the words of the commands in the blocks of each section."""
    sections = {}
    for section in re.split(r"^#+ ", page, flags=re.MULTILINE)[1:]:
        blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
        sections[section.partition("\n")[0]] = [shlex.split(line) for block in blocks for line in block.splitlines()]
    return sections


def test_the_commands_of_the_page_change_an_encoder_and_undo_an_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call_job: Callable[..., int]
) -> None:
    sections = commands_by_section((ROOT / "docs/stores.md").read_text(encoding="utf-8"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    packages = (tmp_path / "examples/own_data/packages.csv").read_text(encoding="utf-8").splitlines()
    (tmp_path / "more.csv").write_text("\n".join([packages[0], "zzz,A package by mistake,Utilities,MIT,,false"]) + "\n")
    monkeypatch.chdir(tmp_path)
    store = Store("data/packages")

    def run(section: str, first: int = 0, end: int | None = None) -> None:
        for program, name, *arguments in sections[section][first:end]:
            assert program == "riptide"
            assert call_job(name.replace("-", "_"), *arguments) == 0, (name, arguments)

    run("Stores: several writers, another encoder, undo")
    run("Several people write to one store")
    assert store.keys() == ["corpus/g0000", "embeddings/first/g0000", "index/first/g0000"]
    run("Change the encoder", end=2)
    assert store.names("index") == ["first", "second"]
    run("Change the encoder", first=2)
    before = store.keys()
    assert before == ["corpus/g0000", "embeddings/second/g0000", "index/second/g0000"]
    rows = Corpus.open(store).num_rows
    run("Undo an append", end=3)
    assert store.keys() == sorted([*before, "corpus/g0001", "embeddings/second/g0001", "index/second/g0001"])
    assert Corpus.open(store).num_rows == rows + 1
    run("Undo an append", first=3)
    assert store.keys() == before
    assert Corpus.open(store).num_rows == rows
    assert call_job("search", "--store", store.url, "--mode", "dense", "--query", "a web server") == 0


def test_the_commands_of_the_page_restore_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call_job: Callable[..., int]
) -> None:
    sections = commands_by_section((ROOT / "docs/backup.md").read_text(encoding="utf-8"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)

    def run(section: str, first: int = 0, end: int | None = None) -> None:
        for program, name, *arguments in sections[section][first:end]:
            assert program == "riptide"
            assert call_job(name.replace("-", "_"), *arguments) == 0, (name, arguments)

    def contents(folder: str) -> dict[str, bytes]:
        storage = Store(folder).storage
        return {key: storage.read(key) for key, _ in storage.list("")}

    run("Backup and restore")
    before = contents("data/packages")
    run("Make a backup")
    run("Restore", end=3)
    assert contents("data/restored") == before == contents("backup/packages")
    assert contents("data/packages").keys() < before.keys()
    run("Restore", first=3)
    assert contents("data/packages") == before
    run("Models in the store")
    first, second = (Store("data/packages").open("embeddings", f"{name}/g0000") for name in ("first", "second"))
    assert [part.sha256 for part in first.parts] == [part.sha256 for part in second.parts]
