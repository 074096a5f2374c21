"""cluster/monitoring: its generated files are current; Prometheus scrapes a cluster, and every query returns data."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_cluster import (
    PATIENCE,
    REPOSITORY,
    LocalCluster,
    clean_environment,
    kill_all,
    local_cluster,
    port,
    run,
    start,
    wait_for,
)
from tiny import save_bert, write_corpus

from riptide.indexing.store.store import Store

MONITORING = REPOSITORY / "cluster" / "monitoring"
GENERATED = runpy.run_path(str(MONITORING / "generate.py"))
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
RULES = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
ALERT_TESTS = yaml.safe_load((MONITORING / "alerts.test.yaml").read_text())

# A deployment that fails one of eight requests, and works on one at a time, so that requests wait; and tasks that fail.
SERVE = """
import sys, threading, time, urllib.request
import ray
from ray import serve

@serve.deployment(max_ongoing_requests=1, ray_actor_options={"num_cpus": 0})
class Slow:
    def __call__(self, request):
        time.sleep(0.2)
        assert request.query_params.get("good") == "1"
        return "done"

def ask(url):
    try:
        urllib.request.urlopen(url, timeout=60).read()
    except urllib.error.HTTPError as error:
        assert error.code == 500, error

@ray.remote(name="riptide broken")
def broken():
    raise ValueError("a task that fails")

