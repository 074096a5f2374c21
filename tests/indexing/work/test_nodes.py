"""What workers get of the nodes of a cluster, how many workers these hold, and what a job says while it waits."""

from __future__ import annotations

import time
from typing import Any

import pytest

from indexing.work import nodes
from indexing.work.nodes import HEAD, describe_waiting, node_cores, num_places, say_waiting
from indexing.work.ray_tasks import RayTasks
from indexing.work.tasks import ALL_CORES, Place, Resources

ANY_DEVICE = Resources(cores=None, gpus=None)


def nodes_of(monkeypatch: pytest.MonkeyPatch, *resources: dict[str, float]) -> None:
    """Makes Ray report these nodes, and a large one that is lost."""
    import ray

    every = [*({"Alive": True, "Resources": node} for node in resources), {"Alive": False, "Resources": {"CPU": 64.0}}]
    total = {name: sum(node.get(name, 0) for node in resources) for name in ("CPU", "GPU")}
    monkeypatch.setattr(ray, "nodes", lambda: every)
    monkeypatch.setattr(ray, "cluster_resources", lambda: total)


def test_places_are_counted_node_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(monkeypatch, {"CPU": 7.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 4.0}, {"CPU": 4.0}, {"memory": 1.0})
    assert [num_places(cores) for cores in (1, 2, 3, 7, 8)] == [13, 6, 3, 1, 0]
    assert [num_places(cores, gpus=1) for cores in (1, 2, 3, 8)] == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("resources", "all_cores", "any_device"),
    [
        ([{"CPU": 7.0}, {"CPU": 16.0}, {"memory": 1.0}], Place(7), Place(7)),
        ([{"CPU": 2.0, "GPU": 1.0}, {"CPU": 16.0}], Place(16), Place(2, "cuda")),
        ([{"CPU": 8.0, "GPU": 1.0}], Place(8), Place(4, "cuda")),
    ],
)
def test_all_cores_are_those_of_the_smallest_node_of_the_right_kind(
    resources: list[dict[str, float]], all_cores: Place, any_device: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes_of(monkeypatch, *resources)
    runner = RayTasks()
    assert (runner.place(ALL_CORES), runner.place(ANY_DEVICE)) == (all_cores, any_device)


def test_what_a_worker_gets_does_not_change_while_the_job_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(monkeypatch, {"CPU": 8.0})
    runner = RayTasks()
    before = runner.place(ALL_CORES), runner.place(ANY_DEVICE)
    nodes_of(monkeypatch, {"CPU": 8.0}, {"CPU": 2.0}, {"CPU": 4.0, "GPU": 1.0})
    assert (runner.place(ALL_CORES), runner.place(ANY_DEVICE)) == before
    assert node_cores() == 2


@pytest.mark.parametrize(
    ("resources", "lines"),
    [
        ([{HEAD: 1.0}], ["waits for 4 workers of 8 CPUs: 0 are there"]),
        ([{HEAD: 1.0, "CPU": 2.0}], ["waits for 4 workers of 8 CPUs: 0 are there"]),
        ([{HEAD: 1.0}, {"CPU": 8.0}], ["waits for 4 workers of 8 CPUs: 1 is there"]),
        ([{HEAD: 1.0, "CPU": 8.0}], []),  # a cluster that does not grow has started what it can
        ([{HEAD: 1.0}, {"CPU": 32.0}], []),
    ],
)
def test_a_job_says_what_it_waits_for(
    resources: list[dict[str, float]], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes_of(monkeypatch, *resources)
    monkeypatch.setattr(nodes, "WAIT_S", 0.01)
    said: list[Any] = []
    looks: list[int] = []

    def wanted() -> int:
        looks.append(4)
        return 4

    with say_waiting(said.append, 8, 0, wanted):
        while len(looks) < 3:
            time.sleep(0.001)
    assert said[:1] == lines


def test_the_line_counts_in_words() -> None:
    assert describe_waiting(1, 2, 1, 0) == "waits for 1 worker of 1 CPU and 2 GPUs: 0 are there"
