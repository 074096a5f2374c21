"""Imports: killed ones, and filters of which no passage has a value."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runners import InlineRunner

from riptide.base.errors import InputError, StorageError
from riptide.indexing.corpus import importing
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.importing import ImportCorpusWork, ImportOptions, ParseStage
from riptide.indexing.formats.sources import detect_source
from riptide.indexing.store.store import Store
from riptide.indexing.work.work import run_work
from riptide.indexing.work.worker_tasks import Runner, WorkerTask

PART_SIZE = 10


def write_corpus(folder: Path, fields: Iterable[dict], prefix: str = "p") -> str:
    """A BEIR corpus with a passage for each of `fields`, its metadata."""
    folder.mkdir(exist_ok=True)
    rows = [{"_id": f"{prefix}{number}", "text": "some text", **each} for number, each in enumerate(fields)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def import_all(
    store: Store,
    source: str,
    *,
    append: bool = False,
    part_size: int = PART_SIZE,
    runner: Runner | None = None,
    **filters: str,
) -> None:
    options = ImportOptions(part_size=part_size, filters=filters)
    work = ImportCorpusWork(store, detect_source(source), options, append=append)
    run_work(store, work, runner or InlineRunner())


KILLED = """
import os, sys
from riptide.indexing.corpus.importing import ImportCorpusWork, ImportOptions, ParseStage
from riptide.indexing.formats.sources import detect_source
from riptide.indexing.store.store import Store
from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.work import run_work

class Killed(LocalRunner):
    def run(self, task, items, **options):
        def until_killed():
            for number, item in enumerate(items):
                if number == int(sys.argv[3]):
                    os._exit(9)
                yield item
        return super().run(task, until_killed(), **options)

store = Store(sys.argv[1])
work = ImportCorpusWork(store, detect_source(sys.argv[2]), ImportOptions(part_size=10), append=False)
run_work(store, work, Killed(cores=1))
"""


def kill_import(store: Path, source: str, after: int) -> None:
    """Runs an import in a process that ends, as if killed, after a given number of parts."""
    command = [sys.executable, "-c", KILLED, str(store), source, str(after)]
    assert subprocess.run(command, check=False).returncode == 9


def test_a_killed_import_keeps_its_parts_for_the_same_command_only(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "raw", [{}] * 50)
    kill_import(tmp_path / "s", source, 3)
    store = Store(str(tmp_path / "s"))
    assert store.failed_drafts() == {}
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "s/corpus/g0000").glob("part-*")}
    assert len(times) == 6  # three parts and their records
    with pytest.raises(InputError, match=r"another command is making it, otherwise: parameter part_size 10, now 20; "):
        import_all(store, source, part_size=20)
    import_all(store, source)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    plain = Store(str(tmp_path / "plain"))
    import_all(plain, source)
    assert store.open("corpus", "g0000").fingerprint == plain.open("corpus", "g0000").fingerprint


def test_an_import_that_was_killed_before_its_first_part_is_replaced_after_some_minutes(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "raw", [{}] * 50)
    kill_import(tmp_path / "s", source, 0)
    store = Store(str(tmp_path / "s"))
    with pytest.raises(InputError, match=r"parameter part_size 10, now 20"):
        import_all(store, source, part_size=20)
    document = tmp_path / "s/corpus/g0000/manifest.begun.json"
    os.utime(document, (document.stat().st_mtime - 601,) * 2)
    import_all(store, source, part_size=20)
    assert len(Corpus.open(store).parts) == 3


@pytest.mark.parametrize("error", [RuntimeError("a bug"), StorageError("s3://b/k: connection refused")])
def test_an_error_that_is_not_of_the_input_keeps_the_parts(tmp_path: Path, error: Exception) -> None:
    source = write_corpus(tmp_path / "raw", [{}] * 50)
    store = Store(str(tmp_path / "s"))
    with pytest.raises(type(error)):
        import_all(store, source, runner=InlineRunner(fail_after=3, error=error))
    assert store.failed_drafts() == {}
    assert len(list((tmp_path / "s/corpus/g0000").glob("part-*.arrow"))) == 3
    import_all(store, source)
    assert Corpus.open(store).num_rows == 50


class Losing(InlineRunner):
    """Removes a part after each task."""

    def __init__(self, part: Path):
        super().__init__()
        self.part = part

    def run(self, task: WorkerTask, items: Iterable[Any], **options: Any) -> Iterator[tuple[Any, Any]]:
        yield from super().run(task, items, **options)
        self.part.unlink(missing_ok=True)


def test_a_part_that_is_removed_during_an_import_is_noticed(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "raw", [{}] * 50)
    store = Store(str(tmp_path / "s"))
    with pytest.raises(InputError, match="removed while it was being made; run the command again"):
        import_all(store, source, runner=Losing(tmp_path / "s/corpus/g0000/part-00001.json"))
    assert store.keys() == []
    import_all(store, source)
    assert Corpus.open(store).num_rows == 50


YEARS = [{"lang": "en"}] * 20 + [{"year": 2000, "topic": "x"}] * 5 + [{}] * 20


def test_a_filter_without_any_value_is_refused_with_the_fields_that_exist(tmp_path: Path) -> None:
    store, source = Store(str(tmp_path / "s")), write_corpus(tmp_path / "raw", YEARS)
    expected = (
        r"filter yaer: found no passage with a value in the metadata field 'yaer', expected one of the fields "
        r"lang, topic, year; correct the name"
    )
    with pytest.raises(InputError, match=expected):
        import_all(store, source, year="int64", yaer="int64")
    assert store.keys() == []
    import_all(store, source, year="int64")
    columns = [Corpus.open(store).table(part)["filter.year"].to_pylist() for part in Corpus.open(store).parts]
    assert [value for column in columns for value in column if value is not None] == [2000] * 5


def test_a_resumed_import_refuses_the_same_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of the first run tell it, without being read again."""
    store, source = Store(str(tmp_path / "s")), write_corpus(tmp_path / "raw", YEARS)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(importing, "refuse_filters_without_values", killed)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                import_all(store, source, yaer="int64")
    with monkeypatch.context() as patch:
        patch.setattr(importing, "import_part", None)  # nothing is parsed again
        with pytest.raises(InputError, match="expected one of the fields lang, topic, year;"):
            import_all(store, source, yaer="int64")


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ([{}], r"\(no passage has metadata\)"),
        ([{"year": None}], "year"),
        ([{f"field{number:03d}": 1 for number in range(500)}], "field000, .*, field019;"),
        ([{f"field{number:03d}": 1} for number in range(500)], "field000, .*, field019, ...;"),
    ],
)
def test_the_fields_that_exist_are_named_up_to_a_bound(tmp_path: Path, fields: list[dict], shown: str) -> None:
    source = write_corpus(tmp_path / "raw", fields)
    with pytest.raises(InputError, match=f"expected one of the fields {shown}") as error:
        import_all(Store(str(tmp_path / "s")), source, year="int64")
    assert len(str(error.value)) < 500


