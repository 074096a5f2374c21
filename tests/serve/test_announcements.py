"""How a replica tells the others on Ray Serve which release is live, and what its client learns of their failures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError

from riptide.indexing.store.live_release import CURRENT, LiveRecord
from riptide.indexing.store.store import Store
from riptide.serve import deployments
from riptide.serve.one_process import open_local
from riptide.serve.service.changes import ReleaseChanges
from riptide.serve.service.service_options import ServiceOptions
from riptide.serve.service_errors import LostError, StoreError

UNREADABLE = StoreError("dense", "files are missing")


def announce(outcome: list[Any] | Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Announces a release to replicas with these results; an exception: of the broadcast itself."""

    async def results_async(**_: Any) -> list[Any]:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    handle = SimpleNamespace(broadcast=lambda method: SimpleNamespace(results_async=results_async))
    monkeypatch.setattr(deployments.ray_serve, "get_deployment_handle", lambda name: handle)
    asyncio.run(deployments.refresh_ingresses())


@pytest.mark.parametrize(
    "outcome", [[None, None], [None, ActorDiedError()], DeploymentUnavailableError("ingress")], ids=str
)
def test_a_lost_replica_does_not_fail_a_change_that_is_live(
    outcome: list[Any] | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(outcome, monkeypatch)


def test_the_failure_of_another_replica_is_that_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match=r"^dense: files are missing$"):
        announce([None, RayTaskError("refresh", "", UNREADABLE)], monkeypatch)


def test_a_replica_that_is_too_slow_is_no_fault_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LostError):
        announce(TimeoutError("Timed out waiting for broadcast results."), monkeypatch)


@pytest.mark.parametrize("content", [LiveRecord("0" * 16, ()).document(), b"{"])
def test_a_live_release_that_a_replica_cannot_read_is_no_mistake_of_the_client(content: bytes, tmp_path: Path) -> None:
    (tmp_path / CURRENT).parent.mkdir()
    (tmp_path / CURRENT).write_bytes(content)

    async def refresh() -> None:
        await ReleaseChanges(open_local(Store(str(tmp_path)), ServiceOptions(threads=1), device="cpu")).refresh()

    with pytest.raises(StoreError):
        asyncio.run(refresh())
