"""Search, evaluation, serving, mining and training by document: equal to loops over all passages of split documents."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from fastapi.testclient import TestClient
from ready_client import serving
from samples import WORDS, write_beir

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.filters import Filter
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.exact import Hits
from riptide.indexing.hit_sources.search_options import SearchOptions
from riptide.indexing.measures.metrics import metrics_per_query
from riptide.indexing.mining.negatives import read_groups
from riptide.indexing.queries.judged_pairs import read_judged_pairs
from riptide.indexing.queries.queries import Queries
from riptide.indexing.search import document_search
from riptide.indexing.search.document_search import search_documents
from riptide.indexing.search.few_queries import LocalSearch
from riptide.indexing.search.rescoring import open_reranker
from riptide.indexing.search.run_files import read_run_file
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.store import Store
from riptide.indexing.training.dev_splits import open_dev_set
from riptide.indexing.training.training_sets import TrainingSetSpec, open_sets
from riptide.indexing.work.local_runner import LocalRunner
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.training.training_data import batch_at
from riptide.serve.one_process import open_local
from riptide.serve.parts.engine import Engine
from riptide.serve.parts.leaf import Leaf, ask_local_leaves
from riptide.serve.parts.query_states import AnswerHit, PendingQuery
from riptide.serve.parts.service_models import EncoderPart, RerankPart
from riptide.serve.release.live import save_as_live
from riptide.serve.release.planning import plan_release
from riptide.serve.release.release_tasks import find_source_search
from riptide.serve.service.service_options import ServiceOptions
from riptide.serve.service_errors import IncompleteError, LostError

Done = Callable[..., str]
Ranking = list[tuple[str, float]]
SOURCES = ("exact:enc", "bm25", "0.5*bm25+0.5*exact:enc", "bm25+exact:enc")
K = 25  # of 60 documents: the first 100 passages often have fewer


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, model: str, classifier: str, call_job) -> Path:
    """The folder of a store of 60 documents, four of them deleted, of one to fifteen passages of up to eight words."""
    folder, draw = tmp_path_factory.mktemp("documents"), random.Random(0)
    texts = [" ".join(draw.choices(WORDS[:60], k=draw.randint(3, 90))) for _ in range(60)]
    passages = [
        {"_id": f"d{n}", "title": "", "text": text, "metadata": {"part": n % 3}} for n, text in enumerate(texts)
    ]
    queries, judged = [], []
    for number in range(24):
        words = texts[number * 2 + 1].split()
        start = draw.randrange(max(1, len(words) - 4))
        queries.append({"_id": f"q{number}", "text": " ".join(words[start : start + 4])})
        judged += [(f"q{number}", f"d{number * 2 + 1}", 2), (f"q{number}", f"d{(number * 7) % 50}", 1)]
    source = write_beir(folder / "source", passages, queries, {"test": judged[:32], "train": judged[32:]})
    at = ("--store", folder / "store")
    split = ("--split-words", 8, "--overlap", 2, "--part-size", 20, "--filters", "part", "int64")
    assert call_job("import_corpus", *at, "--source", source, *split) == 0
    (folder / "gone").write_text("d50\nd52\nd54\nd56\n")
    assert call_job("import_corpus", *at, "--delete", folder / "gone") == 0
    numerics = ("--dtype", "float32", "--compile", "never")
    assert call_job("encode_corpus", *at, "--encoder", model, "--name", "enc", *numerics) == 0
    assert call_job("build_bm25", *at) == 0
    return folder


@pytest.fixture
def store(built: Path) -> Store:
    return Store(str(built / "store"))


def texts_of(store: Store) -> list[str]:
    return Queries.open(store).split("all").texts


def best_of_all(corpus: Corpus, hits: Hits, k: int) -> list[list[tuple[int, float]]]:
    """The specification: the first hit of each document in a ranking of all passages, as (row, score)."""
    result, names = [], corpus.documents(np.arange(corpus.num_rows)).tolist()
    for rows, scores in zip(hits.rows.tolist(), hits.scores.tolist(), strict=True):
        seen: dict[str, tuple[int, float]] = {}
        for row, score in zip(rows, scores, strict=True):
            if row >= 0:
                seen.setdefault(names[row], (row, score))
        result.append(list(seen.values())[:k])
    return result


def as_pairs(hits: Hits) -> list[list[tuple[int, float]]]:
    return [
        [(row, score) for row, score in zip(*line, strict=True) if row >= 0]
        for line in zip(hits.rows.tolist(), hits.scores.tolist(), strict=True)
    ]


def searched(store: Store, source: str, by: str, k: int, reranker: str | None = None, depth: int = 0) -> Hits:
    spec = open_reranker(store, reranker, "float32") if reranker else None
    search = LocalSearch(store, source, SearchOptions(), LocalRunner(gpus=0), reranker=spec, by=by)  # type: ignore
    return search.search(texts_of(store), k, rerank_depth=depth)


@pytest.mark.parametrize("source", SOURCES)
def test_documents_are_those_of_a_ranking_of_all_passages(store: Store, source: str) -> None:
    corpus = Corpus.open(store)
    every = searched(store, source, "passage", corpus.num_rows)
    for k in (1, 5, K, 100):
        assert as_pairs(searched(store, source, "document", k)) == best_of_all(corpus, every, k)


def test_exact_search_equals_the_largest_product_of_each_document(store: Store, model: str) -> None:
    corpus, vectors = Corpus.open(store), Embeddings.open(store, "enc", Corpus.open(store))
    queries = Encoder(model, EncoderOptions(dtype="float32", compile="never")).encode(texts_of(store), side="query")
    scores = queries.astype(np.float64) @ vectors.take(np.arange(corpus.num_rows)).astype(np.float64).T
    scores[:, corpus.deleted] = -np.inf
    names = corpus.documents(np.arange(corpus.num_rows))
    found = searched(store, "exact:enc", "document", K)
    for line, rows, own in zip(scores, found.rows, found.scores, strict=True):
        best = {name: line[names == name].max() for name in set(names)}
        expected = sorted(best.values(), reverse=True)[:K]
        np.testing.assert_allclose(own, expected, rtol=1e-5)
        assert len({names[row] for row in rows}) == K


@pytest.mark.parametrize("source", ["bm25", "0.5*bm25+0.5*exact:enc"])
@pytest.mark.parametrize("depth", [7, 60])
def test_documents_of_re_ranked_passages(store: Store, source: str, depth: int, classifier: str) -> None:
    corpus = Corpus.open(store)
    every = searched(store, source, "passage", corpus.num_rows, classifier, depth)
    found = as_pairs(searched(store, source, "document", K, classifier, depth))
    for ranked, expected in zip(found, best_of_all(corpus, every, K), strict=True):
        assert [row for row, _ in ranked] == [row for row, _ in expected]
        below = [-float(rank) if score < 0 else score for rank, (_, score) in enumerate(expected, 1)]
        np.testing.assert_allclose([score for _, score in ranked], below, rtol=1e-5)


def test_an_explanation_names_the_rank_of_the_passage_before_re_ranking(store: Store, classifier: str) -> None:
    reranker = open_reranker(store, classifier, "float32")
    search = LocalSearch(store, "bm25+exact:enc", SearchOptions(), LocalRunner(gpus=0), reranker=reranker)
    texts, rows = texts_of(store)[:4], search.matching_rows("part < 2")
    hits, explained = search.search_and_explain(texts, K, rerank_depth=7, allowed_rows=rows, filter="part < 2")
    assert as_pairs(hits) == as_pairs(search.search(texts, K, rerank_depth=7, allowed_rows=rows))
    fused = search.hit_source.search(texts, Corpus.open(store).num_rows, search.runner, rows)
    for place, (found, line) in enumerate(zip(as_pairs(hits), explained, strict=True)):
        ranking = fused.rows[place].tolist()
        assert [each.rank for each in line] == [ranking.index(row) + 1 for row, _ in found]
        assert [each.reranker for each in line] == [score if score >= 0 else None for _, score in found]
        assert sum(each.reranker is not None for each in line) in range(1, 8)
        assert {each.filter for each in line} == {"part < 2"}
        for each in line:
            assert sum(source.part for source in each.sources) == pytest.approx(each.score, abs=1e-6)


def test_queries_are_searched_in_pieces_if_their_hits_take_too_much_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = as_pairs(searched(store, "exact:enc", "document", K))
    monkeypatch.setattr(document_search, "CELLS", 300)
    assert as_pairs(searched(store, "exact:enc", "document", K)) == expected


def read_ranking(path: Path) -> dict[str, list[str]]:
    table, ranking = read_run_file(str(path)), dict[str, list[str]]()
    for query, id in zip(table["query_id"].to_pylist(), table["id"].to_pylist(), strict=True):
        ranking.setdefault(query, []).append(id)
    return ranking


def test_runs_hold_rows_of_passages_and_trec_files_documents(built: Path, store: Store, done: Done, tmp_path) -> None:
    at, corpus = ("--store", store.url, "--source", "bm25"), Corpus.open(store)
    done("search", *at, "--k", K, "--run", tmp_path / "documents.trec")
    done("search", *at, "--k", K, "--by", "passage", "--run", tmp_path / "passages.trec")
    [run] = read_run(store.open("runs", "source-test-bm25"))
    assert run["id"].to_pylist() == corpus.ids(run["row"].to_numpy()).tolist()
    names = corpus.documents(run["row"].to_numpy()).tolist()
    ranking = read_ranking(tmp_path / "documents.trec")
    assert [id for ids in ranking.values() for id in ids] == names
    assert all(len(ids) == len(set(ids)) for ids in ranking.values())
    assert store.open("runs", "source-test-bm25").config["by"] == "document"
    assert "by" not in store.open("runs", "source-test-bm25-passages").config
    passages = read_ranking(tmp_path / "passages.trec")
    assert all("#" in id for ids in passages.values() for id in ids)
    shown = done("search", *at, "--query", WORDS[0], "--k", 3)
    assert "#" not in shown
    assert "#" in done("search", *at, "--query", WORDS[0], "--k", 3, "--by", "passage")


def test_evaluation_judges_documents(store: Store, done: Done, refused, documented, tmp_path: Path) -> None:
    at = ("--store", store.url)
    done("search", *at, "--source", "bm25", "--k", K, "--run", tmp_path / "documents.trec", "--name", "own")
    every = Corpus.open(store).num_rows
    deep, shallow = (tmp_path / f"{name}.trec" for name in ("deep", "shallow"))
    for path, k in ((deep, every), (shallow, 4)):
        done("search", *at, "--source", "bm25", "--by", "passage", "--k", k, "--run", path, "--name", path.stem)
    measures = ("--metrics", "nDCG@10", "RR@10", "R@20", "--split", "test")
    out = tmp_path / "out.json"
    runs = ["own", "deep", str(tmp_path / "documents.trec"), str(deep)]
    done("evaluate", *at, "--run", *runs, *measures, "--json", out)
    means = json.loads(out.read_text())["mean"]
    ranking = read_ranking(tmp_path / "documents.trec")
    rows = [(query, id, -float(rank)) for query, ids in ranking.items() for rank, id in enumerate(ids)]
    table = pa.table(dict(zip(("query_id", "id", "score"), map(list, zip(*rows, strict=True)), strict=True)))
    expected = metrics_per_query(Queries.open(store).qrels("test"), table, ("nDCG@10", "RR@10", "R@20"))
    for run in runs:
        assert means[run] == pytest.approx({name: values.mean() for name, values in expected.items()})
    printed = done("evaluate", *at, "--run", "shallow", *measures, "--json", tmp_path / "other.json")
    [line] = [line for line in printed.splitlines() if line.startswith("warning: shallow")]
    assert "it is a run of passages, and has fewer than 20 documents for" in line
    documented("Evaluating", "a run of passages with too few documents for the metrics", line, 0)
    line = refused(
        "evaluate", *at, "--run", tmp_path / "documents.trec", "--median-length", 3, "--json", tmp_path / "no.json"
    )
    assert "it is measured on passages, and the run has ids of documents" in line
    documented("Evaluating", "--median-length of a file with ids of documents", line, 1)
    line = refused("evaluate", *at, "--run", "own", "--relevance", "category")
    assert "its documents are split" in line
    documented("Evaluating", "--relevance category of a split corpus", line.replace(store.url, "…/store"), 1)
    query = ranking and next(iter(ranking))
    printed = done("store", "show", "runs/own", *at, "--query-id", query)
    assert f"  {ranking[query][0]}" in printed
    assert (
        f"nDCG@10 {metrics_per_query(Queries.open(store).qrels('test'), table, ('nDCG@10',))['nDCG@10'][0]:.4f}"
        in printed
    )


def test_a_query_that_is_a_document_does_not_find_itself(store: Store) -> None:
    corpus = Corpus.open(store)
    search = LocalSearch(store, "bm25", SearchOptions(), LocalRunner(gpus=0))
    texts = [" ".join(passage.text for passage in corpus.passages([0, 1]))]
    [own] = corpus.rows_of_documents([corpus.documents(np.array([0]))[0]])[0]
    assert search.documents is not None
    runner = search.runner
    plain = as_pairs(search_documents(search.hit_source, texts, 100, runner, search.documents))
    without = search_documents(search.hit_source, texts, 6, runner, search.documents, excluded=np.array([own]))
    assert plain[0][0][0] in (0, 1)
    assert as_pairs(without)[0] == [hit for hit in plain[0] if corpus.documents(np.array([hit[0]]))[0] != "d0"][:6]


def test_passages_of_the_query_itself_take_no_place_of_a_re_ranked_one(store: Store) -> None:
    corpus, depth = Corpus.open(store), 40
    search = LocalSearch(store, "bm25", SearchOptions(), LocalRunner(gpus=0))
    firsts, ends = corpus.rows_of_documents([f"d{number}" for number in range(50)])
    own, end = max(zip(firsts.tolist(), ends.tolist(), strict=True), key=lambda rows: rows[1] - rows[0])
    every = search.hit_source.search(texts := [corpus.passages([own])[0].text], corpus.num_rows, search.runner)
    expected = [row for row in every.rows[0].tolist() if row >= 0 and not own <= row < end][:depth]
    reranked = []

    def rerank(hits: Hits, some: Sequence[str]) -> Hits:
        reranked.extend(row for row in hits.rows[0].tolist() if row >= 0)
        return hits

    assert search.documents is not None
    options = {"rerank": rerank, "rerank_depth": depth, "excluded": np.array([own])}
    search_documents(search.hit_source, texts, 2, search.runner, search.documents, **options)
    assert reranked[:depth] == expected


def test_a_run_is_measured_as_before_after_documents_are_deleted(built: Path, done: Done, tmp_path: Path) -> None:
    shutil.copytree(built / "store", tmp_path / "store")
    at, means = ("--store", tmp_path / "store"), []
    for by in ("document", "passage"):
        done("search", *at, "--source", "bm25", "--k", K, "--by", by, "--name", by, "--run", tmp_path / f"{by}.trec")
    runs = ("document", "passage", tmp_path / "document.trec", tmp_path / "passage.trec")
    (tmp_path / "ids").write_text("d1\nd5\nd7\nd14\n")
    for name in ("before", "after"):
        out = tmp_path / f"{name}.json"
        done("evaluate", *at, "--run", *runs, "--metrics", "nDCG@10", "R@10", "--split", "test", "--json", out)
        means.append(json.loads(out.read_text())["mean"])
        if name == "before":
            done("import_corpus", *at, "--delete", tmp_path / "ids")
    assert means[0] == means[1]
    assert means[0]["document"] == means[0][str(tmp_path / "document.trec")]


@pytest.fixture
def served(built: Path, tmp_path: Path, classifier: str) -> Store:
    shutil.copytree(built / "store", tmp_path / "served")
    store = Store(str(tmp_path / "served"))
    release, left = plan_release(store, reranker=classifier)
    assert not left
    assert save_as_live(store, release, None)
    return store


@pytest.fixture
def client(served: Store) -> Iterator[TestClient]:
    with serving(open_local(served, ServiceOptions(threads=2, rerank_dtype="float32"), device="cpu")) as client:
        yield client


def answered(client: TestClient, **body: object) -> list[list[dict]]:
    answer = client.post("/v1/search", json=body)
    assert answer.status_code == 200, answer.text
    return [result["hits"] for result in answer.json()["results"]]


def test_a_service_answers_as_a_search(built: Path, served: Store, client: TestClient, classifier: str) -> None:
    corpus, queries = Corpus.open(served), texts_of(served)
    sources = {"exact": "exact:enc", "bm25": "bm25", "hybrid": "0.5*bm25+0.5*exact:enc"}
    for mode, source in sources.items():
        for rerank in (0, 12):
            found = answered(client, queries=queries, mode=mode, k=K, rerank=rerank)
            hits = searched(served, source, "document", K, classifier if rerank else None, rerank)
            for own, expected in zip(found, as_pairs(hits), strict=True):
                rows = [row for row, _ in expected]
                assert [hit["id"] for hit in own] == corpus.ids(np.array(rows, np.int64)).tolist()
                assert [hit["document"] for hit in own] == corpus.documents(np.array(rows, np.int64)).tolist()
                np.testing.assert_allclose([hit["score"] for hit in own], [score for _, score in expected], rtol=1e-4)
                assert [("reranker" in hit["scores"]) for hit in own] == [rerank > 0 and s >= 0 for _, s in expected]
    [[first, *_]] = answered(client, query=queries[0], mode="bm25", k=1)
    lines = (built / "source" / "corpus.jsonl").read_text().splitlines()
    [text] = [line["text"] for line in map(json.loads, lines) if line["_id"] == first["document"]]
    assert text[first["start"] : first["end"]] == first["text"]
    assert client.get("/v1/info").json()["is_split"] is True


def test_a_service_shows_passages_and_filters_documents(served: Store, client: TestClient) -> None:
    corpus, query = Corpus.open(served), texts_of(served)[0]
    [found] = answered(client, query=query, mode="bm25", k=K, by="passage")
    hits = searched(served, "bm25", "passage", K)
    assert [hit["id"] for hit in found] == corpus.ids(hits.rows[0][hits.rows[0] >= 0]).tolist()
    [found] = answered(client, query=query, mode="bm25", k=100, filter={"part": 1})
    every = searched(served, "bm25", "document", 100)
    kept = np.isin(every.rows[0], Filter.parse({"part": 1}, {"part": pa.int64()}).rows(corpus, 0, corpus.num_rows))
    assert [hit["id"] for hit in found] == corpus.ids(every.rows[0][kept]).tolist()


def test_passages_whose_documents_a_lost_leaf_knows_are_missing(served: Store) -> None:
    release, _ = plan_release(served)
    release.save(served)
    leaves = [Leaf(served, number, 2) for number in range(2)]
    encoder, reranker = (
        EncoderPart(served, device="cpu", threads=2),
        RerankPart(served, device="cpu", threads=2, dtype="float32"),
    )
    for part in (encoder, *(part for leaf in leaves for part in leaf.parts.values())):
        part.open_release(release.id)

    def ask(method: str, request: object) -> list:
        replies = ask_local_leaves(leaves, method, request)
        if method == "documents":
            replies[1] = Future()
            replies[1].set_exception(LostError("lost"))
        return replies

    engine, [task] = Engine(encoder, reranker, ask), release.tasks
    query = PendingQuery(
        release, texts_of(served)[0], task, K, find_source_search(task, "exact:enc"), time.monotonic() + 60
    )
    [whole] = engine.search([replace(query, by_document=True)])
    assert isinstance(whole.error, IncompleteError)
    [partial] = engine.search([replace(query, by_document=True, allow_partial=True)])
    assert partial.error is None
    assert partial.shards == (2, 1, 1, 0)
    assert partial.hits
    assert max(hit.row for hit in partial.hits) < Corpus.open(served).num_rows // 2


def terms_of(hit: AnswerHit) -> object:
    """Returns the rank before re-ranking and the terms of BM25 in the explanation of a hit; None without one."""
    if hit.explanation is None:
        return None
    assert (hit.explanation.reranker is None) == ("reranker" not in hit.scores)
    bm25, _ = hit.explanation.sources
    assert (bm25.rank is None) == (bm25.terms is None)
    return hit.explanation.rank, bm25


def test_row_ranges_answer_as_one_leaf(served: Store, classifier: str) -> None:
    """The documents that a border of two ranges cuts are one document."""
    release, _ = plan_release(served, reranker=classifier)
    release.save(served)
    encoder, reranker = (
        EncoderPart(served, device="cpu", threads=2),
        RerankPart(served, device="cpu", threads=2, dtype="float32"),
    )
    corpus, answers = Corpus.open(served), []
    for of in (1, 5):
        leaves = [Leaf(served, number, of) for number in range(of)]
        for part in (encoder, reranker, *(part for leaf in leaves for part in leaf.parts.values())):
            part.open_release(release.id)
        engine = Engine(
            encoder, reranker, lambda method, request, leaves=leaves: ask_local_leaves(leaves, method, request)
        )
        search = find_source_search(release.tasks[0], "0.5*bm25+0.5*exact:enc")
        for rerank in (0, 9):
            queries = [
                PendingQuery(
                    release,
                    text,
                    release.tasks[0],
                    K,
                    search,
                    time.monotonic() + 60,
                    rerank=rerank,
                    by_document=True,
                    explain=rerank > 0,
                )
                for text in texts_of(served)
            ]
            for answer in engine.search(queries):
                assert answer.error is None
                assert (answer.shards.total, answer.shards.successful) == (2 * of, 2 * of)
                answers.append([(hit.row, round(hit.score, 4), terms_of(hit)) for hit in answer.hits])
    half = len(answers) // 2
    assert answers[:half] == answers[half:]
    borders = [corpus.num_rows * number // 5 for number in range(1, 5)]
    names = corpus.documents(np.arange(corpus.num_rows))
    assert any(names[border] == names[border - 1] for border in borders)


def test_documents_are_found_below_erased_passages(served: Store) -> None:
    """The first search finds few passages that are not erased, so deeper ones follow."""
    release, _ = plan_release(served)
    release.save(served)
    encoder, leaf = EncoderPart(served, device="cpu", threads=2), Leaf(served)
    for part in (encoder, *leaf.parts.values()):
        part.open_release(release.id)
    reranker = RerankPart(served, device="cpu", threads=2, dtype="float32")
    engine = Engine(encoder, reranker, lambda method, request: ask_local_leaves([leaf], method, request))
    corpus = Corpus.open(served)
    every = searched(served, "exact:enc", "passage", corpus.num_rows)
    erased = np.unique(every.rows[0, 2:90])
    engine.erased_rows = lambda _: erased
    is_kept = ~np.isin(every.rows, erased)
    expected = best_of_all(corpus, Hits(every.scores, np.where(is_kept, every.rows, -1)), K)
    task, deadline = release.tasks[0], time.monotonic() + 60
    search = find_source_search(task, "exact:enc")
    queries = [PendingQuery(release, text, task, K, search, deadline, by_document=True) for text in texts_of(served)]
    for answer, ranking in zip(engine.search(queries), expected, strict=True):
        assert answer.error is None
        assert [hit.row for hit in answer.hits] == [row for row, _ in ranking]


def passages_of_positives(store: Store, split: str) -> dict[str, set[int]]:
    """Returns the rows of all passages of the judged documents of each query."""
    corpus, qrels = Corpus.open(store), Queries.open(store).qrels(split)
    rows: dict[str, set[int]] = {}
    for query, document in zip(qrels["query_id"].to_pylist(), qrels["corpus_id"].to_pylist(), strict=True):
        [first], [end] = corpus.rows_of_documents([document])
        rows.setdefault(query, set()).update(range(first, end))
    return rows


def test_no_passage_of_a_positive_document_is_a_negative(built: Path, done: Done, tmp_path: Path) -> None:
    shutil.copytree(built / "store", tmp_path / "store")
    store = Store(str(tmp_path / "store"))
    corpus, queries = Corpus.open(store), Queries.open(store)
    sources = ("--sources", "bm25", "exact:enc", "--depth", 300, "--pool-negatives", 200)
    done("mine_negatives", "--store", store.url, "--split", "test", *sources, "--name", "mined")
    own, pairs = passages_of_positives(store, "test"), read_judged_pairs(corpus, queries, "test")
    assert pairs.ids == list(own)
    groups = read_groups(store.open("negatives", "mined"))
    assert groups.query_ids == pairs.ids
    for query, rows, positives, negatives, copies in zip(pairs.ids, pairs.rows, *groups[1:], strict=True):
        assert positives.tolist() == rows.tolist()
        assert len(positives) == 2  # one passage of each document
        assert {*positives.tolist(), *copies.tolist()} >= own[query]
        assert len(negatives) >= 20
        assert not own[query] & {*negatives.tolist()}
    options = SimpleNamespace(batch=16, negatives_per_query=4, seed=0)
    for negatives in ("mined", None):
        name = TrainingSetSpec(queries="source", split="test", negatives=negatives)
        data = open_sets(store, [name], limit=None, batches="mixed", weighted=True).data
        assert [weights.tolist() for weights in data.weights or ()] == [[2.0, 1.0]] * len(pairs.ids)
        for step in range(30):
            for query, group in zip(*batch_at(data, options, step, draw_positive="weighted"), strict=True):
                rows = own[pairs.ids[query]]
                assert group[0] in pairs.rows[query]
                assert not rows & {*group[1:].tolist()}
                assert rows <= {*data.relevant_rows(query).tolist()}  # the mask of the other passages of a batch


class Lengths:
    """A system whose vectors depend on the text alone."""

    dim = 3

    def encode(self, texts, side, rank=0, world=1) -> np.ndarray:
        return np.array([np.random.default_rng(len(text)).normal(size=3) for text in texts], np.float32)


def test_dev_splits_rank_documents(store: Store) -> None:
    corpus, queries = Corpus.open(store), Queries.open(store)
    dev = open_dev_set(corpus, read_judged_pairs(corpus, queries, "test"), 120, lambda titles, texts: list(texts))
    own, system = passages_of_positives(store, "test"), Lengths()
    rows = np.setdiff1d(np.arange(corpus.num_rows), corpus.deleted)
    document_search = corpus.documents(rows).tolist()
    names = {passage.text: name for passage, name in zip(corpus.passages(rows), document_search, strict=True)}
    expected = []
    for id, text in zip(*queries.split("test"), strict=True):
        scores = system.encode([text], "query")[0] @ system.encode(dev.texts, "passage").T
        best: dict[str, float] = {}
        for name, score in zip([names[text] for text in dev.texts], scores, strict=True):
            best[name] = max(score, best.get(name, -np.inf))
        relevant = {*corpus.documents(np.array(sorted(own[id]))).tolist()}
        top = max(best[name] for name in relevant)
        rank = 1 + sum(score >= top for name, score in best.items() if name not in relevant)
        expected.append(1 / rank if rank <= 10 else 0)
    assert dev.mrr(system) == pytest.approx(np.mean(expected))
    assert len(dev.texts) >= 120
