"""Mining end to end: the pool against two searches, no positive and no answer in it, every score once, bad input."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from samples import WORDS, make_passages, make_queries, save_tiny_bert, write_beir

from indexing.corpus import Corpus
from indexing.rescoring import OPTIONS
from indexing.runs import read_run
from indexing.store import Store
from retriever.reranker import Reranker

Done = Callable[..., str]
NUMBER = ("--part-queries", 7)  # 40 questions in 6 parts
DRAWN = ("--undenoised", 5, "--denoised", 4)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random cross-encoder whose probabilities lie on both sides of 0.5."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = save_tiny_bert(tmp_path_factory.mktemp("reranker") / "tiny-cross")
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 questions with two positives each and an answer that many passages contain; BM25 finds nothing for two."""
    passages = make_passages(240)
    queries, judged = make_queries(passages, 40)
    for number, query in enumerate(queries):
        query["metadata"] = {"answers": [WORDS[number], f"{WORDS[-number - 1]} {WORDS[number]}"]}
    queries[3]["text"], queries[5]["text"] = "the of and", ""
    judged += [(query, f"p{number}", 1) for number, (query, _, _) in enumerate(judged) if _ != f"p{number}"]
    judged.append(("q0", "p200", 0))  # judged as not relevant: no positive
    folder = tmp_path_factory.mktemp("raw") / "asked"
    return write_beir(folder, passages, queries, {"train": judged})


