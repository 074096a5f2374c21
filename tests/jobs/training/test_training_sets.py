"""Training without mined negatives, with positives weighted by their judgements, and on several query sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from interruption import interrupt_at
from mined import mine, weights
from samples import write_beir, write_queries
from training_commands import command

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.store.store import Store
from riptide.indexing.training.training_sets import TrainingSetSpec, open_sets, parse_training_set, resolve_stores

Done = Callable[..., str]
TUNE = ("tune_prompts", "--task", "NAME", "--length", 4, "--split", "train", "--dtype", "float32")
PAIRS = (*TUNE, "--negatives", "none")
MORE = "queries=more,negatives=none,weight=2,task=second"


@pytest.fixture
def graded(world, done: Done, tmp_path: Path) -> Store:
    """The finished store, with the query set `graded`: q0 has the positives p5 (score 3) and p7 (score 1)."""
    judged = [("q0", "p5", 3), ("q0", "p7", 1), ("q1", "p9", 2), ("q1", "p5", 0)]
    queries = [{"_id": f"q{number}", "text": f"query {number}"} for number in range(2)]
    source = write_queries(tmp_path / "graded", queries, {"train": judged})
    done("import_queries", "--store", world.store, "--source", source)
    return Store(str(world.store))


@pytest.fixture
def several(world, done: Done, tmp_path: Path) -> Store:
    """The finished store with the query sets `tiny` and `more`, of 10 and 4 training queries."""
    queries = [{"_id": f"m{number}", "text": f"more {number}"} for number in range(4)]
    judged = [(f"m{number}", f"p{number}", 1) for number in range(4)]
    source = write_queries(tmp_path / "more", queries, {"train": judged})
    done("import_queries", "--store", world.store, "--source", source)
    return Store(str(world.store))


def test_judged_pairs_alone_are_trained_on(world, done: Done, refused: Done, job, monkeypatch) -> None:
    """An interrupted run ends with the same weights."""
    store = Store(str(world.store))
    out = done(*command(PAIRS, world, "plan", "--steps", 4, "--plan"))
    assert "queries   10 of train, without negatives" in out
    assert "steps     4 of 8 queries and up to 8 passages" in out
    more = ("--steps", 6, "--checkpoint-every", 2, "--lr", "0.05")
    done(*command(PAIRS, world, "whole", *more))
    artifact = store.open("prompts", "whole")
    assert artifact.inputs.keys() == {"corpus", "queries"}
    assert artifact.config["tuning"]["negatives_per_query"] == 0
    interrupt_at(monkeypatch, 4)
    assert job(*command(PAIRS, world, "cut", *more)).status == 130
    assert " kept) in " in done(*command(PAIRS, world, "cut", *more))
    assert weights(store, "prompts/cut") == weights(store, "prompts/whole")
    done(*command(PAIRS, world, "random", *more, "--negatives-per-query", 2))
    assert weights(store, "prompts/random") != weights(store, "prompts/whole")
    mine(store, "none")
    assert "has negatives of this name, which stands for" in refused(*command(PAIRS, world, "x", *more))


def test_weights_are_the_scores_of_the_judgements(world, graded: Store, done: Done, refused: Done) -> None:
    names = [TrainingSetSpec(queries="graded", split="train")]
    opened = open_sets(graded, names, limit=None, batches="mixed", weighted=True)
    corpus = Corpus.open(graded)
    assert opened.data.positives[0].tolist() == corpus.rows_of(["p5", "p7"]).tolist()
    assert [each.tolist() for each in opened.data.weights] == [[3.0, 1.0], [2.0]]
    assert open_sets(graded, names, limit=None, batches="mixed", weighted=False).data.weights is None
    ask = (*PAIRS, "--queries", "graded", "--draw-positive", "weighted")
    done(*command(ask, world, "weighted", "--steps", 2))
    assert graded.open("prompts", "weighted").config["tuning"]["draw_positive"] == "weighted"
    positives = pa.array([[0, 1]] * 40, pa.list_(pa.int64()))
    mine(graded, "other", rows={"positives": positives}, query_set="tiny")
    ask = (*TUNE, "--queries", "tiny", "--negatives", "other", "--draw-positive", "weighted", "--steps", 1)
    line = refused(*command(ask, world, "x"))
    assert "without a judgement above 0, so it has no weight" in line


def test_several_query_sets_are_trained_on_together(world, several: Store, done: Done, refused: Done) -> None:
    base = (*PAIRS, "--queries", "tiny", "--also-train", MORE)
    out = done(*command(base, world, "plan", "--plan"))
    sets = "train in queries/tiny, without negatives; train in queries/more, without negatives, weight 2"
    assert f"queries   14 of {sets}\n" in out
    opened = open_sets(
        several,
        [TrainingSetSpec(queries="tiny"), parse_training_set(MORE)],
        limit=None,
        batches="mixed",
        weighted=False,
    )
    mixture = opened.data.mixture
    assert (mixture.tasks, mixture.sizes, mixture.weights) == (("tiny", "second"), (10, 4), (1.0, 2.0))
    assert opened.inputs.keys() == {"queries", "queries:2"}
    for batches in ("mixed", "one-task"):
        done(*command(base, world, batches, "--steps", 3, "--lr", "0.05", "--batches", batches))
    assert weights(several, "prompts/mixed") != weights(several, "prompts/one-task")
    artifact = several.open("prompts", "mixed")
    assert artifact.inputs["queries:2"]["artifact"] == "queries/more"
    assert artifact.config["batches"] == "mixed"
    assert artifact.config["also_train"][0]["weight"] == 2.0
    assert artifact.notes["queries"] == 14
    done(*command((*PAIRS, "--queries", "tiny"), world, "alone", "--steps", 1))
    assert "also_train" not in several.open("prompts", "alone").config
    line = refused(*command(base, world, "mixed", "--steps", 3, "--lr", "0.05", "--batches", "one-task"))
    assert "batches mixed, now one-task" in line


def test_sets_with_and_without_negatives_share_the_corpus_of_the_later_one(world, several: Store, done: Done) -> None:
    mine(several, query_set="tiny")
    names = [parse_training_set(MORE), TrainingSetSpec(queries="tiny", negatives="hand")]
    opened = open_sets(several, names, limit=3, batches="mixed", weighted=False)
    assert opened.inputs.keys() == {"queries", "queries:2", "negatives:2"}
    assert [len(rows) > 0 for rows in opened.data.negatives] == [False] * 3 + [True] * 3
    assert opened.data.num_passages == 240


def test_sizes_of_tasks_are_capped(world, several: Store, done: Done, refused: Done) -> None:
    """The same queries are drawn in each run; a set with a separate size keeps it."""
    names = [TrainingSetSpec(queries="tiny", size=4), TrainingSetSpec(queries="more", size=3)]
    draws = [open_sets(several, names, limit=None, batches="mixed", weighted=False).data for _ in range(2)]
    assert draws[0].queries == draws[1].queries
    assert draws[0].mixture.sizes == (4, 3)
    whole = open_sets(several, [TrainingSetSpec(queries="tiny")], limit=None, batches="mixed", weighted=False).data
    places = [whole.queries.index(text) for text in draws[0].queries[:4]]
    assert places == sorted(places) != [0, 1, 2, 3]
    assert [whole.positives[place].tolist() for place in places] == [rows.tolist() for rows in draws[0].positives[:4]]
    base = (*PAIRS, "--queries", "tiny", "--also-train", f"{MORE},size=2", "--task-size", 3)
    assert "queries   5 of" in done(*command(base, world, "x", "--plan"))
    done(*command(base, world, "capped", "--steps", 1))
    config = several.open("prompts", "capped").config
    assert (config["task_size"], config["also_train"][0]["size"]) == (3, 2)
    assert "--task-size 0: expected at least 1" in refused(*command(base, world, "x", "--task-size", 0))


def test_negatives_of_a_further_set_are_used(world, several: Store, done: Done, refused: Done) -> None:
    base = (*PAIRS, "--queries", "more")
    assert "up to 8 passages" in done(*command(base, world, "x", "--plan"))
    mine(several, query_set="tiny")
    more = ("--also-train", "queries=tiny,negatives=hand")
    assert "up to 16 passages" in done(*command(base, world, "x", *more, "--plan"))
    line = refused(*command(base, world, "x", "--refresh-epochs", 1))
    assert "--refresh-epochs 1.0: training uses none of the negatives that it mines" in line


def test_sets_of_another_store_bring_their_own_corpus(
    world, done: Done, refused: Done, tmp_path: Path, documented: Callable[..., None]
) -> None:
    passages = [{"_id": f"f{number}", "title": "", "text": f"foreign passage {number}"} for number in range(30)]
    queries = [{"_id": f"g{number}", "text": f"foreign query {number}"} for number in range(5)]
    source = write_beir(tmp_path / "foreign", passages, queries, {"train": [(f"g{n}", f"f{n}", 1) for n in range(5)]})
    elsewhere = tmp_path / "elsewhere"
    done("import_corpus", "--store", elsewhere, "--source", source)
    done("import_queries", "--store", elsewhere, "--source", source)
    base = (*PAIRS, "--queries", "tiny", "--also-train", f"queries=foreign,store={elsewhere}")
    assert f"train in queries/foreign of {elsewhere}, without negatives" in done(*command(base, world, "x", "--plan"))
    ask = (*base, "--steps", 4, "--negatives-per-query", 2, "--refresh-epochs", 1, "--batches", "one-task")
    done(*command(ask, world, "two"))
    store = Store(str(world.store))
    artifact = store.open("prompts", "two")
    roles = {role: entry["artifact"] for role, entry in artifact.inputs.items() if role.endswith(":2")}
    assert roles == {"queries:2": f"{elsewhere}/queries/foreign", "corpus:2": f"{elsewhere}/corpus/g0000"}
    assert "store" not in artifact.config["also_train"][0]
    done("verify", "--store", world.store)
    names = [TrainingSetSpec(queries="tiny"), TrainingSetSpec(queries="foreign", store=str(elsewhere))]
    opened = open_sets(store, names, limit=None, batches="mixed", weighted=False)
    assert (opened.corpus.num_rows, opened.data.num_passages) == (240, 270)
    [row] = opened.data.positives[10]
    assert opened.data.passages(np.array([row]))[1] == ["foreign passage 0"]
    for spelling in (world.store, world.store / ".." / world.store.name):
        assert resolve_stores(store, [TrainingSetSpec(queries="tiny", store=str(spelling))]) == (names[0],)
    other = TrainingSetSpec(queries="foreign", store=f"{elsewhere}/../elsewhere")
    assert {name.store for name in resolve_stores(store, [names[1], other])} == {str(elsewhere)}
    opened.check(opened.fingerprints())
    with pytest.raises(InputError, match=f"{elsewhere}/corpus/g0000: this node has .*, the node of the job 123"):
        opened.check({**opened.fingerprints(), "corpus:2": "123"})
    line = refused(*command((*ask, "--sides", "query"), world, "x"))
    assert line.startswith(f"error: {elsewhere}: there are no embeddings, from which training with --sides query reads")
    assert line.endswith(f"run riptide encode-corpus --store {elsewhere} --encoder {world.model} first")
    line = refused(*command((*PAIRS, "--queries", "tiny", "--also-train", "queries=a,store=nowhere"), world, "x"))
    documented("Training", "train_retriever with a training set of a store that does not exist", line, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("more", "found 'more', expected NAME=VALUE once for each of queries, split, negatives, weight, task, store,"),
        ("queries=a,queries=b", "found 'queries=b', expected NAME=VALUE once"),
        ("queries=a,sizes=3", "found 'sizes=3'"),
        ("queries=a,size=0", "size must be a number of queries, at least 1"),
        ("queries=a,size=few", "size must be a number of queries, at least 1"),
        ("queries=", "found 'queries='"),
        ("split=train", "expected queries=NAME"),
        ("queries=a,weight=x", "weight must be a number"),
    ],
)
def test_bad_training_sets_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_training_set(text)


def test_training_sets_that_cannot_be_opened_are_refused(
    world, several: Store, refused: Done, documented: Callable[..., None]
) -> None:
    base = (*PAIRS, "--queries", "tiny")
    for more, message in (
        (("--also-train", "queries=none"), "queries/none: there is no such artifact"),
        (("--also-train", "queries=more,negatives=hand"), "negatives/hand: there is no such artifact"),
        (("--also-train", "queries=more,split=dev"), "no split 'dev' with qrels"),
        (("--also-train", "queries=more,weight=0"), "training set more: weight 0, expected more than 0"),
        (("--split", "all"), "--split all: it has no judgements, which training without negatives needs"),
    ):
        assert message in refused(*command(base, world, "x", "--steps", 1, *more))
    line = refused(*command(base, world, "x", "--steps", 1, "--also-train", "more"))
    documented("Training", "tune_prompts with a training set of another form", line, 1)
    assert several.names("prompts") == several.incomplete_keys() == []
