"""Nodes of several kinds: work runs on the nodes that its options name, and not on nodes where a worker cannot open.

A fixed cluster of nodes with labels and pretended GPUs, and one that grows from nothing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cloud import NodeType, address_of, growing_cluster
from local_cluster import PATIENCE, REPOSITORY, LocalCluster, clean_environment, local_cluster, start, submit, wait_for
from patched_cuda import patch_cuda
from tiny import make_classifier, save_bert, write_corpus

from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store

pytestmark = [pytest.mark.cluster, pytest.mark.nodes, pytest.mark.slow]

# Prints where the items of a task ran, and the lines of the runner.
PLACES = """
import json, sys, time
from dataclasses import dataclass
import ray
from riptide.indexing.work.nodes import Reports
from riptide.indexing.work.ray_actors import RayActors
from riptide.indexing.work.worker_tasks import WorkerResources, WorkerRequest
from riptide.base.errors import InputError

@dataclass(frozen=True)
class Where:
    address: str
    device: str

@dataclass(frozen=True)
class FindPlacesTask:
    resources: WorkerResources
    broken: tuple[str, ...]

    def open(self, allocation):
        address = ray.util.get_node_ip_address()
        if address in self.broken:
            raise OSError("the disk is full")

        def work(item, report):
            time.sleep(0.5)
            return Where(address, allocation.device)

        return work

given = json.loads(sys.argv[1])
ray.init(log_to_driver=False, logging_level="ERROR")
lines = []
runner = RayActors(WorkerRequest(**given["request"]), Reports(lines.append))
task = FindPlacesTask(WorkerResources(**given["resources"]), tuple(given["broken"]))
try:
    rows = list(runner.run(task, range(given["items"])))
    found = [(item, row if isinstance(row, dict) else vars(row)) for item, row in rows]
except InputError as error:
    found, lines = [], [*lines, str(error)]
print(json.dumps({"items": sorted(item for item, _ in found), "lines": lines,
                  "places": sorted({(row["address"], row["device"]) for _, row in found})}))
"""

ALL_ITEMS = list(range(12))
TASKS, ACTORS = {"gpus": 0}, {"gpus": 0, "calls": 2}


def places(
    cluster: LocalCluster,
    resources: dict[str, Any],
    broken: tuple[str, ...] = (),
    *,
    items: int = len(ALL_ITEMS),
    **request: object,
) -> dict[str, Any]:
    """Returns the items that were done, where, and the lines of the runner; no worker opens on the broken addresses."""
    given = json.dumps({"resources": resources, "broken": broken, "items": items, "request": request})
    done = subprocess.run(
        [sys.executable, "-c", PLACES, given],
        cwd=REPOSITORY,
        env=clean_environment({**cluster.environment, "PYTHONPATH": str(REPOSITORY)}),
        text=True,
        capture_output=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("{"))  # Ray prints lines about lost actors
    )
    return answer


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw files, and models."""
    root = tmp_path_factory.mktemp("kinds")
    write_corpus(root / "raw", 600, queries=20)
    save_bert(root / "model")
    make_classifier(save_bert(root / "classifier"))
    patch_cuda(root / "site")
    return root


@pytest.fixture(scope="module")
def cluster(root: Path) -> Iterator[LocalCluster]:
    """A head of one core, two nodes for work on the CPU and one with a GPU; CUDA seems to be on all of them."""
    with local_cluster(workers=None, PYTHONPATH=str(root / "site")) as cluster:
        cluster.add(labels={"kind": "head"})
        cluster.add(labels={"kind": "cpu"})
        cluster.add(labels={"kind": "cpu"})
        cluster.add(gpus=1, labels={"kind": "gpu"})
        yield cluster