@pytest.fixture(scope="module")
def built(source: Path, model: str, call_job: Callable[..., int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mined") / "store"
    at = ("--store", folder)
    assert call_job("import_corpus", *at, "--source", source, "--part-size", 60) == 0
    encoder = ("--encoder", model, "--name", "enc", "--dtype", "float32", "--compile", "never")
    assert call_job("encode_corpus", *at, *encoder) == 0
    assert call_job("build_bm25", *at, "--shards", 2) == 0
    return folder


@pytest.fixture
def store(built: Path, tmp_path: Path) -> str:
    return str(shutil.copytree(built, tmp_path / "mined"))


def tables(store: str, kind: str, name: str) -> list[pa.Table]:
    artifact = Store(store).open(kind, name)
    return [pq.read_table(artifact.local(part)) for part in artifact.group("part")]


def mine(done: Done, store: str, *more: object) -> str:
    sources = ("--sources", "bm25", "exact:enc", "--depth", 30)
    return done("mine_negatives", "--store", store, *sources, *NUMBER, "--candidates", "pool", "--name", "drawn", *more)


def test_the_pool_is_that_of_two_searches_without_what_answers(store: str, source: Path, done: Done) -> None:
    """An independent reading of the raw files says what answers a question."""
    told = mine(done, store, "--drop-answers", "--denoised", 0, "--undenoised", 200)
    assert "40 questions have fewer than 200 negatives" in told
    queries = [json.loads(line) for line in (source / "queries.jsonl").read_text().splitlines()]
    passages = {p["_id"]: p for p in map(json.loads, (source / "corpus.jsonl").read_text().splitlines())}
    relevant: dict[str, set[str]] = {}
    for line in (source / "qrels" / "train.tsv").read_text().splitlines()[1:]:
        query, passage, score = line.split("\t")
        if int(score) > 0:
            relevant.setdefault(query, set()).add(passage)
    found: dict[str, dict[str, dict[str, tuple[int, float]]]] = {q["_id"]: {} for q in queries}
    for name in ("bm25", "exact:enc"):
        run = name.replace(":", "-")
        done("search", "--store", store, "--source", name, "--split", "train", "--k", 30, "--name", run)
        ranks: dict[str, int] = {}
        for block in read_run(Store(store).open("runs", run)):
            for hit in block.to_pylist():
                ranks[hit["query_id"]] = rank = ranks.get(hit["query_id"], 0) + 1
                found[hit["query_id"]].setdefault(hit["id"], {})[name] = (rank, hit["score"])
    expected: dict[tuple[str, str], dict[str, tuple[int, float]]] = {}
    answering = 0
    for query in queries:
        for passage, hits in found[query["_id"]].items():
            words = passages[passage]["text"].split()
            pairs = {*words, *(f"{a} {b}" for a, b in itertools.pairwise(words))}
            contains = any(answer in pairs for answer in query["metadata"]["answers"])
            answering += contains
            if passage not in relevant[query["_id"]] and not contains:
                expected[query["_id"], passage] = hits
    assert answering > 50
    corpus, pooled = Corpus.open(Store(store)), {}
    for table in tables(store, "candidates", "pool"):
        for line in table.to_pylist():
            [id] = corpus.ids(np.array([line["row"]]))
            pooled[line["query_id"], id] = {
                name: (line[f"rank:{name}"], line[f"score:{name}"])
                for name in ("bm25", "exact:enc")
                if line[f"rank:{name}"] is not None
            }
    assert pooled == expected
    drawn = pa.concat_tables(tables(store, "negatives", "drawn")).to_pylist()
    assert [line["query_id"] for line in drawn] == [query["_id"] for query in queries]
    assert {(line["query_id"], *corpus.ids(np.array([row]))) for line in drawn for row in line["negatives"]} == {
        *expected
    }
    for line in drawn:
        assert {*corpus.ids(np.array(line["positives"]))} == relevant[line["query_id"]]


def test_every_pair_is_scored_once_and_kept(store: str, classifier: str, done: Done) -> None:
    def scored() -> dict[tuple[str, int], float]:
        pool = Store(store).open("candidates", "pool")
        found: dict[tuple[str, int], float] = {}
        for artifact in Store(store).generations("scores", "pool-tiny-cross"):
            for part in artifact.group("part"):
                ids = pq.read_table(pool.local(part.name))
                names = dict(zip(ids["query"].to_pylist(), ids["query_id"].to_pylist(), strict=True))
                for line in pq.read_table(artifact.local(part)).to_pylist():
                    pair = names[line["query"]], line["row"]
                    assert pair not in found, "scored twice"
                    found[pair] = line["probability"]
        return found

    def drawn(name: str, threshold: float, *more: object) -> list[dict]:
        told = done(
            "mine_negatives", "--store", store, "--sources", "bm25", "exact:enc", "--depth", 30, *NUMBER, *DRAWN,
            "--candidates", "pool", "--name", name, "--reranker", classifier, "--denoise-threshold", threshold, *more,
        )  # fmt: skip
        assert "negatives" in told
        return pa.concat_tables(tables(store, "negatives", name)).to_pylist()

    lines = drawn("half", 0.5)
    first = scored()
    pairs = [(line["query_id"], row, p, low) for line in lines
             for row, p, low in zip(line["negatives"], line["probability"], line["denoised"], strict=True)]  # fmt: skip
    assert sum(low for *_, low in pairs) > 100
    assert all(p is not None and p < 0.5 for *_, p, low in pairs if low)
    assert all(first.get((query, row)) == p for query, row, p, _ in pairs)
    assert all(len({*line["negatives"]}) == len(line["negatives"]) for line in lines)
    assert 0 < len(first) < sum(map(len, tables(store, "candidates", "pool")))
    drawn("looser", 0.7)
    assert scored() == first, "a looser threshold needs no new score"
    drawn("stricter", 0.3)
    second = scored()
    assert len(second) > len(first)
    assert first.items() <= second.items()
    drawn("all", 0.5, "--score-all")
    assert len(scored()) == sum(map(len, tables(store, "candidates", "pool")))

    corpus, model = Corpus.open(Store(store)), Reranker(classifier, OPTIONS)
    texts = dict(zip(*_texts(store), strict=True))
    some = sorted(first)[::17]
    passages = corpus.passages([row for _, row in some])
    composed = model.compose([p.title for p in passages], [p.text for p in passages])
    alone = [model.score([texts[query]], [text])[0] for (query, _), text in zip(some, composed, strict=True)]
    np.testing.assert_allclose([first[pair] for pair in some], alone, atol=0.03)  # bfloat16 where the processor has it


def _texts(store: str) -> tuple[list[str], list[str]]:
    from indexing.queries import Queries

    return Queries.open(Store(store)).split("all")


def test_files_and_report(store: str, done: Done, tmp_path: Path) -> None:
    told = mine(
        done, store, "--denoised", 0, "--undenoised", 5, "--tevatron", tmp_path / "t.jsonl",
        "--sentence-transformers", tmp_path / "s.parquet", "--report", tmp_path / "report",
    )  # fmt: skip
    assert "report.html" in told
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert len(lines) == 40
    assert {len(line["negative_passages"]) for line in lines} == {5}
    assert len(pq.read_table(tmp_path / "s.parquet")) == sum(len(line["positive_passages"]) for line in lines)
    assert mine(done, store, "--denoised", 0, "--undenoised", 5).count("\n") == 2  # found done


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--split", "dev"), "no split 'dev' with qrels"),
        (("--split", "all"), "no split 'all' with qrels"),
        (("--sources", "bm52"), "source 'bm52': expected bm25"),
        (("--sources", "bm25", "bm25"), "each once"),
        (("--sources", "exact:other"), "there is no such artifact"),
        (("--depth", "0"), "--depth 0: expected at least 1"),
        (("--part-queries", "0"), "--part-queries 0: expected at least 1"),
        (("--denoise-threshold", "0"), "--denoise-threshold 0.0: expected a probability"),
        (("--denoise-threshold", "1.5"), "--denoise-threshold 1.5: expected a probability"),
        (("--undenoised", "-1"), "--undenoised -1: expected 0 or more"),
    ],
)
def test_bad_options(store: str, refused: Done, options: tuple[str, ...], told: str) -> None:
    assert told in refused("mine_negatives", "--store", store, *options)
    assert Store(store).keys("candidates") == []


