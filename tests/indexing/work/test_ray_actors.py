"""Pools of workers in Ray actors: their size, their growth, their errors, and lost workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from riptide.base.errors import InputError
from riptide.indexing.embeddings.corpus_encoding import CALLS
from riptide.indexing.work.nodes import HEAD
from riptide.indexing.work.ray_actors import RayActors, choose_pool
from riptide.indexing.work.worker_tasks import ANY_WORKERS, Allocation, Report, WorkerRequest, WorkerResources
from riptide.telemetry.phases import take_measures

TWO_CALLS = WorkerResources(calls=CALLS)


def nodes_of(monkeypatch: pytest.MonkeyPatch, *nodes: dict[str, float]) -> None:
    """Makes Ray report these nodes, and a large one that is lost."""
    import ray

    head = [] if any(HEAD in node for node in nodes) else [{HEAD: 1.0, "CPU": 0.5}]
    every = [{"Alive": True, "Resources": node} for node in [*head, *nodes]]
    every.append({"Alive": False, "Resources": {"CPU": 1e5}})
    total = {name: sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU")}
    monkeypatch.setattr(ray, "nodes", lambda: every)
    monkeypatch.setattr(ray, "cluster_resources", lambda: total)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"cpus": 0}, "parameter cpus 0: expected at least 1"),
        ({"gpus": 2}, "parameter gpus 2: expected 0 or 1"),
        ({"gpus": -1}, "parameter gpus -1: expected 0 or 1"),
        ({"min_workers": 0}, "parameter min_workers 0: expected at least 1"),
        ({"max_workers": 0}, "parameter max_workers 0: expected at least 1"),
        (
            {"min_workers": 3, "max_workers": 2},
            "parameter min_workers 3: expected at most the 2 of parameter max_workers",
        ),
        ({"wait_s": -1}, "parameter wait -1: expected seconds, at least 0"),
    ],
)
def test_an_impossible_request_is_refused_in_one_line(options: dict[str, int], line: str) -> None:
    with pytest.raises(InputError) as raised:
        WorkerRequest(**options)
    assert str(raised.value) == line


def test_a_cluster_that_grows_may_bring_larger_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's cores count only if it has what else an encoder needs: the large one has no GPU."""
    nodes_of(monkeypatch, {HEAD: 1.0}, {"CPU": 2.0})
    large = WorkerRequest(max_workers=5, cpus=64, gpus=1)
    assert choose_pool(large) == large


@pytest.mark.parametrize(
    ("nodes", "each"),
    [
        ([1], 1),
        ([2], 2),
        ([4], 4),
        ([5], 5),
        ([7], 7),
        ([8], 4),
        ([11], 5),
        ([13], 4),
        ([64], 4),
        ([1, 64], 4),
        ([2, 2, 2], 2),
        ([7, 7], 7),
        ([3, 8], 2),
    ],
)
def test_encoders_with_packed_batches_share_the_cores_of_a_node_in_about_fours(
    nodes: list[int], each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes_of(monkeypatch, *({"CPU": float(cores), "memory": 2.0**40} for cores in nodes))
    assert choose_pool(ANY_WORKERS, packed=lambda: True) == WorkerRequest(cpus=each, gpus=0)
    assert choose_pool(ANY_WORKERS) == WorkerRequest(cpus=1, gpus=0)


def test_encoders_get_the_cores_that_go_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(monkeypatch, {"CPU": 8.0, "memory": 8 * 2.0**30})  # half of the memory holds four of a gibibyte
    assert choose_pool(ANY_WORKERS) == WorkerRequest(cpus=2, gpus=0)


@dataclass(frozen=True)
class Result:
    """What a worker returns."""

    square: int


@dataclass(frozen=True)
class Squares:
    """Squares numbers; refuses `bad`; the first worker that gets 1 ends its process."""

    folder: Path
    bad: int | None = None
    broken: bool = False
    resources: WorkerResources = TWO_CALLS

    def open(self, allocation: Allocation) -> Callable[[int, Report], Result]:
        if self.broken:
            raise InputError("the model is damaged")
        return self._square

    def _square(self, item: int, report: Report) -> Result:
        if item == self.bad:
            raise InputError(f"item {item} is bad")
        mark = self.folder / "died"
        if item == 1 and not mark.exists():
            mark.touch()
            os._exit(1)
        return Result(item * item)


@pytest.mark.cluster
def test_items_are_run_by_actors_and_those_of_a_lost_one_again(local_ray: None, tmp_path: Path) -> None:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this file
    runner = RayActors(WorkerRequest(max_workers=2))
    take_measures()
    found = sorted((item, row["square"]) for item, row in runner.run(Squares(tmp_path), range(6)))
    assert found == [(item, item * item) for item in range(6)]
    measures = take_measures()
    assert measures.keys() >= {"open", "compute"}, "the seconds of the workers"
    assert measures["lost_workers"] == 1
    assert (tmp_path / "died").exists()
    assert list(runner.run(Squares(tmp_path), [])) == []
    for task, line in (
        (Squares(tmp_path, bad=3), "item 3 is bad"),
        (Squares(tmp_path, broken=True), "the model is damaged"),
    ):
        with pytest.raises(InputError) as raised:
            list(runner.run(task, range(6)))
        assert str(raised.value) == line
