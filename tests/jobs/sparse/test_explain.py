"""Explanations of hits: for every kind of source and fusion, the parts add up to the scores of the same hits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from fastapi.testclient import TestClient
from ready_client import serving
from serving import query_texts

from riptide.indexing.hit_sources.registry import KINDS
from riptide.indexing.hit_sources.search_options import SearchOptions
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
    return list(query_texts(sparse_store).values())[:5]


@pytest.fixture(scope="module")
def client(sparse_store: Path) -> Iterator[TestClient]:
    """A client of a server whose release has all kinds of sources."""
    store = Store(str(sparse_store / "store"))
    release, left = plan_release(store, index="idx", sources=["splade:impacts"])
    before = live_release_id(store)
    assert before is not None
    assert not left
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
