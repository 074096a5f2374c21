"""Sources that cannot be read, and names that cannot be given: one line each, and nothing is written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PASSAGE = '{"_id": "a", "text": "x"}\n'


def write(path: Path, text: str = PASSAGE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def folder_of_long_queries(path: Path) -> Path:
    """A folder whose name no query set can have."""
    write(path / "corpus.jsonl")
    write(path / "queries.jsonl")
    return path


SOURCES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "pipe": ("a pipe as the source", lambda root: pipe(root / "pipe.jsonl"), "pipe.jsonl: found a pipe, a socket or"),
    "device": ("a device as the source", lambda root: "/dev/zero", "/dev/zero: found a pipe, a socket or a device"),
    "folder": (
        "a folder called like a file",
        lambda root: write(root / "x.jsonl/notes.pdf").parent,
        "x.jsonl: found no corpus among notes.pdf",
    ),
    "not UTF-8": (
        "a path that is not UTF-8",
        lambda root: write(root / "caf\udce9.jsonl"),
        r"caf\udce9.jsonl: found a path that is not UTF-8",
    ),
    "names not UTF-8": (
        "a folder with names that are not UTF-8",
        lambda root: write(root / "raw/caf\udce9.pdf").parent,
        r"raw: found no corpus among caf\udce9.pdf",
    ),
    "Parquet not UTF-8": (
        "a Parquet file whose name is not UTF-8, in a folder",
        lambda root: write(root / "raw/caf\udce9.parquet").parent,
        r"caf\udce9.parquet: found a path that is not UTF-8",
    ),
    "split not UTF-8": (
        "judgements in a file whose name is not UTF-8",
        lambda root: write(folder_of_long_queries(root / "raw") / "qrels/t\udce9.tsv").parent.parent,
        r"t\udce9.tsv: its split has no valid name",
    ),
    "long": ("a source path of 300 characters", lambda root: root / ("x" * 300), "File name too long"),
    "below a file": (
        "a source path below a file",
        lambda root: write(root / "x.jsonl") / "y",
        "x.jsonl/y: found nothing",
    ),
    "no bucket": (
        "an S3 source without a bucket",
        lambda root: "s3://",
        "s3://: found no bucket, expected s3://bucket",
    ),
    "folder name": (
        "queries in a folder with a space in its name",
        lambda root: folder_of_long_queries(root / "my data"),
        "its queries are named after it: name 'my data-g0000': use letters",
    ),
    "long folder name": (
        "queries in a folder with a name of 200 characters",
        lambda root: folder_of_long_queries(root / ("d" * 200)),
        "found 206 characters, expected at most 128",
    ),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_source_that_cannot_be_imported_is_refused(
    tmp_path: Path, refused: Callable[..., str], documented: Callable[..., None], kind: str
) -> None:
    case, make, expected = SOURCES[kind]
    line = refused("import_corpus", "--store", tmp_path / "store", "--source", make(tmp_path))
    assert expected in line
    assert not (tmp_path / "store").exists()
    documented("Importing", case, line, 1)


def test_names_beside_the_corpus_that_are_not_utf8_do_not_matter(tmp_path: Path, done: Callable[..., str]) -> None:
    write(tmp_path / "raw/caf\udce9.txt")
    write(tmp_path / "raw/corpus.jsonl")
    assert "1 passages" in done("import_corpus", "--store", tmp_path / "store", "--source", tmp_path / "raw")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store that is not empty."""
    return write(tmp_path / "store/corpus/g0000/manifest.begun.json").parents[2]


def test_a_file_of_ids_that_is_a_pipe_is_refused(tmp_path: Path, store: Path, refused: Callable[..., str]) -> None:
    """It would wait forever."""
    ids = pipe(tmp_path / "ids")
    assert "ids: found a pipe" in refused("import_corpus", "--store", store, "--delete", ids)
    assert "ids: found a pipe" in refused("import_queries", "--store", store, "--source", ids)


def test_a_name_of_300_characters_is_refused(
    tmp_path: Path, store: Path, refused: Callable[..., str], documented: Callable[..., None]
) -> None:
    source = write(tmp_path / "queries.jsonl")
    line = refused("import_queries", "--store", store, "--source", source, "--queries", "x" * 300)
    assert "found 300 characters, expected at most 128" in line
    documented("Importing", "a query set's name of 300 characters", line, 1)


UNPRIVILEGED = """
import contextlib, io, os, sys
from riptide.jobs import import_corpus
from riptide.jobs.commands.cli import options_class_of, run

def job(*arguments):
    run(import_corpus.main, options_class_of(import_corpus.main), list(arguments))

with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
    job("--store", "/nowhere/store", "--source", "/nowhere/source")  # imports what the other user may not read
os.setuid(65534)
job(*sys.argv[1:])
"""


@pytest.mark.skipif(os.getuid() != 0, reason="drops root's rights, which read everything")
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_source_without_permission_is_refused(tmp_path: Path, documented: Callable[..., None], kind: str) -> None:
    source = write(tmp_path / "raw/corpus.jsonl")
    (source if kind == "file" else source.parent).chmod(0)
    for folder in [tmp_path, *tmp_path.parents][:-2]:  # pytest's own folders are closed to others
        folder.chmod(0o755)
    named = source if kind == "file" else source.parent
    command = [sys.executable, "-c", UNPRIVILEGED, "--store", "/nowhere/store", "--source", str(named)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 1
    assert outcome.stderr.startswith(f"error: {named}: found nothing readable (")
    assert outcome.stderr.count("\n") == 1
    documented("Importing", f"a {kind} without permission to read it", outcome.stderr, 1)
