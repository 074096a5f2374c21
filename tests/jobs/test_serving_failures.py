"""A service whose store or files fail: status 503, a log line, /readyz, and no path in any response."""

from __future__ import annotations

import asyncio
import logging
import pickle
import platform
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from ray.exceptions import RayTaskError
from ready_client import serving
from serving import query_texts, task_files

from riptide.base.errors import InputError
from riptide.base.wording import Command, Parameter
from riptide.indexing.hit_sources.search_options import Mode
from riptide.indexing.storage.storage import LocalStorage
from riptide.indexing.store.store import Store
from riptide.serve.deployments import Application, open_front
from riptide.serve.http.http_errors import MESSAGES
from riptide.serve.one_process import open_local
from riptide.serve.parts.engine import Engine
from riptide.serve.parts.part import ServicePart, SharedObjects
from riptide.serve.parts.part_states import ENCODER, PASSAGES, RERANKER
from riptide.serve.parts.query_states import PendingQuery, QueryAnswer
from riptide.serve.release.live import live_release_id
from riptide.serve.release.release import Release
from riptide.serve.release.release_tasks import search_of_mode
from riptide.serve.remote import send_to_leaves
from riptide.serve.service.changes import ReleaseChanges
from riptide.serve.service.service import Service
from riptide.serve.service.service_options import ServiceOptions
from riptide.serve.service.warm_up import WarmUpSearch
from riptide.serve.service_errors import EncoderDriftError, OverloadedError, RequestError, StoreError, client_error

DENSE, BM25 = "dense", "bm25"
FILTERED = {"query": "bafa", "filter": {"lang": "de"}}  # whose vectors are read from the files again


@pytest.fixture
def store(served: Path, tmp_path: Path) -> Store:
    """A copy of the store, which the test may damage."""
    shutil.copytree(served / "store", tmp_path / "store")
    return Store(str(tmp_path / "store"))


def file_of(store: Store, pattern: str) -> Path:
    """Returns the first file of a local store that matches a pattern."""
    return sorted(Path(store.url).glob(pattern))[0]


def live_release(store: Store) -> Release:
    found = live_release_id(store)
    assert found is not None
    return Release.load(store, found[0])


def sample_of(release: Release) -> WarmUpSearch:
    task = release.tasks[0]
    return WarmUpSearch(task, task.served_sources()[0])


def check(service: Service) -> None:
    assert service.live is not None
    service.check_parts(service.live.release)


def is_clean(text: str, store: Store) -> bool:
    """Returns whether a text contains neither a path nor a long digest."""
    return store.url not in text and not re.search(r"[0-9a-f]{33,}|/tmp/|s3://|\.faiss|\.npy|\.arrow", text)


FILES = {
    "index": ("index/idx/g0001/shard-*.faiss", DENSE, {"query": "bafa"}),
    "embeddings": ("embeddings/enc/g0000/*.npy", DENSE, {"query": "bafa", "mode": "exact"}),
    "BM25": ("bm25/bm25/g0001/*.cfs", BM25, {"query": "bafa", "mode": "bm25"}),
    "passages": ("corpus/g0000/part-*.arrow", PASSAGES, {"query": "bafa"}),
}


