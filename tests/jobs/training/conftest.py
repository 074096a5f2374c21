"""Training jobs run in this process; those that ask for Ray run on the Ray of the test session."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from mined import mine

from riptide.indexing.store.artifact import Artifact, ArtifactPart
from riptide.indexing.store.store import Store


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no cluster; a private Ray is that of this process."""

    def find_cluster(*, private: bool = False) -> str | None:
        return "the Ray of this process" if private else None

    monkeypatch.setattr("riptide.jobs.common.session.find_cluster", find_cluster)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often this process opens each part of a complete artifact, as ARTIFACT/PART."""
    counts: Counter[str] = Counter()
    local_path = Artifact.local_path

    def count(self: Artifact, part: ArtifactPart | str) -> Path:
        counts[f"{self.key}/{part if isinstance(part, str) else part.name}"] += 1
        return local_path(self, part)

    monkeypatch.setattr(Artifact, "local_path", count)
    return counts


@pytest.fixture
def mined(world) -> Store:
    """The finished store, with negatives/hand."""
    store = Store(str(world.store))
    mine(store)
    return store
