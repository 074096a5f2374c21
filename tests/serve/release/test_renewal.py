"""Which generations of a store are newer than those of a release, and what it costs to look for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.serve.release.release import Release
from riptide.serve.release.release_tasks import ServedTask
from riptide.serve.release.renewal import (
    describe_generations,
    incomplete_generations,
    newer_artifacts,
    replaced_artifacts,
)

NAMES = ("embeddings/enc", "index/idx", "bm25/bm25")


def make(store: Store, key: str, files: int = 1, **config: object) -> Artifact:
    kind, _, name = key.partition("/")
    with store.create(kind, name, config=config) as draft:
        for number in range(files):
            draft.commit(f"part-{number:05d}", ".bin", lambda path: path.write_bytes(key.encode()), rows=1)
    return store.open(kind, name)


def begin(store: Store, key: str) -> None:
    kind, _, name = key.partition("/")
    with pytest.raises(KeyboardInterrupt), store.create(kind, name):
        raise KeyboardInterrupt


def release_of(store: Store, files: int = 1) -> Release:
    parts = [make(store, f"{whole}/g0000", files) for whole in ("corpus", *NAMES)]
    parts.append(make(store, "prompts/legal"))
    return Release(
        "bert", {}, (ServedTask("default", None, "enc", "idx", "bm25"),), {p.key: p.fingerprint for p in parts}
    )


def test_later_generations_of_the_artifacts_of_a_release_are_newer(store_url: str) -> None:
    """Those that an index skips too, but not other artifacts, and not what is incomplete."""
    store = Store(store_url)
    release = release_of(store)
    make(store, "bm25/other/g0000")
    assert newer_artifacts(store, release) == incomplete_generations(store, release) == []
    begin(store, "corpus/g0001")
    assert newer_artifacts(store, release) == []
    assert incomplete_generations(store, release) == ["corpus/g0001"]
    for key in ("corpus/g0001", "corpus/g0002", "corpus/g0003", "embeddings/enc/g0001", "index/idx/g0002"):
        make(store, key, 2)
    begin(store, "index/idx/g0001")  # whose rows a later one has
    begin(store, "bm25/bm25/g0003")
    newer = ["corpus/g0001", "corpus/g0002", "corpus/g0003", "embeddings/enc/g0001", "index/idx/g0002"]
    assert newer_artifacts(store, release) == newer
    assert incomplete_generations(store, release) == ["bm25/bm25/g0003"]
    assert describe_generations(store, newer) == [
        "corpus: g0001 to g0003, 6 passages added, 0 deleted",
        "embeddings/enc: g0001, 2 passages",
        "index/idx: g0002, 2 passages",
    ]
    store.storage.put("index/idx/g0002/manifest.json", b"{}")
    assert describe_generations(store, newer)[2] == "index/idx: g0002"


def test_the_last_possible_generation_ends_a_look(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    last = make(store, "corpus/g9998")
    release = Release("bert", {}, (), {last.key: last.fingerprint})
    make(store, "corpus/g9999")
    assert newer_artifacts(store, release) == ["corpus/g9999"]


def test_artifacts_that_were_removed_or_built_again_are_replaced(store_url: str) -> None:
    store = Store(store_url)
    release = release_of(store)
    assert replaced_artifacts(store, release) == []
    store.remove("bm25/bm25/g0000")
    store.remove("prompts/legal")
    make(store, "prompts/legal", length=3)
    assert replaced_artifacts(store, release) == ["bm25/bm25/g0000", "prompts/legal"]
    assert newer_artifacts(store, release) == []


def test_a_look_costs_one_call_for_each_possible_generation_however_large_they_are(tmp_path: Path) -> None:
    for files in (1, 40):
        store = Store(str(tmp_path / f"{files}"))
        release = release_of(store, files)
        assert calls_of_a_look(store, release) == ["size corpus/g0001"]
        deleted = make(store, "corpus/g0001", files)
        expected = ["corpus/g0001", "corpus/g0002", *(f"{name}/g0001" for name in NAMES)]
        assert sorted(calls_of_a_look(store, release)) == sorted(f"size {key}" for key in expected)
        release = replace(release, fingerprints={**release.fingerprints, deleted.key: deleted.fingerprint})
        assert calls_of_a_look(store, release) == ["size corpus/g0002"]


def calls_of_a_look(store: Store, release: Release) -> list[str]:
    """Returns the calls of the storage that `newer_artifacts` makes, each with its key."""
    calls = []

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            return lambda key: (
                calls.append(f"{name} {key.removesuffix('/manifest.json')}") or getattr(storage, name)(key)
            )

    storage, store.storage = store.storage, Recorded()
    newer_artifacts(store, release)
    store.storage = storage
    return calls
