"""Importing: every format, the same bytes from any run, generations, and what a bad source leaves behind: nothing."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from samples import files_of, make_passages, make_queries, write_beir, write_lines

from riptide.indexing.corpus import ids, importing
from riptide.indexing.corpus.corpus import Corpus, Passage
from riptide.indexing.formats import chunking
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.store.store import Store

Done = Callable[..., str]
LINES = [f'{{"_id": "p{number}", "text": "some text"}}' for number in range(10)]


def passages_of(store: Path) -> list[Passage]:
    """All passages, deleted ones too, in the order of rows."""
    corpus = Corpus.open(Store(str(store)))
    return corpus.passages(range(corpus.num_rows))


def alive_of(store: Path) -> list[str]:
    corpus = Corpus.open(Store(str(store)))
    gone = set(corpus.deleted.tolist())
    return [passage.id for passage in corpus.passages(range(corpus.num_rows)) if passage.row not in gone]


def corpus_of(path: Path, lines: list[str]) -> Path:
    """A BEIR folder whose corpus has these lines."""
    path.mkdir(exist_ok=True)
    (path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    return path


def test_a_beir_folder_with_its_queries_judgements_and_metadata(tmp_path: Path, done: Done) -> None:
    passages = make_passages(25)
    queries, judged = make_queries(passages, 6)
    queries[0]["metadata"] = {"kind": "odd"}
    source = write_beir(tmp_path / "raw.v1", passages, queries, {"test": judged[:4], "dev": judged[4:]})
    out = done("import_corpus", "--store", tmp_path / "s", "--source", source, "--part-size", 10)
    assert "25 passages; 3 parts" in out
    assert "6 queries (dev, test)" in out
    found = passages_of(tmp_path / "s")
    assert [(p.row, p.id, p.title, p.text, json.loads(p.metadata_json)) for p in found] == [
        (row, p["_id"], p["title"], p["text"], p["metadata"]) for row, p in enumerate(passages)
    ]
    kept = Queries.open(Store(str(tmp_path / "s")), "raw.v1")
    assert kept.split("all") == ([q["_id"] for q in queries], [q["text"] for q in queries])
    assert json.loads(kept.table["metadata"][0].as_py()) == {"kind": "odd"}
    for split, expected in (("test", judged[:4]), ("dev", judged[4:])):
        assert [tuple(row.values()) for row in kept.qrels(split).to_pylist()] == expected
        assert kept.split(split).ids == [query for query, _, _ in expected]


def test_an_msmarco_folder(tmp_path: Path, done: Done) -> None:
    raw = tmp_path / "marco"
    raw.mkdir()
    (raw / "collection.tsv").write_text('7\tfirst "passage\n8\tsecond\n')
    (raw / "queries.dev.tsv").write_text("1\twho?\n2\twhy?\n")
    (raw / "qrels.dev.tsv").write_text("1\t0\t8\t1\n")
    done("import_corpus", "--store", tmp_path / "s", "--source", raw)
    assert passages_of(tmp_path / "s") == [(0, "7", "", 'first "passage', ""), (1, "8", "", "second", "")]
    queries = Queries.open(Store(str(tmp_path / "s")))
    assert queries.split("dev") == (["1"], ["who?"])
    assert queries.split("all").ids == ["1", "2"]


def test_dpr_kilt_and_parquet(tmp_path: Path, done: Done) -> None:
    dpr = tmp_path / "psgs_w100.tsv"
    dpr.write_text('id\ttext\ttitle\n1\t"a ""quoted"" text"\tTitle\n')
    done("import_corpus", "--store", tmp_path / "dpr", "--source", dpr)
    assert passages_of(tmp_path / "dpr") == [(0, "1", "Title", 'a "quoted" text', "")]

    kilt = tmp_path / "pages.json.gz"
    page = {"wikipedia_id": "12", "wikipedia_title": "Anarchism", "text": ["Anarchism\n", "First.\n", "Second.\n"]}
    kilt.write_bytes(gzip.compress(json.dumps(page).encode() + b"\n"))
    done("import_corpus", "--store", tmp_path / "kilt", "--source", kilt)
    assert [(p.id, p.title, p.text) for p in passages_of(tmp_path / "kilt")] == [
        ("12-1", "Anarchism", "First."),
        ("12-2", "Anarchism", "Second."),
    ]

    table = pa.table({"id": ["a", "b", "c"], "text": ["x", "y", "z"], "year": [1, None, 3]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=2)
    source = ("--source", tmp_path / "rows.parquet", "--part-size", 2, "--filters", "year", "int64")
    done("import_corpus", "--store", tmp_path / "parquet", *source)
    assert passages_of(tmp_path / "parquet") == [
        (0, "a", "", "x", '{"year":1}'),
        (1, "b", "", "y", ""),
        (2, "c", "", "z", '{"year":3}'),
    ]
    corpus = Corpus.open(Store(str(tmp_path / "parquet")))
    assert [corpus.table(part)["filter.year"].to_pylist() for part in corpus.parts] == [[1, None], [3]]


def test_unicode_oddities_and_a_passage_of_a_megabyte_pass_unharmed(tmp_path: Path, done: Done) -> None:
    odd = ["\u2028", "\u2029", "\x85", "\x00", "\x0b", "\x1e", "\ufeff", "e\u0301", "\u202eشلوم", "👩\u200d🚀", "𝔘"]
    passages = [{"_id": f"{mark} id", "title": mark, "text": f"a{mark}b\r\n{mark}"} for mark in odd]
    draw = random.Random(0)
    large = "".join(draw.choices([*odd, "x", "\n"], k=600_000))
    passages.append({"_id": "large", "title": "t" * 200_000, "text": large})
    assert len(large.encode()) > 1_000_000
    source = write_beir(tmp_path / "odd", passages)
    done("import_corpus", "--store", tmp_path / "s", "--source", source, "--part-size", 5)
    found = passages_of(tmp_path / "s")
    assert [(p.id, p.title, p.text) for p in found] == [(p["_id"], p["title"], p["text"]) for p in passages]
    corpus = Corpus.open(Store(str(tmp_path / "s")))
    assert corpus.rows_of([p["_id"] for p in passages]).tolist() == list(range(len(passages)))


def test_two_imports_of_the_same_source_are_the_same_bytes(tmp_path: Path, world, done: Done) -> None:
    done("import_corpus", "--store", tmp_path / "again", "--source", world.source, "--part-size", 60)
    again, first = files_of(tmp_path / "again"), files_of(world.store)
    assert again
    assert again == {name: data for name, data in first.items() if name.startswith(("corpus/", "queries/"))}


def test_an_interrupted_import_shows_nothing_and_resumes_to_the_same_bytes(
    tmp_path: Path, world, interrupt, done: Done
) -> None:
    command = ("import_corpus", "--store", tmp_path / "s", "--source", world.source, "--part-size", 60)
    outcome = interrupt(2, *command)
    assert outcome.err == "error: interrupted; run the same command again to resume\n"
    store = Store(str(tmp_path / "s"))
    assert (store.keys(), store.incomplete_keys()) == ([], ["corpus/g0000"])
    committed = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "s/corpus/g0000").glob("part-*.arrow")}
    assert len(committed) == 2
    done(*command)
    assert files_of(tmp_path / "s") == {
        name: data for name, data in files_of(world.store).items() if name.startswith(("corpus/", "queries/"))
    }
    for name, changed in committed.items():
        assert (tmp_path / "s/corpus/g0000" / name).stat().st_mtime_ns == changed


def test_a_part_of_long_passages_ends_at_a_number_of_bytes(
    tmp_path: Path, world, job, done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same parts from any run; what one run committed another one keeps; and short passages are cut as ever."""
    passages = [{"_id": f"p{n}", "text": "word " * (2_000 if n < 12 else 20)} for n in range(40)]
    source = write_beir(tmp_path / "raw", passages)
    command = ("import_corpus", "--source", source, "--part-size", 10, "--store")
    done(*command, tmp_path / "by rows")
    monkeypatch.setattr(chunking, "CHUNK_BYTES", 30_000)
    assert "40 passages; 7 parts" in done(*command, tmp_path / "by bytes")
    corpus = Corpus.open(Store(str(tmp_path / "by bytes")))
    assert [part.part.rows for part in corpus.parts] == [3, 3, 3, 3, 10, 10, 8]
    assert [p.id for p in passages_of(tmp_path / "by bytes")] == [p["_id"] for p in passages]
    done(*command, tmp_path / "again")
    made = files_of(tmp_path / "by bytes")
    assert files_of(tmp_path / "again") == made
    for name in [*(tmp_path / "again/corpus/g0000").glob("*-00001*"), tmp_path / "again/corpus/g0000/manifest.json"]:
        name.unlink()
    done(*command, tmp_path / "again")
    assert files_of(tmp_path / "again") == made
    monkeypatch.setattr(chunking, "CHUNK_BYTES", 40_000)
    done("import_corpus", "--store", tmp_path / "short", "--source", world.source, "--part-size", 60)
    assert files_of(tmp_path / "short") == {
        name: data for name, data in files_of(world.store).items() if name.startswith(("corpus/", "queries/"))
    }


