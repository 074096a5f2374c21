"""A corpus that grows: only what is new is encoded and indexed, and a search equals that of a store built anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from samples import brute_force, make_passages, write_beir

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions

Done = Callable[..., str]
NUMERICS = ("--dtype", "float32", "--compile", "never")


def hits_of(store: Path, run: str) -> dict[str, list[tuple[str, float]]]:
    found: dict[str, list[tuple[str, float]]] = {}
    for table in read_run(Store(str(store)).open("runs", run)):
        for row in table.to_pylist():
            found.setdefault(row["query_id"], []).append((row["id"], row["score"]))
    return found


def same_hits(one: list[tuple[str, float]], other: list[tuple[str, float]]) -> None:
    """The same scores, and the same passage at each rank but for such as score the same within float16's precision.

    A passage encoded in another batch may differ in its vector's last bit.
    """
    assert [score for _, score in one] == pytest.approx([score for _, score in other], rel=2e-3, abs=2e-3)
    scores = dict(other)
    for (id, score), (expected, _) in zip(one, other, strict=True):
        if id != expected:
            assert score == pytest.approx(scores.get(id, other[-1][1]), rel=2e-3, abs=2e-3)


def test_only_what_is_new_is_done_and_results_are_those_of_a_store_built_anew(
    world, done: Done, refused, tmp_path: Path
) -> None:
    new = make_passages(24, seed=11, prefix="n")
    replaced = {**make_passages(1, seed=12)[0], "_id": "p77", "title": "anew"}
    # Among the deleted are the best hits of queries, which must not come back.
    before = hits_of(world.store, "exact")
    gone = sorted({before["q0"][0][0], before["q1"][0][0], before["q2"][1][0]} - {"p77"})
    (tmp_path / "gone").write_text("\n".join([*gone, "p77"]))
    source = write_beir(tmp_path / "more", [*new, replaced])
    at = ("--store", world.store)
    done("import_corpus", *at, "--source", source, "--append", "--delete", tmp_path / "gone", "--part-size", 60)

    # What was made of the first generation alone is told, not searched as if it were whole.
    line = refused("search", *at, "--mode", "exact")
    assert "embeddings/enc covers 240 of the corpus' 265 passages: run riptide" in line
    assert "riptide encode-corpus --name enc again, with the same options, to encode the new ones" in line

    kept = {path: path.stat().st_mtime_ns for path in world.store.rglob("*") if path.is_file()}
    out = done("encode_corpus", *at, "--encoder", world.model, "--name", "enc", *NUMERICS)
    assert "265 passages (240 kept)" in out
    line = refused("search", *at, "--mode", "dense")
    assert "index/idx covers 240 of the 265 vectors of embeddings/enc: run riptide" in line
    assert "riptide build-index --name idx again, with the same options, to add the new ones" in line
    done("build_index", *at, "--name", "idx", "--factory", "IVF4,PQ8x4fs", "--shards", 3)
    store = Store(str(world.store))
    assert [part.name for part in store.open("embeddings", "enc/g0001").numbered_parts("part")] == ["part-00000"]
    assert [(p.name, p.facts["first_row"], p.facts["end"]) for p in store.open("index", "idx/g0001").parts] == [
        ("shard-00000", 240, 265)  # under the first generation's quantiser
    ]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept

    for mode in ("exact", "dense"):
        done("search", *at, "--mode", mode, "--k", 50, "--name", f"{mode}-grown")
    final = [p for p in world.passages if p["_id"] not in {*gone, "p77"}] + new + [replaced]
    judged = [(q, p, 1) for q, p, _ in world.judged[:30] if p not in gone]
    anew = write_beir(tmp_path / "anew", final, world.queries, {"test": judged})
    fresh = ("--store", tmp_path / "fresh")
    done("import_corpus", *fresh, "--source", anew, "--part-size", 60)
    done("encode_corpus", *fresh, "--encoder", world.model, "--name", "enc", *NUMERICS)
    done("search", *fresh, "--mode", "exact", "--split", "all", "--k", 50, "--name", "anew")

    grown, built = hits_of(world.store, "exact-grown"), hits_of(tmp_path / "fresh", "anew")
    assert len(grown) == 30
    for query, hits in grown.items():
        same_hits(hits, built[query])
    found = {
        id for run in ("exact-grown", "dense-grown") for hits in hits_of(world.store, run).values() for id, _ in hits
    }
    assert not found & set(gone)
    assert found & {passage["_id"] for passage in new}

    # The exact run is brute force over the vectors that are left, the replaced passage by its new row alone.
    corpus = Corpus.open(store)
    vectors = Embeddings.open(store, "enc", corpus).take(np.arange(265))
    texts = {query["_id"]: query["text"] for query in world.queries}
    options = EncoderOptions(dtype="float32", compile="never")
    queries = Encoder(world.model, options, threads=2).encode([texts[query] for query in grown], side="query")
    ids = [p["_id"] for p in [*world.passages, *new, replaced]]
    for hits, best in zip(grown.values(), brute_force(queries, vectors, 50, corpus.deleted.tolist()), strict=True):
        assert hits == [(ids[row], score) for row, score in best]
    assert corpus.rows_of(["p77"]).tolist() == [264]
    for query, hits in hits_of(world.store, "dense-grown").items():
        assert set(hits) <= set(hits_of_all(queries, vectors, ids, list(grown).index(query)))

    # The run was made of the corpus as it was: under its name another one is refused.
    line = refused("search", *at, "--mode", "exact", "--k", 20, "--name", "exact")
    assert "runs/exact was made otherwise" in line
    assert "corpus/g0001" in line


def hits_of_all(queries: np.ndarray, vectors: np.ndarray, ids: list[str], query: int) -> list[tuple[str, float]]:
    [best] = brute_force(queries[query : query + 1], vectors, len(vectors))
    return [(ids[row], score) for row, score in best]


def test_deletion_alone_needs_no_encoding_of_anything(world, done: Done, tmp_path: Path) -> None:
    best = hits_of(world.store, "exact")["q3"][0][0]
    (tmp_path / "gone").write_text(f"{best}\n")
    at = ("--store", world.store)
    done("import_corpus", *at, "--delete", tmp_path / "gone")
    for mode in ("exact", "dense"):
        done("search", *at, "--mode", mode, "--k", 20, "--name", f"{mode}-less")
        less, full = hits_of(world.store, f"{mode}-less"), hits_of(world.store, mode)
        for query, hits in less.items():
            assert hits[:19] == [hit for hit in full[query] if hit[0] != best][:19]
    done("encode_corpus", *at, "--encoder", world.model, "--name", "enc", *NUMERICS)
    done("build_index", *at, "--name", "idx", "--factory", "IVF4,PQ8x4fs", "--shards", 3)
    done("search", *at, "--mode", "dense", "--k", 20, "--name", "dense-after")
    assert hits_of(world.store, "dense-after") == hits_of(world.store, "dense-less")


def test_a_sync_gives_the_hits_of_a_store_built_anew_and_encodes_what_differs(
    world, done: Done, tmp_path: Path
) -> None:
    new = make_passages(24, seed=11, prefix="n")
    replaced = {**make_passages(1, seed=12)[0], "_id": "p77", "title": "anew"}
    gone = {"p3", "p50", "p239"}
    kept = [passage for passage in world.passages if passage["_id"] not in {*gone, "p77"}]
    judged = [judgement for judgement in world.judged[:30] if judgement[1] not in gone]
    source = write_beir(tmp_path / "tiny", [replaced, *new, *kept], world.queries, {"test": judged})
    at, fresh = ("--store", world.store), ("--store", tmp_path / "fresh")
    sync = ("import_corpus", *at, "--source", source, "--sync", "--part-size", 60)
    difference = "sync     24 added, 1 changed, 3 removed, 236 unchanged"
    assert difference in done(*sync, "--plan")
    assert len(Store(str(world.store)).generations("corpus")) == 1
    assert difference in done(*sync)
    assert "265 passages (240 kept)" in done("encode_corpus", *at, "--encoder", world.model, "--name", "enc", *NUMERICS)
    assert "sync     0 added, 0 changed, 0 removed, 261 unchanged" in done(
        *sync, "--max-removed", 0, "--decode-entities"
    )
    assert len(Store(str(world.store)).generations("corpus")) == 2

    done("import_corpus", *fresh, "--source", source, "--sync", "--part-size", 60)  # without a corpus, an import
    done("encode_corpus", *fresh, "--encoder", world.model, "--name", "enc", *NUMERICS)
    for store in (at, fresh):
        done("search", *store, "--mode", "exact", "--split", "all", "--k", 50, "--name", "now")
    synced, built = hits_of(world.store, "now"), hits_of(tmp_path / "fresh", "now")
    assert synced.keys() == built.keys()
    for query, hits in synced.items():
        same_hits(hits, built[query])