def test_what_does_not_fit_is_refused(
    store: str, world, model: str, refused: Done, done: Done, job, source: Path
) -> None:
    told = refused("mine_negatives", "--store", world.store, "--sources", "exact:enc", "--drop-answers")
    assert "has answers" in told
    told = refused("mine_negatives", "--store", store, "--denoised", 1, "--reranker", model)
    assert "no cross-encoder" in told
    mine(done, store, "--denoised", 0)
    told = refused("mine_negatives", "--store", store, "--sources", "bm25", "--candidates", "pool")
    assert "was begun otherwise: " in told
    assert "config.sources" in told
    more = write_beir(source.parent / "more", make_passages(30, seed=9, prefix="n"))
    done("import_corpus", "--store", store, "--source", more, "--append")
    assert "run jobs/build_bm25.py" in refused("mine_negatives", "--store", store, "--sources", "bm25")
    assert "run jobs/encode_corpus.py" in refused("mine_negatives", "--store", store, "--sources", "exact:enc")
    assert job("mine_negatives", "--store", store, "--deepness", 3).status == 2


def test_a_reranked_run_is_in_the_order_of_the_probabilities(store: str, classifier: str, done: Done) -> None:
    at = ("--store", store, "--mode", "bm25", "--split", "train", "--k", 20)
    done("search", *at, "--name", "plain")
    done("search", *at, "--name", "reranked", "--rerank", classifier, "--rerank-depth", 5)
    plain, ranked = (next(read_run(Store(store).open("runs", name))) for name in ("plain", "reranked"))
    corpus, model = Corpus.open(Store(store)), Reranker(classifier, OPTIONS)
    texts = dict(zip(*_texts(store), strict=True))
    compared = 0
    for query in plain["query_id"].unique().to_pylist():
        before, after = (
            [(h["row"], h["score"]) for h in t.to_pylist() if h["query_id"] == query] for t in (plain, ranked)
        )
        assert {row for row, _ in before[:5]} == {row for row, _ in after[:5]}
        assert [row for row, _ in before[5:]] == [row for row, _ in after[5:]]
        scores = [score for _, score in after]
        assert scores == sorted(scores, reverse=True)
        passages = corpus.passages([row for row, _ in after[:5]])
        composed = model.compose([p.title for p in passages], [p.text for p in passages])
        alone = model.score([texts[query]] * len(passages), composed)
        np.testing.assert_allclose(scores[:5], alone, atol=0.03)
        compared += before[:5] != after[:5]
    assert compared > 10
