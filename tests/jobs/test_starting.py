"""Signals while a job starts: one line and the status of the signal, at every moment from the job's first import."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from riptide import jobs
from riptide.indexing.store.store import Store
from riptide.jobs.common import starting

JOBS = Path(jobs.__file__).parent
# Python runs it before a job's first line: the job tells when it imports the module MARKED, and waits there.
SITE = """
import os, sys, time

class Marker:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["MARKED"]:
            print("importing", flush=True)
            while True:  # another thread may receive a signal, and does not end a long sleep of this one
                time.sleep(0.01)

sys.meta_path.insert(0, Marker())
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(module, job, *arguments) starts a job and returns its process once it imports the module."""
    processes = []
    (tmp_path / "sitecustomize.py").write_text(SITE)

    def begin(module: str, job: str, *arguments: object, ignored: bool = False) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(tmp_path), str(JOBS.parent), os.environ.get("PYTHONPATH", "")])
        before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
        try:
            process = subprocess.Popen(
                [sys.executable, str(JOBS / f"{job}.py"), *map(str, arguments)],
                env={**os.environ, "PYTHONPATH": path, "MARKED": module},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        finally:
            signal.signal(signal.SIGINT, before)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("module", "job", "number"),
    [
        ("dataclasses", "search", signal.SIGINT),  # among the first imports of the job
        ("dataclasses", "serve_search", signal.SIGTERM),
        ("yaml", "train_retriever", signal.SIGINT),
        ("pyarrow", "store", signal.SIGTERM),
        ("yaml", "search", signal.SIGINT),  # the options are read
        ("yaml", "search", signal.SIGTERM),
    ],
)
def test_a_signal_while_a_job_starts_is_one_line(
    start: Start, documented: Callable[..., None], tmp_path: Path, module: str, job: str, number: signal.Signals
) -> None:
    (tmp_path / "r.yaml").write_text(f"store: {tmp_path}/none\n")
    process = start(module, job, "--config", tmp_path / "r.yaml")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    word = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[number]
    told = f"error: {word} while it started; nothing was written\n"
    assert (process.returncode, out, err) == (128 + number, "", told)
    assert {path.name for path in tmp_path.iterdir()} <= {"r.yaml", "sitecustomize.py", "__pycache__"}
    documented("Stores", f"a job that {number.name} ends while it starts", err.rstrip("\n"), 128 + number)


def test_two_signals_at_once_are_one_line(start: Start) -> None:
    process = start("pyarrow", "search")
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode in (130, 143)
    assert err.count("\n") == 1
    assert err.startswith("error: ")


def test_a_job_whose_standard_streams_are_closed_runs(tmp_path: Path) -> None:
    """No file that it opens takes their numbers, in which a library could print."""
    with Store(str(tmp_path)).create("queries", "q"):
        pass
    job = [sys.executable, str(JOBS / "store.py"), "list", "--store", str(tmp_path)]
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    assert subprocess.run([*shell, *job], check=False, timeout=60).returncode == 0


def test_a_full_standard_output_is_not_taken_for_a_full_store(tmp_path: Path) -> None:
    with Store(str(tmp_path)).create("queries", "q"):
        pass
    remedy = "free some space and run the same command again; what is committed is kept"
    check_full_stdout([str(JOBS / "store.py"), "list", "--store", str(tmp_path)], remedy)


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_a_full_standard_output_is_one_line_without_a_job(argument: str) -> None:
    check_full_stdout(["-m", "riptide", argument], "check where the output goes")


def check_full_stdout(command: list[str], remedy: str) -> None:
    """Runs Python with a full stdout, which is expected to end with one line."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=JOBS.resolve().parent,
            check=False,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == f"error: standard output: No space left on device: {remedy}\n"


def test_a_job_in_the_background_ignores_ctrl_c(start: Start) -> None:
    """A shell starts a background process with SIGINT ignored."""
    process = start("pyarrow", "search", ignored=True)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (143, "error: terminated while it started; nothing was written\n")


LACKING = """
import sys

class Lack:
    def find_spec(self, name, path=None, target=None):
        if name == "pyarrow":
            raise ImportError("libarrow.so: failed to map segment from shared object")

sys.meta_path.insert(0, Lack())
"""


def test_too_little_memory_for_an_import_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LACKING)
    done = subprocess.run(
        [sys.executable, str(JOBS / "import_corpus.py"), "--store", "s", "--source", "a.csv"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)),
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: out of memory (libarrow.so: failed to map segment from shared object): this ")
    assert "process may use 1.1 TB of address space (ulimit -v); raise the limit" in done.stderr


def test_too_little_memory_in_a_job_is_one_line(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Store, "require_not_empty", fail)
    line = refused("build_bm25", "--store", tmp_path)
    assert line.startswith("error: out of memory: this machine or its container has no more; use a larger one, or ")


def test_a_program_that_imports_jobs_keeps_its_handlers() -> None:
    assert not starting.runs_one_job()
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    starting.handle_signals()
    starting.finish()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