def test_an_encoder_that_fails_fails_only_the_queries_of_a_batch_that_need_it(
    service: Service, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    assert service.live is not None
    release, [task] = service.live.release, service.live.release.tasks
    modes: tuple[Mode, ...] = ("dense", "bm25", "hybrid")
    queries = [
        PendingQuery(release, "bafa", task, 3, search_of_mode(task, mode), time.monotonic() + 60) for mode in modes
    ]
    expected = service.engine.search(queries)[1].hits
    monkeypatch.setattr(service.engine.encoder, "encode", fail)
    dense, bm25, hybrid = service.engine.search(queries)
    assert (bm25.error, bm25.hits) == (None, expected)
    assert [str(answer.error) for answer in (dense, hybrid)] == ["out of memory"] * 2


def test_a_release_stays_open_while_its_encoder_is_described(
    service: Service, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a release that is closed at that moment would be opened again, and never closed."""
    users, describe = list[int](), service.engine.encoder.describe

    def note_users(release_id: str) -> dict[str, Any]:
        users.append(service._users[release_id])
        return describe(release_id)

    monkeypatch.setattr(service.engine.encoder, "describe", note_users)
    assert client.get("/v1/info").json()["dim"] == 32
    assert users == [1]


@pytest.mark.parametrize("kind", FILES)
def test_damaged_files_fail_their_part_until_they_are_restored(
    store: Store,
    service: Service,
    client: TestClient,
    kind: str,
    caplog: pytest.LogCaptureFixture,
    documented: Callable[..., None],
) -> None:
    """Replaces a file by a copy with one changed byte; existing memory maps keep the old content."""
    pattern, part, request = FILES[kind]
    file = file_of(store, pattern)
    kept = file.read_bytes()
    file.rename(file.with_suffix(".kept"))
    file.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    check(service)
    ready = client.get("/readyz")
    assert ready.status_code == 503
    assert next(iter(ready.json())) == "ready"
    assert ready.json()["parts"][part] == {"state": "failed", "reason": "files are damaged"}
    assert {one["state"] for name, one in ready.json()["parts"].items() if name != part} == {"ready"}
    answer = client.post("/v1/search", json=request)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], answer.headers["retry-after"]) == (503, "store_error", "1")
    assert is_clean(answer.text, store)
    assert is_clean(ready.text, store)
    logged = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert any(error["request_id"] in line and file.name in line for line in logged)
    documented("HTTP", f"a search where a file of the {kind} is damaged", error["message"], 503)
    file.with_suffix(".kept").rename(file)
    check(service)
    assert client.get("/readyz").json() == {
        "ready": True,
        "parts": {name: {"state": "ready"} for name in (ENCODER, DENSE, BM25, PASSAGES)},
    }
    assert client.post("/v1/search", json=request).status_code == 200


def test_a_failed_read_marks_its_part_until_it_works_again(
    store: Store, service: Service, client: TestClient, documented: Callable[..., None]
) -> None:
    files = sorted(Path(store.url).glob("embeddings/enc/g0000/*.npy"))
    for file in files:
        file.rename(file.with_suffix(".away"))
    answer = client.post("/v1/search", json=FILTERED)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "store_error")
    assert is_clean(answer.text, store)
    documented("HTTP", "a search that reads a file which has been removed", answer.json()["error"]["message"], 503)
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["parts"][DENSE]["reason"]) == (503, "files are missing")
    documented("HTTP", "GET /readyz where files of a part are missing", ready.text, 503)
    check(service)
    assert client.get("/readyz").status_code == 503
    for file in files:
        file.with_suffix(".away").rename(file)
    check(service)
    assert client.get("/readyz").status_code == 200
    assert client.post("/v1/search", json=FILTERED).status_code == 200


@pytest.mark.parametrize("part", [ENCODER, RERANKER])
def test_an_encoder_or_a_reranker_that_fails_is_reported(
    service: Service, client: TestClient, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.live is not None
    if part == RERANKER:  # the release has none: what is said of one is what counts here
        object.__setattr__(service.live.release, "reranker", "some/model")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("/models/weights: Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(service.parts[part], "_answer_probe", fail)
        check(service)
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["parts"][part]["reason"]) == (503, "files cannot be read")
        assert "weights" not in ready.text
    check(service)
    assert client.get("/readyz").status_code == 200


def test_changes_of_what_is_served_tell_a_store_that_fails_from_a_mistake(
    store: Store,
    client: TestClient,
    model: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    documented: Callable[..., None],
) -> None:
    files = task_files(tmp_path / "prompt", model, 1)
    unknown = client.put("/v1/tasks/new", files=files, data={"index": "none"})
    assert unknown.status_code == 400
    assert is_clean(unknown.text, store)
    missing = client.put("/v1/release", json={"release": "0" * 16})
    assert missing.status_code == 400
    assert is_clean(missing.text, store)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    manifest = file_of(store, "index/idx/g0001/manifest.json")
    manifest.rename(manifest.with_suffix(".away"))
    for case, send in {
        "PUT /v1/tasks/NAME where the live index has lost its manifest": lambda: client.put(
            "/v1/tasks/new", files=files
        ),
        "PUT /v1/release where the live index has lost its manifest": lambda: client.put(
            "/v1/release", json={"release": live_release_id(store)[0]}
        ),
    }.items():
        caplog.clear()
        answer = send()
        if "tasks" in case:
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "store_error"), answer.text
            assert "index/idx" in caplog.text
            documented("HTTP", case, answer.json()["error"]["message"], 503)
        assert is_clean(answer.text, store)
    manifest.with_suffix(".away").rename(manifest)
    live = file_of(store, "releases/*/manifest.json")
    kept = live.read_bytes()
    live.write_bytes(kept.replace(b'"kind"', b'"kid"'))
    answer = client.delete("/v1/tasks/new")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "store_error")
    assert is_clean(answer.text, store)
    assert "own sha256 does not match" in caplog.text
    documented(
        "HTTP", "DELETE /v1/tasks/NAME where the live release is damaged", answer.json()["error"]["message"], 503
    )
    live.write_bytes(kept)
    assert client.delete("/v1/tasks/new").status_code == 404
    assert client.post("/v1/search", json={"query": "bafa"}).status_code == 200


def test_a_store_that_cannot_be_reached_is_no_mistake_of_a_client(
    service: Service,
    client: TestClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    documented: Callable[..., None],
) -> None:
    def fail(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "/secret/bucket/serving/current.json")

    with monkeypatch.context() as broken:
        broken.setattr(service.store.storage, "read_tagged", fail)
        answer = client.put("/v1/release", json={"release": None})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "store_error")
    assert "secret" not in answer.text
    assert "/secret/bucket" in caplog.text
    documented("HTTP", "PUT /v1/release while the store cannot be read", answer.json()["error"]["message"], 503)


@pytest.mark.parametrize(
    ("failure", "status", "action"),
    [("open", 503, "put task new"), ("answer", 200, "put task new"), ("store", 503, "put task new (not confirmed by")],
)
def test_a_change_without_an_answer_is_in_the_audit_log(
    client: TestClient,
    service: Service,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: str,
    status: int,
    action: str,
) -> None:
    """The store names the new release as the live one, and then this server cannot read it, or gets no answer."""

    def fail(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "/secret/bucket/manifest.json")

    def swap(*arguments: Any) -> bool:
        assert LocalStorage.compare_and_swap(storage, *arguments)
        if failure == "store":
            broken.setattr(storage, "read_tagged", fail)
            fail()
        return False  # as for a repetition by the client of S3

    files, storage = task_files(tmp_path / "prompt", model, 1), service.store.storage
    assert isinstance(storage, LocalStorage)
    with monkeypatch.context() as broken:
        if failure == "open":
            broken.setattr("riptide.serve.service.service.ReleaseArtifacts", fail)
        else:
            broken.setattr(storage, "compare_and_swap", swap)
        answer = client.put("/v1/tasks/new", files=files)
    assert answer.status_code == status, answer.text
    [line] = [record.getMessage() for record in caplog.records if record.name == "riptide.audit"]
    assert line.startswith(f"anonymous: {action}")
    assert "task new: none -> prompt new." in line


def test_a_replicas_store_error_keeps_its_reason_and_its_detail() -> None:
    error = RayTaskError("run", "Traceback", pickle.loads(pickle.dumps(StoreError(DENSE, "files are missing", "/a/b"))))

    class Handle:
        search = property(lambda self: self)

        def remote(self, *_: object) -> Handle:
            return self

        def result(self, timeout_s: float | None) -> None:
            raise error.as_instanceof_cause()

    with pytest.raises(StoreError, match="dense: files are missing") as raised:
        send_to_leaves([Handle()], "search", None)[0].result(timeout=1)
    assert raised.value.detail == "/a/b"


def test_a_front_asks_every_replica_of_each_leaf(store: Store) -> None:
    class Deployed:
        def broadcast(self, method: str, part: str, *arguments: Any) -> SimpleNamespace:
            assert method == "call_part"
            return SimpleNamespace(results=lambda timeout_s: self.answer(part, arguments[0]))

        def answer(self, part: str, method: str) -> list[Any]:
            if (part, method) == (DENSE, "check") and self.failing:
                raise StoreError(DENSE, "files are missing", "/a/b")
            return [7, 7]  # of two replicas

        failing = False

    leaves = [Deployed(), Deployed()]
    service = open_front(store, leaves, Application(store=store.url, row_ranges=2), "cpu")
    release = live_release(store)
    assert service.parts[DENSE].read_files(release.id, None, 1.0) == 4 * 7
    service.live = SimpleNamespace(release=release)
    service.check_parts(release)
    assert service.readiness() == {
        "ready": True,
        "parts": {name: {"state": "ready"} for name in (ENCODER, DENSE, BM25, PASSAGES)},
    }
    leaves[1].failing = True
    service.check_parts(release)
    assert service.readiness()["parts"][DENSE] == {"state": "failed", "reason": "files are missing"}


def test_a_release_is_warmed_before_it_is_live_and_what_is_warm_already_is_not(
    store: Store, service: Service, served: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are read and spaces searched before /readyz answers 200."""
    seen: list[tuple[str, bool, dict[str, Any]]] = []
    search, read = Engine.search, ServicePart.read_files

    def note_search(engine: Engine, queries: Any) -> Any:
        if engine is not service.engine:
            seen.append((queries[0].search.source, service.is_ready, service.readiness()["parts"]))
        return search(engine, queries)

    def note_read(part: ServicePart, *arguments: Any) -> int:
        size = read(part, *arguments)
        if size:
            seen.append((f"read {part.name}", service.is_ready, {}))
        return size

    monkeypatch.setattr(Engine, "search", note_search)
    monkeypatch.setattr(ServicePart, "read_files", note_read)
    with serving(service) as client:
        assert {name for name, *_ in seen} == {"read dense", "read bm25", "read passages", "index:idx", "bm25"}
        assert not any(ready for _, ready, _ in seen)
        assert all(
            {one["state"] for one in parts.values()} == {"warming up"}
            for name, _, parts in seen
            if not name.startswith("read")
        )
        assert set(seen[-1][2]) == {ENCODER, DENSE, BM25, "splade", PASSAGES, RERANKER}
        seen.clear()
        assert client.put("/v1/tasks/new", files=task_files(tmp_path / "new", model, 1)).status_code == 200
        assert seen == []  # the same files and spaces
        first = client.get("/v1/tasks").json()["release"]
        flat = {"index": "enc"}  # every vector is scored: a space that is new
        assert client.put("/v1/tasks/other", files=task_files(tmp_path / "o", model, 2), data=flat).status_code == 200
        assert {name for name, *_ in seen} == {"exact:enc"}  # its files were read before
        assert first != client.get("/v1/tasks").json()["release"]
    assert len(query_texts(served)) == 40


def test_a_warm_up_ends_where_more_rounds_would_not_help(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def rounds(answers_s: list[float], total_s: float = 300.0, **limits: int) -> int:
        """Rounds until the warm-up ends, where the batches take these seconds, the last one for ever."""
        now, number = [0.0], [0]

        def search(engine: Engine, queries: Any) -> list[Any]:
            now[0] += answers_s[min(number[0], len(answers_s) - 1)]
            number[0] += 1
            return []

        monkeypatch.setattr(Engine, "search", search)
        clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0)
        monkeypatch.setattr("riptide.serve.service.warm_up.time", clock)
        service = open_local(store, ServiceOptions(threads=1), device="cpu")
        release = live_release(store)
        with monkeypatch.context() as patch:
            for name, value in limits.items():
                patch.setattr(f"riptide.serve.service.warm_up.{name}", value)
            service.warm_up._run_queries(release, DENSE, sample_of(release), ["bafa"], now[0] + total_s)
        return number[0]

    assert rounds([0.1]) == 2
    assert rounds([9.0, 4.0, 1.0, 0.4, 0.3]) == 5
    assert rounds([2.0]) == 4  # one, and three without a gain
    assert rounds([9.0 - number / 5 for number in range(40)], MAX_ROUNDS=7, PATIENCE=40) == 7
    assert rounds([5.0, 4.0, 3.0, 2.0, 1.0, 0.9], total_s=8.0) == 2


@pytest.mark.parametrize("error", [OverloadedError(1), InputError("task default: the vector is not finite")])
def test_a_query_that_is_refused_does_not_end_a_warm_up(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    service, release = open_local(store, ServiceOptions(threads=1), device="cpu"), live_release(store)
    monkeypatch.setattr(Engine, "search", lambda *_: [QueryAnswer(), QueryAnswer(error=error)])
    assert service.warm_up._run_queries(release, DENSE, sample_of(release), ["bafa"], time.monotonic() + 60) < 60
    monkeypatch.setattr(Engine, "search", lambda *_: [QueryAnswer(error=StoreError("dense", "files are missing"))])
    with pytest.raises(StoreError):
        service.warm_up._run_queries(release, DENSE, sample_of(release), ["bafa"], time.monotonic() + 60)


def test_a_warm_up_ends_with_the_service(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    service = open_local(store, ServiceOptions(threads=1), device="cpu")
    monkeypatch.setattr("riptide.serve.service.warm_up.ANSWER_S", -1.0)
    release = live_release(store)
    rounds = []

    def search(*_: Any) -> list[QueryAnswer]:
        rounds.append(1)
        service.close()
        return [QueryAnswer()]

    monkeypatch.setattr(Engine, "search", search)
    service.warm_up._run_queries(release, DENSE, sample_of(release), ["bafa"], time.monotonic() + 60)
    assert rounds == [1]


def test_clients_see_their_own_words_and_no_message_that_may_name_a_file(
    service: Service, client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = "index:GET /v1/tasks lists " + "0123456789ab" * 4
    answer = client.post("/v1/search", json={"query": "bafa", "source": words})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]

    secret = "/data/secret/model.safetensors: cannot be read"

    def fail(*_: Any, **__: Any) -> Any:
        raise InputError(secret)

    calls = {
        "search": lambda: client.post("/v1/search", json={"query": "bafa"}),
        "embed": lambda: client.post("/v1/embeddings", json={"input": "bafa", "model": "base"}),
        "rerank": lambda: client.post("/v1/rerank", json={"query": "bafa", "documents": ["bafa"]}),
        "switch": lambda: client.put("/v1/release", json={"release": None}),
        "put_task": lambda: client.put("/v1/tasks/new", files={"prompt": b"", "settings": b""}),
        "drop_task": lambda: client.delete("/v1/tasks/new"),
        "describe": lambda: client.get("/v1/info"),
        "require_live": lambda: client.put("/v1/tasks/new", files={"prompt": b"", "settings": b""}),
    }
    for method, send in calls.items():
        caplog.clear()
        with monkeypatch.context() as broken:
            broken.setattr(Service if hasattr(Service, method) else ReleaseChanges, method, fail)
            answer = send()
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == MESSAGES[InputError], method
        assert secret in caplog.text


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("index 'x': /data/my store has none, 3/4 of index/x", "index 'x': the store has none, 3/4 of index/x"),
        (f"{Parameter('limit', 3)}: /data/my store/x", "parameter limit 3: the store/x"),
        ("fingerprint 0123456789ab, " + "1" * 64, "fingerprint 0123456789ab, " + "1" * 64),
        ("/data/my store2/x: damaged", None),
        ("/var/lib/x.faiss: damaged", None),
        ("model='/var/lib/x': damaged", None),
        ("s3://bucket/prefix/a.npy: damaged", None),
        ("~/models/x: damaged", None),
        ("its fingerprint is " + "0123456789ab" * 4, None),
    ],
)
def test_messages_for_clients_show_no_places(message: str, shown: str | None) -> None:
    error = client_error(InputError(message), "/data/my store", "")
    assert (str(error) if isinstance(error, RequestError) else None) == shown


def test_a_place_in_a_recommended_command_is_not_shown() -> None:
    error = client_error(InputError(f"index 'x' is damaged; run {Command('verify', store='data/süd')}"), "data/süd")
    assert str(error) == "index 'x' is damaged; run riptide verify --store the store"


@pytest.mark.parametrize("shift", [0.02, 1.0])
def test_a_service_compares_its_encoder_with_stored_vectors_before_a_release_is_live(
    store: Store,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    shift: float,
) -> None:
    """The model's files are the same. As by another version of torch, its normalisation returns other values."""
    layer_norm = torch.nn.functional.layer_norm
    monkeypatch.setattr(torch.nn.functional, "layer_norm", lambda *args, **kw: layer_norm(*args, **kw).add_(shift))
    caplog.set_level(logging.WARNING)
    service = open_local(store, ServiceOptions(threads=1, warm_up_s=0), device="cpu")
    message = (
        f"{store.url}/embeddings/enc/g0000: the encoder on {platform.node()} gives other vectors than those stored: "
        "smallest similarity 0."
    )
    if shift == 1.0:
        assert refused("serve_search", "--store", store.url, "--port", 0, "--threads", 1).startswith(
            f"error: {message}"
        )
        for _ in range(2):
            with pytest.raises(EncoderDriftError, match="encoder: the encoder gives other vectors than") as raised:
                asyncio.run(ReleaseChanges(service).refresh())
            error = pickle.loads(pickle.dumps(raised.value))
            assert (str(error), error.detail) == (str(raised.value), raised.value.detail)
            assert message in error.detail
            assert "of 8 passages, expected at least 0.99: use the versions of packages that" in error.detail
            # In the second round, the release is refused without the model.
            monkeypatch.setattr("riptide.serve.parts.service_models.Encoder", None)
        failed = {"state": "failed", "reason": "the encoder gives other vectors than those stored"}
        assert (service.readiness()["parts"][ENCODER], service.stored_similarities) == (failed, {})
        return
    with serving(service) as client:
        assert "expected at least 0.999: use" in caplog.text
        assert caplog.text.count(message) == 1
        [similarity] = client.get("/v1/info").json()["stored_similarity"].values()
        assert 0.99 < similarity < 0.999
        line = f'riptide_stored_similarity{{embeddings="enc",store="{store.url}"}} {similarity}'
        assert line in client.get("/metrics").text


def test_a_running_service_refuses_a_release_whose_encoder_gives_other_vectors(
    service: Service,
    client: TestClient,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    documented: Callable[..., None],
) -> None:
    encoder, live = service.engine.encoder, client.get("/v1/info").json()
    for name in ("a", "b"):  # before and after the task of the backbone: without a prompt of passages it is the same
        path = tmp_path / name
        assert client.put(f"/v1/tasks/{name}", files=task_files(path, model, ord(name))).status_code == 200
    assert client.get("/v1/info").json()["stored_similarity"] == live["stored_similarity"]
    [(drift, _)] = encoder._drifts._objects.values()
    monkeypatch.setattr(encoder, "_drifts", SharedObjects())
    monkeypatch.setattr("riptide.serve.parts.service_models.measure_drift", lambda *_: replace(drift, similarity=0.5))
    answer = client.put("/v1/tasks/c", files=task_files(tmp_path / "c", model, 3))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], "retry-after" in answer.headers) == (409, "conflict_error", False)
    assert "smallest similarity 0.50000 of 8 passages" in caplog.text
    documented("HTTP", "a release whose encoder gives other vectors than those stored", error["message"], 409)
    assert client.get("/readyz").status_code == 200
    assert sorted(client.get("/v1/info").json()["tasks"]) == sorted([*live["tasks"], "a", "b"])
    monkeypatch.setattr(
        "riptide.serve.parts.service_models.measure_drift", lambda *_: replace(drift, similarity=1.0, num_canaries=0)
    )
    assert client.put("/v1/tasks/d", files=task_files(tmp_path / "d", model, 4)).status_code == 200
    assert client.get("/v1/info").json()["stored_similarity"] == {}, "no passage was compared"
