"""Decides where a job runs: in this process, or on a Ray cluster that it joins or starts."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from riptide.base.errors import InputError
from riptide.indexing.store.store import Store
from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.nodes import Reports
from riptide.indexing.work.ray_tasks import RayTasks
from riptide.indexing.work.visibility import StoreMarker, mark_store
from riptide.indexing.work.worker_tasks import Runner
from riptide.jobs.common.job_metrics import StageMetrics, name_store
from riptide.jobs.common.job_options import Workers
from riptide.jobs.common.printing import say_event, say_on_stderr
from riptide.jobs.common.starting import PACKAGE
from riptide.process.extras import require
from riptide.telemetry.submission import SUBMISSION_VARIABLE, submission_id

# Environment variables that a driver passes to its workers. Credentials are excluded, as Ray shows and logs these
# variables: each node has its own credentials (a role, a file, or variables that it was started with).
FORWARDED = (
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_RETRY_MODE",
    "AWS_MAX_ATTEMPTS",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ENDPOINT",
    "GOOGLE_BASE_URL",
    "HF_",
    "OMP_WAIT_POLICY",
    "OTEL_",
    "RIPTIDE_",
)

NOT_FORWARDED = re.compile("TOKEN|HEADERS")  # headers of OTLP requests may hold a key

PROBE_S = 1.0  # timeout of the connection test for a Ray on this machine, in seconds

# Lines that Ray prints on the stdout of a job that loses a worker or a node and continues, or that waits for nodes.
NOTES = "Raylet is terminated|has been marked dead|was killed|retries remaining|infeasible resource requests"


def join_cluster(store: Store, *, private: bool = False) -> bool:
    """Connects to a cluster if there is one, and names it in one line on stderr.

    Args:
        store: The store of the job.
        private: Start a Ray on this machine if there is no cluster.

    Returns:
        True if the job runs on Ray, False if it runs in this process.

    Raises:
        InputError: If the cluster cannot be reached, or if the store is a folder that some node does not see.
    """
    cluster = find_cluster(private=private)
    if cluster is None:
        return False
    name_store(store.url, connect(store))
    say_on_stderr(f"runs on {cluster}")
    return True


def open_runner(store: Store, options: Workers) -> Runner:
    """Returns the runner of a job: on a cluster if there is one (see `join_cluster`), otherwise in this process.

    Args:
        store: The store of the job.
        options: The options of the job.

    Raises:
        InputError: As `join_cluster` does, or for impossible workers.
    """
    request = options.worker_request()
    if join_cluster(store, private=options.ray):
        return RayTasks(request, cluster_reports(), store)
    return LocalRunner(gpus=num_gpus(), request=request)


def cluster_reports() -> Reports:
    """Returns the receivers of the reports of a run on a cluster: lines for the user, and a metric."""
    return Reports(say_event, functools.partial(StageMetrics("", "").set, "waiting_workers"))


def find_cluster(*, private: bool = False) -> str | None:
    """Returns a description of the Ray cluster on which a job runs; None if it runs in this process.

    A cluster is, in this order: the one that this process is connected to; that of a submitted job; RAY_ADDRESS; a Ray
    that `ray start` started on this machine and that accepts connections; a private Ray, which is started if `private`
    is set or if the machine has several GPUs.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return "the Ray of this process"
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        return "the Ray cluster to which it was submitted"
    if address := os.environ.get("RAY_ADDRESS"):
        return (
            f"a private Ray on this machine (RAY_ADDRESS={address})"
            if address == "local"
            else f"the Ray cluster at {address} (RAY_ADDRESS)"
        )
    if address := _running_ray():
        return f"the Ray cluster of this machine, at {address}"
    if private:
        return "a private Ray on this machine (requested)"
    if (gpus := num_gpus()) > 1:
        return f"a private Ray on this machine ({gpus} GPUs)"
    return None


def _running_ray() -> str | None:
    """Returns the address of a Ray that `ray start` started on this machine; None if no connection to it succeeds."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    try:
        address = (Path(folder) / "ray" / "ray_current_cluster").read_text(encoding="utf-8").strip()
        host, _, port = address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S):
            return address
    except (OSError, ValueError):
        return None


def num_gpus() -> int:
    """Returns the number of NVIDIA GPUs that this process may use, without loading CUDA."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        return len([device for device in devices.split(",") if device.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])


