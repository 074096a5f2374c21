"""`serve_search` on a store whose live release is damaged: one line, and --renew repairs it."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from riptide.indexing.maintenance.verification import verify
from riptide.indexing.store.live_release import CURRENT
from riptide.indexing.store.store import Store
from riptide.jobs import serve_search
from riptide.serve.release.live import read_live_release, save_as_live
from riptide.serve.release.planning import plan_release

DAMAGES: dict[str, Any] = {
    "serving/current.json is empty": lambda data: b"",
    "serving/current.json is truncated": lambda data: data[: len(data) // 2],
    "serving/current.json was changed": lambda data: data.replace(b'"before"', b'"befora"'),
    "the live release is missing": None,
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_live_release_is_one_line_and_renew_repairs_it(
    world, refused, done, documented, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    store, at = Store(str(world.store)), ("--store", world.store, "--port", 0)
    first, _ = plan_release(store, tasks=["default"])
    assert save_as_live(store, first, None)
    if DAMAGES[case]:
        store.storage.put(CURRENT, DAMAGES[case](store.storage.read(CURRENT)))
    else:
        shutil.rmtree(world.store / "releases" / first.id)
    documented("Releases", case, refused("serve_search", *at), 1)
    assert "repairs   " in done("serve_search", *at, "--renew", "--plan")
    refused("serve_search", *at)

    async def serve(store: Store, *others: Any) -> None:
        serve_search.make_live(store, others[2], lambda: None)

    monkeypatch.setattr(serve_search, "serve", serve)
    assert f"release   {first.id} (new) of {store.url}" in done("serve_search", *at, "--renew")
    assert read_live_release(store)[0] == first
    assert not [finding for finding in verify(store) if finding.problem]
