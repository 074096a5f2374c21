"""A trained re-ranker's order of hits is compared with the order in which they were found."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mined import mine

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.exact import Hits
from riptide.indexing.mining import pools as mining
from riptide.indexing.mining.candidates import read_queries
from riptide.indexing.queries.queries import Queries
from riptide.indexing.search.runs import write_parquet
from riptide.indexing.store.model_artifacts import StoredCheckpoint, model_folder
from riptide.indexing.store.store import Store
from riptide.indexing.training.local import run_local
from riptide.indexing.training.order import (
    DEPTH,
    MAX_LISTS,
    MIN_LISTS,
    RankedLists,
    compare_orders,
    count_lists,
    read_lists,
)
from riptide.indexing.training.worker import TrainingTask
from riptide.indexing.training.workers import WorkerGroup
from riptide.jobs.common.flat_options import build_options
from riptide.jobs.training.reranker_run import describe_ranking_change, open_reranker_setup
from riptide.jobs.training.training_options import TrainReranker
from riptide.retriever.encoding.reranker import Reranker

ASKED = 30  # queries of the split `test`


def pooled(store: Store, *, drop_answers: bool = False) -> tuple[dict[str, np.ndarray], list[str]]:
    """candidates/c of random hits by two sources, and negatives/hand drawn from it.

    Returns the hits of the better source by query text, and the texts of the queries whose answer is in its first hits.
    """
    corpus, queries = Corpus.open(store), Queries.open(store)
    judged = read_queries(corpus, queries, "test", None, answers=False)
    draw = np.random.default_rng(5)
    found = {source: np.empty((ASKED, 30), np.int64) for source in ("bm25", "exact:enc")}
    usable = []
    for number, positives in enumerate(judged.positives):
        others = np.setdiff1d(np.arange(corpus.num_rows), positives)
        for source, place in (("bm25", 25), ("exact:enc", number)):  # of the answer: too deep, or from 0 to 29
            found[source][number] = np.insert(draw.choice(others, 29, replace=False), place, positives[0])
        if number < DEPTH:
            usable.append(judged.texts[number])
    scores = np.broadcast_to(np.arange(30, 0, -1, dtype=np.float32), (ASKED, 30))
    hits = {source: Hits(scores, rows) for source, rows in found.items()}
    table = mining.pool_hits(judged.ids, hits, judged.positives, 30)
    of = {"corpus": corpus.generations[-1], "queries": queries.artifact}
    with store.create("candidates", "c", inputs=of, config={"drop_answers": drop_answers}) as draft:
        draft.commit("part-00000", ".parquet", lambda path: write_parquet(table, path), rows=len(table))
    mine(store, candidates=store.open("candidates", "c"))
    return dict(zip(judged.texts, found["exact:enc"], strict=True)), usable


def read(store: Store, count: int = MAX_LISTS) -> RankedLists | None:
    return read_lists(store, store.open("negatives", "hand"), Queries.open(store), "test", None, count)


def test_the_lists_are_those_that_the_source_found(world) -> None:
    store = Store(str(world.store))
    found, usable = pooled(store)
    lists = read(store)
    assert lists is not None
    assert lists.source == "exact:enc"  # its order is better
    assert lists.queries == usable
    for number, (query, rows, relevant) in enumerate(zip(lists.queries, lists.rows, lists.relevant, strict=True)):
        assert rows.tolist() == found[query][:DEPTH].tolist()
        assert np.flatnonzero(relevant).tolist() == [number]
    few = read(store, 3)
    assert few is not None
    assert few.queries == usable[:3]


def test_without_ranks_there_is_no_comparison(world) -> None:
    store = Store(str(world.store))
    pooled(store, drop_answers=True)  # a missing rank may then be that of a passage with an answer, which is not judged
    assert read(store) is None
    assert "not compared" in describe_ranking_change(None)


def test_negatives_by_hand_name_no_candidates(world) -> None:
    store = Store(str(world.store))
    mine(store)
    assert read(store) is None


def test_figures_are_those_worked_out_by_hand() -> None:
    rows = [np.array([1, 2, 3]), np.array([4, 5])]
    lists = RankedLists("bm25", ["a", "b"], rows, [np.array([False, True, False]), np.array([True, False])])
    seen: list[tuple[str, str]] = []

    def score(queries: Any, titles: Any, texts: Any) -> np.ndarray:
        seen.extend(zip(queries, texts, strict=True))
        return np.array([0.1, 0.1, 0.2, 0.5, np.nan], np.float32)  # a tie keeps the order; no number comes last

    order = compare_orders(lists, lambda rows: ([""] * len(rows), [f"p{row}" for row in rows]), score)
    assert seen == [("a", "p1"), ("a", "p2"), ("a", "p3"), ("b", "p4"), ("b", "p5")]
    assert (order["source"], order["lists"], order["depth"]) == ("bm25", 2, 3)
    second, third = 1 / math.log2(3), 1 / math.log2(4)
    assert order["before"] == pytest.approx({"RR@10": (1 / 2 + 1) / 2, "nDCG@10": (second + 1) / 2})
    assert order["after"] == pytest.approx({"RR@10": (1 / 3 + 1) / 2, "nDCG@10": (third + 1) / 2})


def test_the_number_of_lists_grows_with_the_training() -> None:
    assert [count_lists(pairs) for pairs in (0, 5_000, 10**9)] == [MIN_LISTS, 50, MAX_LISTS]


def test_a_worse_order_is_a_warning(documented: Callable[..., None]) -> None:
    order = {"source": "bm25", "lists": 100, "depth": 20, "before": {"RR@10": 0.7, "nDCG@10": 0.8}}
    line = describe_ranking_change({**order, "after": {"RR@10": 0.4, "nDCG@10": 0.5}})
    assert line.startswith("warning: the model orders hits worse than they were: the first 20 hits of bm25 for 100 ")
    assert "MRR@10 0.7000 -> 0.4000, nDCG@10 0.8000 -> 0.5000" in line
    documented("Training", "train_reranker whose model lowers the order of the hits", line, 0)
    assert describe_ranking_change({**order, "after": {"RR@10": 0.9, "nDCG@10": 0.8}}).startswith(
        "order     the first 20 hits"
    )
    assert describe_ranking_change({**order, "after": {"RR@10": 0.9, "nDCG@10": 0.7}}).startswith("warning")


def test_training_judges_the_model_that_it_saves(world) -> None:
    """Compared with the saved model as Reranker opens it."""
    store = Store(str(world.store))
    pooled(store)
    small: dict[str, Any] = {"steps": 2, "batch": 4, "cpus": 1, "max_length": 48, "dtype": "float32"}
    options = build_options(
        TrainReranker,
        {"store": str(world.store), "backbone": world.model, "negatives": "hand", "split": "test", "lr": 1e-3, **small},
    )
    opened, lists = open_reranker_setup(store, options), read(store)
    assert lists is not None
    last, best = (StoredCheckpoint(store, name, "x") for name in ("ce.last", "ce.best"))
    group = WorkerGroup(workers=1, min_workers=1, cpus=1, gpus=0)
    with store.create("models", "ce", inputs=opened.target.inputs, config=opened.target.config) as draft:
        maker = replace(opened.maker, lists=lists)
        task = TrainingTask(
            draft=draft,
            last_checkpoint=last,
            best_checkpoint=best,
            loop=opened.loop,
            maker=maker,
            dtype="float32",
            group=group,
        )
        order = run_local(task, lambda *_: None, lambda _: None).judged["order"]
    reranker = Reranker(str(model_folder(store.open("models", "ce"))))
    ranks = []
    corpus = Corpus.open(store)
    for query, rows, relevant in zip(lists.queries, lists.rows, lists.relevant, strict=True):
        passages = corpus.passages(rows)
        texts = reranker.compose([p.title for p in passages], [p.text for p in passages])
        ranks.append(1 + int(relevant[np.argsort(-reranker.score([query] * len(rows), texts), kind="stable")].argmax()))
    reciprocal = [1 / rank if rank <= 10 else 0 for rank in ranks]
    assert order["after"]["RR@10"] == pytest.approx(np.mean(reciprocal), abs=0.05)  # bfloat16 may swap near ties
    assert order["before"]["RR@10"] == pytest.approx(np.mean([1 / rank if rank <= 10 else 0 for rank in range(1, 21)]))
    assert order["lists"] == DEPTH
