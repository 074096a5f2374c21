"""The queries that are mined for, and the pool of a part, against loops over single queries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runners import InlineRunner, tallied

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus, write_table
from riptide.indexing.exact import Hits
from riptide.indexing.formats.format import QUERIES_SCHEMA
from riptide.indexing.formats.parse import CORPUS_SCHEMA
from riptide.indexing.hit_sources.opened_sources import HitSources
from riptide.indexing.hit_sources.search_options import SearchOptions
from riptide.indexing.mining import candidates as module
from riptide.indexing.mining.candidates import MiningOptions, MiningQueries, PoolCandidatesWork, PoolTask, read_queries
from riptide.indexing.mining.copies import read_copies
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.indexing.work.worker_tasks import Allocation, Runner, ignore_progress

TEXTS = ["Cats sleep all day.", "A dog barks; the dog's name is Rex.", "Rex, the king.", "Day and night", "cat", "x y"]
QUESTIONS = {
    "q0": ("who sleeps", {"answers": ["cats", "CAT"]}),
    "q1": ("which dog", {"answers": ["Rex"]}),
    "q2": ("no answer known", None),
    "q3": ("when", {"answer": "day"}),
    "q4": ("judged as not relevant only", {"answers": []}),
}
QRELS = [
    ("q1", "d1", 1),
    ("q0", "d4", 2),
    ("q0", "d0", 1),
    ("q0", "d4", 1),
    ("q2", "d5", 1),
    ("q3", "d3", 1),
    ("q3", "d0", 0),
    ("q4", "d2", 0),
]


def fill(url: Path, questions: dict[str, tuple[str, Any]]) -> Store:
    """Six passages in two parts, the first title of which holds an answer; the questions, with a split `train`."""
    store = Store(str(url))
    titles = ["Rex", *[""] * (len(TEXTS) - 1)]
    with store.create("corpus", "g0000", config={"limit": None}) as draft:
        for part, (start, end) in enumerate(((0, 4), (4, len(TEXTS)))):
            ids = [f"d{row}" for row in range(start, end)]
            columns = [ids, titles[start:end], TEXTS[start:end], [""] * len(ids)]
            table = pa.table(columns, schema=CORPUS_SCHEMA)
            draft.commit(f"part-{part:05d}", ".arrow", lambda path, t=table: write_table(t, path), rows=len(ids))
    metadata = [json.dumps(fields) if fields is not None else "" for _, fields in questions.values()]
    table = pa.table([[*questions], [text for text, _ in questions.values()], metadata], schema=QUERIES_SCHEMA)
    columns = dict(zip(("query_id", "corpus_id", "score"), map(list, zip(*QRELS, strict=True)), strict=True))
    judged = pa.table(columns, schema=pa.schema({"query_id": "string", "corpus_id": "string", "score": pa.int32()}))
    with store.create("queries", "asked", config={}) as draft:
        draft.commit("part-00000", ".arrow", lambda path: write_table(table, path), rows=len(table))
        draft.commit("qrels-train", ".parquet", lambda path: pq.write_table(judged, path), rows=len(judged))
    return store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Ids are looked up in the parts themselves: the sorted hashes of an import are not what is tested here."""
    rows = {f"d{row}": row for row in range(len(TEXTS))}
    found = staticmethod(lambda ids: np.array([rows.get(id, -1) for id in ids], np.int64))
    monkeypatch.setattr(Corpus, "rows_of", found)
    return fill(tmp_path / "store", QUESTIONS)


def queries_of(store: Store, limit: int | None = None, *, answers: bool = True) -> MiningQueries:
    return read_queries(Corpus.open(store), Queries.open(store), "train", limit, answers=answers)


def test_questions_come_with_their_answers_and_every_relevant_passage_once(store: Store) -> None:
    asked = queries_of(store)
    assert asked.ids == [*QUESTIONS]
    assert asked.texts == [text for text, _ in QUESTIONS.values()]
    assert asked.answers == [["cats", "CAT"], ["Rex"], [], ["day"], []]
    assert [rows.tolist() for rows in asked.positives] == [[4, 0], [1], [5], [3], []], "in the order of the judgements"
    assert all(rows.dtype == np.int64 for rows in asked.positives)
    first = queries_of(store, 2)
    assert (first.ids, [rows.tolist() for rows in first.positives]) == (["q0", "q1"], [[4, 0], [1]])
    part = asked.slice(1, 2)
    assert (part.ids, part.texts, part.answers) == (asked.ids[1:3], asked.texts[1:3], asked.answers[1:3])
    assert [rows.tolist() for rows in part.positives] == [[1], [5]]


def test_a_passage_that_was_deleted_since_is_no_positive(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Corpus.rows_of
    monkeypatch.setattr(Corpus, "rows_of", staticmethod(lambda ids: np.where(np.array(ids) == "d4", -1, real(ids))))
    assert [rows.tolist() for rows in queries_of(store).positives] == [[0], [1], [5], [3], []]


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ({"text": ["Rex"], "answer_start": [3]}, '{"text": ["Rex"], "answer_start": [3]}'),  # Hugging Face's SQuAD
        ([{"text": "Rex"}], '{"text": "Rex"}'),
        (["Rex", ["a"]], '["a"]'),
    ],
)
def test_answers_that_are_no_texts_are_refused_where_they_are_asked_for(
    tmp_path: Path, store: Store, answers: object, told: str
) -> None:
    other = fill(tmp_path / "other", {**QUESTIONS, "q2": ("which", {"answers": answers})})
    with pytest.raises(InputError) as raised:
        queries_of(other)
    expected = f"parameter drop_answers: queries/asked q2: its metadata's answers hold {told}, expected texts"
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)
    assert queries_of(other, 2).answers == [["cats", "CAT"], ["Rex"]]  # q2 is not among them
    assert queries_of(other, answers=False).answers == [[]] * 5


