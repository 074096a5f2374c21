"""The methods of a store make what their jobs make, return it opened, and print only what the caller wants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mined import mine
from samples import files_of, write_beir

from riptide import Corpus, Embeddings, Index, Store
from riptide.base.errors import InputError
from riptide.indexing.lucene.bm25_index import Bm25
from riptide.indexing.store.artifact import Artifact
from riptide.jobs.api.trained import Trained
from riptide.jobs.common.printing import print_only_warnings, say, say_on_stderr
from riptide.retriever.training.loop import Trainer

Done = Callable[..., str]
SMALL = {"batch": 8, "cpus": 1, "steps": 4, "negatives": "hand", "negatives_per_query": 2}
NUMERICS = {"dtype": "float32", "compile": "never"}


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("riptide.jobs.common.session.find_cluster", lambda **_: None)


def test_a_store_is_made_by_methods_as_by_jobs(
    world: Any, done: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(str(tmp_path / "made"))
    corpus = store.import_corpus(world.source, part_size=60)
    embeddings = store.encode_corpus(world.model, name="enc", **NUMERICS)
    index = store.build_index("enc", name="idx", factory="IVF4,PQ8x4fs", shards=3)
    bm25 = store.build_bm25(k1=1.2)
    line = "imported 240 passages: format beir\n"
    assert capsys.readouterr() == ("", line)  # test_side_effects.py reads the file descriptors
    assert (type(corpus), type(embeddings), type(index), type(bm25)) == (Corpus, Embeddings, Index, Bm25)
    assert (corpus.num_rows, embeddings.name, index.name, bm25.name) == (240, "enc", "idx", "bm25")
    done("build_bm25", "--store", world.store, "--k1", 1.2)
    for kind in ("corpus", "embeddings", "index"):
        assert files_of(Path(store.url) / kind) == files_of(world.store / kind), kind
    assert store.open("bm25", "bm25/g0000").config == Store(str(world.store)).open("bm25", "bm25/g0000").config
    before = files_of(Path(store.url), but=())
    store.build_bm25(k1=1.2)
    store.build_index("enc", name="idx", factory="IVF4,PQ8x4fs", shards=3)
    assert files_of(Path(store.url), but=()) == before


def test_the_line_of_an_import_comes_after_its_queries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Judgements of unknown passages end the import of the queries, and no line says that all is imported."""
    passages, queries = [{"_id": "p1", "title": "", "text": "x"}], [{"_id": "q1", "text": "y"}]
    bad, good = (write_beir(tmp_path / name, passages, queries, {"test": [("q1", name, 1)]}) for name in ("p2", "p1"))
    with pytest.raises(InputError, match="p2"):
        Store(str(tmp_path / "bad")).import_corpus(str(bad))
    assert capsys.readouterr() == ("", "")
    Store(str(tmp_path / "good")).import_corpus(str(good))
    assert capsys.readouterr() == ("", "imported 1 passage: format beir\n")


