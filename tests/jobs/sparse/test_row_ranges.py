"""Leaves that search ranges of rows: their answers, merged, equal those of one process, hit by hit."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ready_client import serving
from samples import WORDS
from serving import OPTIONS, K, computed_prompt, make_growth, metrics_of, query_texts, task_files, upload
from stored_topics import model_of_words, store_topic_task

from riptide.indexing.store.store import Store
from riptide.serve.one_process import open_local
from riptide.serve.parts.engine import Engine
from riptide.serve.parts.leaf import Leaf, ask_local_leaves
from riptide.serve.parts.query_states import PendingQuery
from riptide.serve.parts.service_models import EncoderPart, RerankPart
from riptide.serve.release.live import live_release_id, read_live_release, save_as_live
from riptide.serve.release.planning import plan_release
from riptide.serve.release.release import Release
from riptide.serve.release.release_tasks import find_source_search
from riptide.serve.service.service_options import ServiceOptions
from riptide.serve.service_errors import LostError

SPLADE = "splade:impacts"
SOURCES = ("exact:enc", "index:four", "bm25:four", SPLADE, "0.5*bm25:four+0.5*index:four", f"bm25:four+{SPLADE}")
FILTERS = ({"lang": "de"}, {"lang": "en", "year": {"gte": 1990}}, {"year": {"gte": 5_000}})


@dataclass(frozen=True)
class Ranged:
    """A store whose index and BM25 have four shards, and its tasks with prompts of topics and computed ones.

    Attributes:
        root: The folder of the store and of its queries.
        releases: A release before the store has grown, and one after it.
    """

    root: Path
    releases: tuple[Release, Release]

    @property
    def store(self) -> Store:
        return Store(str(self.root / "store"))


@pytest.fixture(scope="module")
def ranged(
    sparse_store: Path,
    masked: Path,
    model: str,
    classifier: str,
    tmp_path_factory: pytest.TempPathFactory,
    call_job: Callable[..., int],
) -> Ranged:
    folder = tmp_path_factory.mktemp("ranged")
    root = Path(shutil.copytree(sparse_store, folder / "root"))
    store = Store(str(root / "store"))
    at, exact = ("--store", store.url), ("--dtype", "float32", "--compile", "never")
    store_topic_task(store, model, "topical", model_of_words(WORDS[::2], 3), OPTIONS)

    def done(*arguments: object) -> str:
        assert call_job(*arguments) == 0
        return ""

    growth = make_growth(folder, root / "store", model, done)

    def build() -> None:
        done("encode_corpus", *at, "--task", "topical", *exact)
        done("build_index", *at, "--embeddings", "enc", "--name", "four", "--factory", "IVF2,SQ8", "--shards", 4)
        done("build_bm25", *at, "--name", "four", "--shards", 4)

    build()
    live = live_release_id(store)
    names = {"embeddings": "enc", "index": "four", "bm25": "four", "sources": [SPLADE], "reranker": classifier}
    first, left = plan_release(store, **names)
    assert not left
    assert save_as_live(store, first, live and live[1])
    with serving(open_local(store, ServiceOptions(threads=2), device="cpu")) as client:
        for name, files in {
            "computed": upload(folder / "computed", computed_prompt(model, 1)),
            "fixed": task_files(folder / "fixed", model, 3, 6),
        }.items():
            answer = client.put(f"/v1/tasks/{name}", files=files)
            assert answer.status_code == 200, answer.text
        before = read_live_release(store)[0]
        growth.grow("corpus", "embeddings")
        done("encode_corpus", *at, "--encoder", masked, "--name", "sparse", "--pooling", "splade", "--dtype", "float32")
        done("build_index", *at, "--embeddings", "sparse", "--name", "impacts", "--shards", 3)
        build()
        answer = client.put("/v1/release", json={"release": None})
        assert answer.status_code == 200, answer.text
    after = read_live_release(store)[0]
    assert before is not None
    assert after is not None
    assert len(after.tasks) == len(before.tasks) == 4
    return Ranged(root, (before, after))


def engine_of(store: Store, of: int) -> Engine:
    leaves = [Leaf(store, number, of, threads=2) for number in range(of)]
    return Engine(EncoderPart(store, device="cpu"), RerankPart(store, device="cpu"), partial(ask_local_leaves, leaves))


def all_queries(ranged: Ranged, release: Release) -> list[PendingQuery]:
    """Returns queries of all tasks to all sources, filtered and not, re-ranked and not; one has no known word."""
    tasks = {task.name: task for task in release.tasks}
    texts = [*list(query_texts(ranged.root).values())[:2], f"{WORDS[1]} {WORDS[3]}", "xyzzy"]
    queries = []
    for source, text, filter in itertools.product(SOURCES, texts, (None, *FILTERS)):
        search, filtered = find_source_search(tasks["default"], source), filter and json.dumps(filter, sort_keys=True)
        queries.append(PendingQuery(release, text, tasks["default"], K, search, 4e9, filtered))
        if filter is None:
            queries.append(PendingQuery(release, text, tasks["default"], 3, search, 4e9, rerank=5, explain=True))
    for name, text in itertools.product(("computed", "fixed"), texts):
        queries.append(
            PendingQuery(release, text, tasks[name], 250, find_source_search(tasks[name], "index:four"), 4e9)
        )
    return queries + [
        PendingQuery(release, text, tasks["topical"], K, find_source_search(tasks["topical"], "exact:topical"), 4e9)
        for text in texts
    ]


@pytest.mark.parametrize("number", [0, 1], ids=["before growth", "after growth"])
def test_answers_of_leaves_equal_those_of_one_process(ranged: Ranged, number: int) -> None:
    release = ranged.releases[number]
    queries = all_queries(ranged, release)
    expected = engine_of(ranged.store, 1).search(queries)
    assert sum(answer.error is not None for answer in expected) > 0
    assert sum(len(answer.hits) for answer in expected) > 1_000
    for of in (2, 4, 5):
        for query, one, answer in zip(queries, expected, engine_of(ranged.store, of).search(queries), strict=True):
            assert answer.hits == one.hits, (of, query)
            assert repr(answer.error) == repr(one.error)
            assert answer.shards.total == of * one.shards.total


def test_a_release_with_fewer_shards_than_row_ranges_does_not_become_live(served: Path, tmp_path: Path) -> None:
    store = Store(str(shutil.copytree(served / "store", tmp_path / "store")))
    service = open_local(store, ServiceOptions(threads=2), device="cpu")
    with serving(service) as client:
        service.num_leaves = 4
        answer = client.put("/v1/release", json={"release": None})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "parameter row_ranges 4: index/idx has 3 shards, and each belongs to one range: give at most so many, or build "
        "the index with 4 shards"
    )


class Lost(Future[Any]):
    """The reply of a leaf that fails: at once, or when the time has passed."""

    def __init__(self, error: Exception, late: bool):
        super().__init__()
        self.late = late
        self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        if self.late:
            time.sleep(timeout or 0)
        return super().result(timeout)


@pytest.mark.parametrize(
    ("method", "error", "count", "late"),
    [
        ("search", RuntimeError("gone"), "failed", False),
        ("search", TimeoutError(), "timed_out", True),
        ("fetch", TimeoutError(), "timed_out", False),
        ("fetch", LostError("gone"), "failed", False),
    ],
)
def test_a_lost_leaf_gives_503_or_a_marked_partial_answer(
    served: Path, method: str, error: Exception, count: str, late: bool
) -> None:
    """If it is lost in the second call, its passages are missing."""
    store = Store(str(served / "store"))
    service = open_local(store, ServiceOptions(threads=2), device="cpu")
    leaves = [Leaf(store, number, 2, threads=1) for number in range(2)]
    lost = {1}

    def ask(called: str, request: Any) -> list[Any]:
        replies = ask_local_leaves(leaves, called, request)
        return [Lost(error, late) if called == method and n in lost else reply for n, reply in enumerate(replies)]

    service.engine.ask_leaves = ask
    text = next(iter(query_texts(served).values()))
    with serving(service) as client:
        body = {"query": text, "k": 240, "mode": "exact", "timeout_ms": 1500}
        answer = client.post("/v1/search", json=body)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        [result] = client.post("/v1/search", json={**body, "allow_partial": True}).json()["results"]
        assert result["shards"] == {"total": 2, "successful": 1, "failed": 0, "timed_out": 0, count: 1}
        # Vectors without an index would be divided at row 120; the second of three shards belongs to the second leaf.
        found = range(120) if method == "fetch" else range(80)
        assert {int(hit["id"][1:]) for hit in result["hits"]} == {n for n in found if n % 40}
        assert f'riptide_shard_errors_total{{how="{count}"}} 2.0' in metrics_of(client)
        lost.add(0)
        assert client.post("/v1/search", json={**body, "allow_partial": True}).status_code == 503
        assert client.get("/healthz").status_code == 200


def test_a_partial_answer_lacks_the_explanations_of_a_lost_leaf(served: Path) -> None:
    store = Store(str(served / "store"))
    service = open_local(store, ServiceOptions(threads=2), device="cpu")
    leaves, calls = [Leaf(store, number, 2, threads=1) for number in range(2)], list[str]()

    def ask(called: str, request: Any) -> list[Any]:
        calls.append(called)
        replies = ask_local_leaves(leaves, called, request)
        return [replies[0], Lost(LostError("gone"), late=False)] if called == "explain" else replies

    plain_query = SimpleNamespace(release=SimpleNamespace(id="r"), deadline=9.0, allow_partial=False, explain=False)
    explained = SimpleNamespace(**{**vars(plain_query), "explain": True})
    key: Any = service.searches.key
    assert key(plain_query) != key(explained), "a query without explanations does not wait for those of its batch"

    service.engine.ask_leaves = ask
    with serving(service) as client:
        body = {"query": next(iter(query_texts(served).values())), "k": 40, "mode": "dense"}
        [plain] = client.post("/v1/search", json=body).json()["results"]
        nothing = {"query": "xyzzy", "mode": "bm25", "explain": True}
        [empty] = client.post("/v1/search", json=nothing).json()["results"]
        assert empty["hits"] == []
        assert "explain" not in calls, "there is nothing to explain"
        assert client.post("/v1/search", json={**body, "explain": True}).status_code == 503
        body |= {"explain": True, "allow_partial": True}
        [result] = client.post("/v1/search", json=body).json()["results"]
        assert service.states.failures(["dense"])
    assert result["shards"] == {"total": 2, "successful": 1, "failed": 1, "timed_out": 0}
    explanations = [hit.pop("explanation") for hit in result["hits"]]
    assert result["hits"] == plain["hits"]
    for hit, explanation in zip(result["hits"], explanations, strict=True):
        [source] = explanation["sources"]
        assert source["score"] == hit["score"]
        assert (source["probed_list"] is None) == (int(hit["id"][1:]) >= 80)  # the second and third of three shards
    assert {each["sources"][0]["probed_list"] is None for each in explanations} == {True, False}