def test_parts_that_were_cut_elsewhere_are_refused(
    tmp_path: Path, job, refused, done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet too, whose rows the driver does not read: parts begun under another bound would overlap the new ones."""
    pq.write_table(pa.table({"id": [*"abcdefghij"], "text": ["x" * 100] * 10}), tmp_path / "x.parquet")
    command = ("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "x.parquet", "--part-size", 5)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(importing, "merge_ids", killed)
        assert job(*command).status == 130
    monkeypatch.setattr(chunking, "CHUNK_BYTES", 30)
    assert "x.parquet:1: changed since part-00000 was made; import again to start from the" in refused(*command)
    done(*command)
    assert [p.id for p in passages_of(tmp_path / "s")] == [*"abcdefghij"]


def test_the_records_are_read_as_often_for_many_buckets_of_ids_as_for_one(
    tmp_path: Path, done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_beir(tmp_path / "raw", make_passages(60))
    reads: list[str] = []
    original = Draft.committed_parts

    def committed(draft: Draft) -> dict[str, ArtifactPart]:
        reads.append(draft.key)
        return original(draft)

    monkeypatch.setattr(Draft, "committed_parts", committed)
    counted = []
    for rows, buckets in ((1 << 24, 1), (4, 16)):
        monkeypatch.setattr(ids, "BUCKET_ROWS", rows)
        reads.clear()
        done("import_corpus", "--store", tmp_path / str(rows), "--source", source, "--part-size", 10)
        assert len(list((tmp_path / str(rows) / "corpus/g0000").glob("ids-*.npy"))) == buckets
        counted.append(len(reads))
    assert counted[0] == counted[1]


def test_a_finished_import_is_found_done(world, done: Done, no_work) -> None:
    no_work()
    before = {path: path.stat().st_mtime_ns for path in world.store.rglob("*") if path.is_file()}
    out = done("import_corpus", "--store", world.store, "--source", world.source, "--part-size", 60)
    assert "240 passages; 4 parts" in out
    assert "40 queries (test, train)" in out
    assert {path: path.stat().st_mtime_ns for path in world.store.rglob("*") if path.is_file()} == before


def test_other_options_and_sources_are_refused_with_both_sides_named(tmp_path: Path, world, refused) -> None:
    before = files_of(world.store)
    line = refused("import_corpus", "--store", world.store, "--source", world.source, "--part-size", 50)
    assert f"{world.store}/corpus/g0000" in line
    assert "--part-size 60, now 50" in line
    source = write_beir(tmp_path / "other", make_passages(5))
    assert "bytes" in refused("import_corpus", "--store", world.store, "--source", source, "--part-size", 60)
    assert files_of(world.store) == before


def test_limit_is_of_the_fingerprint_and_leaves_out_what_is_judged_beyond_it(
    tmp_path: Path, world, done: Done, refused
) -> None:
    prints = set()
    for limit in (60, 70):
        store = tmp_path / str(limit)
        done("import_corpus", "--store", store, "--source", world.source, "--part-size", 60, "--limit", limit)
        assert [p.id for p in passages_of(store)] == [f"p{n}" for n in range(limit)]
        prints.add(Store(str(store)).open("corpus", "g0000").fingerprint)
        judged = Queries.open(Store(str(store))).qrels("test")["corpus_id"].to_pylist()
        assert judged == [p for _, p, _ in world.judged[:30] if int(p[1:]) < limit]
        assert judged
    assert len(prints | {Store(str(world.store)).open("corpus", "g0000").fingerprint}) == 3
    line = refused("import_corpus", "--store", tmp_path / "70", "--source", world.source, "--part-size", 60)
    assert "limit 70, now unset" in line


def test_plan_reads_the_source_and_writes_nothing(tmp_path: Path, world, done: Done) -> None:
    out = done("import_corpus", "--store", tmp_path / "s", "--source", world.source, "--plan")
    assert "beir: 1 corpus files" in out
    assert "splits: test, train" in out
    assert not (tmp_path / "s").exists()
    before = files_of(world.store)
    (tmp_path / "ids").write_text("p1\n")
    done("import_corpus", "--store", world.store, "--delete", tmp_path / "ids", "--plan")
    assert files_of(world.store) == before


def grown(tmp_path: Path, done: Done) -> Path:
    """A store of p0 … p9 in two parts."""
    store = tmp_path / "grown"
    done("import_corpus", "--store", store, "--source", corpus_of(tmp_path / "first", LINES), "--part-size", 5)
    return store


def test_generations_add_delete_and_replace(tmp_path: Path, done: Done) -> None:
    store = grown(tmp_path, done)
    first = files_of(store)
    more = corpus_of(tmp_path / "more", [f'{{"_id": "new{n}", "text": "new {n}"}}' for n in range(7)])
    append = ("import_corpus", "--store", store, "--source", more, "--part-size", 5, "--append")
    assert "17 passages; 4 parts" in done(*append)
    (tmp_path / "gone").write_text("p3\r\nnew0\np9\n")
    delete = ("import_corpus", "--store", store, "--delete", tmp_path / "gone")
    assert "14 passages, without 3 deleted passages; 4 parts" in done(*delete)
    anew = corpus_of(tmp_path / "anew", ['{"_id": "p4", "text": "replaced"}', '{"_id": "p3", "text": "is back"}'])
    (tmp_path / "old").write_text("p4\n")
    replace = ("import_corpus", "--store", store, "--source", anew, "--append", "--delete", tmp_path / "old")
    assert "15 passages, without 4 deleted passages; 5 parts" in done(*replace)

    corpus = Corpus.open(Store(str(store)))
    assert corpus.deleted.tolist() == [3, 4, 9, 10]  # rows are never given to another passage
    assert alive_of(store) == [
        *["p0", "p1", "p2", "p5", "p6", "p7", "p8", "new1", "new2", "new3", "new4", "new5", "new6", "p4", "p3"]
    ]
    assert corpus.rows_of(["p4", "p3", "p9", "new0", "new6", "p0"]).tolist() == [17, 18, -1, -1, 16, 0]
    assert corpus.passages([17])[0].text == "replaced"
    assert {name: data for name, data in files_of(store).items() if name in first} == first  # the past is untouched
    before = files_of(store)
    done(*replace)  # found done
    assert files_of(store) == before


def test_the_command_that_made_the_first_generation_is_still_found_done_after_growth(
    tmp_path: Path, done: Done
) -> None:
    store = grown(tmp_path, done)
    more = corpus_of(tmp_path / "more", ['{"_id": "new", "text": "new"}'])
    done("import_corpus", "--store", store, "--source", more, "--append")
    before = files_of(store)
    done("import_corpus", "--store", store, "--source", tmp_path / "first", "--part-size", 5)
    assert files_of(store) == before


def test_queries_of_an_appended_folder_become_a_set_of_their_own(tmp_path: Path, world, done: Done) -> None:
    passages = make_passages(12, seed=7, prefix="n")
    queries, judged = make_queries(passages, 3)
    source = write_beir(tmp_path / "tiny", passages, queries, {"test": judged})
    out = done("import_corpus", "--store", world.store, "--source", source, "--append")
    assert f"{world.store}/queries/tiny-g0001: 3 queries (test)" in out
    assert Store(str(world.store)).names("queries") == ["tiny", "tiny-g0001"]


def test_an_id_of_an_earlier_generation_is_refused_unless_it_is_deleted_with_it(
    tmp_path: Path, done: Done, refused
) -> None:
    store = grown(tmp_path, done)
    twice = corpus_of(tmp_path / "twice", ['{"_id": "x", "text": "x"}', '{"_id": "p6", "text": "again"}'])
    line = refused("import_corpus", "--store", store, "--source", twice, "--append")
    assert f"{twice}/corpus.jsonl:2: id 'p6' is in the corpus already, as row 6; delete it" in line
    assert Store(str(store)).keys() == ["corpus/g0000"]
    (tmp_path / "ids").write_text("p6\n")
    done("import_corpus", "--store", store, "--source", twice, "--append", "--delete", tmp_path / "ids")
    assert Corpus.open(Store(str(store))).rows_of(["p6"]).tolist() == [11]


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("--sync with --append", ["--append"]),
        ("--sync with --skip-invalid", ["--skip-invalid"]),
        ("--sync with a source that lacks most of the corpus", []),
        ("--max-removed as a percentage", ["--max-removed", 50]),
        ("--sync with a source in which an id comes twice", ["--max-removed", 1]),
    ],
)
def test_a_sync_that_would_delete_by_mistake_is_refused(
    tmp_path: Path, done: Done, refused, documented: Callable[..., None], case: str, options: list[str]
) -> None:
    store = grown(tmp_path, done)
    source = corpus_of(tmp_path / "part", [LINES[2], LINES[2]] if "twice" in case else LINES[:3])
    line = refused("import_corpus", "--store", store, "--source", source, "--sync", *options)
    documented("Importing", case, line, 1)
    assert Store(str(store)).keys() == ["corpus/g0000"]


def test_a_sync_needs_a_source_and_imports_queries_once(tmp_path: Path, world, done: Done, refused) -> None:
    line = refused("import_corpus", "--store", world.store, "--sync", "--filters", "year", "int64")
    assert "--sync: expected --source PATH" in line
    assert "--max-removed 0.1: expected --sync" in refused(
        "import_corpus", "--store", world.store, "--source", world.source, "--max-removed", 0.1
    )
    passages = [*world.passages, *make_passages(2, seed=7, prefix="n")]
    source = write_beir(tmp_path / "tiny", passages, world.queries[:3], {"test": world.judged[:1]})
    sync = ("import_corpus", "--store", world.store, "--source", source, "--sync", "--hold-out", 1)
    done(*sync)
    assert Store(str(world.store)).names("queries") == ["tiny"]
    first = ("import_corpus", "--store", tmp_path / "new", "--source", source, "--sync")
    done(*first)
    shutil.rmtree(tmp_path / "new/queries")  # as if the command had been interrupted before it made them
    done(*first)
    assert Store(str(tmp_path / "new")).names("queries") == ["tiny"]


def test_only_known_ids_can_be_deleted_and_only_once(tmp_path: Path, done: Done, refused) -> None:
    store = grown(tmp_path, done)
    ids = tmp_path / "ids"
    ids.write_text("p1\nnobody\nnoone\n")
    line = refused("import_corpus", "--store", store, "--delete", ids)
    assert f"{ids}:2: id 'nobody' is not in the corpus (or deleted already), nor are 1 more; remove the line" in line
    assert Store(str(store)).keys() == ["corpus/g0000"]
    assert Store(str(store)).incomplete_keys() == []
    ids.write_text("p1\n")
    done("import_corpus", "--store", store, "--delete", ids)
    again = tmp_path / "again"
    again.write_text("p2\np1\n")
    assert f"{again}:2: id 'p1' is not in the corpus" in refused("import_corpus", "--store", store, "--delete", again)
    assert len(alive_of(store)) == 9


def test_an_empty_or_missing_file_of_ids_is_refused(tmp_path: Path, done: Done, refused) -> None:
    store = grown(tmp_path, done)
    (tmp_path / "ids").write_text("\n")
    assert f"{tmp_path}/ids" in refused("import_corpus", "--store", store, "--delete", tmp_path / "ids")
    assert f"{tmp_path}/none" in refused("import_corpus", "--store", store, "--delete", tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"p1\n\xff\n")
    assert f"{tmp_path}/bytes:2" in refused("import_corpus", "--store", store, "--delete", tmp_path / "bytes")
    assert Store(str(store)).keys() == ["corpus/g0000"]
    assert len(Store(str(store)).incomplete_keys()) == 0


BAD_LINES = {
    "no json": ("{no json", r"corpus\.jsonl:4: found no valid JSON"),
    "a list": ("[1]", r"corpus\.jsonl:4: found JSON '\[1\]', expected a JSON object"),
    "no id": ('{"text": "x"}', r"corpus\.jsonl:4: found no _id"),
    "an empty id": ('{"_id": "", "text": "x"}', r"corpus\.jsonl:4: found"),
    "no text": ('{"_id": "x"}', r"corpus\.jsonl:4: found no text"),
    "a text that is a number": ('{"_id": "x", "text": 5}', r"corpus\.jsonl:4: found text 5"),
    "an empty line": ("", r"corpus\.jsonl:4: found an empty line"),
    "an id of the same part": (
        '{"_id": "p2", "text": ""}',
        r"jsonl:4: id 'p2' comes a second time, first in \S*jsonl:3;",
    ),
    "an id of another part": (
        '{"_id": "p9", "text": ""}',
        r"jsonl:11: id 'p9' comes a second time, first in \S*jsonl:4;",
    ),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_named_and_nothing_becomes_visible(tmp_path: Path, refused, kind: str) -> None:
    import re

    bad, pattern = BAD_LINES[kind]
    source = corpus_of(tmp_path / "raw", [*LINES[:3], bad, *LINES[3:]])
    line = refused("import_corpus", "--store", tmp_path / "s", "--source", source, "--part-size", 5)
    assert re.search(pattern, line), line
    assert str(source) in line
    assert Store(str(tmp_path / "s")).keys() == []


def test_a_bad_addition_leaves_the_corpus_as_it_was(tmp_path: Path, done: Done, refused) -> None:
    store = grown(tmp_path, done)
    first = files_of(store)
    bad = corpus_of(tmp_path / "bad", ['{"_id": "new", "text": "x"}', "nonsense"])
    assert "bad/corpus.jsonl:2: found no valid JSON" in refused(
        "import_corpus", "--store", store, "--source", bad, "--append"
    )
    assert Store(str(store)).keys() == ["corpus/g0000"]
    assert {name: data for name, data in files_of(store).items() if name in first} == first
    assert len(alive_of(store)) == 10


def test_broken_and_empty_sources_are_named(tmp_path: Path, refused) -> None:
    store = tmp_path / "s"

    def line(source: Path) -> str:
        return refused("import_corpus", "--store", store, "--source", source)

    whole = gzip.compress("\n".join(LINES * 50).encode())
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/corpus.jsonl.gz").write_bytes(whole[:-20])
    assert f"{tmp_path}/cut/corpus.jsonl.gz: found a gzip stream that breaks off" in line(tmp_path / "cut")
    for name, content in (("empty", ""), ("blank", "\n\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "corpus.jsonl").write_text(content)
        refused("import_corpus", "--store", tmp_path / name / "s", "--source", tmp_path / name)
    assert "found no rows" in refused("import_corpus", "--store", tmp_path / "t", "--source", tmp_path / "empty")
    assert f"{tmp_path}/nowhere: found nothing" in line(tmp_path / "nowhere")
    (tmp_path / "nothing").mkdir()
    assert "found no corpus" in line(tmp_path / "nothing")
    assert Store(str(store)).keys() == []


@pytest.mark.parametrize(
    ("judgement", "expected", "imported"),
    [
        (("q0", "nobody", 1), "test.tsv:4: judges passage 'nobody', which is not in the corpus", ["corpus/g0000"]),
        (("qqq", "p1", 1), "test.tsv:4: judges query 'qqq', which is not in the query file", []),
        (("q0", "p1", "high"), "test.tsv:4: found score 'high'", []),
    ],
)
def test_bad_judgements_are_named_and_mending_them_is_all_it_takes(
    tmp_path: Path, done: Done, refused, judgement: tuple, expected: str, imported: list[str]
) -> None:
    """What needs no corpus is checked before the corpus is imported."""
    passages = make_passages(20)
    queries, judged = make_queries(passages, 5)
    source = write_beir(tmp_path / "raw", passages, queries, {"test": [*judged[:2], judgement, *judged[2:]]})
    command = ("import_corpus", "--store", tmp_path / "s", "--source", source)
    assert expected in refused(*command)
    assert Store(str(tmp_path / "s")).keys() == imported
    write_beir(source, passages, queries, {"test": judged})
    done(*command)
    assert Store(str(tmp_path / "s")).keys() == ["corpus/g0000", "queries/raw"]


def test_bad_queries_are_named_and_mending_them_is_all_it_takes(tmp_path: Path, done: Done, refused) -> None:
    passages = make_passages(20)
    queries, judged = make_queries(passages, 5)
    source = write_beir(tmp_path / "raw", passages, queries, {"test": judged})
    command = ("import_corpus", "--store", tmp_path / "s", "--source", source)
    write_lines(source / "queries.jsonl", [*queries[:3], queries[1], *queries[3:]])
    assert "query id 'q1' comes a second time" in refused(*command)
    write_lines(source / "queries.jsonl", [*queries[:3], {"_id": "q"}, *queries[3:]])
    assert "queries.jsonl:4: found no text" in refused(*command)
    assert Store(str(tmp_path / "s")).keys() == []
    write_lines(source / "queries.jsonl", queries)
    done(*command)
    assert Store(str(tmp_path / "s")).keys() == ["corpus/g0000", "queries/raw"]


def test_options_that_make_no_sense_are_refused(tmp_path: Path, world, refused) -> None:
    at = ("import_corpus", "--store", world.store)
    before = files_of(world.store)
    (tmp_path / "ids").write_text("p1\n")
    assert "--source PATH" in refused(*at)
    assert "add --append" in refused(*at, "--source", world.source, "--delete", tmp_path / "ids")
    assert "--part-size 0" in refused(*at, "--source", world.source, "--part-size", 0)
    assert "filter year: found type 'integer'" in refused(
        "import_corpus", "--store", tmp_path / "f", "--source", world.source, "--filters", "year", "integer"
    )
    fresh = ("import_corpus", "--store", tmp_path / "fresh")
    assert "has no corpus yet" in refused(*fresh, "--source", world.source, "--append")
    assert "has no corpus yet" in refused(*fresh, "--delete", tmp_path / "ids")
    assert files_of(world.store) == before
    assert not (tmp_path / "fresh").exists()


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path: Path, done: Done, refused) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", small], capture_output=True).returncode:
        pytest.fail("the test mounts a small tmpfs, which needs root")
    try:
        passages = [{"_id": f"p{n}", "text": "word " * 20_000} for n in range(8)]
        source = write_beir(tmp_path / "raw", passages)
        command = ("import_corpus", "--store", small / "s", "--source", source, "--part-size", 1)
        line = refused(*command)
        assert "No space left on device: free some space and run the same command again" in line
        assert str(small) in line
        store = Store(str(small / "s"))
        assert store.keys() == []
        assert len(list((small / "s/.tmp").iterdir())) <= (os.cpu_count() or 1)  # of tasks ended while they wrote
        records = [json.loads(path.read_text()) for path in (small / "s").rglob("part-*.json")]
        files = {path.name: path for path in (small / "s").rglob("part-*.arrow")}  # one may lack its record yet
        kept = {record["file"]: files[record["file"]].stat().st_mtime_ns for record in records}
        assert kept
        subprocess.run(["mount", "-o", "remount,size=4m", small], check=True)
        done(*command)
        assert [p.text for p in passages_of(small / "s")] == [p["text"] for p in passages]
        now = {path.name: path.stat().st_mtime_ns for path in (small / "s").rglob("part-*.arrow")}
        assert {name: now.get(name) for name in kept} == kept
    finally:
        subprocess.run(["umount", "-l", small], check=True)
