"""train_retriever --prompt topics: an interrupted run, both encoders' settings, and options that do not fit."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interruption import interrupt_at
from mined import weights
from samples import WORDS, make_passages, make_queries, save_tiny_bert, write_beir
from stored_topics import model_of_words, store_topics

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.queries.judged_pairs import read_judged_pairs
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.model_artifacts import model_folder
from riptide.indexing.store.store import Store
from riptide.indexing.topics.topics_reader import Topics
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.prompts.task_prompt import load_prompt
from riptide.retriever.training.dev import mean_reciprocal_rank

Done = Callable[..., str]
MODEL = model_of_words(WORDS, 3)
EXACT = ("--dtype", "float32", "--compile", "never")
CATEGORIES = ("--positives", "categories", "--category-weight", 0.2)


@dataclass(frozen=True)
class Subjects:
    """A store of 60 passages in two parts, each with one or two of three categories, and topics/hand of them."""

    store: Store
    folder: Path
    model: str
    topics: np.ndarray

    def command(self, task: str, *more: object) -> tuple[object, ...]:
        sizes = ("--length", 4, "--prompt-hidden", 6, "--batch", 8, "--cpus", 1, "--dtype", "float32", "--seed", 3)
        at = ("--store", self.folder, "--backbone", self.model, "--task", task, "--train", "prompts")
        return ("train_retriever", *at, "--prompt", "topics", *sizes, *more)


@pytest.fixture(scope="module")
def _made(tmp_path_factory: pytest.TempPathFactory, call_job: Callable[..., int]) -> Subjects:
    root = tmp_path_factory.mktemp("subjects")
    passages = make_passages(60)
    for number, passage in enumerate(passages):
        passage["metadata"] = {"categories": ["abc"[number % 3], *(["c"] if number % 5 == 0 else [])]}
    queries, judged = make_queries(passages, 30)
    source = write_beir(root / "subjects", passages, queries, {"train": judged[:20], "dev": judged[20:]})
    assert call_job("import_corpus", "--store", root / "store", "--source", source, "--part-size", 30) == 0
    store, topics = Store(str(root / "store")), np.arange(60, dtype=np.int64) % 3
    topics[7] = -1
    store_topics(store, MODEL, topics)
    return Subjects(store, root / "store", save_tiny_bert(root / "tiny-bert"), topics)


@pytest.fixture
def subjects(_made: Subjects) -> Subjects:
    return _made


def test_an_interrupted_run_ends_with_the_same_bytes_and_the_task_is_searched(
    subjects: Subjects, done: Done, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = (*CATEGORIES, "--topic-sample", 2, "--steps", 4, "--checkpoint-every", 2)
    plan = done(*subjects.command("whole", *more, "--plan"))
    assert "topics    3 of topics/hand; a query has that of its text; the text of " in plan
    assert "their loss encodes up to 16 passages more in each step" in plan
    assert "trains    " in plan
    done(*subjects.command("whole", *more))
    interrupt_at(monkeypatch, 2)
    assert job(*subjects.command("cut", *more)).status == 130
    assert " kept) in " in done(*subjects.command("cut", *more))
    store = subjects.store
    assert weights(store, "prompts/cut") == weights(store, "prompts/whole")
    artifact = store.open("prompts", "whole")
    assert artifact.inputs["topics"]["artifact"] == "topics/hand/g0000"
    tuning = artifact.config["tuning"]
    assert tuning["topics"] == {
        "hidden": 6,
        "queries": "own",
        "wordless": "refuse",
        "loss": True,
        "margin": 0.1,
        "sample": 2,
    }
    assert (tuning["parametrisation"], tuning["length"], artifact.config["loop"]["lr"]) == ("topics", 4, 1e-3)
    assert 0 < artifact.notes["topic_agreement"] < 1
    prompt = load_prompt(model_folder(artifact))
    assert prompt.topics is not None
    assert prompt.topics.model.fingerprint() == MODEL.fingerprint()
    done("encode_corpus", "--store", subjects.folder, "--task", "whole", *EXACT)
    topics = Embeddings.open(store, "whole", Corpus.open(store)).topics()
    assert topics is not None
    assert topics.tolist() == np.where(subjects.topics < 0, 2, subjects.topics).tolist()
    done(
        "search",
        "--store",
        subjects.folder,
        "--mode",
        "exact",
        "--embeddings",
        "whole",
        "--split",
        "dev",
        "--k",
        5,
        "--name",
        "run",
    )
    assert store.open("runs", "run").rows


def test_a_dev_split_has_the_stored_topics_of_passages(subjects: Subjects, done: Done) -> None:
    """Against an encoder that searches all passages, as an index of the task would."""
    done(*subjects.command("dev", "--negatives", "none", "--steps", 1, "--dev-split", "dev", "--evaluate-every", 1))
    store = subjects.store
    artifact, corpus, queries = store.open("prompts", "dev"), Corpus.open(store), Queries.open(store)
    prompt = load_prompt(model_folder(artifact))
    encoder = Encoder(subjects.model, prompt.options, tasks={"task": prompt})
    pairs = read_judged_pairs(corpus, queries, "dev", None)
    passages = corpus.passages(np.arange(60))
    texts = encoder.compose([passage.title for passage in passages], [passage.text for passage in passages])
    tokens, stored = encoder.tokenize(texts, side="passage"), np.where(subjects.topics < 0, 2, subjects.topics)
    inferred = encoder.topics_of(texts, side="passage", task="task")
    assert inferred is not None
    vectors = encoder.encode(pairs.texts, task="task")

    def quality(topics: np.ndarray) -> float:
        scores = vectors @ encoder.forward(tokens, side="passage", task="task", topics=topics).T
        return mean_reciprocal_rank(scores, pairs.rows, 10)

    assert artifact.notes["best"] == pytest.approx(quality(stored))
    assert quality(stored) != pytest.approx(quality(inferred))


def test_topics_and_the_dev_split_are_opened_once(subjects: Subjects, done: Done, reads: Counter[str]) -> None:
    dev = ("--dev-split", "dev", "--evaluate-every", 1)
    done(*subjects.command("once", "--negatives", "none", "--steps", 1, *dev))
    counts = {key: count for key, count in reads.items() if key.startswith("topics/") or key.endswith("/qrels-dev")}
    assert set(counts.values()) == {1}
    assert len(counts) == 4, "two parts of topics, their model, and the judgements"


def test_passages_after_those_of_training_need_no_topics(subjects: Subjects, done: Done, tmp_path: Path) -> None:
    """A corpus that grew since its queries were imported."""
    folder = tmp_path / "store"
    shutil.copytree(subjects.folder, folder)
    source = write_beir(tmp_path / "more", make_passages(10, seed=9, prefix="n"))
    done("import_corpus", "--store", folder, "--source", source, "--append")
    command = replace(subjects, store=Store(str(folder)), folder=folder).command("grown", *CATEGORIES, "--steps", 1)
    assert "topics    3 of topics/hand" in done(*command, "--plan")
    done(*command)
    with pytest.raises(InputError, match="topics/hand covers 60 of the corpus' 70 passages"):
        Topics.open(Store(str(folder)), "hand")


def test_the_encoder_is_trained_too(subjects: Subjects, done: Done) -> None:
    done(
        *subjects.command(
            "both", *CATEGORIES, "--train", "all", "--query-topics", "judged", "--no-topic-loss", "--steps", 1
        )
    )
    store = subjects.store
    artifact = store.open("prompts", "both-prompt")
    assert {role: entry["artifact"] for role, entry in artifact.inputs.items()} == {
        "model": "models/both",
        "topics": "topics/hand/g0000",
    }
    assert store.open("models", "both").config["tuning"]["topics"]["loss"] is False
    done("encode_corpus", "--store", subjects.folder, "--task", "both-prompt", *EXACT)
    topics = Embeddings.open(store, "both-prompt", Corpus.open(store)).topics()
    assert topics is not None
    assert topics[:4].tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ((*CATEGORIES, "--sides", "untied"), "--prompt topics --sides untied: queries and passages share the prompts"),
        ((*CATEGORIES, "--mix", "after"), "--mix after: is for prompts that are computed from each"),
        ((*CATEGORIES, "--topic-sample", 1), "--topic-sample 1: expected at least 2"),
        (
            (*CATEGORIES, "--no-topic-loss", "--topic-sample", 2),
            "--topic-sample 2: there is no loss of topics with --no-topic-loss: leave it out",
        ),
        (
            ("--positives", "categories", "--category-weight", 0, "--topic-margin", 0.2),
            "--topic-margin 0.2: there is no loss of topics with --category-weight 0: leave it out",
        ),
        (
            ("--negatives", "none", "--topic-sample", 2),
            "--topic-sample 2: is for the loss of topics, which needs categories: give --positives categories",
        ),
        (("--negatives", "none", "--topics", "other"), "topics/other"),
        (
            ("--negatives", "none", "--prompt", "matrix"),
            "from each query or of topics: give --prompt synthesised or topics",
        ),
        (
            ("--negatives", "none", "--position-offset", "--query-length", 62),
            "need 66 positions, and the backbone has 64",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(
    subjects: Subjects, refused: Done, more: tuple[object, ...], expected: str
) -> None:
    assert expected in refused(*subjects.command("x", "--plan", *more))


def test_options_of_topics_are_for_prompts_of_topics(subjects: Subjects, refused: Done) -> None:
    at = ("train_retriever", "--store", subjects.folder, "--backbone", subjects.model, "--task", "x", "--plan")
    more = ("--train", "prompts", "--negatives", "none", "--query-topics", "judged")
    line = refused(*at, *more)
    assert "--query-topics judged: is for prompts of topics: give --prompt topics, or leave it" in line


def test_topics_of_another_corpus_and_wordless_queries_are_refused(
    world: Any, done: Done, refused: Done, documented: Callable[..., None], tmp_path: Path
) -> None:
    store = Store(str(world.store))
    at = ("train_retriever", "--store", world.store, "--backbone", world.model, "--task", "x", "--train", "prompts")
    ask = (*at, "--prompt", "topics", "--negatives", "none", "--batch", 4, "--cpus", 1)
    few = model_of_words(WORDS[:3], 3)  # no query has such a word
    store_topics(store, few, np.zeros(240, np.int64))
    line = refused(*ask)
    documented("Training", "train_retriever --prompt topics with a query without a known word", line, 1)
    assert "--wordless-queries prior" in line
    refresh = ("--negatives-per-query", 1, "--refresh-epochs", "0.1", "--refresh-depth", 3, "--steps", 2)
    done(*ask, *refresh, "--length", 2, "--prompt-hidden", 2, "--wordless-queries", "prior")
    assert load_prompt(model_folder(store.open("prompts", "x"))).topics.wordless == "prior"  # type: ignore[union-attr]
    source = write_beir(tmp_path / "other", make_passages(60, seed=5))
    done("import_corpus", "--store", tmp_path / "other-store", "--source", source)
    other = Store(str(tmp_path / "other-store"))
    fitted = store_topics(other, few, np.zeros(60, np.int64), "foreign")
    target = Path(str(world.store)) / fitted.key
    target.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "other-store" / fitted.key).rename(target)
    line = refused(*ask, "--topics", "foreign")
    assert "topics/foreign/g0000 was built from corpus/g0000" in line
