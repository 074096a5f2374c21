"""Imports that split documents into passages: what is stored, grown, deleted, judged, refused and resumed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from kilt_files import BY_ID, write_kilt
from samples import files_of, make_queries, write_beir, write_lines

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store

Done = Callable[..., str]
SPLIT = ("--split-words", 12, "--overlap", 4)
KEPT = ("title", "text", "metadata", "document", "start", "end", "filter.year")


def make_documents(count: int, *, seed: int = 0, prefix: str = "d") -> list[dict]:
    """Documents of one to eight sentences, some with ids that look like those of passages."""
    draw = random.Random(seed)
    documents = []
    for number in range(count):
        sentences = [
            "The " + " ".join(f"w{draw.randrange(1000)}" for _ in range(draw.randint(1, 9))) + "."
            for _ in range(draw.randint(1, 8))
        ]
        ending = "#1" if number % 5 == 0 else ""
        documents.append(
            {
                "_id": f"{prefix}{number}{ending}",
                "title": f"Title {number}",
                "text": " ".join(sentences),
                "metadata": {"year": 1900 + number},
            }
        )
    return documents


def open_corpus(store: Path) -> Corpus:
    return Corpus.open(Store(str(store)))


def alive_rows(corpus: Corpus) -> dict[str, list[tuple]]:
    """Returns the passages that are not deleted by document, without their rows and numbers."""
    gone, found = set(corpus.deleted.tolist()), {}
    for part in corpus.parts:
        for row, passage in enumerate(corpus.table(part).to_pylist(), part.first_row):
            if row not in gone:
                found.setdefault(passage["document"], []).append(tuple(passage[name] for name in KEPT))
    return found


def test_the_passages_of_documents_with_their_columns(tmp_path: Path, done: Done) -> None:
    documents = make_documents(90)
    source = write_beir(tmp_path / "raw", documents)
    command = ("import_corpus", "--store", tmp_path / "s", "--source", source, "--part-size", 20, *SPLIT)
    out = done(*command, "--filters", "year", "int64")
    corpus = open_corpus(tmp_path / "s")
    assert f"{corpus.num_rows} passages of 90 documents; {len(corpus.parts)} parts" in out
    assert corpus.generations[0].config["split"] == {"words": 12, "overlap": 4}
    assert corpus.is_split
    assert corpus.num_documents == 90
    assert len(corpus.parts) >= 5
    row = 0
    for document in documents:
        firsts, ends = corpus.rows_of_documents([document["_id"]])
        assert firsts.tolist() == [row]
        passages = corpus.passages(range(row, int(ends[0])))
        assert [passage.id for passage in passages] == [f"{document['_id']}#{n}" for n in range(len(passages))]
        assert {passage.title for passage in passages} == {document["title"]}
        assert {passage.metadata_json for passage in passages} == {
            json.dumps(document["metadata"], separators=(",", ":"))
        }
        assert all(len(passage.text.split()) <= 12 for passage in passages)
        assert set(document["text"].split()) == {word for passage in passages for word in passage.text.split()}
        row = int(ends[0])
    assert row == corpus.num_rows > 2 * len(documents)
    texts = {document["_id"]: document["text"] for document in documents}
    for part in corpus.parts:
        table = corpus.table(part)
        assert table.column_names[4:] == ["document", "start", "end", "filter.year"]
        for passage in table.to_pylist():
            assert passage["text"] == texts[passage["document"]][passage["start"] : passage["end"]]
            assert passage["filter.year"] == json.loads(passage["metadata"])["year"]
    done(*command, "--plan")


def test_the_documents_of_rows_and_the_rows_of_documents(tmp_path: Path, done: Done) -> None:
    source = write_beir(tmp_path / "raw", make_documents(40))
    done("import_corpus", "--store", tmp_path / "s", "--source", source, "--part-size", 9, *SPLIT)
    (tmp_path / "gone").write_text("d3\nd5#1\n")
    more = write_beir(tmp_path / "more", [*make_documents(10, seed=4, prefix="e"), {"_id": "d3", "text": "New. Text."}])
    done("import_corpus", "--store", tmp_path / "s", "--source", more, "--append", "--delete", tmp_path / "gone")
    corpus = open_corpus(tmp_path / "s")
    names = [name for part in corpus.parts for name in corpus.table(part)["document"].to_pylist()]
    rows = np.random.default_rng(0).integers(-1, corpus.num_rows, (7, 11))
    assert corpus.documents(rows).tolist() == [["" if row < 0 else names[row] for row in line] for line in rows]
    expected: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        if row not in set(corpus.deleted.tolist()):
            expected.setdefault(name, []).append(row)
    ids = [*expected, "d5#1", "d5", "d1#0", "", "none"]
    random.Random(1).shuffle(ids)
    firsts, ends = corpus.rows_of_documents(ids)
    for id, first, end in zip(ids, firsts.tolist(), ends.tolist(), strict=True):
        assert (list(range(first, end)) if first >= 0 else []) == expected.get(id, [])
        assert (first < 0) == (end < 0) == (id not in expected)
    assert [array.tolist() for array in corpus.rows_of_documents([])] == [[], []]


def test_without_a_split_a_passage_is_a_document(tmp_path: Path, done: Done) -> None:
    source = write_beir(tmp_path / "raw", make_documents(10))
    done("import_corpus", "--store", tmp_path / "s", "--source", source)
    corpus = open_corpus(tmp_path / "s")
    assert not corpus.is_split
    assert "split" not in corpus.generations[0].config
    assert corpus.table(corpus.parts[0]).column_names == ["id", "title", "text", "metadata"]
    assert corpus.num_documents == 10
    assert corpus.documents(np.array([3, -1, 0])).tolist() == ["d3", "", "d0#1"]
    assert [array.tolist() for array in corpus.rows_of_documents(["d3", "x", "d0#1"])] == [[3, -1, 0], [4, -1, 1]]


def test_a_grown_corpus_equals_one_that_is_imported_at_once(tmp_path: Path, done: Done) -> None:
    old, new = make_documents(60), make_documents(25, seed=5, prefix="n")
    changed = {**make_documents(1, seed=6)[0], "_id": "d7"}
    at = ("import_corpus", "--store", tmp_path / "s")
    done(*at, "--source", write_beir(tmp_path / "old", old), *SPLIT, "--filters", "year", "int64")
    (tmp_path / "gone").write_text("d7\nd10#1\nd59\n")
    grow = (*at, "--source", write_beir(tmp_path / "new", [*new, changed]), "--append", "--delete", tmp_path / "gone")
    done(*grow)
    assert "nothing to make" in done(*grow, *SPLIT, "--plan")
    (tmp_path / "more").write_text("n3\n")
    done(*at, "--delete", tmp_path / "more")
    grown = open_corpus(tmp_path / "s")
    assert [generation.config["split"] for generation in grown.generations] == 3 * [{"words": 12, "overlap": 4}]
    final = [each for each in [*old, *new, changed] if each["_id"] not in {"d7", "d10#1", "d59", "n3"}] + [changed]
    fresh = ("import_corpus", "--store", tmp_path / "fresh", "--source", write_beir(tmp_path / "all", final))
    done(*fresh, *SPLIT, "--filters", "year", "int64")
    assert alive_rows(grown) == alive_rows(open_corpus(tmp_path / "fresh"))
    firsts, ends = grown.rows_of_documents(["d7", "d10#1", "d59", "n3"])
    assert firsts.tolist()[1:] == [-1, -1, -1]
    assert {passage.text for passage in grown.passages(range(firsts[0], ends[0]))} == {
        text for _, text, *_ in alive_rows(grown)["d7"]
    }


def test_an_interrupted_import_resumes_to_the_same_bytes(tmp_path: Path, interrupt, done: Done) -> None:
    source = write_beir(tmp_path / "raw", make_documents(80))
    command = ("import_corpus", "--source", source, "--part-size", 15, *SPLIT, "--store")
    done(*command, tmp_path / "whole")
    assert "run the same command again to resume" in interrupt(2, *command, tmp_path / "s").err
    assert corpus_or_none(tmp_path / "s") is None
    done(*command, tmp_path / "s")
    assert files_of(tmp_path / "s") == files_of(tmp_path / "whole")


def corpus_or_none(store: Path) -> Corpus | None:
    try:
        return open_corpus(store)
    except InputError:
        return None


def test_judgements_name_documents(tmp_path: Path, done: Done, refused: Done, documented) -> None:
    documents = make_documents(30)
    queries, judged = make_queries(documents, 6)
    source = write_beir(tmp_path / "raw", documents, queries, {"test": judged})
    at = ("--store", tmp_path / "s", "--source")
    done("import_corpus", *at, source, *SPLIT)
    table = Queries.open(Store(str(tmp_path / "s")), "raw").qrels("test")
    assert [tuple(row.values()) for row in table.to_pylist()] == judged
    more = write_beir(tmp_path / "more", make_documents(5, seed=9, prefix="m"))
    done("import_corpus", *at, more, "--append")
    more_queries = write_lines(tmp_path / "asked.jsonl", [{"query": "which", "relevant": ["m2", "d1"]}])
    done("import_queries", *at, more_queries)
    assert Queries.open(Store(str(tmp_path / "s")), "asked").artifact.inputs["corpus"]["artifact"] == "corpus/g0001"
    wrong = write_lines(tmp_path / "wrong.jsonl", [{"query": "which", "relevant": ["d1#0"]}])
    line = refused("import_queries", *at, wrong)
    assert line.endswith(
        "wrong.jsonl:1: judges document 'd1#0', which is not in the corpus; add the document, remove the line, "
        "or leave such judgements out by --skip-unknown"
    )
    documented("Importing", "a judgement that names a passage of a split corpus", line, 1)


def test_a_part_ends_at_the_text_of_about_as_many_passages(tmp_path: Path, done: Done) -> None:
    long = {"_id": "long", "text": "word " * 4_000}
    documents = [*make_documents(5), long, *make_documents(30, prefix="x")]
    source = write_beir(tmp_path / "raw", documents)
    done("import_corpus", "--store", tmp_path / "s", "--source", source, "--part-size", 40, *SPLIT)
    corpus = open_corpus(tmp_path / "s")
    assert [part.part.facts["documents"] for part in corpus.parts][:1] == [6]
    assert sum(part.part.facts["documents"] for part in corpus.parts[1:]) == 30
    assert all(part.part.rows < 120 for part in corpus.parts[1:])
    firsts, ends = corpus.rows_of_documents(["long"])
    assert ends[0] - firsts[0] == 500  # without sentence borders, each has eight words of its own


def test_pages_of_kilt_are_documents(tmp_path: Path, done: Done) -> None:
    pages = [
        {
            "wikipedia_id": "1",
            "wikipedia_title": "Moon",
            "text": ["Moon\n", "It pulls.\n", "Section::::X\n", "It is far."],
        },
        {"wikipedia_id": "2", "wikipedia_title": "Empty", "text": ["Empty\n"]},
    ]
    source = write_lines(tmp_path / "kilt_knowledgesource.json", pages)
    done("import_corpus", "--store", tmp_path / "s", "--source", source, "--split-words", 4)
    corpus = open_corpus(tmp_path / "s")
    assert [passage[1:] for passage in corpus.passages(range(corpus.num_rows))] == [
        ("1#0", "Moon", "It pulls.", '{"wikipedia_id":"1","paragraphs":[[1,0]]}'),
        ("1#1", "Moon", "It is far.", '{"wikipedia_id":"1","paragraphs":[[3,11]]}'),
    ]


@pytest.mark.parametrize("split", [(3, 0), (5, 2), (40, 0)])
def test_passages_of_kilt_name_the_paragraphs_that_they_have_text_of(tmp_path: Path, done: Done, split) -> None:
    """A word of the page is in the paragraphs that the metadata of its passages name, at the characters they name."""
    source = write_kilt(tmp_path / "raw")["kilt_knowledgesource"]
    words, overlap = split
    done("import_corpus", "--store", tmp_path / "s", "--source", source, "--split-words", words, "--overlap", overlap)
    corpus = open_corpus(tmp_path / "s")
    table = pa.concat_tables([corpus.table(part) for part in corpus.parts]).to_pylist()
    assert any(len(json.loads(row["metadata"])["paragraphs"]) > 1 for row in table)
    for row in table:
        paragraphs = BY_ID[row["document"]]["text"]
        words_of_paragraphs: list[str] = []
        for number, start in json.loads(row["metadata"])["paragraphs"]:
            text = paragraphs[number].rstrip("\n")
            inside = text[max(row["start"] - start, 0) : max(row["end"] - start, 0)]
            assert inside.strip()
            words_of_paragraphs += inside.split()
        assert words_of_paragraphs == row["text"].split()


def test_joined_titles_are_those_of_documents(tmp_path: Path, done: Done) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "collection.tsv").write_text("0\tOne two. Three four.\n1\tFive.\n2\tSix seven. Eight nine.\n")
    (tmp_path / "raw" / "para.title.txt").write_text("0\tA\n2\tC\n")
    out = done("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "raw", "--split-words", 3)
    assert "2 of 3 documents have a title" in out
    corpus = open_corpus(tmp_path / "s")
    titles = [passage.title for passage in corpus.passages(range(corpus.num_rows))]
    assert titles == ["A", "A", "", "C", "C"]


def refuse_lines(tmp_path: Path, refused: Done, rows: Iterable[Mapping], *options: object) -> str:
    source = write_lines(tmp_path / "c.jsonl", rows)
    line = refused("import_corpus", "--store", tmp_path / "s", "--source", source, *SPLIT, *options)
    assert Store(str(tmp_path / "s")).keys() == []
    return line


def test_an_id_that_comes_twice_is_refused_with_both_lines(tmp_path: Path, done: Done, refused, documented) -> None:
    long = "The one two three four five six. " * 10
    rows = [{"id": "a", "text": long}, {"id": "a#0", "text": long}, {"id": "b", "text": "x"}, {"id": "a", "text": "y"}]
    line = refuse_lines(tmp_path, refused, rows)
    assert line.endswith(
        "c.jsonl:4: id 'a' comes a second time, first in "
        + f"{tmp_path}/c.jsonl:1; rename or remove one and import again"
    )
    documented("Importing", "a document whose id comes twice", line, 1)
    next_to_each_other = [{"id": "b", "text": long}, {"id": "a", "text": "y"}, {"id": "a", "text": "y"}]
    assert "c.jsonl:3: id 'a' comes a second time, first in" in refuse_lines(tmp_path, refused, next_to_each_other)
    write_lines(tmp_path / "c.jsonl", rows[:3])
    at = ("import_corpus", "--store", tmp_path / "s", "--source")
    done(*at, tmp_path / "c.jsonl", *SPLIT)
    again = write_lines(tmp_path / "again.jsonl", [{"id": "c", "text": long}, {"id": "b", "text": "z"}])
    assert "again.jsonl:2: id 'b' is in the corpus already, as row" in refused(*at, again, "--append")


def test_what_cannot_be_split_is_refused(tmp_path: Path, done: Done, refused, documented) -> None:
    line = refuse_lines(tmp_path, refused, [{"id": "a", "text": "x"}, {"id": "b", "title": " ", "text": "\n"}])
    assert "c.jsonl:2: found document 'b' without text, expected a text to split, or a title" in line
    documented("Importing", "a document without text and title that is to be split", line, 1)
    rows = [{"id": "a", "title": "t" * 500_000, "text": "word " * 5_000}]
    line = refuse_lines(tmp_path, refused, rows)
    assert "bytes of text and metadata in the part that begins in" in line
    documented("Importing", "a long title that is repeated in each passage of a document", line, 1)
    write_lines(tmp_path / "c.jsonl", [{"id": "a", "text": "x"}, {"id": "t", "title": "Title", "text": ""}])
    done("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "c.jsonl", *SPLIT)
    assert [passage[1:4] for passage in open_corpus(tmp_path / "s").passages([0, 1])] == [
        ("a#0", "", "x"),
        ("t#0", "Title", ""),
    ]


BAD_OPTIONS = {
    "--overlap without --split-words": (("--overlap", 3), "--overlap 3: found no --split-words"),
    "--overlap that is not less than --split-words": (
        ("--split-words", 5, "--overlap", 5),
        "--overlap 5: expected 0 to 4 words, fewer than --split-words 5",
    ),
    "--split-words 0": (("--split-words", 0), "--split-words 0: expected at least 1"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, refused, documented, case: str) -> None:
    options, expected = BAD_OPTIONS[case]
    source = write_beir(tmp_path / "raw", make_documents(3))
    line = refused("import_corpus", "--store", tmp_path / "s", "--source", source, *options)
    assert expected in line
    assert not (tmp_path / "s").exists()
    documented("Importing", case, line, 1)


def test_a_corpus_keeps_its_split(tmp_path: Path, done: Done, refused, documented) -> None:
    source = write_beir(tmp_path / "raw", make_documents(8))
    more = write_beir(tmp_path / "more", make_documents(2, prefix="m"))
    split = ("import_corpus", "--store", tmp_path / "split", "--source")
    whole = ("import_corpus", "--store", tmp_path / "whole", "--source")
    done(*split, source, *SPLIT)
    done(*whole, source)
    before = files_of(tmp_path / "split"), files_of(tmp_path / "whole")
    line = refused(*split, more, "--append", "--split-words", 20)
    assert "--split-words 20, --overlap 0: " in line
    assert "was imported with --split-words 12, --overlap 4; leave the options out, or import into another" in line
    documented("Importing", "--append with another --split-words than the first import", line, 1)
    line = refused(*whole, more, "--append", *SPLIT)
    assert "was imported without --split-words; leave the options out, or import into another store" in line
    documented("Importing", "--append with --split-words to a corpus that is not split", line, 1)
    line = refused(*whole, source, *SPLIT)
    assert "was imported otherwise (--split-words unset, now 12, --overlap unset, now 4); append to it" in line
    documented("Importing", "--split-words for a corpus that was imported without it", line, 1)
    line = refused(*split, source)
    assert "was imported otherwise (--overlap 4, now unset, --split-words 12, now unset)" in line
    documented("Importing", "no --split-words for a corpus that was imported with it", line, 1)
    (tmp_path / "ids").write_text("d1\nd1#0\n")
    line = refused("import_corpus", "--store", tmp_path / "split", "--delete", tmp_path / "ids")
    assert "ids:2: id 'd1#0' is not in the corpus" in line
    documented("Importing", "--delete of a passage of a split corpus", line, 1)
    assert (files_of(tmp_path / "split"), files_of(tmp_path / "whole")) == before


def test_plan_tells_the_passages_of_a_split(tmp_path: Path, done: Done) -> None:
    source = write_beir(tmp_path / "raw", [{"_id": "a", "text": "words " * 6_000}])
    out = done("import_corpus", "--store", tmp_path / "s", "--source", source, *SPLIT, "--plan")
    assert "split    about 788 passages of at most 12 words" in out
    assert not (tmp_path / "s").exists()
