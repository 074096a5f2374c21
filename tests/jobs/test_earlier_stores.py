"""A store of each earlier minor version is read, served and extended.

`earlier_stores` has one archive per minor version, which never changes. For a new minor version,
`RIPTIDE_WRITE_STORE=1 pytest tests/jobs/test_earlier_stores.py` makes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from job_outcome import Outcome
from ready_client import serving
from samples import make_passages, make_queries, save_tiny_bert, write_beir

import riptide
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.sealed_json import ARTIFACT_FORMAT_VERSION, add_own_hash, check_own_hash
from riptide.indexing.store.store import Store
from riptide.serve.one_process import open_local
from riptide.serve.release.live import save_as_live
from riptide.serve.release.planning import plan_release
from riptide.serve.service.service_options import ServiceOptions

ARCHIVES = Path(__file__).parent / "earlier_stores"
THIS = f"{riptide.__version__.rpartition('.')[0]}.tar.xz"
EXACT_NUMERICS = ("--dtype", "float32", "--compile", "never")
SOURCES = ("bm25", "exact:enc", "index:flat")
NEW = make_passages(1, seed=5, prefix="n")


def write_archive(call_job: Callable[..., int]) -> None:
    """Writes the archive of this version: each kind of artifact that a service needs, and a run of each source."""

    def job(name: str, *arguments: object) -> None:
        assert call_job(name, "--store", store, *arguments) == 0, name

    store = Path("store")
    passages = make_passages(40)
    queries, judged = make_queries(passages, 12)
    splits = {"test": judged[:4], "train": judged[4:]}
    job("import_corpus", "--source", write_beir(Path("raw"), passages, queries, splits), "--part-size", 25)
    Path("gone").write_text("p3\n", encoding="utf-8")
    job("import_corpus", "--delete", "gone")
    training = ("--negatives", "none", "--batch", 4, "--steps", 1, "--dtype", "float32", "--cpus", 1)
    backbone = save_tiny_bert(Path("model"), hidden=16)
    job("train_retriever", "--backbone", backbone, "--task", "tuned", "--train", "all", *training)
    job("encode_corpus", "--encoder", "models/tuned", "--name", "enc", *EXACT_NUMERICS)
    prompt = ("--train", "prompts", "--length", 4, "--sides", "query", *training)
    job("train_retriever", "--backbone", "models/tuned", "--task", "ours", *prompt)
    job("build_index", "--embeddings", "enc", "--name", "flat", "--factory", "Flat")
    job("build_bm25")
    for source in SOURCES:
        job("search", "--source", source, "--split", "test", "--k", 5, "--name", source.replace(":", "-"))
    release, problems = plan_release(Store(str(store)))
    assert not problems
    assert save_as_live(Store(str(store)), release, None)
    ARCHIVES.mkdir(exist_ok=True)
    with tarfile.open(ARCHIVES / THIS, "w:xz") as archive:
        archive.add(store, filter=lambda entry: None if ".tmp" in entry.name else entry)


@pytest.fixture(scope="module", params=sorted({path.name for path in ARCHIVES.glob("*.tar.xz")} | {THIS}))
def earlier(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, call_job: Callable[..., int]
) -> Path:
    """The folder of the store of an archive."""
    archive = ARCHIVES / request.param
    if not archive.exists() and os.environ.get("RIPTIDE_WRITE_STORE"):
        with contextlib.chdir(tmp_path_factory.mktemp("made")):
            write_archive(call_job)
    assert archive.exists(), f"{archive} is missing: run with RIPTIDE_WRITE_STORE=1"
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / "store"


def test_every_file_is_as_it_was_written(earlier: Path, done: Callable[..., str]) -> None:
    done("verify", "--store", earlier, "--encoders")


@pytest.mark.parametrize("source", SOURCES)
def test_a_search_finds_what_it_found(earlier: Path, source: str, done: Callable[..., str]) -> None:
    name = source.replace(":", "-")
    done("search", "--store", earlier, "--source", source, "--split", "test", "--k", 5, "--name", f"{name}-again")
    before, now = (
        [table.to_pydict() for table in read_run(Store(str(earlier)).open("runs", key))]
        for key in (name, f"{name}-again")
    )
    assert [table["query_id"] for table in now] == [table["query_id"] for table in before]
    for old, new in zip(before, now, strict=True):
        np.testing.assert_allclose(new["score"], old["score"], rtol=1e-3)


def test_its_release_is_served_with_its_prompt(earlier: Path) -> None:
    service = open_local(Store(str(earlier)), ServiceOptions(threads=2), device="cpu")
    with serving(service) as client:
        for task in ("default", "ours"):
            answer = client.post("/v1/search", json={"query": "anything", "task": task, "k": 3})
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["results"][0]["hits"]) == 3


def test_it_grows(earlier: Path, tmp_path: Path, done: Callable[..., str], job: Callable[..., Outcome]) -> None:
    """A CPU of another kind than the archive's encodes nothing for it."""
    store = shutil.copytree(earlier, tmp_path / "store")
    done("import_corpus", "--store", store, "--source", write_beir(tmp_path / "more", NEW), "--append")
    encoded = job("encode_corpus", "--store", store, "--encoder", "models/tuned", "--name", "enc", *EXACT_NUMERICS)
    if encoded.status != 0:
        [(stored, own)] = re.findall(r'enc/g0000 was made otherwise: numerics "(.+?)", now "(.+?)"', encoded.err)
        assert stored == Store(str(store)).open("embeddings", "enc/g0000").config["numerics"] != own
    done("build_bm25", "--store", store)
    text = " ".join(NEW[0]["text"].split()[:6])
    out = done("search", "--store", store, "--source", "bm25", "--query", text, "--k", 1)
    assert NEW[0]["_id"] in out


def test_a_store_of_a_later_version_is_refused_in_one_line(
    earlier: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    store = shutil.copytree(earlier, tmp_path / "store")
    manifest = store / "corpus" / "g0000" / "manifest.json"
    document = check_own_hash(manifest.read_bytes(), "manifest")
    manifest.write_bytes(add_own_hash({**document, "format": ARTIFACT_FORMAT_VERSION + 1}))
    assert refused("search", "--store", store, "--source", "bm25", "--query", "x") == (
        f"error: {store}/corpus/g0000: it is of format {ARTIFACT_FORMAT_VERSION + 1}, this release reads format "
        f"{ARTIFACT_FORMAT_VERSION}; install a newer one"
    )


def test_archives_are_small() -> None:
    assert [path.name for path in ARCHIVES.glob("*.tar.xz") if path.stat().st_size > 300_000] == []
