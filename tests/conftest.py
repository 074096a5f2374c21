"""Fixtures for all tests: nothing from the network, a cache of its own, a real S3 server on loopback."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_cluster import LONG

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"


_REPORTERS: list[pytest.TerminalReporter] = []


def pytest_sessionstart(session: pytest.Session) -> None:
    if reporter := session.config.pluginmanager.get_plugin("terminalreporter"):
        _REPORTERS.append(reporter)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked `long` is left to the long form, RIPTIDE_CHAOS=long."""
    if not LONG:
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A failure is told when it happens too: what ends the process later may leave no summary."""
    for reporter in _REPORTERS if report.failed else []:
        told = f"{report.longreprtext[-2000:]}\n{report.capstdout[-1000:]}\n{report.capstderr[-2000:]}"
        reporter.write_line(f"\n{report.nodeid} ({report.when}): {told.rstrip()}")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIPTIDE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray on this machine, for all jobs that tests run in this process."""
    import logging

    import ray

    os.environ["RIPTIDE_CACHE"] = str(tmp_path_factory.getbasetemp() / "cache")  # the workers' too
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        for name in ("ray.data", "ray.data._internal"):
            logging.getLogger(name).setLevel(logging.ERROR)
    yield
    if started:
        ray.shutdown()


@pytest.fixture(scope="session")
def call_job(local_ray: None) -> Callable[..., int]:
    """call_job(name, *arguments): run a job in this process, as `python jobs/NAME.py ARGUMENTS` would; its status."""
    from jobs.cli import options_of, run

    def call(name: str, *arguments: object) -> int:
        module = importlib.import_module(f"jobs.{name}")
        try:
            run(module.main, options_of(module.main), [str(argument) for argument in arguments])
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return call


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """moto's server in a process of its own; the AWS variables name it while the session lasts."""
    command = [sys.executable, "-u", "-c", "from moto.server import main; main(['-H', '127.0.0.1', '-p', '0'])"]
    log = tmp_path_factory.mktemp("moto") / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    endpoint = None
    while endpoint is None and process.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
            endpoint = found.group()
        time.sleep(0.05)
    assert endpoint, "moto's server did not start"
    variables = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    yield endpoint
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    process.kill()
    process.wait()


@pytest.fixture
def bucket(s3_server: str) -> str:
    """A new, empty bucket: `s3://NAME`."""
    import boto3

    name = f"riptide-{uuid.uuid4().hex[:12]}"
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}"


@pytest.fixture(params=["local", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Every test that takes it runs on a local folder and on S3."""
    if request.param == "local":
        return str(tmp_path / "store")
    return f"{request.getfixturevalue('bucket')}/some/prefix"


@pytest.fixture
def shared_data() -> Path:
    """Real data sets beside the checkout; a user has none, and the tests on them say so."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"needs the data sets in {SHARED_DATA}")
    return SHARED_DATA
