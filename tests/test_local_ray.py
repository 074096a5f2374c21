"""The Ray of a test session is replaced if it still holds cores for a driver that has ended."""

from __future__ import annotations

import sys

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
