"""Tables with any columns: the same rows from every format, CSV cut anywhere, and refusals with file and line."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_files import jsonl, odd_text, write

from riptide.base.errors import InputError
from riptide.indexing.files import limits, raw
from riptide.indexing.files.columns import PassageNames, TableColumns
from riptide.indexing.files.delimited import DelimitedRows, line_of_row, read_fields
from riptide.indexing.formats.chunking import cut_into_chunks
from riptide.indexing.formats.csv_tsv import CSV
from riptide.indexing.formats.parse import parse_corpus
from riptide.indexing.formats.sources import describe_columns, detect_source
from riptide.indexing.formats.tables import id_from_content

NAMES = PassageNames(id="key", title="heading", text="story", metadata=("url", "lang"))


def delimited_text(
    rows: list[dict], delimiter: str = ",", line_end: str = "\r\n", quoting: int = csv.QUOTE_MINIMAL
) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter, lineterminator=line_end, quoting=quoting)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def imported(path: Path, names: PassageNames | None = None, rows_per_chunk: int = 7) -> pa.Table:
    source = detect_source(str(path), names=names)
    return pa.concat_tables([parse_corpus(source.format, chunk) for chunk in cut_into_chunks(source, rows_per_chunk)])


def refusal(path: Path, names: PassageNames | None = None) -> str:
    with pytest.raises(InputError) as error:
        imported(path, names)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def stories() -> list[dict]:
    """Rows of odd text with newlines, quotes and delimiters; every third title and link is empty."""
    generator = random.Random(1)
    return [
        {
            "key": f"k{number}",
            "heading": odd_text(generator, (",", ";", "\t")) + "h" if number % 3 else "",
            "unused": "left out",
            "story": f"{number} " + odd_text(generator, ("\n", "\r\n", ",", "\t", ";", "|")),
            "url": f"http://x/{number}" if number % 3 else "",
            "lang": "é",
        }
        for number in range(40)
    ]


def write_all(folder: Path, rows: list[dict]) -> list[Path]:
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet", row_group_size=11)
    return [
        write(folder / "a.csv", "\ufeff" + delimited_text(rows)),
        write(folder / "quoted.csv.gz", delimited_text(rows, line_end="\n", quoting=csv.QUOTE_ALL)),
        write(folder / "semicolon.csv", delimited_text(rows, ";")),
        write(folder / "a.tsv", delimited_text(rows, "\t")),
        jsonl(folder / "a.jsonl", rows),
        jsonl(folder / "a.ndjson.gz", rows, ensure_ascii=True),
        folder / "a.parquet",
    ]


def test_the_same_rows_of_every_format_are_the_same_passages(tmp_path: Path, stories: list[dict]) -> None:
    files = write_all(tmp_path, stories)
    for file in files:
        table = imported(file, NAMES)
        expected = [
            (r["key"], r["heading"], r["story"], {n: r[n] for n in ("url", "lang") if r[n] or ".csv" not in file.name})
            for r in stories
        ]
        actual = [(*list(row.values())[:3], json.loads(row["metadata"])) for row in table.to_pylist()]
        if not {".csv", ".tsv"} & set(file.suffixes):  # an empty field of CSV is no metadata, an empty string is
            actual = [(*row[:3], {n: v for n, v in row[3].items() if v}) for row in actual]
        expected = [(*row[:3], {n: v for n, v in row[3].items() if v}) for row in expected]
        assert actual == expected, file


def test_hashed_ids_are_the_same_in_every_format(tmp_path: Path, stories: list[dict]) -> None:
    """Compared with SHA-256 by hashlib; every format recognises the well-known names in the same way."""
    rows = [{"Title": r["heading"], "text": r["story"], "url": "x"} for r in stories]
    expected = [
        hashlib.sha256((f"{r['Title']}\0" if r["Title"] else "").encode() + r["text"].encode()).hexdigest()[:32]
        for r in rows
    ]
    for file in write_all(tmp_path, rows):
        table = imported(file)
        assert table["id"].to_pylist() == expected, file
        assert table["title"].to_pylist() == [r["Title"] for r in rows]
        assert set(table["metadata"].to_pylist()) == {'{"url":"x"}'}
        [line] = describe_columns(detect_source(str(file)))
        assert line == f"columns of {file}: id = a hash of title and text, title = Title, text = text, metadata = url"
    assert id_from_content("x") != id_from_content("x", "x") != id_from_content("xx")


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64, 1 << 20])
def test_csv_is_cut_at_row_ends_wherever_blocks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Pieces of every size give the rows of Python's csv module, with their lines."""
    monkeypatch.setattr(raw, "BLOCK", block)
    generator = random.Random(5)
    cells = ["", "a", '"', '""', "\n", "\r\n", ",", 'x"y', "é\u2028", "\n\n", '",\n"']
    rows = [["".join(generator.choices(cells, k=generator.randrange(4))) for _ in range(3)] for _ in range(60)]
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_MINIMAL).writerows([["a", "b", "c"], *rows])
    file = str(write(tmp_path / "a.csv", text.getvalue()))
    reader, lines = csv.reader(io.StringIO(text.getvalue(), newline="\n")), [1]
    for _ in reader:
        lines.append(reader.line_num + 1)
    table = TableColumns(("a", "b", "c"), ",")
    for size in (1, 2, 7, 100):
        pieces, found, starts = DelimitedRows(file, ","), [], []
        pieces.take(1)
        while piece := pieces.take(size):
            assert piece.rows == size or len(found) + piece.rows == len(rows)
            numbers, columns = read_fields(piece, table, [2, 0, 1])
            starts += numbers
            found += [[b, c, a] for a, b, c in zip(*columns, strict=True)]
        assert found == rows
        assert starts == lines[1:-1]
    for offset in (0, 1, 30, 59):
        assert line_of_row(file, ",", 2, offset) == str(lines[1 + offset])
        assert line_of_row(file, ",", lines[11], offset % 40) == str(lines[11 + offset % 40])


