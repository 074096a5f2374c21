"""Releases beside other servers and after kills: what is live is complete, and what another may make live stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from riptide.base.errors import InputError
from riptide.indexing.maintenance import retention
from riptide.indexing.maintenance.retention import (
    GIVEN,
    GRACE_S,
    expired_prompts,
    expired_releases,
    remove_prompt,
    remove_release,
)
from riptide.indexing.maintenance.verification import verify
from riptide.indexing.storage.cache import CorruptError
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.live_release import CURRENT, LiveRecord, parse_live_record
from riptide.indexing.store.store import Store
from riptide.serve.release import live as live_module
from riptide.serve.release.live import (
    discard_release,
    live_release_id,
    read_live_release,
    release_to_repair_from,
    save_as_live,
)
from riptide.serve.release.release import Release
from riptide.serve.release.release_tasks import ServedTask


def make(store: Store, kind: str, name: str, **config: object) -> Artifact:
    with store.create(kind, name, config=config) as draft:
        if not draft.is_complete:
            draft.commit("file-00000", ".file", lambda path: path.write_bytes(name.encode()), rows=0, path="file")
    return store.open(kind, name)


def put_prompt(store: Store, name: str) -> Artifact:
    """A prompt as it comes over HTTP."""
    return make(store, "prompts", name, **{GIVEN: name})


def release_of(store: Store, *prompts: str) -> Release:
    """A release with a task for each prompt, which is put if it is missing."""
    parts = [make(store, "embeddings", "enc/g0000"), *(put_prompt(store, prompt) for prompt in prompts)]
    tasks = tuple(ServedTask(name, name, "enc") for name in prompts)
    return Release(
        "bert", {}, (ServedTask("default", None, "enc"), *tasks), {part.key: part.fingerprint for part in parts}
    )


def make_live(store: Store, release: Release) -> None:
    found = live_release_id(store)
    assert save_as_live(store, release, found[1] if found else None)


def problems(store: Store) -> list[str]:
    return [finding.problem for finding in verify(store) if finding.problem]


def check_live(store: Store, release: Release) -> None:
    """The release is live, loads, and everything that it consists of is complete."""
    live, _ = read_live_release(Store(store.url))
    assert live == release
    for key in release.fingerprints:
        release.artifact(store, key)
    assert problems(store) == []


def check_live_but(store: Store, release: Release, missing: str) -> None:
    """The release is live; `verify` finds that an artifact of another one is missing, if anything."""
    live, _ = read_live_release(Store(store.url))
    assert live == release
    assert all(missing in problem for problem in problems(store))


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server whose clock is hours ahead: it removes at once what nothing names."""
    monkeypatch.setattr(retention, "GRACE_S", -60.0)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """later(seconds): so much time passes for what looks at the age of releases."""

    def pass_by(seconds: float) -> None:
        now = retention.time.time() + seconds
        monkeypatch.setattr(retention, "time", SimpleNamespace(time=lambda: now))

    return pass_by


Hook = Callable[[str, str], None]


class Hooked:
    """A storage that calls `before(method, key)` and `after(method, key)` around each write."""

    WRITES = ("put", "put_new", "compare_and_swap", "delete")

    def __init__(self, storage: Any, before: Hook, after: Hook):
        self._storage, self._before, self._after = storage, before, after

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._storage, name)
        if name not in self.WRITES:
            return method

        def write(key: str, *arguments: Any) -> Any:
            self._before(name, key)
            result = method(key, *arguments)
            self._after(name, key)
            return result

        return write


def nothing(*_: str) -> None:
    pass


def hooked(url: str, *, before: Hook = nothing, after: Hook = nothing) -> Store:
    store = Store(url)
    store.storage = Hooked(store.storage, before, after)
    return store


@pytest.mark.parametrize("prompts", [(), ("legal.0123",)])
@pytest.mark.parametrize("moment", ["after the save", "before the swap", "after the swap"])
def test_a_release_that_another_server_discards_is_complete_once_it_is_live(
    store_url: str, no_grace: None, moment: str, prompts: tuple[str, ...]
) -> None:
    """A saves, B discards the same release, A swaps. If A's prompt is lost too, A puts it again, as the server does."""
    other = Store(store_url)
    first = release_of(other)
    make_live(other, first)
    second = Release("other", {}, *release_of_parts(other, prompts))
    discarded: list[str] = []

    def discard_once(method: str, key: str) -> None:
        if key == CURRENT and method == "compare_and_swap" and not discarded:
            discarded.append(key)
            discard_release(other, second.id)

    hooks = {"before the swap": {"before": discard_once}, "after the swap": {"after": discard_once}}
    server = hooked(store_url, **hooks.get(moment, {}))
    _, tag = live_release_id(server) or ("", None)
    second.save(server)
    if moment == "after the save":
        discard_release(other, second.id)
        assert store_keys(other, "releases", "prompts") == [f"releases/{first.id}"]
    is_live = save_as_live(server, second, tag)
    assert is_live == (not prompts or moment == "after the swap")
    if not is_live:  # the swap was not made, or undone
        check_live_but(other, first, "prompts/legal.0123")
        release_of_parts(other, prompts)  # the server's next try, with the bytes of the request
        second.save(server)
        assert save_as_live(server, second, (live_release_id(server) or ("", None))[1])
    check_live(other, second)


