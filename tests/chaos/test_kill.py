"""kill -9 in the middle of an import, an encoding and a build: they go on, or do when told again, to the same bytes.

A seed decides what dies and when; the moment is counted in committed parts, never in time. Ten kinds of kills:

    driver   the job's own process: all of its private Ray ends with it; started again, the job goes on
    worker   a process that imports, encodes or fills just then, on a cluster of three nodes: the job goes on by itself
    node     every process of a node that works just then: the job goes on by itself

Three of them by default, in which everything that dies and every job comes once; RIPTIDE_CHAOS=long kills sixty times;
RIPTIDE_CHAOS_SEED=17,18 kills as these seeds do.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import pytest
from local_cluster import LONG, Job, LocalCluster, Node, local_cluster, start, still_there, title_of, wait_for
from tiny import save_bert, write_corpus

from indexing.store import Store
from indexing.verify import verify

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

PARTS, PART_SIZE, SHARDS = 24, 400, 24
SHORT = [0, 6, 8]
TRIES = 4  # a job of seconds may be through before its victim is found
KINDS = [("driver", "import"), ("driver", "encode"), ("driver", "index"),
         ("worker", "import"), ("worker", "encode"), ("worker", "encode"), ("worker", "index"),
         ("node", "import"), ("node", "encode"), ("node", "index")]  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """A job, where its parts appear, and what its workers call what they do."""

    job: str
    arguments: tuple[object, ...]
    folder: str
    part: str
    count: int
    title: str


@dataclass
class World:
    """A cluster, and each stage's store before and after an undisturbed run on it."""

    root: Path
    stages: dict[str, Stage]
    cluster: LocalCluster
    before: dict[str, Path] = field(default_factory=dict)
    after: dict[str, Path] = field(default_factory=dict)

    def start(self, stage: str, store: Path, environment: Mapping[str, str]) -> Job:
        own = {"RIPTIDE_CACHE": str(self.root / "cache")}
        found = self.stages[stage]
        return start(found.job, "--store", store, *found.arguments, environment={**environment, **own})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("chaos")
    source = write_corpus(root / "raw", PARTS * PART_SIZE, words=150)
    model = save_bert(root / "model")
    stages = {
        "import": Stage("import_corpus", ("--source", source, "--part-size", PART_SIZE),
                        "corpus/g0000", "part", PARTS, "ray::import_part"),
        "encode": Stage("encode_corpus", ("--encoder", model, "--name", "tiny", "--compile", "never"),
                        "embeddings/tiny/g0000", "part", PARTS, "EncodeWorker"),
        # A recall that any nprobe reaches: what is killed here is the filling.
        "index": Stage("build_index", ("--factory", "IVF32,SQ8", "--shards", SHARDS, "--recall", "0.01"),
                       "index/tiny/g0000", "shard", SHARDS, "ray::fill"),
    }  # fmt: skip
    store = root / "store"
    store.mkdir()
    with local_cluster(workers=2) as cluster:
        made = World(root, stages, cluster)
        for name in stages:
            made.before[name] = copied(store, root / f"before-{name}")
            made.start(name, store, cluster.environment).end()
            made.after[name] = copied(store, root / f"after-{name}")
        yield made


def cases() -> list[object]:
    """(seed, what is killed, in what): the ten kinds in turn."""
    seeds = list(range(60)) if LONG else SHORT
    if chosen := os.environ.get("RIPTIDE_CHAOS_SEED"):
        seeds = [int(seed) for seed in chosen.split(",")]
    kinds = {seed: KINDS[seed % len(KINDS)] for seed in seeds}
    return [pytest.param(seed, *kind, id="-".join([*kind, str(seed)])) for seed, kind in kinds.items()]


