"""The bytes of a small store stay what they are: every kind of artifact, built by the jobs.

Kinds whose bytes do not depend on the CPU are compared with the digests in `golden_store.json`
(`RIPTIDE_WRITE_GOLDEN=1` writes them). The vectors here are small multiples of 1/8, so that every product is exact in
any order of summation. The other kinds (embeddings, a trained index, an exact run) are compared with the plain
functions that a worker calls, so that a driver can neither reorder nor lose anything.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from samples import make_passages, make_queries, save_tiny_bert, write_beir

from riptide.indexing.corpus.corpus import Corpus, open_table
from riptide.indexing.dense.building import sample_rows
from riptide.indexing.dense.factory import training_size
from riptide.indexing.dense.faiss_filling import fill_shard, train_quantizer
from riptide.indexing.dense.faiss_index import read_index, write_index
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions

FILE = Path(__file__).parent / "golden_store.json"
EXACT_NUMERICS = ("--dtype", "float32", "--compile", "never")
DIM = 16


@dataclass(frozen=True)
class Golden:
    """A store whose first generation this machine has made without Ray, and what the next generation is made from."""

    root: Path
    model: str
    call_job: Callable[..., int]

    def job(self, store: Path, name: str, *arguments: object) -> None:
        assert self.call_job(name, "--store", store, *arguments) == 0, name

    def grow(self, store: Path) -> None:
        """Makes embeddings, an index and BM25 of the present corpus, or of its new rows."""
        self.job(store, "encode_corpus", "--encoder", self.model, "--name", "enc", *EXACT_NUMERICS)
        lattice(Store(str(store)))
        self.job(store, "build_index", "--embeddings", "lattice", "--name", "flat", "--factory", "Flat", "--shards", 2)
        self.job(store, "build_bm25", "--shards", 2)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory, call_job: Callable[..., int]) -> Golden:
    root = tmp_path_factory.mktemp("golden")
    passages = make_passages(90)
    queries, judged = make_queries(passages[:60], 20)
    first = write_beir(root / "first", passages[:60], queries, {"test": judged[:10], "train": judged[10:]})
    write_beir(root / "second", passages[60:])
    (root / "old").write_text("p3\np41\n")
    golden = Golden(root, save_tiny_bert(root / "model"), call_job)
    store = root / "first-generation"
    golden.job(store, "import_corpus", "--source", first, "--part-size", 25, "--filters", "year", "int64")
    golden.grow(store)
    return golden


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.cluster)])
def store(request: pytest.FixtureRequest, golden: Golden) -> Store:
    """Every kind of artifact that does not come from training, in two generations where it has generations."""
    if request.param == "ray":
        request.getfixturevalue("local_ray")
    root, store = golden.root, golden.root / request.param
    shutil.copytree(root / "first-generation", store)
    more = ("--source", root / "second", "--part-size", 25, "--append", "--delete", root / "old")
    golden.job(store, "import_corpus", *more)
    golden.grow(store)
    golden.job(store, "build_index", "--embeddings", "enc", "--name", "ivf", "--factory", "IVF4,SQ8", "--shards", 2)
    golden.job(store, "search", "--mode", "bm25", "--split", "test", "--k", 10, "--name", "words")
    exact = ("--mode", "exact", "--embeddings", "enc", "--split", "test", "--k", 10, "--name", "exact")
    golden.job(store, "search", *exact)
    pools = ("--split", "train", "--sources", "bm25", "--depth", 20, "--part-queries", 4, "--pool-negatives", 5)
    golden.job(store, "mine_negatives", *pools, "--denoised-negatives", 0, "--name", "mined")
    return Store(str(store))


def lattice(store: Store) -> None:
    """Embeddings whose numbers are multiples of 1/8 between -1 and 1, drawn with each part's first row as the seed."""
    corpus = Corpus.open(store)
    for artifact in corpus.generations:
        name = f"lattice/{artifact.key.rpartition('/')[2]}"
        if name in store.names("embeddings"):
            continue
        config = {"encoder": {"head": []}, "numerics": "exact in any order", "limit": None}
        with store.create("embeddings", name, inputs={"corpus": artifact}, config=config) as draft:
            for part in corpus.parts:
                if part.artifact.key == artifact.key:
                    draw = np.random.default_rng(part.first_row).integers(-8, 9, (part.part.rows, DIM))
                    vectors = (draw / 8).astype(np.float16)
                    draft.commit(part.part.name, ".npy", lambda path, v=vectors: np.save(path, v), rows=len(vectors))
            draft.add_notes(encoder="none", options={}, task=None, dim=DIM, similarity="dot")