def test_a_verbose_store_prints_what_the_job_prints(world: Any, done: Done, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    index = Store(str(world.store), verbose=True).build_index("enc", name="idx", shards=3, factory="IVF4,PQ8x4fs")
    printed = capsys.readouterr()
    assert printed.out == done(
        "build_index", "--store", world.store, "--name", "idx", "--shards", 3, "--factory", "IVF4,PQ8x4fs"
    )
    assert f"index/{index.name}/g0000" in printed.out
    assert printed.err == ""


def test_a_quiet_program_gets_warnings_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with print_only_warnings():
        for line in ("a line", "warning: 3 of 4 passages were cut"):
            say(line)
        say_on_stderr("runs on a cluster")
    assert capsys.readouterr() == ("", "warning: 3 of 4 passages were cut\n")
    say("after")
    say_on_stderr("aside")
    assert capsys.readouterr() == ("after\n", "aside\n")


def test_passages_that_are_cut_are_a_warning(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Store(str(world.store)).encode_corpus(world.model, name="short", passage_length=4, **NUMERICS)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("warning: ")
    assert "; give a larger passage_length= under another name=" in err
    assert err.count("\n") == 1


def test_negatives_are_mined(world: Any) -> None:
    store = Store(str(world.store))
    negatives = store.mine_negatives(["exact:enc"], name="hard", split="train", depth=10, pool_negatives=3)
    assert isinstance(negatives, Artifact)
    assert negatives.key == "negatives/hard"
    with pytest.raises(InputError, match=r"^teacher_scores= without reranker=: expected a re-ranker"):
        store.mine_negatives(["exact:enc"], name="other", split="train", teacher_scores=True)


def test_topics_are_fitted(world: Any) -> None:
    topics = Store(str(world.store)).fit_topics(name="t", method="lda", topics=2, iterations=5)
    assert topics.num_rows == 240
    assert topics.model.num_topics == 2


def test_trainings_return_the_quality_before_and_after(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is also known of a repeated call, and of a sweep that of what it chose."""
    store = Store(str(world.store))
    mine(store)
    dev = {"split": "train", "dev_split": "test", "evaluate_every": 2}
    tuned = store.tune_prompts("tuned", world.model, length=4, lr=0.01, **SMALL, **dev)
    notes = store.open("prompts", "tuned").notes
    assert tuned == Trained("prompts/tuned", notes["start"], notes["best"], 4, "prompts/tuned")
    assert tuned.name == "tuned"
    assert 0 <= tuned.before <= 1
    assert 0 <= tuned.after <= 1
    monkeypatch.setattr(Trainer, "train", None)  # nothing is trained again
    assert store.tune_prompts("tuned", world.model, length=4, lr=0.01, **SMALL, **dev) == tuned
    monkeypatch.undo()
    swept = store.tune_prompts("swept", world.model, length=4, sweep=["lr=1e-4,1e-2"], **SMALL, **dev)
    assert (swept.key, swept.before) == ("sweeps/swept", tuned.before)
    assert swept.chosen == store.open("sweeps", "swept").notes["chosen"]
    retriever = store.train_retriever("lora", world.model, train="all", sides="tied", **SMALL, split="train")
    assert (retriever.key, retriever.before, retriever.after, retriever.steps) == ("models/lora", None, None, 4)
    reranker = store.train_reranker(world.model, name="ce", max_length=48, split="all", **SMALL)
    assert reranker.key == "models/ce"
    pretrained = store.pretrain_rip(world.model, name="rip", unit="span", max_length=32, batch=8, cpus=1, steps=2)
    assert pretrained.key == "models/rip"
    with pytest.raises(InputError, match=r"^patience=1: expected dev_split= too, which measures quality"):
        store.tune_prompts("other", world.model, patience=1, **SMALL)


def test_a_training_that_ctrl_c_stops_resumes(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(world.store))
    mine(store)
    options = {"length": 4, "split": "train", "dev_split": "test", "evaluate_every": 2, "checkpoint_every": 1, **SMALL}
    original = Trainer.step

    def step(trainer: Trainer, number: int) -> float:
        if number == 2:
            raise KeyboardInterrupt
        return original(trainer, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        with pytest.raises(KeyboardInterrupt) as caught:
            store.tune_prompts("cut", world.model, **options)
    assert "prompts/cut is saved at step 2" in caught.value.__notes__
    resumed, whole = (
        store.tune_prompts("cut", world.model, **options),
        store.tune_prompts("whole", world.model, **options),
    )
    assert (resumed.before, resumed.after) == (whole.before, whole.after)
    assert resumed.before is not None


def test_a_store_that_does_not_exist_is_refused_with_the_method_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        Store(str(tmp_path / "none")).build_bm25()
    assert str(caught.value) == f"{tmp_path}/none: there is no store here; store.import_corpus makes one"
    assert not (tmp_path / "none").exists()
