"""A new kind of hit source, once it is registered, is used by search, mining and evaluation as it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fixed_hits import fixed_kind, save_fixed

from riptide.indexing.search.runs import read_run
from riptide.indexing.store.store import Store

Done = Callable[..., str]
ROWS = [7, 3, 200, 41, 0]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with fixed_kind():
        yield


@pytest.fixture
def store(world) -> Store:
    store = Store(str(world.store))
    save_fixed(store, "best", ROWS)
    return store


def run_of(store: Store, name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for table in read_run(store.open("runs", name)):
        for hit in table.to_pylist():
            found.setdefault(hit["query_id"], []).append(hit["id"])
    return found


def test_a_search_finds_its_hits_and_fuses_them(store: Store, done: Done) -> None:
    done("search", "--store", store.url, "--source", "fixed:best", "--k", 4)
    expected = [f"p{row}" for row in ROWS[:4]]
    alone = run_of(store, "tiny-test-fixed-best")
    assert len(alone) == 30
    assert set(map(tuple, alone.values())) == {tuple(expected)}
    assert store.dependents("fixed/best") == ["runs/tiny-test-fixed-best"]
    done("search", "--store", store.url, "--source", "0*index:idx+1*fixed:best", "--k", 3)
    fused = run_of(store, "tiny-test-0-dense-idx-1-fixed-best")
    assert {tuple(ids) for ids in fused.values()} == {tuple(expected[:3])}
    assert "fixed:best" in done("search", "--store", store.url, "--source", "fixed:best", "--query", "bafa")


def test_mining_pools_its_hits(store: Store, done: Done) -> None:
    done("mine_negatives", "--store", store.url, "--sources", "fixed:best", "exact:enc", "--depth", 5)
    artifact = store.open("candidates", "tiny-train-fixed-best-exact-enc")
    tables = [pq.read_table(artifact.local_path(part)) for part in artifact.numbered_parts("part")]
    pooled = [hit for table in tables for hit in table.to_pylist() if hit["rank:fixed:best"] is not None]
    rows = [hit["row"] for hit in pooled]
    assert set(rows) == set(ROWS)
    assert len(rows) > 10 * (len(ROWS) - 1)  # a row is missing where it is the query's positive


def test_evaluation_searches_sources_and_measures_their_runs(store: Store, done: Done, tmp_path: Path) -> None:
    at = ("evaluate", "--store", store.url, "--metrics", "RR@10")
    sources = ("fixed:best", "0.5*fixed:best+0.5*exact:enc")
    assert "source fixed:best: run tiny-test-fixed-best-top10\n" in done(*at, "--source", *sources, "--plan")
    out = done(*at, "--source", *sources, "--run", "exact", "--json", tmp_path / "new.json")
    names = ["exact", "tiny-test-fixed-best-top10", "tiny-test-0.5-fixed-best-0.5-exact-enc-top10"]
    assert all(name in out for name in names)
    done(*at, "--run", *names, "--json", tmp_path / "old.json")
    assert json.loads((tmp_path / "new.json").read_text()) == json.loads((tmp_path / "old.json").read_text())
    assert store.open("runs", names[1]).config["k"] == 10


def test_the_grammar_and_its_errors_name_it(store: Store, refused: Callable[..., str]) -> None:
    at = ("--store", store.url, "--source")
    line = refused("search", *at, "colbert:x")
    assert line.endswith("expected bm25, bm25:NAME, exact:EMBEDDINGS, fixed:NAME, index:NAME, splade:NAME, or A+B")
    assert "expected bm25, bm25:NAME, exact" in refused("search", *at, "fixed:")
    assert "fixed/none: there is no such artifact" in refused("search", *at, "fixed:none")
    line = refused("search", *at, "fixed:best", "--nprobe", 3)
    assert line == "error: --nprobe 3: fixed:best has no use for it, it goes with an index"
    line = refused("evaluate", *at, "fixed:best", "--task", "t")
    assert line == "error: --task t: fixed:best has no use for it, it goes with vectors"
    line = refused("search", *at, "0.5*fixed:best+0.5*exact:enc", "--query", "bafa", "--explain")
    assert line == "error: the source fixed:best cannot explain its hits: leave --explain out"
    line = refused("evaluate", *at, "fixed:best", "exact:enc", "--split", "none")
    assert "no split 'none'" in line
