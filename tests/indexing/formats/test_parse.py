"""BEIR rows to Arrow: what is written comes back as it is, and what is unfit is refused with its file and line."""

import gzip
import io
import json
import random
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from raw_files import DATA, ODD, jsonl, odd_text, passages, refused, write

from riptide.base.errors import InputError
from riptide.indexing.files.qrels import read_qrels
from riptide.indexing.formats.beir import BEIR
from riptide.indexing.formats.chunking import cut_into_chunks
from riptide.indexing.formats.parse import CORPUS_SCHEMA, parse_corpus, read_queries
from riptide.indexing.formats.sources import detect_source


@pytest.mark.parametrize("ensure_ascii", [False, True])
def test_beir_round_trip_of_odd_text(tmp_path, ensure_ascii):
    generator = random.Random(7)
    docs = [
        {
            "_id": f"{n}{odd_text(generator)}",
            "title": odd_text(generator, ("\n", "\t")),
            "text": odd_text(generator, ("\n", "\r")),
        }
        for n in range(200)
    ]
    docs[50]["text"] = "".join(generator.choices(ODD, k=500_000))  # over 1 MB
    tables = [
        passages("beir", jsonl(tmp_path / name, docs, ensure_ascii), size)
        for name, size in (("a.jsonl", 1), ("a.jsonl", 7), ("a.jsonl.gz", 1000))
    ]
    for table in tables:
        assert table.schema == CORPUS_SCHEMA
        assert table.select(["id", "title", "text"]).to_pylist() == [
            {"id": doc["_id"], "title": doc["title"], "text": doc["text"]} for doc in docs
        ]
        assert set(table["metadata"].to_pylist()) == {""}


def test_beir_fields(tmp_path):
    """Titles may be missing or null, texts empty, ids integers; everything else is metadata, flat, as it was."""
    docs = [
        {"_id": 12, "text": ""},
        {"_id": "b", "title": None, "text": "x", "metadata": {}},
        {"_id": "c", "title": "t", "text": "x", "metadata": {"url": "é", "n": [1, {"a": None}]}, "year": 2020.5},
        {"_id": "d", "text": "x", "metadata": None, "year": None},
        {"_id": "e", "text": "x", "metadata": {"year": 1}, "year": 1},
    ]
    table = passages("beir", jsonl(tmp_path / "a.jsonl", docs))
    assert table["id"].to_pylist() == ["12", "b", "c", "d", "e"]
    assert table["title"].to_pylist() == ["", "", "t", "", ""]
    assert table["text"].to_pylist() == ["", "x", "x", "x", "x"]
    assert table["metadata"].to_pylist() == [
        "",
        "",
        '{"url":"é","n":[1,{"a":null}],"year":2020.5}',
        '{"year":null}',
        '{"year":1}',
    ]


def test_the_same_chunk_gives_the_same_bytes(tmp_path):
    docs = [{"_id": str(n), "text": "x" * n, "metadata": {"n": n} if n % 3 else {}} for n in range(50)]
    file = jsonl(tmp_path / "a.jsonl", docs)

    def as_bytes() -> bytes:
        sink = io.BytesIO()
        with pa.ipc.new_file(sink, (table := passages("beir", file, n="int64")).schema) as writer:
            writer.write_table(table)
        return sink.getvalue()

    assert as_bytes() == as_bytes()


