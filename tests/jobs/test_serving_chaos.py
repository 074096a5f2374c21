"""Replicas of Ray Serve are killed under load: nobody gets a wrong answer, and all is whole again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import Load, Server, questions, started

from serve.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

KILLS = 5 if os.environ.get("RIPTIDE_CHAOS") == "long" else 1  # of each


def replicas(driver: int, deployment: str) -> list[int]:
    """The processes of a deployment, of the Ray that a process started."""
    name, found = f"ray::ServeReplica:riptide:{deployment}", []
    for one in psutil.Process(driver).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if name in " ".join(one.cmdline()):
                found.append(one.pid)
    return found


def is_complete(status: int, answer: dict[str, Any]) -> bool:
    return status == 200 and answer["results"][0]["shards"]["successful"] == answer["results"][0]["shards"]["total"]


def test_what_is_killed_under_load_gives_no_wrong_answer_and_comes_back(served: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(served, tmp_path / "root"))
    texts = list(questions(root).values())[:8]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    at = ("--store", root / "store", "--topology", "distributed", "--shards", 2, "--port", port)
    bodies = [
        json.dumps({"query": text, "k": 10, "mode": "exact", "allow_partial": partial, "timeout_ms": 20_000}).encode()
        for text in texts
        for partial in (False, True)
    ]
    with started(*at) as (process, address):
        client = Client(address)
        found = client.search_all(texts, k=10, mode="exact")
        expected = {text: [hit.id for hit in hits] for text, hits in zip(texts, found, strict=True)}
        every = client.search_all(texts, k=240, mode="exact")
        scores = {text: {hit.id: hit.score for hit in hits} for text, hits in zip(texts, every, strict=True)}
        with Load(Server(address, root, process.pid), bodies, clients=4) as load:
            for deployment in ["search-000", "encoder", "passages"] * KILLS:
                load.wait_for(20)
                [victim] = replicas(process.pid, deployment)
                os.kill(victim, signal.SIGKILL)
                killed, asked = time.monotonic(), len(load.answers)
                while replicas(process.pid, deployment) in ([], [victim]) and not load.faults:
                    time.sleep(0.1)
                whole = -1
                while whole < 20 and not load.faults:  # answers in a row that lack nothing
                    time.sleep(0.05)
                    complete = [is_complete(*one) for one in load.answers[asked:]]
                    whole = complete[::-1].index(False) if False in complete else len(complete)
                print(f"{deployment}: whole again {time.monotonic() - killed:.1f} s after it was killed")
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0
    assert load.faults == []
    for status, answer in load.answers:
        assert status in (200, 503), answer
        if status == 503:
            assert answer["error"]["type"] in ("incomplete_error", "unavailable_error", "timeout_error")
            continue
        [result] = answer["results"]
        ids, shards = [hit["id"] for hit in result["hits"]], result["shards"]
        if is_complete(status, answer):
            assert ids == expected[result["query"]]
        else:  # the best of what is left, and it says that something lacks
            found = [hit["score"] for hit in result["hits"]]
            assert shards["failed"] + shards["timed_out"] == 1
            assert len(ids) == 10
            assert found == sorted(found, reverse=True) == [scores[result["query"]][id] for id in ids]
    assert sum(status == 200 for status, _ in load.answers) > 60
