"""What a service takes from the Ray that it runs on, and what it reports to it: GPUs and metrics."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest
import ray
import torch
from local_cluster import local_cluster, port, start, wait_for
from local_ray import init, running_ray
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from ray import serve as ray_serve
from serving import K, query_texts, started

from riptide.base.errors import InputError
from riptide.indexing.store.store import Store
from riptide.jobs.serve_search import HAPROXY
from riptide.serve.client import Client, ServerError
from riptide.serve.deployments import Application, build, http_options, reserved_device, run_application
from riptide.serve.release.live import live_release_id, save_as_live
from riptide.serve.release.planning import plan_release
from riptide.serve.release.release import Release


@pytest.fixture
def store(served: Path, classifier: str, tmp_path: Path) -> Store:
    """A store whose live release has a re-ranker."""
    store = Store(str(shutil.copytree(served, tmp_path / "root") / "store"))
    before = live_release_id(store)
    assert before is not None
    release, _ = plan_release(store, reranker=classifier)
    assert save_as_live(store, release, before[1])
    return store


def test_a_server_without_a_gpu_computes_on_the_cpu(store: Store, sees_cuda: dict[str, str]) -> None:
    environment = {**sees_cuda, "CUDA_VISIBLE_DEVICES": ""}
    with started("--store", store.url, "--port", 0, environment=environment) as (_, address):
        client = Client(address)
        assert client.info()["numerics"].startswith("cpu")
        assert client.search("bafa", rerank=5, k=K)


@pytest.fixture
def ray_of_a_gpu(ray_variables: dict[str, str], sees_cuda: dict[str, str]) -> Iterator[None]:
    """Connects this process to a Ray that counts one GPU, exports metrics every two seconds, and runs Ray Serve."""
    variables = {"RAY_enable_metrics_collection": "1", "RAY_metrics_report_interval_ms": "2000"}
    with running_ray({**ray_variables, **sees_cuda, **variables}, gpus=1) as address:
        init(address)
        try:
            yield
        finally:
            ray_serve.shutdown()
            ray.shutdown()


@pytest.mark.ray_serve
@pytest.mark.slow
def test_metrics_add_up_over_replicas_that_compute_on_the_cpu(
    store: Store, call_job: Callable[..., int], ray_of_a_gpu: None
) -> None:
    make_poor_index(store, call_job)
    assert ray.get(ray.remote(torch.cuda.is_available).remote())
    device = ray.remote(reserved_device)
    assert ray.get([device.options(num_gpus=gpus).remote() for gpus in (0, 0.25, 1)]) == ["cpu", "cuda", "cuda"]
    listening = port("127.0.0.1")
    ray_serve.start("HeadOnly", http_options=http_options("127.0.0.1", listening, 75))
    settings = {"cpus": 0, "threads": 1, "replicas": 2, "certify": 1 - 1e-12}
    settings |= {"certify_recall": 0.999, "certify_raise": 3}
    ray_serve.run(build({"store": store.url, "without_tokens": True, **settings}), name="riptide", route_prefix="/")
    client = Client(f"http://127.0.0.1:{listening}")
    assert client.info()["numerics"].startswith("cpu")
    texts = list(query_texts(Path(store.url).parent).values())
    for text in texts:
        assert client.search(text, rerank=5, k=K)

    of_searches = {"route": "/v1/search", "status": "200"}
    wait_for(lambda: values("ray_riptide_requests_total", of_searches)[0] >= len(texts), "the counts of all replicas")
    total, replicas = values("ray_riptide_requests_total", of_searches)
    assert (total, replicas) == (len(texts), 2)
    assert values("ray_riptide_request_seconds_count", {"route": "/v1/search"}) == (len(texts), 2)
    of_ingresses = {"application": "riptide", "deployment": "ingress"}
    wait_for(lambda: values("ray_riptide_tasks", of_ingresses) == (2, 2), "the gauges of both replicas")
    wait_for(lambda: values("ray_riptide_sampled_queries", {}) == (len(texts), 2), "the searches that were repeated")
    of_dense = {"mode": "dense", "source": "index:idx"}
    wait_for(lambda: values("ray_riptide_raised_setting", of_dense)[1] == 2, "a raised nprobe in both replicas")
    assert client.search_response({"query": texts[0]})["raised_settings"]["index:idx"] in (2, 3)
    with pytest.raises(ServerError, match=r"404: .*MetricsExportPort"):
        client._send_with_retry("GET", "/metrics")


def make_poor_index(store: Store, call_job: Callable[..., int]) -> None:
    """Replaces the index by one that probes a single list, and makes it live."""
    before = live_release_id(store)
    assert before is not None
    shutil.rmtree(Path(store.url) / "index/idx")
    options = ("--name", "idx", "--factory", "IVF4,PQ8x4fs", "--shards", 3, "--recall", 0.01)
    assert call_job("build_index", "--store", store.url, *options) == 0
    release, _ = plan_release(store, reranker=Release.load(store, before[0]).reranker)
    assert save_as_live(store, release, before[1])


def values(name: str, labels: dict[str, str]) -> tuple[float, int]:
    """Returns the sum of a metric over all nodes, and the number of replicas that reported it."""
    samples = [sample for sample in exported() if sample.name == name and labels.items() <= sample.labels.items()]
    return sum(sample.value for sample in samples), len({sample.labels["replica"] for sample in samples})


def exported() -> Iterator[Sample]:
    """Yields what the nodes of the Ray export."""
    for node in ray.nodes():
        with urlopen(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics") as answer:
            for family in text_string_to_metric_families(answer.read().decode()):
                yield from family.samples


@pytest.mark.ray_serve
@pytest.mark.slow
def test_applications_of_others_stay_as_they_are(store: Store, ray_of_a_gpu: None, tmp_path: Path) -> None:
    """A replica that does not start, a taken address, name or route are one line each, and delete nothing."""

    class Other:
        def __call__(self) -> str:
            return "here"

    working = Application(store=store.url, without_tokens=True, cpus=0, threads=1, warm_up_s=0)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(InputError, match="Address already in use; give another port"),
    ):
        run_application(working, "127.0.0.1", taken.getsockname()[1], print)
    listening = port("127.0.0.1")
    ray_serve.start("HeadOnly", http_options=http_options("127.0.0.1", listening, 75))
    other = ray_serve.deployment(Other, ray_actor_options={"num_cpus": 0}).bind()
    ray_serve.run(other, name="other", route_prefix="/other")
    broken = replace(working, tokens=str(tmp_path / "tokens.json"), without_tokens=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def refusal(application: Application, port: int = listening, **options: str) -> str:
        with pytest.raises(InputError) as caught:
            run_application(application, "127.0.0.1", port, print, **options)  # type: ignore[arg-type]
        assert list(ray_serve.status().applications) == ["other"]
        with urlopen(f"http://127.0.0.1:{listening}/other") as answer:
            assert answer.read() == b"here"
        return str(caught.value)

    def ask_and_end(address: str) -> None:
        assert address == f"http://127.0.0.1:{listening}/papers"
        with urlopen(f"{address}/v1/tasks") as answer:
            assert answer.status == 200
        assert sorted(ray_serve.status().applications) == ["other", "papers"]
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        reason = r"a replica does not start on its node: parameter tokens .*tokens.json: no such file"
        assert re.fullmatch(reason, refusal(broken))
        assert refusal(working, name="other").startswith(
            "parameter application other: Ray Serve runs an application of this name"
        )
        assert re.search(r"/other is being used by application .?other", refusal(working, route_prefix="/other"))
        free = port("127.0.0.1")
        assert f"listens on 127.0.0.1:{listening}" in refusal(working, port=free)
        run_application(working, "127.0.0.1", listening, ask_and_end, name="papers", route_prefix="/papers")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert list(ray_serve.status().applications) == ["other"]


@pytest.mark.nodes
@pytest.mark.cluster
@pytest.mark.slow
def test_what_other_nodes_do_not_see_is_one_line(store: Store) -> None:
    """That is a loopback address, if HAProxy has to reach their replicas, and a folder."""
    with local_cluster(workers=1, **HAPROXY) as cluster:

        def refusal() -> str:
            at = ("--store", store.url, "--replicas", 1, "--port", port("127.0.0.1"))
            return start("serve_search", *at, environment=cluster.environment).refused()

        assert "--host 127.0.0.1: HAProxy, which the nodes of this cluster run, does not reach replicas" in refusal()
        blind = cluster.add(hide=Path(store.url))
        assert f"node {blind.address} does not see the store {store.url}" in refusal()