def test_added_passages_may_all_lack_a_filter_field(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "s"))
    import_all(store, write_corpus(tmp_path / "raw", YEARS), year="int64")
    import_all(store, write_corpus(tmp_path / "more", [{}] * 3, "new"), append=True)
    assert Corpus.open(store).table(Corpus.open(store).parts[-1])["filter.year"].to_pylist() == [None] * 3


def test_the_first_rows_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "s"))
    source = write_corpus(tmp_path / "raw", [{"year": 1}, {"year": "MM"}])
    for filters, expected in (
        ({"year": "int64"}, r"corpus\.jsonl:2: found year 'MM'"),
        ({"year": "int"}, "type 'int'"),
    ):
        with pytest.raises(InputError, match=expected):
            import_all(store, source, **filters)
    (tmp_path / "raw/corpus.jsonl").write_text("\n")
    with pytest.raises(InputError, match="found no rows"):
        import_all(store, source)
    assert not (tmp_path / "s").exists()


def test_a_unit_weighs_its_raw_text(tmp_path: Path) -> None:
    """A runner draws a bounded number of bytes ahead; the rows of Parquet are read by the workers and weigh nothing."""
    source = write_corpus(tmp_path / "raw", [{"text": "word " * (50 if n % 10 else 800)} for n in range(60)])
    units = list(ParseStage(detect_source(source), ImportOptions(part_size=4)).units([{}]))
    lines = (tmp_path / "raw/corpus.jsonl").read_bytes().splitlines()
    expected = [len(b"\n".join(lines[first : first + 4])) for first in range(0, 60, 4)]
    assert [unit.size_bytes for unit in units] == expected
    assert [unit.rows for unit in units] == [4] * 15
    pq.write_table(pa.table({"id": [*"abc"], "text": ["x" * 100] * 3}), tmp_path / "x.parquet")
    [unit] = ParseStage(detect_source(str(tmp_path / "x.parquet")), ImportOptions()).units([{}])
    assert (unit.rows, unit.size_bytes) == (3, 0)


def test_a_long_id_is_shortened_in_an_error(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/corpus.jsonl").write_text((json.dumps({"_id": "x" * 1_000_000, "text": ""}) + "\n") * 2)
    with pytest.raises(InputError, match=r"corpus\.jsonl:2: id 'xxx.*…x+' comes a second time") as error:
        import_all(Store(str(tmp_path / "s")), str(tmp_path / "raw"))
    assert len(str(error.value)) < 500
