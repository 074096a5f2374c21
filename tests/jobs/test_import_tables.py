"""Tables with any columns through the jobs: options, the line that says what is taken, resume, and refusals."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_outcome import Outcome
from samples import files_of

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store

Done = Callable[..., str]
Refused = Callable[..., str]
Documented = Callable[..., None]


def passages_of(store: Path) -> list[tuple]:
    corpus = Corpus.open(Store(str(store)))
    return [tuple(passage)[1:] for passage in corpus.passages(range(corpus.num_rows))]


def config_of(store: Path) -> dict:
    return dict(Store(str(store)).open("corpus", "g0000").config)


def test_options_name_the_columns_and_one_line_says_so(tmp_path: Path, done: Done) -> None:
    """The columns are pinned only for tables; the line of BEIR is printed only for fields that become metadata."""
    file = tmp_path / "faq.csv"
    file.write_text('n,head,answer,topic\n1,A,"x\ny",t\n2,,z,\n')
    command = ("import_corpus", "--store", tmp_path / "s", "--source", file, "--id", "n", "--title", "head")
    out = done(*command, "--text", "answer", "--metadata", "topic")
    line = f"columns of {file}: id = n, title = head, text = answer, metadata = topic"
    assert out.splitlines()[0] == line
    assert passages_of(tmp_path / "s") == [("1", "A", "x\ny", '{"topic":"t"}'), ("2", "", "z", "")]
    columns = {"id": "n", "title": "head", "text": "answer", "metadata": ["topic"]}
    assert config_of(tmp_path / "s")["columns"] == columns
    assert done(*command, "--text", "answer", "--metadata", "topic", "--plan").splitlines()[0] == line
    other = ("import_corpus", "--store", tmp_path / "other", "--source", file)
    assert done(*other, "--text", "answer", "--metadata", "--plan").startswith(
        f"columns of {file}: id = a hash of title and text, title = none, text = answer, metadata = none, left out = n"
    )
    beir = tmp_path / "b.jsonl"
    beir.write_text('{"_id": "a", "text": "x", "headline": "H"}\n')
    out = done("import_corpus", "--store", tmp_path / "b", "--source", beir)
    assert out.startswith(f"columns of {beir}: id = _id, title = none, text = text, metadata = headline\n")


def test_names_of_files_and_columns_are_no_instructions_for_a_terminal(
    tmp_path: Path, done: Done, refused: Refused
) -> None:
    store = tmp_path / "s"
    file = tmp_path / "\x1b[2Ja.csv"
    file.write_text("id,text,\x1b[31mred\x9b\n1,a,b\n", encoding="utf-8")
    texts = [
        done("import_corpus", "--store", store, "--source", file),
        done("store", "show", "corpus", "--store", store),
        refused("import_corpus", "--store", store, "--source", file, "--title", "\x1b[1m"),
        refused("import_corpus", "--store", store, "--source", f"{file}.none"),
    ]
    assert not any("\x1b" in text or "\x9b" in text for text in texts)
    assert "\\x1b[2Ja.csv: id = id, title = none, text = text, metadata = \\x1b[31mred\\u009b\n" in texts[0]
    assert "--title \\x1b[1m: " in texts[2]


def test_the_configuration_of_formats_with_fixed_columns_is_as_before(tmp_path: Path, done: Done) -> None:
    """So that stores that were begun or imported before go on: these are the keys that they pin."""
    (tmp_path / "a.jsonl").write_text('{"_id": "a", "text": "x"}\n')
    (tmp_path / "a.tsv").write_text("1\tx\n")
    (tmp_path / "d.tsv").write_text("id\ttext\ttitle\n1\tx\ty\n")
    page = {"wikipedia_id": "1", "wikipedia_title": "T", "text": ["T", "x"]}
    (tmp_path / "k.json").write_text(json.dumps(page) + "\n")
    pq.write_table(pa.table({"id": ["a"], "text": ["x"], "name": ["n"]}), tmp_path / "p.parquet")
    files = {"a.jsonl": "beir", "a.tsv": "msmarco", "d.tsv": "dpr", "k.json": "kilt", "p.parquet": "parquet"}
    for name, format in files.items():
        done("import_corpus", "--store", tmp_path / name[0] / format, "--source", tmp_path / name)
        config = config_of(tmp_path / name[0] / format)
        assert config.keys() == {"format", "part_size", "filters", "limit", "source", "delete"}
        assert config["format"] == format
    (tmp_path / "q.tsv").write_text("1\twho?\n")
    done("import_queries", "--store", tmp_path / "a/beir", "--source", tmp_path / "q.tsv")
    queries = Queries.open(Store(str(tmp_path / "a/beir")))
    assert queries.artifact.config.keys() == {"format", "limit", "source"}


ENCODED, DECODED = "Fish &amp; &#x63;hips &amp;lt; ?a=1&copy=2 &notit;", "Fish & chips &lt; ?a=1&copy=2 &notit;"


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_entities_are_decoded_only_on_request(tmp_path: Path, done: Done, ending: str) -> None:
    """Also in the queries of the folder, and before texts become hashed ids."""
    folder, row = tmp_path / "shop", {"title": ENCODED, "text": ENCODED, "maker": "A&amp;B"}
    folder.mkdir()
    write_table(folder / f"corpus.{ending}", row)
    write_table(folder / f"queries.{ending}", {"_id": "q", "text": ENCODED})
    outcomes = {}
    for name, options in {"as it is": (), "decoded": ("--decode-entities",)}.items():
        done("import_corpus", "--store", tmp_path / name, "--source", folder, *options)
        store = Store(str(tmp_path / name))
        queries = Queries.open(store)
        texts = [*passages_of(tmp_path / name)[0], *queries.split("all").texts]
        outcomes[name] = (texts, config_of(tmp_path / name)["columns"], queries.artifact.config.get("columns", {}))
    hashed = [hashlib.sha256(f"{text}\0{text}".encode()).hexdigest()[:32] for text in (ENCODED, DECODED)]
    assert outcomes["as it is"][0] == [hashed[0], ENCODED, ENCODED, '{"maker":"A&amp;B"}', ENCODED]
    assert outcomes["decoded"][0] == [hashed[1], DECODED, DECODED, '{"maker":"A&amp;B"}', DECODED]
    assert ["decode_entities" in columns for columns in outcomes["as it is"][1:]] == [False, False]
    assert [columns["decode_entities"] for columns in outcomes["decoded"][1:]] == [True, True]
    new = tmp_path / f"new.{ending}"
    write_table(new, {"title": "", "text": "Salt &amp; vinegar", "maker": ""})
    done("import_corpus", "--store", tmp_path / "decoded", "--source", new, "--append")
    assert passages_of(tmp_path / "decoded")[1][2] == "Salt & vinegar"


def write_table(file: Path, row: dict[str, str]) -> None:
    """Writes a table of one row."""
    if file.suffix == ".parquet":
        pq.write_table(pa.table({name: [value] for name, value in row.items()}), file)
    elif file.suffix == ".jsonl":
        file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    else:
        file.write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n", encoding="utf-8")


def test_entities_of_formats_with_fixed_columns_are_refused(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "collection.tsv").write_text("1\ta &amp; b\n")
    command = ("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "collection.tsv", "--decode-entities")
    line = refused(*command, "--format", "msmarco")
    assert "--decode-entities: format msmarco has fixed columns, expected one of csv" in line
    assert "add a header line" in refused(*command)


def test_an_interrupted_import_of_csv_resumes_to_the_same_bytes(
    tmp_path: Path, interrupt, done: Done, refused: Refused
) -> None:
    """With other columns it is refused, both sides named."""
    file = tmp_path / "a.csv"
    file.write_text("id,text,body\n" + "".join(f'p{n},"text\n{n}",body {n}\n' for n in range(60)))
    command = ("import_corpus", "--source", file, "--part-size", 10, "--text", "text", "--store")
    done(*command, tmp_path / "whole")
    interrupt(3, *command, tmp_path / "s")
    other = [str(part).replace("text", "body") if part == "text" else part for part in command]
    assert "columns.text text, now body" in refused(*other, tmp_path / "s")
    done(*command, tmp_path / "s")
    assert files_of(tmp_path / "s") == files_of(tmp_path / "whole")


def test_rows_that_come_twice_are_refused_with_both_lines(
    tmp_path: Path, refused: Refused, documented: Documented
) -> None:
    """In other parts than the first, behind rows of several lines, with given ids and with hashed ones."""
    file = tmp_path / "a.csv"
    rows = [f'p{n},"text\n{n}"' for n in range(9)]
    file.write_text("\n".join(["id,text", *rows[:8], "p3,x", rows[8]]) + "\n")
    command = ("import_corpus", "--part-size", 2, "--source", file)
    line = refused(*command, "--store", tmp_path / "given")
    assert f"{file}:18: id 'p3' comes a second time, first in {file}:8;" in line
    file.write_text("\n".join(["id,text", *rows, 'x,"text\n5"']) + "\n")
    line = refused(*command, "--store", tmp_path / "hashed", "--id", "", "--metadata")
    assert f"{file}:20: found the title and text of {file}:12, expected distinct passages" in line
    documented("Importing", "two passages with the same text and no id column", line, 1)


UNREADABLE = {
    "a spreadsheet": ("a.xlsx", b"PK\x03\x04", "save the sheet as CSV"),
    "a .csv.zip": ("a.csv.zip", b"PK\x03\x04", "decompress it"),
    "a JSON array": ("a.json", b'[\n{"id": 1, "text": "x"}\n]\n', "jq -c '.[]'"),
    "a .tsv of three columns without a header": ("a.tsv", b"1\tT\tx\n2\tU\ty\n", "add a header line"),
    "an Arrow file": ("a.arrow", b"ARROW1", "write the table as Parquet"),
    "a CSV file without a column known as the text": ("a.csv", b"a,b,c\n1,2,3\n", "--text"),
    "a CSV file with two columns that may be the text": (
        "a.csv",
        b"id,text,body\n1,2,3\n",
        "by --text, for example text",
    ),
    "a JSON file without a field known as the text": ("a.jsonl", b'{"id": 1, "story": "x"}\n', "--text"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_does_not_fit_is_refused_with_what_would(
    tmp_path: Path, refused: Refused, documented: Documented, case: str
) -> None:
    name, data, remedy = UNREADABLE[case]
    (tmp_path / name).write_bytes(data)
    line = refused("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / name)
    assert f"{tmp_path / name}" in line
    assert remedy in line
    assert "parameter" not in line
    documented("Importing", case, line, 1)


def test_an_option_that_names_no_column_lists_the_columns(
    tmp_path: Path, world, refused: Refused, documented: Documented
) -> None:
    file = tmp_path / "a.csv"
    file.write_text("a,b,c\n1,2,3\n")
    command = ("import_corpus", "--store", tmp_path / "s", "--source", file)
    line = refused(*command, "--text", "body")
    assert line == f"error: --text body: {file} has the columns a, b, c; give one of these"
    documented("Importing", "--text that names no column", line, 1)
    line = refused(*command, "--text", "a", "--metadata", "b", "year")
    assert f"--metadata year: {file} has the columns a, b, c" in line
    line = refused(*command, "--text", "a", "--format", "msmarco")
    assert "--text: format msmarco has fixed columns, expected one of csv, tsv, jsonl, parquet" in line
    documented("Importing", "--text for a format with fixed columns", line, 1)
    assert "expected --source PATH" in refused(*command[:3], "--delete", file, "--text", "a")
    assert not (tmp_path / "s").exists()
    queries = ("import_queries", "--store", world.store, "--source", file)
    line = refused(*queries, "--text", "a", "--relevant", "d")
    assert line == f"error: --relevant d: {file} has the columns a, b, c; give one of these"
    documented("Importing", "--relevant that names no column", line, 1)
    line = refused(*queries)
    assert "name the column of the text by --text" in line
    documented("Importing", "a table of queries without a column known as the query", line, 1)
    line = refused(*queries, "--text", "a", "--split", "dev", "--format", "msmarco")
    assert "--text: format msmarco has fixed columns" in line
    (tmp_path / "q.csv").write_text("id,query,passage_id,note\nq,x,p1,n\nq,x,p2,m\n")
    line = refused(*queries[:-1], tmp_path / "q.csv")
    assert "name the columns that belong to the query as its metadata" in line


def test_a_folder_of_tables_with_queries_whose_columns_are_unknown_is_refused_before_the_import(
    tmp_path: Path, refused: Refused, documented: Documented
) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f/corpus.csv").write_text("id,text\na,x\n")
    (tmp_path / "f/queries.csv").write_text("n,asked\n1,x\n")
    line = refused("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "f")
    assert f"{tmp_path}/f/queries.csv: found the columns n, asked, expected one called query, question, text" in line
    assert "--text" not in line
    documented("Importing", "a folder whose table of queries has no column known as the query", line, 1)
    assert not (tmp_path / "s").exists()


def test_column_options_in_a_recipe(tmp_path: Path, done: Done) -> None:
    """As keys of --config, --metadata as a list."""
    (tmp_path / "a.csv").write_text("a,b,c\n1,x,y\n")
    (tmp_path / "r.yaml").write_text("id: a\ntext: b\nmetadata: [c]\n")
    at = ("--store", tmp_path / "s", "--source", tmp_path / "a.csv", "--config", tmp_path / "r.yaml")
    done("import_corpus", *at)
    assert passages_of(tmp_path / "s") == [("1", "", "x", '{"c":"y"}')]


def test_appended_tables_have_the_columns_of_the_first_import(tmp_path: Path, done: Done) -> None:
    command = ("import_corpus", "--store", tmp_path / "s", "--source")
    (tmp_path / "a.csv").write_text("number,id,answer,text,topic,author\n1,x,first,short,tides,Ann\n")
    (tmp_path / "b.csv").write_text("number,id,answer,text,topic,author\n2,x,second,short,sails,Ben\n")
    (tmp_path / "c.jsonl").write_text('{"_id": "3", "text": "third", "topic": "ropes"}\n')
    (tmp_path / "d.csv").write_text("number,answer,text,topic,author\n4,a,fourth,sails,Ben\n")
    (tmp_path / "e.jsonl").write_text('{"number": 5, "answer": "fifth", "_id": "y", "text": "short"}\n')
    first = done(*command, tmp_path / "a.csv", "--id", "number", "--text", "answer", "--metadata", "topic")
    assert "first import" not in first
    again = done(*command, tmp_path / "b.csv", "--append")
    line = f"named as in the first import, in {tmp_path}/b.csv: id = number, text = answer, metadata = topic"
    assert line in again.splitlines()
    assert done(*command, tmp_path / "b.csv", "--append", "--plan").splitlines()[-1].endswith("g0001 is complete")
    assert "first import" not in done(*command, tmp_path / "c.jsonl", "--append")  # BEIR
    assert "not those of the first" not in done(*command, tmp_path / "d.csv", "--append", "--text", "text")
    assert "metadata = all other columns instead of topic" in done(*command, tmp_path / "e.jsonl", "--append")
    corpus = Corpus.open(Store(str(tmp_path / "s")))
    assert [(p.id, p.text, p.metadata_json) for p in corpus.passages(range(corpus.num_rows))] == [
        ("1", "first", '{"topic":"tides"}'),
        ("2", "second", '{"topic":"sails"}'),
        ("3", "third", '{"topic":"ropes"}'),
        ("4", "fourth", '{"topic":"sails"}'),
        ("5", "fifth", '{"_id":"y","text":"short"}'),
    ]


def test_other_columns_than_those_of_the_first_import_are_named(tmp_path: Path, done: Done) -> None:
    command = ("import_corpus", "--store", tmp_path / "s", "--source")
    (tmp_path / "a.csv").write_text("id,title,text\n1,x,first\n")
    (tmp_path / "b.csv").write_text("id,headline,body\n2,y,second\n")
    (tmp_path / "c.csv").write_text("text\nthird\n")
    done(*command, tmp_path / "a.csv")
    line = (
        f"warning: the columns of {tmp_path}/b.csv are not those of the first import: title = none instead of title, "
        "text = body instead of text; to take other ones, name them by --title and --text"
    )
    assert line in done(*command, tmp_path / "b.csv", "--append", "--plan").splitlines()
    named = done(*command, tmp_path / "b.csv", "--append", "--plan", "--title", "headline", "--text", "body")
    assert "warning" not in named
    assert line in done(*command, tmp_path / "b.csv", "--append").splitlines()
    assert "id = none instead of id, title = none instead of title;" in done(*command, tmp_path / "c.csv", "--append")


def test_repeated_ids_are_listed_in_the_order_of_the_file(
    tmp_path: Path, done: Done, job: Callable[..., Outcome]
) -> None:
    """With ids of the corpus, of the same file, and both."""
    command = ("import_corpus", "--store", tmp_path / "s", "--source")
    (tmp_path / "a.csv").write_text("id,text\n" + "".join(f"{number},text {number}\n" for number in range(30)))
    (tmp_path / "b.csv").write_text("id,text\n" + "".join(f"{number},text\n" for number in [*range(50), 40, 41]))
    done(*command, tmp_path / "a.csv")
    lines = job(*command, tmp_path / "b.csv", "--append").err.removeprefix("error: ").splitlines()
    places = [line.partition(": id")[0] for line in lines]
    assert places == [*(f"{tmp_path}/b.csv:{line}" for line in range(2, 22)), "and 12 more"]
    (tmp_path / "b.csv").write_text("id,text\n" + "".join(f"{number},text\n" for number in [40, 3, 41, 40, 2, 41, 1]))
    lines = job(*command, tmp_path / "b.csv", "--append").err.splitlines()
    assert [line.partition("b.csv:")[2].partition(":")[0] for line in lines] == ["3", "5", "6", "7", "8"]


def test_a_repeated_id_beside_bad_rows_is_named_by_its_line(tmp_path: Path, refused: Done) -> None:
    (tmp_path / "a.csv").write_text("id,text\n1,one\n,bad\n2,two\n3,\n,bad\n1,again\n")
    line = refused("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "a.csv", "--skip-invalid")
    assert f"a.csv:7: id '1' comes a second time, first in {tmp_path}/a.csv:2; rename" in line


def test_a_misspelt_file_of_judgements_is_named_by_its_option(tmp_path: Path, done: Done, refused: Done) -> None:
    (tmp_path / "a.csv").write_text("id,text\n1,x\n")
    done("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "a.csv")
    at = ("--store", tmp_path / "s", "--source", tmp_path / "a.csv", "--qrels", tmp_path / "a.qrel")
    line = refused("import_queries", *at)
    assert line == (
        f"error: {tmp_path}/a.qrel: found nothing, expected a file of judgements, as --qrels names it; check the path"
    )


def test_queries_without_judgements_say_how_these_are_found(tmp_path: Path, done: Done) -> None:
    """A column is suggested only if all its values are ids of the corpus: `answer`, not `language` or `page`."""
    (tmp_path / "a.csv").write_text("id,text\n1,x\n2,y\n")
    (tmp_path / "asked.csv").write_text("query,language,page,answer\nwhat,en,2,1\nwhy,de,77,1 2\nwho,,,2\n")
    (tmp_path / "asked.jsonl").write_text('{"query": "what", "language": "en", "page": 2, "answer": [1, 2]}\n' * 1)
    (tmp_path / "bare.csv").write_text("query,language\nwhat,en\n")
    done("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "a.csv")

    def warning(name: str, *arguments: str) -> str:
        command = ("import_queries", "--store", tmp_path / "s", "--source", tmp_path / name, *arguments)
        return "".join(line for line in done(*command).splitlines() if "no judgements" in line)

    assert warning("bare.csv") == (
        f"warning: no judgements in {tmp_path}/bare.csv; give them by --qrels of riptide import-queries, or in a "
        "column, by --relevant"
    )
    assert warning("asked.csv", "--queries", "plain") == (
        f"warning: no judgements in {tmp_path}/asked.csv; column answer has ids of the corpus: if they are those of "
        "relevant passages, remove queries/plain, and name the column by --relevant of riptide import-queries"
    )
    assert "column page and column answer has" in warning("asked.jsonl", "--queries", "lists")
    assert warning("asked.csv", "--queries", "judged", "--relevant", "answer") == ""
    assert warning("asked.csv", "--queries", "none", "--relevant", "") == ""


def alive_of(store: Path) -> list[tuple[int, str, str]]:
    corpus = Corpus.open(Store(str(store)))
    deleted = set(corpus.deleted.tolist())
    passages = corpus.passages(range(corpus.num_rows))
    assert corpus.rows_of([p.id for p in passages if p.row not in deleted]).tolist() == [
        p.row for p in passages if p.row not in deleted
    ]
    return [(p.row, p.text, p.metadata_json) for p in passages if p.row not in deleted]


@pytest.mark.parametrize("buckets", [1, 4])
def test_duplicates_are_dropped_and_counted(
    tmp_path: Path, done: Done, refused: Done, monkeypatch: pytest.MonkeyPatch, buckets: int
) -> None:
    monkeypatch.setattr("riptide.indexing.corpus.importing.num_buckets", lambda rows: buckets)
    monkeypatch.setattr("riptide.indexing.corpus.duplicates.PAIRS_AT_ONCE", 2)
    rows = [f"text {number % 7},{number}" for number in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["text,year", *rows]) + "\n")
    command = ("import_corpus", "--store", tmp_path / "s", "--part-size", 9, "--source")
    assert "leave the later one out by --drop-duplicates" in refused(*command, tmp_path / "a.csv")
    out = done(*command, tmp_path / "a.csv", "--drop-duplicates")
    assert "dropped  33 passages with the id, title and text of an earlier one" in out.splitlines()
    kept = [(number, f"text {number}", f'{{"year":"{number}"}}') for number in range(7)]
    assert alive_of(tmp_path / "s") == kept
    assert "is complete" in done(*command, tmp_path / "a.csv", "--drop-duplicates", "--plan")
    (tmp_path / "b.csv").write_text("text,year\ntext 3,50\nnew,51\nnew,52\n")
    assert "dropped  2 passages" in done(*command, tmp_path / "b.csv", "--append", "--drop-duplicates")
    assert alive_of(tmp_path / "s") == [*kept, (41, "new", '{"year":"51"}')]
    (tmp_path / "gone").write_text(Corpus.open(Store(str(tmp_path / "s"))).passages([3])[0].id + "\n")
    done(*command, tmp_path / "b.csv", "--append", "--drop-duplicates", "--delete", tmp_path / "gone")
    assert (43, "text 3", '{"year":"50"}') in alive_of(tmp_path / "s")


def test_an_id_with_another_text_is_no_duplicate(tmp_path: Path, done: Done, refused: Done) -> None:
    command = ("import_corpus", "--store", tmp_path / "s", "--drop-duplicates", "--source")
    (tmp_path / "a.csv").write_text("id,text\n1,x\n2,y\n1,z\n")
    line = refused(*command, tmp_path / "a.csv")
    assert f"a.csv:4: id '1' comes a second time with another title or text, first in {tmp_path}/a.csv:2" in line
    (tmp_path / "a.csv").write_text("id,text\n1,x\n2,y\n1,x\n")
    assert "dropped  1 passages" in done(*command, tmp_path / "a.csv")
    assert [row for row, _, _ in alive_of(tmp_path / "s")] == [0, 1]
    (tmp_path / "b.csv").write_text("id,text\n3,w\n2,other\n")
    line = refused(*command, tmp_path / "b.csv", "--append")
    assert "b.csv:3: id '2' is in the corpus already with another title or text, as row 1" in line
    assert "expected --source" in refused(
        "import_corpus", "--store", tmp_path / "s", "--drop-duplicates", "--delete", "x"
    )


def test_objects_are_refused_with_the_paths_of_their_fields(tmp_path: Path, refused, done) -> None:
    """As a text column, and as the name of a filter without its path."""
    row = {"key": "a", "content": {"head": "A", "body": "b c"}, "meta": {"lang": "en"}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    at = ("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "a.jsonl", "--id", "key")
    line = refused(*at, "--text", "content")
    assert "it is an object: name one of its fields, such as content.head, content.body" in line
    line = refused(*at, "--text", "content.body", "--filters", "lang", "string")
    assert "meta.lang" in line
    assert line.endswith("; did you mean meta.lang?")
    done(*at, "--text", "content.body", "--filters", "meta.lang", "string")