host, port = sys.argv[1:]
ray.init(log_to_driver=False)
serve.start(http_options={"host": host, "port": int(port)})
serve.run(Slow.bind(), name="slow")
while True:
    threads = [threading.Thread(target=ask, args=(f"http://{host}:{port}/?good={int(n > 0)}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    ray.wait([broken.remote()])
    for thread in threads:
        thread.join()
"""


@pytest.mark.parametrize(
    ("name", "file"), [("alerts", "alerts.yaml"), ("dashboard", "dashboard.json"), ("kubernetes", "kubernetes.yaml")]
)
def test_the_generated_files_are_current(name: str, file: str) -> None:
    assert (MONITORING / file).read_text() == GENERATED[name](), "run python cluster/monitoring/generate.py"


def test_every_alert_has_a_test_and_a_remedy() -> None:
    exprs = json.dumps(ALERT_TESTS)
    for rule in RULES:
        assert f"{rule['alert']}" in exprs
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert all(text[0].isupper() or text[0] == "{" for text in rule["annotations"].values())


def test_the_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def program(name: str) -> str:
    """Returns the path of a program of Prometheus: that of `make prometheus`, or one that is installed."""
    path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert path, f"{name} is missing: run make prometheus"
    return path


def queries() -> list[str]:
    """Returns the queries of the dashboard, for all values of its variables."""
    exprs = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    return [re.sub(r"\$(store|submission)", ".*", expr) for expr in exprs]


@pytest.mark.nodes
def test_every_alert_fires_and_none_while_all_is_well() -> None:
    """By promtool, on series that are written down."""
    for command in (
        ("check", "rules", "alerts.yaml"),
        ("check", "config", "prometheus.yaml"),
        ("test", "rules", "alerts.test.yaml"),
    ):
        done = subprocess.run(
            [program("promtool"), *command], cwd=MONITORING, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@dataclass
class Prometheus:
    """A Prometheus that scrapes a cluster every second since `began`."""

    address: str
    began: float

    def ask(self, path: str, **parameters: Any) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def value(self, query: str) -> float | None:
        """Returns the value of a query without labels now; None without one."""
        result = self.ask("query", query=query)["result"]
        return float(result[0]["value"][1]) if result else None

    def values(self, query: str) -> list[float]:
        """Returns all values of a query since the beginning, of all series."""
        result = self.ask("query_range", query=query, start=self.began, end=time.time(), step=1)["result"]
        numbers = [float(value) for series in result for _, value in series["values"]]
        return [number for number in numbers if not math.isnan(number)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(workers=2) as made:
        yield made


@pytest.fixture(scope="module")
def prometheus(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Its configuration is cluster/monitoring/prometheus.yaml with other paths and shorter times."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = (MONITORING / "prometheus.yaml").read_text()
    for text, own in {
        "scrape_interval: 10s": "scrape_interval: 1s",
        "evaluation_interval: 10s": "evaluation_interval: 1s",
        "[alerts.yaml]": f"[{MONITORING / 'alerts.yaml'}]",
        "- files: [/tmp/ray/prom": f"- refresh_interval: 1s\n        files: [{cluster.folder}/prom",
    }.items():
        assert config.count(text) == 1, text
        config = config.replace(text, own)
    (folder / "prometheus.yaml").write_text(config)
    address = f"127.0.0.2:{port('127.0.0.2')}"
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder}/prometheus.yaml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    prometheus = Prometheus(address, time.time())

    def is_up() -> bool:
        try:
            return prometheus.value("count(up == 1)") is not None
        except OSError:
            return False

    try:
        wait_for(is_up, "Prometheus", process)
        yield prometheus
    finally:
        process.kill()
        process.wait()


@pytest.mark.cluster
@pytest.mark.nodes
@pytest.mark.long
def test_two_tenants_are_apart_and_no_alert_fires_during_ten_jobs(
    cluster: LocalCluster, prometheus: Prometheus, tmp_path: Path
) -> None:
    """Two stores with corpora of different sizes, five BM25 indexes each: the rows of each store are its own."""
    rows = {"first": 40, "second": 60}
    for name, count in rows.items():
        source = write_corpus(tmp_path / f"raw-{name}", count)
        run("import_corpus", "--store", tmp_path / name, "--source", source, "--part-size", 20)
    for number in range(5):
        jobs = [
            start(
                *("build_bm25", "--store", tmp_path / name, "--name", f"b{number}", "--shards", 2),
                environment=cluster.environment,
            )
            for name in rows
        ]
        for job in jobs:
            _, err = job.process.communicate(timeout=PATIENCE)
            assert job.process.returncode == 0, err
            assert re.search(r"^spent [\d.,]+ s in all processes: .*opening workers \d+%", err, re.M), err
    for name, count in rows.items():
        committed = f'sum(ray_riptide_rows_total{{store="{tmp_path / name}", stage="index text"}})'
        wait_for(lambda query=committed, count=count: prometheus.value(query) == 5 * count, f"the rows of {name}")
        spent = f'sum(ray_riptide_phase_seconds_total{{store="{tmp_path / name}", phase="compute"}})'
        assert (prometheus.value(spent) or 0) > 0
    assert prometheus.value('count(count by (submission) (ray_riptide_rows_total{stage="index text"}))') == 10
    assert prometheus.values('ALERTS{alertstate="firing"}') == []


@pytest.mark.cluster
@pytest.mark.nodes
@pytest.mark.slow
@pytest.mark.long
def test_the_rows_are_the_committed_ones_and_every_query_of_the_dashboard_has_data(
    cluster: LocalCluster, prometheus: Prometheus, tmp_path: Path
) -> None:
    """An encoding whose worker is killed in the middle, a training and a small service, scraped by Prometheus."""
    store, model = tmp_path / "store", save_bert(tmp_path / "model", hidden=256, layers=4)
    run("import_corpus", "--store", store, "--source", write_corpus(tmp_path / "raw", 900), "--part-size", 30)
    encode = (
        "encode_corpus",
        "--store",
        store,
        "--encoder",
        model,
        "--name",
        "tiny",
        "--compile",
        "never",
        "--max-workers",
        2,
    )
    job = start(*encode, environment=cluster.environment)
    records = store / "embeddings" / "tiny" / "g0000"
    wait_for(lambda: len(list(records.glob("part-*.json"))) >= 4, "four parts", job.process)
    encoder = "MapWorker(Map(riptide encode))"
    wait_for(lambda: any(node.workers(encoder) for node in cluster.workers), "a worker that encodes", job.process)
    kill_all([worker for node in cluster.workers for worker in node.workers(encoder)][:1])
    job.end()
    embeddings = Store(str(store)).open("embeddings", "tiny/g0000")

    rows = 'sum(ray_riptide_rows_total{job_name="encode_corpus"})'
    wait_for(lambda: prometheus.value(rows) == embeddings.rows, f"{embeddings.rows} rows")
    parts = 'sum(ray_riptide_parts_total{artifact="embeddings/tiny/g0000", stage="encode", outcome="made"})'
    assert prometheus.value(parts) == len(embeddings.parts)

    run(
        "pretrain_rip",
        "--store",
        store,
        "--backbone",
        model,
        "--name",
        "spans",
        "--unit",
        "span",
        "--max-length",
        32,
        "--batch",
        4,
        "--steps",
        5,
        "--cpus",
        1,
        environment=cluster.environment,
    )
    (tmp_path / "serve.py").write_text(SERVE)
    command = [sys.executable, str(tmp_path / "serve.py"), "127.0.0.2", str(port("127.0.0.2"))]
    with open(tmp_path / "serve.log", "wb") as log:
        service = subprocess.Popen(
            command, env=clean_environment(cluster.environment), stdout=log, stderr=subprocess.STDOUT
        )

    written = {each["expr"] for test in ALERT_TESTS["tests"] for each in test["promql_expr_test"]}  # run by promtool
    live = [query for query in queries() if query not in written]

    def empty() -> list[str]:
        return [query for query in live if not prometheus.values(query)]

    try:
        wait_for(lambda: not empty(), "data", service)
    except AssertionError as error:
        raise AssertionError(f"{error}; without data: {empty()}") from None
    finally:
        service.kill()
        service.wait()
    assert prometheus.value('max(ray_riptide_train_steps{job_name="pretrain_rip"})') in (None, 5)
    assert max(prometheus.values("ray_riptide_train_steps")) == 5
    assert prometheus.value('sum(ray_riptide_pairs_total{artifact="models/spans", stage="train"})') == 5 * 4
    rules = prometheus.ask("rules")["groups"][0]["rules"]
    assert {rule["name"]: rule["health"] for rule in rules} == {rule["alert"]: "ok" for rule in RULES}


def test_the_names_of_our_metrics_are_those_that_jobs_and_services_export() -> None:
    from riptide.jobs.common.job_metrics import COUNTERS, GAUGES
    from riptide.serve.server_metrics import METRICS, PrometheusExporter

    served = {f"riptide_{metric.name}" for metric in METRICS}
    exported = {f"riptide_{name}_total" for name in COUNTERS} | {f"riptide_{name}" for name in GAUGES}
    texts = [*queries(), *(rule["expr"] for rule in RULES)]
    assert {name for text in texts for name in re.findall(r"riptide_\w+", text)} - served == exported
    certified = [query for query in queries() if re.search("riptide_(recall|sampled|raised)", query)]
    assert len(certified) == 5
    assert {each["expr"] for test in ALERT_TESTS["tests"] for each in test["promql_expr_test"]} >= {*certified}
    # The choices of the dashboard are the labels of jobs and of servers with and without Ray Serve.
    [store, submission] = DASHBOARD["templating"]["list"][1:]
    selector = re.fullmatch(r'label_values\(\{__name__=~"(.+)"\}, store\)', store["query"]["query"])
    assert selector is not None
    assert submission["query"]["query"] == store["query"]["query"].replace(", store)", ", submission)")
    exporter = PrometheusExporter("s3://bucket/store")
    for metric in METRICS:
        exporter.add(metric)
    of_server = re.findall(r"^(\w+)\{store=\"s3://bucket/store\"\}", exporter.render().decode(), re.MULTILINE)
    for names in ({f"ray_{name}" for name in exported}, {f"ray_{name}" for name in served}, {*of_server}):
        assert [name for name in names if re.fullmatch(selector[1], name)], names
