"""Searching: against a brute-force loop, with every name and refusal, and the TREC files that come of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import brute_force, files_of, make_queries, save_tiny_bert, write_beir, write_lines, write_queries

import riptide
from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.dense import faiss_search
from riptide.indexing.dense.index import Index
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.hit_sources.opened_sources import HitSources
from riptide.indexing.queries.queries import Queries
from riptide.indexing.search import retrieval
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.store import Store
from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.worker_tasks import WorkerTask
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions

Done = Callable[..., str]
Found = dict[str, list[tuple[str, int, float]]]
OPTIONS = EncoderOptions(dtype="float32", compile="never")


def command(world, mode: str, *more: object) -> tuple:
    return ("search", "--store", world.store, "--mode", mode, *more)


def hits_of(store: Path, run: str) -> Found:
    """query -> [(id, row, score)] in the run's order."""
    found: Found = {}
    for table in read_run(Store(str(store)).open("runs", run)):
        for row in table.to_pylist():
            found.setdefault(row["query_id"], []).append((row["id"], row["row"], row["score"]))
    return found


def vectors_of(world) -> np.ndarray:
    store = Store(str(world.store))
    return Embeddings.open(store, "enc", Corpus.open(store)).take(np.arange(240))


def encoded(world, split: str = "test") -> tuple[list[str], np.ndarray]:
    ids, texts = Queries.open(Store(str(world.store)), "tiny").split(split)
    return ids, Encoder(world.model, OPTIONS, threads=2).encode(texts, side="query")


def test_exact_is_brute_force_over_the_float16_vectors(world) -> None:
    ids, queries = encoded(world)
    expected = brute_force(queries, vectors_of(world), 20)
    found = hits_of(world.store, "exact")
    assert list(found) == ids == [query for query, _, _ in world.judged[:30]]
    for query, best in zip(ids, expected, strict=True):
        assert found[query] == [(f"p{row}", row, score) for row, score in best]


def test_dense_finds_by_the_index_and_scores_by_the_float16_vectors(world) -> None:
    ids, queries = encoded(world)
    every = [dict(pairs) for pairs in brute_force(queries, vectors_of(world), 240)]
    found = hits_of(world.store, "dense")
    for query, scores in zip(ids, every, strict=True):
        rows = [row for _, row, _ in found[query]]
        assert len(rows) == len(set(rows)) == 20
        assert [score for _, _, score in found[query]] == [scores[row] for row in rows]
        assert rows == sorted(rows, key=lambda row: (-scores[row], row))


def test_probing_less_finds_less_and_its_search_parameters_are_in_the_configuration(world, done: Done) -> None:
    done(*command(world, "dense", "--k", 20, "--nprobe", 1, "--depth", 25, "--name", "hasty"))
    config = Store(str(world.store)).open("runs", "hasty").config
    assert (config["search_parameters"], config["k"], config["source"]) == ({"nprobe": 1, "depth": 25}, 20, "index:idx")
    exact, hasty, dense = (hits_of(world.store, name) for name in ("exact", "hasty", "dense"))

    def recall(found: Found) -> float:
        return float(np.mean([len({h[1] for h in found[q]} & {h[1] for h in exact[q]}) / 20 for q in exact]))

    assert recall(hasty) < recall(dense)


def test_the_shards_of_an_index_share_the_lists_of_the_queries(world, done: Done, monkeypatch) -> None:
    found: list[faiss_search.QueryLists] = []
    original = faiss_search.QueryLists.find

    def find(lists: faiss_search.QueryLists, *arguments: Any) -> Any:
        found.append(lists)
        return original(lists, *arguments)

    monkeypatch.setattr(faiss_search.QueryLists, "find", find)
    done(*command(world, "dense", "--k", 20, "--name", "shared"))
    assert (len(found), len(set(found))) == (3, 1)
    with riptide.Store(world.store).search("index:idx") as search:
        found.clear()
        search("bama", 5)
    assert (len(found), len(set(found))) == (3, 1)


def test_more_hits_than_passages_are_all_passages(world, done: Done) -> None:
    for mode in ("exact", "dense"):
        done(*command(world, mode, "--k", 1000, "--name", f"all-{mode}"))
    exact, dense = hits_of(world.store, "all-exact"), hits_of(world.store, "all-dense")
    assert all(sorted(row for _, row, _ in hits) == list(range(240)) for hits in exact.values())
    assert dense == exact


