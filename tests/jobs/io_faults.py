"""Runs jobs in processes in which one call to the files of a store or of a node's cache fails.

`io_faults.cpp` is loaded before C's library, so it also meets calls of C++, Rust and Java. A server imports all modules
once; each run is a fork of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")
CALLS = ("open", "read", "write", "fsync", "link", "rename", "mkdir", "unlink")
LIMIT_S = 120  # seconds of a run


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
MODULES = ("pandas", "pyarrow.dataset", "pyarrow.parquet")
MORE_MODULES = ("faiss", "ir_measures", "riptide.retriever.encoding.encoder", "transformers.models.bert.modeling_bert")


def serve(library: str, output: str, *names: str) -> None:
    """Runs the jobs that are named on stdin, one after the other, each in a fork of this process."""
    from riptide.jobs.common.cli import options_class_of, run

    shim = ctypes.CDLL(library)
    shim.fault_count.restype = shim.fault_struck.restype = ctypes.c_long
    jobs = {name: importlib.import_module(f"riptide.jobs.{name}") for name in names}
    for name in (*MODULES, *(MORE_MODULES if len(jobs) > 1 else ())):
        importlib.import_module(name)
    answers = os.dup(1)
    for line in sys.stdin:
        order = json.loads(line)
        if (child := os.fork()) == 0:
            signal.alarm(LIMIT_S)
            err = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(err, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
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
            counts = {name: shim.fault_count(number) for number, name in enumerate(CALLS)}
            failed = shim.fault_struck()
            shim.fault_arm(b"", b"", -1, 0, ctypes.c_long(0), 0)
            sys.stderr.flush()
            printed = Path(output).read_text(encoding="utf-8", errors="replace")
            answer = {"status": status, "err": printed, "counts": counts, "failed": failed}
            os.write(answers, (json.dumps(answer) + "\n").encode())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            printed = Path(output).read_text(encoding="utf-8", errors="replace")
            answer = {"status": -2, "err": f"ended by {status}: {printed}", "counts": {}, "failed": 1}
            os.write(answers, (json.dumps(answer) + "\n").encode())
    os._exit(0)  # nothing is left to close, and the libraries take seconds


if __name__ == "__main__":
    serve(*sys.argv[1:])
