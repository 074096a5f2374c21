"""Explanations of hits: for every kind of source and fusion, the parts add up to the scores of the same hits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from fastapi.testclient import TestClient
from ready_client import serving
from serving import query_texts

from riptide.indexing.exact.score_parts import TermScore
from riptide.indexing.hit_sources.registry import KINDS
from riptide.indexing.hit_sources.search_options import SearchOptions
from riptide.indexing.search.explanation_lines import explanation_lines
from riptide.indexing.search.explanations import HitExplanation, SourceExplanation
from riptide.indexing.search.few_queries import LocalSearch
from riptide.indexing.store.store import Store
from riptide.indexing.work.local_runner import LocalRunner
from riptide.serve.one_process import open_local
from riptide.serve.release.live import live_release_id, save_as_live
from riptide.serve.release.planning import plan_release
from riptide.serve.service.service_options import ServiceOptions

NAMES = {"index": "index:idx", "exact": "exact:enc", "bm25": "bm25", "splade": "splade:impacts"}
FUSIONS = ["bm25+index:idx", "0.4*bm25+0.6*exact:enc", "0.5*splade:impacts+0.3*index:idx+0.2*bm25"]
K = 7


def check_parts(explanation: dict[str, Any], scores: dict[str, float]) -> None:
    """Checks that terms add up to the score of their source, and parts of sources to the fused score."""
    parts = [source["part"] for source in explanation["sources"]]
    assert sum(parts) == pytest.approx(explanation["score"], rel=1e-6, abs=1e-6)
    for source in explanation["sources"]:
        assert (source["rank"] is None) == (source["score"] is None)
        assert source["score"] == scores.get(source["source"])
        if source["terms"] is None:
            continue
        total = sum(term["score"] for term in source["terms"]) + source["other_terms"]
        assert total == pytest.approx(source["score"], rel=1e-6)
        for term in source["terms"]:
            assert term["query_weight"] * term["passage_weight"] == pytest.approx(term["score"], rel=1e-6)


@pytest.fixture(scope="module")
def texts(sparse_store: Path) -> list[str]:
    return list(query_texts(sparse_store).values())[:3]


@pytest.fixture(scope="module")
def client(sparse_store: Path) -> Iterator[TestClient]:
    """A client of a server whose release has all kinds of sources."""
    store = Store(str(sparse_store / "store"))
    release, ended_tasks = plan_release(store, index="idx", sources=["splade:impacts"])
    before = live_release_id(store)
    assert before is not None
    assert not ended_tasks
    assert save_as_live(store, release, before[1])
    with serving(open_local(store, ServiceOptions(threads=1), device="cpu")) as client:
        yield client


def test_a_server_and_a_job_explain_their_hits_for_every_kind_in_the_registry(
    sparse_store: Path, texts: list[str], client: TestClient
) -> None:
    store, runner = Store(str(sparse_store / "store")), LocalRunner(gpus=0)
    assert set(NAMES) == {kind.name for kind in KINDS}
    for source in [*NAMES.values(), *FUSIONS]:
        search = LocalSearch(store, source, SearchOptions(), runner)
        hits, explained = search.search_and_explain(texts, K)
        plain = search.search(texts, K)
        assert (hits.rows == plain.rows).all()
        assert (hits.scores == plain.scores).all()
        body = {"queries": texts, "k": K, "source": source}
        answers = client.post("/v1/search", json={**body, "explain": True}).json()["results"]
        without = client.post("/v1/search", json=body).json()["results"]
        for by_job, scores, answer, other in zip(explained, hits.scores, answers, without, strict=True):
            by_server = [hit.pop("explanation") for hit in answer["hits"]]
            assert answer == other
            for number, (mine, its, hit) in enumerate(zip(by_job, by_server, answer["hits"], strict=True)):
                assert its == json.loads(orjson.dumps(mine))
                assert (mine.score, mine.rank) == (scores[number], number + 1)
                check_parts(its, hit["scores"])


def test_the_job_prints_the_parts_and_the_server_refuses_too_many(
    sparse_store: Path, texts: list[str], client: TestClient, done: Callable[..., str], refused: Callable[..., str]
) -> None:
    at = ("search", "--store", sparse_store / "store", "--source", "0.5*bm25+0.5*index:idx")
    out = done(*at, "--query", texts[0], "--k", 2, "--explain")
    assert re.search(r"bm25: score \d+\.\d{6}, rank 1\n +\d\.\d{6}  \w+: \S+ x \S+  \(idf \S+ frequency 1, length", out)
    assert re.search(r"index:idx: score \d+\.\d{6}, rank \d+\n +list [0-3] of 4 \(rank \d; 4 probed\)", out)
    assert "fusion by weighted scores: 0.500000 + 0." in out
    term = TermScore("a", 2.0, 1.0, 2.0, idf=1.0, frequency=1.0)  # of an index without lengths
    source = SourceExplanation("bm25", 1.0, 1, 2.0, 2.0, (term,))
    assert explanation_lines(HitExplanation("none", 1, 2.0, (source,)), 1)[1].endswith("(idf 1, frequency 1)")
    assert refused(*at, "--explain") == "error: --explain: explains the hits of --query; give one"
    for body, message in (
        ({"query": "x", "k": 101}, "explain: 101 hits (k times queries), expected up to 100: ask for fewer"),
        ({"query": "x" * 1025}, "explain: a query has 1,025 characters, expected up to 1,024: shorten"),
    ):
        answer = client.post("/v1/search", json={**body, "mode": "bm25", "explain": True})
        assert answer.status_code == 422
        assert message in answer.json()["error"]["message"]
    filtered = {"query": texts[0], "k": 3, "explain": True, "filter": {"lang": "en"}}
    for hit in client.post("/v1/search", json=filtered).json()["results"][0]["hits"]:
        assert hit["explanation"]["filter"] == '{"lang":"en"}'
        assert hit["explanation"]["sources"][0]["probed_list"] is None