def test_blocks_of_queries_are_parts_and_resume_to_the_same_bytes(world, done: Done, monkeypatch) -> None:
    monkeypatch.setattr(retrieval, "QUERY_BLOCK", 12)
    ask = command(world, "exact", "--k", 20, "--name", "blocks")
    done(*ask)
    assert [part.rows for part in Store(str(world.store)).open("runs", "blocks").parts] == [240, 240, 120]
    once, blocks = hits_of(world.store, "exact"), hits_of(world.store, "blocks")
    for query in once:  # another batch of queries may differ in a query vector's last bits
        assert [h[2] for h in blocks[query]] == pytest.approx([h[2] for h in once[query]], rel=1e-5)
    before = files_of(world.store)
    folder = world.store / "runs/blocks"
    for path in [folder / "manifest.json", *folder.glob("part-00001*"), folder / "part-00002.json"]:
        path.unlink()
    assert "30 queries (12 kept)" in done(*ask)
    assert files_of(world.store) == before


def test_a_finished_run_is_found_done_exported_again_and_another_refused(
    world, done: Done, refused, tmp_path, no_work
) -> None:
    no_work()
    before = files_of(world.store, but=())
    done(*command(world, "exact", "--k", 20, "--name", "exact", "--run", tmp_path / "exact.trec"))
    assert len((tmp_path / "exact.trec").read_text().splitlines()) == 600
    line = refused(*command(world, "exact", "--k", 10, "--name", "exact"))
    assert f"{world.store}/runs/exact was made otherwise: --k 20, now 10" in line
    assert refused(*command(world, "exact", "--k", 10, "--name", "exact"), "--plan") == line
    line = refused(*command(world, "dense", "--k", 20, "--name", "exact"))
    assert "--source exact:enc, now index:idx" in line
    assert files_of(world.store, but=()) == before


def test_names_default_to_queries_split_mode_and_source(world, done: Done) -> None:
    done(*command(world, "exact", "--split", "train", "--k", 3))
    done(*command(world, "exact", "--split", "train", "--k", 3, "--limit", 4, "--name", "four"))
    done(*command(world, "dense", "--split", "all", "--k", 3))
    names = set(Store(str(world.store)).names("runs")) - {"exact", "dense"}
    assert names == {"tiny-train-exact-enc", "four", "tiny-all-dense-idx"}
    assert list(hits_of(world.store, "tiny-train-exact-enc")) == [query for query, _, _ in world.judged[30:]]
    assert list(hits_of(world.store, "four")) == [q for q, _, _ in world.judged[30:34]]
    assert list(hits_of(world.store, "tiny-all-dense-idx")) == [query["_id"] for query in world.queries]


def test_plan_says_what_and_does_nothing(world, done: Done, no_work) -> None:
    no_work()
    before = files_of(world.store, but=())
    out = done(*command(world, "dense", "--plan", "--limit", 7))
    assert "7 of queries/tiny test" in out
    assert "index:idx, over 240 passages" in out
    assert files_of(world.store, but=()) == before


def test_a_hit_that_is_the_query_itself_is_dropped_on_demand(world, done: Done, tmp_path: Path) -> None:
    """The corpus' own passages as queries, under their own ids; one query has an id that no passage has."""
    own = [{"_id": p["_id"], "text": f"{p['title']} {p['text']}".strip()} for p in world.passages[:5]]
    own.append({"_id": "stranger", "text": "beka bolo"})
    write_lines(tmp_path / "queries.jsonl", own)
    done("import_queries", "--store", world.store, "--source", tmp_path / "queries.jsonl", "--queries", "own")
    for mode in ("exact", "dense"):
        ask = command(world, mode, "--queries", "own", "--split", "all", "--k")
        done(*ask, 10, "--drop-self", "--name", f"{mode}-dropped")
        done(*ask, 11, "--name", f"{mode}-kept")
        dropped, kept = (hits_of(world.store, f"{mode}-{name}") for name in ("dropped", "kept"))
        assert any(hit[0] == query for query, hits in kept.items() for hit in hits)
        for query, hits in dropped.items():
            assert hits == [hit for hit in kept[query] if hit[0] != query][:10]
            assert len(hits) == 10