@pytest.mark.parametrize("drop", [False, True])
def test_a_part_is_its_hits_without_positives_and_answering_passages(store: Store, drop: bool) -> None:
    """Whether a passage's text contains an answer is read off by eye; the title is not looked at, as in DPR."""
    asked, corpus = queries_of(store), Corpus.open(store)
    answering = {("q0", 0), ("q0", 4), ("q1", 1), ("q1", 2), ("q3", 0), ("q3", 3)}
    every = np.tile(np.arange(len(TEXTS)), (len(asked.ids), 1))
    found = {"a": Hits(-every.astype(np.float32), every), "b": Hits(-every[:, :2].astype(np.float32), every[:, 5:3:-1])}
    with store.create("candidates", "pool") as draft:
        task = PoolTask(draft, 6, corpus if drop else None, read_copies(draft))
        task.open(Allocation(1))(("part-00000", asked, found, {}), ignore_progress)
    pool = store.open("candidates", "pool")
    lines = pq.read_table(pool.local_path("part-00000")).to_pylist()
    assert pool.part("part-00000").rows == len(lines)
    expected = [
        (id, row, row + 1, {5: 1, 4: 2}.get(row))
        for id, positives in zip(asked.ids, asked.positives, strict=True)
        for row in range(len(TEXTS))
        if row not in positives and not (drop and (id, row) in answering)
    ]
    assert [(line["query_id"], line["row"], line["rank:a"], line["rank:b"]) for line in lines] == expected
    assert [line["query"] for line in lines] == [[*QUESTIONS].index(id) for id, *_ in expected]


@dataclass
class Batched:
    """A source whose scores hang on the questions asked together, as vectors of one batch do."""

    source_text: str = "batched"
    search_parameters: dict[str, Any] = field(default_factory=dict)
    calls: list[list[str]] = field(default_factory=list)

    def inputs(self) -> dict[str, Artifact]:
        return {}

    def search(self, texts: Sequence[str], k: int, runner: Runner, allowed_rows: np.ndarray | None = None) -> Hits:
        self.calls.append(list(texts))
        rows = np.tile(np.arange(k), (len(texts), 1))
        return Hits(np.full(rows.shape, sum(map(len, texts)), np.float32) - rows, rows)


def test_a_pool_resumes_with_whole_blocks_and_gives_the_same_bytes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of two parts of one query; the part of the fourth query is lost, that of the third is kept."""
    batched = Batched()
    monkeypatch.setattr(HitSources, "open", lambda *_: batched)
    monkeypatch.setattr(module, "QUERY_BLOCK", 2)
    work = PoolCandidatesWork(
        store, None, "train", MiningOptions(("batched",), 4, part_queries=1), search=SearchOptions()
    )
    assert work.name == "asked-train-batched"
    assert [(name, part.ids) for name, part in work.parts()] == [(f"part-{n:05d}", [f"q{n}"]) for n in range(5)]
    assert tallied(store, work, InlineRunner())[1] == {
        "find copies": [(False, 4), (False, 2)],
        "pool": [(False, 1)] * 5,
    }
    assert [len(call) for call in batched.calls] == [2, 2, 1]
    folder = Path(store.url) / "candidates" / work.name
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "provenance.json"}
    for path in (folder / "manifest.json", folder / "part-00003.json", *folder.glob("part-00003-*")):
        path.unlink()
    batched.calls.clear()
    runner = InlineRunner()
    _, counts = tallied(store, work, runner)
    assert sorted(counts["pool"]) == [(False, 1), (True, 1), (True, 1), (True, 2)]
    assert counts["find copies"] == [(True, 6)]
    assert [name for name, *_ in runner.items("PoolTask")] == ["part-00003"]
    assert batched.calls == [["no answer known", "when"]]
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "provenance.json"} == files


def test_a_limit_takes_the_first_queries(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HitSources, "open", lambda *_: Batched())
    some = PoolCandidatesWork(store, None, "train", MiningOptions(("batched",)), limit=2)
    assert some.name == "asked-train-batched"
    assert some.mined.ids == ["q0", "q1"]


def test_what_cannot_be_mined_is_told(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("depth", "part_queries"):
        with pytest.raises(InputError, match=rf"parameter {name} 0: expected at least 1"):
            MiningOptions(("bm25",), **{name: 0})
    monkeypatch.setattr(HitSources, "open", lambda *_: Batched())
    for sources in ((), ("batched", "also batched")):
        with pytest.raises(InputError, match="expected at least one, and each once"):
            PoolCandidatesWork(store, None, "train", MiningOptions(sources))
    for split in ("dev", "all"):
        with pytest.raises(InputError, match=f"no split '{split}' with qrels; it has train"):
            PoolCandidatesWork(store, None, split, MiningOptions(("batched",)))
    bare = fill(tmp_path / "bare", {id: (text, None) for id, (text, _) in QUESTIONS.items()})
    with pytest.raises(InputError, match="parameter drop_answers: no query of queries/asked train has answers"):
        PoolCandidatesWork(bare, None, "train", MiningOptions(("batched",), drop_answers=True))
