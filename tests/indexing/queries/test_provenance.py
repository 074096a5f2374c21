"""Judgements by provenance: those of a plain function over the task files and the texts of passages."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from kilt_files import BY_ID, PAGES, TASKS, at, on_page, task, write_jsonl

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.importing import ImportCorpusWork, ImportOptions
from riptide.indexing.files.splitting import DocumentSplit
from riptide.indexing.formats.parse import read_queries
from riptide.indexing.formats.sources import detect_query_source, detect_source
from riptide.indexing.queries.judged_pairs import read_judged_pairs
from riptide.indexing.queries.provenance import PAGE, SPAN, Judgements, judge_passages
from riptide.indexing.queries.queries import Queries, QueryImportOptions, import_queries
from riptide.indexing.store.store import Store
from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.work import run_work

SPLITS = {"paragraphs": None, "6": DocumentSplit(6), "9-4": DocumentSplit(9, 4), "200": DocumentSplit(200)}


def import_corpus(
    folder: Path, rows: list[dict] | None, split: DocumentSplit | None = None, delete: str = ""
) -> Corpus:
    """Imports pages of KILT or other passages, and deletes those whose ids are given, separated by spaces."""
    store, ids = Store(str(folder / "s")), folder / "ids"
    source = None if rows is None else detect_source(str(write_jsonl(folder / "c.json", rows)))
    ids.write_text("\n".join(delete.split()))
    options = {"append": rows is not None and bool(delete), "delete": str(ids) if delete else None}
    run_work(store, ImportCorpusWork(store, source, ImportOptions(split=split), **options), LocalRunner(cores=1))
    return Corpus.open(store)


def read_tasks(folder: Path, tasks: list[dict]) -> pa.Table:
    return read_queries(detect_query_source(str(write_jsonl(folder / "nq-train-kilt.jsonl", tasks))))[0]


def judge(corpus: Corpus, queries: pa.Table, level: str = SPAN, *, partial: bool = False) -> Judgements:
    return judge_passages("nq.jsonl", queries, corpus, level, partial=partial)


def judged_texts(corpus: Corpus, made: Judgements) -> dict[str, set[tuple[str, str]]]:
    """Returns the passages of each query's judgements as pairs of document and text."""
    texts: dict[str, set[tuple[str, str]]] = {}
    for line in made.qrels.to_pylist():
        assert line["score"] == 1
        [first], [end] = corpus.rows_of_documents([line["corpus_id"]])
        for row in line.get("rows") or range(first, end):
            assert first <= row < end
            passage = corpus.passages([row])[0]
            texts.setdefault(line["query_id"], set()).add((line["corpus_id"], passage.text))
    return texts


@functools.cache
def characters_of(corpus: Corpus, page: str) -> list[tuple[str, str, set[tuple[int, int]]]]:
    """Returns the document, the text and the characters (paragraph, character) of each passage of a page.

    Passages are found again in the paragraphs by their words, in order, regardless of their metadata.
    """
    words = [
        (number, start, word)
        for number, paragraph in enumerate(BY_ID[page]["text"])
        if number and not paragraph.startswith("Section::::")
        for start, word in _words(paragraph)
    ]
    passages = []
    rows = range(corpus.num_rows)
    for passage, document in zip(corpus.passages(rows), corpus.documents(np.array(rows)), strict=True):
        if passage.metadata["wikipedia_id"] == page:
            own = passage.text.split()
            [place] = [n for n in range(len(words)) if [word for _, _, word in words[n : n + len(own)]] == own]
            chosen = words[place : place + len(own)]
            inside = {(number, start + n) for number, start, word in chosen for n in range(len(word))}
            passages.append((document, passage.text, inside))
    return passages


def _words(text: str) -> list[tuple[int, str]]:
    words, start = [], 0
    for word in text.split():
        start = text.index(word, start)
        words.append((start, word))
        start += len(word)
    return words


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_random_spans_are_judged_as_by_a_plain_function(tmp_path: Path, split: DocumentSplit | None) -> None:
    """Spans start and end at words. The share of a passage is counted in characters of words."""
    draw = random.Random(4)
    corpus = import_corpus(tmp_path, PAGES, split)
    tasks, expected = [], {}
    while len(tasks) < 120:
        page = draw.choice(PAGES)["wikipedia_id"]
        passages = characters_of(corpus, page)
        first, last = sorted(draw.sample(sorted(set().union(*(inside for _, _, inside in passages))), 2))
        span = {"start_paragraph_id": first[0], "start_character": first[1]}
        span |= {"end_paragraph_id": last[0], "end_character": last[1] + 1}
        id = f"q{len(tasks)}"
        tasks.append(task(id, "x", [{"provenance": [on_page(page) | span]}]))
        shared = [(passage[:2], sum(first <= place <= last for place in passage[2])) for passage in passages]
        expected[id] = (dict(shared), {passage[:2]: len(passage[2]) for passage in passages})
    made = judge(corpus, read_tasks(tmp_path, tasks))
    assert (made.num_spans, made.num_pages, made.num_missing) == (len(tasks), 0, 0)
    texts = judged_texts(corpus, made)
    for id, (shared, sizes) in expected.items():
        most = max(shared.values())
        for passage, count in shared.items():
            part = count / min(sizes[passage], most)
            # The judgement counts white space too.
            assert passage in texts[id] if part > 0.6 else passage not in texts[id] or part > 0.4, (id, passage)
    assert (max(map(len, texts.values())) > 1) == (split is None or split.words < 200)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_the_eleven_tasks_are_judged_by_their_spans_or_pages(tmp_path: Path, split: DocumentSplit | None) -> None:
    corpus = import_corpus(tmp_path, PAGES, split)
    for name, tasks in TASKS.items():
        queries = read_tasks(tmp_path, tasks)
        by_span, by_page = (judged_texts(corpus, judge(corpus, queries, level)) for level in (SPAN, PAGE))
        for line in tasks:
            entries = [entry for output in line["output"] for entry in output.get("provenance", [])]
            passages = [p for entry in entries for p in characters_of(corpus, entry["wikipedia_id"])]
            assert by_page[line["id"]] == {(document, text) for document, text, _ in passages}
            assert by_span[line["id"]] <= by_page[line["id"]]
            if all("start_paragraph_id" not in entry for entry in entries):
                assert by_span[line["id"]] == by_page[line["id"]]
            for entry in entries:
                if (start := entry.get("start_character", -1)) >= 0:
                    inside = {(entry["start_paragraph_id"], n) for n in range(start, entry["end_character"])}
                    own = characters_of(corpus, entry["wikipedia_id"])
                    best = max(own, key=lambda passage: len(passage[2] & inside))
                    assert best[:2] in by_span[line["id"]], name


