"""A new kind of vector, once it is registered, is encoded, indexed, searched, mined and evaluated as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from several_vectors import PIECE, SeveralEmbeddings, SeveralKind, max_sim, pieces, several_kind

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.vector_kind import VectorKind
from riptide.indexing.queries.queries import Queries
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.store import Store
from riptide.jobs import encode_corpus
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.options import EncoderOptions

Done = Callable[..., str]
OPTIONS = EncoderOptions(pooling="last", dtype="float32", compile="never")  # those of `several`, before vectors are cut


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with several_kind():
        yield


@pytest.fixture
def encode(world, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """encode(plan=...) encodes the corpus of the small store to embeddings/many, and returns what the job printed."""

    def run(*, plan: bool = False) -> str:
        capsys.readouterr()
        vectors = EncoderOptions(pooling="several", dtype="float32", compile="never")
        encode_corpus.main(
            encode_corpus.EncodeCorpus(
                store=str(world.store), encoder=world.model, name="many", plan=plan, vectors=vectors
            )
        )
        return capsys.readouterr().out

    return run


def brute_force(world, split: str, k: int) -> dict[str, list[str]]:
    """Returns the ids of the top k passages of each query of a split."""
    encoder = Encoder(world.model, OPTIONS)
    queries = Queries.open(Store(str(world.store))).split(split)

    def encoded(texts: list[str], side) -> list[np.ndarray]:
        tokens = encoder.tokenize(texts, side=side)
        return pieces(encoder.forward(tokens, side=side), tokens.lengths)

    texts = encoder.compose([row["title"] for row in world.passages], [row["text"] for row in world.passages])
    passages = encoded(texts, "passage")
    assert len({len(vectors) for vectors in passages}) > 1, "passages have different numbers of vectors"
    best = {}
    for id, query in zip(queries.ids, encoded(queries.texts, "query"), strict=True):
        scores = [max_sim(query, passage) for passage in passages]
        rows = sorted(range(len(scores)), key=lambda row: (-np.float32(scores[row]), row))[:k]
        best[id] = [world.passages[row]["_id"] for row in rows]
    return best


def test_jobs_use_it_without_other_changes(world, encode, done: Done, refused: Done, tmp_path: Path) -> None:
    store = Store(str(world.store))
    assert "writes   up to 960 vectors of 8" in encode(plan=True)
    assert "embeddings/many/g0000: 240 passages with up to 4 vectors, " in encode()
    part = world.store / "embeddings/many/g0000"
    for file in (part / "manifest.json", part / "part-00001.json"):
        file.unlink()
    assert "240 passages (180 kept)" in encode()
    embeddings = SeveralEmbeddings.open(store, "many", Corpus.open(store))
    assert {vectors.shape[1] for vectors in embeddings.take(np.arange(240))} == {PIECE}

    build = ("build_index", "--store", store.url, "--embeddings", "many")
    plan = done(*build, "--plan")
    assert "copy: 240 passages in 4 units of work" in plan
    assert "memory   the vectors of a shard" in plan
    assert "index/many: 240 passages" in done(*build)
    assert "nothing to make" in done(*build, "--plan")
    line = refused(*build, "--name", "flat", "--factory", "Flat")
    assert line.endswith("--factory: embeddings/many has several vectors, whose index is brute force: leave it out")

    done("search", "--store", store.url, "--source", "several:many", "--split", "test", "--k", 5)
    found: dict[str, list[str]] = {}
    for table in read_run(store.open("runs", "tiny-test-several-many")):
        for hit in table.to_pylist():
            found.setdefault(hit["query_id"], []).append(hit["id"])
    assert found == brute_force(world, "test", 5)

    sources = ("--source", "several:many", "0.5*several:many+0.5*index:idx")
    out = done("evaluate", "--store", store.url, "--metrics", "RR@10", *sources, "--json", tmp_path / "figures.json")
    assert "tiny-test-several-many-top10" in out
    assert json.loads((tmp_path / "figures.json").read_text())["mean"]["tiny-test-several-many-top10"]["RR@10"] > 0
    mine = ("mine_negatives", "--store", store.url, "--sources", "several:many", "--depth", 5)
    assert "candidates/tiny-train-several-many" in done(*mine)


def test_a_store_that_has_no_other_vectors_is_searched_by_it(world, encode, done: Done) -> None:
    encode()
    done("build_index", "--store", world.store, "--embeddings", "many")
    for name in ("runs/exact", "runs/dense", "index/idx", "embeddings/enc"):
        shutil.rmtree(world.store / name)
    out = done("search", "--store", world.store, "--query", "bafa")
    assert "several:many" in out


def test_readers_of_other_kinds_refuse_it_by_name(world, encode, done: Done, refused: Done) -> None:
    encode()
    done("build_index", "--store", world.store, "--embeddings", "many")
    search = ("search", "--store", world.store, "--source")
    line = refused(*search, "exact:many")
    assert "embeddings/many: holds several vectors, expected dense ones" in line
    line = refused(*search, "index:many")
    assert line.endswith("index/many holds several vectors per passage: search it by the source several:many")
    line = refused(*search, "several:idx")
    assert line.endswith("index/idx is a FAISS index of dense embeddings: search it by the source index:idx")
    line = refused("evaluate", "--store", world.store, "--metrics", "", "--embeddings", "many")
    assert "holds several vectors, expected dense ones" in line


def test_a_kind_that_lacks_a_method_is_named_in_one_line() -> None:
    class Unfinished(VectorKind):
        write, read, describe_vectors = SeveralKind.write, SeveralKind.read, SeveralKind.describe_vectors

    with pytest.raises(
        TypeError, match=r"Can't instantiate abstract class Unfinished with abstract method describe_size$"
    ):
        Unfinished()
