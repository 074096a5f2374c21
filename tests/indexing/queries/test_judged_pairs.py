"""Judged pairs: the order of split and judgements, scores, and passages that the corpus lacks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from small_stores import build_corpus

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.importing import ImportCorpusWork, ImportOptions
from riptide.indexing.files.splitting import DocumentSplit
from riptide.indexing.formats.sources import detect_source
from riptide.indexing.queries.judged_pairs import JudgedPairs, choose_passages, read_judged_pairs
from riptide.indexing.queries.queries import CommitQueriesWork, Queries
from riptide.indexing.store.store import Store
from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.work import ArtifactTarget, run_work

JUDGED = [("q1", "c", 2), ("q0", "b", 1), ("q1", "a", 1), ("q2", "a", 0), ("q3", "d", 5), ("q4", "gone", 1)]


@pytest.fixture
def opened(tmp_path: Path) -> tuple[Corpus, Queries]:
    """Five queries over the passages a, b, c, d, of which d is deleted."""
    corpus = build_corpus(tmp_path / "s", [[["a", "b"], ["c"]], [["d"]], [[]]], {2: [3]})
    return corpus, commit_queries(Store(str(tmp_path / "s")), corpus, JUDGED)


def commit_queries(store: Store, corpus: Corpus, judged: list[tuple[str, str, int]]) -> Queries:
    """Returns five queries with their judgements in the split `test`."""
    ids = [f"q{number}" for number in range(5)]
    table = pa.table({"id": ids, "text": [f"text of {id}" for id in ids], "metadata": [""] * 5})
    columns = dict(zip(("query_id", "corpus_id", "score"), map(list, zip(*judged, strict=True)), strict=True))
    qrels = pa.table(columns).set_column(2, "score", pa.array(columns["score"], pa.int32()))
    target = ArtifactTarget("queries", "q", {"corpus": corpus.generations[0]}, {}, by_content=True)
    run_work(store, CommitQueriesWork(target, table, {"test": qrels}), LocalRunner(cores=1))
    return Queries.open(store)


def test_queries_are_in_the_order_of_the_split_and_rows_in_that_of_the_judgements(opened) -> None:
    pairs = read_judged_pairs(*opened, "test")
    assert (pairs.ids, pairs.texts) == (["q0", "q1"], ["text of q0", "text of q1"])
    assert [rows.tolist() for rows in pairs.rows] == [[1], [2, 0]]
    assert [scores.tolist() for scores in pairs.scores] == [[1], [2, 1]]
    assert pairs.num_queries == 5
    limited = read_judged_pairs(*opened, "test", 1)
    assert (limited.ids, limited.num_queries) == (["q0"], 1)
    with pytest.raises(InputError, match="no split 'dev'"):
        read_judged_pairs(*opened, "dev")


def test_the_relevant_passage_of_a_split_document_is_its_best_by_bm25(tmp_path: Path) -> None:
    texts = {
        "a": "the tide rises the moon pulls the sun sets far away",
        "b": "one short passage",
        "c": "the sun the sun",
    }
    lines = [json.dumps({"_id": id, "text": text}) for id, text in texts.items()]
    (tmp_path / "c.jsonl").write_text("\n".join(lines) + "\n")
    source, store = detect_source(str(tmp_path / "c.jsonl")), Store(str(tmp_path / "s"))
    run_work(
        store,
        ImportCorpusWork(store, source, ImportOptions(split=DocumentSplit(3)), append=False),
        LocalRunner(cores=1),
    )
    corpus = Corpus.open(store)
    passages = [passage.text for passage in corpus.passages(range(5))]
    assert passages == ["the tide rises", "the moon pulls", "the sun sets", "far away", "one short passage"]
    expected = {"when does the SUN set?": 2, "the moon": 1, "the": 0, "nothing of it": 0}  # otherwise the first one
    documents = np.array([[0, 4]] * len(expected))
    assert choose_passages(corpus, [*expected], documents).tolist() == [*expected.values()]
    assert choose_passages(corpus, ["the sun"], np.array([[4, 5]])).tolist() == [4]


def test_no_query_of_a_split_corpus_has_a_relevant_document(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"_id": "a", "text": "the tide rises"}\n')
    source, store = detect_source(str(tmp_path / "c.jsonl")), Store(str(tmp_path / "s"))
    run_work(
        store,
        ImportCorpusWork(store, source, ImportOptions(split=DocumentSplit(2)), append=False),
        LocalRunner(cores=1),
    )
    corpus = Corpus.open(store)
    pairs = read_judged_pairs(corpus, commit_queries(store, corpus, [("q0", "a", 0), ("q1", "gone", 1)]), "test")
    assert pairs == JudgedPairs([], [], [], [], [], 2)
