"""Sources by name over HTTP, against the search job; and a new kind, which is served once it is registered."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from fixed_hits import fixed_kind, save_fixed
from serving import K, query_texts, task_files

from riptide.base.errors import InputError
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.store import Store
from riptide.serve.parts.engine import Engine
from riptide.serve.parts.leaf import Leaf, ask_local_leaves
from riptide.serve.parts.query_states import PendingQuery
from riptide.serve.parts.service_models import EncoderPart, RerankPart
from riptide.serve.release.live import live_release_id, save_as_live
from riptide.serve.release.planning import plan_release
from riptide.serve.release.release import Release
from riptide.serve.release.release_tasks import ServedTask, find_source_search, search_of_mode

Done = Callable[..., str]
ROWS = [7, 3, 200, 41, 0]  # row 200 and row 0 are deleted
FIXED = ["p7", "p3", "p41"]


@pytest.fixture
def store(served: Path, tmp_path: Path) -> Store:
    shutil.copytree(served, tmp_path / "root")
    return Store(str(tmp_path / "root" / "store"))


@pytest.fixture
def release(store: Store) -> Iterator[Release]:
    """A live release with a source of the new kind."""
    with fixed_kind():
        save_fixed(store, "best", ROWS)
        before = live_release_id(store)
        assert before is not None
        made, left = plan_release(store, sources=["fixed:best"])
        assert not left
        assert save_as_live(store, made, before[1])
        yield made


def hits_of(client: TestClient, texts: list[str], **request: Any) -> list[list[dict[str, Any]]]:
    answer = client.post("/v1/search", json={"queries": texts, "k": K, **request})
    assert answer.status_code == 200, answer.text
    return [result["hits"] for result in answer.json()["results"]]


SOURCES = ["bm25", "exact:enc", "index:idx", "exact:enc+bm25", "0.3*index:idx+0.7*bm25", "2*exact:enc+1*index:idx"]


@pytest.mark.slow
def test_a_source_finds_what_the_search_job_finds(store: Store, tmp_path: Path, client: TestClient, done: Done) -> None:
    asked = query_texts(tmp_path / "root")
    for number, source in enumerate(SOURCES):
        done("search", "--store", store.url, "--source", source, "--k", K, "--name", f"run{number}")
        expected: dict[str, list[tuple[str, float]]] = {id: [] for id in asked}
        for table in read_run(store.open("runs", f"run{number}")):
            for row in table.to_pylist():
                expected[row["query_id"]].append((row["id"], row["score"]))
        answer = client.post("/v1/search", json={"queries": list(asked.values()), "k": K, "source": source}).json()
        assert (answer["mode"], answer["source"]) == (None, source)
        for hits, wanted in zip((one["hits"] for one in answer["results"]), expected.values(), strict=True):
            assert [hit["id"] for hit in hits] == [id for id, _ in wanted]
            np.testing.assert_allclose([hit["score"] for hit in hits], [score for _, score in wanted], rtol=1e-5)
            names = {name.rpartition("*")[2] for name in source.split("+")}
            assert all(set(hit["scores"]) <= names and hit["scores"] for hit in hits)


def test_a_source_that_is_not_served_is_refused(client: TestClient, documented: Callable[..., None]) -> None:
    has = "it has index:idx, exact:enc, bm25"
    for source, status, message in [
        ("exact:other", 400, f"source 'exact:other': task 'default' does not serve it; {has}"),
        ("bm25:wide", 400, f"source 'bm25:wide': task 'default' does not serve it; {has}"),
        ("fixed:best", 400, "expected bm25, bm25:NAME, exact:EMBEDDINGS, index:NAME, splade:NAME, or A+B"),
        ("0.4*bm25+exact:enc", 400, "give every one of the sources a weight, or none"),
        ("bm25+bm25:bm25", 400, "a source is given twice"),
        ("", 422, "body.source: String should have at least 1 character"),
    ]:
        answer = client.post("/v1/search", json={"query": "bafa", "source": source})
        assert (answer.status_code, message in answer.text) == (status, True), answer.text
    answer = client.post("/v1/search", json={"query": "bafa", "source": "exact:other"})
    documented("HTTP", "a search in a source that the task does not serve", answer.json()["error"]["message"], 400)
    both = client.post("/v1/search", json={"query": "bafa", "source": "bm25", "mode": "dense"})
    assert (both.status_code, "give one of mode and source" in both.text) == (422, True)


def test_a_new_kind_is_served_beside_the_others(
    store: Store, tmp_path: Path, release: Release, client: TestClient, model: str
) -> None:
    texts = list(query_texts(tmp_path / "root").values())[:4]
    assert client.get("/readyz").json() == {
        "ready": True,
        "parts": {name: {"state": "ready"} for name in ("encoder", "dense", "bm25", "fixed", "passages")},
    }
    [task] = client.get("/v1/tasks").json()["tasks"]
    assert task["sources"] == ["index:idx", "exact:enc", "bm25", "fixed:best"]
    unexplained = client.post("/v1/search", json={"query": "bafa", "source": "fixed:best", "explain": True})
    message = "the source fixed:best cannot explain its hits: leave parameter explain out"
    assert (unexplained.status_code, unexplained.json()["error"]["message"]) == (400, message)
    for hits in hits_of(client, texts, source="fixed:best"):
        assert [hit["id"] for hit in hits] == FIXED
        assert [hit["scores"] for hit in hits] == [{"fixed:best": 100.0}, {"fixed:best": 99.0}, {"fixed:best": 98.0}]
    dense = hits_of(client, texts, mode="exact")
    for hits, others in zip(hits_of(client, texts, source="1*fixed:best+0.001*exact:enc"), dense, strict=True):
        assert [hit["id"] for hit in hits[:2]] == FIXED[:2]
        assert [hit["id"] for hit in hits[2:5]] == [hit["id"] for hit in others if hit["id"] not in FIXED[:2]][:3]
    assert hits_of(client, texts) == hits_of(client, texts, mode="dense")  # modes are what they were
    put = client.put("/v1/tasks/other", files=task_files(tmp_path / "prompt", model, 3))
    assert put.json()["sources"] == task["sources"]
    assert [hit["id"] for hit in hits_of(client, texts[:1], source="fixed:best", task="other")[0]] == FIXED
    assert client.put("/v1/release", json={"release": None}).status_code == 200
    assert client.delete("/v1/tasks/other").json()["release"] == release.id
    assert "fixed/best" in Release.load(store, release.id).fingerprints


def test_a_release_without_further_sources_is_the_one_that_it_was(store: Store, release: Release) -> None:
    live = Release.load(store, release.id)
    assert live == release
    before, _ = plan_release(store)
    assert before.id != release.id
    assert before.tasks[0].document().keys() == {"name", "prompt", "embeddings", "index", "bm25"}
    assert store.open("releases", before.id)  # as `served` has made it
    without = release.with_task(before.tasks[0], [])
    assert without == before  # also without the artifacts of the source


def test_a_release_takes_single_sources_that_tasks_do_not_have_anyway(store: Store, release: Release) -> None:
    for source, message in [
        ("fixed:none", "fixed/none: there is no such artifact"),
        ("fixed:best+bm25", "expected one source"),
        ("bm25", "name it by parameter bm25"),
        ("exact:enc", "name it by parameter embeddings"),
    ]:
        with pytest.raises(InputError, match=message.replace("+", r"\+")):
            plan_release(store, sources=[source])


def test_the_job_names_further_sources(store: Store, release: Release, done: Done, refused: Callable[..., str]) -> None:
    at = ("serve_search", "--store", store.url)
    assert "task      default: index/idx, bm25/bm25, fixed:best" in done(*at, "--plan")
    out = done(*at, "--renew", "--sources", "fixed:best", "--plan")
    assert f"release   {release.id} of" in out
    assert "has a live release" in refused(*at, "--sources", "fixed:best")


def test_a_new_release_keeps_the_sources_of_the_live_one(
    store: Store, release: Release, done: Done, refused: Callable[..., str]
) -> None:
    """Unless others are named, or none."""
    renew = ("serve_search", "--store", store.url, "--renew", "--plan")
    assert f"release   {release.id} of" in done(*renew)
    save_fixed(store, "other", ROWS)
    assert "task      default: index/idx, bm25/bm25, fixed:other\n" in done(*renew, "--sources", "fixed:other")
    assert "task      default: index/idx, bm25/bm25\n" in done(*renew, "--sources")
    shutil.rmtree(Path(store.url) / "fixed/best")
    line = refused(*renew)
    assert "fixed/best: there is no such artifact" in line
    assert line.endswith("the live release serves this source: name the sources to serve with --sources")


def test_leaves_search_a_new_kind_in_their_rows(store: Store, release: Release) -> None:
    encoder, reranker = EncoderPart(store, device="cpu"), RerankPart(store, device="cpu")
    [task] = release.tasks
    query = PendingQuery(release, "bafa", task, 5, find_source_search(task, "fixed:best"), 4e9)
    answers = []
    for of in (1, 3):
        leaves = [Leaf(store, number, of) for number in range(of)]
        answers += Engine(encoder, reranker, partial(ask_local_leaves, leaves)).search([query])
    assert answers[0].hits == answers[1].hits != []


def test_a_mode_is_a_source_of_the_task() -> None:
    whole, bare = ServedTask("t", None, "enc", "idx", "wide"), ServedTask("t", None, "enc")
    modes = {mode: search_of_mode(whole, mode).source for mode in ("dense", "exact", "bm25", "hybrid")}
    expected = {"dense": "index:idx", "exact": "exact:enc", "bm25": "bm25:wide"}
    assert modes == {**expected, "hybrid": "0.5*bm25:wide+0.5*index:idx"}
    assert search_of_mode(bare, "dense").source == "exact:enc"
    assert search_of_mode(whole, "hybrid").labels == ("bm25", "dense")
    assert find_source_search(whole, "bm25+exact:enc").source == "bm25:wide+exact:enc"  # the only one of the kind
    assert (
        find_source_search(whole, "exact:enc").sources[0].target
        == find_source_search(whole, "index:idx").sources[0].target
    )
    with pytest.raises(InputError, match="task 't' has no BM25"):
        search_of_mode(bare, "hybrid")
