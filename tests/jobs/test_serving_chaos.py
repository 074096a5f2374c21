"""Replicas of Ray Serve are killed, and come, under load: nobody gets a wrong answer, and all is whole again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from local_cluster import LONG, LocalCluster, clean_environment, local_cluster, port, wait_for
from serving import REPOSITORY, Load, Server, query_texts, started

from serve.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

USER = "user-0123456789abcdef"
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


def test_a_lost_replica_loses_no_answer(served: Path, tmp_path: Path) -> None:
    """HAProxy sends the requests of the lost one of two replicas to the other; a release is swapped meanwhile."""
    root = Path(shutil.copytree(served, tmp_path / "root"))
    asked = Asked(root)
    with started("--store", root / "store", "--replicas", 2, "--port", port("127.0.0.1")) as (process, address):
        asked.look(address)
        with Load(Server(address, root, process.pid), asked.bodies, clients=4) as load:
            for _ in range(KILLS):
                load.wait_for(20)
                before = replicas(process.pid, "ingress")
                assert len(before) == 2
                os.kill(before[0], signal.SIGKILL)
                load.wait_for(20)
                Client(address).switch()
                wait_for(lambda: len(replicas(process.pid, "ingress")) == 2 or load.faults, "the next replica")
                load.wait_for(40)
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0
    assert load.faults == []
    asked.check(load.answers)
    assert {status for status, _ in load.answers} == {200}


@pytest.mark.cluster
@pytest.mark.long
def test_a_node_that_is_killed_under_load_gives_no_wrong_answer_and_its_work_goes_on_elsewhere(
    served: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(served, tmp_path / "root"))
    asked = Asked(root)
    at = ("--store", root / "store", "--row-ranges", 2, "--port", port("127.0.0.1"))
    with local_cluster(workers=2) as cluster, started(*at, environment=cluster.environment) as (process, address):
        asked.look(address)
        killed: float | None = None
        with Load(Server(address, root, process.pid), asked.bodies, clients=4) as load:
            for _ in range(KILLS):
                load.wait_for(20)
                # Requests in an ingress that is lost are lost: the job starts one only, and its proxy answers for it.
                # Without both shards there is no answer that says what it lacks.
                victim = max(
                    (node for node in cluster.workers if not node.workers(f"{REPLICA}:ingress")),
                    key=lambda node: (len(node.workers(f"{REPLICA}:leaf-")) == 1, len(node.workers(REPLICA))),
                )
                if not victim.workers(REPLICA) and killed is not None:
                    break  # all have moved to where the ingress is
                assert victim.workers(REPLICA)
                since, killed = len(load.answers), time.monotonic()
                cluster.lose(victim)
                while victim.address in cluster.alive() and not load.faults:
                    time.sleep(0.1)
                wait_until_whole(load, since)
                print(f"a node: whole again {time.monotonic() - killed:.1f} s after it was killed")
                cluster.add()
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0
    assert load.faults == []
    asked.check(load.answers)


@pytest.mark.cluster
@pytest.mark.long
def test_replicas_come_where_the_load_asks_for_them(served: Path, tmp_path: Path) -> None:
    """`serve deploy` of the file of cluster/, on one machine's scale: the second replica comes by itself."""
    root = Path(shutil.copytree(served, tmp_path / "root"))
    asked, number = Asked(root), port("127.0.0.1")
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"user": [USER]}))
    config = yaml.safe_load((REPOSITORY / "cluster/serve.yaml").read_text())
    config["proxy_location"], config["http_options"] = "HeadOnly", {"host": "127.0.0.1", "port": number}
    args = config["applications"][0]["args"]
    args.update(store=str(root / "store"), tokens=str(tokens), batch=2, replicas=1, most=2, cpus=0, gpus=0, threads=1)
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    with local_cluster(workers=0) as cluster:
        command = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(tmp_path / "serve.yaml")]
        variables = clean_environment({**cluster.authentication, "RAY_DASHBOARD_ADDRESS": cluster.dashboard})
        subprocess.run(command, env=variables, check=True, timeout=240)
        wait_for(lambda: running(cluster, "ingress") == 1, "the application")
        server = Server(f"http://127.0.0.1:{number}", root, cluster.head.process.pid)
        asked.look(server.address, USER)
        with Load(server, asked.bodies, clients=8, token=USER) as load:
            begun = time.monotonic()
            wait_for(lambda: running(cluster, "ingress") == 2 or load.faults, "the second replica")
            print(f"the second replica answers {time.monotonic() - begun:.0f} s after the load began")
            load.wait_for(100)
    assert load.faults == []
    asked.check(load.answers)
    assert {status for status, _ in load.answers} == {200}


def running(cluster: LocalCluster, deployment: str) -> int:
    """How many replicas of a deployment Ray Serve says to be running; 0 unless the application runs."""
    found = cluster.ask("/api/serve/applications/")["applications"].get("riptide", {})
    if found.get("status") != "RUNNING":
        return 0
    return sum(replica["state"] == "RUNNING" for replica in found["deployments"][deployment]["replicas"])
