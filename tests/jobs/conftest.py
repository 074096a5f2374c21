"""Jobs run in this process over one local Ray; a small finished store, copied for each test that takes it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from local_cluster import without_progress
from samples import Judgement, make_passages, make_queries, save_tiny_bert, write_beir
from serving import make_served

EXACT_NUMERICS = ("--dtype", "float32", "--compile", "never")


class Outcome(NamedTuple):
    """What a person sees of a job."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class World:
    """A corpus of 240 passages in 4 parts, 40 judged queries, its embeddings `enc`, its index `idx` and two runs."""

    store: Path
    source: Path
    model: str
    passages: list[dict]
    queries: list[dict]
    judged: list[Judgement]


@pytest.fixture(autouse=True)
def _jobs_have_ray(local_ray: None) -> None:
    """No test here waits for a Ray of its own."""


@pytest.fixture
def job(capsys: pytest.CaptureFixture[str], call_job: Callable[..., int]) -> Callable[..., Outcome]:
    """job(name, *arguments): run it, whatever its end; lines of progress are left out."""

    def start(name: str, *arguments: object) -> Outcome:
        capsys.readouterr()
        status = call_job(name, *arguments)
        out, err = capsys.readouterr()
        return Outcome(status, out, without_progress(err))

    return start


@pytest.fixture
def done(job: Callable[..., Outcome]) -> Callable[..., str]:
    """done(name, *arguments): run a job that must succeed; what it printed."""

    def start(name: str, *arguments: object) -> str:
        outcome = job(name, *arguments)
        assert (outcome.status, outcome.err) == (0, "")
        return outcome.out

    return start


@pytest.fixture
def refused(job: Callable[..., Outcome]) -> Callable[..., str]:
    """refused(name, *arguments): run a job that must end with one line on stderr, status 1; the line."""

    def start(name: str, *arguments: object) -> str:
        outcome = job(name, *arguments)
        assert outcome.status == 1, outcome
        assert outcome.err.startswith("error: "), outcome.err
        assert outcome.err.count("\n") == 1
        assert outcome.err.endswith("\n")
        assert "ray::" not in outcome.err, outcome.err
        assert 'File "' not in outcome.err, outcome.err
        return outcome.err.rstrip("\n")

    return start


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny random encoder."""
    return save_tiny_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="session")
def _built(tmp_path_factory: pytest.TempPathFactory, model: str, call_job: Callable[..., int]) -> World:
    root = tmp_path_factory.mktemp("world")
    passages = make_passages(240)
    queries, judged = make_queries(passages, 40)
    source = write_beir(root / "tiny", passages, queries, {"test": judged[:30], "train": judged[30:]})
    at = ("--store", root / "store")
    assert call_job("import_corpus", *at, "--source", source, "--part-size", 60) == 0
    assert call_job("encode_corpus", *at, "--encoder", model, "--name", "enc", *EXACT_NUMERICS) == 0
    assert call_job("build_index", *at, "--name", "idx", "--factory", "IVF4,PQ8x4fs", "--shards", 3) == 0
    for mode in ("exact", "dense"):
        assert call_job("search", *at, "--mode", mode, "--k", 20, "--name", mode) == 0
    return World(root / "store", source, model, passages, queries, judged)


@pytest.fixture
def world(_built: World, tmp_path: Path) -> World:
    """The finished store, the test's own copy."""
    store = tmp_path / "store"
    shutil.copytree(_built.store, store)
    return World(store, _built.source, _built.model, _built.passages, _built.queries, _built.judged)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, model: str, call_job: Callable[..., int]) -> Path:
    """A store with a live release, to be copied; beside it its questions."""
    return make_served(tmp_path_factory.mktemp("served"), model, call_job)
