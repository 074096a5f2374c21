"""--log-format json: every line on stderr is an object that names the job, the artifact, the part and the node."""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.util.state
from samples import make_passages, write_beir

from riptide.indexing.store.store import Store
from riptide.jobs.common import job_metrics
from riptide.telemetry.logs import FORMAT_VARIABLE, format_line, is_json

KEYS = ["time", "level", "job", "submission", "artifact", "part", "node", "message"]
CallJob = Callable[..., int]


def read_lines(err: str) -> list[dict[str, Any]]:
    """Parses the lines of stderr, each of which must be an object with all keys."""
    lines = [json.loads(line) for line in err.splitlines()]
    assert all(list(line) == KEYS for line in lines)
    return lines


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_beir(tmp_path / "raw", make_passages(60))


def test_a_job_logs_its_parts_its_stage_and_the_shares_of_its_time(
    tmp_path: Path,
    source: Path,
    call_job: CallJob,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_metrics, "SHOWN_FROM_S", 0)
    store = tmp_path / "store"
    command = ("import_corpus", "--store", store, "--source", source, "--part-size", 20)
    assert call_job(*command, "--log-format", "json") == 0
    out, err = capsys.readouterr()
    lines = read_lines(err)
    artifact = Store(str(store)).open("corpus", "g0000")
    committed = {line["part"] for line in lines if line["part"]}
    assert committed == {part.name for part in artifact.parts}
    assert {line["artifact"] for line in lines if line["part"]} == {artifact.key}
    assert {line["node"] for line in lines} == {platform.node()}
    assert lines[-1]["message"].startswith("spent ")
    assert any(line["message"].startswith("import: 60 passages in ") for line in lines)
    assert artifact.url in out  # results stay on stdout
    assert not is_json()
    assert logging.getLogger("riptide").level == logging.NOTSET


def test_the_last_line_has_the_use_of_gpus_and_what_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray counts the retries of tasks from the start of the driver, so each line has those since the one before."""
    losses = {"lost_nodes": 1.0, "lost_workers": 2.0, "restarts": 1.0}
    gpu = {"gpu_bytes": 2e9, "gpu_percent": 150.0, "gpu_samples": 2.0}
    retried = ["first", "second"]
    addresses: list[str] = []
    monkeypatch.setattr(job_metrics, "take_measures", lambda: {"compute": 3.0, "read": 1.0, **gpu, **losses})
    monkeypatch.setattr(ray.util.state, "list_tasks", lambda address, **_: addresses.append(address) or retried)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01000000"))
    monkeypatch.setattr(job_metrics._spent, "counted_retries", 0)
    monkeypatch.setattr(job_metrics, "_dashboard", ContextVar("dashboard", default="10.0.0.1:8265"))
    job_metrics.take_summary("")
    job_metrics.StageMetrics("encode", "").add_measures()
    monkeypatch.setattr(job_metrics, "_is_on_ray", lambda: True)
    assert job_metrics.take_summary("s3://bucket/s") == (
        "spent 4.0 s in all processes: compute 75%, S3 reads 25%; GPUs 75% busy, tensors of at most 2.0 GB; "
        "losses: 1 node, 2 worker processes, 1 restart of the training, 2 retried tasks"
    )
    assert job_metrics.take_summary("") == ""
    retried.append("third")
    assert job_metrics.take_summary("") == "losses: 1 retried task"
    assert set(addresses) == {"http://10.0.0.1:8265"}


def test_an_error_is_one_line_with_its_level(
    tmp_path: Path, call_job: CallJob, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("import_corpus", "--store", tmp_path / "store", "--source", tmp_path / "none", "--log-format", "json")
    assert call_job(*command) == 1
    [line] = read_lines(capsys.readouterr().err)
    assert line["level"] == "error"
    assert line["message"].startswith(f"{tmp_path / 'none'}: found nothing")


def test_a_failure_without_an_explanation_has_its_trace(
    tmp_path: Path, call_job: CallJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Store, "require_not_empty", fail)
    assert call_job("build_bm25", "--store", tmp_path / "store", "--log-format", "json") == 1
    [text] = capsys.readouterr().err.splitlines()
    line = json.loads(text)
    assert (line["level"], line["message"]) == ("critical", "RuntimeError: a defect")
    assert "in fail" in line["trace"]


def test_worker_processes_inherit_the_format_from_the_environment() -> None:
    program = (
        "import logging; from riptide.telemetry.logs import start_json; start_json(); "
        "logging.getLogger('riptide.x').info('done', extra={'part': 'part-00001'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={FORMAT_VARIABLE: "json", "RIPTIDE_LOG_JOB": "encode_corpus"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    [line] = read_lines(done.stderr)
    assert (line["job"], line["part"], line["message"]) == ("encode_corpus", "part-00001", "done")


def test_log_records_and_warnings_of_libraries_are_one_printable_line_each() -> None:
    program = (
        "import logging, warnings; from riptide.telemetry.logs import log_lines\n"
        "with log_lines('text', 'x'):\n"
        "    logging.getLogger('y').warning('a\\n  b\\x1b[31m')\n"
        "    warnings.warn('c\\n d\\x1b', FutureWarning)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert done.stderr == "a b\\x1b[31m\nwarning: c d\\x1b\n"


def test_errors_in_options_have_the_format_of_the_environment_and_help_stays_text(
    call_job: CallJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    assert call_job("import_corpus", "--wrong") == 2
    [line] = read_lines(capsys.readouterr().err)
    assert (line["level"], line["message"]) == ("error", "--wrong: unknown option; --help lists the options")
    assert call_job("import_corpus", "--help") == 0
    out, err = capsys.readouterr()
    assert (out[:6], err) == ("usage:", "")


def test_an_unknown_format_in_the_environment_is_refused(
    call_job: CallJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORMAT_VARIABLE, "JSON")
    assert call_job("import_corpus", "--help") == 1
    assert capsys.readouterr().err == "error: RIPTIDE_LOG_FORMAT: expected text or json, got 'JSON'\n"


def test_a_signal_handler_writes_the_same_keys() -> None:
    [line] = read_lines(format_line("stopping: a checkpoint is saved"))
    assert (line["level"], line["message"]) == ("info", "stopping: a checkpoint is saved")