def connect(store: Store) -> str:
    """Connects to the cluster of RAY_ADDRESS or of this machine, or starts a Ray that ends with this process.

    Args:
        store: The store of the job.

    Returns:
        `HOST:PORT` of Ray's dashboard; "" without one, or if this process was connected before.

    Raises:
        InputError: If there is no such cluster, if a Ray does not start in time, or if the store is a folder that some
            node does not see.
    """
    import logging

    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", NOTES)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    submitted = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    is_private = not submitted and os.environ.get("RAY_ADDRESS", "local") == "local" and _running_ray() is None
    if is_private:
        os.environ.setdefault("RAY_enable_metrics_collection", "0")  # nothing reads the metrics of a private Ray
    # Disables usage reports, for which Ray Data would start an actor.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # the job itself reports a failed task, in one line
    require("Ray", "ray")
    import ray

    for name in ("ray.data", "ray.data._internal"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if ray.is_initialized():
        return ""
    earlier_children = _ray_children()
    try:
        with keep_sigterm_handler(), on_loopback() if is_private else contextlib.nullcontext():
            context = ray.init(
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env=worker_environment(),
                include_dashboard=False,
            )
    except ConnectionError as error:
        raise InputError(
            f"Ray: {' '.join(str(error).split())[:300]} (RAY_ADDRESS={os.environ.get('RAY_ADDRESS')})"
        ) from error
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        for pid in _ray_children() - earlier_children:  # the GCS and the raylet of this attempt
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise InputError(
            "Ray: found no node 30 s after the start, expected one: run the command again when the machine is less busy"
        ) from error
    check_visible(store)
    return context.dashboard_url or ""


def _ray_children() -> set[int]:
    """Returns the ids of the processes of Ray that this process has started; empty without /proc."""
    children = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            children |= {int(pid) for pid in file.read_text().split()}
    ray_processes = set()
    for pid in children:
        with contextlib.suppress(OSError):  # the process has ended
            if b"/ray/" in Path(f"/proc/{pid}/cmdline").read_bytes():
                ray_processes.add(pid)
    return ray_processes


def worker_environment() -> dict[str, object]:
    """Returns Ray's runtime environment of the workers of this driver.

    Excludes what the submission sets, as Ray rejects duplicates.
    """
    environment: dict[str, object] = {"env_vars": worker_variables()}
    if os.environ.get("RAY_ADDRESS") and "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        environment["py_modules"] = [PACKAGE]  # Ray follows the symbolic links in the package
    if "config" not in _submitted_environment():
        # By default Ray also prepares a new node for earlier jobs. Each of those that have the same working directory
        # removes it and unpacks it again, while workers import from it. A submission with a `config` keeps the default.
        environment["config"] = {"eager_install": False}
    return environment


def _submitted_environment() -> dict[str, Any]:
    """Returns the runtime environment of the submission of this job; empty if it was not submitted."""
    return json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("runtime_env") or {}


def worker_variables() -> dict[str, str]:
    """Returns the environment variables that this driver passes to its workers."""
    variables = {
        key: value for key, value in os.environ.items() if key.startswith(FORWARDED) and not NOT_FORWARDED.search(key)
    }
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        variables[SUBMISSION_VARIABLE] = submission_id()
        env_vars = _submitted_environment().get("env_vars", {})
        variables = {key: value for key, value in variables.items() if key not in env_vars}
    return variables


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Context in which a Ray that starts listens on 127.0.0.1 only, as Ray does on macOS; otherwise on all interfaces.

    Ray replaces the address 127.0.0.1 of a node by that of an interface, unless clusters are disabled. The setting ends
    with the context, as this process may connect to a cluster later.
    """
    from ray._private import ray_constants

    variable, setting = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    value = os.environ.get(variable)
    os.environ[variable], ray_constants.ENABLE_RAY_CLUSTER = "0", False  # for the processes of Ray, and for this one
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = setting
        del os.environ[variable]
        if value is not None:
            os.environ[variable] = value


@contextlib.contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Context that restores the job's SIGTERM handler, which Ray replaces: Ray's exits with 15 and prints nothing."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def check_visible(store: Store) -> None:
    """Raises InputError unless every live node can read the store; workers on later nodes check it as they start."""
    import ray
    from ray.exceptions import NodeDiedError, TaskUnschedulableError, WorkerCrashedError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) < 2:
        return
    with mark_store(store) as marker:
        if marker is None:
            return
        probe = ray.remote(num_cpus=0)(StoreMarker.is_visible)
        for node in nodes:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            try:
                probe_node = probe.options(name="check store", scheduling_strategy=strategy)
                visible = ray.get(probe_node.remote(marker))
            except (TaskUnschedulableError, NodeDiedError, WorkerCrashedError):  # the node has left
                continue
            if not visible:
                raise InputError(marker.describe_blind(f"node {node['NodeManagerAddress']}"))