BAD_JSON = {
    "truncated": ('{"_id": "c", "text": "x', r"found no valid JSON \(.* at column \d+ of 23: .*expected one JSON"),
    "not JSON": ("hello", "found no valid JSON"),
    "two documents": ('{"_id": "c", "text": "x"} {"_id": "d", "text": "x"}', "found no valid JSON"),
    "array": ("[1, 2]", r"found JSON '\[1, 2\]', expected a JSON object"),
    "empty line": ("", "found an empty line, expected empty lines at the end of the file only"),
    "blank line": (" \r", "found an empty line"),
    "no id": ('{"text": "x"}', "found no _id, expected a string that is not empty, or an integer"),
    "null id": ('{"_id": null, "text": "x"}', "found no _id"),
    "empty id": ('{"_id": "", "text": "x"}', "found _id ''"),
    "id a float": ('{"_id": 1.5, "text": "x"}', r"found _id 1\.5"),
    "id true": ('{"_id": true, "text": "x"}', "found _id True"),
    "no text": ('{"_id": "c", "contents": "x"}', "found no text, expected text to be a string"),
    "text a list": ('{"_id": "c", "text": ["x"]}', r"found text \['x'\], expected text to be a string"),
    "title a number": ('{"_id": "c", "text": "x", "title": 0}', "found title 0"),
    "metadata a string": ('{"_id": "c", "text": "x", "metadata": "m"}', "found metadata 'm', expected an object"),
    "field twice": (
        '{"_id": "c", "text": "x", "metadata": {"a": 1}, "a": 2}',
        "found field 'a' inside and outside of metadata",
    ),
    "surrogate": ('{"_id": "c", "text": "\\ud800"}', "found an unpaired surrogate escape at column"),
    "surrogate in metadata": ('{"_id": "c", "text": "", "m": "\\udc00x"}', "found an unpaired surrogate escape"),
    "UTF-8": (b'{"_id": "c", "text": "\xc3\xa9\xff"}', r"found invalid UTF-8 \(byte 0xff at byte offset 24 of the"),
    "UTF-8 surrogate": (b'{"_id": "c", "text": "\xed\xa0\x80"}', r"found invalid UTF-8 \(byte 0xed at byte offset 22"),
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_a_bad_beir_line_is_named(tmp_path, case):
    """In the last chunk of the second file, with CRLF, and in the first line of a file."""
    line, pattern = BAD_JSON[case]
    data = line if isinstance(line, bytes) else line.encode()
    good = [b'{"_id": "%d", "text": "x"}' % n for n in range(15)]
    lines = b"\r\n".join([*good[:14], data, good[14]])
    first = write(tmp_path / "first.jsonl", b"\n".join(good) + b"\n")
    second = tmp_path / "second.jsonl"
    for size in (2, 100):
        refused(second, lines, "beir", rf"second\.jsonl:15: {pattern}", size)
        with pytest.raises(InputError, match=rf"second\.jsonl:15: {pattern}"):
            passages("beir", [first, second], size)
    refused(second, data + b"\n" + good[0], "beir", rf"second\.jsonl:1: {pattern}")


def test_filters(tmp_path):
    docs = [
        {
            "_id": "a",
            "text": "x",
            "metadata": {"year": 2020, "score": 1, "lang": "é", "open": True, "when": "2020-02-03"},
        },
        {
            "_id": "b",
            "text": "x",
            "year": -5,
            "score": 0.5,
            "lang": "",
            "open": False,
            "when": "2020-02-03T04:05:06+01:00",
        },
        {"_id": "c", "text": "x", "metadata": {"year": None, "when": "1969-12-31T23:59:59.5Z"}},
    ]
    types = {"year": "int64", "score": "float64", "lang": "string", "open": "bool", "when": "timestamp"}
    table = passages("beir", jsonl(tmp_path / "a.jsonl", docs), 2, **types)
    assert table.schema.names[:4] == CORPUS_SCHEMA.names
    assert {name: table.schema.field(f"filter.{name}").type for name in types} == {
        "year": pa.int64(),
        "score": pa.float64(),
        "lang": pa.string(),
        "open": pa.bool_(),
        "when": pa.timestamp("us", "UTC"),
    }
    found = {name: table[f"filter.{name}"].to_pylist() for name in types}
    assert found == {
        "year": [2020, -5, None],
        "score": [1.0, 0.5, None],
        "lang": ["é", "", None],
        "open": [True, False, None],
        "when": [
            datetime(2020, 2, 3, tzinfo=UTC),
            datetime(2020, 2, 3, 3, 5, 6, tzinfo=UTC),
            datetime(1969, 12, 31, 23, 59, 59, 500_000, tzinfo=UTC),
        ],
    }


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int64", '"2020"'),
        ("int64", "2020.5"),
        ("int64", "true"),
        ("int64", "9223372036854775808"),
        ("float64", '"1"'),
        ("float64", "false"),
        ("string", "1"),
        ("bool", "1"),
        ("bool", '"true"'),
        ("timestamp", "2020"),
        ("timestamp", '"yesterday"'),
        ("timestamp", '"0001-01-01T00:00:00+01:00"'),
    ],
)
def test_a_filter_of_another_type_is_refused(tmp_path, kind, value):
    text = f'{{"_id": "a", "text": "x"}}\n{{"_id": "b", "text": "x", "year": {value}}}\n'
    refused(tmp_path / "a.jsonl", text, "beir", rf"a\.jsonl:2: found year .*, expected .*({kind}|timestamp)", year=kind)


def test_filters_of_lists(tmp_path):
    """A single value is a list of one; nulls in a list are left out, and a list without values is null."""
    tags = [["a", "b"], "c", [], None, ["d", None], [None]]
    docs = [{"_id": f"p{row}", "text": "x", "metadata": {"tags": value}} for row, value in enumerate(tags)]
    table = passages("beir", jsonl(tmp_path / "a.jsonl", docs), tags="list[string]")
    assert table.schema.field("filter.tags").type == pa.list_(pa.string())
    assert table["filter.tags"].to_pylist() == [["a", "b"], ["c"], None, None, ["d"], None]
    assert json.loads(table["metadata"][4].as_py()) == {"tags": ["d", None]}
    refused(
        tmp_path / "b.jsonl",
        '{"_id": "a", "text": "x", "tags": ["a", 5]}',
        "beir",
        r"b\.jsonl:1: found tags 5 \(int\), expected string",
        tags="list[string]",
    )


def test_an_unknown_filter_type_is_refused(tmp_path):
    with pytest.raises(InputError, match="filter year: found type 'int', expected one of int64, float64"):
        passages("beir", jsonl(tmp_path / "a.jsonl", [{"_id": "a", "text": "x"}]), year="int")


def test_scifact_is_read_whole():
    """Counts as published for BEIR's SciFact; texts compared with Python's own json."""
    if not (DATA / "scifact").is_dir():
        pytest.skip(f"needs SciFact in BEIR's form in {DATA / 'scifact'}")
    source = detect_source(str(DATA / "scifact"))
    table = pa.concat_tables([parse_corpus(BEIR, chunk) for chunk in cut_into_chunks(source, 500)])
    with gzip.open(source.corpus[0], "rt", encoding="utf-8", newline="\n") as lines:
        docs = [json.loads(line) for line in lines]
    assert table.select(["id", "title", "text"]).to_pylist() == [
        {"id": doc["_id"], "title": doc["title"], "text": doc["text"]} for doc in docs
    ]
    queries = read_queries(source)[0]
    assert (len(docs), len(queries)) == (5183, 1109)
    for split, (num_queries, num_rows) in {"train": (809, 919), "test": (300, 339)}.items():
        qrels = read_qrels(source.qrels[split])
        assert (len(set(qrels["query_id"].to_pylist())), len(qrels)) == (num_queries, num_rows)
        assert set(qrels["query_id"].to_pylist()) <= set(queries["id"].to_pylist())
        assert set(qrels["corpus_id"].to_pylist()) <= set(table["id"].to_pylist())
