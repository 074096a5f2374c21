"""Makes the items of a job wait until so many nodes have begun one, and logs which node has begun which item.

`WaitingWork` copies this file into a folder as `sitecustomize.py`. With the folder on its PYTHONPATH, Python runs the
file before anything else. Each module of PATCHES is patched when it is imported, so the code of the project needs no
hook. Waiting workers keep what they have reserved, so a toy corpus and a machine of two cores have work for many nodes.
The first item of a task does not wait: it may be the only one.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE_S = 90.0  # seconds that an item waits before its job fails


@dataclass(frozen=True)
class WaitingWork:
    """The folder for the PYTHONPATH of nodes."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        shutil.copy(__file__, self.folder / "sitecustomize.py")

    def wait_for_nodes(self, count: int) -> None:
        """Makes the items of each job wait until `count` nodes have begun one."""
        (self.folder / "count").write_text(str(count))

    def items(self, first: int = 0) -> dict[int, Counter[str]]:
        """Returns how often each node with a number above `first` has begun each item."""
        items: dict[int, Counter[str]] = {}
        for log in self.folder.glob("log-*"):
            if (node := int(log.name.split("-")[2])) > first:
                items.setdefault(node, Counter()).update(log.read_text().splitlines())
        return items


def waiting(work: Callable[..., Any], item_of: Callable[..., tuple[str, int]]) -> Callable[..., Any]:
    """Returns a function that logs its item (task, number), waits for nodes, and does the work."""

    @functools.wraps(work)
    def call(*arguments: Any) -> Any:
        import ray

        task, number = item_of(*arguments)
        folder, job = Path(__file__).parent, ray.get_runtime_context().get_job_id()
        with open(folder / f"log-{job}-{os.environ['FAKE_CLOUD_NODE']}", "a", encoding="utf-8") as log:
            log.write(f"{task}-{number}\n")
        until = time.monotonic() + PATIENCE_S
        while number and len(list(folder.glob(f"log-{job}-*"))) < int((folder / "count").read_text()):
            if time.monotonic() > until:
                raise TimeoutError("too few nodes have begun an item")
            time.sleep(0.1)
        return work(*arguments)

    return call


def patch_tasks(module: Any) -> None:
    """Ray tasks."""
    module._call_worker = waiting(
        module._call_worker, lambda item, key, handles, place, marker, board, number: (key, number)
    )


def patch_actors(module: Any) -> None:
    """The pool of actors."""
    module.PoolWorker.__call__ = waiting(module.PoolWorker.__call__, lambda worker, row: ("pool", row["item"]))


def patch_training(module: Any) -> None:
    """Workers of a training."""
    module.run_ray_worker = waiting(module.run_ray_worker, lambda task, monitor, marker: ("training", 0))


def patch_exact_search(module: Any) -> None:
    """Exact search cuts a small corpus into several items."""
    module.STRETCH_ROWS = 200


def patch_bm25(module: Any) -> None:
    """BM25 cuts a few queries into several items."""
    module.BLOCK_QUERIES = 64


PATCHES = {
    "riptide.indexing.work.ray_tasks": patch_tasks,
    "riptide.indexing.work.ray_actors": patch_actors,
    "riptide.indexing.training.cluster": patch_training,
    "riptide.indexing.dense.dense_search": patch_exact_search,
    "riptide.indexing.lucene.segment_search": patch_bm25,
}


class Patcher(importlib.abc.MetaPathFinder):
    """Finds the modules of PATCHES, and patches each after its execution."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of a module to patch, None for any other one."""
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in PATCHES else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: Any) -> None:
                execute(module)
                PATCHES[name](module)

            spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Patcher())
