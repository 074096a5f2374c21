"""A store that grows: a server that is started again serves it, and one that runs says that it is older."""

from __future__ import annotations

import errno
import itertools
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from ready_client import serving
from serving import GONE, NEW, Growth, make_growth, metrics_of, started, task_files

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.store.store import Store
from riptide.jobs import serve_search
from riptide.serve.client import Client
from riptide.serve.one_process import open_local
from riptide.serve.release.live import read_live_release, save_as_live
from riptide.serve.release.planning import plan_release
from riptide.serve.release.release import Release
from riptide.serve.release.renewal import renew_release
from riptide.serve.service import staleness
from riptide.serve.service.changes import ReleaseChanges
from riptide.serve.service.service import Service
from riptide.serve.service.service_options import ServiceOptions
from riptide.serve.service_errors import EncoderDriftError

Done = Callable[..., str]
NUMERICS = ("--dtype", "float32", "--compile", "never")
MODES = ("exact", "dense", "bm25", "hybrid")


@pytest.fixture
def growth(served: Path, model: str, tmp_path: Path, done: Done) -> Growth:
    return make_growth(tmp_path, Path(shutil.copytree(served / "store", tmp_path / "store")), model, done)


def live(store: Store) -> Release:
    release, _ = read_live_release(store)
    assert release is not None
    return release


def text_of(store: Store) -> str:
    """Returns the text of the passage that the growth deletes."""
    return Corpus.open(store).passages([int(GONE[1:])])[0].text


def check_grown(client: Client, gone: str) -> None:
    """The new passage is found and the deleted one is not, by every mode."""
    for mode in MODES:
        assert "n0" in {hit.id for hit in client.search(NEW["text"], mode=mode, k=20)}
        assert GONE not in {hit.id for hit in client.search(gone, mode=mode, k=240)}
    wait_for(lambda: client.info()["newer"], [])


def test_a_server_that_is_started_again_serves_a_grown_store(growth: Growth, done: Done) -> None:
    store, before = growth.store, live(growth.store)
    at, gone = ("--store", store.url), text_of(growth.store)
    growth.grow()
    lines = [
        "newer     corpus: g0002, 1 passage added, 1 deleted",
        "newer     bm25/bm25: g0002, 1 passage",
        "newer     embeddings/enc: g0002, 1 passage",
        "newer     index/idx: g0002, 1 passage",
    ]
    planned = done("serve_search", *at, "--plan").splitlines()
    assert planned[:4] == lines
    assert live(store) == before
    output: list[str] = []
    with started(*at, "--port", 0, output=output) as (process, address):
        printed = list(itertools.takewhile(lambda line: not line.startswith("work "), planned))  # before the estimate
        assert output[: len(printed)] == printed
        assert f"release   {live(store).id} (new) of {store.url}" in output
        check_grown(Client(address), gone)
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0
    assert "(new)" not in done("serve_search", *at, "--plan")


