"""Questions and judgements of every format."""

from pathlib import Path

import pyarrow as pa
import pytest
from raw_files import jsonl, write

from riptide.base.errors import InputError
from riptide.indexing.files.qrels import QRELS_SCHEMA, read_qrels
from riptide.indexing.formats.format import QUERIES_SCHEMA
from riptide.indexing.formats.parse import read_queries
from riptide.indexing.formats.sources import detect_query_source


def questions(path: Path, format: str = "auto") -> pa.Table:
    return read_queries(detect_query_source(str(path), format))[0]


def test_beir_queries(tmp_path):
    docs = [{"_id": str(n), "text": f"q{n}?", "title": "t", "metadata": {"n": n}} for n in range(3)]
    table = questions(jsonl(tmp_path / "queries.jsonl.gz", docs))
    assert table.schema == QUERIES_SCHEMA
    assert table.to_pylist() == [
        {"id": str(n), "text": f"q{n}?", "metadata": f'{{"n":{n},"title":"t"}}'} for n in range(3)
    ]
    assert questions(tmp_path) == table
    with pytest.raises(InputError, match=r"queries\.jsonl:2: found no text"):
        questions(write(tmp_path / "queries.jsonl", '{"_id": "a", "text": "x"}\n{"_id": "b"}\n'))


def test_msmarco_queries_that_overlap_are_read_once(tmp_path):
    write(tmp_path / "queries.dev.tsv", '1\ta\n2\tb "c\n')
    write(tmp_path / "queries.dev.small.tsv", '2\tb "c\n')
    write(tmp_path / "queries.train.tsv", "3\t[d]\n")
    assert questions(tmp_path).to_pylist() == [
        {"id": id, "text": text, "metadata": ""} for id, text in (("2", 'b "c'), ("1", "a"), ("3", "[d]"))
    ]
    write(tmp_path / "queries.train.tsv", "3\td\n2\te\n")
    with pytest.raises(
        InputError, match=r"queries\.train\.tsv:2: found query '2' with another text, expected an earlier"
    ):
        questions(tmp_path)
    write(tmp_path / "queries.train.tsv", "")
    with pytest.raises(InputError, match=r"queries\.train\.tsv: found no rows"):
        questions(tmp_path)


def test_dpr_questions(tmp_path):
    file = write(tmp_path / "nq-test.csv", 'who?\t[\'me\', "it\'s"]\n"a ""b""?"\t"[""c""]"\nd\t[]\n')
    assert questions(file).to_pylist() == [
        {"id": "q0", "text": "who?", "metadata": '{"answers":["me","it\'s"]}'},
        {"id": "q1", "text": 'a "b"?', "metadata": '{"answers":["c"]}'},
        {"id": "q2", "text": "d", "metadata": '{"answers":[]}'},
    ]
    for literal in ("[1]", "('a',)", "['a'", "__import__('os')", "a\\x00"):
        write(file, f"who?\t['me']\nwho?\t{literal}\n")
        with pytest.raises(InputError, match=r"nq-test\.csv:2: found answers .*, expected a Python list of strings"):
            questions(file)


def test_kilt_questions(tmp_path):
    docs = [
        {
            "id": 5,
            "input": "who?",
            "output": [
                {
                    "answer": "a",
                    "provenance": [{"wikipedia_id": "1", "title": "T"}, {"wikipedia_id": 2}, {"wikipedia_id": "1"}],
                },
                {"answer": "a"},
                {"provenance": [{"wikipedia_id": "3"}]},
                {"answer": "b", "provenance": []},
            ],
            "meta": {"m": 1},
        },
        {"id": "t", "input": "test?"},
    ]
    assert questions(jsonl(tmp_path / "nq-dev-kilt.jsonl", docs)).to_pylist() == [
        {"id": "5", "text": "who?", "metadata": '{"answers":["a","b"],"provenance":[["1","2"],["3"]],"meta":{"m":1}}'},
        {"id": "t", "text": "test?", "metadata": ""},
    ]
    for output in ('"a"', '["a"]', '[{"answer": 1}]', '[{"answer": []}]', '[{"provenance": [{}]}]', '{"answer": "a"}'):
        write(tmp_path / "k.jsonl", f'{{"id": "1", "input": "x"}}\n{{"id": "2", "input": "x", "output": {output}}}\n')
        with pytest.raises(InputError, match=r"k\.jsonl:2: found output .*, expected a list of \{answer"):
            questions(tmp_path / "k.jsonl")


def test_qrels_of_beir_and_trec(tmp_path):
    beir = write(tmp_path / "beir.tsv", '\ufeffquery-id\tcorpus-id\tscore\r\nq 1\td 1\t2\r\nq2\t"d ""2"""\t-1\r\n\r\n')
    table = read_qrels(str(beir))
    assert table.schema == QRELS_SCHEMA
    assert [tuple(row.values()) for row in table.to_pylist()] == [("q 1", "d 1", 2, 2), ("q2", 'd "2"', -1, 3)]
    for data in ("1\t0\td1\t1\n2\t0\td2\t0\n", "1 0  d1 1\n2 Q0 d2 0\n"):
        table = read_qrels(str(write(tmp_path / "qrels.dev.tsv", data)))
        assert [tuple(row.values()) for row in table.to_pylist()] == [("1", "d1", 1, 1), ("2", "d2", 0, 2)]
    zipped = write(tmp_path / "x.tsv.gz", "a\tb\t1\n")
    assert read_qrels(str(zipped)).to_pylist() == [{"query_id": "a", "corpus_id": "b", "score": 1, "line": 1}]


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("query-id\tcorpus-id\tscore\na\tb\n", ":2: found 2 columns .*, expected 3"),
        ("1\t0\td\t1\n1\td\t1\n", ":2: found 3 columns .*, expected 4"),
        ("a\tb\n", r":1: found 2 columns .*, expected 3 \(BEIR\) or 4 \(TREC\)"),
        (
            "a\tb\tc\n",
            ":1: found score 'c', expected an integer from -100,000 to 100,000, or the header query-id<TAB>",
        ),
        ("a\tb\t1\na\tb\t1.0\n", r":2: found score '1\.0', expected an integer from -100,000 to 100,000;"),
        ("a\tb\t100000\na\tb\t100001\n", ":2: found score '100001'"),
        ("a\tb\t1\na\t\t1\n", ":2: found an empty id"),
        ("a\tb\t1\n\na\tc\t1\n", ":2: found an empty line"),
        ("query-id\tcorpus-id\tscore\n", ": found no rows"),
        ("", ": found no rows"),
    ],
)
def test_bad_qrels_are_named(tmp_path, text, pattern):
    file = write(tmp_path / "qrels.tsv", text)
    with pytest.raises(InputError, match=r"qrels\.tsv" + pattern):
        read_qrels(str(file))