def test_names_may_be_left_out_only_while_there_is_one(world, done: Done, refused, tmp_path: Path) -> None:
    queries, judged = make_queries(world.passages, 4, seed=9)
    more = write_queries(tmp_path / "more", queries, {"test": judged})
    done("import_queries", "--store", world.store, "--source", more)
    line = refused(*command(world, "exact"))
    assert f"{world.store} has several queries: more, tiny; say which with --queries NAME" in line
    done(*command(world, "exact", "--queries", "more", "--k", 2))
    assert len(hits_of(world.store, "more-test-exact-enc")) == 4

    done("build_index", "--store", world.store, "--name", "flat", "--factory", "IVF2,Flat", "--shards", 1)
    line = refused(*command(world, "dense", "--queries", "tiny"))
    assert "has several indexes: flat, idx; say which with --index NAME" in line
    done(*command(world, "dense", "--queries", "tiny", "--index", "flat", "--nprobe", 2, "--k", 20, "--name", "flat"))
    assert hits_of(world.store, "flat") == hits_of(world.store, "exact")


def wrong_embeddings(world, name: str, rows: int, dim: int) -> None:
    """Embeddings whose record agrees with their bytes, but whose first part has not the shape of its corpus part."""
    store = Store(str(world.store))
    made = store.open("embeddings", "enc/g0000")
    inputs = {"corpus": store.open("corpus", "g0000")}
    with store.create("embeddings", f"{name}/g0000", inputs=inputs, config=made.config) as draft:
        for part in made.numbered_parts("part"):
            shape = (rows, dim) if part.name == "part-00000" else (part.rows, 32)
            vectors = np.ones(shape, np.float16)
            draft.commit(part.name, ".npy", lambda path, v=vectors: np.save(path, v), rows=part.rows)
        draft.add_notes(**made.notes)


@pytest.mark.parametrize(("rows", "dim"), [(60, 16), (59, 32)])
def test_a_part_of_another_shape_is_named(world, refused, rows: int, dim: int) -> None:
    wrong_embeddings(world, "wrong", rows, dim)
    keys = Store(str(world.store)).keys()
    line = refused(*command(world, "exact", "--embeddings", "wrong"))
    assert f"{world.store}/embeddings/wrong/g0000/part-00000-" in line
    assert f"float16 [{rows}, {dim}], expected float16 [60, 32]" in line
    assert Store(str(world.store)).keys() == keys


def test_another_encoder_than_that_of_the_embeddings_is_refused(world, refused, tmp_path: Path, no_work) -> None:
    no_work()
    before = files_of(world.store, but=())
    for number, shape in enumerate([{"seed": 3}, {"hidden": 64}]):
        other = save_tiny_bert(tmp_path / f"other{number}", **shape)
        line = refused(*command(world, "exact", "--encoder", other))
        assert f"encoder {other} is not the one that made embeddings/enc" in line
        assert "weights" in line
        assert ("dim" in line) == ("hidden" in shape)
    assert "no such" in refused(*command(world, "exact", "--encoder", tmp_path / "none"))
    assert files_of(world.store, but=()) == before