def digests(artifact: Artifact) -> dict[str, object]:
    """What is pinned of an artifact: its fingerprint and the rows and digest of each part."""
    parts = {part.name: [part.rows, part.sha256] for part in artifact.parts}
    if artifact.kind == "bm25":  # Lucene writes random identifiers and times
        parts = {name: [rows, "differs from build to build"] for name, (rows, _) in parts.items()}
    return {"fingerprint": artifact.fingerprint, "parts": parts}


def test_kinds_that_do_not_depend_on_the_cpu_have_the_digests_on_record(store: Store) -> None:
    kinds = {"corpus", "queries", "bm25", "candidates", "negatives"}
    keys = [
        key
        for key in map(str, store.keys())
        if key.split("/")[0] in kinds or "lattice" in key or key.startswith(("index/flat/", "runs/words"))
    ]
    found = {key: digests(store.open(*key.split("/", 1))) for key in sorted(keys)}
    if os.environ.get("RIPTIDE_WRITE_GOLDEN"):
        FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    assert found == json.loads(FILE.read_text())


def test_embeddings_are_those_of_the_encoder_called_part_by_part(store: Store, tmp_path: Path) -> None:
    embeddings = Embeddings.open(store, "enc", Corpus.open(store))
    encoder = Encoder(embeddings.encoder_name, EncoderOptions(dtype="float32", compile="never"), device="cpu")
    for made, part in zip(embeddings.parts, Corpus.open(store).parts, strict=True):
        table = open_table(part)
        texts = encoder.compose(table["title"].to_pylist(), table["text"].to_pylist())
        np.save(tmp_path / "expected.npy", encoder.encode(texts, side="passage").astype(np.float16))
        assert made.artifact.local_path(made.part).read_bytes() == (tmp_path / "expected.npy").read_bytes()


def test_a_trained_index_is_that_of_the_faiss_functions_called_shard_by_shard(store: Store, tmp_path: Path) -> None:
    [index] = store.generations("index", "ivf")
    embeddings = Embeddings("enc", store.generations("embeddings", "enc"))
    assert embeddings.num_rows == 90
    rows = sample_rows(embeddings, training_size("IVF4,SQ8", embeddings.num_rows))
    trained = train_quantizer(embeddings.take(rows), "IVF4,SQ8", seed=0, threads=1)
    write_index(trained, tmp_path / "quantizer")
    assert index.local_path("quantizer").read_bytes() == (tmp_path / "quantizer").read_bytes()
    for part, (first, end) in zip(index.numbered_parts("shard"), [(0, 45), (45, 90)], strict=True):
        vectors = (piece for _, piece in embeddings.read_range(first, end))
        filled = fill_shard(read_index(tmp_path / "quantizer"), vectors, first, threads=1)
        write_index(filled, tmp_path / part.name)
        assert index.local_path(part).read_bytes() == (tmp_path / part.name).read_bytes()


def test_an_exact_run_is_that_of_a_brute_force_search(store: Store) -> None:
    corpus = Corpus.open(store)
    embeddings = Embeddings.open(store, "enc", corpus)
    encoder = Encoder(embeddings.encoder_name, EncoderOptions(dtype="float32", compile="never"), device="cpu")
    run = store.open("runs", "exact")
    table = pq.read_table(run.local_path(run.parts[0]))
    queries = store.open("queries", store.names("queries")[0])
    texts = dict(zip(*(open_ids_and_texts(queries)), strict=True))
    vectors = embeddings.take(np.arange(corpus.num_rows)).astype(np.float64)
    for query in dict.fromkeys(table["query_id"].to_pylist()):
        scores = (vectors @ encoder.encode([texts[query]], side="query")[0].astype(np.float64)).astype(np.float32)
        scores[corpus.deleted] = -np.inf
        best = np.lexsort((np.arange(len(scores)), -scores))[:10]
        mine = table.filter(pq.filters_to_expression([("query_id", "=", query)]))
        assert mine["row"].to_pylist() == best.tolist()
        np.testing.assert_allclose(mine["score"].to_numpy(), scores[best], rtol=1e-6)


def open_ids_and_texts(queries: Artifact) -> tuple[list[str], list[str]]:
    """Ids and texts of a query set."""
    import pyarrow as pa

    table = pa.ipc.open_file(pa.memory_map(str(queries.local_path("part-00000")))).read_all()
    return table["id"].to_pylist(), table["text"].to_pylist()
