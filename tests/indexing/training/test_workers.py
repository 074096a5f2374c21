"""Workers fit on the present nodes, or on nodes that the autoscaler adds while the run waits."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import ray
from local_ray import all_cores_free

from riptide.base.errors import InputError
from riptide.indexing.training import workers as module
from riptide.indexing.training.workers import (
    WorkerGroup,
    announce_waiting,
    plan_workers,
    request_room,
    tell_missing_room,
)
from riptide.indexing.work.nodes import HEAD, NO_REPORTS, Reports

GPU = {"gpus": 1}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """The nodes that Ray says are alive."""
    found: list[dict[str, int]] = []
    gone = {"Alive": False, "Resources": {"CPU": 99, "GPU": 9}}
    monkeypatch.setattr(ray, "nodes", lambda: [gone, *({"Alive": True, "Resources": node} for node in found)])
    return found


@pytest.mark.parametrize(
    ("workers", "cpus", "options", "there", "gpus", "told"),
    [
        (2, 2, {}, [{"CPU": 4}], 0, None),
        (2, 3, {}, [{"CPU": 4}, {"CPU": 4}], 0, None),
        (2, 2, {}, [{"CPU": 4, "GPU": 2}], 1, None),
        (2, 2, {"gpus": 0}, [{"CPU": 4, "GPU": 2}], 0, None),
        (8, 2, {"min_workers": 4}, [{"CPU": 32, "GPU": 7}], 1, "starts with 7 of 8 workers of 2 CPUs and 1 GPU; "),
        (2, 2, {}, [{"CPU": 8, "GPU": 1}], 0, "trains on CPUs: the cluster has GPUs, but room for only 1 of "),
        (2, 2, {}, [{"CPU": 2, "GPU": 2}, {"CPU": 8}], 0, "room for only 1 of 2 workers"),
    ],
)
def test_gpus_are_taken_by_all_workers_or_by_none(
    nodes: list[dict[str, int]],
    workers: int,
    cpus: int,
    options: dict[str, Any],
    there: list[dict[str, int]],
    gpus: int,
    told: str | None,
) -> None:
    nodes += there
    said: list[str] = []
    assert plan_workers(workers, cpus, Reports(said.append), **options).gpus == gpus
    assert [told in line for line in said] == ([True] if told else [])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("workers", "cpus", "options", "there", "told"),
    [
        (2, 3, {}, [{"CPU": 5}, {"CPU": 1}], "parameter workers 2: the nodes have 6 CPUs, room for 1 of 2 workers"),
        (1, 8, {}, [{"CPU": 4}, {"CPU": 4}], "parameter cpus 8: expected at most 4, the cores of the largest node"),
        (2, 2, GPU, [{"CPU": 16, "GPU": 1}], "the nodes have 16 CPUs and 1 GPU, room for 1 of 2 workers of 2 CPUs and"),
        (1, 2, {"labels": {"kind": "gpu"}}, [{"CPU": 16}], "parameter node_label kind=gpu: no node has it"),
    ],
)
def test_too_many_workers_are_refused(
    nodes: list[dict[str, int]],
    workers: int,
    cpus: int,
    options: dict[str, Any],
    there: list[dict[str, int]],
    told: str,
) -> None:
    nodes += there
    with pytest.raises(InputError) as raised:
        plan_workers(workers, cpus, NO_REPORTS, **options)
    assert told in str(raised.value)


@pytest.mark.parametrize("come", [0, 1, 2])
def test_a_run_waits_for_the_nodes_of_an_autoscaler(
    nodes: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch, come: int
) -> None:
    """No new node is too few, one is enough for min_workers, two are enough for all workers."""
    waits: list[float | None] = []

    def add_nodes(group: WorkerGroup, wait_s: float | None) -> None:
        waits.append(wait_s)
        nodes.extend([{"CPU": 8, "GPU": 1}] * come)

    monkeypatch.setattr(module, "request_room", add_nodes)
    nodes.append({HEAD: 1})
    said: list[str] = []
    wanted: dict[str, Any] = {"gpus": 1, "min_workers": 1, "wait_s": None if come else 7.0}
    if come:
        assert plan_workers(2, 8, Reports(said.append), **wanted).capacity == come
    else:
        with pytest.raises(InputError, match="room for 0 of 1 worker of 8 CPUs and 1 GPU, after 7 s"):
            plan_workers(2, 8, Reports(said.append), **wanted)
    assert waits == [None if come else 7.0]
    assert "waits up to" in said[0]


@pytest.mark.cluster
def test_room_is_requested_by_empty_actors_that_end(local_ray: None) -> None:
    """There is room for two at once; a third one waits until the time is over."""
    for workers, wait_s in ((2, 60.0), (3, 0.5)):
        request_room(WorkerGroup(workers=workers, min_workers=1, cpus=1, gpus=0), wait_s)
    assert all_cores_free()


def test_the_user_is_told_once_that_workers_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0})
    group = WorkerGroup(workers=2, min_workers=2, cpus=1, gpus=0)
    said, started, lines = threading.Event(), threading.Event(), []

    def say(line: str) -> None:
        lines.append(line)
        said.set()

    with announce_waiting(group, started, say):
        assert said.wait(60)
    assert lines == ["waits for 2 workers of 1 CPU; free now: 1 CPU"]
    started.set()
    tell_missing_room(group, started, say)
    assert len(lines) == 1
