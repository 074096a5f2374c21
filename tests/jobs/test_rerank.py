"""search --rerank: the first hits in the order of a loop over single pairs, the others below in their order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runners import Tally
from samples import files_of, write_lines

from riptide.indexing.queries.queries import Queries
from riptide.indexing.search import rescoring, retrieval
from riptide.indexing.search.rescoring import RerankerSpec
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.model_artifacts import commit_files
from riptide.indexing.store.store import Store
from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.work import run_work
from riptide.retriever.encoding.reranker import Reranker, RerankerOptions, describe_reranker

Done = Callable[..., str]
Ranked = dict[str, list[tuple[str, float]]]
FLOAT32 = RerankerOptions(dtype="float32")


def command(world, *more: object) -> tuple:
    dtype = ("--rerank-dtype", "float32") if "--rerank" in more else ()  # so scores are those of every CPU
    return ("search", "--store", world.store, "--mode", "exact", "--k", 20, *more, *dtype)


def ranked(store: Path, run: str) -> Ranked:
    """Returns (passage id, score) of the hits of each query, in the run's order."""
    found: Ranked = {}
    for table in read_run(Store(str(store)).open("runs", run)):
        for hit in table.to_pylist():
            found.setdefault(hit["query_id"], []).append((hit["id"], hit["score"]))
    return found


def in_order(world, queries: str, classifier: str, plain: Ranked, after: Ranked, depth: int) -> None:
    """The specification: pairs alone through the re-ranker; equal probabilities by row; the rest as it was.

    Every third query is scored alone.
    """
    model = Reranker(classifier, FLOAT32)
    texts = dict(zip(*Queries.open(Store(str(world.store)), queries).split("all"), strict=True))
    passages = {p["_id"]: f"{p['title']} {p['text']}" if p["title"] else p["text"] for p in world.passages}
    assert list(after) == list(plain)
    moved, spread = 0, []
    for number, (query, hits) in enumerate(after.items()):
        before = [id for id, _ in plain[query]]
        assert {id for id, _ in hits[:depth]} == {*before[:depth]}
        if number % 3 == 0:
            alone = [model.score([texts[query]], [passages[id]])[0] for id, _ in hits[:depth]]
            np.testing.assert_allclose([score for _, score in hits[:depth]], alone, atol=1e-4)
        assert hits[:depth] == sorted(hits[:depth], key=lambda hit: (-hit[1], int(hit[0][1:])))
        assert hits[depth:] == [(id, -float(rank)) for rank, id in enumerate(before[depth:], depth + 1)]
        moved += [id for id, _ in hits] != before
        spread += [score for _, score in hits[:depth]]
    assert moved > len(after) / 2
    assert np.std(spread) > 0.05


def test_the_first_hits_are_in_the_order_of_single_pairs(world, classifier: str, done: Done, tmp_path: Path) -> None:
    rerank = ("--rerank", classifier, "--rerank-depth", 6)
    done(*command(world, *rerank, "--run", tmp_path / "r.trec"))
    name = "tiny-test-exact-enc-tiny-cross"
    after = ranked(world.store, name)
    in_order(world, "tiny", classifier, ranked(world.store, "exact"), after, 6)

    config = Store(str(world.store)).open("runs", name).config
    assert (config["reranker"], config["rerank_depth"]) == (describe_reranker(classifier, FLOAT32), 6)
    assert "reranker" not in Store(str(world.store)).open("runs", "exact").config
    lines = [line.split() for line in (tmp_path / "r.trec").read_text().splitlines()]
    for query, hits in after.items():
        mine = [line for line in lines if line[0] == query]
        assert [line[2] for line in mine] == [id for id, _ in hits]
        printed = [np.float32(line[4]) for line in mine]
        assert all(a > b for a, b in itertools.pairwise(printed))
        assert printed == pytest.approx([score for _, score in hits], rel=1e-5)
    assert len(lines) == sum(map(len, after.values())) == 600


def test_blocks_of_queries_and_a_depth_of_all(world, classifier: str, done: Done, monkeypatch) -> None:
    done(*command(world, "--rerank", classifier, "--rerank-depth", 100, "--name", "once"))
    once = ranked(world.store, "once")
    in_order(world, "tiny", classifier, ranked(world.store, "exact"), once, 20)
    monkeypatch.setattr(rescoring, "BLOCK_QUERIES", 7)
    done(*command(world, "--rerank", classifier, "--rerank-depth", 100, "--name", "blocks"))
    for query, hits in ranked(world.store, "blocks").items():
        scores = dict(once[query])
        assert [score for _, score in hits] == pytest.approx([scores[id] for id, _ in hits], abs=1e-5)


def test_the_pairs_of_each_query_are_counted(world, classifier: str) -> None:
    store, tally = Store(str(world.store)), Tally()
    search = retrieval.SearchQueriesWork(
        store,
        source="exact:enc",
        split="test",
        k=20,
        name="counted",
        reranker=rescoring.open_reranker(store, classifier),
        rerank_depth=6,
    )
    run_work(store, search, LocalRunner(cores=1), tally)
    assert tally.added == {"pairs": 6 * len(search.split.ids), "parts": len(store.open("runs", "counted").parts)}


