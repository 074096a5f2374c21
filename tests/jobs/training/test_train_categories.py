"""train_retriever --positives categories: artifacts, an interrupted run, and input and options that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from interruption import interrupt_at
from mined import weights
from samples import make_passages, make_queries, write_beir, write_queries

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.queries.judged_pairs import read_judged_pairs
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store
from riptide.indexing.training.dev_splits import open_dev_set
from riptide.indexing.training.training_sets import TrainingSetSpec, open_sets

Done = Callable[..., str]
GROUPS = [["red"], ["red", "blue"], ["green"], ["blue", "green"], ["grey"]]
EXACT = ("--dtype", "float32", "--compile", "never")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, call_job: Callable[..., int], model: str) -> Store:
    """A store of 40 passages with categories, of which p39 has none, and of 20 queries."""
    root = tmp_path_factory.mktemp("categories")
    passages = make_passages(40)
    for number, passage in enumerate(passages[:-1]):
        passage["metadata"] = {"categories": GROUPS[number % 5], "kind": "text", "year": number}
    queries, judged = make_queries(passages[:-1], 20)
    source = write_beir(root / "tiny", passages, queries, {"train": judged[:12], "dev": judged[12:]})
    at = ("--store", root / "store")
    assert call_job("import_corpus", *at, "--source", source) == 0
    assert call_job("import_queries", *at, "--source", source) == 0
    more = write_queries(root / "more", [{"_id": "m", "text": "more"}], {"train": [("m", "p39", 1)]})
    assert call_job("import_queries", *at, "--source", more) == 0
    assert call_job("encode_corpus", *at, "--encoder", model, "--name", "enc", *EXACT) == 0
    return Store(str(root / "store"))


@pytest.fixture
def command(store: Store, model: str) -> Callable[..., tuple]:
    def form(task: str, *more: object) -> tuple:
        at = ("--store", store.url, "--backbone", model, "--task", task, "--queries", "tiny")
        sizes = ("--length", 4, "--batch", 8, "--cpus", 1, "--dtype", "float32", "--seed", 3)
        return ("train_retriever", *at, *sizes, "--positives", "categories", *more)

    return form


PROMPTS = ("--train", "prompts")


def test_an_interrupted_run_ends_with_the_bytes_of_an_undisturbed_one(
    store: Store, command: Callable[..., tuple], done: Done, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = (*PROMPTS, "--steps", 6, "--checkpoint-every", 2, "--lr", "1e-2", "--normalize", "True")
    done(*command("whole", *more))
    interrupt_at(monkeypatch, 4)
    assert job(*command("cut", *more)).status == 130
    assert " kept) in " in done(*command("cut", *more))
    assert weights(store, "prompts/cut") == weights(store, "prompts/whole")
    artifact = store.open("prompts", "whole")
    assert artifact.inputs.keys() == {"corpus", "queries"}
    assert artifact.config["tuning"]["categories"] == {"weight": 0.1, "field": "categories"}
    assert artifact.config["tuning"]["negatives_per_query"] == 0
    assert artifact.notes["loss"] > 0


def test_the_weight_and_the_positives_shape_the_prompt(store: Store, command: Callable[..., tuple], done: Done) -> None:
    """Judged positives train another prompt, and their artifact has the configuration that it always had."""
    for task, more in {
        "tenth": (),
        "alone": ("--category-weight", 0),
        "judged": ("--positives", "judged", "--negatives", "none"),
    }.items():
        done(*command(task, *PROMPTS, "--steps", 2, *more))
    tenth, alone, judged = (weights(store, f"prompts/{task}") for task in ("tenth", "alone", "judged"))
    assert tenth != alone != judged
    assert "categories" not in store.open("prompts", "judged").config["tuning"]


@pytest.mark.parametrize(
    ("task", "more"),
    [
        ("side", (*PROMPTS, "--sides", "query", "--embeddings", "enc")),
        ("lora", ("--train", "lora", "--normalize", "True", "--temperature", 0.1)),
        ("dpr", ("--train", "all", "--sides", "untied")),
    ],
)
def test_other_systems_train_by_categories(command: Callable[..., tuple], done: Done, task: str, more: tuple) -> None:
    assert "2 steps over 12 queries, last loss " in done(*command(task, *more, "--steps", 2))


def test_the_plan_names_the_field(command: Callable[..., tuple], done: Done) -> None:
    out = done(*command("x", *PROMPTS, "--plan", "--steps", 4))
    assert "positives passages of the batch with a common category in the metadata field 'categories'" in out
    assert "steps     4 of 8 queries and up to 8 passages" in out


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--positives", "judged", "--category-weight", 0.2), "--category-weight 0.2: is for positives with a common"),
        (("--positives", "judged", "--category-weight", 1), "--category-weight 1.0: is for positives with a common"),
        (("--positives", "judged", "--categories-field", "kind"), "--categories-field kind: is for positives with a c"),
        (
            ("--negatives", "bm25"),
            "--negatives bm25: is for mined negatives, and with --positives categories the negatives are",
        ),
        (("--negatives-per-query", 2), "--negatives-per-query 2: is for mined negatives, and with --positives"),
        (("--refresh-epochs", 1), "--refresh-epochs 1.0: is for mined negatives, and with --positives"),
        (
            ("--loss", "symmetric"),
            "--positives categories --loss symmetric: positives by category have a separate loss",
        ),
        (("--negatives-from", "own"), "--positives categories --negatives-from own: the negatives of a query are"),
        (("--category-weight", 0.7), "--category-weight 0.7: expected 0 to 0.5"),
        (("--batch", 1), "--positives categories --batch 1: expected at least 2 queries"),
        (("--also-train", "queries=more"), "--positives categories, --also-train: categories are those of one train"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    command: Callable[..., tuple], refused: Done, more: tuple, expected: str
) -> None:
    assert expected in refused(*command("x", *PROMPTS, "--plan", *more))


def test_a_distillation_loss_is_refused_with_its_remedy(
    command: Callable[..., tuple], refused: Done, documented: Callable[..., None]
) -> None:
    line = refused(*command("x", *PROMPTS, "--plan", "--loss", "kl"))
    assert line.rstrip("\n") == (
        "error: --positives categories --loss kl: positives by category have a separate loss, which uses no mined "
        "negatives and no teacher scores: leave out --loss, or give --positives judged"
    )
    documented("Training", "train_retriever --positives categories --loss kl", line, 1)


def test_passages_without_categories_are_refused(
    store: Store, command: Callable[..., tuple], refused: Done, documented: Callable[..., None]
) -> None:
    """A passage of the training queries; a field that no passage has; and a field with one value for all."""
    at = (*PROMPTS, "--plan")
    case = "train_retriever --positives categories"
    line = refused(*command("x", *at, "--queries", "more"))
    line = line.replace(store.url, "…/store")
    documented("Training", f"{case} on a passage without categories", line, 1)
    assert "the passage 'p39' has no categories: its metadata has no field 'categories', but 'year'" in line
    line = refused(*command("x", *at, "--categories-field", "topics")).replace(store.url, "…/store")
    documented("Training", f"{case} with a field that the metadata lacks", line, 1)
    assert "its metadata has no field 'topics', but 'categories', 'kind', 'year'" in line
    line = refused(*command("x", *at, "--categories-field", "kind")).replace(store.url, "…/store")
    documented("Training", f"{case} with one category for all passages", line, 1)
    assert "all 12 passages to train on have the category 'text' in the field 'kind'" in line


def test_only_the_categories_of_the_training_passages_are_read(store: Store) -> None:
    names = (TrainingSetSpec(queries="tiny"),)
    sets = open_sets(store, names, limit=3, batches="mixed", weighted=False, categories_field="categories")
    table = sets.data.categories
    assert table is not None
    rows = np.unique(np.concatenate(sets.data.positives))
    assert np.flatnonzero(np.diff(table.offsets)).tolist() == rows.tolist()
    assert open_sets(store, names, limit=3, batches="mixed", weighted=False).data.categories is None


def test_a_dev_split_is_measured_by_category(store: Store, command: Callable[..., tuple], done: Done) -> None:
    """A query's relevant passages are those of the pool that share a category with its judged passage."""
    corpus, queries = Corpus.open(store), Queries.open(store, "tiny")

    def compose(titles: Any, texts: Any) -> list[str]:
        return list(texts)

    pairs = read_judged_pairs(corpus, queries, "dev")
    judged, shared = (open_dev_set(corpus, pairs, 8, compose, categories_field=each) for each in (None, "categories"))
    assert shared.texts == judged.texts
    texts = [passage.text for passage in corpus.passages(np.arange(39))]
    groups = [set(GROUPS[texts.index(text) % 5]) for text in shared.texts]
    for own, relevant in zip(judged.positives, shared.positives, strict=True):
        assert len(own) == 1
        assert relevant.tolist() == [place for place, group in enumerate(groups) if group & groups[own[0]]]
    with pytest.raises(InputError, match="'p39' has no categories"):
        open_dev_set(corpus, pairs, 40, compose, categories_field="categories")
    pool = ("--dev-split", "dev", "--dev-passages", 8, "--evaluate-every", 1)
    assert "MRR@10" in done(*command("dev", *PROMPTS, "--steps", 2, *pool))
