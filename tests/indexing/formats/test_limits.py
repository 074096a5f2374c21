"""The limits of raw files: small files that would take all memory, and cost that is linear in the input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile_files import MIB, Hostile, large_footer, wide_rows, write_parquet, write_texts
from raw_files import jsonl, write
from small_stores import build_corpus

from riptide.base.errors import InputError
from riptide.indexing.files import limits
from riptide.indexing.files.columns import PassageNames
from riptide.indexing.formats.chunking import cut_into_chunks
from riptide.indexing.formats.parquet import PARQUET
from riptide.indexing.formats.parse import parse_corpus
from riptide.indexing.formats.sources import detect_source

MAX_MIB = 200  # that a hostile file may add to the memory of the process

MEASURE = """
import json, re, sys
from pathlib import Path
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.importing import rows_to_delete
from riptide.indexing.files.qrels import read_qrels
from riptide.indexing.formats.parse import parse_corpus, read_queries
from riptide.indexing.search.run_files import read_run_file
from riptide.indexing.formats.chunking import cut_into_chunks
from riptide.indexing.formats.sources import detect_query_source, detect_source
from riptide.indexing.store.store import Store
from riptide.base.errors import InputError

def read(path, reader, store):
    if reader == "corpus":
        source = detect_source(path)
        for chunk in cut_into_chunks(source, 10_000):
            parse_corpus(source.format, chunk)
    elif reader == "queries":
        (read_queries(detect_query_source(path)))
    elif reader == "delete":
        rows_to_delete(Corpus.open(Store(store)), path)
    else:
        {"qrels": read_qrels, "run": read_run_file}[reader](path)