@pytest.mark.parametrize("resources", [TASKS, ACTORS], ids=["tasks", "actors"])
def test_work_runs_on_the_kind_of_node_that_it_names(cluster: LocalCluster, resources: dict[str, Any]) -> None:
    one, two, gpu = (node.address for node in cluster.workers)
    labelled = places(cluster, resources, labels={"kind": "cpu"}, min_workers=2)
    assert labelled == {"items": ALL_ITEMS, "lines": [], "places": [[one, "cpu"], [two, "cpu"]]}
    with_gpu = places(cluster, {**resources, "gpus": None})
    assert with_gpu == {"items": ALL_ITEMS, "lines": [], "places": [[gpu, "cuda"]]}
    assert places(cluster, {**resources, "gpus": None}, gpus=0, labels={"kind": "gpu"})["places"] == [[gpu, "cpu"]]


@pytest.mark.parametrize("resources", [TASKS, ACTORS], ids=["tasks", "actors"])
def test_nodes_where_no_worker_opens_are_excluded_until_none_is_left(
    cluster: LocalCluster, resources: dict[str, Any]
) -> None:
    one, two, gpu = (node.address for node in cluster.workers)
    reason = "OSError: the disk is full"
    excluded = "node {} is excluded, as a worker could not open there: " + reason
    done = places(cluster, resources, broken=(one,), labels={"kind": "cpu"})
    assert done == {"items": ALL_ITEMS, "lines": [excluded.format(one)], "places": [[two, "cpu"]]}
    *lines, last = places(cluster, resources, broken=(one, two), labels={"kind": "cpu"})["lines"]
    first, other = (one, two) if one in lines[0] else (two, one)
    assert lines == [excluded.format(first)]
    assert last == f"node {other}: {reason}; no other node is left for the worker"
    assert places(cluster, resources, broken=(gpu,), labels={"kind": "gpu"})["lines"] == [reason]


def steps(root: Path, store: Path) -> list[tuple[object, ...]]:
    """Returns the arguments of the jobs up to re-ranked hits."""
    on_cpus = ("--gpus", 0, "--cpus", 1, "--node-label", "kind=cpu")
    return [
        ("import_corpus", "--store", store, "--source", root / "raw", "--part-size", 75),
        (
            "encode_corpus",
            "--store",
            store,
            "--encoder",
            root / "model",
            "--name",
            "tiny",
            "--compile",
            "never",
            *on_cpus,
        ),
        (
            "search",
            "--store",
            store,
            "--source",
            "exact:tiny",
            "--k",
            10,
            "--name",
            "hits",
            "--rerank",
            root / "classifier",
            *on_cpus,
        ),
    ]


def artifacts(store: Path) -> dict[str, Artifact]:
    """Returns all complete artifacts of a store, by key."""
    opened = Store(str(store))
    return {key: opened.open(*key.split("/", 1)) for key in opened.keys("")}


@pytest.fixture(scope="module")
def alone(root: Path, call_job: Callable[..., int]) -> Path:
    """A store in which this machine has run the jobs without a cluster."""
    store = root / "alone"
    for step in steps(root, store):
        assert call_job(*step) == 0
    return store


def tasks_of(cluster: LocalCluster) -> set[tuple[str, str]]:
    """Returns (name, address of the node) of the tasks and actors that Ray's dashboard lists."""
    listed = {
        kind: cluster.ask(f"/api/v0/{kind}?limit=10000")["data"]["result"]["result"]
        for kind in ("nodes", "tasks", "actors")
    }
    addresses = {node["node_id"]: node["node_ip"] for node in listed["nodes"]}
    found = {(task["name"], addresses[task["node_id"]]) for task in listed["tasks"] if task["node_id"]}
    return found | {
        (actor["class_name"], addresses[actor["node_id"]]) for actor in listed["actors"] if actor["node_id"]
    }