def release_of_parts(store: Store, prompts: tuple[str, ...]) -> tuple[tuple[ServedTask, ...], dict[str, str]]:
    release = release_of(store, *prompts)
    return release.tasks, release.fingerprints


def store_keys(store: Store, *kinds: str) -> list[str]:
    return [key for kind in kinds for key in store.keys(kind)]


def test_a_release_is_discarded_only_hours_after_it_was_saved(store_url: str, later: Callable[[float], None]) -> None:
    store = Store(store_url)
    first = release_of(store)
    make_live(store, first)
    second = release_of(store, "legal.0123")
    second.save(store)
    before = store.keys()
    discard_release(store, second.id)
    later(GRACE_S - 60)
    discard_release(store, second.id)
    assert store.keys() == before
    later(120)
    discard_release(store, "0" * 16)  # others stay
    assert store.keys() == before
    discard_release(store, second.id)
    assert store.keys() == ["embeddings/enc/g0000", f"releases/{first.id}"]
    check_live(store, first)


def test_a_release_that_is_saved_again_counts_as_new(store_url: str) -> None:
    store = Store(store_url)
    make_live(store, release_of(store))
    old = release_of(store, "legal.0123")
    old.save(store)
    key = f"releases/{old.id}"
    written = store.storage.write_times(key)
    old.save(store)
    again = store.storage.write_times(key)
    assert written.keys() == again.keys()
    assert again[f"{key}/provenance.json"] >= written[f"{key}/provenance.json"]
    assert {k: v for k, v in again.items() if "provenance" not in k} == {
        k: v for k, v in written.items() if "provenance" not in k
    }


