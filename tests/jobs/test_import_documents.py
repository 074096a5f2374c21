"""Importing a folder of documents: a passage for each file; a bad file leaves nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import files_of

from riptide.indexing.corpus.corpus import Corpus, Passage
from riptide.indexing.formats.chunking import cut_into_chunks
from riptide.indexing.formats.parse import parse_corpus
from riptide.indexing.formats.sources import detect_source
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store, open_storage

Done = Callable[..., str]
FILES = {
    "b.md": b"# Leave\n\nAsk *first*.\n",
    "a/deep/page.HTML": b"<title>Pay</title><nav>x</nav><p>On the 25th.",
    "a/notes.txt": b"\xef\xbb\xbf Ask Ann. \n",
    "a.txt": b"# not a heading",
    "a/untitled.htm": b"<p>one<p>two",
    "a/untitled.md": b"## Second\n\ntext",
    ".git/config.md": b"hidden",
    "a/.draft.txt": b"hidden",
    "a/tool.py": b"pass",
    "Makefile": b"all:",
}
EXPECTED = [
    ("a.txt", "a", "# not a heading"),
    ("a/deep/page.HTML", "Pay", "On the 25th."),
    ("a/notes.txt", "notes", "Ask Ann."),
    ("a/untitled.htm", "untitled", "one\ntwo"),
    ("a/untitled.md", "untitled", "Second\ntext"),
    ("b.md", "Leave", "Ask first."),
]


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def passages_of(store: Path) -> list[Passage]:
    corpus = Corpus.open(Store(str(store)))
    return corpus.passages(range(corpus.num_rows))


def test_each_file_of_a_mixed_folder_is_a_passage(tmp_path: Path, done: Done) -> None:
    command = ("import_corpus", "--store", tmp_path / "s", "--source", write(tmp_path / "raw", FILES))
    plan = done(*command, "--plan")
    out = done(*command)
    assert [(p.id, p.title, p.text) for p in passages_of(tmp_path / "s")] == EXPECTED
    assert "source   documents: 6 corpus files" in plan
    left_out = f"left out of {tmp_path}/raw: 2 hidden files, 2 files with other endings (1 without one, 1 .py)"
    assert left_out in out.splitlines()
    assert "complete" in done(*command, "--plan")


def test_queries_in_the_folder_are_imported_with_it(tmp_path: Path, done: Done) -> None:
    queries = {"queries.csv": b"query,relevant\nwhen is pay,a/deep/page.HTML\n"}
    out = done("import_corpus", "--store", tmp_path / "s", "--source", write(tmp_path / "raw", FILES | queries))
    assert ".csv)" not in out
    judged = Queries.open(Store(str(tmp_path / "s")), "raw").qrels("test")
    assert judged["corpus_id"].to_pylist() == ["a/deep/page.HTML"]


def test_other_formats_and_tables_come_first(tmp_path: Path, done: Done, refused: Done) -> None:
    raw = write(tmp_path / "raw", {"README.md": b"# About", "shop.csv": b"id,text\n1,x\n"})
    command = ("import_corpus", "--store", tmp_path / "s", "--source", raw)
    assert f"name the file itself, as {raw}/shop.csv" in refused(*command)
    assert "parameter" not in refused(*command, "--format", "documents", "--text", "x")
    done(*command, "--format", "documents")
    assert [p.id for p in passages_of(tmp_path / "s")] == ["README.md"]
    (raw / "shop.csv").rename(raw / "corpus.csv")
    assert detect_source(str(raw)).format.name == "csv"


def test_links_out_of_the_folder_and_special_files_are_counted_and_never_opened(tmp_path: Path, done: Done) -> None:
    raw = write(tmp_path / "raw", {"a.txt": b"text"})
    write(tmp_path, {"secret.txt": b"secret", "raw2/b.txt": b"beside"})
    targets = {"in": "a.txt", "out": "../secret.txt", "beside": "../raw2/b.txt", "loop": "loop.txt", "gone": "none"}
    for name, target in targets.items():
        (raw / f"{name}.txt").symlink_to(target)
    (raw / "folder").symlink_to(raw)
    os.mkfifo(raw / "pipe.txt")
    out = done("import_corpus", "--store", tmp_path / "s", "--source", raw)
    assert [(p.id, p.text) for p in passages_of(tmp_path / "s")] == [("a.txt", "text"), ("in.txt", "text")]
    assert "5 links that lead out of it, to folders or to nothing, 1 pipes, sockets or devices" in out


def test_folders_that_are_nested_too_deep_are_refused_in_one_line(tmp_path: Path, refused: Done) -> None:
    top = os.open(write(tmp_path / "raw", {"a.txt": b"text"}), os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("ddd", dir_fd=top)
        below = os.open("ddd", os.O_RDONLY, dir_fd=top)
        os.close(top)
        top = below
    os.close(top)
    try:
        line = refused("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "raw")
    finally:  # pytest, which would remove the folder some sessions later, cannot
        subprocess.run(["rm", "-rf", tmp_path / "raw"], check=True)
    assert "File name too long" in line


BAD = {
    "a document that is not UTF-8": ("x.txt", b"ab\xff", "x.txt: found invalid UTF-8 (byte 0xff at byte offset 2)"),
    "an image called .html": (
        "x.html",
        b"\x89PNG\r\n\x1a\n\0",
        "x.html: found invalid UTF-8 (byte 0x89 at byte offset",
    ),
    "a document with a zero byte": ("x.html", b"<p>a\0b", "x.html: found a zero byte at offset 4, expected text"),
    "a file called .html without a tag": (
        "x.html",
        b"%PDF-1.4",
        "x.html: found no tag, expected HTML; rename the file",
    ),
    "a document without text": ("x.html", b"<nav>menu</nav><img src=a>", "x.html: found no text, expected some;"),
    "Markdown with front matter alone": ("x.md", b"---\ntitle: x\n---\n", "x.md: found no text"),
    "an empty document": ("x.txt", b"", "x.txt: found no text"),
    "Markdown that is nested too deep": (
        "x.md",
        b"a\n\n" + b"> " * 101 + b"b",
        "x.md:3: found block quotes and lists nested more than 100 levels deep",
    ),
    "HTML that is nested too deep": (
        "x.html",
        b"\n" + b"<div>" * 2001,
        "x.html:2: found elements nested more than 2,000",
    ),
}


@pytest.mark.parametrize("rows_before", [0, 150])
@pytest.mark.parametrize("case", BAD)
def test_a_bad_document_is_named_and_leaves_nothing(
    tmp_path: Path, done: Done, refused: Done, documented: Callable[..., None], case: str, rows_before: int
) -> None:
    name, data, expected = BAD[case]
    raw = write(tmp_path / "raw", {f"a{number}.txt": b"text" for number in range(rows_before)})
    write(raw, {name: data, "z.md": b"z"})
    command = ("import_corpus", "--store", tmp_path / "s", "--source", raw)
    line = refused(*command)
    assert expected in line
    documented("Importing", case, line, 1)
    assert Store(str(tmp_path / "s")).keys() == []
    (raw / name).write_bytes(b"<p>repaired")
    done(*command)
    assert len(passages_of(tmp_path / "s")) == rows_before + 2


def test_folders_without_documents_and_single_documents_are_refused(tmp_path: Path, refused: Done) -> None:
    raw = write(tmp_path / "raw", {"a.py": b"pass", "b.md": b"text"})
    command = ("import_corpus", "--store", tmp_path / "s", "--source")
    assert "found a file that ends with .md, expected .csv[.gz]" in refused(*command, raw / "b.md")
    assert "found a file, expected a folder of documents" in refused(*command, raw / "b.md", "--format", "documents")
    (raw / "b.md").unlink()
    assert "found no documents, expected files that end with .txt, .md" in refused(
        *command, raw, "--format", "documents"
    )
    assert "found no corpus among a.py" in refused(*command, raw)


def test_an_interrupted_import_resumes_to_the_same_bytes_and_notices_a_changed_file(
    tmp_path: Path, done: Done, refused: Done, interrupt: Done
) -> None:
    raw = write(tmp_path / "raw", {f"{number:02d}/page.md": b"# Title\n\ntext" for number in range(20)})
    command = ("import_corpus", "--source", raw, "--part-size", 5, "--store")
    done(*command, tmp_path / "plain")
    interrupt(2, *command, tmp_path / "s")
    (raw / "19/page.md").write_bytes(b"# Title\n\nTEXT")
    assert "g0000 was begun otherwise: another source" in refused(*command, tmp_path / "s")
    (raw / "19/page.md").write_bytes(b"# Title\n\ntext")
    done(*command, tmp_path / "s")
    assert files_of(tmp_path / "s") == files_of(tmp_path / "plain")
    (raw / "19/page.md").write_bytes(b"# Title\n\nTEXT")
    assert "was imported otherwise" in refused(*command, tmp_path / "s")


def test_another_folder_is_appended_and_a_path_that_exists_is_refused(
    tmp_path: Path, done: Done, refused: Done
) -> None:
    command = ("import_corpus", "--store", tmp_path / "s", "--source")
    done(*command, write(tmp_path / "raw", FILES))
    more = write(tmp_path / "more", {"c/new.md": b"new"})
    done(*command, more, "--append")
    assert [(p.row, p.id) for p in passages_of(tmp_path / "s")][-1] == (6, "c/new.md")
    clash = write(tmp_path / "clash", {"b.md": b"other"})
    assert "id 'b.md' is in the corpus already, as row 5" in refused(*command, clash, "--append")


def test_a_folder_in_a_cloud_is_read_like_a_local_one(tmp_path: Path, cloud_url: str) -> None:
    for name, data in FILES.items():
        open_storage(f"{cloud_url}/raw").put(name, data)
    source = detect_source(f"{cloud_url}/raw/")
    tables = [parse_corpus(source.format, chunk) for chunk in cut_into_chunks(source, 4)]
    rows = [tuple(row.values()) for table in tables for row in table.select(["id", "title", "text"]).to_pylist()]
    assert rows == EXPECTED
    local = detect_source(str(write(tmp_path / "raw", FILES)))
    assert source.format.identity(source.corpus[0]) == local.format.identity(local.corpus[0])


def test_documents_are_split_and_dropped_as_a_whole(tmp_path: Path, done: Done, refused: Done) -> None:
    long = " ".join(f"Sentence {number} has five words." for number in range(12))
    raw = write(tmp_path / "raw", {"a/long.md": f"# Long\n\n{long}".encode(), "b.txt": b"short"})
    command = ("import_corpus", "--store", tmp_path / "s", "--split-words", 20, "--overlap", 0, "--source", raw)
    out = done(*command)
    passages = passages_of(tmp_path / "s")
    assert [p.id for p in passages] == ["a/long.md#0", "a/long.md#1", "a/long.md#2", "b.txt#0"]
    assert {p.title for p in passages[:3]} == {"Long"}
    assert "4 passages of 2 documents" in out
    more = write(tmp_path / "more", {"a/long.md": f"# Long\n\n{long}".encode(), "c.txt": b"new"})
    append = ("import_corpus", "--store", tmp_path / "s", "--append", "--drop-duplicates", "--source", more)
    (more / "a/long.md").write_bytes(f"# Long\n\n{long} {long}".encode())
    assert "id 'a/long.md' is in the corpus already with another title or text" in refused(*append)
    (more / "a/long.md").write_bytes(f"# Long\n\n{long}".encode())
    assert "dropped  3 passages" in done(*append)
    corpus = Corpus.open(Store(str(tmp_path / "s")))
    assert corpus.deleted.tolist() == [4, 5, 6]
    assert corpus.rows_of(["a/long.md#1", "c.txt#0"]).tolist() == [1, 7]
