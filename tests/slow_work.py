"""Makes each item of work last some seconds, and logs which node has worked on it.

`install_slow_work` copies this file into a folder as `sitecustomize.py`. With the folder on its PYTHONPATH, Python runs
the file before anything else. Each module of PATCHES is patched when it is imported, so the code of the project needs
no hook. Sleeping workers keep what they have reserved, so that a machine of two cores can stand for many nodes.
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
from pathlib import Path
from typing import Any

SLEEP_S = 2.0


def sleeping(work: Callable[..., Any], item_of: Callable[..., object]) -> Callable[..., Any]:
    """Returns a function that logs its item, sleeps, and then does the work."""

    @functools.wraps(work)
    def call(*arguments: Any) -> Any:
        with open(Path(__file__).parent / f"node-{os.environ['FAKE_CLOUD_NODE']}", "a") as log:
            log.write(f"{item_of(*arguments)}\n")
        time.sleep(SLEEP_S)
        return work(*arguments)

    return call


def patch_tasks(module: Any) -> None:
    """Ray tasks."""
    module._call = sleeping(module._call, lambda item, key, handles, place, board, number: f"{key}-{number}")


def patch_actors(module: Any) -> None:
    """The pool of actors."""
    module.PoolWorker.__call__ = sleeping(module.PoolWorker.__call__, lambda worker, row: f"pool-{row['item']}")


def patch_training(module: Any) -> None:
    """Workers of a training."""
    module.work = sleeping(module.work, lambda task, monitor: "training")


def patch_exact_search(module: Any) -> None:
    """Exact search cuts a small corpus into several tasks."""
    module.STRETCH_ROWS = 200


def patch_bm25(module: Any) -> None:
    """BM25 cuts a few queries into several tasks."""
    module.BLOCK_QUERIES = 64


PATCHES = {
    "indexing.work.ray_tasks": patch_tasks,
    "indexing.work.ray_actors": patch_actors,
    "indexing.training.cluster": patch_training,
    "indexing.searching": patch_exact_search,
    "indexing.bm25": patch_bm25,
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


def install_slow_work(folder: Path) -> Path:
    """Makes a folder that slows work down, for the PYTHONPATH of nodes; returns it."""
    folder.mkdir()
    shutil.copy(__file__, folder / "sitecustomize.py")
    return folder


def items_by_node(folder: Path) -> dict[int, Counter[str]]:
    """Returns how often each node, by its number, has begun each item."""
    logs = {int(path.name.removeprefix("node-")): path.read_text() for path in folder.glob("node-*")}
    return {node: Counter(log.splitlines()) for node, log in logs.items()}


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Patcher())
