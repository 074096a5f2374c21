"""--rerank-dtype: the precision of a re-ranker in search, mining, serving and Python, and its refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from fastapi.testclient import TestClient
from ready_client import serving
from samples import files_of, save_tiny_bert
from tiny import make_classifier

import riptide
from riptide.indexing.search.rescoring import open_reranker
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.store import Store
from riptide.indexing.work.worker_tasks import Allocation
from riptide.retriever.encoding.reranker import Reranker, RerankerOptions, describe_reranker
from riptide.retriever.forward import int8
from riptide.serve.one_process import open_local
from riptide.serve.release.live import save_as_live
from riptide.serve.release.planning import plan_release
from riptide.serve.service.service_options import ServiceOptions

Done = Callable[..., str]
INT8 = RerankerOptions(dtype="int8")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random cross-encoder whose layers int8 can compute."""
    folder = Path(save_tiny_bert(tmp_path_factory.mktemp("models") / "wide-cross"))
    return str(make_classifier(folder, hidden_size=64, intermediate_size=64, initializer_range=0.2))


def scores(store: Path, run: str) -> dict[tuple[str, str], float]:
    """Returns the scores of a run by query and passage."""
    hits = [hit for table in read_run(Store(str(store)).open("runs", run)) for hit in table.to_pylist()]
    return {(hit["query_id"], hit["id"]): hit["score"] for hit in hits}


def test_a_run_records_the_dtype_and_is_near_that_of_float32(world, wide: str, done: Done, refused: Done) -> None:
    ask = ("search", "--store", world.store, "--mode", "exact", "--k", 5, "--rerank", wide)
    by_dtype = {}
    for dtype in ("float32", "int8"):
        done(*ask, "--rerank-dtype", dtype, "--name", dtype)
        run, by_dtype[dtype] = Store(str(world.store)).open("runs", dtype), scores(world.store, dtype)
        assert run.config["reranker"] == describe_reranker(wide, RerankerOptions(dtype=dtype))
        assert f" {dtype} packed" in run.notes["numerics"]
        assert {part.facts["numerics"] for part in run.parts} == {run.notes["numerics"]}
    assert by_dtype["int8"].keys() == by_dtype["float32"].keys()
    differences = np.array([by_dtype["int8"][pair] - by_dtype["float32"][pair] for pair in by_dtype["int8"]])
    assert 0 < np.abs(differences).max() < 0.05
    assert np.std([*by_dtype["int8"].values()]) > 0.05
    line = refused(*ask, "--name", "int8")
    assert "was made otherwise: --rerank-dtype int8, now auto; give --rerank-dtype int8, or another name" in line


def test_printed_hits_and_an_open_search_have_the_scores_of_a_run(world, wide: str, done: Done) -> None:
    rerank = ("--rerank", wide, "--rerank-dtype", "int8", "--rerank-depth", 5)
    ask = ("search", "--store", world.store, "--mode", "exact", "--k", 5, *rerank)
    done(*ask, "--name", "int8")
    query, expected = world.queries[0], scores(world.store, "int8")
    with riptide.Store(world.store).search("exact", rerank=wide, rerank_depth=5, rerank_dtype="int8") as search:
        hits = search(query["text"], k=5)
    printed = done(*ask, "--query", query["text"])
    for hit in hits:
        assert hit.score == pytest.approx(expected[query["_id"], hit.id], abs=1e-6)
        assert f" {hit.score:.6g} " in f"{printed} "


def test_a_step_of_a_pipeline_takes_the_dtype(world, wide: str, done: Done, tmp_path: Path) -> None:
    step = {"mode": "exact", "k": 5, "name": "step", "rerank": wide, "rerank_dtype": "int8"}
    (tmp_path / "chain.yaml").write_text(yaml.safe_dump({"store": str(world.store), "steps": [{"search": step}]}))
    done("pipeline", "--config", tmp_path / "chain.yaml")
    assert Store(str(world.store)).open("runs", "step").config["reranker"]["dtype"] == "int8"


def test_negatives_record_the_numerics_class_of_their_scores(world, wide: str, done: Done) -> None:
    """Scores of another dtype are other scores of the same pool."""
    store, mine = (
        Store(str(world.store)),
        ("mine_negatives", "--store", world.store, "--sources", "exact:enc", "--depth", 20),
    )
    by_dtype = {}
    for dtype in ("float32", "int8"):
        rerank = ("--reranker", wide, "--rerank-dtype", dtype, "--teacher-scores", "--pool-negatives", 5)
        out = done(*mine, "--name", dtype, *rerank, "--denoised-negatives", 2)
        negatives = store.open("negatives", dtype)
        [numerics] = negatives.notes["score_numerics"]
        assert f" {dtype} packed" in numerics
        assert f"negatives, scores: {numerics}\n" in out
        of_scores = store.open(*negatives.inputs["scores/0"]["artifact"].split("/", 1))
        assert (of_scores.config["numerics"], of_scores.config["reranker"]["dtype"]) == (numerics, dtype)
        table = pq.read_table(of_scores.local_path(of_scores.numbered_parts("part")[0]))
        by_dtype[dtype] = {(pair["query"], pair["row"]): pair["probability"] for pair in table.to_pylist()}
    assert len(store.names("scores")) == 2
    both = by_dtype["int8"].keys() & by_dtype["float32"].keys()
    assert len(both) > 50
    assert 0 < max(abs(by_dtype["int8"][pair] - by_dtype["float32"][pair]) for pair in both) < 0.05
    done(*mine, "--name", "plain", "--denoised-negatives", 0)
    assert "score_numerics" not in store.open("negatives", "plain").notes


