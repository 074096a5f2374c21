"""A dev split selects the best weights of every training job, and an interrupted run keeps them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from interruption import interrupt_at
from mined import mine, weights
from samples import write_queries
from training_commands import RERANK, RIP, TUNE, command

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.mining.negatives import read_training_data
from riptide.indexing.queries.judged_pairs import read_judged_pairs
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store
from riptide.indexing.training.dev_splits import DevSplit, open_dev_lists, open_dev_set
from riptide.indexing.training.process_cache import ProcessCache
from riptide.indexing.training.reranking_data import open_dev_data
from riptide.indexing.training.worker import Trainer

Done = Callable[..., str]
DEV = ("--dev-split", "test", "--dev-limit", 9, "--evaluate-every", 2)
FORMS = [(TUNE, "prompts"), (RERANK, "models"), (RIP, "models")]


def join(titles: list[str], texts: list[str]) -> list[str]:
    return [f"{title}|{text}" for title, text in zip(titles, texts, strict=True)]


def test_the_pool_of_a_dev_set_holds_the_relevant_passages(world) -> None:
    store = Store(str(world.store))
    corpus, queries = Corpus.open(store), Queries.open(store)
    pairs = read_judged_pairs(corpus, queries, "test", 9)
    dev = open_dev_set(corpus, pairs, 40, join)
    assert dev.queries == pairs.texts
    assert len(dev.texts) == len({*dev.texts}) == 40
    for positives, rows in zip(dev.positives, pairs.rows, strict=True):
        expected = [join([p.title], [p.text])[0] for p in corpus.passages(rows)]
        assert [dev.texts[place] for place in positives] == expected
    assert open_dev_set(corpus, pairs, 1, join).texts == [
        text
        for row, text in sorted(
            (row, text)
            for rows, own in zip(pairs.rows, dev.positives, strict=True)
            for row, text in zip(rows, [dev.texts[place] for place in own], strict=True)
        )
    ]


def test_the_lists_of_a_reranker_are_positives_and_the_first_negatives(world, mined: Store) -> None:
    queries = Queries.open(mined)
    dev = DevSplit(queries.artifact.key.partition("/")[2], "test", 9, 4)
    data = open_dev_data(mined, dev, mined.open("negatives", "hand"), ProcessCache())
    lists = open_dev_lists(data, "test", 4, join)
    expected = read_training_data(Corpus.open(mined), queries, "test", mined.open("negatives", "hand"), 9)
    assert lists.queries == expected.queries
    assert len(lists.queries) == 9
    for number, passages in enumerate(lists.lists):
        rows = [*expected.positives[number], *expected.negatives[number]][:4]
        assert passages == join(*expected.passages(np.array(rows)))
        assert lists.positives[number].tolist() == [0]
    short = open_dev_lists(data, "test", 1, join)
    assert {len(passages) for passages in short.lists} == {2}  # at least one negative


@pytest.mark.parametrize(("form", "kind"), FORMS)
def test_the_best_weights_are_kept_and_an_interrupted_run_ends_the_same(
    world, mined: Store, done: Done, job, monkeypatch: pytest.MonkeyPatch, form: tuple, kind: str
) -> None:
    """The quality is made to fall after the fourth step: the best weights are those of a run of four steps."""
    qualities = {2: 0.25, 4: 0.75, 6: 0.5, 8: 0.125}
    measured: list[float] = []
    original = Trainer._evaluate

    def evaluate(self: Trainer, measure: Callable[[], float], progress, hooks) -> float:
        measured.append(measure())
        return original(self, lambda: qualities[progress.steps], progress, hooks)

    steps = ("--steps", 8, "--checkpoint-every", 2)
    more = (*DEV, *steps)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_evaluate", evaluate)
        out = done(*command(form, world, "whole", *more))
        notes = mined.open(kind, "whole").notes
        assert (notes["best"], notes["best_step"], notes["steps"]) == (0.75, 4, 8)
        assert "dev MRR@10 0.7500 at step 4" in out
        assert "step 6: loss" in out
        assert len(measured) == 4
        assert all(0 <= quality <= 1 for quality in measured)
        interrupt_at(patch, 6)
        assert job(*command(form, world, "cut", *more)).status == 130
        latest = json.loads((world.store / f"checkpoints/cut.{kind}/latest.json").read_text())
        assert latest["step"] == 6
        done(*command(form, world, "cut", *more))
        assert weights(mined, f"{kind}/cut") == weights(mined, f"{kind}/whole")
        assert mined.open(kind, "cut").notes == notes
        early = done(*command(form, world, "early", *more, "--patience", 1))
        assert "6 steps" in early
        assert mined.open(kind, "early").notes["best_step"] == 4
        assert weights(mined, f"{kind}/early") == weights(mined, f"{kind}/whole")
    if form is not TUNE:  # its form names a dev split
        done(*command(form, world, "plain", *steps))
        assert mined.open(kind, "plain").notes["best"] is None
        assert weights(mined, f"{kind}/plain") != weights(mined, f"{kind}/whole")


@pytest.mark.parametrize(("form", "kind"), FORMS)
def test_a_dev_split_is_opened_once(
    world, mined: Store, done: Done, reads: Counter[str], form: tuple, kind: str
) -> None:
    """The check of its options and the training share it, and a plan reads it too."""
    done(*command(form, world, "once", *DEV, "--steps", 1))
    assert reads["queries/tiny/qrels-test"] == 1
    assert mined.open(kind, "once").notes["steps"] == 1


@pytest.mark.parametrize("name", ["train_retriever", "pretrain_rip"])
def test_a_dev_split_without_answers_is_refused_by_the_plan(
    world, done: Done, refused: Done, tmp_path: Path, documented: Callable[..., None], name: str
) -> None:
    queries = [{"_id": "m", "text": "more"}]
    source = write_queries(tmp_path / "zero", queries, {"train": [("m", "p0", 1)], "dev": [("m", "p1", 0)]})
    done("import_queries", "--store", world.store, "--source", source)
    arguments = {
        "train_retriever": ("--task", "t", "--train", "prompts", "--negatives", "none", "--batch", 1),
        "pretrain_rip": ("--name", "t", "--unit", "span", "--max-length", 32),
    }[name]
    at = ("--store", world.store, "--backbone", world.model, "--queries", "zero", "--dev-split", "dev", "--plan")
    line = refused(name, *at, *arguments)
    assert "/queries/zero: no query of the dev split 'dev' has an answer in the corpus; name another split" in line
    documented("Training", f"{name} with a dev split without answers", line.replace(str(world.store), "…/store"), 1)


def test_only_a_dev_split_enters_the_fingerprint(world, mined: Store, done: Done, refused: Done) -> None:
    """Models that were trained without one stay complete under the same command."""
    done(*command(RERANK, world, "plain", "--steps", 1))
    done(*command(RIP, world, "rip", "--steps", 1))
    for name in ("plain", "rip"):
        assert "dev" not in mined.open("models", name).config
    assert mined.open("models", "rip").inputs.keys() == {"corpus"}
    assert "nothing to make" in done(*command(RERANK, world, "plain", "--steps", 1, "--evaluate-every", 7, "--plan"))
    done(*command(RIP, world, "dev", "--steps", 1, *DEV))
    artifact = mined.open("models", "dev")
    assert artifact.config["dev"] == {"split": "test", "limit": 9, "passages": 2000}
    assert artifact.inputs["queries"]["artifact"] == Queries.open(mined).artifact.key
    assert "dev.limit 9, now 8" in refused(*command(RIP, world, "dev", "--steps", 1, *DEV, "--dev-limit", 8))


def test_a_reranker_measures_on_negatives_of_the_dev_queries(
    world, mined: Store, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    ids = Queries.open(mined).split("all").ids
    train = {query for query, _, _ in world.judged[30:]}
    rows = pa.array([[] if id not in train else [0] for id in ids], pa.list_(pa.int64()))
    mine(mined, "few", rows={"negatives": rows})
    tail = ("--negatives", "few", "--split", "train", "--steps", 2)
    line = refused(*command(RERANK, world, "ce", *tail, *DEV))
    assert "--dev-split test: none of its 9 queries has negatives, so nothing can be re-ranked" in line
    documented("Training", "train_reranker with a dev split without negatives", line, 1)
    none = pa.array([[] if id not in train else [1] for id in ids], pa.list_(pa.int64()))
    mine(mined, "empty", rows={"positives": none})
    line = refused(*command(RERANK, world, "ce", "--negatives", "empty", "--split", "train", "--steps", 2, *DEV))
    assert "none of the 9 queries of the split 'test' has positives and negatives there; mine the negatives of" in line
    out = done(*command(RERANK, world, "ce", *tail, *DEV, "--dev-negatives", "hand"))
    assert "dev MRR@10 " in out
    assert mined.open("models", "ce").inputs["dev_negatives"]["artifact"] == "negatives/hand"


@pytest.mark.parametrize(
    ("form", "more", "message"),
    [
        (RERANK, ("--dev-split", "dev"), "no split 'dev' with qrels; it has test, train"),
        (RIP, ("--dev-split", "dev"), "no split 'dev' with qrels; it has test, train"),
        (RERANK, ("--patience", 2), "--patience 2: expected --dev-split too"),
        (RIP, ("--patience", 2, "--dev-split", "test", "--evaluate-every", 0), "and --evaluate-every"),
        (RIP, ("--queries", "tiny"), "--queries tiny: expected --dev-split too"),
        (RERANK, ("--dev-negatives", "hand"), "--dev-negatives hand: expected --dev-split too"),
        (RERANK, ("--dev-split", "test", "--dev-negatives", "no"), "negatives/no: there is no such artifact"),
    ],
)
def test_bad_options_are_refused(world, mined: Store, refused: Done, form: tuple, more: tuple, message: str) -> None:
    assert message in refused(*command(form, world, "x", "--steps", 2, *more))
    assert mined.names("models") == mined.incomplete_keys() == []
