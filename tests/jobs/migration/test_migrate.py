"""The job `migrate`: forecasts that know the truth, the gate, the switch, also under load, and bad input."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ready_client import serving
from safetensors.numpy import load_file
from samples import save_tiny_bert, write_queries
from serving import Load, Server, asked, computed_prompt, connect, started

from riptide import Store
from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.embeddings.stored_encoder import StoredEncoder
from riptide.indexing.exact import exact_search
from riptide.indexing.migration.space_maps import SpaceMap
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.model_artifacts import commit_files, model_folder
from riptide.indexing.store.store import Store as Artifacts
from riptide.jobs.migration.both_encoders import BothEncoders
from riptide.jobs.migration.forecasting import fitting_texts, open_encoder
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.encoding.saving import save_mapped_encoder
from riptide.retriever.options import EncoderOptions
from riptide.serve.one_process import open_local
from riptide.serve.release.live import live_release_id, read_live_release, save_as_live
from riptide.serve.release.planning import plan_release
from riptide.serve.service.service_options import ServiceOptions

Done = Callable[..., str]
Refused = Callable[..., str]
AREA = "Serving a store"  # of tests/bad_input.md
EXACT_NUMERICS = ("--dtype", "float32", "--compile", "never")  # those of the embeddings of `world`


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of an encoder of other dimensions than that of `world`."""
    return save_tiny_bert(tmp_path_factory.mktemp("models") / "other", hidden=48)


