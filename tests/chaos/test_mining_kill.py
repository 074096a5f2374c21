"""Mining that is killed with SIGKILL gives the candidates, scores and negatives of an undisturbed run.

The moment is a number of committed parts, never a time. The driver is killed while it pools, re-ranks or samples, and
the same command resumes; a worker is killed while it re-ranks, and the job continues. By default the driver is killed
while it samples; RIPTIDE_TESTS=all runs all of these.
"""

from __future__ import annotations

import random
import shutil
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from kills import committed, contents, copied, kill_driver, kill_worker, marked, stamps
from local_cluster import LONG, run, start, wait_for
from tiny import make_classifier, save_bert, write_corpus

from riptide.indexing.maintenance.verification import verify
from riptide.indexing.store.store import Store

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

PARTS, QUERIES = 40, 240


class World(NamedTuple):
    """A store to mine in, its contents after an undisturbed run, and the arguments of the command."""

    store: Path
    after: dict[str, str]
    scores: str
    arguments: list[object]
    environment: dict[str, str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, call_job: Callable[..., int]) -> World:
    root = tmp_path_factory.mktemp("mining")
    source = write_corpus(root / "raw", 1_000, queries=QUERIES)
    environment = {"RIPTIDE_CACHE": str(root / "cache")}
    model = save_bert(root / "model")
    reranker = make_classifier(shutil.copytree(model, root / "cross"), seed=0, initializer_range=0.5)
    store = root / "store"
    for job, *arguments in (
        ("import_corpus", "--source", source, "--part-size", 250),
        ("encode_corpus", "--encoder", model, "--name", "tiny", "--compile", "never"),
        ("build_bm25", "--shards", 2),
    ):
        assert call_job(job, "--store", store, *arguments) == 0
    mining: list[object] = [
        "--split",
        "test",
        "--sources",
        "bm25",
        "exact:tiny",
        "--depth",
        60,
        "--part-queries",
        QUERIES // PARTS,
        "--reranker",
        reranker,
        "--denoise-threshold",
        0.5,
        "--candidates",
        "pool",
        "--name",
        "drawn",
    ]
    after = copied(store, root / "after")
    assert call_job("mine_negatives", "--store", after, *mining) == 0
    [scores] = Store(str(after)).names("scores")
    for folder in ("candidates/pool", f"scores/{scores}/g0000", "negatives/drawn"):
        assert committed(after / folder, "part") == PARTS
    return World(store, contents(after), scores, mining, environment)


KILLS = [
    ("driver", "negatives/drawn", 1),
    ("worker", "scores/SCORES/g0000", 3),
    ("driver", "candidates/pool", 4),
    ("driver", "scores/SCORES/g0000", 5),
]


@pytest.mark.parametrize(("victim", "folder", "moment"), KILLS if LONG else KILLS[:1])
def test_the_same_bytes_come_out(world: World, tmp_path: Path, victim: str, folder: str, moment: int) -> None:
    store = copied(world.store, tmp_path / "store")
    mark = {"RIPTIDE_TEST_MARK": uuid.uuid4().hex}
    ray = ["--ray"] if victim == "worker" else []
    job = start("mine_negatives", "--store", store, *world.arguments, *ray, environment={**world.environment, **mark})
    made = store / folder.replace("SCORES", world.scores)
    try:
        there = lambda: made.is_dir() and committed(made, "part") >= moment  # noqa: E731
        wait_for(there, f"{moment} parts of {folder}", job.process)
        if victim == "driver":
            kill_driver(job, mark)
        else:
            kill_worker(partial(marked, mark), "ray::riptide score", random.Random(0), job)
        assert not (made / "manifest.json").exists(), "the kill came too late to be in the middle"
        # If a worker is killed between its commit and its result, its item is run again and writes the same bytes.
        kept = stamps(made, parts=victim == "driver")
        assert sum(name.startswith("part-") and name.endswith(".json") for name in kept) >= moment
        if victim == "worker":
            job.end()
    finally:
        job.process.kill()
        job.process.wait()
    if victim == "driver":
        told = run("mine_negatives", "--store", store, *world.arguments, environment=world.environment)
        assert " kept) in " in told
    assert contents(store) == world.after
    again = stamps(made, parts=victim == "driver")
    assert {name: again[name] for name in kept} == kept, "what had been committed was committed again"
    assert [finding.problem for finding in verify(Store(str(store))) if finding.problem] == []
