"""Raw files that would use all memory, and values and judgements that are invalid."""

from __future__ import annotations

import datetime
import decimal
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_files import jsonl, passages, write
from small_stores import build_corpus

from riptide.base.errors import InputError
from riptide.indexing.files import limits, raw
from riptide.indexing.files.raw import Lines
from riptide.indexing.files.start import refuse_json_array
from riptide.indexing.formats.dpr import DPR
from riptide.indexing.formats.parse import read_queries
from riptide.indexing.formats.sources import ImportSource, detect_query_source
from riptide.indexing.queries.queries import QueryImportOptions, import_queries
from riptide.indexing.store.store import Store

HEADER = "query-id\tcorpus-id\tscore\n"


def all_lines(file: Path, at_once: int = 3) -> list[tuple[int, bytes]]:
    """Returns (line number, line) of all lines of a file."""
    lines, found = Lines(str(file)), []
    while piece := lines.take(at_once):
        assert piece.data is not None
        found += list(enumerate(piece.data.split(b"\n"), piece.first_line))
    return found


@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
def test_line_ends_at_the_end_of_a_file_are_not_held(
    tmp_path: Path, ends: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 MiB of line ends, 48 KiB in gzip, are read in a few MiB of memory."""
    monkeypatch.setattr(limits, "MAX_GAP_BYTES", 4 << 20)
    file = write(tmp_path / "x.jsonl.gz", b"first\nsecond" + ends * (48 * 1024**2 // len(ends)))
    tracemalloc.start()
    found = all_lines(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [(1, b"first"), (2, b"second")]
    assert peak < 16 << 20


@pytest.mark.parametrize("block", [1, 3, 7, 64])
def test_line_ends_within_a_file_are_kept_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(raw, "BLOCK", block)
    monkeypatch.setattr(limits, "MAX_GAP_BYTES", 101)
    draw = random.Random(block)
    for length in (0, 1, 50, 100):
        gap = bytes(draw.choices(b"\r\n", k=length))
        data = b"a\nbc" + gap + b"d\n" + gap + b"e" + gap * 9
        file = write(tmp_path / "x.jsonl", data)
        expected = data.rstrip(b"\r\n").split(b"\n")
        for at_once in (1, 3, 1000):
            assert all_lines(file, at_once) == list(enumerate(expected, 1))
    file = write(tmp_path / "x.jsonl", b"a\nb" + b"\n" * (102 + 2 * block) + b"c" + b"\n" * 500)
    for at_once in (1, 3, 1000):
        with pytest.raises(InputError, match=r"x\.jsonl:2: found more than 0 MiB of line ends after this line"):
            all_lines(file, at_once)
    with pytest.raises(InputError, match=r"x\.jsonl:1: found more than 0 MiB of line ends after this line"):
        refuse_json_array(str(write(tmp_path / "x.jsonl", b"\n" * (102 + 2 * block) + b"[")))


@pytest.mark.parametrize("at_once", [1, 2, 5, 100])
def test_a_line_without_an_end_is_refused_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(raw, "BLOCK", 16)
    monkeypatch.setattr(limits, "MAX_ROW_BYTES", 200)
    good = [b"x" * length for length in (0, 1, 15, 16, 17, 200, 183, 3)]
    file = write(tmp_path / "x.jsonl.gz", b"\n".join(good))
    assert [line for _, line in all_lines(file, at_once)] == good
    for before in (0, 3, 8):
        file = write(tmp_path / "x.jsonl.gz", b"\n".join([*good[:before], b"y" * 232, *good]))
        with pytest.raises(InputError, match=rf"x\.jsonl\.gz:{before + 1}: found a row of more than 0 MiB, expected"):
            all_lines(file, at_once)


def test_a_list_of_answers_that_is_too_long_to_be_parsed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_ANSWERS", 100)
    file = write(tmp_path / "x.csv", f"who\t['Ann']\nwho\t{['a'] * 50}\n")
    with pytest.raises(InputError, match=r"x\.csv:2: found answers"):
        (read_queries(ImportSource(DPR, "x", (), (str(file),), {})))


def timestamps(*values: int, unit: str = "us", zone: str | None = None) -> pa.Array:
    return pa.array(values, pa.timestamp(unit, zone))


def one_passage(path: Path, column: pa.Array) -> dict[str, Any]:
    """The metadata of a passage that is imported from Parquet with a column `m`."""
    pq.write_table(pa.table({"id": ["a"], "text": ["x"], "m": column}), path)
    [metadata] = passages("parquet", path)["metadata"].to_pylist()
    return json.loads(metadata)


STORED: dict[str, tuple[pa.Array, Any]] = {
    "timestamp": (timestamps(1_600_000_000_123_456), "2020-09-13T12:26:40.123456"),
    "timestamp with a zone": (timestamps(1_600_000_000_000_000, zone="+05:30"), "2020-09-13T17:56:40+05:30"),
    "timestamp in nanoseconds": (timestamps(1_600_000_000_123_456_789, unit="ns"), "2020-09-13 12:26:40.123456789"),
    "date": (pa.array([datetime.date(2020, 2, 3)]), "2020-02-03"),
    "time": (pa.array([datetime.time(4, 5, 6)]), "04:05:06"),
    "duration": (pa.array([datetime.timedelta(days=1, seconds=2)]), "1 day, 0:00:02"),
    "decimal": (pa.array([decimal.Decimal("1.50")]), "1.50"),
    "list": (pa.array([[1, None, 2]]), [1, None, 2]),
    "struct": (pa.array([{"a": 1, "b": {"c": "x"}}]), {"a": 1, "b": {"c": "x"}}),
    "map": (pa.array([[("a", 1), ("b", 2)]], pa.map_(pa.string(), pa.int32())), [["a", 1], ["b", 2]]),
    "list with NaN": (pa.array([[1.0, float("nan")]]), [1.0, None]),
    "uint64": (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
    "dictionary": (pa.array(["a"]).dictionary_encode(), "a"),
}


@pytest.mark.parametrize("kind", STORED)
def test_parquet_metadata_is_json(tmp_path: Path, kind: str) -> None:
    """As indexing/formats/parse.py documents it."""
    column, expected = STORED[kind]
    assert one_passage(tmp_path / "x.parquet", column) == {"m": expected}


REFUSED = {
    "timestamp in the year 11476": timestamps(300_000_000_000_000_000),
    "timestamp before the year 1": timestamps(-(2**60), unit="ms"),
    "timestamp in a list": pa.array([[300_000_000_000_000_000]], pa.list_(pa.timestamp("us"))),
    "timestamp in a struct": pa.array([{"a": 2**60}], pa.struct([("a", pa.timestamp("us"))])),
    "timestamp with an unknown zone": timestamps(0, zone="Nowhere/Land"),
    "date in the year 2941715": pa.array([2**30], pa.int32()).cast(pa.date32()),
    "duration of 146 billion years": pa.array([2**62], pa.duration("s")),
    "bytes": pa.array([b"abc"]),
    "bytes of fixed size": pa.array([b"abcd"], pa.binary(4)),
    "bytes in a list": pa.array([[b"x"]]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_parquet_metadata_that_json_cannot_hold_is_refused(
    tmp_path: Path, kind: str, documented: Callable[..., None]
) -> None:
    column = pa.concat_arrays([pa.nulls(2, REFUSED[kind].type), REFUSED[kind]])
    pq.write_table(pa.table({"id": ["a", "b", "c"], "text": ["x"] * 3, "m": column}), tmp_path / "x.parquet")
    with pytest.raises(InputError, match=r"x\.parquet row 3: found ") as error:
        passages("parquet", tmp_path / "x.parquet")
    documented("Importing", f"Parquet metadata: {kind}", str(error.value), 1)


def test_parquet_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["x"]), pa.array([1]), pa.array([2])], names=["id", "text", "m", "m"])
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(InputError, match=r"x\.parquet: found the column 'm' twice, expected distinct names"):
        passages("parquet", tmp_path / "x.parquet")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A corpus of the passages a, b and c."""
    build_corpus(tmp_path / "s", [[["a", "b", "c"]]], {})
    return Store(str(tmp_path / "s"))


def query_folder(folder: Path, **qrels: str) -> Path:
    """A BEIR folder of the queries q0 to q3, with files of judgements by split."""
    jsonl(folder / "queries.jsonl", [{"_id": f"q{number}", "text": f"query {number}"} for number in range(4)])
    for split, rows in qrels.items():
        write(folder / f"qrels/{split}.tsv", HEADER + rows)
    return folder


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("q0\ta\t1\nq0\tb\t1\nq0\ta\t0\n", "test.tsv:4: judges query 'q0' and passage 'a' with score 0, line 2 with 1"),
        ("q3\tc\t2\n" + "q1\tb\t1\n" * 3 + "q3\tc\t2\nq3\tc\t1\nq0\ta\t1\nq0\ta\t2\n", "test.tsv:7: .*'q3'.*line 2 "),
    ],
)
def test_a_judgement_that_contradicts_another_is_refused(
    tmp_path: Path, store: Store, rows: str, expected: str
) -> None:
    """The error names the first such line of the file."""
    with pytest.raises(InputError, match=expected.replace("line 2 with 1", "line 2 with score 1, expected one score")):
        import_queries(store, detect_query_source(str(query_folder(tmp_path / "q", test=rows))), "q")
    assert store.incomplete_keys() == store.keys("queries") == []


