"""An index that is a graph (HNSW): its search parameter, its growth, deleted passages and its service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from ready_client import serving
from samples import make_passages, write_beir

from riptide import Store
from riptide.base.errors import InputError
from riptide.serve.one_process import open_local
from riptide.serve.release.live import save_as_live
from riptide.serve.release.planning import plan_release
from riptide.serve.service.service_options import ServiceOptions

NUMERICS = ("--dtype", "float32", "--compile", "never")


def build(world, done: Callable[..., str]) -> str:
    arguments = ("--name", "graph", "--factory", "HNSW8,SQ8", "--shards", 2)
    return done("build_index", "--store", world.store, "--embeddings", "enc", *arguments)


def recall(store: Store, texts: list[str], **settings: int) -> float:
    """Returns the share of the exact top 20 that the graph finds."""
    with store.search("index:graph", **settings) as graph, store.search("exact:enc") as exact:
        found, expected = graph(texts, 20), exact(texts, 20)
    shares = [len({hit.id for hit in a} & {hit.id for hit in b}) / 20 for a, b in zip(found, expected, strict=True)]
    return float(np.mean(shares))


def test_a_graph_grows_and_is_searched_and_served(world, done: Callable[..., str], tmp_path: Path) -> None:
    out = build(world, done)
    assert "index/graph/g0000: 240 vectors in 2 shards, HNSW8,SQ8" in out
    assert "of exact search at ef_search 100, 100 candidates a shard" in out
    store, texts = Store(world.store), [query["text"] for query in world.queries]
    assert recall(store, texts) > 0.95
    first = store.open("index", "graph/g0000")
    assert (first.notes["ef_search"], "nprobe" in first.notes) == (100, False)

    done("build_index", "--store", world.store, "--embeddings", "enc", "--name", "untrained", "--factory", "HNSW8")
    assert Store(world.store).open("index", "untrained/g0000").part("quantizer").rows == 0

    source = write_beir(tmp_path / "more", make_passages(30, seed=11, prefix="n"))
    with store.search("exact:enc") as exact:
        gone = [hit.id for hit in exact(texts[0], 20)]
    (tmp_path / "gone").write_text("\n".join(gone))
    done("import_corpus", "--store", world.store, "--source", source, "--append", "--delete", tmp_path / "gone")
    done("encode_corpus", "--store", world.store, "--encoder", world.model, "--name", "enc", *NUMERICS)
    assert "index/graph/g0001: 270 vectors in 3 shards" in build(world, done)
    store = Store(world.store)
    assert recall(store, texts) > 0.95
    with store.search("index:graph") as graph:
        hits = graph(texts, 50)
        assert not {hit.id for each in hits for hit in each} & set(gone)
        assert {hit.id for hit in graph(texts[0], 300)} == {passage.id for passage in store.corpus()} - set(gone)

    release, _ = plan_release(store, index="graph")
    assert save_as_live(store, release, None)
    service = open_local(store, ServiceOptions(threads=2), device="cpu")
    client: TestClient
    with serving(service) as client:
        answer = client.post("/v1/search", json={"queries": texts, "mode": "dense", "k": 50}).json()
    for result, expected in zip(answer["results"], hits, strict=True):
        assert [hit["id"] for hit in result["hits"]] == [hit.id for hit in expected]


def test_each_kind_of_index_has_its_own_search_parameter(
    world, done: Callable[..., str], refused: Callable[..., str], documented: Callable[..., None]
) -> None:
    build(world, done)
    at = ("search", "--store", world.store, "--k", 20)
    line = refused(*at, "--source", "index:graph", "--nprobe", 3)
    assert line == "error: --nprobe 3: index/graph is HNSW8,SQ8 and has no use for it; give --ef-search 3 instead"
    documented("Searching", "`search --nprobe` for an HNSW index", line, 1)
    line = refused(*at, "--source", "index:idx", "--ef-search", 3)
    assert line == "error: --ef-search 3: index/idx is IVF4,PQ8x4fs and has no use for it; give --nprobe 3 instead"
    done(*at, "--source", "index:graph", "--ef-search", 300, "--depth", 30, "--name", "wide")
    config = Store(world.store).open("runs", "wide").config
    assert config["search_parameters"] == {"ef_search": 300, "depth": 30}
    with pytest.raises(InputError, match=r"^nprobe=3: index/graph is HNSW8,SQ8 and has no use for it"):
        Store(world.store).search("index:graph", nprobe=3)("bama")
