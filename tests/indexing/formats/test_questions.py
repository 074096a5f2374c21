"""Questions and judgements of every format."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from kilt_files import TASKS, write_kilt
from raw_files import jsonl, write

from riptide.base.errors import InputError
from riptide.indexing.files.qrels import QRELS_SCHEMA, read_qrels
from riptide.indexing.formats.format import QUERIES_SCHEMA
from riptide.indexing.formats.kilt import EVIDENCE_FIELDS
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
        {
            "id": "5",
            "text": "who?",
            "metadata": '{"answers":["a","b"],"provenance":[["1","2"],["3"]],'
            '"evidence":[{"wikipedia_id":"1","title":"T"}],"meta":{"m":1}}',
        },
        {"id": "t", "text": "test?", "metadata": ""},
    ]
    bad_spans = ('"wikipedia_id": null', '"wikipedia_id": "1", "title": 3', '"wikipedia_id": 1, "end_character": "9"')
    outputs = ('"a"', '["a"]', '[{"answer": 1}]', '[{"answer": []}]', '[{"provenance": [{}]}]', '{"answer": "a"}')
    for output in (*outputs, *(f'[{{"provenance": [{{{fields}}}]}}]' for fields in bad_spans)):
        write(tmp_path / "k.jsonl", f'{{"id": "1", "input": "x"}}\n{{"id": "2", "input": "x", "output": {output}}}\n')
        with pytest.raises(InputError, match=r"k\.jsonl:2: found output .*, expected a list of \{answer"):
            questions(tmp_path / "k.jsonl")


def test_queries_of_kilts_eleven_tasks(tmp_path):
    """Each keeps its pages and spans; a label or the title of an entity is not an answer that a passage may contain."""
    files = write_kilt(tmp_path)
    kinds = dict.fromkeys(TASKS, "answers")
    kinds |= {"fever-train-kilt": "labels"}
    kinds |= dict.fromkeys(("aidayago2-train-kilt", "wned-dev-kilt", "cweb-dev-kilt"), "entities")
    for name, kind in kinds.items():
        source = detect_query_source(str(files[name]))
        assert (source.format.name, source.format.split_of(source.queries[0])) == ("kilt", name.split("-")[1])
        for row, task in zip(read_queries(source)[0].to_pylist(), TASKS[name], strict=True):
            metadata = json.loads(row["metadata"])
            assert (row["id"], row["text"]) == (task["id"], task["input"])
            answers = [output["answer"] for output in task["output"] if "answer" in output]
            assert metadata[kind] == list(dict.fromkeys(answers))
            assert not {"answers", "labels", "entities"} - {kind} & {*metadata}
            entries = [entry for output in task["output"] for entry in output.get("provenance", [])]
            assert {page for pages in metadata["provenance"] for page in pages} == {e["wikipedia_id"] for e in entries}
            assert metadata["evidence"] == [
                {field: entry[field] for field in ("wikipedia_id", *EVIDENCE_FIELDS) if field in entry}
                for entry in entries
            ]
            assert metadata.get("meta") == task.get("meta")
    hidden = read_queries(detect_query_source(str(files["fever-test"])))[0].to_pylist()
    assert [(row["id"], row["metadata"]) for row in hidden] == [("3301", ""), ("3302", "")]


@pytest.mark.parametrize("name", ["triviaqa-train_id", "triviaqa-test_id_without_answers"])
def test_kilts_triviaqa_without_questions_is_refused_with_the_remedy(tmp_path, name):
    source = detect_query_source(str(write_kilt(tmp_path)[name]))
    assert source.format.name == "kilt"
    with pytest.raises(InputError, match=r"-kilt\.jsonl: found no input, .*get_triviaqa_input\.py of KILT adds"):
        read_queries(source)


@pytest.mark.parametrize("first", ['{"id": "1", "input": "a b", "output": [{"ans', "", "[1]"])
def test_a_first_line_that_is_no_json_object_is_not_taken_for_triviaqa(tmp_path, first):
    source = detect_query_source(str(write(tmp_path / "a-dev-kilt.jsonl", first)), "kilt")
    with pytest.raises(InputError, match=r"found no valid JSON|found no rows|found a JSON array") as error:
        read_queries(source)
    assert "TriviaQA" not in str(error.value)


def test_a_table_with_a_list_called_output_is_not_kilts(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"id": "a", "text": "who", "output": ["x"]}\n')
    assert detect_query_source(str(path)).format.name == "jsonl"


@pytest.mark.parametrize(
    ("fields", "entry", "pattern"),
    [
        ({"provenance": 5}, {}, "found a field provenance of the line, expected it in the entries of output"),
        ({"evidence": []}, {}, "found a field evidence of the line, expected it in the entries of output"),
        ({}, {"start_paragraph_id": "3"}, r"found output .*characters of a span are integers below 2\^31"),
        ({}, {"start_character": 2**63}, r"found output .*characters of a span are integers below 2\^31"),
        ({}, {"title": 5}, "found output .*in which a title is a string"),
    ],
)
def test_bad_provenance_of_kilt_is_refused_with_its_line(tmp_path, fields, entry, pattern):
    line = {"id": "a", "input": "who", "output": [{"provenance": [{"wikipedia_id": "1"} | entry]}]} | fields
    source = detect_query_source(str(write(tmp_path / "a.jsonl", json.dumps(line) + "\n")))
    with pytest.raises(InputError, match=rf"a\.jsonl:1: {pattern}"):
        read_queries(source)


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