def test_releases_and_prompts_without_a_name_go_once_they_are_old(
    tmp_path: Path, later: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KEPT before the live one stay; a prompt stays while any release, or anything else, needs it."""
    monkeypatch.setattr(live_module, "KEPT", 2)
    store = Store(str(tmp_path))
    releases = []
    for number in range(5):
        release = Release(f"bert{number}", {}, *release_of_parts(store, ("shared.1", f"own.{number}")))
        releases.append(release)
        make_live(store, release)
    put_prompt(store, "orphan.1")
    with store.create("embeddings", "made-with-it/g0000", inputs={"prompt": put_prompt(store, "needed.1")}):
        pass
    make(store, "prompts", "trained")
    live = releases[-1]
    assert len(store.keys("releases")) == 5
    assert expired_releases(store) == expired_prompts(store) == []
    later(GRACE_S + 60)
    gone = sorted(f"releases/{release.id}" for release in releases[:2])
    assert expired_releases(store) == gone
    make_live(store, live)
    assert set(gone).isdisjoint(store.keys())
    assert store.names("prompts") == sorted(
        ["needed.1", "orphan.1", "shared.1", "trained", *(f"own.{number}" for number in range(2, 5))]
    )
    assert expired_prompts(store) == ["prompts/orphan.1"]
    check_live(store, live)


def test_a_release_that_becomes_live_while_it_is_removed_is_put_back(store_url: str, no_grace: None) -> None:
    store = Store(store_url)
    first, second = release_of(store), release_of(store, "legal.0123")
    make_live(store, first)
    second.save(store)

    def swap_at_once(method: str, key: str) -> None:
        """Another server of an earlier riptide, which looks at nothing after its swap."""
        tagged = store.storage.read_tagged(CURRENT)
        assert tagged is not None
        if json.loads(tagged[0])["release"] == first.id:
            assert store.storage.compare_and_swap(CURRENT, LiveRecord(second.id, (first.id,)).document(), tagged[1])

    assert remove_release(hooked(store_url, after=swap_at_once), f"releases/{second.id}") == []
    check_live(store, second)


class Killed(BaseException):
    """The process ends here."""


def test_a_kill_at_any_write_leaves_a_live_release_and_the_next_start_goes_on(store_url: str, no_grace: None) -> None:
    kills, step = 0, 7 if store_url.startswith("s3://") else 1
    while True:
        url, writes = f"{store_url}/{kills}", []
        store = Store(url)
        old = release_of(store, "old.1")
        old.save(store)  # it has expired: the last writes remove it and its prompt
        first, second = release_of(store), release_of(store, "legal.0123")
        store.storage.put(CURRENT, LiveRecord(first.id, ()).document())
        first.save(store)

        def kill(method: str, key: str, writes: list[str] = writes, limit: int = kills) -> None:
            if len(writes) == limit:
                raise Killed
            writes.append(f"{method} {key}")

        _, tag = read_live_release(store)
        try:
            assert save_as_live(hooked(url, before=kill), second, tag)
        except Killed:
            live, tag = read_live_release(Store(url))
            assert live in (first, second)
            for key in live.fingerprints:
                live.artifact(store, key)
            assert save_as_live(Store(url), second, tag)
            for key in expired_prompts(store):  # as gc does, where the kill came between the old release and its prompt
                remove_prompt(store, key)
            assert store_keys(store, "prompts") == ["prompts/legal.0123"]
            check_live(store, second)
            kills += step
            continue
        check_live(store, second)
        break
    assert [write for write in writes if "swap" in write] == [f"compare_and_swap {CURRENT}"]
    assert next(write for write in writes if write.startswith("delete")) == f"delete releases/{old.id}/manifest.json"
    assert len(writes) > 8
    assert kills >= len(writes) > kills - step


DAMAGES = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "changed": lambda data: data.replace(b'"before"', b'"befora"'),
    "other id": lambda data: data.replace(b'"release": "', b'"release": "0')[:-1],
    "other document": lambda data: b"[]",
    "no ids": lambda data: b'{"release": 5, "before": []}',
    "nested": lambda data: b"[" * 100_000,
    "not text": lambda data: b"\xff\xfe",
}


@pytest.mark.parametrize(("folder", "damage"), [*(("tmp_path", damage) for damage in DAMAGES), ("bucket", "truncated")])
def test_a_damaged_current_is_one_line_and_the_next_release_repairs_it(
    request: pytest.FixtureRequest, folder: str, damage: str
) -> None:
    store = Store(f"{request.getfixturevalue(folder)}/store")
    first, second = release_of(store), release_of(store, "legal.0123")
    make_live(store, first)
    data = store.storage.read(CURRENT)
    store.storage.put(CURRENT, DAMAGES[damage](data))
    before = store.keys()
    for look in (
        live_release_id,
        read_live_release,
        expired_releases,
        lambda store: store.files_to_remove(f"releases/{first.id}"),
    ):
        with pytest.raises(CorruptError, match=r"serving/current.json: .* renew of riptide serve-search$") as told:
            look(store)
        assert "\n" not in str(told.value)
    discard_release(store, first.id)
    assert store.keys() == before
    [problem] = problems(store)
    assert problem == f"{told.value}"
    release, tag = release_to_repair_from(store)
    assert release == first  # with its tasks over HTTP
    assert save_as_live(store, second, tag)
    check_live(store, second)
    assert parse_live_record(store.storage, store.storage.read(CURRENT)).before == (first.id,)


def test_every_changed_byte_of_current_is_found(tmp_path) -> None:
    storage = Store(str(tmp_path)).storage
    data = LiveRecord("0123456789abcdef", ("fedcba9876543210",)).document()
    assert parse_live_record(storage, data) == LiveRecord("0123456789abcdef", ("fedcba9876543210",))
    for position in range(len(data)):
        for bit in (1, 32, 128):
            changed = data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :]
            with pytest.raises(CorruptError, match=r"current\.json"):
                parse_live_record(storage, changed)


def test_a_current_of_an_earlier_riptide_is_read_and_sealed_by_the_next_swap(store_url: str) -> None:
    store = Store(store_url)
    first, second = release_of(store), release_of(store, "legal.0123")
    first.save(store)
    store.storage.put(CURRENT, json.dumps({"release": first.id, "before": []}).encode() + b"\n")
    check_live(store, first)
    make_live(store, second)
    check_live(store, second)
    document = json.loads(store.storage.read(CURRENT))
    assert document.pop("own_sha256")
    assert document == {"release": second.id, "before": [first.id]}


@pytest.mark.parametrize("damage", ["missing", "manifest.json", "manifest.begun.json"])
def test_a_live_release_that_is_missing_or_damaged_is_named_and_can_be_made_again(store_url: str, damage: str) -> None:
    store = Store(store_url)
    first, second = release_of(store), release_of(store, "legal.0123")
    make_live(store, first)
    make_live(store, second)
    key = f"releases/{second.id}"
    if damage == "missing":
        for file, _ in store.files_in_removal_order(key):
            store.storage.delete(file)
    else:
        store.storage.put(f"{key}/{damage}", b"{}")
    assert any(f"{key}/" in problem for problem in problems(store))
    if damage != "manifest.begun.json":  # a reader needs the manifest alone
        with pytest.raises(InputError, match=rf"current.json names {key} as the live release: .*riptide serve-search$"):
            read_live_release(store)
        release, tag = release_to_repair_from(store)
        assert release == first
    else:
        release, tag = read_live_release(store)
        assert release == second
    assert save_as_live(store, second, tag)
    check_live(store, second)


def test_a_release_without_one_of_its_artifacts_does_not_become_live(store_url: str) -> None:
    store = Store(store_url)
    first, second = release_of(store), release_of(store, "legal.0123")
    make_live(store, first)
    store.remove("prompts/legal.0123")
    _, tag = live_release_id(store) or ("", None)
    assert not save_as_live(store, second, tag)
    check_live(store, first)


def test_without_a_current_no_release_is_removed(store_url: str, no_grace: None) -> None:
    """If the object was lost, the releases are what it is made again from."""
    store = Store(store_url)
    release_of(store, "legal.0123").save(store)
    assert expired_releases(store) == []
    assert live_release_id(store) is None