def test_contradictions_are_found_as_by_a_loop(tmp_path: Path, store: Store) -> None:
    draw = random.Random(0)
    for number in range(30):
        judged = [(f"q{draw.randrange(4)}", draw.choice("abc"), draw.randrange(2)) for _ in range(draw.randrange(1, 7))]
        first: dict[tuple[str, str], int] = {}
        wrong = []
        for line, (query, passage, score) in enumerate(judged, 2):
            if first.setdefault((query, passage), score) != score:
                wrong.append(line)
        rows = "".join(f"{query}\t{passage}\t{score}\n" for query, passage, score in judged)
        source = detect_query_source(str(query_folder(tmp_path / str(number), test=rows)))
        if wrong:
            with pytest.raises(InputError, match=rf"test\.tsv:{wrong[0]}: judges query"):
                import_queries(store, source, f"set{number}")
        queries = import_queries(store, source, f"set{number}", QueryImportOptions(skip_invalid=bool(wrong)))
        qrels = queries.qrels("test").to_pylist()
        assert [tuple(row.values()) for row in qrels] == [(*pair, score) for pair, score in first.items()]
        skipped = [int(row.split(":")[1]) for row in queries.artifact.notes.get("skipped_rows", [])]
        assert skipped == wrong


def test_the_same_judgement_of_two_splits_may_differ(tmp_path: Path, store: Store) -> None:
    source = detect_query_source(str(query_folder(tmp_path / "q", test="q0\ta\t1\n", dev="q0\ta\t2\n")))
    assert import_queries(store, source, "q").splits == ["dev", "test"]


def test_two_files_of_judgements_for_one_split_are_refused(tmp_path: Path) -> None:
    """One of them would be left out."""
    folder = query_folder(tmp_path / "q", test="q0\ta\t1\n")
    write(folder / "qrels/test.tsv.gz", HEADER + "q0\ta\t2\n")
    with pytest.raises(InputError, match=r"test\.tsv\.gz: found a second file of judgements for the split 'test'"):
        detect_query_source(str(folder))


@pytest.mark.parametrize("split", ["t" * 200, "a b", "é"])
def test_a_split_that_no_file_of_a_store_can_be_called_is_refused(tmp_path: Path, store: Store, split: str) -> None:
    source = detect_query_source(str(query_folder(tmp_path / "q", **{split: "q0\ta\t1\n"})))
    with pytest.raises(InputError, match=r"\.tsv: its split has no valid name: name .*; rename the file"):
        import_queries(store, source, "q")
    assert store.incomplete_keys() == []
