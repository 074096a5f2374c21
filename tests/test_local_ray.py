"""The Ray of a test session is replaced if it holds cores of an ended driver; a node that Ray gives up starts again."""

from __future__ import annotations

import sys

import local_cluster
import local_ray
import pytest
from local_ray import SessionRay


class Holder:
    """An actor that outlives its driver, as a task or actor that Ray has lost would."""

    def ping(self) -> int:
        """Answers once the actor holds its core."""
        return 1


@pytest.mark.cluster
@pytest.mark.nodes
def test_a_ray_that_holds_cores_of_an_ended_driver_is_replaced(
    ray_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this file
    monkeypatch.setattr(local_ray, "FREE_S", 2.0)
    session_ray = SessionRay(ray_variables)
    try:
        session_ray.connect()
        first = session_ray.address()
        actor = ray.remote(num_cpus=1)(Holder).options(name="holder", namespace="tests", lifetime="detached").remote()
        assert ray.get(actor.ping.remote()) == 1
        ray.shutdown()
        session_ray.connect()
        assert session_ray.address() != first
        assert local_ray.all_cores_free()
    finally:
        ray.shutdown()
        session_ray.close()


def test_a_node_that_ray_gives_up_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head keeps its address, which clients know; a worker gets another one."""
    starts: list[str] = []
    given_up = ["sh", "-c", "echo The current node timed out during startup; exit 1"]

    def command(own_address: str, *arguments: object, **options: object) -> list[str]:
        starts.append(own_address)
        return given_up if len(starts) % 3 else ["sh", "-c", "exec sleep 60"]

    monkeypatch.setattr(local_cluster, "node_command", command)
    monkeypatch.setattr(local_cluster.LocalCluster, "alive", lambda self: set(starts[2::3]))
    with local_cluster.local_cluster(workers=1) as cluster:
        assert [node.address for node in cluster.nodes] == [starts[2], starts[5]]
        assert starts[:3] == [local_cluster.HEAD] * 3
        assert len(set(starts[3:])) == 3
        with pytest.raises(AssertionError, match="timed out during startup"):
            cluster.add(starts=2)
