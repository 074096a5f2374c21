"""A server that answers dense, BM25, SPLADE and fused tasks in one process, with the hits of the search job."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from local_cluster import port
from ready_client import serving
from samples import make_passages, write_beir
from serving import OPTIONS, K, computed_prompt, query_texts, started, task_files, upload
from splade_stores import brute_force, encode_queries, run_of

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.hit_sources.splade import SpladeKind
from riptide.indexing.store.model_artifacts import commit_files
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.encoding.sparse_encoder import SparseEncoder
from riptide.serve.client import Client
from riptide.serve.one_process import open_local
from riptide.serve.parts.part_states import parts_of
from riptide.serve.parts.query_states import PendingQuery
from riptide.serve.release.artifacts import ReleaseArtifacts
from riptide.serve.release.live import live_release_id, save_as_live
from riptide.serve.release.planning import plan_release
from riptide.serve.release.release import Release
from riptide.serve.release.release_tasks import find_source_search
from riptide.serve.release.renewal import renew_release
from riptide.serve.service.service import Service
from riptide.serve.service.service_options import ServiceOptions

Done = Callable[..., str]
SPLADE = "splade:impacts"
SOURCES = [SPLADE, "index:idx", "0.5*bm25+0.5*splade:impacts", "bm25", "splade:impacts+exact:enc"]


@pytest.fixture
def store(sparse_store: Path, tmp_path: Path) -> Store:
    return Store(str(shutil.copytree(sparse_store, tmp_path / "root") / "store"))


@pytest.fixture
def release(store: Store) -> Release:
    """A live release whose tasks serve the index of impacts."""
    before = live_release_id(store)
    assert before is not None
    made, left = plan_release(store, index="idx", sources=[SPLADE])
    assert not left
    assert save_as_live(store, made, before[1])
    return made


@pytest.fixture
def service(store: Store, release: Release) -> Service:
    return open_local(store, ServiceOptions(threads=2), device="cpu")


def test_a_mixed_batch_has_the_hits_of_the_jobs(
    store: Store, release: Release, service: Service, client: TestClient, tmp_path: Path, done: Done
) -> None:
    """All sources in one batch of the engine; and over HTTP, where the page's source of each hit comes from."""
    asked = query_texts(tmp_path / "root")
    for number, source in enumerate(SOURCES):
        done("search", "--store", store.url, "--source", source, "--k", K, "--name", f"run{number}")
    task = release.task("default")
    assert task is not None
    batch = [(id, number) for id in asked for number in range(len(SOURCES))]
    queries = [
        PendingQuery(release, asked[id], task, K, find_source_search(task, SOURCES[number]), float("inf"))
        for id, number in batch
    ]
    answers = service.engine.search(queries)
    runs = [run_of(store, f"run{number}") for number in range(len(SOURCES))]
    for (id, number), answer in zip(batch, answers, strict=True):
        assert answer.error is None
        assert [hit.id for hit in answer.hits] == [hit for hit, _ in runs[number].get(id, [])]
        expected = [score for _, score in runs[number].get(id, [])]
        np.testing.assert_allclose([hit.score for hit in answer.hits], expected, rtol=1e-5)
        names = {name.rpartition("*")[2] for name in SOURCES[number].split("+")}
        assert all(set(hit.scores) <= names and hit.scores for hit in answer.hits)

    texts = list(asked.values())[:6]
    body = client.post("/v1/search", json={"queries": texts, "k": K, "source": SPLADE}).json()
    found = [[(hit["id"], hit["score"]) for hit in result["hits"]] for result in body["results"]]
    assert found == [runs[0][id] for id in list(asked)[:6]]
    assert all(hit["scores"] == {SPLADE: hit["score"]} for result in body["results"] for hit in result["hits"])
    [listed] = client.get("/v1/tasks").json()["tasks"]
    assert listed["sources"] == ["index:idx", "exact:enc", "bm25", SPLADE]
    parts = client.get("/readyz").json()["parts"]
    assert set(parts) == {"encoder", "dense", "bm25", "splade", "passages"}