def test_an_encoder_that_has_moved_is_found_by_its_new_place(world, done: Done, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in Path(world.model).iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    done(*command(world, "exact", "--encoder", moved, "--k", 20, "--name", "moved"))
    assert hits_of(world.store, "moved") == hits_of(world.store, "exact")


def test_questions_of_another_numerics_class_are_not_mixed_in(world, done: Done) -> None:
    done(*command(world, "exact", "--name", "once"))
    store = Store(str(world.store))
    [part] = store.open("runs", "once").parts
    numerics = part.facts["query_numerics"]["enc"]
    assert "float32" in numerics
    sources = HitSources(store, Corpus.open(store))
    retriever, runner = sources.open("exact:enc"), LocalRunner()
    assert sources.numerics() == {}
    sources.pin(part.facts)
    assert sources.numerics() == {"query_numerics": {"enc": numerics}}
    retriever.search(["bafa"], 3, runner)
    sources.pin({"query_numerics": {"enc": "another class", "gone": "x"}})
    with pytest.raises(InputError, match=r"are of the numerics class `another class`, this worker's are"):
        retriever.search(["dola"], 3, runner)


def test_an_index_of_other_embeddings_is_refused_with_both_sides_named(world, refused, no_work) -> None:
    no_work()
    wrong_embeddings(world, "other", 60, 32)
    assert "index/idx is over embeddings/enc, not other" in refused(*command(world, "dense", "--embeddings", "other"))
    store = Store(str(world.store))
    with pytest.raises(InputError) as raised:
        Index.open(store, "idx", Embeddings.open(store, "other", Corpus.open(store)))
    assert f"{world.store}/index/idx/g0000 was built from embeddings/enc/g0000 " in str(raised.value)
    assert "embeddings/other has no such generation" in str(raised.value)


def test_bad_input_is_named_and_leaves_nothing(world, refused, tmp_path: Path, no_work) -> None:
    no_work()
    before = files_of(world.store, but=())
    line = refused(*command(world, "exact", "--split", "dev"))
    assert f"{world.store}/queries/tiny: no split 'dev' with qrels; it has test, train (and all" in line
    assert "--k 0" in refused(*command(world, "exact", "--k", 0))
    assert "queries/none: there is no such artifact (complete queries: tiny)" in refused(
        *command(world, "exact", "--queries", "none")
    )
    assert "embeddings/none: there is no such" in refused(*command(world, "exact", "--embeddings", "none"))
    assert "index/none: there is no such" in refused(*command(world, "dense", "--index", "none"))
    assert "name 'a b'" in refused(*command(world, "exact", "--name", "a b"))
    for option in ("--nprobe", "--depth"):
        assert f"{option} 0" in refused(*command(world, "dense", option, 0))
        assert f"{option} 3: exact:enc has no use for it, it goes with an index" in refused(
            *command(world, "exact", option, 3)
        )
    assert "it goes with --rerank" in refused(*command(world, "dense", "--rerank-depth", 7))
    assert files_of(world.store, but=()) == before
    assert "there is no store here" in refused("search", "--store", tmp_path / "none")


@pytest.mark.parametrize(
    "pattern", ["corpus/g0000/part-00000-*", "embeddings/enc/g0000/part-00001-*", "index/idx/g0000/shard-00000-*"]
)
def test_damaged_files_are_named_and_not_searched(world, refused, pattern: str) -> None:
    [file] = world.store.glob(pattern)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    keys = Store(str(world.store)).keys()
    line = refused(*command(world, "dense", "--k", 100, "--name", "more"))
    assert f"{file.relative_to(world.store)}: its sha256 is not the committed one" in line
    assert Store(str(world.store)).keys() == keys


def test_the_trec_file_holds_the_run_in_its_order(world, done: Done, tmp_path: Path) -> None:
    """Passages that are one another's copies score the same: they are ordered by row, and printed scores still fall."""
    twins = [{"_id": f"t{n}", "text": world.passages[n % 3]["text"]} for n in range(12)]
    asked = [{"_id": f"q{n}", "text": world.passages[n]["text"]} for n in range(3)]
    source = write_beir(
        tmp_path / "twins", twins, asked, {"test": [("q0", "t0", 1), ("q1", "t7", 1), ("q2", "t11", 2)]}
    )
    at = ("--store", tmp_path / "s")
    done("import_corpus", *at, "--source", source)
    done("encode_corpus", *at, "--encoder", world.model, "--name", "enc", "--dtype", "float32", "--compile", "never")
    done("search", *at, "--mode", "exact", "--k", 12, "--name", "r", "--run", tmp_path / "deep/r.trec")
    hits = hits_of(tmp_path / "s", "r")
    lines = [line.split() for line in (tmp_path / "deep/r.trec").read_text().splitlines()]
    assert len(lines) == 36
    for query, found in hits.items():
        assert len({score for _, _, score in found}) == 3  # many ties
        assert found == sorted(found, key=lambda hit: (-hit[2], hit[1]))
        mine = [line for line in lines if line[0] == query]
        assert [line[2] for line in mine] == [id for id, _, _ in found]
        assert [int(line[3]) for line in mine] == list(range(1, 13))
        printed = [np.float32(line[4]) for line in mine]
        assert all(a > b for a, b in itertools.pairwise(printed))
        assert {(line[1], line[5]) for line in mine} == {("Q0", "r")}
        assert printed == pytest.approx([score for _, _, score in found], rel=1e-5)

    import ir_measures

    measures = [ir_measures.parse_measure(name) for name in ("nDCG@10", "RR@10", "R@2")]
    qrels = {"q0": {"t0": 1}, "q1": {"t7": 1}, "q2": {"t11": 2}}
    done("evaluate", *at, "--run", "r", "--metrics", "nDCG@10", "RR@10", "R@2", "--json", tmp_path / "e.json")
    own = json.loads((tmp_path / "e.json").read_text())["mean"]["r"]
    file = list(ir_measures.read_trec_run(str(tmp_path / "deep/r.trec")))
    peer = ir_measures.calc_aggregate(measures, qrels, file)
    assert own == pytest.approx({str(measure): value for measure, value in peer.items()})


def test_ids_that_trec_cannot_hold_are_found_before_the_search(
    tmp_path: Path, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    """A passage that no query finds counts too. As JSON lines, the run is written and read with its ids."""
    write_beir(
        tmp_path / "raw",
        [{"_id": "b", "text": "words"}, {"_id": "other 1", "text": "nothing"}],
        [{"_id": "q1", "text": "words"}],
        {"test": [("q1", "b", 1)]},
    )
    at = ("--store", tmp_path / "s")
    done("import_corpus", *at, "--source", tmp_path / "raw")
    done("build_bm25", *at)
    line = refused("search", *at, "--source", "bm25", "--run", tmp_path / "r.trec")
    assert "r.trec: the passage id 'other 1' is empty or has white space, which TREC's columns cannot hold" in line
    documented("Searching", "ids with white space for a TREC file", line, 1)
    assert Store(str(tmp_path / "s")).names("runs") == []
    (tmp_path / "asked.csv").write_text("id,text,relevant\nq 2,words,b\n")
    done("import_queries", *at, "--source", tmp_path / "asked.csv")
    asked = ("--queries", "asked")
    assert "the query id 'q 2' is empty" in refused(
        "search", *at, "--source", "bm25", "--run", tmp_path / "r.trec", *asked, "--plan"
    )
    done("search", *at, "--source", "bm25", "--run", tmp_path / "r.jsonl", *asked, "--name", "r")
    done(
        "evaluate", *at, "--run", tmp_path / "r.jsonl", "r", *asked, "--metrics", "RR@10", "--json", tmp_path / "e.json"
    )
    mean = json.loads((tmp_path / "e.json").read_text())["mean"]
    assert [values["RR@10"] for values in mean.values()] == [1.0, 1.0]
    assert "1 queries" in done("compare", tmp_path / "r.jsonl", "r", *at, *asked)


def test_a_bm25_run_and_its_trec_file(world, done: Done, tmp_path: Path) -> None:
    """A passage is found if it has a word of the query, and the run is what the file says."""
    done("build_bm25", "--store", world.store, "--shards", 2)
    done(*command(world, "bm25", "--split", "train", "--k", 15, "--run", tmp_path / "r.trec"))
    config = Store(str(world.store)).open("runs", "tiny-train-bm25").config
    assert (config["source"], config["search_parameters"], config["k"]) == ("bm25", {}, 15)
    hits = hits_of(world.store, "tiny-train-bm25")
    texts = {query["_id"]: query["text"] for query in world.queries}
    assert list(hits) == [query for query, _, _ in world.judged[30:]]
    for (query, found), (_, answer, _) in zip(hits.items(), world.judged[30:], strict=True):
        holders = [
            p["_id"] for p in world.passages if {*texts[query].split()} & {*p["title"].split(), *p["text"].split()}
        ]
        assert {id for id, _, _ in found} <= {*holders}
        assert len(found) == min(15, len(holders))
        assert found == sorted(found, key=lambda hit: (-hit[2], hit[1]))
        assert answer in [id for id, _, _ in found[:5]]
    lines = [line.split() for line in (tmp_path / "r.trec").read_text().splitlines()]
    assert [(line[0], line[2]) for line in lines] == [(query, id) for query in hits for id, _, _ in hits[query]]
    assert [int(line[3]) for line in lines] == [rank for query in hits for rank in range(1, len(hits[query]) + 1)]
    assert {(line[1], line[5]) for line in lines} == {("Q0", "tiny-train-bm25")}
    printed = [float(line[4]) for line in lines]
    assert printed == pytest.approx([score for query in hits for _, _, score in hits[query]], rel=1e-5)


def test_queries_that_find_nothing_are_listed(world, done: Done, monkeypatch, tmp_path: Path) -> None:
    texts = {"known": world.queries[0]["text"], "stopped": "the of and", "marks": "?!", "strange": "qwertyuiop"}
    write_lines(tmp_path / "queries.jsonl", [{"_id": id, "text": text} for id, text in texts.items()])
    done("import_queries", "--store", world.store, "--source", tmp_path / "queries.jsonl", "--queries", "odd")
    done("build_bm25", "--store", world.store)
    ask = command(world, "bm25", "--queries", "odd", "--split", "all", "--k", 3, "--run", tmp_path / "r.trec")
    out = done(*ask)
    assert "3 hits of 4 queries in bm25" in out
    assert "  3 queries have no hits: 'the of and'; '?!'; 'qwertyuiop'\n" in out
    assert list(hits_of(world.store, "odd-all-bm25")) == ["known"]
    assert {line.split()[0] for line in (tmp_path / "r.trec").read_text().splitlines()} == {"known"}
    monkeypatch.setattr("riptide.jobs.search.SHOWN", 1)
    assert "  3 queries have no hits: 'the of and' and 2 more\n" in done(*ask)
    assert "have no hits" not in done(*command(world, "exact", "--queries", "odd", "--split", "all", "--k", 3))


def by_hand(runs: list[Found], weights: list[float] | None, k: int) -> dict[str, list[tuple[int, float]]]:
    """Reciprocal rank, or the weighted sum of min-max normalised scores, with dictionaries."""
    fused = {}
    for query in runs[0]:
        sums: dict[int, float] = {}
        for number, run in enumerate(runs):
            scores = [score for _, _, score in run.get(query, [])]
            for rank, (_, row, score) in enumerate(run.get(query, []), start=1):
                spread = max(scores) - min(scores)
                share = (score - min(scores)) / spread if spread else 1.0
                sums[row] = sums.get(row, 0) + (weights[number] * share if weights else 1 / (60 + rank))
        fused[query] = sorted(sums.items(), key=lambda pair: (-pair[1], pair[0]))[:k]
    return fused


def fused_as(found: Found, expected: dict[str, list[tuple[int, float]]]) -> None:
    """The same scores at each rank, and the same rows but for sums that float32 does not tell apart."""
    assert list(found) == list(expected)
    for query, hits in found.items():
        scores = dict(expected[query])
        assert [score for _, _, score in hits] == pytest.approx([s for _, s in expected[query]], rel=1e-5, abs=1e-6)
        for (id, row, score), (wanted, _) in zip(hits, expected[query], strict=True):
            assert id == f"p{row}"
            assert row == wanted or score == pytest.approx(scores.get(row, expected[query][-1][1]), rel=1e-5)


def test_hybrid_is_two_runs_fused_by_hand(world, done: Done) -> None:
    done("build_bm25", "--store", world.store, "--shards", 2)
    for mode in ("bm25", "dense", "exact"):
        done(*command(world, mode, "--k", 1000, "--name", f"whole-{mode}"))
    apart = {mode: hits_of(world.store, f"whole-{mode}") for mode in ("bm25", "dense", "exact")}
    done(*command(world, "hybrid", "--k", 25))
    name = "tiny-test-0.5-bm25-0.5-dense-idx"
    config = Store(str(world.store)).open("runs", name).config
    assert config["source"] == "0.5*bm25+0.5*index:idx"
    assert set(config["search_parameters"]) == {"index:idx", "fusion_depth"}
    fused_as(hits_of(world.store, name), by_hand([apart["bm25"], apart["dense"]], [0.5, 0.5], 25))
    sources = {"bm25+index:idx": None, "0.2*bm25+0.8*index:idx": [0.2, 0.8], "bm25+exact:enc": None}
    for number, (source, weights) in enumerate(sources.items()):
        done("search", "--store", world.store, "--source", source, "--k", 25, "--name", f"fused{number}")
        dense = apart["exact" if "exact" in source else "dense"]
        fused_as(hits_of(world.store, f"fused{number}"), by_hand([apart["bm25"], dense], weights, 25))
    inputs = Store(str(world.store)).open("runs", "fused2").inputs
    assert {entry["artifact"].rpartition("/")[0] for entry in inputs.values()} >= {"bm25/bm25", "embeddings/enc"}


def test_sources_over_the_same_embeddings_encode_the_questions_once(world, done: Done, monkeypatch) -> None:
    ran = []
    real = LocalRunner.run

    def counted(runner: LocalRunner, task: WorkerTask, *rest: Any, **more: Any) -> Iterator[tuple[Any, Any]]:
        ran.append(type(task).__name__)
        return real(runner, task, *rest, **more)

    monkeypatch.setattr(LocalRunner, "run", counted)
    done("search", "--store", world.store, "--source", "exact:enc+index:idx", "--k", 20, "--name", "both")
    assert sorted(ran) == ["EncodeQueriesTask", "SearchExactTask", "SearchShardTask"]
    whole = []
    for mode in ("exact", "dense"):
        done(*command(world, mode, "--k", 1000, "--name", f"whole-{mode}"))
        whole.append(hits_of(world.store, f"whole-{mode}"))
    fused_as(hits_of(world.store, "both"), by_hand(whole, None, 20))


def test_a_source_that_is_none_is_named_and_leaves_nothing(world, refused, no_work) -> None:
    no_work()
    before = files_of(world.store, but=())
    for source, told in {
        "splade": "source 'splade': expected bm25, bm25:NAME, exact:EMBEDDINGS, index:NAME, splade:NAME, or A+B",
        "0.4*exact:enc+index:idx": "give every one of the sources a weight, or none",
        "index:idx+exact:enc+index:idx": "a source is given twice",
        "0*exact:enc+0*index:idx": "every weight is 0",
        "bm25": "bm25: there is no such artifact (complete bm25: none)",
        "bm25+exact:enc": "bm25: there is no such artifact (complete bm25: none)",
        "exact:none": "embeddings/none: there is no such artifact (complete embeddings: enc)",
    }.items():
        assert told in refused("search", "--store", world.store, "--source", source)
    assert "there is no such artifact (complete bm25: none)" in refused(*command(world, "hybrid"))
    assert files_of(world.store, but=()) == before


def test_a_run_that_cannot_be_exported_is_told(world, refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    export = command(world, "exact", "--k", 20, "--name", "exact", "--run")
    for plan in (("--plan",), ()):
        line = refused(*export, tmp_path / "file/r.trec", *plan)
        assert f"{tmp_path}/file/r.trec: no file can be written in {tmp_path}/file: Not a directory" in line
        assert f"{tmp_path}: this is a folder" in refused(*export, tmp_path, *plan)


def test_a_file_with_other_content_is_not_replaced(
    world, done: Callable[..., str], refused: Callable[..., str], documented: Callable[..., None], tmp_path: Path
) -> None:
    at, file = ("--store", world.store, "--mode", "exact", "--k"), tmp_path / "run.trec"
    done("search", *at, 5, "--name", "five", "--run", file)
    before = file.read_bytes()
    done("search", *at, 5, "--name", "five", "--run", file)
    six = ("search", *at, 6, "--name", "six", "--run", file)
    line = refused(*six)
    assert line.endswith(f"{file}: a file is there, and is kept: name another file, or give --overwrite to replace it")
    assert refused(*six, "--plan") == line
    assert "six" not in Store(str(world.store)).names("runs"), "the file is refused before the search"
    documented("Searching", "--run names a file that exists, for a run that is not made yet", line, 1)
    done(*six[:-2])
    line = refused(*six)
    assert f"{file}: a file with other content is there, and is kept" in line
    assert refused(*six, "--plan") == line
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.glob("*run.trec*")] == ["run.trec"]
    documented("Searching", "another run under the same --run", line, 1)
    done(*six, "--overwrite", "--plan")
    assert file.read_bytes() == before
    done(*six, "--overwrite")
    assert file.read_bytes() != before


def test_a_mode_beside_a_source_is_refused_and_spaces_of_a_fusion_mean_nothing(world, done, refused) -> None:
    at = ("search", "--store", world.store, "--query", "bafa", "--k", 2)
    assert "a mode is a source; leave one of them out" in refused(*at, "--mode", "dense", "--source", "exact:enc")
    fused, spaced = (done(*at, "--source", source) for source in ("exact:enc+index:idx", " exact:enc + index:idx "))
    assert fused.splitlines()[1:] == spaced.splitlines()[1:]