def memory(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10

for path, reader in json.loads(sys.argv[1]):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    message = ""
    try:
        read(path, reader, sys.argv[2])
    except InputError as error:
        message = str(error)
    print(json.dumps([message, memory("VmHWM") - before]), flush=True)
"""


def check(files: list[Hostile], store: Path, documented: Callable[..., None]) -> None:
    """Reads files in another process: each is refused, in bounded memory, and stands in tests/bad_input.md."""
    named = json.dumps([(str(file.path), file.reader) for file in files])
    command = [sys.executable, "-c", MEASURE, named, str(store)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    for file, printed in zip(files, outcome.stdout.splitlines(), strict=True):
        message, mib = json.loads(printed)
        assert file.expected in message, (file.case, message)
        assert message.startswith(str(file.path))
        assert "\n" not in message
        assert mib <= MAX_MIB, (file.case, mib)
        documented("Importing", file.case, message, 1)


def test_small_texts_that_expand_are_refused_in_bounded_memory(tmp_path: Path, documented: Callable[..., None]) -> None:
    build_corpus(tmp_path / "s", [[["p0"]]], {})
    wide = Hostile("CSV with long column names", wide_rows(tmp_path / "wide.csv.gz"), "corpus", "bytes of text and")
    check([*write_texts(tmp_path), wide], tmp_path / "s", documented)


def test_small_parquet_files_that_expand_are_refused_in_bounded_memory(
    tmp_path: Path, documented: Callable[..., None]
) -> None:
    expected = "found a Parquet footer of more than 262,144 columns, row groups and columns of row groups"
    footer = Hostile(
        "Parquet with a million columns in its footer", large_footer(tmp_path / "f.parquet"), "corpus", expected
    )
    check([footer, *write_parquet(tmp_path)], tmp_path, documented)


def csv_columns(folder: Path, size: int) -> Path:
    names = ",".join(["id", "text", *(f"c{number}" for number in range(size))])
    return write(folder / f"{size}.csv", f"{names}\n{','.join(['v'] * (size + 2))}\n")


def json_columns(folder: Path, size: int) -> Path:
    document = {"docid": "a", "text": "x", **{f"c{number}": 1 for number in range(size)}}
    return jsonl(folder / f"{size}.jsonl", [document])


def parquet_columns(folder: Path, size: int) -> Path:
    path = folder / f"{size}.parquet"
    pq.write_table(pa.table({"docid": ["a"], "body": ["x"], **{f"c{number}": [1] for number in range(size)}}), path)
    return path


def test_rows_up_to_the_limits_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_COLUMNS", 40)
    monkeypatch.setattr(limits, "MAX_VALUES", 200)
    file = csv_columns(tmp_path, 38)
    assert parsed(file).num_rows == 1
    assert parsed(json_columns(tmp_path, 38)).num_rows == 1
    assert parsed(parquet_columns(tmp_path, 38)).num_rows == 1
    for make in (csv_columns, json_columns, parquet_columns):
        with pytest.raises(InputError, match=r"found (4\d|too many) columns, expected at most 40; leave out"):
            parsed(make(tmp_path, 40))
    text = '[,{"\\":' * 100  # is no value
    assert parsed(jsonl(tmp_path / "x.jsonl", [{"docid": "a", "text": text}]))["text"].to_pylist() == [text]
    for count, is_read in ((64, True), (65, False)):  # 3 marks for each, without a comma for the last, and 7 others
        file = jsonl(tmp_path / "x.jsonl", [{"docid": "a", "text": "x", "m": [{"k": text}] * count}])
        if is_read:
            assert orjson.loads(parsed(file)["metadata"][0].as_py())["m"][-1] == {"k": text}
        else:
            with pytest.raises(InputError, match=r"x\.jsonl:1: found JSON with \d+ commas, colons and brackets"):
                parsed(file)


def parsed(file: Path) -> pa.Table:
    names = PassageNames(text="body") if file.suffix == ".parquet" else None
    source = detect_source(str(file), names=names)
    return pa.concat_tables([parse_corpus(source.format, chunk) for chunk in cut_into_chunks(source, 1000)])


@pytest.mark.parametrize("block", [1, 7, 100, 1 << 20])
def test_marks_outside_quotes_are_counted_as_by_a_loop(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(limits, "_STEP", block)
    draw = np.random.default_rng(block)
    for escapes in (False, True):
        for _ in range(100):
            data = draw.choice(np.frombuffer(b'",,[\\\\\\x', np.uint8), 200).tobytes()
            count, is_inside, is_escaped = 0, False, False
            for code in data:
                if is_escaped:
                    is_escaped = False
                elif escapes and code == ord("\\"):
                    is_escaped = True
                elif code == ord('"'):
                    is_inside = not is_inside
                elif code in b",[":
                    count += not is_inside
            if not escapes or b"\\" not in data:
                assert limits.count_outside_quotes(data, b",[", escapes=escapes) == count


def test_blocks_are_as_the_whole_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are the same whatever number of rows is turned into Python objects at once."""
    rows = [{"id": f"p{n}", "text": f'{n}\n"x"' * (n % 9), "tags": ["a", None] * (n % 4)} for n in range(300)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=70)
    lines = "".join(f'{row["id"]},"{row["text"].replace(chr(34), chr(34) * 2)}"\n' for row in rows)
    files = [tmp_path / "a.parquet", jsonl(tmp_path / "a.jsonl", rows), write(tmp_path / "a.csv", "id,text\n" + lines)]
    for file in files:
        source = detect_source(str(file))
        found = []
        for block_bytes in (1, 500, 4 << 20):
            monkeypatch.setattr(limits, "BLOCK_BYTES", block_bytes)
            found.append([parse_corpus(source.format, chunk) for chunk in cut_into_chunks(source, 150)])
            assert found[-1][0].num_rows == 150
            assert all(one.equals(other) for one, other in zip(found[0], found[-1], strict=True))


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_the_longest_list_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Compared with the lengths of random lists, of which some span pages."""
    monkeypatch.setattr("riptide.indexing.files.parquet_pages.SMALL_LISTS", 0)
    draw = np.random.default_rng(1)
    for number in range(20):
        lengths = draw.integers(0, draw.integers(2, 60), 200)
        nested = [[[1] * int(draw.integers(0, 4)) for _ in range(length)] for length in lengths]
        columns = {
            "id": [str(n) for n in range(200)],
            "text": ["x"] * 200,
            "m": nested if number % 2 else [list(range(length)) for length in lengths],
        }
        longest = max(sum(max(len(inner), 1) for inner in row) for row in nested) if number % 2 else int(max(lengths))
        path = tmp_path / f"{number}.parquet"
        options = {"data_page_version": version, "data_page_size": 100, "write_batch_size": 7}
        pq.write_table(pa.table(columns), path, row_group_size=90, **options)
        monkeypatch.setattr(limits, "MAX_VALUES", longest)
        source = detect_source(str(path))
        assert len(parse_corpus(PARQUET, next(cut_into_chunks(source, 200)))) == 200
        monkeypatch.setattr(limits, "MAX_VALUES", longest - 1)
        path = path.rename(tmp_path / f"{number}-again.parquet")
        with pytest.raises(InputError, match=rf"found a list of {longest} values, expected at most {longest - 1}"):
            parse_corpus(PARQUET, next(cut_into_chunks(detect_source(str(path)), 200)))


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_parquet_file_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    """Whatever byte is changed, nothing but an InputError of one line is raised."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": ["a", "b"], "text": ["x" * 3000, "y"], "m": [[1, 2], [3]]}), path)
    whole, draw = path.read_bytes(), np.random.default_rng(seed)
    for number in range(60):
        data = bytearray(whole)
        data[int(draw.integers(4, len(whole)))] ^= int(draw.integers(1, 256))
        outcome = outcome_of(write(tmp_path / f"{number}.parquet", bytes(data)))
        assert "\n" not in outcome


