"""Jobs make a cluster grow from nothing: what they submit launches all nodes that the cloud has.

A head without CPUs and Ray's autoscaler (version 2) with four nodes of two cores that take some seconds to boot. Each
item of work sleeps, so that there is work for all nodes. What is tested is the log of launches, which nodes worked, and
that the bytes are those of one machine.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_cloud import Cloud, NodeType, growing_cluster
from local_cluster import LONG, REPOSITORY, Job, start, submit, wait_for
from slow_work import install_slow_work, items_by_node
from tiny import add_masked_head, make_classifier, save_bert, write_corpus

from indexing.store import Store

pytestmark = [pytest.mark.cluster, pytest.mark.nodes, pytest.mark.slow]

NODES = 4
BOOT_S = 20.0 if LONG else 4.0
LIMITED = "encode_corpus --encoder {root}/model --name {name} --compile never --cpus 2 --max-workers 2"


@dataclass(frozen=True)
class Step:
    """A job that has work for all nodes.

    Attributes:
        command: The job and its options, but for the store.
        makes: The artifacts that it makes.
        waves: 1 if it requests all nodes at once, 2 if the first one says what its workers get.
        same_bytes: Whether two runs make the same bytes.
    """

    command: str
    makes: tuple[str, ...]
    waves: int = 2
    same_bytes: bool = True


STEPS = {
    "import": Step("import_corpus --source {root}/raw --part-size 100", ("corpus", "queries")),
    "encode": Step("encode_corpus --encoder {root}/model --name tiny --compile never --cpus 2", ("embeddings",), 1),
    # Lucene writes random ids into its files.
    "bm25": Step("build_bm25 --shards 16", ("bm25",), same_bytes=False),
    "index": Step("build_index --embeddings tiny --factory IVF16,SQ8 --shards 16 --recall 0.2", ("index",)),
    "search-bm25": Step("search --mode bm25 --split test --k 100 --name bm25", ("runs/bm25",)),
    "search-exact": Step("search --mode exact --split test --k 100 --name exact", ("runs/exact",)),
    "mine": Step(
        "mine_negatives --split test --sources bm25 exact:tiny --depth 20 --part-queries 64"
        " --reranker {root}/reranker --name first",
        ("candidates", "scores", "negatives"),
    ),
    "rerank": Step(
        "search --mode bm25 --split test --k 100 --rerank {root}/reranker --rerank-depth 20 --name reranked",
        ("runs/reranked",),
    ),
    # Weights depend on the number of workers.
    "train": Step(
        "tune_prompts --task tuned --negatives first --backbone {root}/model --length 4 --epochs 1 --workers 4",
        ("prompts",),
        1,
        same_bytes=False,
    ),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw files and models."""
    root = tmp_path_factory.mktemp("growth")
    write_corpus(root / "raw", 1_600, queries=512)
    save_bert(root / "model")
    make_classifier(save_bert(root / "reranker"))
    add_masked_head(save_bert(root / "masked"))
    return root


def arguments(command: str, root: Path, store: Path, name: str = "") -> list[str]:
    """Returns the name of the job of a command, and its arguments."""
    job, *options = command.format(root=root, name=name).split()
    return [job, "--store", str(store), *options]


@pytest.fixture(scope="module")
def alone(root: Path, call_job: Callable[..., int]) -> Path:
    """A store in which this machine has run all jobs but the training without a cluster."""
    store = root / "alone"
    for step in STEPS.values():
        if step.makes != ("prompts",):
            assert call_job(*arguments(step.command, root, store)) == 0
    return store


@pytest.fixture(scope="module")
def modules(root: Path) -> Path:
    """The folder that slows work down, and where it is logged."""
    return install_slow_work(root / "modules")


@pytest.fixture(scope="module")
def cluster(modules: Path) -> Iterator[Cloud]:
    with growing_cluster({"worker": NodeType(cpus=2, most=NODES)}, boot_s=BOOT_S, modules=modules) as cloud:
        yield cloud


@pytest.fixture
def cloud(cluster: Cloud) -> Cloud:
    """The cluster without a node."""
    cluster.wait_until_empty()
    return cluster


@pytest.mark.parametrize("name", STEPS)
def test_a_job_launches_all_nodes(
    name: str, root: Path, alone: Path, cloud: Cloud, modules: Path, tmp_path: Path
) -> None:
    step, store, before = STEPS[name], tmp_path / "store", len(cloud.launches())
    shutil.copytree(alone, store)
    for made in step.makes:
        shutil.rmtree(store / made, ignore_errors=True)
    status, said = submit(cloud.cluster, REPOSITORY, *arguments(step.command, root, store))
    print(cloud.describe(before))
    assert status == 0, said
    waves = cloud.waves(before)
    assert len(waves) == NODES, said
    assert max(waves) <= step.waves, said
    launched = {event.node for event in cloud.launches()[before:]}
    assert launched == {node for node in items_by_node(modules) if node > before}, said
    if step.same_bytes:
        for made in step.makes:
            assert bytes_of(store, made) == bytes_of(alone, made)