@pytest.mark.long
def test_no_task_without_a_gpu_uses_cuda_and_nothing_runs_on_the_wrong_kind(
    root: Path, alone: Path, cluster: LocalCluster
) -> None:
    """CUDA seems to be available on the nodes; the bytes and the numerics classes are those of one machine."""
    store = root / "labelled"
    for step in steps(root, store):
        start(*map(str, step), environment=cluster.environment).end()
    expected, actual = artifacts(alone), artifacts(store)
    assert actual.keys() == expected.keys()
    for key, artifact in expected.items():
        assert actual[key].parts == artifact.parts, key
    ran = tasks_of(cluster)
    labelled = {
        "MapWorker(Map(riptide encode))",
        "riptide encode queries",
        "riptide search exact",
        "riptide rerank",
        "probe riptide reranker numerics",
        "probe riptide encoder numerics",
    }
    assert labelled | {"riptide parse"} <= {name for name, _ in ran}, ran
    cpu_nodes = {node.address for node in cluster.nodes[1:3]}
    assert {address for name, address in ran if name in labelled} <= cpu_nodes


def test_training_runs_on_the_nodes_that_it_names(root: Path, alone: Path, cluster: LocalCluster) -> None:
    job = (
        "--backbone",
        root / "model",
        "--unit",
        "span",
        "--batch",
        12,
        "--steps",
        2,
        "--max-length",
        32,
        "--dtype",
        "float32",
        "--workers",
        2,
        "--cpus",
        1,
        "--name",
        "trained",
        "--node-label",
        "kind=cpu",
    )
    store = root / "trained"
    shutil.copytree(alone / "corpus", store / "corpus")
    start("pretrain_rip", "--store", store, *map(str, job), environment=cluster.environment).end()
    workers = [address for name, address in tasks_of(cluster) if name == "RayTrainWorker"]
    assert sorted(workers) == [node.address for node in cluster.nodes[1:3]]


@pytest.mark.long
def test_a_training_saves_a_checkpoint_when_one_of_its_nodes_drains(root: Path, alone: Path) -> None:
    """SIGTERM to `ray start --block`, as Kubernetes ends a pod; the training resumes on the other node."""
    store, every = root / "left", 100
    shutil.copytree(alone / "corpus", store / "corpus")
    latest = store / "checkpoints/left.models/latest.json"

    def saved() -> int:
        return int(json.loads(latest.read_text())["step"]) if latest.exists() else 0

    with local_cluster(workers=None, RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="600") as cluster:
        cluster.add(cores=0)
        cluster.add()
        draining = cluster.add()
        job = start(
            "pretrain_rip",
            *("--store", store, "--backbone", root / "model", "--name", "left", "--unit", "span"),
            *("--batch", 12, "--steps", 1_000_000, "--max-length", 32, "--dtype", "float32", "--cpus", 1),
            *("--workers", 2, "--min-workers", 1, "--checkpoint-every", every, "--checkpoint-minutes", 0),
            environment=cluster.environment,
        )
        wait_for(lambda: draining.workers("RayTrainWorker"), "two workers", job.process)
        draining.process.terminate()
        wait_for(lambda: saved() % every, "a checkpoint between those of every 100 steps", job.process)
        cluster.count_lost(draining)
        step = saved()
        wait_for(lambda: saved() > step and saved() % every == 0, "the training to continue", job.process)
        job.process.terminate()
        out, err = job.process.communicate(timeout=PATIENCE)
    assert job.process.returncode == 143, err
    assert "a node of the workers is draining; a checkpoint is saved now and every 10 s" in out
    assert f"models/left is saved at step {saved():,}; run the same command again to resume" in err


@pytest.mark.long
def test_a_node_without_the_model_is_excluded(root: Path, alone: Path, cluster: LocalCluster) -> None:
    store = root / "excluded"
    shutil.copytree(alone / "corpus", store / "corpus")
    _, encoded, _ = steps(root, store)
    blind = cluster.add(hide=root / "model", labels={"kind": "cpu"})
    try:
        out = start(*map(str, encoded), "--min-workers", "3", environment=cluster.environment).end()
    finally:
        cluster.count_lost(blind)
    assert f"node {blind.address} is excluded, as a worker could not open there: " in out
    expected, actual = (artifacts(one)["embeddings/tiny/g0000"] for one in (alone, store))
    assert actual.parts == expected.parts


