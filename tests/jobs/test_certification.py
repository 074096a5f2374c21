"""Certified search: a service searches a sample of its queries again exactly, and estimates the recall of its index."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from fastapi.testclient import TestClient
from ready_client import serving
from serving import metrics_of, query_texts

from riptide.base.errors import InputError
from riptide.indexing.dense.index import Index
from riptide.indexing.exact import Hits, kernel
from riptide.indexing.store.store import Store
from riptide.jobs.replay import compare_settings
from riptide.serve import app
from riptide.serve.parts.leaf import Leaf, SliceRequest, SourceQueries, ask_local_leaves
from riptide.serve.parts.query_states import QueryGroup
from riptide.serve.release.live import live_release_id
from riptide.serve.release.release import Release
from riptide.serve.release.release_tasks import ServedSource, ServedTask
from riptide.serve.service import certification
from riptide.serve.service.certification import Certifier, RecallGroup, k_class
from riptide.serve.service.service import Service
from riptide.serve.service.service_options import ServiceOptions
from riptide.serve.service.warm_up import _searches_by_key
from riptide.serve.service_errors import StoreError

ALL = 1 - 1e-12  # the share that samples every search


@pytest.fixture
def certified(served: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Service]:
    """Opens a service with two leaves and a poor index, which certifies every search in slices of 50 rows."""
    monkeypatch.setattr(certification, "SLICE_BYTES", 50 * 64)
    monkeypatch.setattr(certification, "BUDGET", 1.0)
    monkeypatch.setattr(certification, "MAX_WAITING", 1_000)
    monkeypatch.setattr(app, "CERTIFY_S", 0.001)
    open_index = Index.__init__

    def open_poor_index(index: Index, *arguments: Any) -> None:
        open_index(index, *arguments)
        index.effort = 1  # of four lists

    monkeypatch.setattr(Index, "__init__", open_poor_index)
    store = Store(str(served / "store"))

    def open_service(certify_raise: int | None = None) -> Service:
        leaves = [Leaf(store, number, 2, threads=1) for number in range(2)]
        options = ServiceOptions(threads=1, certify=ALL, certify_recall=0.99, certify_raise=certify_raise, warm_up_s=0)
        service = Service(store, options, partial(ask_local_leaves, leaves), leaves[0].parts, device="cpu")
        service.parts |= {f"{name} of leaf 1": part for name, part in leaves[1].parts.items()}
        return service

    return open_service


def certified_recalls(client: TestClient, samples: int) -> list[dict[str, Any]]:
    """Waits until so many searches are certified, and returns the estimates."""
    end = time.monotonic() + 240
    while True:
        estimates: list[dict[str, Any]] = client.get("/v1/info").json()["certified"]
        if sum(each["samples"] for each in estimates) >= samples:
            return estimates
        assert time.monotonic() < end, estimates
        time.sleep(0.05)


def test_estimates_equal_the_recall_of_all_searches(
    certified: Callable[[], Service], served: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = list(query_texts(served).values())
    searches: list[dict[str, Any]] = [
        {"mode": "dense", "k": 5},
        {"mode": "dense", "k": 20, "filter": {"lang": "de"}},
        {"source": "index:idx", "k": 200, "filter": {"year": {"gte": 5_000}}},  # matches nothing
        {"mode": "hybrid", "k": 5},
        {"mode": "exact", "k": 5},  # is not sampled
    ]
    client: TestClient
    with serving(certified()) as client, caplog.at_level(logging.WARNING):

        def hits(search: dict[str, Any]) -> list[set[str]]:
            answer = client.post("/v1/search", json={"queries": texts, **search})
            assert answer.status_code == 200, answer.text
            return [{hit["id"] for hit in result["hits"]} for result in answer.json()["results"]]

        approximate = [hits(search) for search in searches]
        exact = [hits({**search, "mode": "exact"}) for search in searches[:2]]
        shown = certified_recalls(client, 3 * len(texts))
        metrics = metrics_of(client)
    by_group = {(each["mode"], each["k"], each["filter"]): each for each in shown}
    assert by_group.keys() == {("dense", "1-10", "none"), ("dense", "11-100", ">10%"), ("hybrid", "1-10", "none")}
    for got, expected, key in zip(approximate, exact, by_group, strict=False):
        recalls = [len(one & all) / len(all) for one, all in zip(got, expected, strict=True)]
        estimate = by_group[key]
        assert estimate["recall"] == pytest.approx(np.mean(recalls))
        assert estimate["lower"] <= estimate["recall"] <= estimate["upper"]
        assert estimate["samples"] == len(texts)
    first = by_group["dense", "1-10", "none"]
    assert first["recall"] < 1
    labels = 'filter="none",k="1-10",mode="dense",task="default"'
    assert f"riptide_recall{{{labels}}} {first['recall']}" in metrics
    assert f"riptide_recall_samples{{{labels}}} {len(texts):.1f}" in metrics
    assert f"riptide_recall_below_target{{{labels}}} {first['is_below_target']:.1f}" in metrics
    assert f'riptide_sampled_queries{{outcome="certified"}} {3 * len(texts):.1f}' in metrics
    assert f'riptide_sampled_queries{{outcome="no_hits"}} {len(texts):.1f}' in metrics
    assert by_group["dense", "11-100", ">10%"]["recall"] == 1  # at most 100,000 passages match, which are all scored


def test_a_recall_below_the_target_raises_nprobe_and_replays_search_with_it(
    certified: Callable[..., Service], served: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, done: Any
) -> None:
    texts = list(query_texts(served).values())
    service, request, sent = certified(certify_raise=64), {"queries": texts, "k": 20}, 0
    certifier = service.certifier
    assert certifier is not None
    client: TestClient
    with serving(service) as client, caplog.at_level(logging.WARNING, "riptide.serve"):
        recalls = list[float]()
        while not recalls or recalls[-1] < 0.99:
            assert client.post("/v1/search", json=request).status_code == 200
            sent += len(texts)
            end = time.monotonic() + 240
            while sum(certifier.counts.values()) < sent:
                assert time.monotonic() < end, certifier.counts
                time.sleep(0.01)
            recalls += [each["recall"] for each in client.get("/v1/info").json()["certified"]]
            assert sent < 100 * len(texts), (recalls, certifier.raised)
        body = {"query": texts[0], "k": 20, "explain": True}
        answer = client.post("/v1/search", json=body).json()
        assert "raised_settings" not in client.post("/v1/search", json={**body, "mode": "hybrid"}).json()
        [raised] = client.get("/v1/info").json()["raised_settings"]
        assert f'mode="dense",source="index:idx",task="default"}} {raised["value"]:.1f}' in metrics_of(client)
    lines = [line for line in caplog.messages if line.startswith("nprobe of index:idx is raised from ")]
    assert [line.split(" for ")[0].split(" from ")[1] for line in lines] == ["1 to 2", "2 to 3", "3 to 4"][: len(lines)]
    assert lines[0].endswith(" queries, below 0.99")
    value = 1 + len(lines)  # at most four: the number of lists
    expected = {"task": "default", "mode": "dense", "source": "index:idx", "setting": "nprobe", "built": 1}
    assert raised == {**expected, "value": value}
    assert answer["raised_settings"] == {"index:idx": value}
    [result] = answer["results"]
    assert {hit["explanation"]["sources"][0]["probed_list"]["probed"] for hit in result["hits"]} == {value}

    saved = {"request": {"query": texts[0], "k": 20}, "hits": result["hits"]}
    rows = [{**saved, "raised_settings": answer["raised_settings"]}, saved]
    (tmp_path / "saved.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    printed = done("replay", tmp_path / "saved.jsonl", "--store", service.store.url, "--max-changed", 1)
    assert "2 requests, 1 equal" in printed
    assert compare_settings({"index:idx": 4}, {}) == "; raised settings (nprobe, ef_search): index:idx 4, now none"


SOURCE = ServedSource(certification.INDEX, "idx", ("enc", "idx"))


class Leaves:
    """Leaves whose exact search finds rows 0 to k - 1, in `cpu_s` each.

    busy: the number of checks that find a request that waits or runs.
    """

    def __init__(self, *, busy: int = 0):
        self.busy, self.slices, self.release, self.cpu_s = busy, list[int](), "first", 0.0
        self.tasks = {"t": SimpleNamespace(prompt=None)}
        self.erased = np.empty(0, np.int64)
        self.artifacts = {"first": "old", "same": "old"}  # the fingerprint of the index by release
        embeddings = SimpleNamespace(dim=4, num_rows=10)
        index = SimpleNamespace(effort=4, effort_name="nprobe", factory="IVF128,SQ8")
        self._readers = {(certification.ONLINE, SOURCE.target): SimpleNamespace(embeddings=embeddings, index=index)}
        self._live: dict[str, Any] = {}

    def live(self) -> Any:
        live = SimpleNamespace(
            release=self.release_of(self.release),
            tasks=self.tasks,
            readers=self._readers,
            corpus=SimpleNamespace(num_rows=10, deleted=[]),
        )
        return self._live.setdefault(self.release, live)

    def release_of(self, id: str) -> Any:
        return SimpleNamespace(
            id=id, query_encoder="e", searched_fingerprints=lambda online, target: (self.artifacts.get(id, id),)
        )

    def erased_rows(self, release: Any) -> np.ndarray:
        return self.erased

    def is_idle(self) -> bool:
        self.busy -= 1
        return self.busy < 0

    def ask(self, method: str, request: Any) -> list[Any]:
        assert method == "search_slice"
        self.slices.append(request.first_row)
        rows = np.tile(np.arange(request.first_row, request.end), (len(request.queries.queries), 1))
        hits = certification.SliceHits(
            Hits(-rows.astype(np.float32), rows), request.end - request.first_row, self.cpu_s
        )
        return [SimpleNamespace(result=lambda timeout: hits)]


def offer(
    certifier: Certifier,
    leaves: Leaves,
    count: int,
    *,
    release: str = "first",
    missing: bool = False,
    effort: int | None = None,
) -> None:
    """Offers searches with k = 2 whose hits are rows 0 and 1, or two rows that are not among the first two."""
    names = SimpleNamespace(labels=("dense",))
    query = SimpleNamespace(
        release=leaves.release_of(release),
        task=SimpleNamespace(name="t", prompt=None),
        k=2,
        search=names,
        filter=None,
    )
    rows = np.array([[5, 6]] if missing else [[0, 1]])
    batch = Hits(np.tile(-rows.astype(np.float32), (9, 1)), np.tile(rows, (9, 1)))
    shards = SimpleNamespace(successful=1, total=1)
    state = SimpleNamespace(
        query=query, query_error=None, shards=shards, hits_by_label={"dense": Hits(*(each[:1] for each in batch))}
    )
    members = [(cast(Any, state), "dense")] * count
    certifier.offer([QueryGroup(SOURCE, 2, None, members, np.zeros((count, 4), np.float32), effort)])
    for array in batch:
        array[:] = 0  # a sample does not keep the arrays of its batch


def test_samples_wait_for_idle_time_and_are_dropped_if_too_many_or_of_another_release(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(certification, "SLICE_BYTES", 5 * 8)
    monkeypatch.setattr(certification, "POLL_S", 0.0)
    leaves = Leaves(busy=3)
    certifier = Certifier(ALL, 0.9, None, leaves.ask, leaves.live, leaves.is_idle, leaves.erased_rows)
    group = RecallGroup("t", "dense", "1-10", "none")

    def steps(count: int) -> None:
        for _ in range(count):
            asyncio.run(certifier.step())

    offer(certifier, leaves, certification.MAX_WAITING + 5)
    assert certifier.counts["queue_full"] == 5
    steps(1)
    assert leaves.slices == [0, 5], "one search of all rows for eight samples"
    assert (leaves.busy, certifier.counts["certified"]) == (-2, certification.TOGETHER)
    steps(20)
    estimate = certifier.recalls[group]
    assert (estimate.samples, estimate.interval.mean) == (certification.MAX_WAITING, 1.0)
    assert not caplog.records

    for _ in range(2):
        offer(certifier, leaves, certification.MAX_WAITING, missing=True)
        steps(20)
    assert certifier.recalls[group].is_below_target
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("recall@1-10 of task t, mode dense, filter none is below 0.9: 0.7273 (0.5581 to 0.8587)")

    samples = certifier.recalls[group].samples
    leaves.erased = np.array([0, 1])
    offer(certifier, leaves, 3, missing=True)
    steps(1)
    counts = certifier.counts["no_hits"], certifier.recalls[group].samples
    assert counts == (3, samples), "erased passages are not missing"
    leaves.erased = np.empty(0, np.int64)

    offer(certifier, leaves, 3)
    leaves.release = "same"
    monkeypatch.setattr(leaves, "tasks", {**leaves.tasks, "u": leaves.tasks["t"]})  # another task does not matter
    steps(1)
    assert (certifier.counts["release_gone"], certifier.recalls[group].samples) == (0, samples + 3)

    offer(certifier, leaves, 3)
    leaves.release = "second"
    steps(1)
    assert certifier.counts["release_gone"] == 3
    assert certifier.recalls[group].samples == 0, "the estimate is of the live release"
    offer(certifier, leaves, 3, release="second")
    monkeypatch.setattr(certifier, "_is_idle", lambda: setattr(leaves, "release", "third"))  # falsy: never idle
    steps(1)
    assert certifier.counts["release_gone"] == 6

    monkeypatch.setattr(certifier, "_is_idle", lambda: True)
    monkeypatch.setattr(certification, "SLICE_BYTES", 10 * 8)
    leaves.cpu_s = 2.0
    offer(certifier, leaves, 1, release="third")
    steps(1)
    assert certifier.cpu_s == 2.0
    assert certifier._free_at > time.monotonic() + 50, "2 s are the budget of 100 s"
    leaves.release, leaves.tasks = "fourth", {}
    steps(1)
    assert not certifier.recalls, "the only task is gone"
    certifier.close()


def test_a_new_model_of_queries_with_the_same_name_is_another_state() -> None:
    """Estimates, raised efforts and warm searches of the model before are not those of the new one."""
    task = ServedTask("t", None, "enc")
    first, same, other = (
        Release(encoder, {}, (task,), {"embeddings/enc/g0000": "e", "models/new": model}, query_model="models/new")
        for encoder, model in (("bert", "a"), ("bert-2", "a"), ("bert", "b"))
    )
    states = [certification.search_state(release, task, ("enc", "")) for release in (first, same, other)]
    assert states[0] == states[1] != states[2]
    warm = [set(_searches_by_key(release)) for release in (first, same, other)]
    assert warm[0] == warm[1] != warm[2]


def test_search_efforts_are_raised_up_to_a_maximum_until_another_index_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(certification, "SLICE_BYTES", 10 * 8)
    leaves = Leaves()
    certifier = Certifier(ALL, 0.9, 7, leaves.ask, leaves.live, lambda: True, leaves.erased_rows)
    search = cast(Any, SimpleNamespace(labels=("dense",), sources=(SOURCE,)))
    group = RecallGroup("t", "dense", "1-10", "none")
    other = group._replace(filter="<1%")

    def certify(release: str = "first", **options: Any) -> None:
        effort = certifier.efforts("t", search).get(SOURCE)
        offer(certifier, leaves, 3 * certification.TOGETHER, release=release, effort=effort, **options)
        for _ in range(3):
            asyncio.run(certifier.step())

    certify()
    certifier._windows[other] = deque(certifier._windows[group])
    assert (certifier.efforts("t", search), certifier.recalls[group].samples) == ({}, 24)
    for effort in (6, 7):
        while certifier.efforts("t", search).get(SOURCE) != effort:
            certify(missing=True)
        assert not certifier._samples
        assert not any(certifier._windows.values()), "all groups of the task and mode start afresh"
        assert certifier.recalls[group].samples == 0
    assert certifier.counts["effort_raised"] > 0, "those that waited were searched with the effort before"
    certify(missing=True)
    assert certifier.efforts("t", search) == {SOURCE: 7}, "the maximum"
    assert certifier.recalls[group].is_below_target
    assert certifier.efforts("u", search) == {}
    assert certifier.efforts("t", cast(Any, SimpleNamespace(labels=("dense", "bm25"), sources=(SOURCE,)))) == {}

    leaves.release = "same"
    certifier.keep_raised(leaves.live())
    assert certifier.efforts("t", search) == {SOURCE: 7}
    leaves.release = "second"
    certifier.keep_raised(leaves.live())
    assert certifier.efforts("t", search) == {}
    assert [line.split(" for ")[0] for line in caplog.messages] == [
        "nprobe of index:idx is raised from 4 to 6",
        "nprobe of index:idx is raised from 6 to 7",
        "recall@1-10 of task t, mode dense, filter none is below 0.9: 0.0000 (0.0000 to 0.4865) in 8 queries; build "
        "the index",
        "nprobe of index:idx is that of the build again,",
    ]
    certifier.close()


def test_without_the_kernel_no_search_is_certified(certified: Callable[[], Service], monkeypatch: Any) -> None:
    service = certified()
    live = live_release_id(service.store)
    assert live is not None
    queries = SourceQueries("exact", ("enc", "idx"), np.zeros((1, 32), np.float32), 1)
    monkeypatch.setattr(kernel, "load_kernel", lambda: None)
    [reply, _] = service.engine.ask_leaves("search_slice", SliceRequest(live[0], 4e9, queries, 0, 5))
    with pytest.raises(StoreError) as raised:
        reply.result()
    assert "certification needs the C++ kernel of exact search" in raised.value.detail
    service.close()


def test_classes_of_k_and_a_target_without_certification() -> None:
    assert [k_class(k) for k in (1, 10, 11, 100, 101)] == ["1-10", "1-10", "11-100", "11-100", "101+"]
    with pytest.raises(InputError, match=r"certify_recall 0.9: no search is certified; give parameter certify too"):
        ServiceOptions(certify_recall=0.9)
    with pytest.raises(InputError, match=r"certify_raise 64: there is no recall to reach; give parameter certify_re"):
        ServiceOptions(certify=0.1, certify_raise=64)