def test_two_jobs_at_once_get_the_nodes_of_both(root: Path, alone: Path, cloud: Cloud, tmp_path: Path) -> None:
    """Each of them can use two nodes."""
    before = len(cloud.launches())
    stores = [copy_of_corpus(alone, tmp_path / name) for name in ("one", "two")]
    for job in [start_on(cloud, LIMITED, root, store, "tiny") for store in stores]:
        job.end()
    assert len(cloud.launches()) - before == NODES
    assert cloud.waves(before) == [1] * NODES
    for store in stores:
        assert bytes_of(store, "embeddings") == bytes_of(alone, "embeddings")


def test_nodes_leave_after_the_driver_was_killed(root: Path, alone: Path, cloud: Cloud, tmp_path: Path) -> None:
    """Pending work disappears with its driver, so all nodes become idle."""
    before = len(cloud.launches())
    job = start_on(cloud, STEPS["encode"].command, root, copy_of_corpus(alone, tmp_path / "store"))
    wait_for(lambda: len(cloud.launches()) - before == NODES, "all launches", job.process)
    os.killpg(job.process.pid, signal.SIGKILL)
    job.process.wait()
    cloud.wait_until_empty()
    assert len(cloud.launches()) - before == NODES


@pytest.mark.parametrize("name", ["import", "encode"])  # as Ray tasks, and in a pool of actors
def test_a_node_that_is_removed_costs_only_its_items(
    name: str, root: Path, alone: Path, cloud: Cloud, modules: Path, tmp_path: Path
) -> None:
    step, store, before = STEPS[name], tmp_path / "store", len(cloud.launches())
    if name != "import":
        copy_of_corpus(alone, store)
    job = start_on(cloud, step.command, root, store)

    def begun() -> dict[int, Counter[str]]:
        """Returns the items of each node of this test."""
        return {node: items for node, items in items_by_node(modules).items() if node > before}

    wait_for(lambda: any(items.total() >= 4 for items in begun().values()), "work in progress", job.process)
    lost = max(begun(), key=lambda node: begun()[node].total())
    cloud.kill(lost)
    job.end()
    times = sum(begun().values(), Counter())
    repeated = {item for item, count in times.items() if count > 1}
    assert repeated
    assert repeated <= set(begun()[lost])
    for made in step.makes:
        assert bytes_of(store, made) == bytes_of(alone, made)


def test_a_training_starts_after_an_encoding(
    root: Path, alone: Path, cloud: Cloud, modules: Path, tmp_path: Path
) -> None:
    """It needs more nodes than there are. Ray Data has left an actor that requests resources for the whole cluster."""
    store, before = tmp_path / "store", len(cloud.launches())
    shutil.copytree(alone, store)
    for command in (LIMITED, STEPS["train"].command):
        status, said = submit(cloud.cluster, REPOSITORY, *arguments(command, root, store, "again"))
        assert status == 0, said
        if command == LIMITED:
            assert "AutoscalingCoordinator" in actors_of(cloud)
    trained = [node for node, items in items_by_node(modules).items() if node > before and items["training"]]
    assert len(trained) == NODES


@pytest.mark.parametrize(
    "command",
    [
        "import_queries --source {root}/raw --queries others",
        "evaluate --run bm25 exact --split test",
        "verify",
        "train_reranker --negatives first --backbone {root}/model --name trained --epochs 1",
        "pretrain_rip --objective mlm --backbone {root}/masked --name pretrained --epochs 1",
    ],
)
def test_other_jobs_run_too(command: str, root: Path, alone: Path, cluster: Cloud, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(alone, store)
    status, said = submit(cluster.cluster, REPOSITORY, *arguments(command, root, store))
    assert status == 0, said


def actors_of(cloud: Cloud) -> set[str]:
    """Returns the names of the actors that are alive."""
    actors = cloud.cluster.ask("/api/v0/actors?limit=1000")["data"]["result"]["result"]
    return {actor["name"] for actor in actors if actor["state"] == "ALIVE"}


def start_on(cloud: Cloud, command: str, root: Path, store: Path, name: str = "") -> Job:
    """Starts a job whose driver is on this machine."""
    return start(*arguments(command, root, store, name), environment=cloud.cluster.environment)


def copy_of_corpus(alone: Path, store: Path) -> Path:
    """Makes a store that holds only the corpus; returns it."""
    shutil.copytree(alone / "corpus", store / "corpus")
    return store


def bytes_of(store: Path, prefix: str) -> dict[str, list[str]]:
    """Returns the hashes of the parts of all artifacts whose key begins with a prefix."""
    opened = Store(str(store))
    keys = [key for key in opened.keys("") if key.startswith(prefix)]
    assert keys, prefix
    return {key: [part.sha256 for part in opened.open(*key.split("/", 1)).parts] for key in keys}
