"""Indexes: shards that hold every row once, resumed to the same bytes, with a recall that is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crash_points
import numpy as np
import pytest
from crash_points import counted_writes
from samples import files_of, write_beir

from riptide.base.errors import StorageError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.dense import building, kmeans
from riptide.indexing.dense import shard as shards
from riptide.indexing.dense.faiss_index import faiss
from riptide.indexing.dense.index import Index
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions

Done = Callable[..., str]
EXACT_NUMERICS = ("--dtype", "float32", "--compile", "never")


def command(world, *more: object) -> tuple:
    return ("build_index", "--store", world.store, *more)


def same(world, *more: object) -> tuple:
    """The command that made `idx`."""
    return command(world, "--name", "idx", "--factory", "IVF4,PQ8x4fs", "--shards", 3, *more)


def opened(world, name: str) -> tuple[Index, Embeddings]:
    store = Store(str(world.store))
    embeddings = Embeddings.open(store, "enc", Corpus.open(store))
    return Index.open(store, name, embeddings), embeddings


def test_shards_hold_each_row_once_in_contiguous_ranges(world) -> None:
    index, _ = opened(world, "idx")
    assert [(shard.first_row, shard.end) for shard in index.shards] == [(0, 80), (80, 160), (160, 240)]
    rows = []
    for shard in index.shards:
        owner = faiss.read_index(str(shard.artifact.local_path(shard.part)))
        lists = faiss.extract_index_ivf(owner).invlists
        held = [faiss.rev_swig_ptr(lists.get_ids(n), lists.list_size(n)).copy() for n in range(lists.nlist)]
        assert sorted(np.concatenate(held).tolist()) == list(range(shard.first_row, shard.end))
        rows += np.concatenate(held).tolist()
    assert sorted(rows) == list(range(240))


def test_the_recall_in_the_manifest_is_the_one_that_its_search_parameters_give(world, done: Done) -> None:
    """Measured again, with FAISS alone, on an index that loses some: every vector as a query, without itself."""
    out = done(*command(world, "--name", "coarse", "--factory", "IVF8,Flat", "--shards", 2, "--recall", 0.9))
    index, embeddings = opened(world, "coarse")
    assert f"IVF8,Flat\n  recall@10 {index.recall['10']:.4f}, " in out
    vectors = embeddings.take(np.arange(240)).astype(np.float32)
    products = vectors @ vectors.T
    np.fill_diagonal(products, -np.inf)
    found: list[list[int]] = []
    shards = [faiss.read_index(str(shard.artifact.local_path(shard.part))) for shard in index.shards]
    for shard in shards:
        shard.nprobe = index.effort
    hits = [shard.search(vectors, 201) for shard in shards]
    for query in range(240):
        pairs = [(-s, r) for scores, rows in hits for s, r in zip(scores[query], rows[query], strict=True) if r >= 0]
        found.append([row for _, row in sorted(pairs) if row != query])
    for k in (10, 100):
        truth = np.argsort(-products, axis=1, kind="stable")[:, :k]
        shares = [len({*row[:k]} & {*best}) / k for row, best in zip(found, truth.tolist(), strict=True)]
        assert index.recall[str(k)] == pytest.approx(np.mean(shares), abs=2e-3)
    assert index.recall["100"] >= 0.9
    assert index.generations[0].notes["reaches_recall"]


def test_the_recall_can_be_that_of_real_queries(world, done: Done, refused) -> None:
    """Measured again with FAISS alone. Half of the chosen nprobe does not reach the recall."""
    options = ("--name", "real", "--factory", "IVF8,Flat", "--shards", 1, "--recall", 0.9, "--queries", "tiny")
    out = done(*command(world, *options, "--split", "test"))
    assert "candidates a shard, with 30 queries of queries/tiny" in out
    index, embeddings = opened(world, "real")
    texts = Queries.open(Store(str(world.store)), "tiny").split("test").texts
    encoder = Encoder(world.model, EncoderOptions(dtype="float32", compile="never"), threads=2)
    queries, vectors = encoder.encode(texts, side="query"), embeddings.take(np.arange(240)).astype(np.float32)
    [shard] = [faiss.read_index(str(shard.artifact.local_path(shard.part))) for shard in index.shards]
    truth = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")
    for nprobe in (index.effort // 2, index.effort):
        shard.nprobe = nprobe
        pairs = zip(shard.search(queries, 100)[1].tolist(), truth[:, :100].tolist(), strict=True)
        recall = np.mean([len({*found} & {*best}) / 100 for found, best in pairs])
        assert (recall >= 0.9) == (nprobe == index.effort)
    assert index.recall["100"] == pytest.approx(recall, abs=2e-3)
    assert index.generations[0].notes["queries"] == 30
    line = refused(*command(world, *options[:-2]))
    assert "was built otherwise (--queries tiny, now unset, --split test, now unset)" in line


def test_the_recall_can_be_that_of_queries_with_filters(
    world, done: Done, refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured again with FAISS alone, in lists in proportion to the filter. A filter with few passages is left out."""
    monkeypatch.setattr(shards, "EXACT_ROWS", 60)
    monkeypatch.setattr(building, "KS", (10,))
    done("import_corpus", "--store", world.store, "--filters", "year", "int64")
    filters = ["", "year >= 2020", {"year": {"gte": 2100}}]  # 240, 120 and 40 of 240 passages match
    rows = [
        {"id": each["_id"], "query": each["text"], "filter": filters[n % 3]} for n, each in enumerate(world.queries)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done("import_queries", "--store", world.store, "--source", tmp_path / "log.jsonl")
    options = ("--name", "real", "--factory", "IVF8,Flat", "--shards", 1, "--recall", 0.9, "--queries", "log")
    measured = [row for row in rows if not isinstance(row["filter"], dict)]
    out = done(*command(world, *options, "--filter-field", "filter"))
    assert f"candidates a shard, with {len(measured)} queries of queries/log (filters: 1)" in out
    index, embeddings = opened(world, "real")
    encoder = Encoder(world.model, EncoderOptions(dtype="float32", compile="never"), threads=2)
    queries = encoder.encode([row["query"] for row in measured], side="query")
    products = queries @ embeddings.take(np.arange(240)).astype(np.float32).T
    allowed = Corpus.open(Store(str(world.store))).rows_of([f"p{number}" for number in range(120, 240)])
    [shard] = [faiss.read_index(str(shard.artifact.local_path(shard.part))) for shard in index.shards]
    for nprobe in (index.effort // 2, index.effort):
        recalls = []
        for number, row in enumerate(measured):
            some = allowed if row["filter"] else np.arange(240)
            selector = faiss.IDSelectorBatch(some)
            lists = min(8, nprobe * (2 if row["filter"] else 1))
            parameters = faiss.SearchParametersIVF(nprobe=lists, sel=selector)
            [found] = shard.search(queries[number : number + 1], 10, params=parameters)[1].tolist()
            best = some[np.argsort(-products[number, some], kind="stable")[:10]].tolist()
            recalls.append(1.0 if -1 in found and row["filter"] else len({*found} & {*best}) / 10)
        assert (np.mean(recalls) >= 0.9) == (nprobe == index.effort)
    assert index.recall["10"] == pytest.approx(np.mean(recalls), abs=2e-3)
    line = refused(*command(world, *options))
    assert "was built otherwise (--filter-field filter, now unset)" in line
    line = refused(*command(world, "--filter-field", "filter"))
    assert line == "error: --filter-field filter: expected --queries NAME with it"


def test_what_is_left_is_filled_and_the_rest_kept(world, done: Done) -> None:
    before = files_of(world.store)
    folder = world.store / "index/idx/g0000"
    lost = [folder / "manifest.json", folder / "shard-00002.json", *folder.glob("shard-00001*")]
    assert len(lost) == 4
    for path in lost:
        path.unlink()
    done(*same(world))
    assert files_of(world.store) == before
    for path in [folder / "manifest.json", *folder.glob("quantizer*")]:
        path.unlink()
    done(*same(world))
    assert files_of(world.store) == before


def test_a_finished_index_is_found_done_and_another_refused(world, done: Done, refused, no_work) -> None:
    no_work()
    before = files_of(world.store, but=())
    assert "index/idx/g0000: 240 vectors in 3 shards, IVF4,PQ8x4fs" in done(*same(world))
    line = refused(*same(world)[:-1], 4)
    assert f"{world.store}/index/idx/g0000 was built otherwise (--shards 3, now 4)" in line
    line = refused(*command(world, "--name", "idx", "--factory", "Flat", "--shards", 3, "--recall", 0.5))
    assert '--factory "IVF4,PQ8x4fs", now Flat, --recall 0.95, now 0.5' in line
    assert files_of(world.store, but=()) == before


def test_a_job_that_was_killed_before_its_first_part_does_not_block_the_corrected_command(
    world, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    """The process ends after its first write, which begins the draft."""
    at = ("build_index", "--store", world.store, "--name", "new", "--factory")
    arguments = [sys.executable, crash_points.__file__, "0", "after", *map(str, at), "IVF2,SQ8"]
    killed = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert killed.returncode == crash_points.EXIT_STATUS, killed.stderr
    line = refused(*at, "IVF4,SQ8")
    assert "parameter" not in line
    assert "another command is making it, otherwise: " in line
    assert line.endswith(
        "run this command again when that one has ended (a killed command counts as ended after 120 s)"
    )
    documented("Stores", "other options under a name whose job was killed before its first part", line, 1)
    os.utime(world.store / "index/new/g0000/manifest.begun.json", (0, 0))
    assert "index/new/g0000: 240 vectors in 4 shards, IVF4,SQ8" in done(*at, "IVF4,SQ8")


def test_an_interrupted_training_continues_from_its_last_iteration(
    world, done: Done, call_job: Callable[..., int], job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each iteration saves its centroids, and a write of the fifth one fails. Ctrl-C says whether any is kept."""
    monkeypatch.setattr(building, "CHECKPOINT_S", 0.0)
    improve, runs = kmeans._improve, []
    monkeypatch.setattr(kmeans, "_improve", lambda *arguments: runs.append(1) or improve(*arguments))
    at = command(world, "--factory", "IVF4,SQ8", "--shards", 2, "--name")
    done(*at, "whole")
    assert len(runs) == len(kmeans.STRIDES)
    runs.clear()

    def fail() -> None:
        raise StorageError("a write failed")

    store = Store(str(world.store))
    # The draft's document; of each iteration its file, latest.json, and the deletion of the previous file, if any.
    with counted_writes(1 + 2 + 3 * 3, fail):
        assert call_job(*at, "cut") == 1
    assert len(runs) == 5
    runs.clear()
    assert len(list(store.storage.list("checkpoints/cut.g0000.index"))) == 2
    assert "checkpoints" not in done("store", "gc", "--store", world.store, "--plan")
    done(*at, "cut")
    assert len(runs) == len(kmeans.STRIDES) - 4
    assert list(store.storage.list("checkpoints")) == []
    whole, cut = (store.open("index", f"{name}/g0000") for name in ("whole", "cut"))
    assert [part.sha256 for part in cut.parts] == [part.sha256 for part in whole.parts]

    def stop_in_iteration(number: int) -> Callable[..., Any]:
        def stop(*arguments: Any) -> Any:
            runs.append(1)
            if len(runs) == number:
                raise KeyboardInterrupt
            return improve(*arguments)

        runs.clear()
        return stop

    for number, is_resumable in ((1, False), (3, True)):
        monkeypatch.setattr(kmeans, "_improve", stop_in_iteration(number))
        outcome = job(*at, "stopped")
        assert (outcome.status, "run the same command again" in outcome.err) == (130, is_resumable), outcome


def test_an_index_of_an_earlier_release_grows(world, done: Done, tmp_path: Path, monkeypatch) -> None:
    """Its configuration names the threads of its training; new shards are filled with its quantizer."""
    original, old = building.BuildIndexWork.__init__, command(world, "--name", "old")

    def with_threads(self, *arguments) -> None:
        original(self, *arguments)
        self.config["training_threads"] = 2

    with monkeypatch.context() as earlier:
        earlier.setattr(building.BuildIndexWork, "__init__", with_threads)
        done(*old, "--factory", "IVF4,SQ8", "--shards", 2)
    assert "index/old/g0000: 240 vectors" in done(*old, "--factory", "IVF4,SQ8", "--shards", 2)
    write_beir(tmp_path / "more", [{"_id": f"new{i}", "text": f"some new words {i}"} for i in range(30)])
    done("import_corpus", "--store", world.store, "--source", tmp_path / "more", "--append")
    done("encode_corpus", "--store", world.store, "--encoder", world.model, "--name", "enc", *EXACT_NUMERICS)
    done(*old, "--shards", 2)
    index, _ = opened(world, "old")
    assert index.num_rows == 270
    assert [one.config["training_threads"] for one in index.generations] == [2, 2]


def test_plan_says_what_and_does_nothing(world, done: Done, no_work) -> None:
    no_work()
    before = files_of(world.store, but=())
    out = done(*command(world, "--plan", "--shards", 2))
    assert "240 of 32 in embeddings/enc" in out
    assert "stage    fill: 240 vectors in 2 units of work" in out
    assert "factory  Flat," in out
    assert "memory   0 B to train, 16.3 kB for each shard that is filled" in out
    assert "factory  IVF4,PQ16x4fsr," in done(*command(world, "--plan", "--memory-gb", 1e-5))
    assert files_of(world.store, but=()) == before


def test_auto_chooses_a_factory_and_the_name_is_the_embeddings(world, done: Done, refused) -> None:
    out = done(*command(world, "--shards", 1))
    index, _ = opened(world, "enc")
    assert index.generations[0].config["factory"] in out
    assert index.recall["100"] >= 0.95
    line = refused(*command(world, "--shards", 1, "--memory-gb", 1))
    assert "was built otherwise (--memory-gb unset, now 1.0)" in line


def test_bad_input_is_named_and_leaves_nothing(world, refused, no_work, tmp_path: Path) -> None:
    no_work()
    before = files_of(world.store, but=())
    assert "--shards 0" in refused(*command(world, "--shards", 0))
    assert "--recall 1.5" in refused(*command(world, "--recall", 1.5))
    assert "--memory-gb 0.0" in refused(*command(world, "--memory-gb", 0))
    assert "--memory-gb 1.0: expected" in refused(*command(world, "--memory-gb", 1, "--factory", "Flat"))
    assert "fits 1000 bytes" in refused(*command(world, "--memory-gb", 1e-6))
    assert "--memory-gb 1e+300: expected" in refused(*command(world, "--memory-gb", 1e300))
    assert "'IVF4,PQ7'" in refused(*command(world, "--factory", "IVF4,PQ7"))
    assert "'NSG32'" in refused(*command(world, "--factory", "NSG32"))
    assert "nonsense" in refused(*command(world, "--factory", "nonsense"))
    assert "queries/none: there is no such artifact" in refused(*command(world, "--queries", "none"))
    assert "no split 'none' with qrels" in refused(*command(world, "--queries", "tiny", "--split", "none"))
    line = refused(*command(world, "--embeddings", "other"))
    assert f"{world.store}/embeddings/other: there is no such artifact (complete embeddings: enc)" in line
    assert "--limit 5: embeddings/enc has 240 rows" in refused(*command(world, "--embeddings", "enc", "--limit", 5))
    assert files_of(world.store, but=()) == before
    assert "there is no store here" in refused("build_index", "--store", tmp_path / "none")


def test_too_few_vectors_to_train_on_are_told(world, refused) -> None:
    keys = Store(str(world.store)).keys()
    assert "IVF512,Flat needs 512 vectors or more to train on, found 240" in refused(
        *command(world, "--name", "large", "--factory", "IVF512,Flat")
    )
    assert Store(str(world.store)).keys() == keys


def test_damaged_embeddings_are_not_indexed(world, refused) -> None:
    [part] = (world.store / "embeddings/enc/g0000").glob("part-00003-*.npy")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    line = refused(*command(world, "--name", "more", "--factory", "IVF4,Flat"))
    assert f"{part.name}: its sha256 is not the committed one" in line
    assert Store(str(world.store)).names("index") == ["idx"]
