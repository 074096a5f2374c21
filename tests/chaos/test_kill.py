"""Jobs that are killed with SIGKILL while they import, encode or build give the bytes of an undisturbed run.

A seed decides what is killed and when; the moment is a number of committed parts, never a time. Three victims:

    driver   the job's own process: its private Ray ends with it, and the same command resumes the job
    worker   a process that imports, encodes or fills at that moment, on a cluster of three nodes: the job continues
    node     every process of a node that works at that moment: the job continues

By default three kills cover each victim and each job once. RIPTIDE_TESTS=all kills sixty times, and
RIPTIDE_CHAOS_SEED=17,18 runs the kills of these seeds.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from kills import committed, contents, copied, kill_driver, kill_node, kill_worker, marked, stamps
from local_cluster import LONG, Job, LocalCluster, local_cluster, start, wait_for
from tiny import save_bert, write_corpus

from riptide.indexing.maintenance.verification import verify
from riptide.indexing.store.store import Store

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

PARTS, PART_SIZE, SHARDS = 24, 400, 24
SHORT = [0, 6, 8]
TRIES = 4  # a job of seconds may be through before its victim is found
KINDS = [
    ("driver", "import"),
    ("driver", "encode"),
    ("driver", "index"),
    ("worker", "import"),
    ("worker", "encode"),
    ("worker", "encode"),
    ("worker", "index"),
    ("node", "import"),
    ("node", "encode"),
    ("node", "index"),
]


@dataclass(frozen=True)
class Stage:
    """A job, the folder and names of its parts, and the process title of its workers."""

    job: str
    arguments: tuple[object, ...]
    folder: str
    part: str
    count: int
    title: str


@dataclass
class World:
    """A cluster, and each stage's store before and after an undisturbed run without it."""

    root: Path
    stages: dict[str, Stage]
    cluster: LocalCluster
    before: dict[str, Path] = field(default_factory=dict)
    after: dict[str, Path] = field(default_factory=dict)

    def start(self, stage: str, store: Path, environment: Mapping[str, str], *more: str) -> Job:
        own = {"RIPTIDE_CACHE": str(self.root / "cache")}
        found = self.stages[stage]
        return start(found.job, "--store", store, *found.arguments, *more, environment={**environment, **own})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("chaos")
    source = write_corpus(root / "raw", PARTS * PART_SIZE, words=150)
    model = save_bert(root / "model")
    stages = {
        "import": Stage(
            "import_corpus",
            ("--source", source, "--part-size", PART_SIZE),
            "corpus/g0000",
            "part",
            PARTS,
            "ray::riptide parse",
        ),
        "encode": Stage(
            "encode_corpus",
            ("--encoder", model, "--name", "tiny", "--compile", "never"),
            "embeddings/tiny/g0000",
            "part",
            PARTS,
            "MapWorker(Map(riptide encode))",
        ),
        # Any nprobe reaches this recall, so the kill comes while shards are filled.
        "index": Stage(
            "build_index",
            ("--factory", "IVF32,SQ8", "--shards", SHARDS, "--recall", "0.01"),
            "index/tiny/g0000",
            "shard",
            SHARDS,
            "ray::riptide fill",
        ),
    }
    store = root / "store"
    store.mkdir()
    with local_cluster(workers=2) as cluster:
        made = World(root, stages, cluster)
        for name in stages:
            made.before[name] = copied(store, root / f"before-{name}")
            made.start(name, store, {}).end()
            made.after[name] = copied(store, root / f"after-{name}")
        yield made


def cases() -> list[object]:
    """Returns (seed, victim, stage) of each kill: the ten kinds in turn."""
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
    """Kills, lets the job end or runs it again, and compares the stores; False if the job ended before the kill."""
    what = world.stages[stage]
    copied(world.before[stage], store)
    mark = {"RIPTIDE_TEST_MARK": uuid.uuid4().hex}
    reached = {} if alone else world.cluster.environment
    # Without a cluster the driver does all work itself; a worker that can be killed needs a private Ray.
    job = world.start(stage, store, {**reached, **mark}, *(["--ray"] if alone and victim == "worker" else []))
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
        # If a worker is killed between its commit and its result, its item is run again and writes the same bytes.
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


def begun(folder: Path) -> bool:
    return (folder / "manifest.begun.json").exists()
