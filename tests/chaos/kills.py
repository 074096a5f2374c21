"""Kills a job, one of its workers or a node by SIGKILL, and compares what a store holds before and after."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
from local_cluster import Job, LocalCluster, Node, still_there, title_of, wait_for


def kill_driver(job: Job, mark: Mapping[str, str]) -> None:
    """Kills the job's process; raises AssertionError unless all processes with `mark` end too.

    Args:
        job: The job.
        mark: Environment variables of the job, see `marked`.
    """
    job.process.send_signal(signal.SIGKILL)
    job.process.wait()
    wait_for(lambda: not marked(mark), f"the end of {[title_of(p)[:80] for p in marked(mark)]}")


def kill_worker(find: Callable[[], list[psutil.Process]], title: str, draw: random.Random, job: Job) -> None:
    """Kills a worker at a certain work, or none if the job ends before one is found.

    The worker is suspended first, so it is killed in the middle of the work.

    Args:
        find: Returns the processes among which the worker is.
        title: Part of the process title of a worker at that work.
        draw: Draws one of several such workers.
        job: The job.
    """
    killed: list[psutil.Process] = []

    def kill_one() -> bool:
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

    wait_for(lambda: kill_one() or job.process.poll() == 0, f"a worker at {title}", job.process)
    wait_for(lambda: not still_there(killed), "the worker's end")


def kill_node(cluster: LocalCluster, title: str, draw: random.Random, job: Job) -> None:
    """Kills all processes of a node with a worker at a certain work, or of none if the job ends before one is found.

    Args:
        cluster: The cluster; its head is not killed.
        title: Part of the process title of a worker at that work.
        draw: Draws one of several such nodes.
        job: The job.
    """
    nodes: list[Node] = []

    def is_found() -> bool:
        nodes[:] = [node for node in cluster.workers if node.workers(title)]
        return bool(nodes)

    wait_for(lambda: is_found() or job.process.poll() == 0, f"a node at {title}", job.process)
    if nodes:
        cluster.count_lost(draw.choice(nodes))


def marked(mark: Mapping[str, str]) -> list[psutil.Process]:
    """Returns the processes whose environment has the variables of `mark`: a job and all that it started."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if mark.items() <= process.environ().items():
                processes.append(process)
    return still_there(processes)


def committed(folder: Path, part: str) -> int:
    """Returns the number of parts that have a record; `part` is the start of their names."""
    return sum(name.startswith(f"{part}-") and name.endswith(".json") for name in os.listdir(folder))


def stamps(folder: Path, *, parts: bool) -> dict[str, tuple[int, int]]:
    """Returns inode and modification time (ns) of every part's record by name; with `parts`, of its file too."""
    times = {}
    for record in folder.glob("*-?????.json"):
        for path in (record, *(folder.glob(f"{record.stem}-*") if parts else ())):
            status = path.stat()
            times[path.name] = status.st_ino, status.st_mtime_ns
    return times


def contents(store: Path) -> dict[str, str]:
    """Returns the sha256 of every file of a store by path, without provenance and temporary files."""
    return {
        path.relative_to(store).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in store.rglob("*")
        if path.is_file() and path.name != "provenance.json" and ".tmp" not in path.parts
    }


def copied(store: Path, to: Path) -> Path:
    """Copies a store with the times of its files; returns the copy."""
    return Path(shutil.copytree(store, to, copy_function=shutil.copy2))