def test_a_query_that_is_dropped_leaves_no_hole(world, classifier: str, done: Done, tmp_path: Path) -> None:
    """Passages are queries under their own ids: a passage is no hit of itself, and ranks have no gap."""
    own = [{"_id": p["_id"], "text": f"{p['title']} {p['text']}".strip()} for p in world.passages[:8]]
    own.append({"_id": "stranger", "text": "beka bolo"})
    write_lines(tmp_path / "queries.jsonl", own)
    done("import_queries", "--store", world.store, "--source", tmp_path / "queries.jsonl", "--queries", "own")
    ask = ("--k", 10, "--queries", "own", "--split", "all", "--drop-self")
    done(*command(world, *ask, "--name", "plain"))
    done(*command(world, *ask, "--name", "after", "--rerank", classifier, "--rerank-depth", 4))
    plain, after = ranked(world.store, "plain"), ranked(world.store, "after")
    assert all(len(hits) == 10 and query not in dict(hits) for query, hits in after.items())
    in_order(world, "own", classifier, plain, after, 4)


def test_queries_with_few_hits_or_none(world, classifier: str, done: Done, tmp_path: Path) -> None:
    rare = world.passages[7]["text"].split()[0]
    texts = {"known": world.queries[0]["text"], "stopped": "the of and", "rare": rare, "strange": "qwertyuiop"}
    write_lines(tmp_path / "queries.jsonl", [{"_id": id, "text": text} for id, text in texts.items()])
    done("import_queries", "--store", world.store, "--source", tmp_path / "queries.jsonl", "--queries", "odd")
    done("build_bm25", "--store", world.store)
    ask = ("search", "--store", world.store, "--mode", "bm25", "--queries", "odd", "--split", "all", "--k", 200)
    done(*ask, "--name", "plain")
    out = done(*ask, "--name", "after", "--rerank", classifier, "--rerank-depth", 150, "--rerank-dtype", "float32")
    assert "  2 queries have no hits: 'the of and'; 'qwertyuiop'\n" in out
    plain = ranked(world.store, "plain")
    assert 0 < len(plain["rare"]) < 150
    in_order(world, "odd", classifier, plain, ranked(world.store, "after"), 150)


def test_a_model_of_the_store_is_an_input_of_the_run(world, classifier: str, done: Done, refused) -> None:
    store = Store(str(world.store))
    with store.create("models", "cross", config={"made": "by hand"}) as draft:
        commit_files(draft, Path(classifier))
    done(*command(world, "--rerank", classifier, "--rerank-depth", 5, "--name", "folder"))
    done(*command(world, "--rerank", "models/cross", "--rerank-depth", 5))
    run = store.open("runs", "tiny-test-exact-enc-cross")
    assert run.inputs["reranker"]["artifact"] == "models/cross"
    assert ranked(world.store, "tiny-test-exact-enc-cross") == ranked(world.store, "folder")
    line = refused("store", "remove", "models/cross", "--store", world.store)
    assert f"{world.store}/models/cross is needed by runs/tiny-test-exact-enc-cross: remove those first" in line
    line = refused(*command(world, "--rerank", "models/none"))
    assert "models/none: there is no such artifact (complete models: cross)" in line
    with store.create("models", "ranks", config={"training": {"loss": "lce"}}) as draft:
        commit_files(draft, Path(classifier))
    assert "scores are no probabilities" in refused(*command(world, "--rerank", "models/ranks"))


def test_one_run_is_of_one_numerics_class(world, classifier: str, done: Done, refused, monkeypatch) -> None:
    """An interrupted run is not resumed on another kind of machine; a complete one is found complete anywhere."""
    ask = command(world, "--rerank", classifier, "--rerank-depth", 4, "--name", "mine")
    monkeypatch.setattr(retrieval, "QUERY_BLOCK", 16)
    done(*ask)
    folder = world.store / "runs/mine"
    before = files_of(folder)
    store = Store(str(world.store))
    here = rescoring.open_reranker(store, classifier, "float32").with_numerics(LocalRunner(), 1).numerics
    run = store.open("runs", "mine")
    assert [part.facts["numerics"] for part in run.parts] == [here] * 2
    names = {"numerics", "query_numerics", "query_cuts", "pair_cuts"}
    assert [part.facts.keys() for part in run.parts] == [names] * 2
    assert run.notes["numerics"] == here
    for path in (folder / "manifest.json", folder / "part-00001.json"):
        path.unlink()
    left = files_of(folder)
    monkeypatch.setattr(RerankerSpec, "with_numerics", lambda spec, *_: replace(spec, numerics="another class"))
    told = f"is of the re-ranker's numerics class `{here}`, here it is `another class`: resume on the kind of machine"
    assert f"{world.store}/runs/mine/part-00000 {told}" in refused(*ask)
    assert files_of(folder) == left
    monkeypatch.undo()
    monkeypatch.setattr(retrieval, "QUERY_BLOCK", 16)
    done(*ask)
    assert files_of(folder) == before
    monkeypatch.setattr(RerankerSpec, "with_numerics", lambda *_: pytest.fail("work was done"))
    done(*ask)


def test_what_is_no_reranker_or_another_one_is_refused(
    world, classifier: str, done: Done, refused, no_work, tmp_path: Path
) -> None:
    rerank = ("--rerank", classifier, "--rerank-depth")
    done(*command(world, *rerank, 4, "--name", "mine"))
    no_work()
    before = files_of(world.store, but=())
    done(*command(world, *rerank, 4, "--name", "mine"))
    line = refused(*command(world, *rerank, 5, "--name", "mine"))
    assert f"{world.store}/runs/mine was made otherwise: --rerank-depth 4, now 5" in line
    assert "--rerank-depth" in refused(*command(world, "--name", "mine"))
    assert "--rerank-depth 0: expected at least 1" in refused(*command(world, *rerank, 0))
    assert "BertModel is no cross-encoder" in refused(*command(world, "--rerank", world.model))
    assert "no such folder" in refused(*command(world, "--rerank", tmp_path / "none"))
    assert files_of(world.store, but=()) == before