def test_carriage_returns_in_quotes_and_before_newlines_are_no_row_ends(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", b'id,text\r\n1,"a\rb"\r\n2,c\r\n3,d\r')
    assert imported(file)["text"].to_pylist() == ["a\rb", "c", "d"]


def test_a_chunk_of_csv_ends_at_a_number_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("riptide.indexing.formats.chunking.CHUNK_BYTES", 1000)
    rows = [{"id": str(n), "text": "x\n" * (200 if n < 4 else 5)} for n in range(20)]
    file = write(tmp_path / "a.csv", delimited_text(rows))
    for block in (10, 1 << 20):
        monkeypatch.setattr(raw, "BLOCK", block)
        assert [chunk.rows for chunk in cut_into_chunks(detect_source(str(file)), 10)] == [3, 10, 7]
    assert imported(file)["text"].to_pylist() == [row["text"] for row in rows]


def test_csv_streams_and_an_unclosed_quote_is_not_read_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk needs one block; a stray quote, the block that holds it; an unclosed one, MAX_ROW_BYTES."""
    reads: list[int] = []
    original = raw._read_block
    monkeypatch.setattr(raw, "_read_block", lambda stream, name: reads.append(1) or original(stream, name))
    monkeypatch.setattr(raw, "BLOCK", 1 << 12)
    monkeypatch.setattr(limits, "MAX_ROW_BYTES", 1 << 15)
    lines = ["id,text", *(f"{n},some text" for n in range(50_000))]

    def cut(*bad: str) -> str:
        file = write(tmp_path / "a.csv", "\n".join([*lines[:9], *bad, *lines[9:]]))
        source = detect_source(str(file))
        reads.clear()
        with pytest.raises(InputError) as error:
            list(cut_into_chunks(source, 100))
        assert sum(reads) < 12
        return str(error.value).removeprefix(str(tmp_path))

    file = write(tmp_path / "good.csv", "\n".join(lines))
    source = detect_source(str(file))
    reads.clear()
    assert next(cut_into_chunks(source, 100)).rows == 100
    assert sum(reads) <= 2
    reads.clear()
    monkeypatch.setattr(raw, "BLOCK", 64)  # the header is read before the bad row
    assert cut('x,5" pipe').startswith("/a.csv:10: found a quote within a field that is not quoted")
    monkeypatch.setattr(raw, "BLOCK", 1 << 12)
    assert cut('x,"').startswith("/a.csv:10: found a row of more than 0 MiB")


BAD_CSV = {
    "a quote in a CSV field that is not quoted": (
        '3,5" pipe,x\n',
        r":5: found a quote within a field that is not quoted",
    ),
    "text after a closing quote in CSV": (
        '3,"a\nb"c,x\n',
        r":6: found text after the closing quote .* begins in line 5",
    ),
    "a quote in CSV that is never closed": (
        '3,"a,x\n4,b,y\n',
        r":5: found a quoted field that is not closed before the",
    ),
    "a CSV row with too many fields": (
        "3,a,b,c\n",
        r":5: found 4 fields \('3' first\), expected 3: id, text, url; quote",
    ),
    "a CSV row with too few fields": (
        "3,a\n",
        r":5: found 2 fields .*, expected 3: id, text, url; add what is missing",
    ),
    "an empty line in CSV": ("\n3,a,b\n", r":5: found an empty line, expected empty lines at the end of the file only"),
    "a bare carriage return in CSV": (
        "3,a\rb,c\n",
        r":5: found a row that is not CSV \(a carriage return outside quotes",
    ),
    "a bare carriage return in CSV before a row": (
        "3,a,b\n\r4,c,d\n",
        r":6: found a row that is not CSV \(a carriage return outside quotes",
    ),
    "a bare carriage return in CSV between two rows, and an empty line": (
        "3,a,b\r4,c,d\n\n",
        r":5: found a row that is not CSV \(a carriage return outside quotes",
    ),
    "CSV in another encoding than UTF-8": (b"3,caf\xe9,c\n", r":5: found invalid UTF-8 \(byte 0xe9\), expected UTF-8"),
    "a CSV row without an id": (",a,b\n", r":5: found id '', expected a string that is not empty, or an integer"),
}


@pytest.mark.parametrize("case", BAD_CSV)
def test_bad_csv_is_refused_with_its_line(tmp_path: Path, documented: Callable[..., None], case: str) -> None:
    """The line is that of the file, behind a quoted field of two lines."""
    bad, pattern = BAD_CSV[case]
    bad = bad if isinstance(bad, bytes) else bad.encode()
    file = write(
        tmp_path / "a.csv", b'id,text,url\n1,"two\nlines",x\n2,b,y\n' + bad + b"9,z,z\n" * ("never" not in case)
    )
    line = refusal(file)
    assert re.search(pattern, line), line
    assert line.startswith(str(file))
    documented("Importing", case, line, 1)


BAD_HEADERS = {
    "CSV with two columns of the same name": ("id,text,text\n1,a,b\n", "a.csv:1: found the column 'text' twice"),
    "CSV with a column without a name": (",id,text\n0,1,a\n", "a.csv:1: found no name for column 1 of 3"),
    "CSV without a header": ("1,some text\n2,more\n", "found the columns 1, some text, expected one called text"),
    "CSV with two columns that may be the text": (
        "id,text,body\n1,a,b\n",
        "found the columns text, body, expected one",
    ),
    "CSV with two columns that may be the id": ("id,docid,text\n1,a,b\n", "found the columns id, docid, expected one"),
    "CSV in UTF-16": ("id,text\n1,a\n".encode("utf-16"), "a.csv:1: found invalid UTF-8 (byte 0xff)"),
    "CSV without rows": ("id,text\n", "found no rows"),
    "an empty CSV file": ("", "found no rows"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_bad_header_is_refused(tmp_path: Path, documented: Callable[..., None], case: str) -> None:
    data, expected = BAD_HEADERS[case]
    line = refusal(write(tmp_path / "a.csv", data))
    assert expected in line
    if "parameter" not in line:  # the job's wording of the others: tests/jobs/test_import_tables.py
        documented("Importing", case, line, 1)


BAD_OBJECTS = {
    "JSON lines whose id is a float": ('{"docid": 1.5, "body": "x"}', "a.jsonl:3: found docid 1.5"),
    "JSON lines whose id is null": ('{"docid": null, "body": "x"}', "a.jsonl:3: found no docid"),
    "JSON lines without the text": ('{"docid": "c", "bodi": "x"}', "a.jsonl:3: found no body"),
    "JSON lines whose text is a number": ('{"docid": "c", "body": 5}', "a.jsonl:3: found body 5"),
    "JSON lines whose title is a list": ('{"docid": "c", "body": "x", "title": ["t"]}', "a.jsonl:3: found title ['t']"),
}


@pytest.mark.parametrize("case", BAD_OBJECTS)
def test_bad_json_lines_are_refused_with_their_line(tmp_path: Path, documented: Callable[..., None], case: str) -> None:
    bad, expected = BAD_OBJECTS[case]
    good = '{"docid": %d, "body": "x", "title": null}\n'
    line = refusal(write(tmp_path / "a.jsonl", good % 1 + good % 2 + bad + "\n"))
    assert expected in line
    documented("Importing", case, line, 1)


def test_an_id_that_the_first_lines_lack_is_refused(tmp_path: Path) -> None:
    """It would be lost among the metadata."""
    file = write(tmp_path / "a.jsonl", '{"body": "x"}\n' * 1_200 + '{"id": "a", "body": "y"}\n')
    line = refusal(file)
    assert ":1201: found a field 'id', expected none, as in the first lines; name the id by parameter id" in line
    assert imported(file, PassageNames(id=""), 10_000)["id"].to_pylist()[-1] == id_from_content("y")


def test_columns_are_chosen_by_name(tmp_path: Path) -> None:
    """A given name counts before a well-known one; "" asks for none; numbers in CSV are text, integers in JSON ids."""
    file = write(tmp_path / "a.csv", "id,Title,text,body,n\n1,T,x,y,2\n")

    def row(**names: object) -> list:
        return [*imported(file, PassageNames(text="body", **names)).to_pylist()[0].values()]

    assert row() == ["1", "T", "y", '{"text":"x","n":"2"}']
    assert row(id="n", title="text") == ["2", "x", "y", '{"id":"1","Title":"T"}']
    assert row(id="", title="", metadata=()) == [id_from_content("y"), "", "y", ""]
    assert row(metadata=("n", "id")) == ["1", "T", "y", '{"n":"2","id":"1"}']
    [line] = describe_columns(detect_source(str(file), names=PassageNames(text="body", metadata=("n",))))
    assert line.endswith("a.csv: id = id, title = Title, text = body, metadata = n, left out = text")
    for names, parameter in (
        ({"text": "boddy"}, "text boddy"),
        ({"id": "x"}, "id x"),
        ({"metadata": ("n", "m")}, "metadata m"),
    ):
        with pytest.raises(
            InputError, match=rf"parameter {parameter}: \S+a\.csv has the columns id, Title, text, body"
        ):
            detect_source(str(file), names=PassageNames(**{"text": "body", **names}))
    objects = jsonl(tmp_path / "a.jsonl", [{"pid": 7, "contents": "", "metadata": {"year": 1, "x": None}, "z": None}])
    assert imported(objects).to_pylist() == [{"id": "7", "title": "", "text": "", "metadata": '{"year":1}'}]
    assert imported(objects, PassageNames(metadata=("z", "year")))["metadata"].to_pylist() == ['{"year":1}']


def test_csv_values_take_the_types_of_filters(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "id,text,year,score,open,when\n1,a,2020,0.5,True,2020-01-02\n2,b,,,,\n")
    source = detect_source(str(file))
    [chunk] = cut_into_chunks(source, 10)
    types = {"year": "int64", "score": "float64", "open": "bool", "when": "timestamp"}
    table = parse_corpus(CSV, chunk, types)
    assert [json.loads(text or "{}") for text in table["metadata"].to_pylist()] == [
        {"year": 2020, "score": 0.5, "open": True, "when": "2020-01-02"},
        {},
    ]
    assert table["filter.year"].to_pylist() == [2020, None]
    assert table["filter.open"].to_pylist() == [True, None]
    for name, kind in (("when", "int64"), ("score", "int64"), ("when", "float64"), ("year", "bool")):
        with pytest.raises(InputError, match=rf"a\.csv:2: found {name} '.*' \(str\), expected {kind}"):
            parse_corpus(CSV, chunk, {name: kind})


def test_a_number_of_csv_beyond_float64_is_refused(tmp_path: Path, documented: Callable[..., None]) -> None:
    source = detect_source(str(write(tmp_path / "a.csv", "id,text,x\n1,a,1e308\n2,b,1e400\n")))
    with pytest.raises(InputError, match=r"a\.csv:3: found x '1e400' \(str\), expected float64") as error:
        parse_corpus(CSV, *cut_into_chunks(source, 10), {"x": "float64"})
    documented("Importing", "a number of a CSV file beyond the range of its filter's type", str(error.value), 1)


def test_parquet_with_other_columns_reads_only_the_columns_that_it_needs(tmp_path: Path) -> None:
    """And every file of the folder must have them; files with BEIR's names are read as before."""
    folder = tmp_path / "p"
    folder.mkdir()
    pq.write_table(pa.table({"pid": [1], "passage": ["x"], "raw": [b"\xff"]}), folder / "a.parquet")
    names = PassageNames(metadata=())
    assert imported(folder, names).to_pylist() == [{"id": "1", "title": "", "text": "x", "metadata": ""}]
    with pytest.raises(InputError, match=r"a\.parquet row 1: found metadata that JSON cannot hold"):
        imported(folder)
    pq.write_table(pa.table({"id": [1], "passage": ["x"]}), folder / "b.parquet")
    assert "b.parquet: found the columns id, passage, expected pid as in the first file" in refusal(folder, names)
    pq.write_table(pa.table({"id": ["b"], "text": ["y"], "headline": ["H"]}), tmp_path / "legacy.parquet")
    source = detect_source(str(tmp_path / "legacy.parquet"))
    assert source.columns is None
    assert describe_columns(source)[0].endswith("id = id, title = none, text = text, metadata = headline")
    titled = imported(tmp_path / "legacy.parquet", PassageNames(title="headline"))
    assert titled.to_pylist() == [{"id": "b", "title": "H", "text": "y", "metadata": ""}]


@pytest.mark.parametrize(
    ("name", "data", "format"),
    [
        ("a.csv", "pid,body\n1,x\n", "csv"),
        ("a.csv.gz", "pid,body\n1,x\n", "csv"),
        ("a.tsv", "pid\tbody\n1\tx\n", "tsv"),
        ("a.tsv", "1\ttext\n", "msmarco"),
        ("a.tsv", "id\ttext\ttitle\n1\tx\ty\n", "dpr"),
        ("a.jsonl", '{"_id": "1", "text": "x", "body": "y"}\n', "beir"),
        ("a.jsonl", '{"id": "1", "text": "x"}\n', "jsonl"),
        ("a.json", '{"wikipedia_id": "1", "wikipedia_title": "t", "text": []}\n', "kilt"),
        ("corpus.jsonl", '{"pid": "1", "text": "x"}\n', "jsonl"),
        ("corpus.jsonl", '{"_id": "1", "text": "x", "wikipedia_title": "y"}\n', "beir"),
        ("corpus.csv", "pid,body\n1,x\n", "csv"),
        ("passages.tsv.gz", "pid\tbody\n1\tx\n", "tsv"),
        ("documents.jsonl", '{"pid": "1", "text": "x"}\n', "jsonl"),
    ],
)
def test_files_and_folders_are_recognised(tmp_path: Path, name: str, data: str, format: str) -> None:
    file = write(tmp_path / "raw" / name, data)
    if name != "corpus.jsonl" or format == "jsonl":
        assert detect_source(str(file)).format.name == format
    if not name.startswith("a."):
        assert detect_source(str(file.parent)).format.name == format


def test_a_row_of_the_sizes_bound(tmp_path: Path) -> None:
    """A field longer than Python's csv takes by default, in a chunk and in the header's block."""
    file = write(tmp_path / "a.csv", 'id,text\n1,"' + "x\n" * 200_000 + '"\n2,y\n')
    assert [len(text) for text in imported(file)["text"].to_pylist()] == [400_000, 1]


PACKAGES = [
    {"pkg": {"name": "a", "about": {"text": "first", "lang": "en"}, "tags": ["x"]}, "stars": 1},
    {"pkg": {"name": "b", "about": {"text": "second"}}, "stars": 2},
    {"pkg": {"name": 3, "about": {"text": "third", "lang": None}}},
]


def write_packages(path: Path) -> Path:
    if path.suffix == ".jsonl":
        return jsonl(path, PACKAGES)
    rows = [{**row, "pkg": {**row["pkg"], "name": str(row["pkg"]["name"])}} for row in PACKAGES]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_columns_are_fields_of_nested_objects(tmp_path: Path, name: str) -> None:
    path = write_packages(tmp_path / name)
    names = PassageNames("pkg.name", "", "pkg.about.text", ("pkg.about.lang", "stars", "pkg.tags"))
    table = imported(path, names)
    assert table["id"].to_pylist() == ["a", "b", "3"]
    assert table["text"].to_pylist() == ["first", "second", "third"]
    metadata = [json.loads(text or "{}") for text in table["metadata"].to_pylist()]
    assert metadata == [{"pkg.about.lang": "en", "stars": 1, "pkg.tags": ["x"]}, {"stars": 2}, {}]
    [line] = describe_columns(detect_source(str(path), names=names))
    assert line.endswith("text = pkg.about.text, metadata = pkg.about.lang, stars, pkg.tags")


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_an_absent_column_is_refused_with_the_paths_that_exist(tmp_path: Path, name: str) -> None:
    path = write_packages(tmp_path / name)
    columns = "the columns pkg.name, pkg.about.text, pkg.about.lang, pkg.tags, stars"
    for names in (PassageNames(text="pkg.text"), PassageNames(text="stars", metadata=("pkg.name.x",))):
        line = refusal(path, names)
        assert sorted(line.partition(" has ")[2].partition(";")[0].split(", ")) == sorted(columns.split(", ")), line
    assert "found the columns " in refusal(path)


def test_named_fields_are_not_metadata_too(tmp_path: Path) -> None:
    path = write_packages(tmp_path / "x.jsonl")
    names = PassageNames("pkg.name", "", "pkg.about.text")
    metadata = [json.loads(text or "{}") for text in imported(path, names)["metadata"].to_pylist()]
    assert metadata == [
        {"pkg": {"about": {"lang": "en"}, "tags": ["x"]}, "stars": 1},
        {"stars": 2},
        {"pkg": {"about": {"lang": None}}},
    ]
    whole = imported(path, PassageNames("pkg.name", "", "pkg.about.text", ("pkg.about",)))["metadata"].to_pylist()
    assert json.loads(whole[0])["pkg.about"]["lang"] == "en"
    source = detect_source(str(path), names=names)
    [table] = [parse_corpus(source.format, chunk, {"pkg.about.lang": "string"}) for chunk in cut_into_chunks(source, 9)]
    assert table["filter.pkg.about.lang"].to_pylist() == ["en", None, None]


def test_a_field_with_dots_in_its_name_counts_before_a_path(tmp_path: Path) -> None:
    rows = [{"a.b": "plain", "a": {"b": "nested"}}, {"a": {"b": "nested"}}]
    path = jsonl(tmp_path / "x.jsonl", rows)
    assert imported(path, PassageNames(text="a.b"))["text"].to_pylist() == ["plain", "nested"]
