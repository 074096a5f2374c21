"""Jobs make a cluster grow from nothing: what they submit launches all nodes that the cloud has.

A head without CPUs and Ray's autoscaler (version 2) with four nodes of two cores that take some seconds to boot. Items
of work wait until all nodes have begun one. What is tested is the log of launches, and that the bytes are those of one
machine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_cloud import IDLE_S, Cloud, NodeType, address_of, growing_cluster
from local_cluster import LONG, PATIENCE, REPOSITORY, Job, clean_environment, start, submit, wait_for
from planted_topics import planted_texts
from tiny import add_masked_head, make_classifier, save_bert, write_corpus
from waiting_work import WaitingWork

from riptide.indexing.store.store import Store

pytestmark = [pytest.mark.cluster, pytest.mark.nodes, pytest.mark.slow]

NODES = 4
BOOT_S = 20.0 if LONG else 4.0
LIMITED = "encode_corpus --encoder {root}/model --name limited --compile never --cpus 2 --max-workers 2"
TRAIN = (
    "tune_prompts --split test --task tuned --negatives first --backbone {root}/model --length 4 --epochs 1 --workers 4"
)

# Runs a probe, and then the work after a time in which an autoscaler ends idle nodes.
PROBE_AND_WORK = """
import sys, time
from dataclasses import dataclass
import ray
from riptide.indexing.work.nodes import Reports
from riptide.indexing.work.ray_tasks import RayTasks
from riptide.indexing.work.worker_tasks import WorkerRequest, WorkerResources

@dataclass(frozen=True)
class EchoTask:
    resources: WorkerResources = WorkerResources(cores=2)

    def open(self, allocation):
        return lambda item, report: item

