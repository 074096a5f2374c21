"""A job in which a call to the file system fails says so in a line, or succeeds; the same command then completes it.

A call of each kind of an import and a call of each other job fail, drawn by a seed; in the long form each call of each
job. Each fails with one of the errors, once or from then on.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from io_faults import CALLS, KILLED, LIMIT_S, Ended, Fault, FaultyJobs, Fork, faulty_jobs
from local_cluster import LONG
from samples import files_of, make_passages, make_queries, save_tiny_bert, write_beir

from riptide.indexing.maintenance.verification import verify
from riptide.indexing.store.store import Store

SEED = int(os.environ.get("RIPTIDE_CRASH_SEED", "0"))
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE, errno.EINTR)
JOBS = ("import_corpus", "encode_corpus", "build_index", "build_bm25", "search", "mine_negatives", "evaluate")
COUNTERS = ("fault_count", "fault_struck")  # functions of io_faults.cpp that return numbers
SAMPLE = "sample"  # the kind of calls of the short form


@dataclass(frozen=True)
class Step:
    """A job without a fault: its arguments, the store before it, the bytes after it, and its calls by kind."""

    name: str
    arguments: tuple[str, ...]
    before: Path
    expected: dict[str, bytes]
    counts: dict[str, int]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyJobs]:
    with faulty_jobs(tmp_path_factory.mktemp("faults"), JOBS) as jobs:
        yield jobs


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory, jobs: FaultyJobs) -> dict[str, Step]:
    """The jobs of this form, run without a fault, one after the other on one store."""
    root = tmp_path_factory.mktemp("steps")
    passages = make_passages(12)
    queries, judged = make_queries(passages, 4)
    source = write_beir(root / "source", passages, queries, {"test": judged})
    model = save_tiny_bert(root / "model")
    commands = {
        "import_corpus": ("--source", str(source), "--part-size", "6"),
        "encode_corpus": ("--encoder", model, "--name", "enc", "--dtype", "float32", "--compile", "never"),
        "build_index": ("--embeddings", "enc", "--factory", "Flat", "--shards", "2"),
        "build_bm25": ("--shards", "1"),
        "search": ("--mode", "exact", "--k", "5", "--name", "exact"),
        "mine_negatives": ("--sources", "bm25", "--split", "test", "--depth", "10", "--part-queries", "4"),
        "evaluate": ("--run", "exact"),
    }
    complete = {}
    store = root / "store"
    store.mkdir()
    for name in JOBS:
        before = root / f"before-{name}"
        shutil.copytree(store, before)
        ended = jobs.run(store, root / f"cache-{name}", None, name, *commands[name])
        assert ended.status == 0, ended.err
        complete[name] = Step(name, commands[name], before, content(store), ended.counts)
    return complete


def content(store: Path) -> dict[str, bytes]:
    """Returns the bytes of the manifests and parts of a store.

    Excluded are the number of the attempt, in drafts and records, and the files of Lucene, which writes random
    identifiers and times.
    """
    files = files_of(store)
    is_record = {path: path.endswith(".json") and not path.endswith("/manifest.json") for path in files}
    return {path: data for path, data in files.items() if not is_record[path] and not path.startswith("bm25/")}


def faults_of(step: Step, kind: str) -> list[Fault]:
    """Returns the faults to try: each call of a kind, or a sample of all kinds, each with one of the errors."""
    if kind != SAMPLE:
        calls = [(kind, number) for number in range(step.counts[kind])]
    else:
        draw = random.Random(f"{step.name} {SEED}")
        calls = [(call, draw.randrange(count)) for call, count in step.counts.items() if count]
        calls = calls if step.name == "import_corpus" else [draw.choice(calls)]
    faults = []
    for call, number in calls:
        error = ERRORS[(number * len(CALLS) + CALLS.index(call) + SEED) % len(ERRORS)]
        faults.append(Fault(call, number, error, is_lasting=error != errno.EINTR and number % 2 == 1))
    return faults


def describe_failure(ended: Ended, store: Path) -> str | None:
    """Returns what is wrong with a run that met a fault; None if it ended in one line, or succeeded."""
    lines = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    if ended.status not in (0, 1) or len(lines) != ended.status or "Traceback" in ended.err:
        return f"status {ended.status}: {ended.err}"
    written = Store(str(store))
    problems = [finding.problem for finding in verify(written, keys=written.keys()) if finding.problem]
    return f"visible: {problems}" if problems else None


@pytest.mark.parametrize("kind", CALLS if LONG else [SAMPLE])
@pytest.mark.parametrize("name", JOBS)
def test_a_job_of_which_a_call_fails_is_completed_by_the_same_command(
    name: str, kind: str, steps: dict[str, Step], jobs: FaultyJobs, tmp_path: Path
) -> None:
    step, failures, outcomes = steps[name], [], Counter[str]()
    for case, fault in enumerate(faults_of(step, kind)):
        store, cache = tmp_path / f"store-{case}", tmp_path / f"cache-{case}"  # no path twice: a process is kept
        shutil.copytree(step.before, store)
        ended = jobs.run(store, cache, fault, name, *step.arguments)
        problem = describe_failure(ended, store) if ended.failed else None
        if problem is None and ended.status:
            again = jobs.run(store, cache, None, name, *step.arguments)
            problem = again.err if again.status else describe_failure(again, store)
            problem = f"then: {problem}" if problem else None
        if problem is None and content(store) != step.expected:
            problem = "other bytes"
        outcome = {0: "success", 1: "line"}.get(ended.status, "failed") if ended.failed else "not met"
        outcomes["failed" if problem else outcome] += 1
        if problem:
            failures.append(f"{fault.call} {fault.number} {errno.errorcode[fault.error]}: {problem}")
            print(f"FAULT {name} {fault.is_lasting} {failures[-1]}", flush=True)
        for folder in (store, cache):
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{name} {kind}: {dict(outcomes)}")
    assert failures == []


def test_a_fork_that_is_kept_has_no_alarm_and_one_that_has_ended_says_what_it_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarms: list[int] = []

    def run(main: str, options: object, arguments: list[str]) -> None:
        os.write(2, f"{main} {alarms}\n".encode())
        if main == "end":
            os._exit(3)

    monkeypatch.setattr("io_faults.signal.alarm", alarms.append)
    monkeypatch.setattr("io_faults.ctypes.CDLL", lambda library: MagicMock(**dict.fromkeys(COUNTERS, lambda *_: 0)))
    monkeypatch.setattr("riptide.jobs.commands.cli.run", run)
    monkeypatch.setattr("riptide.jobs.commands.cli.options_class_of", str)
    jobs = {name: SimpleNamespace(main=name) for name in ("stay", "end")}
    fork = Fork(jobs, "library", str(tmp_path / "stderr"))
    order = {"store": "s", "cache": "c", "fault": None, "arguments": []}
    try:
        ended = [fork.run({**order, "job": name}) for name in ("stay", "stay", "end", "stay")]
    finally:
        fork.end()
    assert [(each["status"], each["err"]) for each in ended] == [
        (0, f"stay [{LIMIT_S}]\n"),
        (0, f"stay [{LIMIT_S}, 0, {LIMIT_S}]\n"),
        (KILLED, f"end [{LIMIT_S}, 0, {LIMIT_S}, 0, {LIMIT_S}]\nended with 3"),
        (KILLED, "ended with 3"),
    ]