def test_filters_and_new_tasks(store: Store, client: TestClient, masked: Path, model: str, tmp_path: Path) -> None:
    texts = list(query_texts(tmp_path / "root").values())[:5]
    corpus = Corpus.open(store)
    years = range(1950, 1976)
    among = {year - 1900 for year in years} - set(corpus.deleted.tolist())
    expected = brute_force(store, "sparse", encode_queries(masked, texts), K, among)

    def hits(**request: object) -> list[list[tuple[str, float]]]:
        answer = client.post("/v1/search", json={"queries": texts, "k": K, "source": SPLADE, **request})
        assert answer.status_code == 200, answer.text
        return [[(hit["id"], hit["score"]) for hit in result["hits"]] for result in answer.json()["results"]]

    assert hits(filter={"year": {"gte": 1950, "lte": 1975}}) == expected
    put = client.put("/v1/tasks/other", files=task_files(tmp_path / "prompt", model, 3))
    assert put.status_code == 200, put.text
    assert hits(task="other") == hits()  # the prompt is one for dense vectors


def without_dense(store: Store, *more: str) -> None:
    """Removes the dense embeddings and the release, and further folders."""
    for folder in ("embeddings/enc", "index/idx", "releases", "serving", *more):
        shutil.rmtree(Path(store.url) / folder)


def test_a_service_without_dense_embeddings(
    store: Store, masked: Path, model: str, tmp_path: Path, done: Done, refused: Done
) -> None:
    """Its only source is the index of impacts."""
    without_dense(store, "bm25")
    at = ("serve_search", "--store", store.url, "--plan")
    assert "search the index of these by the source splade:NAME" in refused(*at)
    out = done(*at, "--sources", SPLADE)
    assert "task      default: splade:impacts\n" in out
    assert "backbone  none" in out
    assert "task ours: a prompt is one of an encoder of dense vectors" in refused(
        *at, "--sources", SPLADE, "--tasks", "ours"
    )
    made, _ = plan_release(store, sources=[SPLADE])
    assert save_as_live(store, made, None)
    assert Release.load(store, made.id) == made == renew_release(store, made)
    service = open_local(store, ServiceOptions(threads=2), device="cpu")
    texts = list(query_texts(tmp_path / "root").values())[:5]
    expected = brute_force(store, "sparse", encode_queries(masked, texts), K)
    with serving(service) as client:
        body = client.post("/v1/search", json={"queries": texts, "k": K, "source": SPLADE}).json()
        assert [[(hit["id"], hit["score"]) for hit in result["hits"]] for result in body["results"]] == expected
        assert set(client.get("/readyz").json()["parts"]) == {"encoder", "splade", "passages"}
        info = client.get("/v1/info").json()
        assert (info["encoder"], info["dim"], info["modes"]) == (None, None, [])
        [task] = client.get("/v1/tasks").json()["tasks"]
        assert (task["embeddings"], task["modes"], task["sources"]) == (None, [], [SPLADE])
        answer = client.post("/v1/search", json={"query": "bafa"})
        message = "task 'default' has no dense embeddings, which mode dense searches: name a source (splade:impacts)"
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
        assert client.post("/v1/embeddings", json={"input": "bafa"}).status_code == 400
        put = client.put("/v1/tasks/other", files=task_files(tmp_path / "prompt", model, 3))
        assert (put.status_code, "this release has no dense embeddings" in put.text) == (400, True)
        assert client.put("/v1/release", json={"release": None}).status_code == 200
        assert client.get("/openapi.json").status_code == 200


def test_a_service_of_bm25_alone(store: Store, tmp_path: Path) -> None:
    without_dense(store, "embeddings/sparse", "index/impacts")
    made, _ = plan_release(store)
    assert (made.encoder, parts_of(made)) == (None, ["bm25", "passages"])
    assert save_as_live(store, made, None)
    service = open_local(store, ServiceOptions(threads=2), device="cpu")
    [text, *_] = query_texts(tmp_path / "root").values()
    with serving(service) as client:
        answers = [
            client.post("/v1/search", json={"query": text, **by}) for by in ({"mode": "bm25"}, {"source": "bm25"})
        ]
        first, second = ([hit["id"] for hit in answer.json()["results"][0]["hits"]] for answer in answers)
        assert first == second != []
        assert client.get("/v1/info").json()["modes"] == ["bm25"]
        assert client.post("/v1/search", json={"query": text, "mode": "hybrid"}).status_code == 400