@pytest.mark.parametrize(("seed", "victim", "stage"), cases())
def test_the_same_bytes_come_out(world: World, tmp_path: Path, seed: int, victim: str, stage: str) -> None:
    draw = random.Random(seed)
    alone = victim == "driver" or (victim == "worker" and seed // len(KINDS) % 2 == 1)
    for attempt in range(TRIES):
        if killed_in_the_middle(world, tmp_path / f"store-{attempt}", draw, victim, stage, alone=alone):
            return
    pytest.fail(f"{TRIES} kills came too late to be in the middle of a job")


def killed_in_the_middle(
    world: World, store: Path, draw: random.Random, victim: str, stage: str, *, alone: bool
) -> bool:
    """Kill, let the job go on or start it again, compare. False where the job was through before the kill."""
    what = world.stages[stage]
    copied(world.before[stage], store)
    mark = {"RIPTIDE_TEST_MARK": uuid.uuid4().hex}
    reached = {} if alone else world.cluster.environment
    job = world.start(stage, store, {**reached, **mark})
    folder = store / what.folder
    moment = draw.randint(0, what.count // 2)
    nodes = len(world.cluster.nodes)
    try:
        wait_for(lambda: begun(folder) and committed(folder, what.part) >= moment, f"{moment} parts", job.process)
        if victim == "driver":
            kill_driver(job, mark)
        elif victim == "worker":
            kill_worker(partial(marked, mark) if alone else world.cluster.processes, what.title, draw, job)
        else:
            kill_node(world.cluster, what.title, draw, job)
        if (folder / "manifest.json").exists():
            if victim != "driver":
                job.end()
                assert contents(store) == contents(world.after[stage])
            return False
        # A worker that dies between its commit and its answer is asked again, and puts the same bytes there once more.
        kept = stamps(folder, parts=victim == "driver")
        assert sum(name.startswith(f"{what.part}-") for name in kept) >= moment
        if victim != "driver":
            job.end()
    finally:
        job.process.kill()
        job.process.wait()
        if len(world.cluster.nodes) < nodes:
            world.cluster.add()
    if victim == "driver":
        world.start(stage, store, reached).end()
    assert contents(store) == contents(world.after[stage])
    after = stamps(folder, parts=victim == "driver")
    assert {name: after[name] for name in kept} == kept, "what had been committed was committed again"
    assert [finding.problem for finding in verify(Store(str(store))) if finding.problem] == []
    return True


def kill_driver(job: Job, mark: Mapping[str, str]) -> None:
    """kill -9 the job's process; raises unless every process that it had started ends too."""
    job.process.send_signal(signal.SIGKILL)
    job.process.wait()
    wait_for(lambda: not marked(mark), f"the end of {[title_of(p)[:80] for p in marked(mark)]}")


def kill_worker(find: Callable[[], list[psutil.Process]], title: str, draw: random.Random, job: Job) -> None:
    """kill -9 a worker that does what `title` says: held still first, so that it is in the middle of it. Or none, where
    the job ends before one is found."""
    killed: list[psutil.Process] = []

    def one() -> bool:
        working = [process for process in find() if title in title_of(process)]
        for process in draw.sample(working, len(working)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
                if title in title_of(process):
                    process.kill()
                    killed.append(process)
                    return True
                process.resume()
        return False

    wait_for(lambda: one() or job.process.poll() == 0, f"a worker at {title}", job.process)
    wait_for(lambda: not still_there(killed), "the worker's end")


def kill_node(cluster: LocalCluster, title: str, draw: random.Random, job: Job) -> None:
    """kill -9 all processes of a node, not the head, one of whose workers does what `title` says. Or of none, where the
    job ends before one is found."""
    found: list[Node] = []

    def working() -> bool:
        found[:] = [node for node in cluster.workers if node.workers(title)]
        return bool(found)

    wait_for(lambda: working() or job.process.poll() == 0, f"a node at {title}", job.process)
    if found:
        cluster.lose(draw.choice(found))


def marked(mark: Mapping[str, str]) -> list[psutil.Process]:
    """The processes whose environment has the mark: a job and all that it started, whoever their parent is now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if mark.items() <= process.environ().items():
                found.append(process)
    return still_there(found)


def begun(folder: Path) -> bool:
    return (folder / "manifest.begun.json").exists()


def committed(folder: Path, part: str) -> int:
    """How many parts have their record."""
    return sum(name.startswith(f"{part}-") and name.endswith(".json") for name in os.listdir(folder))


def stamps(folder: Path, *, parts: bool) -> dict[str, tuple[int, int]]:
    """File -> (inode, time of change) of every part's record, and (`parts`) of the bytes that it names."""
    found = {}
    for record in folder.glob("*-?????.json"):
        for path in (record, *(folder.glob(f"{record.stem}-*") if parts else ())):
            status = path.stat()
            found[path.name] = status.st_ino, status.st_mtime_ns
    return found


def contents(store: Path) -> dict[str, str]:
    """File -> sha256 of all that a store holds, less who made it and when."""
    return {
        path.relative_to(store).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in store.rglob("*")
        if path.is_file() and path.name != "provenance.json" and ".tmp" not in path.parts
    }


def copied(store: Path, to: Path) -> Path:
    """A copy of a store, its times and all."""
    return Path(shutil.copytree(store, to, copy_function=shutil.copy2))
