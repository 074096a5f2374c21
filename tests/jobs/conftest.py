"""Fixtures that run jobs in this process, without Ray; a small complete store, copied for each test that uses it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from job_outcome import Outcome
from local_cluster import without_progress
from page import PageServer, open_browser
from patched_cuda import patch_cuda
from ready_client import serving
from samples import Judgement, make_passages, make_queries, save_tiny_bert, write_beir
from serving import make_served, query_texts, started, task_files
from tiny import make_classifier

from riptide.indexing.store.store import Store
from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.worker_tasks import WorkerTask
from riptide.serve.client import Client
from riptide.serve.one_process import open_local
from riptide.serve.service.changes import ReleaseChanges
from riptide.serve.service.service import Service
from riptide.serve.service.service_options import ServiceOptions

EXACT_NUMERICS = ("--dtype", "float32", "--compile", "never")


@dataclass(frozen=True)
class World:
    """A corpus of 240 passages in 4 parts, 40 judged queries, its embeddings `enc`, its index `idx` and two runs."""

    store: Path
    source: Path
    model: str
    passages: list[dict]
    queries: list[dict]
    judged: list[Judgement]


@pytest.fixture
def job(capsys: pytest.CaptureFixture[str], call_job: Callable[..., int]) -> Callable[..., Outcome]:
    """job(name, *arguments) runs a job and returns its outcome, without lines of progress."""

    def start(name: str, *arguments: object) -> Outcome:
        capsys.readouterr()
        status = call_job(name, *arguments)
        out, err = capsys.readouterr()
        return Outcome(status, out, without_progress(err))

    return start


@pytest.fixture
def done(job: Callable[..., Outcome]) -> Callable[..., str]:
    """done(name, *arguments) runs a job that must succeed, and returns what it printed."""

    def start(name: str, *arguments: object) -> str:
        outcome = job(name, *arguments)
        assert (outcome.status, outcome.err) == (0, "")
        return outcome.out

    return start


@pytest.fixture
def refused(job: Callable[..., Outcome]) -> Callable[..., str]:
    """refused(name, *arguments) runs a job that must end with status 1 and one line on stderr; it returns the line.

    Only bad rows may be listed below it.
    """

    def start(name: str, *arguments: object) -> str:
        outcome = job(name, *arguments)
        assert outcome.status == 1, outcome
        assert outcome.err.startswith("error: "), outcome.err
        assert outcome.err.count("\n") == 1 or " more bad row" in outcome.err.partition("\n")[0], outcome.err
        assert outcome.err.endswith("\n")
        assert "ray::" not in outcome.err, outcome.err
        assert 'File "' not in outcome.err, outcome.err
        return outcome.err.partition("\n")[0]

    return start


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Gives SIGINT and SIGTERM the handlers of a new Python, as a job finds them."""
    # A Ray of this process may have set another handler.
    handlers = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    for number, handler in before.items():
        signal.signal(number, handler)


CHECKS = {"EncoderNumericsTask", "RerankerNumericsTask", "LuceneVersionsTask"}  # tasks that only look at a worker


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """no_work() makes every later job fail that gives work to a runner."""

    def run(runner: LocalRunner, task: WorkerTask, items: Iterable[Any], **options: Any) -> Iterator[tuple[Any, Any]]:
        assert type(task).__name__ in CHECKS, "work was done"
        return original(runner, task, items, **options)

    original = LocalRunner.run
    return lambda: monkeypatch.setattr(LocalRunner, "run", run)


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch, job: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """interrupt(after, name, *arguments) runs a job that Ctrl-C ends after a given number of units."""

    def start(after: int, name: str, *arguments: object) -> Outcome:
        def run(
            runner: LocalRunner, task: WorkerTask, items: Iterable[Any], **options: Any
        ) -> Iterator[tuple[Any, Any]]:
            nonlocal made
            for result in original(runner, task, items, **options):
                made += 1
                yield result
                if made == after:
                    raise KeyboardInterrupt

        made, original = 0, LocalRunner.run
        with monkeypatch.context() as patch:
            patch.setattr(LocalRunner, "run", run)
            outcome = job(name, *arguments)
        assert outcome.status == 130, outcome
        return outcome

    return start


@pytest.fixture
def sees_cuda(tmp_path: Path) -> dict[str, str]:
    """Environment variables of processes in which torch says that CUDA is available."""
    folder = tmp_path / "sees_cuda"
    patch_cuda(folder)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny random encoder."""
    return save_tiny_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the folder of a random cross-encoder whose probabilities lie on both sides of 0.5."""
    return str(make_classifier(Path(save_tiny_bert(tmp_path_factory.mktemp("models") / "tiny-cross"))))


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
    """The complete store, copied for the test."""
    store = tmp_path / "store"
    shutil.copytree(_built.store, store)
    return World(store, _built.source, _built.model, _built.passages, _built.queries, _built.judged)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, model: str, call_job: Callable[..., int]) -> Path:
    """The folder of a store with a live release, to be copied, and of its queries."""
    return make_served(tmp_path_factory.mktemp("served"), model, call_job)


@pytest.fixture
def service(store: Store) -> Service:
    """A service in this process of the fixture `store` of the test module."""
    return open_local(store, ServiceOptions(threads=2), device="cpu")


@pytest.fixture
def changes(service: Service) -> ReleaseChanges:
    """Changes of the live release of the fixture `service`."""
    return ReleaseChanges(service)


@pytest.fixture
def client(service: Service, changes: ReleaseChanges) -> Iterator[TestClient]:
    """A client of the fixture `service`, once that is ready."""
    with serving(service, changes=changes) as client:
        yield client


@pytest.fixture(scope="module")
def page_server(tmp_path_factory: pytest.TempPathFactory, served: Path, model: str) -> Iterator[PageServer]:
    """The server of a copy of the store."""
    folder = tmp_path_factory.mktemp("page")
    store = Path(shutil.copytree(served / "store", folder / "store"))
    task_files(folder / "prompt", model, 5)
    with started("--store", store, "--port", 0, "--examples", "queries/tiny") as (_, address):
        Client(address).put_task("ours", folder / "prompt")
        yield PageServer(address, store, next(iter(query_texts(served).values())))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium."""
    driver = open_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()
