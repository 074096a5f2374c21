"""Ray tasks over many items: all of them, bounded ahead, the first failure as it was raised."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from indexing.tasks import node_cores, num_slots, run_tasks
from retriever.errors import InputError


@pytest.fixture(scope="module", autouse=True)
def _local_ray() -> Iterator[None]:
    import logging

    import ray
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this file
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    if started:
        ray.shutdown()


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

    tasks = run_tasks(multiply, endless(), 1, max_in_flight=3)
    for taken in range(1, 8):
        next(tasks)
        assert drawn <= taken + 3
    tasks.close()
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


def test_cores_and_slots_are_those_of_the_nodes() -> None:
    cores = node_cores()
    assert num_slots(1) >= cores >= 1
    assert num_slots(cores) >= 1
    assert num_slots(10_000) == 1  # never none: the task then waits for a node that can
