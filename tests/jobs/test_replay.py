"""Saved requests get the same hits from the same release again, and other hits are reported."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from ready_client import serving
from serving import query_texts

import riptide
from riptide.base.errors import InputError
from riptide.indexing.files import limits
from riptide.indexing.store.store import Store
from riptide.jobs import replay
from riptide.jobs.replay import Replayed, compare_ids
from riptide.serve.client import Client, ServerError
from riptide.serve.one_process import open_local
from riptide.serve.release.live import live_release_id
from riptide.serve.service.service_options import ServiceOptions

Done = Callable[..., str]


@pytest.fixture
def store(served: Path, tmp_path: Path) -> Store:
    return Store(str(shutil.copytree(served, tmp_path / "root") / "store"))


@pytest.fixture
def bodies(served: Path) -> list[dict[str, Any]]:
    texts = list(query_texts(served).values())
    return [
        {"query": texts[0], "k": 5},
        {"query": texts[1], "k": 3, "mode": "hybrid", "filter": {"lang": "en"}},
        {"queries": [texts[2]], "source": "bm25+exact:enc"},
    ]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_requests_of_a_release_are_replayed_after_the_store_has_grown(
    store: Store, bodies: list[dict[str, Any]], tmp_path: Path, done: Done, refused: Done, monkeypatch: Any
) -> None:
    live = live_release_id(store)
    assert live is not None
    with serving(open_local(store, ServiceOptions(threads=1), device="cpu")) as client:
        answers = [client.post("/v1/search", json={**body, "release": live[0]}).json() for body in bodies]
        other = client.post("/v1/search", json={**bodies[0], "release": "0" * 16})
        assert other.status_code == 409
        assert f"release {'0' * 16}: this server's live release is {live[0]}" in other.json()["error"]["message"]
        assert replay_on(client, bodies, monkeypatch, done, refused, tmp_path) == "3 requests, 3 equal"
    assert {answer["release"] for answer in answers} == {live[0]}
    found = [[hit["id"] for hit in answer["results"][0]["hits"]] for answer in answers]

    requests = write_lines(tmp_path / "requests.jsonl", [{"request": body} for body in bodies])
    expected = tmp_path / "expected.jsonl"
    at = ("replay", "--store", store.url, "--release", live[0])
    done(*at, requests, "--write", expected)
    rows = [json.loads(line) for line in expected.read_text().splitlines()]
    assert [[hit["id"] for hit in row["hits"]] for row in rows] == found
    assert [row["request"] for row in rows] == bodies

    (tmp_path / "gone").write_text(f"{found[0][1]}\n")
    done("import_corpus", "--store", store.url, "--delete", tmp_path / "gone")
    assert "3 requests, 3 equal" in done(*at, expected)  # the release is as it was before the deletion
    replayed = riptide.Store(store.url).replay(expected, release=live[0], limit=2)
    assert (replayed.release, replayed.changed, len(replayed.requests)) == (live[0], [], 2)
    assert [each.hits for each in replayed.requests] == found[:2]
    rows[0]["hits"].reverse()
    rows[1]["hits"][1] = {"id": "nowhere"}
    write_lines(expected, rows)
    out = done(*at, expected, "--max-changed", 2)
    assert f"line 1: moved: {found[0][4]} 1 -> 5" in out
    assert "line 2: lost: nowhere\n" in out
    assert out.endswith("3 requests, 1 equal, 1 with moved hits, 1 with lost hits\n")
    assert refused(*at, expected).endswith("1 with lost hits; expected at most --max-changed 0")
    replayed = asyncio.run(replay_in_loop(store.url, expected, live[0]))
    assert [(each.line, each.verdict, each.hits) for each in replayed.changed] == [
        (1, "moved", found[0]),
        (2, "lost", found[1]),
    ]
    assert out == "".join(f"line {each.line}: {each.verdict}: {each.difference}\n" for each in replayed.changed) + (
        f"{replayed.summary}\n"
    )
    shutil.rmtree(Path(store.url) / "index/idx")
    assert "index/idx" in refused(*at, expected)


async def replay_in_loop(url: str, file: Path, release: str) -> Replayed:
    """Replays a file by the method of a store while an event loop runs, as in a notebook."""
    return riptide.Store(url).replay(file, release=release)


def replay_on(
    client: TestClient, bodies: list[dict[str, Any]], monkeypatch: Any, done: Done, refused: Done, folder: Path
) -> str:
    """Replays requests on a server, and returns the counts that the job printed."""

    def post(request: dict[str, Any]) -> dict[str, Any]:
        return client.post("/v1/search", json=request).json()

    ignored = {"release": "f" * 16, "explain": True, "allow_partial": True, "timeout_ms": 1}
    rows = [{"request": body | ignored, "hits": post(body)["results"][0]["hits"]} for body in bodies]
    command = ("replay", write_lines(folder / "saved.jsonl", rows), "--url", "http://127.0.0.1:1")
    refusals, releases, tokens = [(503, 0.0), (429, 0.0)], ["other"], set[str | None]()

    def post_to_busy_server(self: Client, request: dict[str, Any]) -> dict[str, Any]:
        tokens.add(self._token)
        if refusals:
            status, wait_s = refusals.pop()
            raise ServerError(status, "busy", retry_after=wait_s)
        return {**post(request), **({"release": releases.pop()} if releases else {})}

    def replay_by_method(url: str, **options: Any) -> Replayed:
        return riptide.Store(folder / "no-store").replay(folder / "saved.jsonl", url=url, **options)

    monkeypatch.setenv("RIPTIDE_USER_TOKENS", "a-user-token-of-this-test")
    monkeypatch.setattr(Client, "search_response", post_to_busy_server)
    error = refused(*command)
    assert "saved.jsonl:2: release " in error
    assert "answers, and release other answered the lines before: expected one release" in error
    refusals.append((429, 3600.0))  # a quota that is used up
    assert refused(*command).endswith("http://127.0.0.1:1: 429: busy")
    refusals.extend([(503, 0.0)] * 6)
    assert refused(*command).endswith("http://127.0.0.1:1: 503: busy")
    assert (refusals, tokens) == ([], {"a-user-token-of-this-test"})
    assert replay_by_method("http://127.0.0.1:1").summary.endswith("3 equal, 0 with moved hits, 0 with lost hits")
    with pytest.raises(InputError, match=r"release=x with url=http://y: a server answers by its live release"):
        replay_by_method("http://y", release="x")
    return done(*command).partition(": ")[2].partition(", 0 with moved")[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "found '{', expected a JSON object in UTF-8 on one line"),
        ('{"request": {"query": "x", "release": "\\ud800"}, "hits": []}', "expected a JSON object in UTF-8"),
        ("[1]", 'found no "request"'),
        ('{"request": {"query": "x", "kk": 3}, "hits": []}', "request.kk: Extra inputs are not permitted"),
        ('{"request": {"queries": ["x", "y"]}, "hits": []}', "request.queries: 2 queries, expected one"),
        ('{"request": {"query": "x"}}', 'hits: expected a list of objects with an "id"; --write FILE writes'),
        (
            '{"request": {"query": "x"}, "raised_settings": {"index:idx": 0}, "hits": []}',
            "raised_settings: found {'index:idx': 0}, expected nprobe or ef_search by source",
        ),
        ('{"request": {"query": "x", "task": "none"}, "hits": []}', "no task 'none'; the tasks are default"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, served: Path, tmp_path: Path, refused: Done) -> None:
    file = tmp_path / "saved.jsonl"
    file.write_text(f"\n{line}\n")
    error = refused("replay", "--store", served / "store", file)
    assert error.startswith(f"error: {file}:2: ")
    assert message in error


def test_options_that_do_not_fit(
    served: Path, tmp_path: Path, refused: Done, done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ("replay", "--store", served / "store")
    file = write_lines(tmp_path / "saved.jsonl", [{"request": {"query": "x"}, "hits": []}] * 3)
    live = live_release_id(Store(str(served / "store")))
    assert live is not None
    longer = tmp_path / "longer.jsonl"
    longer.write_bytes(file.read_bytes() + b"x" * 2_000)
    with monkeypatch.context() as patch:  # with --limit, the last line is not read
        patch.setattr(replay, "LINES_AT_ONCE", 2)
        patch.setattr(limits, "MAX_ROW_BYTES", 1_000)
        plan = done(*at, longer, "--plan", "--limit", 2).splitlines()
    assert plan == [f"requests  2 of {longer}", f"release   {live[0]}"]
    error = refused(*at, file, "--release", "f" * 16)
    assert f"--release {'f' * 16}: " in error
    assert error.endswith(f"has no such release; it has {live[0]}")
    assert "expected one of --store STORE and --url URL" in refused("replay", file)
    assert "a server answers by its live release" in refused("replay", file, "--url", "http://x", "--release", live[0])
    assert "No such file or directory" in refused(*at, tmp_path / "none")
    assert "/dev/zero: found a pipe, a socket or a device" in refused(*at, "/dev/zero")
    assert "no requests" in refused(*at, write_lines(tmp_path / "empty", []))


def test_verdicts() -> None:
    assert compare_ids(["a", "b"], ["a", "b"]) == ("equal", "")
    assert compare_ids(["a", "b"], ["b", "a"]) == ("moved", "a 1 -> 2, b 2 -> 1")
    assert compare_ids(["a"], ["a", "c"]) == ("moved", "new c")
    assert compare_ids(["a", "b"], ["b", "c"]) == ("lost", "a")
    assert compare_ids([], []) == ("equal", "")
