"""Owners of tokens: their names, rates, quotas and shares of the queues, and the lines about changes that they make."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from riptide.base.errors import InputError
from riptide.serve import callers
from riptide.serve.callers import Caller
from riptide.serve.http.guard import Tokens
from riptide.serve.release.release import Release
from riptide.serve.release.release_tasks import ServedTask
from riptide.serve.service.audit import log_change
from riptide.serve.service.batch_queues import Batcher
from riptide.serve.service_errors import OverloadedError

USER, ADMIN = "user-0123456789abcdef", "admin-0123456789abcdef"


def test_a_rate_holds_on_average_and_a_large_request_is_paid_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(callers, "time", SimpleNamespace(monotonic=lambda: now))
    caller = Caller("reports", rate=10)
    caller.take(4)
    caller.take(40)
    with pytest.raises(OverloadedError, match="more than 10 queries/s; try again in 4 s") as refusal:
        caller.take(1)
    assert refusal.value.retry_after == 4
    caller.give_back(40)
    caller.take(40)
    now += 3.5
    caller.take(1)
    now += 3600
    caller.take(10)
    with pytest.raises(OverloadedError):
        caller.take(1)
    Caller("shop").take(10**9)


def test_a_quota_holds_until_midnight(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 20_000 * 86_400 - 90.5
    monkeypatch.setattr(callers, "time", SimpleNamespace(time=lambda: now, monotonic=lambda: now))
    caller = Caller("reports", rate=1, quota=1_000)
    assert (caller.remaining, Caller("shop").remaining) == (1_000, None)
    caller.take(990)
    with pytest.raises(OverloadedError, match="queries/s"):  # a refused query does not count
        caller.take(5)
    now += 0.5
    caller.rate = None
    assert caller.remaining == 10
    caller.take(50)
    with pytest.raises(OverloadedError, match="more than 1,000 queries per day; try again in 90 s") as refusal:
        caller.take(1)
    assert (refusal.value.retry_after, caller.remaining) == (90, 0)
    now += 90
    assert caller.remaining == 1_000
    caller.take(1)
    assert caller.remaining == 999


def test_a_share_leaves_the_rest_of_the_queue_to_others() -> None:
    async def run() -> None:
        may_end, begun = threading.Event(), threading.Event()

        def double(items: list[int]) -> list[int]:
            begun.set()
            assert may_end.wait(30)
            return [2 * item for item in items]

        batcher: Batcher[int, int] = Batcher(double, max_batch=1, max_waiting=8)
        shop, reports = Caller("shop"), Caller("reports", share=0.25, quota=100)
        results = [asyncio.ensure_future(batcher.submit(0, math.inf, shop))]
        await asyncio.sleep(0)
        await asyncio.to_thread(begun.wait, 30)
        results += [asyncio.ensure_future(batcher.submit(number, math.inf, reports)) for number in (1, 2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="more than 25% of the queue"):
            await batcher.submit(3, math.inf, reports)
        reports.take(1)  # in a queue before this one
        with pytest.raises(OverloadedError):
            await batcher.submit_all([3], math.inf, reports, is_counted=True)
        assert reports.remaining == 100 - 2
        results += [asyncio.ensure_future(batcher.submit(number, math.inf, shop)) for number in (4, 5)]
        await asyncio.sleep(0)
        assert len(batcher) == 4
        may_end.set()
        assert [result for result, _ in await asyncio.gather(*results)] == [0, 2, 4, 8, 10]
        assert (await batcher.submit_all([1, 2, 3], math.inf, reports))[2][0] == 6
        await batcher.submit_all([1], math.inf, reports, is_counted=True)
        assert reports.remaining == 100 - 2 - 3
        batcher.close()

    asyncio.run(run())


def test_tokens_belong_to_owners(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    entry = {"name": "shop", "token": USER, "rate": 5, "share": 0.5, "quota": 100}
    file.write_text(
        json.dumps({"user": [entry, "unnamed-0123456789abcdef"], "admin": [{"name": "anna", "token": ADMIN}]})
    )
    tokens = Tokens.read(str(file))
    owner = tokens.owner(f"Bearer {USER}")
    assert (owner.name, owner.rate, owner.share, owner.quota) == ("shop", 5, 0.5, 100)
    assert tokens.owner("Bearer unnamed-0123456789abcdef").name == "user-2"
    assert (tokens.owner(f"bearer {ADMIN} ").name, tokens.allows(f"Bearer {ADMIN}", "admin")) == ("anna", True)
    assert tokens.owner(None).name == Tokens().owner(None).name == "anonymous"


@pytest.mark.parametrize(
    ("case", "entries"),
    [
        ("a token without a name", [{"token": USER}]),
        ("a token with an unknown field", [{"name": "shop", "token": USER, "rates": 5}]),
        ("a token whose rate is not a number above 0", [{"name": "shop", "token": USER, "rate": 0}]),
        ("a token whose rate is infinite", [{"name": "shop", "token": USER, "rate": math.inf}]),
        ("a token whose rate is no number", [{"name": "shop", "token": USER, "rate": math.nan}]),
        ("a token whose rate is the smallest number", [{"name": "shop", "token": USER, "rate": 5e-324}]),
        ("a token whose rate has 400 digits", [{"name": "shop", "token": USER, "rate": 10**400}]),
        ("a token whose share is the smallest number", [{"name": "shop", "token": USER, "share": 5e-324}]),
        ("a token that is given as a rate, too", [{"name": "shop", "token": USER, "rate": USER}]),
        ("a token whose share is above 1", [{"name": "shop", "token": USER, "share": 50}]),
        ("a token whose quota is not a whole number", [{"name": "shop", "token": USER, "quota": 1.5}]),
        ("a token whose quota is 0", [{"name": "shop", "token": USER, "quota": 0}]),
        ("a token whose name has a line break", [{"name": "shop\nanna", "token": USER}]),
        ("two tokens with one name", [{"name": "shop", "token": USER}, {"name": "shop", "token": ADMIN}]),
        ("one token of two owners", [{"name": "shop", "token": USER}, {"name": "reports", "token": USER}]),
        ("a token of few characters", [{"name": "shop", "token": "secret"}]),
    ],
)
def test_tokens_that_cannot_be_used_are_refused_without_showing_them(
    tmp_path: Path, documented: Callable[..., None], case: str, entries: list[dict[str, object]]
) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps({"user": entries}))
    with pytest.raises(InputError) as caught:
        Tokens.read(str(file))
    line = f"{caught.value}"
    assert not any(str(entry["token"]) in line for entry in entries)
    documented("Serving a store", f"`--tokens` with {case}", line, 1)


def test_a_change_is_one_line_with_who_what_before_and_after(caplog: pytest.LogCaptureFixture) -> None:
    base = ServedTask("default", None, "minilm", "minilm", None)
    before = Release("model", {}, (base,), {"index/minilm/g0000": "a"})
    task = ServedTask("legal", "legal.7d21", "minilm", "minilm", None)
    after = Release("model", {}, (base, task), {"index/minilm/g0000": "a", "prompts/legal.7d21": "b"})
    with caplog.at_level(logging.INFO, "riptide.audit"):
        log_change(Caller("anna"), "put task legal", before, after)
        log_change(Caller("anna"), "delete task legal", after, before)
    put, deleted = caplog.messages
    assert put == (
        f"anna: put task legal: release {before.id} -> {after.id}: task legal: none -> prompt legal.7d21, "
        "embeddings minilm, index minilm; artifacts: prompts/legal.7d21"
    )
    assert f"release {after.id} -> {before.id}: task legal: prompt legal.7d21" in deleted
