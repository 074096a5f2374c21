"""The parameters of methods: they are the options of the jobs, refused by name, and named in errors."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest

from riptide import Store
from riptide.base.errors import InputError
from riptide.jobs.api.making import Making
from riptide.jobs.api.parameters import METHODS, Parameters
from riptide.jobs.commands.steps import job_names
from riptide.jobs.common.flat_options import options_by_name
from riptide.jobs.common.job_options import PROCESS_OPTIONS

NAMES = {"serve_search": "serve"}
SHOWN = [NAMES.get(method, method) for method in METHODS]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.mark.parametrize("method", SHOWN)
def test_named_parameters_are_options_of_the_job_and_all_others_are_described(method: str) -> None:
    job = "serve_search" if method == "serve" else method
    excluded = ("host", "tokens") if method == "serve" else ()
    parameters = Parameters.of_method(method, job=job, excluded=excluded)
    signature = inspect.signature(getattr(Making, method)).parameters
    named = [name for name in signature if name not in ("self", "options")]
    assert set(named) <= set(parameters.options)
    described = Making.describe_options(method)
    missing = {option.name for option in options_by_name(parameters.job).values()}
    missing -= {option.name for option in parameters.options.values()}
    hidden = {each.name for each in options_by_name(parameters.job).values() if each.metadata.get("hidden")}
    assert missing == {*PROCESS_OPTIONS, *excluded, *hidden} & set(options_by_name(parameters.job))
    for name, option in parameters.options.items():
        assert f"\n{name}: " in described, option
    assert " --" not in described
    assert (getattr(Making, method).__doc__ or "").count("store.") >= 1


def test_every_method_is_a_job() -> None:
    assert set(METHODS) <= set(job_names())


@pytest.mark.parametrize(
    ("method", "keywords", "expected"),
    [
        ("build_index", {"factry": "Flat"}, "build_index: unknown parameter factry; did you mean factory?"),
        ("build_index", {"store": "x"}, "build_index: unknown parameter store; known are embeddings, name, "),
        ("build_bm25", {"zzzzzz": 1}, "known are name, k1, b, language, shards, min_workers and 5 more, which "),
        ("build_bm25", {"zzzzzz": 1}, "describe_options('build_bm25') lists"),
        ("import_queries", {"queries": "x"}, "import_queries: unknown parameter queries; it is name here"),
        ("tune_prompts", {"undenoised": 1}, "tune_prompts: unknown parameter undenoised; "),
        ("build_index", {"shards": 2.5}, "build_index: shards=2.5: expected a whole number"),
        ("build_index", {"shards": "two"}, "build_index: shards='two': expected a whole number"),
        ("build_index", {"name": True}, "build_index: name=True: expected a text"),
        ("build_index", {"name": ["a", "b"]}, "build_index: name=['a', 'b']: expected a text"),
        ("import_corpus", {"append": 1}, "import_corpus: append=1: expected true or false"),
        ("import_corpus", {"filters": "year"}, "import_corpus: filters='year': expected pairs of a name and a value"),
        (
            "train_retriever",
            {"task": "t", "backbone": "b", "train": "promts"},
            "train_retriever: train='promts': expected prompts, lora or all; did you mean prompts?",
        ),
        ("train_retriever", {"task": "t"}, "train_retriever: backbone= is required: Backbone: a Hugging Face name"),
        ("train_reranker", {"backbone": "b", "batch": 0}, "batch=0: expected "),
        ("build_bm25", {"limit": 0}, "limit=0: expected at least 1"),
    ],
)
def test_bad_parameters_are_refused_by_name(store: Store, method: str, keywords: dict, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        Parameters.of_method(method).read(store.url, keywords)
    assert expected in str(caught.value)
    assert "--" not in str(caught.value)


def test_values_are_those_of_a_recipe(store: Store) -> None:
    """None is the default; tuples, paths and numbers of NumPy count too."""
    read = Parameters.of_method("build_index").read(
        store.url, {"name": None, "shards": np.int64(3), "recall": np.float64(0.1)}
    )
    assert (read.name, read.shards, read.recall, read.store) == (None, 3, 0.1, store.url)
    keywords = {"source": Path("a/b"), "metadata": (), "filters": {"year": "int64"}, "hold_out": 3}
    read = Parameters.of_method("import_corpus").read(store.url, keywords)
    assert (read.source, read.metadata, read.filters, read.hold_out) == ("a/b", (), {"year": "int64"}, 3)
    read = Parameters.of_method("import_corpus").read(store.url, {"source": "a", "append": np.bool_(True)})
    assert read.append is True
    read = Parameters.of_method("mine_negatives").read(store.url, {"sources": np.array(["bm25"]), "depth": np.int32(7)})
    assert (list(read.pool.sources), read.pool.depth) == (["bm25"], 7)
    read = Parameters.of_method("mine_negatives").read(store.url, {"sources": ["bm25", "exact:x"], "depth": 7})
    assert (list(read.pool.sources), read.pool.depth) == (["bm25", "exact:x"], 7)


@pytest.mark.parametrize("method", ["nothing", "store", "serve_search", "search", 5])
def test_the_options_of_what_is_no_method_are_refused(method: str) -> None:
    with pytest.raises(InputError, match=r"is no method with the options of a job; the methods are import_corpus, .*"):
        Making.describe_options(method)


@pytest.mark.parametrize("method", ["search_queries", "evaluate", "compare", "judge", "replay", "serve"])
def test_methods_with_other_names_than_their_jobs_are_described(method: str) -> None:
    described = Making.describe_options(method)
    assert described.startswith(f"store.{method}: parameters\n")
    assert "\nrun: values" not in described  # of an evaluation, runs and sources are given by position
