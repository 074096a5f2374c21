"""build_index on sparse embeddings: exact search over any shards, resumed and grown; what does not fit is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from samples import make_passages, write_beir

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.queries.queries import Queries
from riptide.indexing.sparse import building
from riptide.indexing.sparse.index import ImpactIndex
from riptide.indexing.sparse.sparse_embeddings import SparseEmbeddings
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.sparse_encoder import SparseEncoder
from riptide.retriever.options import EncoderOptions

Done = Callable[..., str]
NOTHING = np.empty(0, np.int64)


def opened(path: Path, name: str = "sparse") -> ImpactIndex:
    store = Store(str(path))
    return ImpactIndex.open(store, name, SparseEmbeddings.open(store, "sparse", Corpus.open(store)))


def test_the_index_ranks_by_the_product_of_whole_weights(world, masked: Path, encode, done: Done) -> None:
    """Of the vectors of the encoder, for one shard and four, after one was lost, and with new passages."""
    done(*encode("--passage-terms", 40))
    build = ("build_index", "--store", world.store, "--embeddings", "sparse")
    assert "vectors  240 over 297 words in embeddings/sparse" in done(*build, "--plan")
    out = done(*build)
    assert "index/sparse/g0000: 240 vectors in 4 shards, 40.0 words each, impacts up to " in out
    assert "index impacts" not in done(*build)
    done(*build, "--shards", 1, "--name", "one")

    folder = world.store / "index/sparse/g0000"  # Lucene's bytes differ from build to build
    for path in (folder / "manifest.json", folder / "provenance.json", folder / "shard-00002.json"):
        path.unlink()
    assert "240 vectors (180 kept)" in done(*build)

    source = write_beir(world.store.parent / "more", make_passages(24, seed=11, prefix="n"))
    done("import_corpus", "--store", world.store, "--source", source, "--append")
    done(*encode("--passage-terms", 40))
    for name, shards in (("sparse", 4), ("one", 1)):
        done(*build, "--name", name, "--shards", shards)
    queries = Queries.open(Store(str(world.store))).split("test").texts
    encoder = SparseEncoder(str(masked), EncoderOptions(pooling="splade", dtype="float32"))
    vectors = encoder.encode(queries)
    many, one = opened(world.store), opened(world.store, "one")
    assert (len(many.shards), len(one.shards)) == (5, 2)
    passages = many.embeddings.take(np.arange(264)).dense()
    weights = [np.rint(100 * matrix.astype(np.float64)).astype(np.int64) for matrix in (vectors.dense(), passages)]
    scores = weights[0] @ weights[1].T
    for index in (many, one):
        hits = index.search(vectors, 20, NOTHING, threads=2)
        for number, line in enumerate(scores.tolist()):
            expected = sorted(range(264), key=lambda row: (-line[row], row))[:20]
            assert hits.rows[number].tolist() == expected
            assert hits.scores[number].tolist() == [line[row] for row in expected]


def test_what_does_not_fit_is_refused(world, encode, done: Done, refused: Done) -> None:
    done(*encode())
    build = ("build_index", "--store", world.store, "--embeddings", "sparse")
    line = refused(*build, "--factory", "Flat")
    assert "--factory: embeddings/sparse has sparse vectors, whose index is Lucene's and not FAISS': leave it" in line
    assert "--memory-gb: embeddings/sparse has sparse" in refused(*build, "--memory-gb", "1")
    assert "--recall: embeddings/sparse has sparse" in refused(*build, "--recall", "0.99")
    assert "--limit 5: embeddings/sparse has 240 rows" in refused(*build, "--limit", "5")
    assert "index/idx/g0000 was built from embeddings/enc/g0000" in refused(*build, "--name", "idx")
    done(*build, "--shards", 2)
    line = refused("build_index", "--store", world.store, "--embeddings", "enc", "--name", "sparse")
    assert "index/sparse/g0000 was built from embeddings/sparse/g0000" in line
    line = refused("search", "--store", world.store, "--mode", "dense", "--index", "sparse")
    assert "index/sparse holds the impacts of sparse embeddings: search it by the source splade:sparse" in line
    shutil.rmtree(world.store / "index/sparse")


@pytest.mark.parametrize("value", ["nan", "1e9"])
def test_weights_that_overflow_end_the_job_with_one_line(
    world, encode, done: Done, refused: Done, documented: Callable[..., None], value: str
) -> None:
    done(*encode())
    original = building.quantise
    with pytest.MonkeyPatch.context() as patch:

        def overflowing(vectors, label):
            vectors.values[0] = float(value)
            return original(vectors, label)

        patch.setattr(building, "quantise", overflowing)
        line = refused("build_index", "--store", world.store, "--embeddings", "sparse", "--shards", 1)
    assert "embeddings/sparse: passage 0: the weight " in line
    assert "does not fit an impact: expected 0 to 21,474,836" in line
    if value == "1e9":
        documented("Stores", "build_index on sparse embeddings with a weight that overflows an impact", line, 1)
