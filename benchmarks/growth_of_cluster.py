"""Measures how fast a cluster without a node grows: parts that sleep, while nodes boot and on existing nodes.

    python benchmarks/growth_of_cluster.py --parts 96 --seconds 2 --workers 4 --boot 20

The cluster is a head without CPUs with Ray's autoscaler (version 2) on this machine (`tests/fake_cloud.py`), with one
node for each worker. The same parts run twice in one process: on a cluster without a node, and then on the same
nodes. Both runners are measured: Ray tasks, and a pool of actors, whose workers take two parts at a time and thus
get twice as many. Ideal is parts x seconds / workers, without any start.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fake_cloud import NodeType, growing_cluster
from local_cluster import clean_environment

from benchmarks.common.files import write_json
from benchmarks.common.program import ROOT, Parser
from riptide.indexing.work.ray_actors import RayActors
from riptide.indexing.work.ray_tasks import RayTasks
from riptide.indexing.work.worker_tasks import Allocation, Report, WorkerRequest, WorkerResources

CORES = 2  # of a node and of a worker
CALLS = {"tasks": 1, "actors": 2}  # parts that a worker takes at a time, by the kind of runner


@dataclass(frozen=True)
class Slept:
    """The result of a part."""

    seconds: float


@dataclass(frozen=True)
class Sleep:
    """A task whose parts sleep."""

    seconds: float
    resources: WorkerResources

    def open(self, allocation: Allocation) -> Callable[[int, Report], Slept]:
        """Returns the worker."""

        def sleep(part: int, report: Report) -> Slept:
            time.sleep(self.seconds)
            return Slept(self.seconds)

        return sleep


def run_parts(kind: str, parts: int, seconds: float, workers: int) -> list[float]:
    """Runs the parts twice on the cluster of RAY_ADDRESS; returns the seconds of both runs."""
    import ray

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    calls = CALLS[kind]
    task = Sleep(seconds, WorkerResources(cores=CORES, calls=calls))
    request = WorkerRequest(max_workers=workers, cpus=CORES, gpus=0)
    runner = RayTasks(request) if kind == "tasks" else RayActors(request)
    took = []
    for _ in range(2):
        started = time.perf_counter()
        done = sum(1 for _ in runner.run(task, range(parts * calls)))
        took.append(time.perf_counter() - started)
        assert done == parts * calls
    return took


def main() -> None:
    """Reads the options, measures both runners, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--parts", 96, "parts of the work")
    parser.add("--seconds", 2.0, "seconds of a part")
    parser.add("--workers", 4, "workers, each on its own node")
    parser.add("--boot", 20.0, "seconds that a node boots")
    parser.add("--json", "results/growth_of_cluster.json", "output file")
    parser.add("--run", None, argparse.SUPPRESS, choices=CALLS)
    options = parser.parse_args()
    if options.run:  # in a process that joins the cluster
        took = run_parts(options.run, options.parts, options.seconds, options.workers)
        Path(options.json).write_text(json.dumps(took), encoding="utf-8")
        return
    ideal = options.parts * options.seconds / options.workers
    figures: dict[str, object] = {"options": vars(options), "ideal_s": ideal}
    print(f"ideal: {ideal:.1f} s")
    with growing_cluster({"worker": NodeType(CORES, options.workers)}, boot_s=options.boot, modules=ROOT) as cloud:
        for kind in CALLS:
            cloud.wait_until_empty()
            before = len(cloud.launches())
            seconds = cloud.folder / f"{kind}.json"
            command = [sys.executable, __file__, *sys.argv[1:], "--run", kind, "--json", str(seconds)]
            environment = clean_environment(cloud.cluster.environment)
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            grown, existing = json.loads(seconds.read_text())
            figures[kind] = {
                "from_nothing_s": grown,
                "on_existing_nodes_s": existing,
                "share_of_ideal": ideal / existing,
                "beyond_boot_s": grown - existing - options.boot,
                "launches": len(cloud.launches()) - before,
                "boots_one_after_the_other": max(cloud.boots(before)),
            }
            print(
                f"{kind}: on existing nodes {existing:.1f} s, {ideal / existing:.2f} of the ideal; "
                f"from nothing {grown:.1f} s, {grown - existing - options.boot:.1f} s more and a boot"
            )
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