@pytest.mark.parametrize("rows_per_group", [4, 12])
def test_a_damaged_footer_loses_no_rows(tmp_path: Path, rows_per_group: int) -> None:
    """Each number of rows and each size of a column is changed in turn; Arrow ends at the shortest column."""
    path = tmp_path / "a.parquet"
    rows = [{"id": f"p{number}", "text": "xy"[number % 2], "m": ["a"] * (number % 3)} for number in range(12)]
    pq.write_table(pa.Table.from_pylist(rows), path, rows_per_group, compression="none", write_statistics=False)
    whole, group = path.read_bytes(), pq.read_metadata(path).row_group(0)
    sizes = [group.column(number).total_compressed_size for number in range(group.num_columns)]
    numbers = {2 * number for number in (rows_per_group, *sizes) if number < 64}  # as Thrift writes them
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    places = [place for place in range(footer, len(whole) - 8) if whole[place] in numbers]
    outcomes = []
    for place in places:
        for value in (whole[place] - 2, whole[place] + 1, 0):
            data = bytearray(whole)
            data[place] = value
            outcomes.append(outcome_of(write(tmp_path / "b.parquet", bytes(data))))
    assert {outcome for outcome in outcomes if outcome.isdigit()} <= {"12"}
    assert sum("fetch the file again" in outcome for outcome in outcomes) > 10
    assert not [outcome for outcome in outcomes if "\n" in outcome]
    shorter = {outcome.partition("shortest column, ")[2] for outcome in outcomes if "shortest column" in outcome}
    assert all(outcome.startswith("12 by its footer") for outcome in shorter), shorter


def outcome_of(path: Path) -> str:
    try:
        source = detect_source(str(path), "parquet")
        return str(sum(len(parse_corpus(source.format, chunk)) for chunk in cut_into_chunks(source, 10)))
    except InputError as error:
        return str(error)


def test_texts_of_legitimate_size_are_read(tmp_path: Path) -> None:
    """A whole book in every format."""
    text = "A long book about the sea. " * (12 * MIB // 27)
    rows = [{"id": "a", "text": text}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    files = [
        tmp_path / "a.parquet",
        jsonl(tmp_path / "a.jsonl", rows),
        write(tmp_path / "a.csv", f"id,text\na,{text}\n"),
    ]
    for file in files:
        source = detect_source(str(file))
        assert parse_corpus(source.format, next(cut_into_chunks(source, 10)))["text"].to_pylist() == [text]
