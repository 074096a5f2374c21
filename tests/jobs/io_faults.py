"""Runs jobs in processes in which one call to the files of a store or of a node's cache fails.

`io_faults.cpp` is loaded before C's library, so it also meets calls of C++, Rust and Java. A server imports all modules
once and runs the jobs in forks of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCE = Path(__file__).with_suffix(".cpp")
CALLS = ("open", "read", "write", "fsync", "link", "rename", "mkdir", "unlink")
LIMIT_S = 120  # seconds of a run
KILLED = -2  # status of a run whose process has ended


@dataclass(frozen=True)
class Fault:
    """A call that fails: its kind, its number from 0, the error, and whether later calls of this kind fail too."""

    call: str
    number: int
    error: int
    is_lasting: bool = False


@dataclass(frozen=True)
class Ended:
    """The end of a run: its status, what it printed on stderr, its calls by kind, and how many of them failed."""

    status: int
    err: str
    counts: dict[str, int]
    failed: int


class FaultyJobs:
    """A server of runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, store: Path, cache: Path, fault: Fault | None, job: str, *arguments: object) -> Ended:
        """Runs a job on a store, with an empty or used cache; a fault strikes in one of the two folders."""
        order = {
            "store": str(store),
            "cache": str(cache),
            "fault": asdict(fault) if fault else None,
            "job": job,
            "arguments": ["--store", str(store), *map(str, arguments)],
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server of runs has ended"
        return Ended(**json.loads(answer))


@contextlib.contextmanager
def faulty_jobs(folder: Path, jobs: Sequence[str]) -> Iterator[FaultyJobs]:
    """Compiles the library in a folder, and starts a server of runs of these jobs."""
    library = folder / "io_faults.so"
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    # Ray's folder: the jobs run in this process, even if this machine has a Ray.
    environment = {**os.environ, "LD_PRELOAD": str(library), "RAY_TMPDIR": str(folder)}
    command = [sys.executable, __file__, str(library), str(folder / "stderr"), *jobs]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield FaultyJobs(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


# Imported before the first run, so that no fork imports them.
MODULES = (
    "faiss",
    "ir_measures",
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "riptide.retriever.encoding.encoder",
    "transformers.models.bert.modeling_bert",
)
JAVA_JOBS = ("build_bm25", "mine_negatives")  # Java takes a second to start, and does not survive a fork
FORK = multiprocessing.get_context("fork")


def serve(library: str, output: str, *names: str) -> None:
    """Runs the jobs that are named on stdin, one after the other, in forks of this process.

    A fork runs one job. Those that run Java are kept, one for jobs with a fault and one for jobs without: a job that
    completes what a fault has interrupted has seen nothing of it.
    """
    jobs = {name: importlib.import_module(f"riptide.jobs.{name}") for name in names}
    for name in MODULES:
        importlib.import_module(name)
    java_forks: dict[bool, Fork] = {}
    for line in sys.stdin:
        order = json.loads(line)
        has_fault = order["fault"] is not None
        fork = java_forks.pop(has_fault, None) if order["job"] in JAVA_JOBS else None
        fork = fork or Fork(jobs, library, output)
        answer = fork.run(order)
        if answer["status"] != KILLED and order["job"] in JAVA_JOBS:
            java_forks[has_fault] = fork
        else:
            fork.end()
        print(json.dumps(answer), flush=True)
    for fork in java_forks.values():
        fork.end()
    os._exit(0)  # nothing is left to close, and the libraries take seconds


class Fork:
    """A fork of this process that runs jobs one after the other."""

    def __init__(self, *arguments: Any) -> None:
        self._output = Path(arguments[-1])
        self._pipe, pipe = FORK.Pipe()
        self._process = FORK.Process(target=run_orders, args=(pipe, *arguments))
        self._process.start()
        pipe.close()

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of Ended; the status is KILLED if the process has ended."""
        self._output.unlink(missing_ok=True)
        try:
            self._pipe.send(order)
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            printed = read_printed(self._output) if self._output.exists() else ""
            err = f"{printed}ended with {self._process.exitcode}"
            return {"status": KILLED, "err": err, "counts": {}, "failed": 1}

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()


def run_orders(pipe: Connection, jobs: dict[str, ModuleType], library: str, output: str) -> None:
    """Runs jobs in this process."""
    from riptide.jobs.commands.cli import options_class_of, run

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
    shim = ctypes.CDLL(library)
    shim.fault_count.restype = shim.fault_struck.restype = ctypes.c_long
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while True:
        order = pipe.recv()
        signal.alarm(LIMIT_S)
        err = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(err, 2)
        os.close(err)
        os.environ["RIPTIDE_CACHE"] = order["cache"]
        fault = order["fault"] or {"call": "", "number": 0, "error": 0, "is_lasting": False}
        kind = CALLS.index(fault["call"]) if fault["call"] else -1
        folders = (order["store"].encode(), order["cache"].encode())
        status = 0
        shim.fault_arm(*folders, kind, fault["error"], ctypes.c_long(fault["number"]), fault["is_lasting"])
        try:
            main = jobs[order["job"]].main
            run(main, options_class_of(main), order["arguments"])
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            status = -1
            traceback.print_exc()
        signal.alarm(0)  # the process may wait longer than this for its next run
        counts = {name: shim.fault_count(number) for number, name in enumerate(CALLS)}
        failed = shim.fault_struck()
        shim.fault_arm(b"", b"", -1, 0, ctypes.c_long(0), 0)
        sys.stderr.flush()
        pipe.send({"status": status, "err": read_printed(Path(output)), "counts": counts, "failed": failed})


def read_printed(output: Path) -> str:
    """Returns what a job printed on stderr."""
    return output.read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    serve(*sys.argv[1:])
