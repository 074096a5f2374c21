"""Jobs make a cluster grow from nothing: what they submit launches all nodes that the cloud has.

A head without CPUs and Ray's autoscaler (version 2) with four nodes of one core that take some seconds to boot. What is
tested is the log of launches, and that the bytes are those of one machine.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_cloud import Cloud, NodeType, growing_cluster
from local_cluster import REPOSITORY, start, submit, wait_for
from tiny import save_bert, write_corpus

from indexing.artifact import Artifact
from indexing.store import Store

pytestmark = [pytest.mark.cluster, pytest.mark.nodes, pytest.mark.slow]

NODES = 4
BOOT_S = 4.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw files and a model."""
    root = tmp_path_factory.mktemp("growth")
    write_corpus(root / "raw", 1_200)
    save_bert(root / "model")
    return root


def steps(root: Path, store: Path) -> dict[str, tuple[object, ...]]:
    """Returns the arguments of each job, in order; each has work of some seconds for at least four workers."""
    jobs: dict[str, tuple[object, ...]] = {
        "import": ("import_corpus", "--source", root / "raw", "--part-size", 150),
        "encode": ("encode_corpus", "--encoder", root / "model", "--name", "tiny", "--compile", "never", "--cpus", 1),
        "bm25": ("build_bm25", "--shards", 8),
    }
    return {name: (job, "--store", store, *arguments) for name, (job, *arguments) in jobs.items()}


@pytest.fixture(scope="module")
def alone(root: Path, call_job: Callable[..., int]) -> Path:
    """A store in which this machine has run all jobs without a cluster."""
    store = root / "alone"
    for arguments in steps(root, store).values():
        assert call_job(*arguments) == 0
    return store


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with growing_cluster({"worker": NodeType(cpus=1, most=NODES)}, boot_s=BOOT_S) as cloud:
        yield cloud


def test_each_job_launches_all_nodes_and_gives_the_bytes_of_one_machine(root: Path, alone: Path, cloud: Cloud) -> None:
    """The jobs run one after the other, each on a cluster without a node."""
    store = root / "grown"
    for name, arguments in steps(root, store).items():
        cloud.wait_until_empty()
        before = len(cloud.launches())
        status, said = submit(cloud.cluster, REPOSITORY, *map(str, arguments))
        assert status == 0, said
        launches = [event.time_s for event in cloud.launches()[before:]]
        assert len(launches) == NODES, f"{name}: {launches}\n{said}"
        if "--cpus" in arguments:
            assert max(launches) - min(launches) < BOOT_S, name
    expected, actual = artifacts(alone), artifacts(store)
    assert actual.keys() == expected.keys()
    for key, artifact in expected.items():
        if not key.startswith("bm25/"):  # Lucene writes random ids into its files
            assert [part.sha256 for part in actual[key].parts] == [part.sha256 for part in artifact.parts], key


def test_nodes_leave_after_the_driver_was_killed(root: Path, alone: Path, cloud: Cloud) -> None:
    """Pending work disappears with its driver, so all nodes become idle."""
    cloud.wait_until_empty()
    before = len(cloud.launches())
    store = root / "killed"
    shutil.copytree(alone / "corpus", store / "corpus")
    job = start(*map(str, steps(root, store)["encode"]), environment=cloud.cluster.environment)
    wait_for(lambda: len(cloud.launches()) - before == NODES, "all launches", job.process)
    os.killpg(job.process.pid, signal.SIGKILL)
    job.process.wait()
    cloud.wait_until_empty()
    assert len(cloud.launches()) - before == NODES


def artifacts(store: Path) -> dict[str, Artifact]:
    """Returns all complete artifacts of a store, by key."""
    opened = Store(str(store))
    return {key: opened.open(*key.split("/", 1)) for key in opened.keys("")}
