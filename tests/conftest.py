"""Fixtures for all tests: no network, a cache per session, an S3 server and a Ray on this machine."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import azurite
import crashes
import pytest
from bad_input import Row, StatedRows, read_page, readable, write_rows
from gcs_server import GcsServer, gcs_server
from local_cluster import LONG
from local_ray import SessionRay, disconnect
from watchdog import watch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"
# Threads that wait for others sleep instead of spinning: on a machine that others use too, tests are ten times faster.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# As ray.init decides for a Ray that it starts; a process that connects to one by its address must say so itself.
os.environ.setdefault("RAY_AUTH_MODE", "token")

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
LIMIT_S = 1800 if LONG else 900  # seconds of a test


_REPORTERS: list[pytest.TerminalReporter] = []
_DESELECTED: set[str] = set()  # tests of which at least one item does not run


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background processes with SIGINT ignored. The jobs of these tests would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    watch(config, silence=LIMIT_S + 300)
    crashes.watch(config)


def pytest_sessionstart(session: pytest.Session) -> None:
    if reporter := session.config.pluginmanager.get_plugin("terminalreporter"):
        _REPORTERS.append(reporter)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests of the long form, RIPTIDE_TESTS=all, and those that a crashed run had ended; bounds their time.

    A call of Ray's C++ core that waits drops what a signal's handler raises. Therefore a thread ends a test on Ray: it
    prints all stacks and ends the process.
    """
    for item in items:
        if not item.get_closest_marker("timeout"):
            on_ray = item.get_closest_marker("cluster") or item.get_closest_marker("ray_serve")
            item.add_marker(pytest.mark.timeout(LIMIT_S, method="thread" if on_ray else "signal"))
    ended = crashes.ended_before(config)
    out = [item for item in items if item.nodeid in ended or (not LONG and item.get_closest_marker("long"))]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    _DESELECTED.update(map(name_of_test, items))


def name_of_test(item: pytest.Item) -> str:
    """Returns `FILE::FUNCTION` of a test, relative to tests/, without its parameters."""
    return item.nodeid.partition("[")[0].removeprefix("tests/")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints a failure when it happens too, as there is no summary if the process ends later."""
    for reporter in _REPORTERS if report.failed else []:
        told = f"{report.longreprtext[-2000:]}\n{report.capstdout[-1000:]}\n{report.capstderr[-2000:]}"
        reporter.write_line(f"\n{report.nodeid} ({report.when}): {told.rstrip()}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(exitstatus: int) -> Iterator[None]:
    """Names the failed tests last if an error in pytest itself has ended the session; pytest prints no summary then."""
    yield
    for reporter in _REPORTERS if exitstatus == pytest.ExitCode.INTERNAL_ERROR else []:
        for report in [*reporter.stats.get("failed", []), *reporter.stats.get("error", [])]:
            reporter.write_line(f"FAILED {report.nodeid}")


@pytest.fixture(scope="session")
def stated_rows(request: pytest.FixtureRequest) -> StatedRows:
    """The rows of tests/bad_input.md that tests of this session have stated."""
    if any("[" in argument for argument in request.config.args):
        return StatedRows({})
    items = Counter(map(name_of_test, request.session.items))
    return StatedRows({test: count for test, count in items.items() if test not in _DESELECTED})


@pytest.fixture
def documented(
    request: pytest.FixtureRequest, tmp_path: Path, stated_rows: StatedRows
) -> Iterator[Callable[..., None]]:
    """documented(area, case, answer, status): this row must stand in tests/bad_input.md as it is here.

    With RIPTIDE_WRITE_TABLES=1 it is written there instead. A row that no item of its test states is refused.
    """
    from riptide.jobs.common.starting import COMMAND_LINE  # once the environment is set

    test, stated = name_of_test(request.node), set[Row]()

    def check(area: str, case: str, answer: str, status: int) -> None:
        row = Row(area, case, readable(COMMAND_LINE.render(answer), tmp_path, REPOSITORY), str(status), test)
        if os.environ.get("RIPTIDE_WRITE_TABLES"):
            write_rows([row])
        assert row in read_page(), f"tests/bad_input.md lacks or contradicts: {row.line}"
        stated.add(row)

    yield check
    stale = stated_rows.add(test, stated)
    assert not stale, f"no test states these rows of tests/bad_input.md, delete them: {[row.line for row in stale]}"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIPTIDE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def ray_variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables of the workers of `ray_address` and of the process that uses them."""
    cache = str(tmp_path_factory.getbasetemp() / "cache")
    return {
        "RIPTIDE_CACHE": cache,
        "RAY_IGNORE_UNHANDLED_ERRORS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",  # as jobs set it; Ray Data would poll a Prometheus until the process ends
    }