@pytest.fixture
def client(world, wide: str) -> Iterator[TestClient]:
    """A client of a service that re-ranks in int8."""
    store = Store(str(world.store))
    release, _ = plan_release(store, reranker=wide)
    assert save_as_live(store, release, None)
    with serving(open_local(store, ServiceOptions(threads=2, rerank_dtype="int8"), device="cpu")) as client:
        yield client


def test_a_service_scores_in_the_dtype(client: TestClient, wide: str, world) -> None:
    query, documents = world.queries[0]["text"], [passage["text"] for passage in world.passages[:6]]
    answer = client.post("/v1/rerank", json={"query": query, "documents": documents})
    assert answer.status_code == 200, answer.text
    actual = {result["index"]: result["relevance_score"] for result in answer.json()["results"]}
    expected = Reranker(wide, INT8).score([query] * len(documents), documents)
    assert [actual[number] for number in range(len(documents))] == pytest.approx(expected.tolist(), abs=1e-6)
    model = open_reranker(Store(str(world.store)), wide, "int8").open(Allocation(1, "cuda")).model
    assert model.device.type == "cpu", "also in a service whose encoder is on a GPU"


def test_what_cannot_be_computed_is_refused_before_anything_begins(
    world,
    wide: str,
    refused: Done,
    documented: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    narrow = make_classifier(Path(save_tiny_bert(tmp_path / "narrow")))
    before = files_of(world.store, but=())
    at = ("--store", world.store)
    commands = (
        ("search", *at, "--mode", "exact", "--rerank"),
        ("search", *at, "--mode", "exact", "--query", "beka", "--rerank"),
        ("mine_negatives", *at, "--sources", "exact:enc", "--reranker"),
        ("serve_search", *at, "--port", 0, "--rerank"),
    )
    dtype = ("--rerank-dtype", "int8")
    lines = set()
    for command in commands:
        for plan in ((), ("--plan",)):
            lines.add(refused(*command, narrow, *dtype, *plan))
    [line] = lines
    assert line == (
        f"error: {narrow}/config.json: hidden_size 32: int8 needs a multiple of 64; use --rerank-dtype bfloat16 or "
        "float32"
    )
    documented("Re-ranking", "--rerank-dtype int8 of a model whose widths do not fit", line, 1)
    for command in commands[:-1]:
        line = refused(*command, wide, *dtype, "--gpus", 1, "--plan")
        assert line == "error: --gpus 1: --rerank-dtype int8 runs on the CPU: leave out --gpus, or use bfloat16"
    documented("Re-ranking", "--rerank-dtype int8 --gpus 1", line, 1)

    def refuse() -> None:
        raise OSError("no C++ compiler (install g++)")

    monkeypatch.setattr(int8, "load_kernel", refuse)
    for command in commands:
        line = refused(*command, wide, *dtype)
        assert line == "error: --rerank-dtype int8: no C++ compiler (install g++); use bfloat16 or float32"
    documented("Re-ranking", "--rerank-dtype int8 without a C++ compiler", line, 1)
    with pytest.raises(riptide.InputError, match=r"^rerank_dtype=int8: no C"):
        riptide.Store(world.store).search("exact", rerank=wide, rerank_dtype="int8")
    assert files_of(world.store, but=()) == before


def test_a_dtype_without_a_reranker_is_refused(
    world, wide: str, refused: Done, documented: Callable[..., None]
) -> None:
    before = files_of(world.store, but=())
    at = ("--store", world.store, "--rerank-dtype", "float32")
    line = refused("search", *at, "--mode", "exact")
    assert line == "error: --rerank-dtype float32: exact:enc has no use for it, it goes with --rerank"
    documented("Re-ranking", "search --rerank-dtype without --rerank", line, 1)
    line = refused("mine_negatives", *at, "--sources", "exact:enc")
    assert line == "error: --rerank-dtype float32 without --reranker: expected a re-ranker, whose dtype it is"
    documented("Re-ranking", "mine_negatives --rerank-dtype without --reranker", line, 1)
    line = refused("serve_search", *at, "--port", 0)
    assert "--rerank-dtype float32: release " in line
    assert "has no re-ranker; name one with --rerank and --renew, or leave it out" in line
    documented("Re-ranking", "serve_search --rerank-dtype of a release without a re-ranker", line, 1)
    store = riptide.Store(world.store)
    with pytest.raises(riptide.InputError, match=r"^rerank_dtype=float32: it goes with rerank"):
        store.search("exact", rerank_dtype="float32")
    with pytest.raises(
        riptide.InputError, match=r"^rerank_dtype='int4': expected one of auto, float32, bfloat16, int8"
    ):
        store.search("exact", rerank=wide, rerank_dtype="int4")  # type: ignore[arg-type]
    assert files_of(world.store, but=()) == before
