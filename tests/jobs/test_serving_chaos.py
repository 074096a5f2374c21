"""Replicas of Ray Serve are killed, and come, under load: nobody gets a wrong answer, and all is whole again."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest
import yaml
from local_cluster import LONG, LocalCluster, clean_environment, local_cluster, port, wait_for
from serving import REPOSITORY, Load, Server, query_texts, started

from riptide.jobs.serve_search import HAPROXY, RAY_SERVE, unshared_ports
from riptide.serve.client import Client, ServerError

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

USER, ADMIN = "user-0123456789abcdef", "admin-0123456789abcde"
REPLICA = "ray::ServeReplica:riptide"
KILLS = 5 if LONG else 1  # of each


def replicas(driver: int, deployment: str) -> list[int]:
    """The processes of a deployment, of the Ray that a process started."""
    name, found = f"{REPLICA}:{deployment}", []
    for one in psutil.Process(driver).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if name in " ".join(one.cmdline()):
                found.append(one.pid)
    return found


def is_complete(status: int, answer: dict[str, Any]) -> bool:
    return status == 200 and answer["results"][0]["shards"]["successful"] == answer["results"][0]["shards"]["total"]


class Asked:
    """Questions about the vectors, and what a server that lacks nothing answers."""

    def __init__(self, root: Path):
        self.texts = list(query_texts(root).values())[:8]
        self.bodies = [
            json.dumps(
                {"query": text, "k": 10, "mode": "exact", "allow_partial": partial, "timeout_ms": 20_000}
            ).encode()
            for text in self.texts
            for partial in (False, True)
        ]

    def look(self, address: str, token: str | None = None) -> None:
        client = Client(address, token=token)
        found = client.search_all(self.texts, k=10, mode="exact")
        self.expected = {text: [hit.id for hit in hits] for text, hits in zip(self.texts, found, strict=True)}
        every = client.search_all(self.texts, k=240, mode="exact")
        self.scores = {text: {hit.id: hit.score for hit in hits} for text, hits in zip(self.texts, every, strict=True)}

    def check(self, answers: list[tuple[int, dict[str, Any]]]) -> None:
        """Each is right and whole, or says what it lacks and is right in the rest, or is a 503."""
        for status, answer in answers:
            assert status in (200, 503), answer
            if status == 503:
                assert answer["error"]["type"] in ("incomplete_error", "unavailable_error", "timeout_error")
                continue
            [result] = answer["results"]
            ids, shards = [hit["id"] for hit in result["hits"]], result["shards"]
            if is_complete(status, answer):
                assert ids == self.expected[result["query"]]
                continue
            scores, known = [hit["score"] for hit in result["hits"]], self.scores[result["query"]]
            assert shards["failed"] + shards["timed_out"] == 1
            assert len(ids) <= 10  # the passages of some may have been lost
            assert scores == sorted(scores, reverse=True) == [known[id] for id in ids]
        assert sum(status == 200 for status, _ in answers) > 60


class Searches:
    """Clients that search in a closed loop; all hits must be right.

    Attributes:
        statuses: The status of each search; 0 if there was no answer.
    """

    def __init__(self, asked: Asked, address: str, token: str | None = None):
        self.statuses: list[int] = []
        self._asked, self._client, self._done = asked, Client(address, token=token), threading.Event()
        self._threads = ThreadPoolExecutor(len(asked.texts))

    def __enter__(self) -> Searches:
        self._running = [self._threads.submit(self._search, text) for text in self._asked.texts]
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for one in self._running:
            one.result(600)

    def wait_for(self, more: int) -> None:
        """Waits until so many more searches have been answered."""
        wanted = self.statuses.count(200) + more
        wait_for(lambda: self.statuses.count(200) >= wanted or any(one.done() for one in self._running), "answers")

    def _search(self, text: str) -> None:
        while not self._done.is_set():
            try:
                assert [hit.id for hit in self._client.search(text, k=10, mode="exact")] == self._asked.expected[text]
            except ServerError as error:
                self.statuses.append(error.status)
            else:
                self.statuses.append(200)


def wait_until_whole(load: Load, since: int) -> None:
    """Until twenty answers in a row lack nothing, of those from number `since` on."""
    whole = -1
    while whole < 20 and not load.faults:
        time.sleep(0.05)
        complete = [is_complete(*one) for one in load.answers[since:]]
        whole = complete[::-1].index(False) if False in complete else len(complete)


def test_what_is_killed_under_load_gives_no_wrong_answer_and_comes_back(served: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(served, tmp_path / "root"))
    asked = Asked(root)
    at = ("--store", root / "store", "--row-ranges", 2, "--port", port("127.0.0.1"))
    with started(*at) as (process, address):
        asked.look(address)
        with Load(Server(address, root, process.pid), asked.bodies, clients=4) as load:
            for deployment in ["leaf-000", "leaf-001"] * KILLS:
                load.wait_for(20)
                [victim] = replicas(process.pid, deployment)
                os.kill(victim, signal.SIGKILL)
                killed, since = time.monotonic(), len(load.answers)
                while replicas(process.pid, deployment) in ([], [victim]) and not load.faults:
                    time.sleep(0.1)
                wait_until_whole(load, since)
                print(f"{deployment}: whole again {time.monotonic() - killed:.1f} s after it was killed")
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0
    assert load.faults == []
    asked.check(load.answers)


class Deployed:
    """`serve deploy` of the file of cluster/, at one machine's scale, on nodes that run HAProxy.

    Args:
        root: Folder of the store.
        folder: Gets the files of the deployment.
        arguments: Arguments of the application.
    """

    def __init__(self, root: Path, folder: Path, **arguments: Any):
        self.root, self.folder, self.port = root, folder, port("0.0.0.0")
        self.variables = {**RAY_SERVE, **HAPROXY, **unshared_ports()}
        tokens = folder / "tokens.json"
        tokens.write_text(json.dumps({"user": [USER], "admin": [ADMIN]}))
        store = str(root / "store")
        self.arguments = {"store": store, "tokens": str(tokens), "most": None, "gpus": 0, "threads": 1, **arguments}

    def deploy(self, cluster: LocalCluster, **changes: Any) -> None:
        """Deploys the application with some arguments changed, and waits until it runs."""
        self.arguments.update(changes)
        config = yaml.safe_load((REPOSITORY / "cluster/serve.yaml").read_text())
        config["proxy_location"], config["http_options"] = "HeadOnly", {"host": "0.0.0.0", "port": self.port}
        config["applications"][0]["args"].update(self.arguments)
        (self.folder / "serve.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(self.folder / "serve.yaml")]
        variables = clean_environment({**cluster.authentication, "RAY_DASHBOARD_ADDRESS": cluster.dashboard})
        subprocess.run(command, env=variables, check=True, timeout=240)
        wait_for(lambda: running(cluster, "ingress") >= self.arguments["replicas"], "the application")

    def server(self, cluster: LocalCluster) -> Server:
        return Server(f"http://127.0.0.1:{self.port}", self.root, cluster.head.process.pid)

    def answering(self) -> set[str]:
        """Returns the names of the replicas that HAProxy sends requests to."""
        statistics = self.variables["RAY_SERVE_HAPROXY_STATS_PORT"]
        with urlopen(f"http://127.0.0.1:{statistics}/stats;csv", timeout=30) as answer:
            lines = answer.read().decode().removeprefix("# ").splitlines()
        servers = [row for row in csv.DictReader(lines) if row["svname"] not in ("FRONTEND", "BACKEND")]
        return {row["svname"] for row in servers if row["status"] == "UP" and row["bck"] == "0"}


def running(cluster: LocalCluster, deployment: str) -> int:
    """How many replicas of a deployment Ray Serve says to be running; 0 unless the application runs."""
    application = cluster.ask("/api/serve/applications/")["applications"].get("riptide", {})
    if application.get("status") != "RUNNING":
        return 0
    return sum(replica["state"] == "RUNNING" for replica in application["deployments"][deployment]["replicas"])


@pytest.mark.cluster
def test_two_replicas_lose_no_answer(served: Path, tmp_path: Path) -> None:
    """One is killed and the live release swapped, then both are updated, under load behind HAProxy."""
    root = Path(shutil.copytree(served, tmp_path / "root"))
    asked, deployed = Asked(root), Deployed(root, tmp_path, replicas=2, cpus=0)
    with local_cluster(workers=0, **deployed.variables) as cluster:
        deployed.deploy(cluster)
        server = deployed.server(cluster)

        def wait_for_two(is_next: Callable[[set[str]], bool]) -> None:
            """Waits until two replicas answer, the expected ones."""
            wait_for(lambda: len(now := deployed.answering()) == 2 and is_next(now), "the replicas")
            searches.wait_for(40)

        wait_for(lambda: len(deployed.answering()) == 2, "both replicas")
        asked.look(server.address, USER)
        with Searches(asked, server.address, USER) as searches:
            for number in range(KILLS):
                searches.wait_for(20)
                before = deployed.answering()
                victim = max(one.pid for one in cluster.head.workers(f"{REPLICA}:ingress"))
                killed = time.monotonic()
                os.kill(victim, signal.SIGKILL)
                Client(server.address, token=ADMIN).switch()
                wait_for_two(lambda now: now != before)  # noqa: B023
                print(f"two replicas again {time.monotonic() - killed:.1f} s after one was killed")
                before = deployed.answering()
                deployed.deploy(cluster, batch=16 + number)
                wait_for_two(lambda now: not now & before)  # noqa: B023
    assert set(searches.statuses) == {200}


@pytest.mark.long
def test_a_single_lost_replica_is_unavailable_until_the_next_one_answers(served: Path, tmp_path: Path) -> None:
    """Requests in flight may be lost, others wait; none gets the 500 of HAProxy."""
    root = Path(shutil.copytree(served, tmp_path / "root"))
    asked = Asked(root)
    with started("--store", root / "store", "--replicas", 1, "--port", port("127.0.0.1")) as (process, address):
        asked.look(address)
        [victim] = replicas(process.pid, "ingress")
        with Searches(asked, address) as searches:
            searches.wait_for(20)
            os.kill(victim, signal.SIGKILL)
            killed = time.monotonic()
            searches.wait_for(4 * len(asked.texts))  # more than were in flight
            print(f"the next replica answers {time.monotonic() - killed:.1f} s after the only one was killed")
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0
    assert set(searches.statuses) <= {0, 200, 503}


@pytest.mark.cluster
@pytest.mark.long
def test_a_node_that_is_killed_under_load_gives_no_wrong_answer_and_its_work_goes_on_elsewhere(
    served: Path, tmp_path: Path
) -> None:
    """Each node has room for one replica, and one node is spare."""
    root = Path(shutil.copytree(served, tmp_path / "root"))
    asked, deployed = Asked(root), Deployed(root, tmp_path, replicas=1, cpus=1, row_ranges=2, leaf_replicas=1)
    with local_cluster(workers=3, **deployed.variables) as cluster:
        deployed.deploy(cluster, leaf_cpus=1)
        server = deployed.server(cluster)
        wait_for(lambda: len(deployed.answering()) == 1, "the front")
        asked.look(server.address, USER)
        with Load(server, asked.bodies, clients=4, token=USER) as load:
            for _ in range(KILLS):
                load.wait_for(20)
                victim = next(node for node in cluster.workers if node.workers(f"{REPLICA}:leaf-"))
                since, killed = len(load.answers), time.monotonic()
                cluster.count_lost(victim)
                while victim.address in cluster.alive() and not load.faults:
                    time.sleep(0.1)
                wait_until_whole(load, since)
                print(f"a node: whole again {time.monotonic() - killed:.1f} s after it was killed")
                cluster.add()
    assert load.faults == []
    asked.check(load.answers)


@pytest.mark.cluster
@pytest.mark.long
def test_replicas_come_where_the_load_asks_for_them(served: Path, tmp_path: Path) -> None:
    """The second replica, `most`, comes by itself."""
    root = Path(shutil.copytree(served, tmp_path / "root"))
    asked, deployed = Asked(root), Deployed(root, tmp_path, replicas=1, most=2, cpus=0, batch=2)
    with local_cluster(workers=0, **deployed.variables) as cluster:
        deployed.deploy(cluster)
        server = deployed.server(cluster)
        wait_for(lambda: len(deployed.answering()) == 1, "the first replica")
        asked.look(server.address, USER)
        with Load(server, asked.bodies, clients=8, token=USER) as load:
            start = time.monotonic()
            wait_for(lambda: len(deployed.answering()) == 2 or load.faults, "the second replica")
            print(f"the second replica answers {time.monotonic() - start:.0f} s after the load began")
            load.wait_for(100)
    assert load.faults == []
    asked.check(load.answers)
    assert {status for status, _ in load.answers} == {200}