@pytest.fixture(scope="session")
def session_ray(ray_variables: dict[str, str]) -> Iterator[SessionRay]:
    """A Ray that runs from its first test to the end of the session; jobs run on it with `local_ray`."""
    ray = SessionRay(ray_variables)
    yield ray
    ray.close()


@pytest.fixture(scope="module")
def local_ray(session_ray: SessionRay, ray_variables: dict[str, str]) -> Iterator[None]:
    """Connects this process to the Ray of the session, so that jobs of this process run on it until the module ends."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ray_variables.items():
            patch.setenv(name, value)
        session_ray.connect()
        yield
        disconnect()


@pytest.fixture(scope="module", autouse=True)
def _no_ray_is_left() -> Iterator[None]:
    """Ends a Ray that jobs of the module have started; otherwise the jobs of the next modules would run on it."""
    yield
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        disconnect()


@pytest.fixture(scope="session")
def call_job() -> Callable[..., int]:
    """call_job(name, *arguments) runs a job in this process like `python jobs/NAME.py`; it returns the exit status."""
    from riptide.jobs.commands.cli import options_class_of, run

    def call(name: str, *arguments: object) -> int:
        module = importlib.import_module(f"riptide.jobs.{name}")
        try:
            run(module.main, options_class_of(module.main), [str(argument) for argument in arguments])
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return call


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of moto's S3 server, which runs during the session; the AWS variables name it."""
    # With Nagle's algorithm, an answer may wait 40 ms for an acknowledgement.
    program = (
        "from moto.server import main; from werkzeug.serving import WSGIRequestHandler; "
        "WSGIRequestHandler.disable_nagle_algorithm = True; main(['-H', '127.0.0.1', '-p', '0'])"
    )
    command = [sys.executable, "-u", "-c", program]
    log = tmp_path_factory.mktemp("moto") / "log"
    with open(log, "w", encoding="utf-8") as file:
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


@pytest.fixture(scope="session")
def gcs() -> Iterator[GcsServer]:
    """A server of Google Cloud Storage's XML API, which runs during the session; a variable of obstore names it."""
    with gcs_server() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", server.service_account)
        yield server


@pytest.fixture
def gs_bucket(gcs: GcsServer) -> str:
    """A new, empty bucket: `gs://NAME`."""
    name = f"riptide-{uuid.uuid4().hex[:12]}"
    gcs.buckets[name] = {}
    return f"gs://{name}"


@pytest.fixture(scope="session")
def azure_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of Azurite, which runs during the session; the Azure variables name it."""
    if not azurite.is_installed():
        pytest.skip("needs Azurite: make azurite")
    with azurite.azurite(tmp_path_factory.mktemp("azurite")) as port, pytest.MonkeyPatch.context() as patch:
        for name, value in azurite.variables(port).items():
            patch.setenv(name, value)
        yield port


@pytest.fixture
def azure_container(azure_port: int) -> str:
    """A new, empty container: `az://NAME`."""
    name = f"riptide-{uuid.uuid4().hex[:12]}"
    azurite.create_container(azure_port, name)
    return f"az://{name}"


CLOUDS = ["bucket", "gs_bucket", pytest.param("azure_container", marks=pytest.mark.azure)]


@pytest.fixture(params=CLOUDS)
def cloud_url(request: pytest.FixtureRequest) -> str:
    """Every test that takes it runs in each cloud: the address of a store in a new bucket."""
    return f"{request.getfixturevalue(request.param)}/some/prefix"


@pytest.fixture(params=["local", *CLOUDS])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Every test that takes it runs on a local folder and in each cloud."""
    if request.param == "local":
        return str(tmp_path / "store")
    return f"{request.getfixturevalue(request.param)}/some/prefix"


@pytest.fixture
def shared_data() -> Path:
    """The folder of real data sets next to the checkout; without it the test is skipped."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"needs the data sets in {SHARED_DATA}")
    return SHARED_DATA