def test_a_running_server_leaves_erased_passages_out_of_its_answers(
    growth: Growth, tmp_path: Path, done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers from the removed files, which it has open; exact search opens them again, and fails."""
    store, text = growth.store, text_of(growth.store)
    service = open_local(store, ServiceOptions(threads=2), device="cpu")
    monkeypatch.setattr("riptide.serve.app.ERASURES_S", 0.05)

    def search(mode: str) -> tuple[int, dict[str, str]]:
        answer = client.post("/v1/search", json={"query": text, "mode": mode, "k": 240})
        hits = answer.json()["results"][0]["hits"] if answer.status_code == 200 else []
        return answer.status_code, {hit["id"]: hit["text"] for hit in hits}

    with serving(service, changes=ReleaseChanges(service)) as client:
        before = {mode: search(mode)[1] for mode in MODES}
        assert all(hits.pop(GONE) == text for hits in before.values())
        (tmp_path / "ids").write_text(f"{GONE}\n")
        done("import_corpus", "--store", store.url, "--erase", tmp_path / "ids", "--yes")
        wait_for(lambda: search("bm25"), (200, before["bm25"]))
        for mode in MODES:
            assert search(mode) == ((503, {}) if mode == "exact" else (200, before[mode])), mode
        service.check_parts(service.require_live().release)
        assert client.get("/readyz").json()["parts"]["passages"] == {"state": "failed", "reason": "files are missing"}


INCOMPLETE = {
    "the corpus has grown, and nothing else": (("corpus",), ("embeddings/enc", "index/idx", "bm25/bm25")),
    "the index of grown embeddings has not grown": (("corpus", "embeddings", "bm25"), ("index/idx",)),
    "all artifacts but BM25 have grown": (("corpus", "embeddings", "index"), ("bm25/bm25",)),
}


def warning_of(store: Store, done: Done, *options: str) -> str:
    """Returns the warning of a job that serves the live release as it is."""
    before = live(store)
    warning, line, *_ = done("serve_search", "--store", store.url, "--plan", *options).splitlines()
    assert line == f"release   {before.id} of {store.url}"
    assert warning.startswith(f"warning: release {before.id} is served as it is")
    return warning


@pytest.mark.parametrize("case", INCOMPLETE)
def test_a_store_in_the_middle_of_growth_is_served_as_it_was(
    growth: Growth, done: Done, documented: Callable[..., None], case: str
) -> None:
    steps, behind = INCOMPLETE[case]
    growth.grow(*steps)
    warning = warning_of(growth.store, done)
    assert "without newer artifacts (corpus: g0002, 1 passage added, 1 deleted" in warning
    jobs = {"embeddings/enc": "encode-corpus", "index/idx": "build-index", "bm25/bm25": "build-bm25"}
    for whole, job in jobs.items():
        name = whole.split("/")[1]
        remedy = f"run riptide {job} --name {name} again, with the same options"
        assert (f"{whole} covers 240 of 241 passages: {remedy}" in warning) == (whole in behind)
    documented("Serving a store", f"a grown store, if {case}: the live release is served", warning, 0)


def test_a_generation_that_was_begun_is_named(growth: Growth, done: Done, documented: Callable[..., None]) -> None:
    """Alone, and beside complete ones, which are served."""
    store, begun = growth.store, "was begun and is not complete"
    begin(store, "corpus", "g0002")
    warning = warning_of(store, done)
    assert f"{store.url}/corpus/g0002 {begun}: run the command that makes it again" in warning
    documented("Serving a store", "an import whose rows would be added was interrupted", warning, 0)
    store.remove("corpus/g0002")
    growth.grow()
    begin(store, "corpus", "g0003")
    out = done("serve_search", "--store", store.url, "--plan")
    assert out.startswith("newer     corpus: g0002, 1 passage added, 1 deleted\n")
    assert f"left out  {store.url}/corpus/g0003 {begun}\n" in out


def begin(store: Store, *name: str) -> None:
    with pytest.raises(KeyboardInterrupt), store.create(*name, config={}, inputs={}):
        raise KeyboardInterrupt


def test_embeddings_with_a_limit_cover_new_passages_up_to_it(
    growth: Growth, model: str, done: Done, refused: Done
) -> None:
    store, at = growth.store, ("--store", growth.store.url)
    encode = ("encode_corpus", *at, "--encoder", model, *NUMERICS)
    limited = (*encode, "--name", "few", "--limit", 300)
    done(*limited)
    done(*encode, "--name", "fewer", "--limit", 100)
    releases = [plan_release(store, embeddings=name, tasks=["default"])[0] for name in ("few", "fewer")]
    make_live(store, releases[1])
    growth.grow("corpus", "bm25")
    assert "limited   embeddings/fewer covers 100 of 241 passages, because it was made with --limit\n" in done(
        "serve_search", *at, "--plan"
    )
    make_live(store, releases[0])
    assert "embeddings/few covers 240 of 241 passages: run riptide encode-corpus --name few again" in warning_of(
        store, done
    )
    assert "embeddings/few covers 240 of the corpus' 241 passages" in refused("search", *at, "--source", "exact:few")
    done(*limited)
    out = done("serve_search", *at, "--plan")
    assert "newer     embeddings/few: g0002, 1 passage\n" in out
    assert "limited" not in out


def make_live(store: Store, release: Release) -> None:
    assert save_as_live(store, release, read_live_release(store)[1])


def test_the_live_release_is_kept_by_an_option(
    growth: Growth, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    store, job = growth.store, ("serve_search", "--store", growth.store.url, "--keep-release")
    assert "warning" not in done(*job, "--plan")
    growth.grow()
    warning = warning_of(store, done, "--keep-release")
    assert warning.endswith("embeddings/enc: g0002, 1 passage; index/idx: g0002, 1 passage): --keep-release is given")
    documented("Serving a store", "a grown store, with --keep-release: the live release is served", warning, 0)
    documented("Serving a store", "--keep-release with --renew", refused(*job, "--renew"), 1)
    shutil.rmtree(Path(store.url) / "serving")
    documented("Serving a store", "--keep-release without a live release", refused(*job), 1)


def test_tasks_over_http_and_a_re_ranker_survive(growth: Growth, model: str, tmp_path: Path, done: Done) -> None:
    store = growth.store
    with serving(open_local(store, ServiceOptions(threads=2), device="cpu")) as client:
        for name, index in {"ours": {}, "flat": {"index": "enc"}}.items():
            assert client.put(f"/v1/tasks/{name}", files=task_files(tmp_path / name, model, 3), data=index).is_success
    make_live(store, replace(live(store), reranker="some/cross-encoder"))
    before = live(store)
    growth.grow()
    out = done("serve_search", "--store", store.url, "--plan")
    after = renew_release(store, before)
    assert f"release   {after.id} (new) of" in out
    assert (after.tasks, after.reranker, after.encoder) == (before.tasks, before.reranker, before.encoder)
    for line in ("task      flat: embeddings/enc, bm25/bm25", "task      ours: index/idx, bm25/bm25"):
        assert f"{line}\n" in out
    assert "re-ranker some/cross-encoder\n" in out


def test_an_artifact_that_was_built_again_is_served_if_it_fits(
    growth: Growth, model: str, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    """The live release cannot be opened any more."""
    store, before = growth.store, live(growth.store)
    at = ("--store", store.url)
    shutil.rmtree(Path(store.url) / "bm25")
    line = refused("serve_search", *at)
    assert f"release {before.id} cannot be served any more (bm25/bm25/g0001: removed, or built again): " in line
    documented("Serving a store", "the BM25 index of the live release was removed", line.removeprefix("error: "), 1)
    done("build_bm25", *at, "--k1", 1.2)
    out = done("serve_search", *at, "--plan")
    assert out.startswith("replaced  bm25/bm25/g0001: removed, or built again\nrelease   ")
    assert " (new) of " in out
    assert "bm25/bm25/g0001: removed, or built again): --keep-release is given" in refused(
        "serve_search", *at, "--keep-release"
    )
    shutil.rmtree(Path(store.url) / "embeddings")
    done("encode_corpus", *at, "--encoder", model, "--name", "enc", *NUMERICS, "--passage-length", 32)
    line = refused("serve_search", *at)
    assert "index/idx/g0001 was built from embeddings/enc/g0000" in line
    documented("Serving a store", "the embeddings of the live index were made again", line.removeprefix("error: "), 1)


def test_a_new_release_that_cannot_be_opened_leaves_the_live_one(
    growth: Growth, done: Done, monkeypatch: pytest.MonkeyPatch, documented: Callable[..., None]
) -> None:
    """A file of the new generation of BM25 is damaged."""
    store, before = growth.store, live(growth.store)
    growth.grow()
    [file] = Path(store.url).glob("bm25/bm25/g0002/*.cfs")
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    ready = []

    async def run_server(service: Service, *_: object) -> None:
        await ReleaseChanges(service).refresh()
        ready.append(service.live.release if service.live else None)

    monkeypatch.setattr("riptide.serve.one_process.run_server", run_server)
    job = ("serve_search", "--store", store.url, "--port", 0, "--warm-up-s", 0, "--threads", 2)
    warning = done(*job).splitlines()[-1]
    assert warning.startswith(f"warning: release {before.id} is served as it is, as release ")
    documented("Serving a store", "a grown store with a damaged file: the live release is served", warning, 0)
    assert ready == [before] == [live(store)]
    file.write_bytes(content)
    done(*job)
    assert ready[1:] == [live(store)] != [before]


def test_servers_that_make_the_same_release_at_once_all_serve_it(growth: Growth) -> None:
    """Each planned it before another one made it live."""
    store, (before, tag) = growth.store, read_live_release(growth.store)
    assert before is not None
    first, other = (replace(before, reranker=name) for name in ("some/cross-encoder", "another/cross-encoder"))
    for _ in range(2):
        assert serve_search.make_live(store, serve_search.ChosenRelease(first, True, tag, before), list) == first.id
        assert live(store) == first
    with pytest.raises(InputError, match="another release has just become live"):
        serve_search.make_live(store, serve_search.ChosenRelease(other, True, tag, None), list)


@pytest.mark.parametrize(
    "error",
    [
        None,
        InputError("damaged"),
        OSError("cannot be read"),
        RuntimeError("no memory"),
        EncoderDriftError("encoder", InputError("other vectors")),
    ],
)
def test_a_server_serves_what_another_one_has_just_made_live(
    growth: Growth,
    done: Done,
    monkeypatch: pytest.MonkeyPatch,
    documented: Callable[..., None],
    error: Exception | None,
) -> None:
    """The other server does so while this one opens its new release, or the release before. That one is closed."""
    store, before = growth.store, live(growth.store)
    other = replace(before, reranker="some/cross-encoder")
    growth.grow()
    new = renew_release(store, before)
    monkeypatch.setattr("riptide.serve.parts.service_models.RerankPart.open_release", lambda *_: None)
    original, opened = Service.open_release, []

    def open_release(service: Service, release_id: str) -> None:
        opened.append(release_id)
        if release_id == new.id and error:
            raise error
        original(service, release_id)
        if release_id in (new.id, before.id):
            make_live(store, other)

    async def run_server(service: Service, *_: object) -> None:
        await ReleaseChanges(service).refresh()
        service._admin.shutdown()
        assert service.live is not None
        assert service.live.release == other
        assert set(service.parts["passages"]._releases) == {other.id}  # type: ignore[attr-defined]

    monkeypatch.setattr(Service, "open_release", open_release)
    monkeypatch.setattr("riptide.serve.one_process.run_server", run_server)
    job = ("serve_search", "--store", store.url, "--port", 0, "--warm-up-s", 0, "--threads", 2)
    warning = done(*job).splitlines()[-1]
    if error is None:
        assert opened == [new.id, other.id, other.id]
        documented("Serving a store", "a grown store, while another server makes a release live", warning, 0)
    else:
        assert opened == [new.id, before.id, other.id]
        problem = error.__cause__ if isinstance(error, EncoderDriftError) else error
        assert warning.endswith(f"release {new.id} cannot be served: {problem}")


def test_a_running_server_says_that_it_is_older_than_its_store(
    growth: Growth, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staleness, "INTERVAL_S", 0.0)
    monkeypatch.setattr("riptide.serve.app.LOOK_S", 0.02)
    store, gone = growth.store, text_of(growth.store)
    with serving(open_local(store, ServiceOptions(threads=2), device="cpu")) as client:
        newer = partial(wait_for, lambda: client.get("/v1/info").json()["newer"])
        gauge = partial(re.search, r"(?m)^riptide_newer_artifacts (.*)$")
        first = client.get("/v1/info").json()["release"]
        newer([])
        growth.grow("corpus")
        newer(["corpus/g0002"])
        refused = client.put("/v1/release", json={"release": None})
        assert refused.status_code == 400
        assert "embeddings/enc covers 240 of 241 passages" in refused.json()["error"]["message"]
        growth.grow("embeddings", "index", "bm25")
        newer(["corpus/g0002", "bm25/bm25/g0002", "embeddings/enc/g0002", "index/idx/g0002"])
        assert gauge(metrics_of(client))[1] == "4.0"
        assert client.put("/v1/tasks/other", files=task_files(tmp_path / "other", model, 3)).status_code == 200
        assert client.get("/v1/info").json()["release"] != first
        newer(["corpus/g0002", "bm25/bm25/g0002", "embeddings/enc/g0002", "index/idx/g0002"])
        assert [record.getMessage() for record in caplog.records if "is older than" in record.getMessage()] == [
            f"release {first} is older than {store.url}, which also has corpus/g0002: PUT /v1/release, or start the "
            "server again, once all of its artifacts have grown"
        ]
        assert client.put("/v1/release", json={"release": None}).status_code == 200
        newer([])
        assert gauge(metrics_of(client))[1] == "0.0"
        for mode in MODES:
            request = {"queries": [NEW["text"], gone], "mode": mode, "k": 240}
            new, old = client.post("/v1/search", json=request).json()["results"]
            assert "n0" in {hit["id"] for hit in new["hits"]}
            assert GONE not in {hit["id"] for hit in old["hits"]}


def wait_for(read: Callable[[], object], expected: object) -> None:
    """Waits until a value is as expected."""
    ends = time.monotonic() + 60
    while (value := read()) != expected:
        assert time.monotonic() < ends, value
        time.sleep(0.02)


def test_a_store_that_cannot_be_looked_at_is_logged_once_and_does_not_harm(
    growth: Growth, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staleness, "INTERVAL_S", 0.0)
    monkeypatch.setattr("riptide.serve.app.LOOK_S", 0.02)
    looks = []

    def fail(key: str) -> int | None:
        looks.append(key)
        raise OSError(errno.EIO, "Input/output error", key)

    monkeypatch.setattr(growth.store.storage, "size", fail)
    with serving(open_local(growth.store, ServiceOptions(threads=2), device="cpu")) as client:
        wait_for(lambda: len(looks) > 3, True)
        assert client.get("/v1/info").json()["newer"] is None
        assert "riptide_newer_artifacts NaN\n" in metrics_of(client)
        assert (
            client.get("/readyz").status_code
            == client.post("/v1/search", json={"query": NEW["text"]}).status_code
            == 200
        )
        monkeypatch.undo()
    messages = [record.getMessage() for record in caplog.records if "newer artifacts" in record.getMessage()]
    assert len(messages) == 1
    assert "Input/output error" in messages[0]
