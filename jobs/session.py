"""Ray for a job: the cluster that is there, or one on this machine; quiet; every node able to see the store."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from indexing.storage import LocalStorage
from indexing.store import Store
from retriever.errors import InputError

# What a driver hands on to its workers. No credentials: Ray shows and logs what it is given here, so each node has
# its own (a role, a file, or variables that it was started with).
FORWARDED = ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION", "HF_", "RIPTIDE_")
PACKAGES = ("retriever", "indexing", "serve", "jobs")
# Ray's core prints this for every pool of actors that may restart. Ray Data keeps the object it is about.
NOISE = "has constructor arguments in the object store and max_restarts > 0"

# What Ray prints, at length, on the stdout of a job that loses a worker or a node and goes on.
LOSSES = "Raylet is terminated|has been marked dead|was killed|retries remaining"


def connect(store: Store) -> None:
    """Join the cluster of RAY_ADDRESS (or one that runs here), else start one that ends with this process.

    Raises InputError where the store is a folder that not every node of the cluster sees.
    """
    import logging

    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", LOSSES)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    metrics = os.environ.setdefault("RAY_enable_metrics_collection", "0")  # of a private Ray, which nobody watches
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anyone; spares Ray Data an actor for it
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of several failed tasks one is told, in one line
    import ray

    if ray.is_initialized():
        return
    hush()
    submitted = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    variables = {key: value for key, value in os.environ.items() if key.startswith(FORWARDED) and "TOKEN" not in key}
    if submitted:  # what --runtime-env-json set has reached the workers already, and Ray refuses to be told twice
        given = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"]).get("runtime_env", {}).get("env_vars", {})
        variables = {key: value for key, value in variables.items() if key not in given}
    runtime: dict[str, object] = {"env_vars": variables}
    if os.environ.get("RAY_ADDRESS") and not submitted:
        root = Path(__file__).resolve().parents[1]
        runtime["py_modules"] = [str(root / package) for package in PACKAGES]
    try:
        with quick_start() if metrics == "0" else contextlib.nullcontext():
            ray.init(log_to_driver=False, logging_level=logging.ERROR, runtime_env=runtime, include_dashboard=False)
    except ConnectionError as error:
        raise InputError(
            f"Ray: {' '.join(str(error).split())[:300]} (RAY_ADDRESS={os.environ.get('RAY_ADDRESS')})"
        ) from error
    for name in ("ray.data", "ray.data._internal"):
        logging.getLogger(name).setLevel(logging.ERROR)
    check_visible(store)


@contextlib.contextmanager
def quick_start() -> Iterator[None]:
    """What a private Ray starts has no dashboard to answer to: let it take itself for a Ray without the dashboard's
    packages, which it finds out by this import. So its agent opens no servers (a second Ray on a machine tries for
    seconds to have the first one's port), and nobody waits for them. Known of the Ray that pyproject.toml bounds."""
    name = "ray.dashboard.optional_deps"
    there = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.modules.pop(name, None)
        if there is not None:
            sys.modules[name] = there


def hush() -> None:
    """Take the line NOISE, for which Ray has no switch, out of this process's stderr; all else passes as it came."""
    stderr = sys.stderr
    own = stderr is sys.__stderr__ and shutil.which("grep") is not None
    if not own or not isinstance(stderr, io.TextIOWrapper):
        return
    # A process of its own, so that the last words of one that dies still pass. Python's own lines go around it.
    person = os.dup(2)
    command = ["grep", "--line-buffered", "--text", "--invert-match", "--fixed-strings", NOISE]
    passing = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=person, start_new_session=True)
    assert passing.stdin is not None
    os.dup2(passing.stdin.fileno(), 2)
    passing.stdin.close()
    sys.stderr = os.fdopen(person, "w", buffering=1, encoding=stderr.encoding, errors=stderr.errors)


def check_visible(store: Store) -> None:
    """Raises InputError unless every node sees a probe file in a local store's folder."""
    import ray
    from ray.exceptions import NodeDiedError, TaskUnschedulableError, WorkerCrashedError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    if not isinstance(store.storage, LocalStorage) or len(nodes) < 2:
        return
    key = f".probe-{uuid.uuid4().hex}"
    store.storage.put_new(key, b"riptide")
    try:
        probe = ray.remote(num_cpus=0)(sees)
        for node in nodes:
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            try:
                visible = ray.get(probe.options(scheduling_strategy=where).remote(str(store.storage.path(key))))
            except (TaskUnschedulableError, NodeDiedError, WorkerCrashedError):  # it has left
                continue
            if not visible:
                raise InputError(
                    f"{store.url}: node {node['NodeManagerAddress']} does not see this folder; use one that all nodes "
                    "share, or s3://bucket/prefix"
                )
    finally:
        store.storage.delete(key)


def sees(path: str) -> bool:
    """Whether this machine sees a file."""
    return Path(path).is_file()