@pytest.mark.long
def test_a_later_node_that_does_not_see_the_store_is_excluded(root: Path, alone: Path) -> None:
    """The job starts when only the head is there, which has no cores, so that it cannot check the other nodes."""
    store = root / "later"
    shutil.copytree(alone / "corpus", store / "corpus")
    _, encoded, _ = steps(root, store)
    with local_cluster(workers=None) as cluster:
        cluster.add(cores=0)
        job = start(*map(str, encoded), "--wait", str(int(PATIENCE)), environment=cluster.environment)
        wait_for(lambda: list(store.glob(".tmp/visible-*")), "the job to wait for nodes", job.process)
        blind = cluster.add(hide=store, labels={"kind": "cpu"})
        assert job.process.stdout is not None
        line = next(line for line in job.process.stdout if "excluded" in line)
        cluster.add(labels={"kind": "cpu"})
        job.end()
    assert line.rstrip() == (
        f"node {blind.address} is excluded, as a worker could not open there: this node does not see the store "
        f"{store}: put it on a file system that all nodes mount at this path, or on S3 (s3://bucket/prefix)"
    )
    expected, actual = (artifacts(one)["embeddings/tiny/g0000"] for one in (alone, store))
    assert actual.parts == expected.parts
    assert not list(store.glob(".tmp/visible-*"))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ("--node-label", "kind=tpu"),
            "--node-label kind=tpu: no node has it; the labels of the nodes are kind=cpu, kind=gpu, kind=head",
        ),
        pytest.param(
            ("--cpus", 9, "--gpus", 0),
            "--cpus 9: expected at most 1, the cores of the largest node",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("--cpus", 1, "--gpus", 1, "--node-label", "kind=cpu"),
            "--gpus 1: expected nodes with GPUs, there are none; --wait SECONDS waits for more nodes",
            marks=pytest.mark.long,
        ),
        (
            ("--min-workers", 9, "--wait", 1, "--gpus", 0),
            "--min-workers 9: the nodes have 4 CPUs and 1 GPU, room for 4 of 8 workers of 1 CPU, after 1 s; --wait "
            "SECONDS waits for more nodes",
        ),
    ],
)
def test_what_no_node_can_do_is_refused_in_one_line(
    root: Path, alone: Path, cluster: LocalCluster, options: tuple[object, ...], line: str
) -> None:
    job = ("--encoder", root / "model", "--name", "other", *options)
    refused = start("encode_corpus", "--store", alone, *map(str, job), environment=cluster.environment).refused()
    assert refused == f"error: {line}"
    assert "embeddings/other/g0000" not in [*Store(str(alone)).keys(""), *Store(str(alone)).incomplete_keys()]


@pytest.mark.long
def test_a_cluster_grows_by_the_kind_of_node_that_a_job_names(
    root: Path, alone: Path, call_job: Callable[..., int]
) -> None:
    """Of two kinds, only the named one is launched; of the excluded nodes, another one of the kind takes the work."""
    types = {kind: NodeType(cpus=1, max_nodes=2, labels={"kind": kind}) for kind in ("cpu", "other")}
    with growing_cluster(types, boot_s=1.0) as cloud:
        for step in steps(root, root / "grown"):
            status, said = submit(cloud.cluster, REPOSITORY, *map(str, step), "--node-label", "kind=cpu")
            assert status == 0, said
        assert {launch.node_type for launch in cloud.launches()} == {"cpu"}
        cloud.wait_until_empty()
        broken, other = (address_of(cloud.launches()[-1].node + more) for more in (1, 2))
        done = places(cloud.cluster, TASKS, broken=(broken,), items=1, labels={"kind": "cpu"})
        assert done["places"] == [[other, "cpu"]]
        job = ("--encoder", root / "model", "--name", "other", "--wait", 3, "--node-label", "kind=tpu")
        status, said = submit(cloud.cluster, REPOSITORY, "encode_corpus", "--store", alone, *map(str, job))
        assert status == 1
        assert "error: --node-label kind=tpu: no node has it, after 3 s; " in said
    expected, actual = artifacts(alone), artifacts(root / "grown")
    assert {key: artifact.parts for key, artifact in actual.items()} == {
        key: artifact.parts for key, artifact in expected.items()
    }
