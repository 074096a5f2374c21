"""Jobs on a store in Google Cloud Storage: the same bytes as elsewhere, faults of the service, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gcs_server import GcsServer
from samples import make_passages, stored_bytes, write_beir

from riptide.base.errors import BusyStorageError, StorageError
from riptide.indexing.storage import object_store
from riptide.indexing.store.store import open_storage

Done = Callable[..., str]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_beir(tmp_path / "raw", make_passages(60))


def test_a_store_has_the_same_bytes_in_a_cloud_that_is_busy(
    gcs: GcsServer, gs_bucket: str, source: Path, tmp_path: Path, done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("import_corpus", "--source", source, "--part-size", 60, "--store")
    monkeypatch.setattr(gcs, "busy_every", 4)
    done(*command, f"{gs_bucket}/s")
    assert gcs.faults > 3
    monkeypatch.setattr(gcs, "busy_every", 0)
    done(*command, tmp_path / "s")
    assert stored_bytes(f"{gs_bucket}/s") == stored_bytes(str(tmp_path / "s"))
    done("verify", "--store", f"{gs_bucket}/s")


@pytest.mark.parametrize(
    ("case", "url", "expected"),
    [
        ("a bucket that does not exist", "gs://riptide-no-such/store", "there is no bucket riptide-no-such"),
        ("Google Cloud Storage that ignores conditions of writes", "", "ignores the conditions"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_line(
    gcs: GcsServer,
    gs_bucket: str,
    source: Path,
    refused: Done,
    documented: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    url: str,
    expected: str,
) -> None:
    monkeypatch.setattr(gcs, "ignores_conditions", not url)
    line = refused("import_corpus", "--store", url or f"{gs_bucket}/s", "--source", source)
    assert expected in line
    documented("Storage", case, line.replace(gs_bucket.removeprefix("gs://"), "BUCKET"), 1)
    assert not gcs.buckets[gs_bucket.removeprefix("gs://")]


def test_what_a_service_does_not_answer_is_one_line(
    gcs: GcsServer, gs_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "MAX_RETRIES", 1)
    storage = open_storage(f"{gs_bucket}/s")
    monkeypatch.setattr(gcs, "busy_every", 1)
    for call in (lambda: storage.put("a", b"x"), lambda: storage.read("a"), lambda: list(storage.list(""))):
        with pytest.raises(BusyStorageError, match=r"503.*: run the command again later") as caught:
            call()
        assert "\n" not in str(caught.value)
    key = gcs.service_account.replace(str(gcs.server_port), "9")  # no server listens on this port
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", key)
    with pytest.raises(StorageError, match="check GOOGLE_APPLICATION_CREDENTIALS") as refusal:
        open_storage(f"{gs_bucket}/s").read("runs/first-503/a")
    assert not isinstance(refusal.value, BusyStorageError)
