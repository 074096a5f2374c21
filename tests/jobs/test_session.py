"""Where a job runs: in this process, or on which Ray."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from local_ray import SessionRay

from riptide.base.errors import InputError
from riptide.indexing.store.store import Store
from riptide.jobs.commands.stopping import raise_on_sigterm
from riptide.jobs.common import session
from riptide.telemetry.submission import submission_id


@pytest.fixture(autouse=True)
def _no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(session, "num_gpus", lambda: 0)


def write_address(folder: Path, address: str) -> None:
    """Writes the file in which `ray start` names the cluster of a machine."""
    (folder / "ray").mkdir()
    (folder / "ray" / "ray_current_cluster").write_text(address)


def test_without_a_cluster_a_job_runs_in_this_process() -> None:
    assert session.find_cluster() is None


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_private_ray_starts_if_it_is_requested(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(session, "num_gpus", lambda: gpus)
    assert session.find_cluster() is None
    assert session.find_cluster(private=True) == "a private Ray on this machine (requested)"


def test_several_gpus_need_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "num_gpus", lambda: 2)
    assert session.find_cluster() == "a private Ray on this machine (2 GPUs)"


def test_an_address_names_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert session.find_cluster() == "the Ray cluster at 10.0.0.1:6379 (RAY_ADDRESS)"
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert session.find_cluster() == "the Ray cluster to which it was submitted"


def test_a_ray_of_this_machine_is_joined_while_it_accepts_connections(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        write_address(tmp_path, address)
        assert session.find_cluster() == f"the Ray cluster of this machine, at {address}"
    assert session.find_cluster() is None, "the file of a Ray that has ended does not count"


@pytest.mark.cluster
def test_the_ray_of_another_process_is_not_joined(session_ray: SessionRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `ray start` writes the address file, so tests without a cluster do not find the Ray of the session."""
    monkeypatch.delenv("RAY_TMPDIR")
    host, _, port = session_ray.address().rpartition(":")
    socket.create_connection((host, int(port))).close()
    assert session.find_cluster() is None


def test_a_damaged_address_file_does_not_count(tmp_path: Path) -> None:
    write_address(tmp_path, "no address")
    assert session.find_cluster() is None


def test_gpus_are_counted_by_their_devices_unless_some_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for devices, count in (("", 0), ("-1", 0), ("0", 1), ("0,1,GPU-5", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        assert session.num_gpus() == count


def test_a_ray_that_does_not_start_in_time_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = ["-c", "import time; time.sleep(600)"]
    other = subprocess.Popen([sys.executable, *code, "/ray/of/an/earlier/attempt"])
    started: list[subprocess.Popen] = []
    handler = signal.getsignal(signal.SIGTERM)

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        started.append(subprocess.Popen([sys.executable, *code, "/ray/core/raylet"]))
        while b"raylet" not in Path(f"/proc/{started[0].pid}/cmdline").read_bytes():
            time.sleep(0.01)
        raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    monkeypatch.setattr(session, "require", lambda *_: None)
    monkeypatch.setattr(session, "on_loopback", contextlib.nullcontext)
    signal.signal(signal.SIGTERM, lambda *_: None)
    job_handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(InputError, match="Ray: found no node 30 s after the start"):
            session.connect(Store(str(tmp_path)))
        assert started[0].wait(60) == -signal.SIGKILL
        assert other.poll() is None
        assert signal.getsignal(signal.SIGTERM) is job_handler
    finally:
        signal.signal(signal.SIGTERM, handler)
        for process in (other, *started):
            process.kill()
            process.wait()


def test_ray_does_not_replace_the_jobs_handler_of_sigterm() -> None:
    def handler(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with raise_on_sigterm():  # keeps the handler of a program
            assert signal.getsignal(signal.SIGTERM) is handler
            with session.keep_sigterm_handler():
                signal.signal(signal.SIGTERM, lambda *_: None)  # as ray.init does
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_workers_of_a_submitted_job_know_its_submission_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.runtime_env.runtime_env import _merge_runtime_env

    config: dict[str, Any] = {
        "metadata": {"job_submission_id": "raysubmit_1"},
        "runtime_env": {"env_vars": {"RIPTIDE_LOG_JOB": "x"}},
    }
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(config))
    monkeypatch.setenv("RIPTIDE_LOG_JOB", "encode_corpus")
    monkeypatch.setenv("RIPTIDE_USER_TOKENS", "a-user-token-of-this-test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "key=secret")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "team")
    variables = session.worker_variables()
    assert (variables["RIPTIDE_SUBMISSION"], variables["OTEL_SERVICE_NAME"]) == ("raysubmit_1", "team")
    assert variables.keys().isdisjoint({"RIPTIDE_LOG_JOB", "RIPTIDE_USER_TOKENS", "OTEL_EXPORTER_OTLP_HEADERS"})
    assert session.worker_environment() == {"env_vars": variables, "config": {"eager_install": False}}
    assert _merge_runtime_env(config["runtime_env"], session.worker_environment()) is not None
    config["runtime_env"]["config"] = {"setup_timeout_seconds": 9}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(config))
    assert session.worker_environment() == {"env_vars": variables}
    assert _merge_runtime_env(config["runtime_env"], session.worker_environment()) is not None
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")
    monkeypatch.setenv("RIPTIDE_SUBMISSION", variables["RIPTIDE_SUBMISSION"])
    assert submission_id() == "raysubmit_1"
