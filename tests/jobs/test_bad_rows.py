"""Imports list the bad rows of their files, or leave them out with --skip-invalid."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_outcome import Outcome
from samples import files_of

import riptide
from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store

Job = Callable[..., Outcome]
Refused = Callable[..., str]
Documented = Callable[..., None]

MANY = 700  # rows: two parts


def ids_of(store: Path) -> list[str]:
    return [passage.id for passage in Corpus.open(Store(str(store)))]


def write_json(path: Path, bad: dict[int, str], rows: int = MANY) -> Path:
    """Writes JSON lines, of which some (numbers from 1) are replaced."""
    lines = [bad.get(n, json.dumps({"_id": f"p{n}", "text": f"text {n}", "year": n})) for n in range(1, rows + 1)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


BAD = {
    3: '{"_id": "p3", "text": null}',
    7: '{"_id": "p7", "text": "x", "year": "1999"}',
    600: "not JSON",
    601: '{"text": "no id"}',
}


def test_an_error_lists_the_bad_rows_of_all_parts(tmp_path: Path, job: Job, documented: Documented) -> None:
    file = write_json(tmp_path / "a.jsonl", BAD)
    outcome = job("import_corpus", "--store", tmp_path / "s", "--source", file, "--filters", "year", "int64")
    lines = outcome.err.splitlines()
    assert (outcome.status, len(lines)) == (1, 4)
    assert [line.partition(": found")[0].removeprefix("error: ") for line in lines] == [f"{file}:{n}" for n in BAD]
    assert lines[0].endswith("; found 3 more bad rows: correct them, or set --skip-invalid")
    documented("Importing", "several bad rows", lines[0], 1)
    assert Store(str(tmp_path / "s")).keys() == []


@pytest.mark.parametrize("first", [1, 200], ids=["from the first row", "after the first rows"])
def test_an_error_lists_twenty_rows_and_counts_the_others(tmp_path: Path, job: Job, first: int) -> None:
    file = write_json(tmp_path / "a.jsonl", dict.fromkeys(range(first, first + 500), "5"))
    outcome = job("import_corpus", "--store", tmp_path / "s", "--source", file)
    lines = outcome.err.splitlines()
    assert "; found 499 more bad rows" in lines[0]
    assert len(lines) == 21
    assert lines[19].startswith(f"{file}:{first + 19}: ")
    assert lines[20] == "and 480 more"


def test_the_reason_of_a_row_names_the_option_of_the_command(tmp_path: Path, job: Job) -> None:
    """Also in the file of the artifact, which people may read; an error in Python names the parameter of Python."""
    rows = [{"text": f"passage {number}"} for number in range(1_200)] + [{"id": "x", "text": "another"}]
    file, store = tmp_path / "a.jsonl", tmp_path / "s"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert job("import_corpus", "--store", store, "--source", file).err.endswith("; name the id by --id\n")
    assert job("import_corpus", "--store", store, "--source", file, "--skip-invalid").status == 0
    [reason] = json.loads((store / "corpus/g0000/manifest.json").read_text())["notes"]["skipped_rows"]
    assert reason.endswith("expected none, as in the first lines; name the id by --id")
    with pytest.raises(InputError, match=r"; name the id by id=$"):
        riptide.Store(str(tmp_path / "other")).import_corpus(file)


def test_skip_invalid_leaves_bad_rows_out_and_lists_them(tmp_path: Path, job: Job) -> None:
    file, store = write_json(tmp_path / "a.jsonl", BAD), tmp_path / "s"
    options = ("--filters", "year", "int64", "--skip-invalid")
    outcome = job("import_corpus", "--store", store, "--source", file, *options)
    assert outcome.status == 0
    show = f"riptide store show corpus/g0000 --store {store}"
    assert f"left out 4 rows of corpus/g0000; {show} lists them" in outcome.out + outcome.err
    assert "parameter" not in job("store", "show", "corpus", "--store", store).out, "the option is --skip-invalid"
    assert ids_of(store) == [f"p{n}" for n in range(1, MANY + 1) if n not in BAD]
    notes = Store(str(store)).open("corpus", "g0000").notes
    assert notes["skipped"] == 4
    assert [row.partition(": found")[0] for row in notes["skipped_rows"]] == [f"{file}:{n}" for n in BAD]
    shown = job("store", "show", "corpus/g0000", "--store", store).out
    assert f"{file}:600: found no valid JSON" in shown
    again = tmp_path / "again"
    job("import_corpus", "--store", again, "--source", file, *options, "--max-workers", 1)
    assert {name: data for name, data in files_of(store).items() if name.endswith((".arrow", ".npy"))} == {
        name: data for name, data in files_of(again).items() if name.endswith((".arrow", ".npy"))
    }


def test_a_source_without_a_good_row_is_refused(tmp_path: Path, refused: Refused) -> None:
    file = write_json(tmp_path / "a.jsonl", dict.fromkeys(range(1, 4), "5"), 3)
    line = refused("import_corpus", "--store", tmp_path / "s", "--source", file, "--skip-invalid")
    assert line.endswith("; found 2 more bad rows: none can be imported; correct them")


FORMATS = {
    "a.csv": (b'id,text\na,"x\ny"\nb\n\nc,z\nd,\xff\ne,"1\n\n2"\n,v\nf,w\n', ["a", "c", "e", "f"], [4, 5, 7, 11]),
    "a.tsv": (b"1\tx\n2\n\n3\ty\n4\tz\tz\n5\tw\n", ["1", "3", "5"], [2, 3, 5]),
    "psgs_w100.tsv": (b'id\ttext\ttitle\n1\tx\tT\n2\tx\n3\t"y\n4\tz\tT\n', ["1", "4"], [3, 4]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_bad_rows_are_left_out_of_every_format_of_text(tmp_path: Path, job: Job, name: str) -> None:
    data, ids, lines = FORMATS[name]
    (tmp_path / name).write_bytes(data)
    outcome = job("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / name, "--skip-invalid")
    assert outcome.status == 0, outcome
    assert ids_of(tmp_path / "s") == ids
    skipped = Store(str(tmp_path / "s")).open("corpus", "g0000").notes["skipped_rows"]
    assert [row.partition(": ")[0] for row in skipped] == [f"{tmp_path / name}:{line}" for line in lines]


def test_titles_stay_with_their_passages(tmp_path: Path, job: Job) -> None:
    (tmp_path / "marco").mkdir()
    (tmp_path / "marco" / "collection.tsv").write_text("0\ta\n1\n2\tc\n3\td\n")
    (tmp_path / "marco" / "para.title.txt").write_text("0\tA\n2\tC\n3\tD\n")
    outcome = job("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "marco", "--skip-invalid")
    assert outcome.status == 0, outcome
    passages = [(each.id, each.title) for each in Corpus.open(Store(str(tmp_path / "s")))]
    assert passages == [("0", "A"), ("2", "C"), ("3", "D")]


def test_bad_documents_are_left_out(tmp_path: Path, job: Job) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, data in {"a.txt": b"x", "b.txt": b"\xff", "c.txt": b"", "d.txt": b"y"}.items():
        (folder / name).write_bytes(data)
    outcome = job("import_corpus", "--store", tmp_path / "s", "--source", folder, "--skip-invalid")
    assert outcome.status == 0, outcome
    assert ids_of(tmp_path / "s") == ["a.txt", "d.txt"]


def test_repeated_ids_are_listed_with_the_remedy_that_fits(tmp_path: Path, job: Job, documented: Documented) -> None:
    lines = [{"_id": id, "text": text} for id, text in [("a", "x"), ("b", "y"), ("a", "x"), ("b", "z")]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = job("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "a.jsonl")
    first, second = sorted(outcome.err.removeprefix("error: ").splitlines(), key=lambda line: ":4: " in line)
    assert outcome.status == 1
    assert ":3: id 'a' comes a second time" in first
    assert "leave the later one out by --drop-duplicates" in first
    assert ":4: id 'b' comes a second time" in second
    assert "rename or remove one" in second


def test_integers_that_pandas_holds_as_floats_are_integers(tmp_path: Path, refused: Refused) -> None:
    """A column of integers with a missing value is float64 with NaN in pandas, and so it arrives in Parquet."""
    frame = pd.DataFrame({"id": [1.0, 2.0, 3.0], "text": ["x", "y", "z"], "year": [1999, None, 2001]})
    store = riptide.Store(str(tmp_path / "frame"))
    corpus = store.import_corpus(frame, filters={"year": "int64"})
    assert [(each.id, each.metadata.get("year")) for each in corpus] == [("1", 1999), ("2", None), ("3", 2001)]
    file = tmp_path / "nan.parquet"
    nan = pa.array([1999.0, float("nan"), 2001.0])
    pq.write_table(pa.table({"id": [1.0, 2.0, 3.0], "text": ["x", "y", "z"], "year": nan}), file)
    corpus = riptide.Store(str(tmp_path / "file")).import_corpus(str(file), filters={"year": "int64"})
    assert corpus.filters(corpus.parts[0])["filter.year"].to_pylist() == [1999, None, 2001]
    assert [each.id for each in corpus] == ["1", "2", "3"]
    pq.write_table(pa.table({"id": [1.0, 2.0, float("nan")], "text": ["x", "y", "z"]}), file)
    line = refused("import_corpus", "--store", tmp_path / "s", "--source", file)
    assert line.endswith(
        "nan.parquet row 3: found no id, expected a string that is not empty, or an integer; give each row its id"
    )


def test_a_frame_with_bad_rows_lists_them_without_the_temporary_file(tmp_path: Path) -> None:
    frame = pd.DataFrame({"id": ["a", "b", "c"], "text": ["x", None, None]})
    with pytest.raises(InputError, match=r"rows of a table row 2: found no text.*or set skip_invalid=") as error:
        riptide.Store(str(tmp_path / "s")).import_corpus(frame)
    assert [note.partition(":")[0] for note in error.value.__notes__] == ["rows of a table row 3"]


def test_queries_skip_bad_rows_and_judgements_of_what_is_left_out(tmp_path: Path, job: Job) -> None:
    folder = tmp_path / "beir"
    write_json(folder / "corpus.jsonl", {2: '{"_id": "p2"}'}, 4)
    write_json(folder / "queries.jsonl", {3: '{"_id": "p3", "text": 5}'}, 4)
    (folder / "qrels").mkdir()
    judged = "query-id\tcorpus-id\tscore\np1\tp1\t1\np2\tp2\t1\np3\tp3\t1\np4\tp4\tone\np4\tp1\t1\n"
    (folder / "qrels" / "test.tsv").write_text(judged)
    refused = job("import_corpus", "--store", tmp_path / "s", "--source", folder)
    assert refused.status == 1
    outcome = job("import_corpus", "--store", tmp_path / "s", "--source", folder, "--skip-invalid")
    assert outcome.status == 0, outcome
    queries = Queries.open(Store(str(tmp_path / "s")))
    assert queries.table["id"].to_pylist() == ["p1", "p2", "p4"]
    pairs = queries.qrels("test").select(["query_id", "corpus_id"]).to_pylist()
    assert [tuple(pair.values()) for pair in pairs] == [("p1", "p1"), ("p4", "p1")]
    assert queries.artifact.notes["skipped"] == 2
    assert queries.artifact.notes["skipped_judgements"] == {"unknown_query": 1, "unknown_passage": 1}
    other = job("import_queries", "--store", tmp_path / "s", "--source", folder, "--queries", "other")
    assert other.status == 1
    assert "queries.jsonl:3: found text 5" in other.err
    assert "test.tsv:5: found score 'one'" in other.err
    skipped = job("import_queries", "--store", tmp_path / "s", "--source", folder, "--queries", "o", "--skip-invalid")
    assert "left out 2 rows of queries/o" in skipped.out + skipped.err


def test_bad_rows_of_a_table_of_judged_queries_are_listed(tmp_path: Path, job: Job) -> None:
    write_json(tmp_path / "corpus.jsonl", {}, 4)
    job("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "corpus.jsonl")
    rows = ["query,relevant,score", "a,p1,1", "b,p2,high", "c,p3,2", "c,p3,1", "d,,1"]
    (tmp_path / "asked.csv").write_text("".join(f"{row}\n" for row in rows))
    command = ("import_queries", "--store", tmp_path / "s", "--source", tmp_path / "asked.csv")
    lines = job(*command).err.splitlines()
    assert [line.partition(": found")[0].rpartition(":")[2] for line in lines] == ["3", "5", "6"]
    assert job(*command, "--skip-invalid").status == 0
    assert Queries.open(Store(str(tmp_path / "s"))).qrels("test")["corpus_id"].to_pylist() == ["p1", "p3"]


def test_a_bad_first_line_of_json_does_not_change_the_format(tmp_path: Path, job: Job) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": NaN}\n5\n{"id": "a", "text": "x"}\n')
    outcome = job("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "a.jsonl", "--skip-invalid")
    assert outcome.status == 0, outcome
    assert ids_of(tmp_path / "s") == ["a"]


def test_a_bad_first_line_of_judgements_is_the_only_one(tmp_path: Path, job: Job) -> None:
    write_json(tmp_path / "corpus.jsonl", {}, 4)
    job("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "corpus.jsonl")
    (tmp_path / "asked.csv").write_text("id,query\na,x\nb,y\n")
    (tmp_path / "asked.qrels").write_text("judgements of May\n\na 0 p1 1\nb 0 p2 1\n")
    command = ("import_queries", "--store", tmp_path / "s", "--source", tmp_path / "asked.csv")
    judged = ("--qrels", tmp_path / "asked.qrels")
    assert [line.rpartition(".qrels:")[2][0] for line in job(*command, *judged).err.splitlines()] == ["1", "2"]
    assert job(*command, *judged, "--skip-invalid").status == 0
    assert Queries.open(Store(str(tmp_path / "s"))).qrels("test")["corpus_id"].to_pylist() == ["p1", "p2"]


def test_judgements_that_contradict_each_other_are_listed_or_left_out(
    tmp_path: Path, job: Job, documented: Callable[..., None]
) -> None:
    write_json(tmp_path / "corpus.jsonl", {}, 4)
    job("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "corpus.jsonl")
    (tmp_path / "asked.csv").write_text("id,query\na,x\n")
    (tmp_path / "asked.qrels").write_text("a 0 p1 1\na 0 p1 0\na 0 p2 2\na 0 p1 2\na 0 p1 1\n")
    command = ("import_queries", "--store", tmp_path / "s", "--source", tmp_path / "asked.csv")
    command = (*command, "--qrels", tmp_path / "asked.qrels")
    refused = job(*command)
    assert refused.status == 1
    assert [line.rpartition(".qrels:")[2][0] for line in refused.err.splitlines()] == ["2", "4"]
    documented("Importing", "judgements with two scores for one passage", refused.err.splitlines()[0], 1)
    assert job(*command, "--skip-invalid").status == 0
    queries = Queries.open(Store(str(tmp_path / "s")))
    assert queries.qrels("test").to_pydict() == {"query_id": ["a", "a"], "corpus_id": ["p1", "p2"], "score": [1, 2]}
    assert queries.artifact.notes["skipped"] == 2


@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_parquet_page_with_a_wrong_checksum_is_refused(tmp_path: Path, job: Job, is_wrong: bool) -> None:
    """Pages without a checksum are accepted: all other tests write such files."""
    file = tmp_path / "a.parquet"
    table = pa.table({"id": ["a", "b"], "text": ["the tide rises", "the tide falls"]})
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(table, file, write_page_checksum=True, **options)
    if is_wrong:
        file.write_bytes(file.read_bytes().replace(b"tide rises", b"tide roses"))
    outcome = job("import_corpus", "--store", tmp_path / "s", "--source", file)
    assert outcome.status == is_wrong
    assert ("found damaged Parquet" in outcome.err and "fetch the file again" in outcome.err) is is_wrong


def test_integers_beyond_64_bits_keep_their_digits_or_are_refused(
    tmp_path: Path, job: Job, refused: Refused, documented: Documented
) -> None:
    file, number = tmp_path / "a.jsonl", 2**64 + 1
    file.write_text(
        f'{{"_id": {number}, "text": "x", "size": {2**64 - 1}}}\n{{"_id": -{number}, "text": "{number}"}}\n'
    )
    assert job("import_corpus", "--store", tmp_path / "s", "--source", file).status == 0
    assert ids_of(tmp_path / "s") == [str(number), f"-{number}"]
    file.write_text(f'{{"_id": "a", "text": "x", "size": [{number}]}}\n')
    line = refused("import_corpus", "--store", tmp_path / "t", "--source", file)
    documented("Importing", "an integer of more than 64 bits in metadata", line, 1)
    pq.write_table(pa.table({"id": ["a"], "text": ["x"], "metadata": [f'{{"n": {number}}}']}), tmp_path / "a.parquet")
    line = refused("import_corpus", "--store", tmp_path / "u", "--source", tmp_path / "a.parquet")
    assert "row 1: found an integer of more than 64 bits in the metadata" in line