def forecast(done: Done, store: Path, folder: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    path = folder / "forecast.json"
    out = done("migrate", "--store", store, "--split", "test", "--json", path, "--overwrite", *arguments)
    return json.loads(path.read_text()), out


def test_the_forecast_of_a_wholly_known_corpus_is_the_truth(
    world: SimpleNamespace, other: str, done: Done, refused: Refused, tmp_path: Path
) -> None:
    priced = ("--cluster", "a100x8")
    document, out = forecast(done, world.store, tmp_path, "--to", other, "--html", tmp_path / "page.html", *priced)
    [keep, *mapped, whole] = document["choices"]
    assert [each["name"] for each in mapped] == ["map (orthogonal)", "map (affine)"]
    encode = ("encode_corpus", "--store", world.store, "--encoder", other, "--name", "new")
    plan, cost = done(*encode, *priced, "--plan"), whole["on_cluster"]
    assert f"price    about {cost['price']:,.2f} {cost['currency']} ({cost['source']}" in plan
    assert f"{cost['text']}" in out
    done(*encode)
    evaluation = Store(world.store).evaluate(["exact:enc", "exact:new"], split="test", metrics=["nDCG@10"])
    old, new = (evaluation.per_query[name]["nDCG@10"].mean() for name in ("exact:enc", "exact:new"))
    assert keep["value"] == pytest.approx(old, abs=1e-6)
    assert whole["value"] == pytest.approx(new, abs=0.02)  # the sample is encoded in other batches
    assert (whole["passages"], whole["size_bytes"]) == (240, 240 * 48 * 2)
    assert document["num_random"] + document["num_chosen"] == 240
    assert "encode all" in out
    assert "From enc to" in (tmp_path / "page.html").read_text()
    at = ("--store", world.store, "--split", "test", "--to", other)
    plan = done("migrate", *at, "--embeddings", "enc", "--sample", 100, "--hard", 1, "--plan")
    sizes = re.search(r"encodes  up to (\d+) of 240 passages and 30 judged queries", plan)
    assert sizes is not None
    assert int(sizes[1]) > 100 + 2 * 30  # the random ones, the first hits of both searches, and the judged ones
    assert re.search(r"writes   results/migration-enc-other-test-[0-9a-f]{8}\.json", plan)
    plan = done("migrate", *at, "--embeddings", "enc", *priced, "--plan")  # the new embeddings exist by now
    assert f"cluster  a whole encoding takes {cost['text']} on 8 x A100" in plan
    line = refused("migrate", *at, "--embeddings", "enc", "--require", "nDCG@10 >= -1")
    assert f"nDCG@10 {new - old:+.4f}, 95% interval" in line


def test_a_sample_stands_for_the_whole_corpus(world: SimpleNamespace, other: str, done: Done, tmp_path: Path) -> None:
    document, out = forecast(done, world.store, tmp_path, "--to", other, "--sample", 100, "--hard", 1)
    assert 130 <= document["num_random"] + document["num_chosen"] < 220
    assert document["num_fitted"] == 100 + 10, "the queries of train"
    difference = document["choices"][-1]["difference"]
    assert difference["low"] <= difference["mean"] <= difference["high"]
    assert "Intervals cover the draw of the queries" in out


def test_a_forecast_can_be_repeated_to_save_its_map(
    world: SimpleNamespace, other: str, done: Done, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --json, after a forecast without --save-map, and after a save that failed."""
    monkeypatch.chdir(tmp_path)
    job = ("migrate", "--store", world.store, "--split", "test", "--to", other, "--sample", 100, "--hard", 1)
    done(*job)
    with monkeypatch.context() as patch:
        patch.setattr("riptide.jobs.migrate.save_map", lambda *_: (_ for _ in ()).throw(InputError("the disk is full")))
        assert "the disk is full" in refused(*job, "--save-map", "mapped")
    assert "map      models/mapped" in done(*job, "--save-map", "mapped")
    assert len(list((tmp_path / "results").glob("migration-enc-other-test-*.json"))) == 2


@pytest.mark.parametrize(("split", "expected"), [("dev", ["c", "d"]), ("test", ["c", "d"]), ("train", ["d"])])
def test_maps_are_fitted_on_queries_that_measure_nothing(
    world: SimpleNamespace, done: Done, tmp_path: Path, split: str, expected: list[str]
) -> None:
    """Queries that dev or test judges are left out, also for another measured split, and others of the same text."""
    texts = {"1": "a", "2": "b", "3": "c", "4": "d", "5": "a"}
    queries = [{"_id": id, "text": text} for id, text in texts.items()]
    judged = {"test": ["1"], "dev": ["2"], "train": ["2", "3", "5"]}
    passage = world.passages[0]["_id"]
    qrels = {name: [(id, passage, 1) for id in ids] for name, ids in judged.items()}
    source = write_queries(tmp_path / "splits", queries, qrels)
    done("import_queries", "--store", world.store, "--source", source)
    assert fitting_texts(Queries.open(Artifacts(str(world.store)), "splits"), split) == expected


def test_a_saved_map_searches_as_the_forecast_says(
    world: SimpleNamespace,
    other: str,
    done: Done,
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Jobs and a server find the hits of the map that the forecast has applied by NumPy; the gate makes it live."""
    new = ("--to", other, "--normalize", "--dimension", 40, "--query-prefix", "query: ", *EXACT_NUMERICS)
    plan = done("migrate", "--store", world.store, "--split", "test", *new, "--save-map", "mapped", "--plan")
    assert re.search(r"writes   models/mapped, with [\d.]+ \w+ in memory", plan)
    encoders = list[weakref.ref[Encoder]]()

    def open_watched_encoder(both: BothEncoders) -> StoredEncoder:
        encoder = open_encoder(both)
        encoders.append(weakref.ref(encoder.encoder_of("query")))
        return encoder

    def save_alone(*arguments: Any) -> None:
        assert [encoder() for encoder in encoders] == [None], "the encoder of the forecast is in memory too"
        save_mapped_encoder(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("riptide.jobs.migrate.open_encoder", open_watched_encoder)
        patch.setattr("riptide.retriever.encoding.saving.save_mapped_encoder", save_alone)
        document, out = forecast(done, world.store, tmp_path, *new, "--save-map", "mapped")
    command = f"riptide evaluate --store {world.store} --source exact:enc --task mapped --split test"
    assert re.search(rf"map      models/mapped .*; measure it with {command}$", out, re.MULTILINE)
    store = Store(world.store)
    artifact = store.open("models", "mapped")
    assert artifact.notes["map"]["texts"] == document["num_fitted"] > 200
    evaluation = store.evaluate(["exact:enc"], split="test", metrics=["nDCG@10"], task="mapped")
    [figures] = evaluation.per_query.values()
    [value] = [each["value"] for each in document["choices"] if each["name"] == f"map ({document['best_map']})"]
    assert figures["nDCG@10"].mean() == pytest.approx(value, abs=1e-6) == artifact.notes["map"]["value"]

    shown = done("verify", "--store", world.store, "--encoders")
    assert re.search(r"models/mapped: smallest similarity (0\.9999\d|1\.00000) of 8 queries that were", shown)
    with monkeypatch.context() as patch:
        patch.setattr("riptide.indexing.embeddings.drift.min_similarity", lambda *_: 0.5)
        moved = refused("verify", "--store", world.store, "--encoders")
    assert "the encoders of 2 artifacts give other vectors" in moved
    corpus = Corpus.open(store)
    embeddings = Embeddings.open(store, "enc", corpus)
    mapped = embeddings.encoder(task="mapped")
    texts = [query["text"] for query in world.queries]
    options = EncoderOptions(normalize=True, dimension=40, query_prefix="query: ", dtype="float32", compile="never")
    vectors = Encoder(other, options).encode(texts)
    folder = model_folder(artifact) / "query"
    layer = load_file(next(iter(sorted(folder.glob("*_Dense"))[-1:])) / "model.safetensors")
    space_map = SpaceMap("saved", layer["linear.weight"].T, layer["linear.bias"])
    np.testing.assert_allclose(mapped.encode(texts), space_map.apply(vectors), atol=1e-5)

    at = ("migrate", "--store", world.store, "--split", "test")
    assert "models/mapped" in refused(*at, *new, "--sample", 150, "--save-map", "mapped")  # is another one
    line = refused(*at, "--to", other, "--require", "nDCG@10 >= 0", "--save-map", "mapped")
    assert "--save-map with --require: is an option of the forecast" in line
    assert "encodes queries only and keeps the vectors of passages" in refused(*at, "--task", "mapped")
    line = refused(*at, "--task", "mapped", "--require", "nDCG@10 >= 0", "--to-embeddings", "enc")
    assert "--to-embeddings enc: models/mapped encodes queries for existing embeddings; leave it out, or" in line

    gate = ("migrate", "--store", world.store, "--split", "all", "--switch", "--require")
    assert "nothing was switched" in refused(*gate, "overlap@10 >= 1", "--task", "mapped")
    assert live_release_id(store) is None
    monkeypatch.setattr("riptide.indexing.migration.requirements.MIN_QUERIES", 30)
    plain, _ = plan_release(store, embeddings="enc", index="idx")
    assert save_as_live(store, plain, None)
    switch = (*gate, "overlap@10 >= -1")
    out = done(*switch, "--task", "mapped")
    live = read_live_release(store)[0]
    assert live is not None
    assert f"live     release {live.id}, index:idx with queries of models/mapped" in out
    assert f'back     PUT /v1/release with {{"release": "{plain.id}"}}' in out
    assert "is live already" in done(*switch, "--task", "mapped")
    with serving(open_local(store, ServiceOptions(threads=2), device="cpu")) as client:
        info = client.get("/v1/info").json()
        assert (info["release"], info["query_model"]) == (live.id, "models/mapped")
        assert info["stored_similarity"].keys() == {"enc", "models/mapped"}
        assert min(info["stored_similarity"].values()) > 0.9999
        body = {"queries": texts, "mode": "exact", "k": 5}
        results = client.post("/v1/search", json=body).json()["results"]
        rows = exact_search(mapped.encode(texts), embeddings.read_range(0, embeddings.num_rows), 5).rows
        expected = [[hit.id for hit in corpus.passages(each)] for each in rows]
        assert [[hit["id"] for hit in result["hits"]] for result in results] == expected
    renew = ("serve_search", "--store", world.store, "--renew", "--plan")
    shown = done(*renew)
    assert f"release   {live.id} of" in shown
    assert "queries   encoded by models/mapped" in shown
    done("encode_corpus", "--store", world.store, "--encoder", other, "--name", "new")
    shown = done(*renew, "--embeddings", "new")
    assert "left out  models/mapped, which encodes the queries of the live release: " in shown
    assert "; to keep it, give --embeddings enc, and no prompt with --tasks" in shown
    assert "queries   encoded" not in shown
    plan = done(*switch, "--to", other, "--plan")
    assert "compares index:idx with queries of models/mapped and exact:new" in plan


def test_the_gate_needs_embeddings_and_queries(
    world: SimpleNamespace, other: str, done: Done, refused: Refused, documented
) -> None:
    at = ("--store", world.store, "--to", other)
    line = refused("migrate", *at, "--split", "test", "--require", "overlap@10 >= 0.9")
    assert "no complete embeddings of" in line
    assert "riptide encode-corpus --store" in line
    documented(AREA, "migrate --require before the corpus is encoded", line.replace(other, "other"), 1)
    done("encode_corpus", "--store", world.store, "--encoder", other, "--name", "new")
    line = refused("migrate", *at, "--split", "test", "--require", "nDCG@10 >= -0.9", "--switch")
    assert "30 queries; required >= -0.9: not met; about 50 queries are needed to tell: nothing was switched" in line
    documented(AREA, "migrate: too few queries for a gate", re.sub(r"[+-]0\.\d{4}", "…", line), 1)
    gate = ("migrate", *at, "--embeddings", "enc", "--plan", "--require")
    assert "compares index:idx and exact:new" in done(*gate, "overlap@10 >= -1", "--split", "all", "--switch")
    assert "nDGC@10" in refused(*gate, "nDGC@10 >= 0", "--split", "test")  # the plan checks what the gate reads
    assert "dev" in refused(*gate, "nDCG@10 >= 0", "--split", "dev")
    line = refused(*gate, "overlap@10 >= 0", "--split", "all", "--to-embeddings", "new", "--passage-length", 3)
    assert "(expected passage_length 3 instead of" in line
    assert "--passage-length 3 --name new-2" in line
    assert live_release_id(Store(world.store)) is None
    done("encode_corpus", "--store", world.store, "--encoder", world.model, "--name", "part", "--limit", 60)
    line = refused("migrate", *at, "--split", "test", "--embeddings", "part")
    assert "embeddings/part: have the first 60 passages of the corpus (--limit 60), expected all" in line


def test_a_switch_can_be_refused_repeated_and_undone(
    world: SimpleNamespace, other: str, done: Done, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("riptide.indexing.migration.requirements.MIN_QUERIES", 30)
    store, at = Store(world.store), ("--store", world.store)
    done("encode_corpus", *at, "--encoder", other, "--name", "new")
    gate = ("migrate", *at, "--split", "all", "--switch", "--require")
    assert "nothing was switched" in refused(*gate, "overlap@10 >= 0.99", "--embeddings", "enc", "--to", other)
    assert live_release_id(store) is None
    switch = (*gate, "overlap@10 >= -1", "--to")
    out = done(*switch, other, "--embeddings", "enc")
    first = live_release_id(store)
    assert first is not None
    assert f"live     release {first[0]}, embeddings/new" in out
    assert "serve it with riptide serve-search" in out
    for output in (done(*switch, other, "--embeddings", "enc"), done(*switch, other)):
        assert f"live     release {first[0]}, embeddings/new: is live already" in output
        assert "back" not in output
    assert live_release_id(store) == first
    out = done(*switch, world.model, *EXACT_NUMERICS)
    assert "from     embeddings/new" in out
    assert f'back     PUT /v1/release with {{"release": "{first[0]}"}}' in out
    live, _ = read_live_release(store)
    assert live is not None
    assert [(task.name, task.embeddings, task.index) for task in live.tasks] == [("default", "enc", "idx")]
    done("build_index", *at, "--embeddings", "new", "--factory", "IVF4,PQ8x4fs", "--shards", 1)
    line = refused(*switch, other)
    assert "has 1 shards, and index/idx of the live release has 3" in line
    assert f"riptide build-index --store {world.store} --embeddings new --shards 3" in line


@pytest.mark.chaos
@pytest.mark.slow
def test_no_request_fails_from_before_a_migration_until_after_its_rollback(
    world: SimpleNamespace, other: str, done: Done, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients search all the time: over the encoding, a gate that refuses, one that switches, and the rollback.

    A switch to mapped queries follows, with its rollback.
    """
    monkeypatch.setattr("riptide.indexing.migration.requirements.MIN_QUERIES", 30)
    store, at = Store(world.store), ("--store", world.store)
    gate = ("migrate", *at, "--to", other, *EXACT_NUMERICS, "--split", "all", "--switch", "--require")
    texts = [query["text"] for query in world.queries[:4]]
    body = json.dumps({"queries": texts, "mode": "exact", "k": 10}).encode()
    with started(*at, "--port", 0) as (process, address):
        server, first = Server(address, world.store, process.pid), live_release_id(store)
        assert first is not None

        def ask(method: str, path: str, content: bytes) -> dict[str, Any]:
            status, answer = asked(connect(server), method, path, content, "application/json")
            assert status == 200, answer
            return json.loads(answer)

        old = hits_of(ask("POST", "/v1/search", body))
        with Load(server, [body], clients=3) as load:
            done("encode_corpus", *at, "--encoder", other, "--name", "new", *EXACT_NUMERICS)
            assert "nothing was switched" in refused(*gate, "overlap@10 >= 0.99")
            load.wait_for(6)
            assert live_release_id(store) == first
            num_before = len(load.answers)
            out = done(*gate, "overlap@10 >= -1")
            new = wait_for_hits(load, lambda hits: hits != old)
            [back] = re.findall(r"back +PUT /v1/release with (\{.*\})", out)
            ask("PUT", "/v1/release", back.encode())
            wait_for_hits(load, lambda hits: hits == old)
            forecast(done, world.store, tmp_path, "--to", other, *EXACT_NUMERICS, "--save-map", "mapped")
            done("migrate", *at, "--task", "mapped", "--split", "all", "--switch", "--require", "overlap@10 >= -1")
            mapped = wait_for_hits(load, lambda hits: hits != old)
            ask("PUT", "/v1/release", back.encode())
            wait_for_hits(load, lambda hits: hits == old)
        read_live = live_release_id(store)
        assert read_live is not None
        assert read_live[0] == first[0]
    assert load.faults == []
    assert [answer for status, answer in load.answers if status != 200] == []
    assert all(hits_of(answer) == old for _, answer in load.answers[:num_before])
    assert {str(hits_of(answer)) for _, answer in load.answers} == {str(old), str(new), str(mapped)}


def hits_of(answer: dict[str, Any]) -> list[list[str]]:
    """Returns the ids of the hits of each query of an answer; [] of an error."""
    return [[hit["id"] for hit in result["hits"]] for result in answer.get("results", [])]


def wait_for_hits(load: Load, is_expected: Callable[[list[list[str]]], bool]) -> list[list[str]]:
    """Returns the first hits that are expected among further answers, once a few more have come."""
    number = len(load.answers)
    while not load.faults:
        load.wait_for(1)
        for _, answer in load.answers[number:]:
            number += 1
            if is_expected(hits := hits_of(answer)):
                load.wait_for(6)
                return hits
    raise AssertionError(load.faults)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--require", "nDCG@10 > 0"), "expected a metric, >= and a number"),
        (("--switch",), "--switch without --require: is an option of the gate"),
        (("--metric", "AP"), "--metric AP: expected nDCG@K, R@K or RR@K"),
        (("--split", "dev"), "--split dev: queries/tiny has no judgements of it, which a forecast needs"),
        (("--split", "all"), "name a split with judgements (test, train)"),
        (("--require", "nDCG@10 >= 0", "--html", "x"), "--html with --require: is an option of the forecast"),
        (("--require", "nDCG@10 >= 0", "--hard", "5"), "--hard with --require: is an option of the forecast"),
        (("--hard", "1001"), "--hard 1001: expected 1 to 1,000"),
        (("--seed", "-1"), "--seed -1: expected at least 0"),
        (("--split", "test", "--cluster", "none.yaml"), "--cluster expects the YAML file of a cluster"),
    ],
)
def test_bad_input_is_one_line(
    world: SimpleNamespace, other: str, refused: Refused, arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refused("migrate", "--store", world.store, "--to", other, *arguments)


def test_the_same_encoder_and_a_prompt_of_queries_are_refused(
    world: SimpleNamespace, refused: Refused, documented, tmp_path: Path
) -> None:
    line = refused("migrate", "--store", world.store, "--split", "test", "--to", world.model, *EXACT_NUMERICS)
    assert "embeddings/enc are of this encoder with these settings" in line
    documented(AREA, "migrate to the encoder that made the embeddings", line.replace(world.model, "tiny"), 1)
    prompt = computed_prompt(world.model, 1)
    (tmp_path / "prompt").mkdir()
    prompt.save(tmp_path / "prompt")
    with Artifacts(str(world.store)).create("prompts", "sided", config={}, inputs={}) as draft:
        draft.add_notes(backbone=world.model, options=asdict(prompt.options))
        commit_files(draft, tmp_path / "prompt")
    line = refused("migrate", "--store", world.store, "--split", "test", "--task", "sided")
    assert "--task sided: encodes queries only and keeps the vectors of passages" in line
    assert f"riptide evaluate --store {world.store} --source exact --task sided measures it" in line
