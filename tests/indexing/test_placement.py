"""Workers have room on the nodes that there are, or on those that come while they are waited for."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import ray
from ray.autoscaler import sdk

from indexing import placement
from indexing.placement import Places, find_places, tell, tell_of_waiting
from retriever.errors import InputError

GPU = {"gpus": 1}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """The nodes that Ray says are alive."""
    found: list[dict[str, int]] = []
    gone = {"Alive": False, "Resources": {"CPU": 99, "GPU": 9}}
    monkeypatch.setattr(ray, "nodes", lambda: [gone, *({"Alive": True, "Resources": node} for node in found)])
    sums = lambda: {name: sum(node.get(name, 0) for node in found) for name in ("CPU", "GPU")}  # noqa: E731
    monkeypatch.setattr(ray, "cluster_resources", sums)
    return found


@pytest.mark.parametrize(
    ("workers", "cpus", "options", "there", "gpus", "told"),
    [
        (2, 2, {}, [{"CPU": 4}], 0, None),
        (2, 3, {}, [{"CPU": 4}, {"CPU": 4}], 0, None),
        (2, 2, {}, [{"CPU": 4, "GPU": 2}], 1, None),
        (2, 2, {"gpus": 0}, [{"CPU": 4, "GPU": 2}], 0, None),
        (8, 2, {"least": 4}, [{"CPU": 32, "GPU": 7}], 1, "begins on 7 GPUs"),
        (2, 2, {}, [{"CPU": 8, "GPU": 1}], 0, "trains on the processors: --workers 2 --cpus 2"),
        (2, 2, {}, [{"CPU": 2, "GPU": 2}, {"CPU": 8}], 0, "GPUs and cores beside them for 1 such workers"),
    ],
)  # fmt: skip
def test_gpus_are_taken_by_all_workers_or_by_none(
    nodes: list[dict[str, int]], workers: int, cpus: int, options: dict[str, Any], there: list[dict[str, int]],
    gpus: int, told: str | None,
) -> None:  # fmt: skip
    nodes += there
    said: list[str] = []
    assert find_places(workers, cpus, said.append, **options).gpus == gpus
    assert [told in line for line in said] == ([True] if told else [])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("workers", "cpus", "options", "there", "told"),
    [
        (2, 3, {}, [{"CPU": 5}, {"CPU": 1}], "--cpus 3: the cluster has 6 cores and 0 GPUs, its nodes have room for 1"),
        (1, 8, {}, [{"CPU": 4}, {"CPU": 4}], "room for 0 such"),
        (2, 2, GPU, [{"CPU": 16, "GPU": 1}], "--gpus 1: the cluster has 16 cores and 1 GPUs"),
    ],
)  # fmt: skip
def test_where_there_is_no_room_it_is_told(
    nodes: list[dict[str, int]],
    workers: int,
    cpus: int,
    options: dict[str, Any],
    there: list[dict[str, int]],
    told: str,
) -> None:
    nodes += there
    with pytest.raises(InputError) as raised:
        find_places(workers, cpus, print, **options)
    assert told in str(raised.value)


@pytest.mark.parametrize("come", [0, 1, 2])
def test_an_autoscalers_nodes_are_asked_for_and_waited_for(
    nodes: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch, come: int
) -> None:
    """As many as come: none is too few, one is enough for the least, two are all."""
    asked: list[list[dict[str, float]]] = []
    monkeypatch.setattr(sdk, "request_resources", lambda bundles: asked.append(bundles))
    monkeypatch.setattr(placement, "LOOK", 0.0)

    def sleep(_: float) -> None:
        if len(nodes) < 1 + come:
            nodes.append({"CPU": 8, "GPU": 1})

    monkeypatch.setattr("time.sleep", sleep)
    nodes.append({"CPU": 0})
    said: list[str] = []
    wanted = {"gpus": 1, "least": 1, "wait": 60.0 if come == 2 else 0.2}
    if come:
        assert find_places(2, 8, said.append, **wanted).room == come
    else:
        with pytest.raises(InputError, match="room for 0 such workers"):
            find_places(2, 8, said.append, **wanted)
    assert asked == [[{"CPU": 8, "GPU": 1}] * 2, []]
    assert "waits up to" in said[0]


def test_a_person_is_told_of_workers_that_wait(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "PATIENCE", 0.0)
    places = Places(workers=2, least=2, cpus=1, gpus=0)
    told, begun, lines = threading.Event(), threading.Event(), []

    def say(line: str) -> None:
        lines.append(line)
        told.set()

    with tell_of_waiting(places, begun, say):
        assert told.wait(60)
    assert lines[0].startswith("waits for 2 workers of 1 cores; free now: ")
    begun.set()
    tell(places, begun, say)
    assert len(lines) == 1
