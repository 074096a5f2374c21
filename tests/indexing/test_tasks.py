"""Ray tasks over many items: all of them, bounded ahead, the first failure as it was raised."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.data import DataContext

from indexing import tasks
from indexing.encoding import AT_ONCE, GROWS_AT, Pool, choose_pool, set_up
from indexing.tasks import node_cores, num_slots, room, run_tasks
from retriever.errors import InputError


@pytest.fixture(scope="module", autouse=True)
def _tasks_of_this_file(local_ray: None) -> None:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this file


def multiply(item: int, factor: int) -> int:
    return item * factor


def fail_at(item: int, bad: int) -> int:
    if item == bad:
        raise InputError(f"item {item} is bad")
    return item


def die_once(item: int, folder: str) -> int:
    mark = Path(folder) / str(item)
    if item == 1 and not mark.exists():
        mark.touch()
        os._exit(1)
    return item


def wait_for(item: int, file: str) -> int:
    end = time.monotonic() + 60
    while not Path(file).exists():
        if time.monotonic() > end:
            raise TimeoutError(file)
        time.sleep(0.05)
    return item


def test_every_item_comes_back_once_with_its_result() -> None:
    found = list(run_tasks(multiply, range(20), 3))
    assert sorted(found) == [(item, item * 3) for item in range(20)]
    assert list(run_tasks(multiply, [], 3)) == []


def test_items_are_drawn_as_there_is_room() -> None:
    """An endless source is drawn no further ahead than it may be."""
    drawn = 0

    def endless() -> Iterator[int]:
        nonlocal drawn
        while True:
            drawn += 1
            yield drawn

    found = run_tasks(multiply, endless(), 1, max_in_flight=3)
    for taken in range(1, 8):
        next(found)
        assert drawn <= taken + 3
    found.close()
    assert drawn <= 10


def test_an_input_error_is_raised_as_one_and_ends_it() -> None:
    from jobs.cli import input_error

    drawn = iter(range(100))
    with pytest.raises(InputError) as raised:
        list(run_tasks(fail_at, drawn, 5, max_in_flight=2))
    assert str(input_error(raised.value)) == "item 5 is bad"
    assert next(drawn) < 10


def test_a_worker_that_is_killed_costs_its_item_another_try(tmp_path: Path) -> None:
    assert sorted(item for item, _ in run_tasks(die_once, range(3), str(tmp_path))) == [0, 1, 2]
    assert (tmp_path / "1").exists()


def test_a_worker_with_a_gpu_is_kept_for_the_next_task() -> None:
    """It holds a model. In a Ray of its own, which is told of a GPU that need not be there."""
    script = """