nodes, pause_s = int(sys.argv[1]), float(sys.argv[2])
ray.init(log_to_driver=False, logging_level="ERROR")
runner = RayTasks(WorkerRequest(min_workers=nodes), Reports(print))
runner.run_on_first_available(EchoTask(), 0, nodes)
time.sleep(pause_s)
print(sorted(item for item, _ in runner.run(EchoTask(), range(nodes))))
"""


@dataclass(frozen=True)
class Step:
    """A job that has work for all nodes.

    Attributes:
        command: The job and its options, but for the store.
        makes: The artifacts that it makes.
        boots: 1 if it requests all nodes at once, 2 if the first node says what its workers get.
        same_bytes: Whether two runs make the same bytes.
    """

    command: str
    makes: tuple[str, ...]
    boots: int = 2
    same_bytes: bool = True


STEPS = {
    "import": Step("import_corpus --source {root}/raw --part-size 100", ("corpus", "queries"), 1),
    "encode": Step("encode_corpus --encoder {root}/model --name tiny --compile never --cpus 2", ("embeddings",), 1),
    # Lucene writes random ids into its files.
    "bm25": Step("build_bm25 --shards 16", ("bm25",), 1, same_bytes=False),
    "index": Step("build_index --embeddings tiny --factory IVF16,SQ8 --shards 16 --recall 0.2", ("index",)),
    "search-bm25": Step("search --mode bm25 --split test --k 100 --name bm25", ("runs/bm25",)),
    "search-exact": Step("search --mode exact --split test --k 100 --name exact", ("runs/exact",)),
    "mine": Step(
        "mine_negatives --split test --sources bm25 exact:tiny --depth 20 --part-queries 64"
        " --reranker {root}/reranker --name first",
        ("candidates", "scores", "negatives"),
    ),
    "rerank": Step(
        "search --mode bm25 --split test --k 100 --rerank {root}/reranker --rerank-depth 20 --name reranked --cpus 2",
        ("runs/reranked",),
        1,
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
    step = {"import_queries": {"source": str(root / "raw"), "queries": "more"}}
    (root / "pipeline.yaml").write_text(json.dumps({"store": "", "steps": [step]}))  # YAML includes JSON
    return root


@pytest.fixture(scope="module")
def alone(root: Path, call_job: Callable[..., int]) -> Path:
    """A store in which this machine has run all jobs without a cluster."""
    store = root / "alone"
    for step in STEPS.values():
        assert call_job(*arguments(step.command, root, store)) == 0
    return store


@pytest.fixture(scope="module")
def module_cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cloud, WaitingWork]]:
    work = WaitingWork(tmp_path_factory.mktemp("work"))
    types = {"worker": NodeType(cpus=2, max_nodes=NODES)}
    with growing_cluster(types, boot_s=BOOT_S, modules=work.folder) as cloud:
        yield cloud, work


@pytest.fixture
def work(module_cloud: tuple[Cloud, WaitingWork]) -> WaitingWork:
    """Items that wait for all nodes."""
    work = module_cloud[1]
    work.wait_for_nodes(NODES)
    return work


@pytest.fixture
def cloud(module_cloud: tuple[Cloud, WaitingWork]) -> Cloud:
    """A cluster without a node."""
    module_cloud[0].wait_until_empty()
    return module_cloud[0]


@pytest.mark.parametrize(
    "name", ["encode", *(pytest.param(name, marks=pytest.mark.long) for name in STEPS if name != "encode")]
)
def test_a_job_launches_all_nodes(
    name: str, root: Path, alone: Path, cloud: Cloud, work: WaitingWork, tmp_path: Path
) -> None:
    """A node that is idle between two steps of a job may be replaced later."""
    step, store, before = STEPS[name], tmp_path / "store", len(cloud.launches())
    shutil.copytree(alone, store)
    for made in step.makes:
        shutil.rmtree(store / made, ignore_errors=True)
    status, said = submit(cloud.cluster, REPOSITORY, *arguments(step.command, root, store))
    print(cloud.describe(before))
    assert status == 0, said
    assert "(raylet)" not in said, said
    assert "is lost" not in said, said
    boots = cloud.boots(before)[:NODES]
    assert len(boots) == NODES
    assert max(boots) <= step.boots
    assert len(work.items(before)) >= NODES
    # For an earlier job, Ray would unpack the working directory again while workers import from it.
    assert [len(jobs) for jobs in cloud.prepared_jobs(before, NODES)] == [1] * NODES
    if step.same_bytes:
        for made in step.makes:
            assert bytes_of(store, made) == bytes_of(alone, made)


@pytest.mark.long
def test_two_jobs_at_once_get_the_nodes_of_both(
    root: Path, alone: Path, cloud: Cloud, work: WaitingWork, tmp_path: Path
) -> None:
    """Each of them waits for two nodes, the most that it can use."""
    work.wait_for_nodes(NODES // 2)
    before = len(cloud.launches())
    stores = [copy_of_corpus(alone, tmp_path / name) for name in ("one", "two")]
    for job in [start_on(cloud, LIMITED, root, store) for store in stores]:
        job.end()
    assert len(cloud.launches()) - before == NODES
    for store in stores:
        assert list(bytes_of(store, "embeddings").values()) == list(bytes_of(alone, "embeddings").values())


def test_nodes_leave_after_the_driver_was_killed(
    root: Path, alone: Path, cloud: Cloud, work: WaitingWork, tmp_path: Path
) -> None:
    """Pending work disappears with its driver, so all nodes become idle."""
    work.wait_for_nodes(NODES + 1)
    before = len(cloud.launches())
    job = start_on(cloud, STEPS["encode"].command, root, copy_of_corpus(alone, tmp_path / "store"))
    wait_for(lambda: len(work.items(before)) == NODES, "work on all nodes", job.process)
    os.killpg(job.process.pid, signal.SIGKILL)
    job.process.wait()
    cloud.wait_until_empty()
    assert len(cloud.launches()) - before == NODES


@pytest.mark.parametrize(  # as Ray tasks, and in a pool of actors
    "name", ["import", pytest.param("encode", marks=pytest.mark.long)]
)
def test_a_node_that_is_removed_costs_only_its_items(
    name: str, root: Path, alone: Path, cloud: Cloud, work: WaitingWork, tmp_path: Path
) -> None:
    """All nodes are at work until another one replaces the lost one."""
    work.wait_for_nodes(NODES + 1)
    step, store, before = STEPS[name], tmp_path / "store", len(cloud.launches())
    if name != "import":
        copy_of_corpus(alone, store)
    job = start_on(cloud, step.command, root, store)

    def all_busy() -> bool:
        """Returns whether all nodes have begun two items, of which one at least waits."""
        begun = work.items(before).values()
        return len(begun) == NODES and all(items.total() >= 2 for items in begun)

    wait_for(all_busy, "work on all nodes", job.process)
    lost = min(work.items(before))
    cloud.kill(lost)
    assert job.end().count(f"node {address_of(lost)} is lost; its work is made again\n") == 1
    print(cloud.describe(before))
    items = work.items(before)
    times = sum(items.values(), Counter())
    repeated = {item for item, count in times.items() if count > 1}
    assert repeated
    assert repeated <= set(items[lost])
    for made in step.makes:
        assert bytes_of(store, made) == bytes_of(alone, made)


@pytest.mark.long
def test_nodes_stay_between_a_probe_and_the_work(cloud: Cloud, work: WaitingWork) -> None:
    """However long the driver takes between them: here three times as long as a node may be idle."""
    work.wait_for_nodes(1)
    before = len(cloud.launches())
    done = subprocess.run(
        [sys.executable, "-c", PROBE_AND_WORK, str(NODES // 2), str(3 * IDLE_S)],
        cwd=REPOSITORY,
        env=clean_environment({**cloud.cluster.environment, "PYTHONPATH": str(REPOSITORY)}),
        text=True,
        capture_output=True,
        timeout=PATIENCE,
    )
    print(cloud.describe(before))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(list(range(NODES // 2)))
    assert "is lost" not in done.stdout
    assert len(cloud.launches()) - before == NODES // 2


@pytest.mark.long
def test_a_training_starts_after_an_encoding(
    root: Path, alone: Path, cloud: Cloud, work: WaitingWork, tmp_path: Path
) -> None:
    """Ray Data has left an actor that requests resources for the whole cluster, but no node."""
    work.wait_for_nodes(NODES // 2)
    store = tmp_path / "store"
    shutil.copytree(alone, store)
    status, said = submit(cloud.cluster, REPOSITORY, *arguments(LIMITED, root, store))
    assert status == 0, said
    cloud.wait_until_empty()
    assert "AutoscalingCoordinator" in actor_names(cloud)
    before = len(cloud.launches())
    status, said = submit(cloud.cluster, REPOSITORY, *arguments(TRAIN, root, store))
    print(cloud.describe(before))
    assert status == 0, said
    assert cloud.boots(before)[:NODES] == [1] * NODES
    assert sum(items["training-0"] for items in work.items(before).values()) == NODES


@pytest.mark.parametrize(
    "command",
    [
        "import_queries --source {root}/raw --queries others",
        pytest.param("evaluate --run bm25 exact --split test", marks=pytest.mark.long),
        pytest.param("verify", marks=pytest.mark.long),
        pytest.param("store list", marks=pytest.mark.long),
        pytest.param("pipeline --config {root}/pipeline.yaml", marks=pytest.mark.long),
        pytest.param(
            "train_retriever --train prompts --split test --task other --negatives first --backbone {root}/model"
            " --length 4 --epochs 1",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "train_reranker --split test --negatives first --backbone {root}/model --name again --epochs 1"
            " --max-length 64",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "pretrain_rip --objective mlm --backbone {root}/masked --name pretrained --epochs 1 --max-length 64",
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda command: command.split()[0],
)
def test_other_jobs_run_too(
    command: str, root: Path, alone: Path, module_cloud: tuple[Cloud, WaitingWork], work: WaitingWork, tmp_path: Path
) -> None:
    work.wait_for_nodes(1)
    store = tmp_path / "store"
    shutil.copytree(alone, store)
    status, said = submit(module_cloud[0].cluster, REPOSITORY, *arguments(command, root, store))
    assert status == 0, said


@pytest.mark.long
def test_jobs_of_topics_pictures_and_prompts_run_too(
    root: Path,
    alone: Path,
    module_cloud: tuple[Cloud, WaitingWork],
    work: WaitingWork,
    tmp_path: Path,
    call_job: Callable[..., int],
) -> None:
    """They need a corpus with topics, and a tuned prompt."""
    work.wait_for_nodes(1)
    texts, _ = planted_texts(120)
    lines = [json.dumps({"_id": f"p{number}", "title": "", "text": text}) for number, text in enumerate(texts)]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    planted, tuned = tmp_path / "planted", tmp_path / "tuned"
    tune = "tune_prompts --split test --task tuned --negatives first"
    for command in (
        "import_corpus --source {root}/raw",
        f"encode_corpus --encoder {root}/model --name tiny --compile never --allow-unknown-tokens",
    ):
        assert call_job(*arguments(command, tmp_path, planted)) == 0
    shutil.copytree(alone, tuned)
    for command, store in (
        ("fit_topics --min-passages 2 --most-frequent 2 --iterations 30 --gamma 1 --eta 0.5 --words 4", planted),
        ("draw points --embeddings tiny --topics topics --perplexity 5 --png {root}/points.png", planted),
        (f"{tune} --backbone {root}/model --length 4 --steps 2", tuned),
        ("convert_prompts --task tuned --to {root}/peft", tuned),
    ):
        status, said = submit(module_cloud[0].cluster, REPOSITORY, *arguments(command, tmp_path, store))
        assert status == 0, said
    assert (tmp_path / "points.png").exists()
    assert (tmp_path / "peft").is_dir()


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "needs"),
    [
        (f"{STEPS['encode'].command} --cpus 3", "--cpus 3"),
        (f"{TRAIN} --cpus 3", "--cpus 3"),
        (f"{STEPS['encode'].command} --cpus 1 --node-label kind=none", "--cpus 1, --node-label kind=none"),
    ],
)
def test_a_worker_that_no_type_of_node_holds_ends_the_job(
    command: str, needs: str, cloud: Cloud, root: Path, alone: Path
) -> None:
    """It does not wait for the half hour that nodes may take."""
    line = start_on(
        cloud, command.replace("--name tiny", "--name large").replace("tuned", "large"), root, alone
    ).refused()
    assert line.startswith(f"error: {needs}: the autoscaler starts no node")
    assert ", as no type of node has all of this or its limits are reached: request less" in line
    assert not cloud.present()


def arguments(command: str, root: Path, store: Path) -> list[str]:
    """Returns the name of the job of a command, and its arguments."""
    job, *options = command.format(root=root).split()
    return [job, "--store", str(store), *options]


def start_on(cloud: Cloud, command: str, root: Path, store: Path) -> Job:
    """Starts a job whose driver is on this machine."""
    return start(*arguments(command, root, store), environment=cloud.cluster.environment)


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


def actor_names(cloud: Cloud) -> set[str]:
    """Returns the names of the actors that are alive."""
    actors = cloud.cluster.ask("/api/v0/actors?limit=1000")["data"]["result"]["result"]
    return {actor["name"] for actor in actors if actor["state"] == "ALIVE"}
