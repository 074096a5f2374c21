"""A new corpus format, once it is registered, is imported, detected and named as any other."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from toy_format import Toy, toy_format

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.queries import Queries
from riptide.indexing.formats.format import CorpusFormat
from riptide.indexing.store.store import Store

Done = Callable[..., str]
ROOT = Path(__file__).resolve().parents[2]
# A job in a process whose registry has the format as an engineer adds it: an import, and an entry of the list.
JOB = """
import sys
from pathlib import Path
from types import ModuleType

source = Path("indexing/formats/registry.py").read_text()
for old, new in [
    ("\\nfrom riptide.base", "\\nfrom toy_format import TOY\\nfrom riptide.base"),
    (", DOCUMENTS]", ", DOCUMENTS, TOY]"),
]:
    assert source.count(old) == 1
    source = source.replace(old, new)
registry = sys.modules["riptide.indexing.formats.registry"] = ModuleType("riptide.indexing.formats.registry")
exec(source, registry.__dict__)

import riptide.jobs.{job} as job
from riptide.jobs.common.cli import options_class_of, run
run(job.main, options_class_of(job.main), sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with toy_format():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "paints"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.toy").write_text("p1: Blue paint\np2: Red paint\n")
    (folder / "queries.toy").write_text("q1: something blue\nq2: any paint\n")
    (folder / "qrels/dev.tsv").write_text("query-id\tcorpus-id\tscore\nq1\tp1\t1\nq2\tp2\t2\n")
    return folder


def test_a_folder_is_imported_with_its_queries_and_judgements(folder: Path, done: Done, tmp_path: Path) -> None:
    done("import_corpus", "--store", tmp_path / "store", "--source", folder, "--filters", "line", "int64")
    store = Store(str(tmp_path / "store"))
    corpus = Corpus.open(store)
    assert [(p.id, p.text, p.metadata_json) for p in corpus.passages([0, 1])] == [
        ("p1", "Blue paint", '{"line":1}'),
        ("p2", "Red paint", '{"line":2}'),
    ]
    assert corpus.generations[0].config["format"] == "toy"
    queries = Queries.open(store, "paints")
    assert queries.split("dev") == (["q1", "q2"], ["something blue", "any paint"])
    assert [tuple(row.values()) for row in queries.qrels("dev").to_pylist()] == [("q1", "p1", 1), ("q2", "p2", 2)]


def test_files_of_any_name_are_detected_by_their_ending(folder: Path, done: Done, tmp_path: Path) -> None:
    store = tmp_path / "store"
    (tmp_path / "x.toy.gz").write_bytes(gzip.compress((folder / "corpus.toy").read_bytes()))
    done("import_corpus", "--store", store, "--source", tmp_path / "x.toy.gz")
    done("import_queries", "--store", store, "--source", folder / "queries.toy", "--queries", "asked")
    assert Corpus.open(Store(str(store))).num_rows == 2
    assert Queries.open(Store(str(store)), "asked").table["id"].to_pylist() == ["q1", "q2"]


def test_bad_input_is_refused_with_its_line_and_the_known_formats(
    folder: Path, done: Done, refused: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "corpus.toy").rename(folder / "other.toy")
    (folder / "corpus.toy").write_text("p1: Blue paint\nRed paint\n")
    command = ("import_corpus", "--store", tmp_path / "store", "--source")
    assert "corpus.toy:2: found the line 'Red paint', expected ID: TEXT; fix the line" in refused(*command, folder)
    assert "expected ID: TEXT" in refused(*command, folder / "corpus.toy")
    line = refused(*command, folder / "corpus.toy", "--text", "a")
    assert "found the ending .toy, expected .csv[.gz], .tsv[.gz]" in line
    assert ".toy[.gz]" not in line
    (tmp_path / "none").mkdir()
    assert "kilt, documents, toy; name the file" in refused(*command, tmp_path / "none")
    (tmp_path / "a.doc").write_text("x")
    assert ".toy[.gz]" in refused(*command, tmp_path / "a.doc")
    monkeypatch.setattr(Toy, "read_queries", CorpusFormat.read_queries)
    done(*command, folder / "other.toy")
    line = refused("import_queries", "--store", tmp_path / "store", "--source", folder / "queries.toy")
    assert "found the format toy, which has no queries; name another format" in line


@pytest.mark.parametrize("name", ["import_corpus", "import_queries"])
def test_the_option_and_its_help_have_the_format(name: str, folder: Path, done: Done, tmp_path: Path) -> None:
    def output(*arguments: object) -> str:
        command = [sys.executable, "-c", JOB.format(job=name), *map(str, arguments)]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        process = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stderr
        return process.stdout

    assert "dpr,kilt,documents,toy}" in "".join(output("--help").split())
    done("import_corpus", "--store", tmp_path / "store", "--source", folder / "corpus.toy")
    source = folder / ("corpus.toy" if name == "import_corpus" else "queries.toy")
    store = tmp_path / ("other" if name == "import_corpus" else "store")
    assert "2 " in output("--store", store, "--source", source, "--format", "toy")