import logging, os, ray
from indexing.tasks import run_tasks
ray.init(num_cpus=1, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
print(len({pid for _, pid in run_tasks(lambda _: os.getpid(), range(6), num_gpus=1)}))
"""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    told = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=Path(tasks.__file__).parents[1], check=True,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert int(told.stdout) < 6


def test_room_is_counted_node_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    nodes = [{"CPU": 7.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 4.0}, {"CPU": 4.0}, {"memory": 1.0}]
    every = [*({"Alive": True, "Resources": node} for node in nodes), {"Alive": False, "Resources": {"CPU": 64.0}}]
    monkeypatch.setattr(ray, "nodes", lambda: every)
    assert [room(cores) for cores in (1, 2, 3, 7, 8)] == [13, 6, 3, 1, 0]
    assert [room(cores, gpus=1) for cores in (1, 2, 3, 8)] == [3, 2, 1, 0]
    assert num_slots(8) == 1


def test_cores_and_slots_are_those_of_the_nodes() -> None:
    cores = node_cores()
    assert num_slots(1) >= cores >= 1
    assert num_slots(cores) >= 1
    assert num_slots(10_000) == 1  # never none: the task then waits for a node that can


def test_a_cluster_that_grows_gets_more_before_any_task_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without cores gets four tasks, for its autoscaler to see; no task ends before the sixteenth item is drawn."""
    import ray

    sizes = [{}, {"CPU": 1.0}, {"CPU": 8.0}]
    looks: list[int] = []  # items drawn at each look
    drawn: list[int] = []

    def resources() -> dict[str, float]:
        looks.append(len(drawn))
        return sizes[min(len(looks), len(sizes)) - 1]

    def endless() -> Iterator[int]:
        while True:
            drawn.append(len(drawn))
            if len(drawn) == 16:
                (tmp_path / "go").touch()
            yield drawn[-1]

    monkeypatch.setattr(ray, "cluster_resources", resources)
    monkeypatch.setattr(tasks, "LOOK", 0.2)
    found = run_tasks(wait_for, endless(), str(tmp_path / "go"))
    next(found)
    assert looks[:3] == [0, 4, 4]
    assert len(drawn) == 16
    found.close()


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ((1, None, 0, 0), "--cpus 0: expected at least 1"),
        ((1, None, -2, 0), "--cpus -2: expected at least 1"),
        ((1, None, 1, 2), "--gpus 2: expected 0 or 1"),
        ((1, None, 1, -1), "--gpus -1: expected 0 or 1"),
        ((0, None, 1, 0), "--min-workers 0: expected at least 1"),
        ((3, 2, 1, 0), "--max-workers 2: expected at least the 3 of --min-workers"),
        ((1, 0, 1, 0), "--max-workers 0: expected at least the 1 of --min-workers"),
        ((1, None, 10_000, 0), "--cpus 10000: the largest node has 2 cores now; name --max-workers to wait"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_in_one_line(asked: tuple, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    nodes = [{"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": False, "Resources": {"CPU": 1e5}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    with pytest.raises(InputError) as raised:
        choose_pool(*asked)
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)


def test_a_pool_waits_for_larger_nodes_where_max_workers_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's cores count only where it has what else an encoder takes: the large one has no GPU."""
    import ray

    nodes = [{"CPU": 32.0}, {"CPU": 4.0, "GPU": 1.0}]
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": node} for node in nodes])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 36.0, "GPU": 1.0})
    assert choose_pool(1, 5, 64, 0) == Pool(1, 5, 64, 0)
    assert choose_pool(1, None, 16, 0) == Pool(1, 2, 16, 0)
    assert choose_pool(1, None, 4, 1) == Pool(1, 1, 4, 1)
    with pytest.raises(InputError, match="--cpus 5: the largest node with a GPU has 4 cores now"):
        choose_pool(1, None, 5, 1)


@pytest.mark.parametrize(
    ("nodes", "each"),
    [([1], 1), ([2], 2), ([4], 4), ([5], 5), ([7], 7), ([8], 4), ([11], 5), ([13], 4), ([64], 4), ([1, 64], 4),
     ([2, 2, 2], 2), ([7, 7], 7), ([3, 8], 2)],
)  # fmt: skip
def test_encoders_without_padding_share_a_nodes_cores_in_about_fours(
    nodes: list[int], each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    found = [{"Alive": True, "Resources": {"CPU": float(cores), "memory": 2.0**40}} for cores in nodes]
    monkeypatch.setattr(ray, "nodes", lambda: found)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": float(sum(nodes))})
    places = sum(cores // each for cores in nodes)
    assert choose_pool(1, None, None, None, packed=lambda: True) == Pool(1, places, each, 0)
    assert choose_pool(1, None, None, None) == Pool(1, sum(nodes), 1, 0)


def test_encoders_get_the_cores_that_go_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    node = {"CPU": 8.0, "memory": 8 * 2.0**30}  # half of it holds four of a gibibyte
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": node}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: node)
    assert choose_pool(1, None, None, None) == Pool(1, 4, 2, 0)


def test_a_pool_of_encoders_grows_while_all_of_it_is_busy() -> None:
    """By Ray Data's own rule, at the options that the encoding sets."""
    from unittest.mock import Mock

    from ray.data._internal.actor_autoscaler.default_actor_autoscaler import DefaultActorAutoscaler
    from ray.data.context import AutoscalingConfig

    scaler = DefaultActorAutoscaler.__new__(DefaultActorAutoscaler)
    for threshold, more in ((GROWS_AT, True), (AutoscalingConfig().actor_pool_util_upscaling_threshold, False)):
        scaler._actor_pool_scaling_up_threshold = threshold
        pool = Mock(current_size=lambda: 1, get_pool_util=lambda: AT_ONCE / AT_ONCE)
        assert (scaler._compute_upscale_delta(pool, Mock()) > 0) == more
    context = DataContext.get_current()
    before = context.autoscaling_config.actor_pool_util_upscaling_threshold
    try:
        set_up(context)
        assert context.autoscaling_config.actor_pool_util_upscaling_threshold == GROWS_AT
    finally:
        context.autoscaling_config.actor_pool_util_upscaling_threshold = before
