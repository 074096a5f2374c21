"""topics/NAME: the same bytes after a kill and on any runner, growth without reassignment, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planted_topics import SMALL, fit_small, planted_texts, purity
from runners import InlineRunner, tallied
from small_stores import build_corpus, extend_corpus, shuffling_runner

from riptide.base.errors import InputError, StorageError
from riptide.indexing.corpus.corpus import Corpus, save_array
from riptide.indexing.store.store import Store
from riptide.indexing.topics.topic_options import FitOptions
from riptide.indexing.topics.topics_page import render_page
from riptide.indexing.topics.topics_reader import Topics
from riptide.indexing.topics.topics_work import FITTED, FitTopicsWork, passage_words, sample_rows
from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.work import run_work
from riptide.indexing.work.worker_tasks import Runner
from riptide.retriever.topics.words import topic_words


def make_store(root: Path, count: int = 90, deleted: tuple[int, ...] = ()) -> np.ndarray:
    """Makes a corpus of three parts in `root`/store; returns the planted topics of its passages."""
    texts, truth = planted_texts(count)
    extend_corpus(root, [texts[:30], texts[30:70], texts[70:]], deleted, titles=True)
    return truth


def fit(root: Path, runner: Runner, options: FitOptions = SMALL) -> dict[str, str]:
    """Fits topics/topics; returns the sha256 of each part."""
    store = Store(str(root / "store"))
    [artifact] = run_work(store, FitTopicsWork(store, "topics", options), runner)
    return {part.name: part.sha256 for part in artifact.parts}


def test_every_passage_has_its_topic(tmp_path: Path) -> None:
    truth = make_store(tmp_path)
    topics = fit_small(tmp_path)
    rows = topics.topic_per_row()
    assert (rows.dtype, rows.shape) == (np.int64, (90,))
    assert purity(rows, truth) > 0.85
    [artifact] = topics.generations
    fitted = np.load(artifact.local_path(FITTED))
    assert np.array_equal(rows[fitted[:, 0]], fitted[:, 1])
    assert artifact.notes == {
        "topics": topics.model.num_topics,
        "paths": len(topics.model.path_topics),
        "sizes": topics.passages_per_topic().tolist(),
        "without_topic": 0,
        "fitted": len(fitted),
    }
    others = np.setdiff1d(np.arange(90), fitted[:, 0])
    passages = Corpus.open(Store(str(tmp_path / "store"))).passages(others)
    assert len(others)  # passages whose words are all of the root: their topics are inferred
    assert rows[others].tolist() == topics.model.infer([f"{p.title} {p.text}" for p in passages]).tolist()


def test_all_runners_and_an_interrupted_run_make_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        make_store(tmp_path / name)
    expected = fit(tmp_path / "one", InlineRunner())
    assert sorted(expected) == ["fitted", "model", "part-00000", "part-00001", "part-00002"]
    assert fit(tmp_path / "two", LocalRunner(cores=2)) == expected
    store = Store(str(tmp_path / "three/store"))
    with pytest.raises(StorageError):  # after the fit and one part
        run_work(store, FitTopicsWork(store, "topics", SMALL), InlineRunner(fail_after=2, error=StorageError("full")))
    [artifact], counts = tallied(store, FitTopicsWork(store, "topics", SMALL), shuffling_runner())
    assert {part.name: part.sha256 for part in artifact.parts} == expected
    assert counts == {"fit": [(True, 30)], "assign": [(True, 30), (False, 20), (False, 40)]}


def test_a_run_that_is_killed_between_the_parts_of_the_fit_makes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        make_store(tmp_path / name)
    expected = fit(tmp_path / "one", InlineRunner())

    def fail(*_: object) -> None:
        raise StorageError("full")

    with monkeypatch.context() as patch:
        patch.setattr("riptide.indexing.topics.topics_work.write_topics", fail)
        with pytest.raises(StorageError):
            fit(tmp_path / "two", InlineRunner())
    assert any("fitted-" in key for key, _ in Store(str(tmp_path / "two/store")).storage.list("topics"))
    assert fit(tmp_path / "two", InlineRunner()) == expected


def test_another_seed_gives_other_bytes(tmp_path: Path) -> None:
    make_store(tmp_path)
    expected = fit(tmp_path, InlineRunner())
    other = fit_small(tmp_path, "other", replace(SMALL, seed=4)).generations[0]
    assert {part.name: part.sha256 for part in other.parts}[FITTED] != expected[FITTED]


def test_a_grown_corpus_has_its_new_passages_inferred(tmp_path: Path) -> None:
    make_store(tmp_path)
    before = fit_small(tmp_path)
    texts, _ = planted_texts(20, seed=9)
    extend_corpus(tmp_path, [texts[:15], [*texts[15:], "nothing of it"]], deleted=[3], titles=True)
    with pytest.raises(InputError, match=r"topics covers 90 of the corpus' 111 passages: run riptide fit-topics --na"):
        Topics.open(Store(str(tmp_path / "store")), "topics")
    extend_corpus(tmp_path, [["star galaxy orbit"]])  # a second generation, which the same run covers
    after = fit_small(tmp_path)
    assert [artifact.key for artifact in after.generations] == ["topics/topics/g0000", "topics/topics/g0002"]
    assert [part.name for part in after.generations[1].parts] == ["part-00000", "part-00001", "part-00002"]
    rows = after.topic_per_row()
    assert np.array_equal(rows[:90], before.topic_per_row())
    expected = after.model.infer([*texts, "nothing of it", "star galaxy orbit"])
    assert rows[90:].tolist() == expected.tolist()
    assert rows[110] == -1
    assert after.generations[1].notes["without_topic"] == 1
    assert after.fingerprint == before.fingerprint
    with pytest.raises(InputError, match=r"was built otherwise \(parameter eta 0.5, now 0.7\): give the same options"):
        fit_small(tmp_path, options=replace(SMALL, eta=0.7))


def test_deleted_passages_are_not_fitted_and_have_a_topic(tmp_path: Path) -> None:
    make_store(tmp_path, deleted=tuple(range(20)))
    topics = fit_small(tmp_path)
    fitted = np.load(topics.generations[0].local_path(FITTED))
    assert fitted[:, 0].min() >= 20
    assert (topics.topic_per_row()[:20] >= 0).all()


def test_a_sample_is_fitted_and_the_others_are_inferred(tmp_path: Path) -> None:
    make_store(tmp_path)
    corpus = Corpus.open(Store(str(tmp_path / "store")))
    rows = sample_rows(corpus, 90, 60, seed=3)
    assert len(set(rows.tolist())) == 60
    assert rows.tolist() == sorted(rows)
    assert rows.tolist() != sample_rows(corpus, 90, 60, seed=4).tolist()
    assert sample_rows(corpus, 90, 90, seed=3).tolist() == list(range(90))
    words = passage_words(corpus.parts, rows)
    assert words == [topic_words(f"{p.title} {p.text}") for p in corpus.passages(rows)]
    topics = fit_small(tmp_path, options=replace(SMALL, sample=60))
    fitted = np.load(topics.generations[0].local_path(FITTED))
    assert set(fitted[:, 0].tolist()) <= set(rows.tolist())
    assert (topics.topic_per_row() >= 0).all()


def test_a_limit_uses_the_first_passages(tmp_path: Path) -> None:
    make_store(tmp_path)
    topics = fit_small(tmp_path, limit=65)
    assert topics.topic_per_row().shape == (65,)
    assert [part.rows for part in topics.generations[0].numbered_parts("part")] == [30, 35]


def test_topics_of_another_corpus_are_refused(tmp_path: Path) -> None:
    make_store(tmp_path)
    fit_small(tmp_path)
    corpus = Store(str(tmp_path / "store")).storage
    texts, _ = planted_texts(90, seed=1)
    for key, _ in list(corpus.list("corpus")):
        corpus.delete(key)
    extend_corpus(tmp_path, [texts])
    with pytest.raises(InputError, match=r"topics/topics/g0000 was built from corpus/g0000 \w{12}, the corpus is now "):
        Topics.open(Store(str(tmp_path / "store")), "topics")
    with pytest.raises(InputError, match=r"was built from corpus/g0000 \w{12}, the corpus is now "):
        fit_small(tmp_path)


def test_small_corpora_and_missing_names_are_refused(tmp_path: Path) -> None:
    make_store(tmp_path, count=75)
    with pytest.raises(InputError, match=r"topics/nothing: there is no such artifact \(complete topics: none\)"):
        Topics.open(Store(str(tmp_path / "store")), "nothing")
    with pytest.raises(InputError, match="the corpus has 49 passages, expected at least 50 to fit topics"):
        fit_small(tmp_path, limit=49)
    store = Store(str(tmp_path / "store"))
    with pytest.raises(InputError, match=r"^none of the words of 75 passages"):
        fit_small(tmp_path, options=replace(SMALL, min_passages=80))
    assert store.incomplete_keys() == []
    assert fit_small(tmp_path).num_rows == 75  # under the name of the run that failed


def test_damaged_topics_are_refused(tmp_path: Path) -> None:
    build_corpus(tmp_path / "store", [[["a", "b"]]], {})
    store = Store(str(tmp_path / "store"))
    corpus = Corpus.open(store)
    make_store(tmp_path / "other")
    model = fit_small(tmp_path / "other").generations[0]
    for name, values, message in (
        ("floats", np.zeros(2), "float64 [2], expected int64 [2]"),
        ("short", np.zeros(1, np.int64), "int64 [1], expected int64 [2]"),
        ("large", np.array([0, 99]), "topics from 0 to 99, expected -1 to "),
    ):
        inputs = {"corpus/0": corpus.generations[0]}
        with store.create("topics", f"{name}/g0000", inputs=inputs, config={"limit": None}) as draft:
            draft.commit("model", ".safetensors", lambda path: shutil.copy(model.local_path("model"), path), rows=1)
            draft.commit("part-00000", ".npy", lambda path, values=values: save_array(values, path), rows=2)
        with pytest.raises(InputError) as error:
            Topics.open(store, name).topic_per_row()
        assert message in str(error.value)


def test_the_page_shows_topics_and_tree_with_words_escaped(tmp_path: Path) -> None:
    make_store(tmp_path)
    topics = fit_small(tmp_path, options=replace(SMALL, depth=3))
    page = render_page(topics)
    assert page == render_page(Topics.open(Store(str(tmp_path / "store"))))
    for size, words in zip(topics.passages_per_topic().tolist(), topics.model.words, strict=True):
        assert f"<td class='number'>{size}</td>" in page
        assert ", ".join(words) in page
    assert page.count("<li>") == page.count("</li>") == len(topics.tree.nodes)
    assert page.count("<ul>") == page.count("</ul>") >= 3
    named = replace(topics.tree.nodes[0], words=("<script>", "a&b"))
    topics.tree = replace(topics.tree, nodes=(named, *topics.tree.nodes[1:]))
    topics.name = "<b>"
    page = render_page(topics)
    assert "&lt;script&gt;, a&amp;b" in page
    assert "<script>" not in page
    assert "<b>" not in page