def test_dense_embeddings_are_left_out_by_option_alone(
    store: Store, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    """If they are complete, and if their encoding was interrupted."""
    without = plan_release(store, embeddings="none", sources=[SPLADE])[0]
    assert without.encoder is None
    assert [source.source_text for task in without.tasks for source in task.served_sources()] == ["bm25", SPLADE]
    for folder in ("releases", "serving", "index/idx"):
        shutil.rmtree(Path(store.url) / folder)
    for manifest in Path(store.url).glob("embeddings/enc/*/manifest.json"):
        manifest.unlink()
    at = ("serve_search", "--store", store.url, "--plan")
    for more in ((), ("--sources", SPLADE), ("--bm25", "bm25")):
        line = refused(*at, *more)
        assert line.endswith(
            "embeddings/enc/g0000 was begun and is not complete: run the command that makes it again, or give "
            "--embeddings none to serve the store without dense search"
        )
    documented("Serving a store", "dense embeddings whose encoding was interrupted", line.removeprefix("error: "), 1)
    out = done(*at, "--embeddings", "none", "--sources", SPLADE)
    assert f"release   {without.id} (new) of" in out
    assert "--index idx: expected no index with --embeddings none" in refused(
        *at, "--embeddings", "none", "--index", "idx"
    )
    shutil.rmtree(Path(store.url) / "bm25")
    assert "has no BM25 index, and no sources are named" in refused(*at, "--embeddings", "none")


def test_a_release_pins_what_the_source_needs(store: Store, release: Release, masked: Path, done: Done) -> None:
    original = SpladeKind.open
    assert {"index/impacts/g0001", "embeddings/sparse/g0000", "embeddings/sparse/g0001"} <= release.fingerprints.keys()
    assert renew_release(store, release) == release
    ReleaseArtifacts(store, release)
    with pytest.MonkeyPatch.context() as patch:  # a source of all tasks is opened once
        names: list[str] = []
        patch.setattr(SpladeKind, "open", lambda kind, at, name: names.append(name) or original(kind, at, name))
        [task] = release.tasks
        assert len(renew_release(store, replace(release, tasks=(task, replace(task, name="more")))).tasks) == 2
        assert names == ["impacts"]
    at = ("--store", store.url)
    out = done("serve_search", *at, "--renew", "--index", "idx", "--sources", SPLADE, "--plan")
    assert f"release   {release.id} of" in out
    assert "task      default: index/idx, bm25/bm25, splade:impacts" in out
    with pytest.raises(InputError, match="index/idx is a FAISS index of dense embeddings"):
        plan_release(store, index="idx", sources=["splade:idx"])
    with pytest.raises(InputError, match="embeddings/sparse: holds sparse vectors, expected dense ones"):
        plan_release(store, index="impacts")


def test_a_source_of_a_live_release_grows_with_the_store(
    store: Store, release: Release, tmp_path: Path, done: Done
) -> None:
    """The server that is started again serves it without a passage that was deleted, and once it covers new ones."""
    at = ("--store", store.url)
    (tmp_path / "gone").write_text("p77\n")
    done("import_corpus", *at, "--delete", tmp_path / "gone")
    out = done("serve_search", *at, "--plan")
    assert out.startswith("newer     corpus: g0002, 0 passages added, 1 deleted\nrelease   ")
    assert "task      default: index/idx, bm25/bm25, splade:impacts\n" in out
    done("import_corpus", *at, "--append", "--source", write_beir(tmp_path / "more", make_passages(1, prefix="n")))
    warning = done("serve_search", *at, "--plan").splitlines()[0]
    assert warning.startswith(f"warning: release {release.id} is served as it is")
    for behind in ("bm25/bm25", "embeddings/enc", "embeddings/sparse", "index/idx", "index/impacts"):
        assert f"{behind} covers 240 of 241 passages" in warning


@pytest.mark.ray_serve
@pytest.mark.slow
def test_ray_serve_has_the_hits_of_the_vectors(
    store: Store, release: Release, masked: Path, tmp_path: Path, done: Done, sees_cuda: dict[str, str]
) -> None:
    """The front encodes the queries, and two leaves search the impacts."""
    texts = list(query_texts(tmp_path / "root").values())[:8]
    at = ("--store", store.url, "--row-ranges", 2, "--port", port("127.0.0.1"))
    with started(*at, environment=sees_cuda) as (process, address):
        client = Client(address)
        by_query = client.search_all(texts, source=SPLADE, k=K)
        assert [[(hit.id, hit.score) for hit in hits] for hits in by_query] == brute_force(
            store, "sparse", encode_queries(masked, texts), K
        )
        assert all(hit.scores == {SPLADE: hit.score} for hits in by_query for hit in hits)
        done("search", "--store", store.url, "--source", SOURCES[2], "--k", K, "--name", "fused")
        fused = client.search_all(texts, source=SOURCES[2], k=K)
        runs = list(run_of(store, "fused").values())[:8]
        assert [[hit.id for hit in hits] for hits in fused] == [[id for id, _ in run] for run in runs]
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0


@pytest.mark.parametrize("weight", [np.nan, 3e7, 2e5])
def test_a_query_that_cannot_be_searched_fails_alone(
    store: Store,
    service: Service,
    client: TestClient,
    weight: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """In a batch with others: a vector that is not finite, a weight that is no impact, a product that is rounded."""
    texts = list(query_texts(tmp_path / "root").values())[:6]
    body = {"k": K, "source": "0.5*bm25+0.5*splade:impacts"}
    expected = client.post("/v1/search", json={"queries": texts, **body}).json()["results"]
    bad, original = texts[2], Encoder.pooled_batches

    def overflowing(self: Encoder, tokens: Any, **options: Any) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        wanted = self.tokenize([bad], side="query").ids.tolist()
        for rows, weights in original(self, tokens, **options):
            for place, row in enumerate(rows):
                start = tokens.starts[row]
                if tokens.ids[start : start + tokens.lengths[row]].tolist() == wanted:
                    weights[place, 7] = weight
            yield rows, weights

    monkeypatch.setattr(Encoder, "pooled_batches", overflowing)
    live = service.live
    assert live is not None
    task = live.tasks["default"]
    queries = [
        PendingQuery(live.release, text, task, K, find_source_search(task, str(body["source"])), float("inf"))
        for text in texts
    ]
    answers = service.engine.search(queries)
    assert [isinstance(answer.error, InputError) for answer in answers] == [text == bad for text in texts]
    assert str(answers[2].error).startswith("source splade:impacts: ")
    for answer, result in zip(answers, expected, strict=True):
        assert answer.error or [hit.id for hit in answer.hits] == [hit["id"] for hit in result["hits"]]
    refused = client.post("/v1/search", json={"query": bad, **body})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert client.get("/readyz").json()["ready"]


def test_embeddings_of_a_task_whose_prompts_are_computed(
    store: Store, masked: Path, tmp_path: Path, done: Done
) -> None:
    """The part encodes queries with their prompts; one without a word that the backbone knows fails alone."""
    options = replace(OPTIONS, pooling="splade")
    prompt = computed_prompt(str(masked), 1, encoder=options)
    upload(tmp_path / "made", prompt)
    with store.create("prompts", "computed", config={}, inputs={}) as draft:
        draft.add_notes(backbone=str(masked), options=asdict(options))
        commit_files(draft, tmp_path / "made")
    at = ("--store", store.url)
    done("encode_corpus", *at, "--task", "computed", "--name", "computed", "--dtype", "float32")
    done("build_index", *at, "--embeddings", "computed", "--name", "computed", "--shards", 3)
    release, excluded = plan_release(store, index="idx", sources=["splade:computed"])
    assert list(excluded) == ["computed"]  # a prompt of sparse vectors, which the dense encoder does not serve
    release.save(store)
    service = open_local(store, ServiceOptions(threads=2), device="cpu")
    service.open_release(release.id)
    service.check_parts(release)
    task, texts = release.tasks[0], list(query_texts(tmp_path / "root").values())[:3]
    queries = [
        PendingQuery(release, text, task, K, find_source_search(task, "splade:computed"), 4e9)
        for text in [texts[0], "漢字", *texts[1:]]
    ]
    answers = service.engine.search(queries)
    assert str(answers.pop(1).error).startswith("source splade:computed: the text has no word that the backbone knows")
    encoder = SparseEncoder(str(masked), options, tasks={"computed": prompt})
    among = set(range(240)) - set(Corpus.open(store).deleted.tolist())
    expected = brute_force(store, "computed", encoder.encode(texts, task="computed"), K, among)
    assert [[(hit.id, hit.score) for hit in answer.hits] for answer in answers] == expected
