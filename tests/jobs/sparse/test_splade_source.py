"""The source splade:NAME in search, fusion, mining and evaluation, and on S3, against a product of whole weights."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from samples import make_passages, make_queries, write_beir
from splade_stores import Ranking, brute_force, encode_queries, run_of, save_prompt

from riptide.base.errors import InputError
from riptide.indexing.hit_sources.modes import default_source
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.sealed_json import fingerprint_of
from riptide.indexing.store.store import Store
from riptide.serve.release.planning import plan_release
from riptide.serve.release.release_tasks import search_of_mode, supported_modes

Done = Callable[..., str]
K = 12
DEPTH = 1_000  # hits of each source that a fusion sees
EXACT = ("--pooling", "splade", "--dtype", "float32")


@pytest.fixture
def store(sparse_store: Path, tmp_path: Path) -> Store:
    return Store(str(shutil.copytree(sparse_store, tmp_path / "root") / "store"))


@pytest.fixture
def search(store: Store, done: Done) -> Callable[..., dict[str, Ranking]]:
    """search(source, *arguments) returns the hits of a run by the id of the query."""

    def run(source: str, *more: object) -> dict[str, Ranking]:
        name = fingerprint_of([source, *map(str, more)])[:12]
        done("search", "--store", store.url, "--source", source, "--name", name, *more)
        return run_of(store, name)

    return run


def grow(store: Store, masked: Path, done: Done) -> None:
    """Adds 24 passages, deletes two more, and extends the artifacts."""
    root = Path(store.url).parent
    source = write_beir(root / "more", make_passages(24, seed=11, prefix="n"))
    done("import_corpus", "--store", store.url, "--source", source, "--append")
    (root / "later").write_text("p3\nn5\n")
    done("import_corpus", "--store", store.url, "--delete", root / "later")
    done("encode_corpus", "--store", store.url, "--encoder", masked, "--name", "sparse", *EXACT)
    done("build_index", "--store", store.url, "--embeddings", "sparse", "--name", "impacts", "--shards", 3)


def test_a_search_ranks_as_the_product_of_whole_weights(
    store: Store, masked: Path, search: Callable[..., dict[str, Ranking]], done: Done, refused: Done
) -> None:
    """For one generation and for a grown corpus, whose deleted passages are excluded."""
    split = Queries.open(store).split("test")
    vectors = encode_queries(masked, split.texts)
    for generations in (1, 2):
        expected = brute_force(store, "sparse", vectors, K)
        found = search("splade:impacts", "--k", K)
        assert found == dict(zip(split.ids, expected, strict=True))
        assert len({score for hits in expected for _, score in hits}) > 100
        assert all(float(score).is_integer() for hits in found.values() for _, score in hits)
        assert len(store.generations("index", "impacts")) == generations
        if generations == 1:
            shutil.rmtree(Path(store.url) / "runs")
            grow(store, masked, done)
    [run] = store.names("runs")
    artifact = store.open("runs", run)
    assert {"splade:impacts/1", "embeddings:sparse/1"} <= artifact.inputs.keys()
    assert artifact.config["source"] == "splade:impacts"
    [part, *_] = artifact.numbered_parts("part")
    assert list(part.facts["query_numerics"]) == ["sparse"]
    out = done("search", "--store", store.url, "--source", "splade:impacts", "--query", split.texts[0], "--k", 2)
    assert "(splade:impacts, 2 hits)" in out


def test_a_fusion_takes_the_hits_of_its_sources(
    store: Store, masked: Path, search: Callable[..., dict[str, Ranking]]
) -> None:
    split = Queries.open(store).split("test")
    sparse = dict(zip(split.ids, brute_force(store, "sparse", encode_queries(masked, split.texts), DEPTH), strict=True))
    lexical, dense = search("bm25", "--k", DEPTH), search("exact:enc", "--k", DEPTH)
    by_weight, by_rank = search("0.5*bm25+0.5*splade:impacts", "--k", K), search("splade:impacts+exact:enc", "--k", K)
    for id in split.ids:
        check(by_weight[id], fused([normalised(lexical.get(id, [])), normalised(sparse[id])], [0.5, 0.5]))
        ranks = [[(hit, 1 / (60 + rank)) for rank, (hit, _) in enumerate(hits, 1)] for hits in (sparse[id], dense[id])]
        check(by_rank[id], fused(ranks, [1, 1]))


def check(hits: Ranking, expected: Ranking) -> None:
    """Asserts that hits are the top K of all expected ones; equal scores may be in any order."""
    scores = dict(expected)
    assert len(hits) == K
    assert [score for _, score in hits] == pytest.approx([score for _, score in expected[:K]], rel=1e-6)
    assert [score for _, score in hits] == pytest.approx([scores[id] for id, _ in hits], rel=1e-6)


def normalised(hits: Ranking) -> Ranking:
    """Returns the hits with scores from 0 to 1."""
    scores = [score for _, score in hits]
    return [(id, (score - min(scores)) / (max(scores) - min(scores))) for id, score in hits]


def fused(rankings: Sequence[Ranking], weights: Sequence[float]) -> Ranking:
    """Returns the passages by the weighted sum of their scores, the best first."""
    sums: dict[str, float] = defaultdict(float)
    for hits, weight in zip(rankings, weights, strict=True):
        for id, score in hits:
            sums[id] += weight * score
    return sorted(sums.items(), key=lambda item: -item[1])


def test_a_task_encodes_queries_with_its_prompt(
    store: Store, masked: Path, search: Callable[..., dict[str, Ranking]], tmp_path: Path, done: Done, refused: Done
) -> None:
    """A prompt for queries over the same embeddings; one for both sides over embeddings of its own."""
    for name in ("asked", "both"):
        (tmp_path / name).mkdir()
    split = Queries.open(store).split("test")
    asked = save_prompt(store, masked, "asked", tmp_path / "asked")
    vectors = encode_queries(masked, split.texts, asked)
    assert brute_force(store, "sparse", vectors, K) != brute_force(
        store, "sparse", encode_queries(masked, split.texts), K
    )
    found = search("splade:impacts", "--task", "asked", "--k", K)
    assert found == dict(zip(split.ids, brute_force(store, "sparse", vectors, K), strict=True))
    assert [key for key in store.dependents("prompts/asked") if key.startswith("runs/")]
    assert search("splade:impacts", "--encoder", masked, "--k", K) == dict(
        zip(split.ids, brute_force(store, "sparse", encode_queries(masked, split.texts), K), strict=True)
    )

    both = save_prompt(store, masked, "both", tmp_path / "both", passages=True)
    done("encode_corpus", "--store", store.url, "--task", "both", "--dtype", "float32")
    done("build_index", "--store", store.url, "--embeddings", "both", "--shards", 1)
    vectors = encode_queries(masked, split.texts, both)
    found = search("splade:both", "--k", K)
    assert found == dict(zip(split.ids, brute_force(store, "both", vectors, K), strict=True))
    line = refused("search", "--store", store.url, "--source", "splade:impacts", "--task", "both")
    assert "task both is not the one that made embeddings/sparse (prompt differ)" in line


@pytest.mark.parametrize("source", ["splade:impacts", "splade:impacts+bm25"])
def test_a_query_that_cannot_be_searched_is_named_by_its_id(
    store: Store, refused: Done, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "riptide.indexing.sparse.index.unquantisable_vectors", lambda vectors: {3: "a weight", 5: "another weight"}
    )
    id = Queries.open(store).split("test").ids[3]
    assert refused("search", "--store", store.url, "--source", source) == f"error: query '{id}': a weight"


def test_mining_pools_its_hits(store: Store, masked: Path, done: Done) -> None:
    done("mine_negatives", "--store", store.url, "--sources", "splade:impacts", "bm25", "--depth", 5, "--split", "test")
    split = Queries.open(store).split("test")
    expected = dict(zip(split.ids, brute_force(store, "sparse", encode_queries(masked, split.texts), 5), strict=True))
    [name] = store.names("candidates")
    artifact = store.open("candidates", name)
    ranks: dict[str, dict[int, str]] = defaultdict(dict)
    for part in artifact.numbered_parts("part"):
        for hit in pq.read_table(artifact.local_path(part)).to_pylist():
            if hit["rank:splade:impacts"] is not None:
                ranks[hit["query_id"]][hit["rank:splade:impacts"]] = f"p{hit['row']}"
    assert sum(map(len, ranks.values())) > 120
    for id, found in ranks.items():  # a rank is missing where the hit is the query's positive
        assert all(expected[id][rank - min(1, min(found))][0] == hit for rank, hit in found.items())


def test_evaluation_measures_its_run(store: Store, done: Done, tmp_path: Path) -> None:
    at = ("evaluate", "--store", store.url, "--metrics", "RR@10")
    out = done(*at, "--source", "splade:impacts", "splade:impacts+bm25", "--json", tmp_path / "new.json")
    names = ["tiny-test-splade-impacts-top10", "tiny-test-splade-impacts-bm25-top10"]
    assert all(name in out for name in names)
    done(*at, "--run", *names, "--json", tmp_path / "old.json")
    assert json.loads((tmp_path / "new.json").read_text()) == json.loads((tmp_path / "old.json").read_text())


def test_a_source_of_another_kind_is_refused(store: Store, refused: Done, documented: Callable[..., None]) -> None:
    at = ("search", "--store", store.url, "--source")
    line = refused(*at, "index:impacts")
    assert line == (
        "error: index/impacts holds the impacts of sparse embeddings: search it by the source splade:impacts"
    )
    documented("Searching", "an index of impacts as a FAISS index", line.removeprefix("error: "), 1)
    line = refused(*at, "splade:idx")
    assert line == "error: index/idx is a FAISS index of dense embeddings: search it by the source index:idx"
    documented("Searching", "a FAISS index as an index of impacts", line.removeprefix("error: "), 1)
    line = refused(*at, "exact:sparse")
    assert line.endswith("give embeddings of a dense encoder, or search the index of these by the source splade:NAME")
    assert "index/none: there is no such artifact" in refused(*at, "splade:none")
    assert "expected bm25, bm25:NAME, exact:EMBEDDINGS, index:NAME, splade:NAME, or A+B" in refused(*at, "splade:")
    line = refused(*at, "splade:impacts", "--nprobe", 3)
    assert line == "error: --nprobe 3: splade:impacts has no use for it, it goes with an index"
    line = refused(*at, "index:idx+splade:impacts+splade:impacts")
    assert line.endswith("a source is given twice")


def test_a_store_on_s3_has_the_bytes_and_the_hits_of_a_local_one(
    masked: Path, bucket: str, tmp_path: Path, done: Done
) -> None:
    passages = make_passages(24)
    queries, judged = make_queries(passages, 6)
    source = write_beir(tmp_path / "tiny", passages, queries, {"test": judged})
    hashes = []
    for url in (str(tmp_path / "store"), f"{bucket}/store"):
        at = ("--store", url)
        done("import_corpus", *at, "--source", source, "--part-size", 12)
        done("encode_corpus", *at, "--encoder", masked, "--name", "sparse", *EXACT)
        hashes.append([part.sha256 for part in Store(url).open("embeddings", "sparse/g0000").parts])
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 2
    done("build_index", *at, "--shards", 2)
    done("search", *at, "--source", "splade:sparse", "--k", 5, "--name", "found")
    store = Store(url)
    split = Queries.open(store).split("test")
    expected = brute_force(store, "sparse", encode_queries(masked, split.texts), 5)
    assert run_of(store, "found") == dict(zip(split.ids, expected, strict=True))


def test_a_mode_takes_the_only_artifact_of_its_kind(store: Store, done: Done, refused: Done) -> None:
    """The store has dense and sparse embeddings, and an index over each; one of them is searched without its name."""
    at = ("--store", store.url)
    sources = {"dense": "index:idx", "exact": "exact:enc", "hybrid": "0.5*bm25+0.5*index:idx"}
    for mode, source in sources.items():
        assert f"source   {source}, over" in done("search", *at, "--mode", mode, "--plan")
    assert "task      default: index/idx, bm25/bm25\n" in done("serve_search", *at, "--renew", "--plan")
    shutil.copytree(Path(store.url) / "index/impacts", Path(store.url) / "index/other")
    assert "source   index:idx, over" in done("search", *at, "--mode", "dense", "--plan")
    shutil.rmtree(Path(store.url) / "index/other")
    shutil.rmtree(Path(store.url) / "index/idx")
    assert "source   0.5*bm25+0.5*exact:enc, over" in done("search", *at, "--mode", "hybrid", "--plan")
    line = refused("search", *at, "--mode", "dense")
    assert line.endswith("index/impacts holds the impacts of sparse embeddings: search it by the source splade:impacts")


def test_a_search_without_a_mode_takes_what_a_release_takes(
    store: Store, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    """Artifacts are removed one after the other; a release searches the same in its richest mode."""
    root, at = Path(store.url), ("search", "--store", store.url)

    def release_source(**named: str) -> str:
        [task] = (task for task in plan_release(store, **named, live=None)[0].tasks if task.name == "default")
        return search_of_mode(task, supported_modes(task)[-1]).source

    assert default_source(store) == release_source() == "0.5*bm25+0.5*index:idx"
    out = done(*at, "--query", "bafa")
    assert out.startswith("no --mode given: searching 0.5*bm25+0.5*index:idx\nbafa  (0.5*bm25+0.5*index:idx, 10")
    assert "index/idx is over embeddings/enc, not sparse" in refused(*at, "--embeddings", "sparse", "--index", "idx")
    shutil.copytree(root / "index/idx", root / "index/other")
    line = refused(*at, "--query", "bafa")
    told = "has several indexes over embeddings/enc: idx, other; say which with --index NAME"
    assert line.endswith(told)
    assert default_source(store, index="other") == release_source(index="other") == "0.5*bm25+0.5*index:other"
    shutil.rmtree(root / "index/other")
    shutil.rmtree(root / "index/idx")
    assert default_source(store) == release_source() == "0.5*bm25+0.5*exact:enc"
    assert "no --mode given: searching 0.5*bm25+0.5*exact:enc\n" in done(*at, "--plan")
    shutil.copytree(root / "embeddings/enc", root / "embeddings/more")
    line = refused(*at, "--query", "bafa")
    assert "has several embeddings: enc, more; say which with --embeddings NAME" in line
    documented("Searching", "a search without a mode or source, of a store with several embeddings", line, 1)
    assert default_source(store, "more") == release_source(embeddings="more") == "0.5*bm25+0.5*exact:more"
    shutil.rmtree(root / "embeddings/more")
    words = shutil.move(root / "bm25", root / "words")
    assert default_source(store) == release_source() == "exact:enc"
    shutil.rmtree(root / "embeddings/enc")
    assert "(splade:impacts, 10 hits)" in done(*at, "--query", "bafa")
    shutil.move(words, root / "bm25")
    assert default_source(store) == release_source() == "bm25"


def test_a_store_without_anything_to_search_names_the_commands(
    store: Store, refused: Done, documented: Callable[..., None]
) -> None:
    root, at = Path(store.url), ("search", "--store", store.url, "--query", "bafa")
    for name in ("bm25", "index", "embeddings/enc"):
        shutil.rmtree(root / name)
    told = "there is nothing to search: build an index of its sparse embeddings (riptide build-index), or build a BM25 "
    assert told in refused(*at)
    shutil.rmtree(root / "embeddings")
    line = refused(*at)
    assert line.endswith(
        "nothing to search: encode the corpus (riptide encode-corpus), or build a BM25 index (riptide build-bm25)"
    )
    documented("Searching", "a search without a mode or source, of a store with only a corpus", line, 1)
    store.create("bm25", "bm25/g0000")
    assert "there is nothing to search (bm25/bm25/g0000: begun and not complete): encode" in refused(*at)
    shutil.rmtree(root / "corpus")
    assert (
        "/corpus/g0000: there is no such artifact (complete corpus: none); riptide import-corpus makes one"
        in refused(*at)
    )
    with pytest.raises(InputError, match=r"enc: there is no such artifact .*; riptide encode-corpus makes one"):
        default_source(store, "enc")
