"""An import that bad input ends: the input is corrected, the same command is repeated, and it succeeds."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.store.store import Store

Done = Callable[..., str]


class Failing(NamedTuple):
    """A source that is refused after parts were committed, and its correction."""

    case: str  # of tests/bad_input.md
    bad: dict[str, bytes]  # file -> contents
    good: dict[str, bytes]
    bad_options: tuple[str, ...] = ()
    good_options: tuple[str, ...] = ()
    parts: bool = True  # whether parts are committed before the bad row is found


def jsonl(*changes: tuple[int, str], count: int = 200, text: str = "text") -> bytes:
    """A BEIR corpus; the fields of row 150 and later have a year, and some lines are replaced."""
    lines = [
        json.dumps({"_id": f"p{n}", "text": f"{text} {n}", **({"year": 1900 + n} if n >= 150 else {})})
        for n in range(count)
    ]
    for number, line in changes:
        lines[number] = line
    return "".join(f"{line}\n" for line in lines).encode()


GOOD = jsonl()
ZIPPED = gzip.compress(GOOD, mtime=0)
LONG = gzip.compress(jsonl(text="text " * 2_000), 0, mtime=0)  # of several blocks
FAILING = {
    "field": Failing(
        "a row without text, after others",
        {"corpus.jsonl": jsonl((170, '{"_id": "p170", "contents": "text 170"}'))},
        {"corpus.jsonl": GOOD},
    ),
    "empty": Failing("an empty corpus file", {"corpus.jsonl": b""}, {"corpus.jsonl": GOOD}, parts=False),
    "latin-1": Failing(
        "a corpus in Latin-1",
        {"corpus.jsonl": jsonl((170, '{"_id": "p170", "text": "caf@"}')).replace(b"caf@", b"caf\xe9")},
        {"corpus.jsonl": jsonl((170, '{"_id": "p170", "text": "caf@"}')).replace(b"caf@", "café".encode())},
    ),
    "gzip": Failing(
        "a gzip file that breaks off",
        {"corpus.jsonl.gz": LONG[:-900]},
        {"corpus.jsonl.gz": LONG},
    ),
    "filter type": Failing(
        "a filter of another type than the field's values",
        {"corpus.jsonl": GOOD},
        {"corpus.jsonl": GOOD},
        ("--filters", "year", "string"),
        ("--filters", "year", "int64"),
    ),
    "unknown filter type": Failing(
        "a filter type that does not exist",
        {"corpus.jsonl": GOOD},
        {"corpus.jsonl": GOOD},
        ("--filters", "year", "int"),
        ("--filters", "year", "int64"),
        parts=False,
    ),
    "unknown filter": Failing(
        "a filter field that no passage has",
        {"corpus.jsonl": GOOD},
        {"corpus.jsonl": GOOD},
        ("--filters", "yaer", "int64"),
        ("--filters", "year", "int64"),
    ),
    "double": Failing(
        "an id that comes twice, in two parts",
        {"corpus.jsonl": jsonl((170, '{"_id": "p3", "text": "again"}'))},
        {"corpus.jsonl": jsonl((170, '{"_id": "x", "text": "again"}'))},
    ),
    "long": Failing(
        "a row that is longer than the limit, after others",
        {
            "corpus.jsonl.gz": ZIPPED
            + gzip.compress(b'{"_id": "x", "text": "')
            + gzip.compress(b"0" * (1 << 20), 1) * 34
        },
        {"corpus.jsonl.gz": ZIPPED + gzip.compress(b'{"_id": "x", "text": "0"}', mtime=0)},
    ),
    "columns": Failing(
        "a row with more columns than the limit, after others",
        {
            "corpus.jsonl": jsonl(
                (170, json.dumps({"_id": "p170", "text": "x", **dict.fromkeys(map(str, range(9_999)))}))
            )
        },
        {
            "corpus.jsonl": jsonl(
                (170, json.dumps({"_id": "p170", "text": "x", **dict.fromkeys(map(str, range(9_998)))}))
            )
        },
    ),
    "members": Failing(
        "a bad row in the second member of a gzip file",
        {"corpus.jsonl.gz": gzip.compress(GOOD, mtime=0) + gzip.compress(b'{"_id": 1.5, "text": ""}\n', mtime=0)},
        {"corpus.jsonl.gz": gzip.compress(GOOD, mtime=0) + gzip.compress(b'{"_id": 15, "text": ""}\n', mtime=0)},
    ),
}


def write_source(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, contents in files.items():
        (folder / name).write_bytes(contents)
    return folder


def stored(store: Store, key: str) -> dict[str, bytes]:
    """The data of an artifact and its manifest."""
    names = [name for name, _ in store.storage.list(key) if name.endswith((".arrow", ".npy", "/manifest.json"))]
    return {name: store.storage.read(name) for name in names}


def in_options(text: str) -> str:
    """Returns a message that a store keeps, with options in place of parameters."""
    return re.sub(r"\bparameter ([a-z_]+)", lambda match: "--" + match[1].replace("_", "-"), text)


@pytest.mark.parametrize("name", FAILING)
def test_a_corrected_import_succeeds_with_the_same_command(
    tmp_path: Path, done: Done, refused: Done, documented: Callable[..., None], name: str
) -> None:
    """As if it were the first one: with the same data and the same manifest."""
    check_correction(tmp_path, str(tmp_path / "store"), FAILING[name], done, refused, documented)


def test_a_corrected_import_succeeds_on_s3(tmp_path: Path, bucket: str, done: Done, refused: Done) -> None:
    check_correction(tmp_path, f"{bucket}/store", FAILING["field"], done, refused, lambda *_: None)


def check_correction(
    tmp_path: Path, url: str, failing: Failing, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    store = Store(url)
    source = write_source(tmp_path / "raw", failing.bad)
    command = ("import_corpus", "--store", url, "--source", source, "--part-size", 50)
    line = refused(*command, *failing.bad_options)
    documented("Importing", failing.case, line, 1)
    assert refused(*command, *failing.bad_options) == line, "a second failure is the same one"
    assert store.keys() == []
    if failing.parts:
        told = line.removeprefix("error: ")
        kept = {key: in_options(error) for key, error in store.failed_drafts().items()}
        assert kept == {"corpus/g0000": told}
        listed = in_options(done("store", "list", "--store", url))
        assert f"failed: the next command replaces it, gc removes it after an hour; {told}" in listed
    else:
        assert store.storage.is_empty()
    write_source(source, failing.good)
    done(*command, *failing.good_options)
    assert store.keys() == ["corpus/g0000"]
    assert store.failed_drafts() == {}
    done("import_corpus", "--store", tmp_path / "plain", *command[3:], *failing.good_options)
    assert stored(store, "corpus") == stored(Store(str(tmp_path / "plain")), "corpus")
    done("verify", "--store", url)


def test_a_corrected_addition_succeeds_with_the_same_command(tmp_path: Path, done: Done, refused, documented) -> None:
    """With an id that the corpus has, then with a bad file of ids to delete, then without both."""
    at = ("--store", tmp_path / "store")
    done("import_corpus", *at, "--source", write_source(tmp_path / "first", {"corpus.jsonl": jsonl(count=10)}))
    more = write_source(tmp_path / "more", {"corpus.jsonl": b'{"_id": "new", "text": ""}\n{"_id": "p6", "text": ""}\n'})
    append = ("import_corpus", *at, "--source", more, "--append")
    documented("Importing", "an added passage with an id of the corpus", refused(*append), 1)
    (tmp_path / "ids").write_text("nobody\n")
    refused(*append, "--delete", tmp_path / "ids")
    (tmp_path / "ids").write_text("p2\n")
    refused(*append, "--delete", tmp_path / "ids")
    store = Store(str(tmp_path / "store"))
    assert list(store.failed_drafts()) == ["corpus/g0001"]
    (more / "corpus.jsonl").write_bytes(b'{"_id": "new", "text": ""}\n{"_id": "p66", "text": ""}\n')
    done(*append)
    assert Corpus.open(store).rows_of(["new", "p66", "p6"]).tolist() == [10, 11, 6]
    assert Corpus.open(store).deleted.tolist() == []
    done("verify", *at)


def test_a_correction_that_no_sample_of_the_file_shows_is_imported(tmp_path: Path, done: Done, refused) -> None:
    """An import remembers a source by its size and three samples of 1 MiB. Here the correction lies between them."""
    passages = [{"_id": f"p{n}", "text": "x" * 4_000} for n in range(2_000)]
    text = "".join(json.dumps(passage) + "\n" for passage in passages)
    source = write_source(tmp_path / "raw", {"corpus.jsonl": text.replace('"p600"', '"p100"', 1).encode()})
    command = ("import_corpus", "--store", tmp_path / "store", "--source", source, "--part-size", 250)
    assert "corpus.jsonl:601: id 'p100' comes a second time" in refused(*command)
    write_source(source, {"corpus.jsonl": text.encode()})
    done(*command)
    assert Corpus.open(Store(str(tmp_path / "store"))).rows_of(["p600"]).tolist() == [600]


def test_a_failed_import_is_cleared_by_gc_after_an_hour(tmp_path: Path, done: Done, refused) -> None:
    source = write_source(tmp_path / "raw", FAILING["field"].bad)
    refused("import_corpus", "--store", tmp_path / "store", "--source", source, "--part-size", 50)
    assert done("store", "gc", "--store", tmp_path / "store") == "nothing to remove\n"
    for path in (tmp_path / "store/corpus/g0000").iterdir():
        os.utime(path, (0, 0))
    assert "removed corpus/g0000/failed.json" in done("store", "gc", "--store", tmp_path / "store")
    assert not (tmp_path / "store/corpus").exists()


def test_a_killed_import_refuses_other_options_with_the_command_that_removes_it(
    tmp_path: Path, interrupt, done: Done, refused, documented
) -> None:
    store = tmp_path / "a store"
    source = write_source(tmp_path / "raw", {"corpus.jsonl": GOOD})
    command = ("import_corpus", "--store", store, "--source", source, "--part-size")
    interrupt(2, *command, 50)
    line = refused(*command, 60)
    documented("Importing", "other options for an import that was killed", line, 1)
    assert "--part-size 50, now 60" in line
    remove = shlex.split(line.partition("works on it: ")[2])
    assert remove == ["riptide", "store", "remove", "corpus/g0000", "--store", str(store)]
    done("store", *remove[2:])
    done(*command, 60)