def test_spans_without_text_judge_the_page(tmp_path: Path) -> None:
    """Those of a title and of a heading, and of a paragraph that the page lacks; a span beside them counts alone."""
    places = {"title": 0, "heading": 2, "beyond": 9, "unknown": -1}
    spans = {
        name: on_page("101") | {"start_paragraph_id": number, "end_paragraph_id": number}
        for name, number in places.items()
    }
    tasks = [task(name, "x", [{"provenance": [entry]}]) for name, entry in spans.items()]
    herons = at("101", "A colony of grey herons")
    tasks.append(task("both", "x", [{"provenance": [spans["title"], on_page("101")]}, {"provenance": [herons]}]))
    tasks.append(task("across", "x", [{"provenance": [herons | {"start_paragraph_id": 0, "start_character": 3}]}]))
    corpus = import_corpus(tmp_path, PAGES, None)
    made = judge(corpus, read_tasks(tmp_path, tasks))
    assert (made.num_spans, made.num_pages) == (2, 4)
    judged: dict[str, list[str]] = {}
    for line in made.qrels.to_pylist():
        judged.setdefault(line["query_id"], []).append(line["corpus_id"])
    whole = ["101-1", "101-3"]
    assert judged == {**dict.fromkeys(places, whole), "both": ["101-3"], "across": whole}


def test_pages_of_other_corpora_deleted_passages_and_missing_pages(tmp_path: Path) -> None:
    """A page may be a number, follow another page in the metadata, or be of several documents."""
    metadata = [
        {"wikipedia_id": 101},
        {"linked": [{"wikipedia_id": "7"}], "wikipedia_id": "101"},
        {"wikipedia_id": "1010"},
        {"linked": {"wikipedia_id": "101"}},
        {"wikipedia_id": "102", "paragraph": 1, "paragraphs": "many"},
        {},
    ]
    lines = [{"id": f"p{n}", "text": f"text {n}", **fields} for n, fields in enumerate(metadata)]
    corpus = import_corpus(tmp_path, lines)
    queries = read_tasks(tmp_path, TASKS["fever-train-kilt"])
    made = judge(corpus, queries, PAGE)
    judged = [(line["query_id"], line["corpus_id"]) for line in made.qrels.to_pylist()]
    assert judged == [("3301", "p0"), ("3301", "p1"), ("3302", "p4"), ("3302", "p0"), ("3302", "p1")]
    corpus = import_corpus(tmp_path, None, delete="p1 p4")
    with pytest.raises(
        InputError,
        match=r"nq\.jsonl: query '3302' has its provenance in the page '102' \('Tessa Varn'\), which is not in",
    ):
        judge(corpus, queries)
    made = judge(corpus, queries, partial=True)
    assert [line["corpus_id"] for line in made.qrels.to_pylist()] == ["p0", "p0"]
    assert made.num_missing == 1


def test_training_takes_the_passages_of_spans_also_after_a_page_has_come_again(tmp_path: Path) -> None:
    """Rows that are no longer those of the page do not count: its best passage does, as for a page without a span."""
    corpus = import_corpus(tmp_path, PAGES, DocumentSplit(6))
    store = Store(str(tmp_path / "s"))
    file = write_jsonl(tmp_path / "nq-train-kilt.jsonl", TASKS["nq-train-kilt"] + TASKS["aidayago2-train-kilt"])
    options = QueryImportOptions(provenance=SPAN)
    queries = import_queries(store, detect_query_source(str(file)), "nq", options)
    named = [rows for rows in queries.judged_rows("train") or [] if rows]
    pairs = read_judged_pairs(corpus, queries, "train")
    assert [rows.tolist() for rows in pairs.rows[: len(named)]] == named
    assert [len(rows) for rows in pairs.rows[len(named) :]] == [1, 1]
    for rows, scores, others in zip(pairs.rows, pairs.scores, pairs.others, strict=True):
        assert len(rows) == len(scores)
        [document] = {*corpus.documents(rows)}
        [first], [end] = corpus.rows_of_documents([document])
        assert sorted([*rows, *others]) == [*range(first, end)]
    grown = import_corpus(tmp_path, [BY_ID["108"]], DocumentSplit(6), delete="108")
    again = read_judged_pairs(grown, queries, "train")
    assert len(again.rows[0]) == 1
    assert again.rows[0][0] >= corpus.num_rows
    assert [rows.tolist() for rows in again.rows[1:]] == [rows.tolist() for rows in pairs.rows[1:]]
    assert Queries.open(store, "nq").qrels("train").column_names == ["query_id", "corpus_id", "score"]
