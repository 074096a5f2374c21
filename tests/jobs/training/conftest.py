"""Training jobs run in this process; those that ask for Ray run on the Ray of the test session."""

from __future__ import annotations

import pytest
from mined import mine

from riptide.indexing.store.store import Store


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no cluster; a private Ray is that of this process."""

    def find_cluster(*, private: bool = False) -> str | None:
        return "the Ray of this process" if private else None

    monkeypatch.setattr("riptide.jobs.common.session.find_cluster", find_cluster)


@pytest.fixture
def mined(world) -> Store:
    """The finished store, with negatives/hand."""
    store = Store(str(world.store))
    mine(store)
    return store
