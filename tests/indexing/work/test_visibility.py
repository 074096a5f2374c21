"""A node sees the store if it sees a file that the driver keeps there; a folder of the same path is not enough."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from riptide.base.errors import StorageError
from riptide.indexing.store.store import Store
from riptide.indexing.work import ray_tasks
from riptide.indexing.work.ray_actors import RayActors
from riptide.indexing.work.ray_tasks import RayTasks
from riptide.indexing.work.visibility import StoreMarker, mark_store
from riptide.indexing.work.worker_tasks import ONE_CORE, Allocation, Report, WorkerRequest, WorkerResources

LINE = (
    "does not see the store {store}: put it on a file system that all nodes mount at this path, or on S3 "
    "(s3://bucket/prefix)"
)


def test_a_folder_of_the_same_path_is_not_the_store(tmp_path: Path) -> None:
    folder, away = tmp_path / "store", tmp_path / "away"
    store = Store(str(folder))
    store.storage.put("corpus/g0000/manifest.begun.json", b"the same bytes on every machine")
    with mark_store(store) as marker:
        assert marker is not None
        marker.check()
        folder.rename(away)
        store.storage.put("corpus/g0000/manifest.begun.json", b"the same bytes on every machine")
        with pytest.raises(StorageError) as raised:
            marker.check()
        assert str(raised.value) == f"this node {LINE.format(store=folder)}"


def test_a_marker_lasts_as_long_as_the_work_and_is_no_part_of_the_store(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    with mark_store(store) as marker:
        assert marker is not None
        assert store.storage.is_empty()
        store.storage.delete(marker.key)  # as `store gc` does with a temporary file that is an hour old
        marker.renew()
        assert marker.is_visible()
    assert not marker.is_visible()
    assert [path.name for path in tmp_path.rglob("*")] == [".tmp"]


def test_a_store_that_cannot_be_written_is_not_checked(tmp_path: Path) -> None:
    (tmp_path / ".tmp").touch()  # no folder for temporary files can be made
    with mark_store(Store(str(tmp_path))) as marker:
        assert marker is None


@dataclass(frozen=True)
class Result:
    """What a worker returns."""

    number: int


@dataclass(frozen=True)
class Echo:
    """Returns its items."""

    resources: WorkerResources = ONE_CORE

    def open(self, allocation: Allocation) -> Callable[[int, Report], Result]:
        return lambda item, report: Result(item)


@pytest.mark.cluster
@pytest.mark.parametrize(
    "start",
    [
        lambda runner: list(runner.run(Echo(), [1])),
        lambda runner: list(runner.run(Echo(WorkerResources(calls=2)), [1])),
        lambda runner: runner.run_on_first_available(Echo(), 1, 1),
    ],
    ids=["tasks", "actors", "first"],
)
def test_a_worker_does_not_open_on_a_node_that_does_not_see_the_store(
    start: Callable[[RayTasks], object], local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker is in another folder, as for a node that has a folder of its own at the path of the store."""
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this file
    store = Store(str(tmp_path / "store"))

    @contextlib.contextmanager
    def mark_another_folder(store: Store) -> Iterator[StoreMarker]:
        with mark_store(Store(str(tmp_path / "other"))) as marker:
            assert marker is not None
            yield StoreMarker(store, marker.key)

    monkeypatch.setattr(ray_tasks, "mark_store", mark_another_folder)
    with pytest.raises(StorageError) as raised:
        start(RayActors(WorkerRequest(max_workers=1), store=store))
    assert str(raised.value) == f"this node {LINE.format(store=store.url)}"
