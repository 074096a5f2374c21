"""Mining end to end: the pool against two searches, no positives or answers in it, scores, bad input."""

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
from samples import WORDS, files_of, make_passages, make_queries, save_tiny_bert, write_beir, write_queries

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.mining.negatives import read_training_data
from riptide.indexing.queries.queries import Queries
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.model_artifacts import commit_files
from riptide.indexing.store.sealed_json import fingerprint_of
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.reranker import Reranker, RerankerOptions

Done = Callable[..., str]
NUMBER = ("--part-queries", 7)  # 40 queries in 6 parts
DRAWN = ("--pool-negatives", 5, "--denoised-negatives", 4)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 queries with two positives each and an answer that many passages contain; BM25 has no hits for two."""
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
    return [pq.read_table(artifact.local_path(part)) for part in artifact.numbered_parts("part")]


def mine(done: Done, store: str, *more: object) -> str:
    sources = ("--sources", "bm25", "exact:enc", "--depth", 30)
    return done("mine_negatives", "--store", store, *sources, *NUMBER, "--candidates", "pool", "--name", "drawn", *more)


def test_the_pool_is_that_of_two_searches_without_what_answers(store: str, source: Path, done: Done) -> None:
    """Positives and passages with an answer are recomputed from the raw files."""
    told = mine(done, store, "--drop-answers", "--denoised-negatives", 0, "--pool-negatives", 200)
    assert "40 queries have fewer than 200 negatives" in told
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


def test_every_pair_is_scored_once_and_kept(
    store: str, classifier: str, done: Done, no_work: Callable[[], None]
) -> None:
    def scored() -> dict[tuple[str, int], float]:
        pool = Store(store).open("candidates", "pool")
        found: dict[tuple[str, int], float] = {}
        for artifact in Store(store).generations("scores", *Store(store).names("scores")):
            for part in artifact.numbered_parts("part"):
                ids = pq.read_table(pool.local_path(part.name))
                names = dict(zip(ids["query"].to_pylist(), ids["query_id"].to_pylist(), strict=True))
                for line in pq.read_table(artifact.local_path(part)).to_pylist():
                    pair = names[line["query"]], line["row"]
                    assert pair not in found, "scored twice"
                    found[pair] = line["probability"]
        return found

    def drawn(name: str, threshold: float, *more: object) -> list[dict]:
        told = done(
            "mine_negatives",
            "--store",
            store,
            "--sources",
            "bm25",
            "exact:enc",
            "--depth",
            30,
            *NUMBER,
            *DRAWN,
            "--candidates",
            "pool",
            "--name",
            name,
            "--reranker",
            classifier,
            "--rerank-dtype",
            "float32",
            "--denoise-threshold",
            threshold,
            *more,
        )
        assert "negatives" in told
        return pa.concat_tables(tables(store, "negatives", name)).to_pylist()

    lines = drawn("half", 0.5)
    first = scored()
    pairs = [
        (line["query_id"], row, p, low)
        for line in lines
        for row, p, low in zip(line["negatives"], line["probability"], line["is_denoised"], strict=True)
    ]
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

    corpus, model = Corpus.open(Store(store)), Reranker(classifier, RerankerOptions(dtype="float32"))
    texts, every = dict(zip(*_texts(store), strict=True)), dict([*scored().items()][::17])
    passages = corpus.passages([row for _, row in every])
    composed = model.compose([p.title for p in passages], [p.text for p in passages])
    alone = [model.score([texts[query]], [text])[0] for (query, _), text in zip(every, composed, strict=True)]
    np.testing.assert_allclose([*every.values()], alone, atol=1e-4, rtol=0)  # whose rounding is not each processor's
    no_work()
    assert drawn("half", 0.5) == lines, "the first command again, after other thresholds"


def _texts(store: str) -> tuple[list[str], list[str]]:
    from riptide.indexing.queries.queries import Queries

    return Queries.open(Store(store)).split("all")


def test_files_and_report(store: str, done: Done, tmp_path: Path) -> None:
    told = mine(
        done,
        store,
        "--denoised-negatives",
        0,
        "--pool-negatives",
        5,
        "--tevatron",
        tmp_path / "t.jsonl",
        "--sentence-transformers",
        tmp_path / "s.parquet",
        "--report",
        tmp_path / "report",
    )
    assert "report.html" in told
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert len(lines) == 40
    assert {len(line["negative_passages"]) for line in lines} == {5}
    assert len(pq.read_table(tmp_path / "s.parquet")) == sum(len(line["positive_passages"]) for line in lines)
    assert mine(done, store, "--denoised-negatives", 0, "--pool-negatives", 5).count("\n") == 2  # found done


def test_what_is_done_is_found_done_and_a_plan_does_nothing(
    store: str, classifier: str, done: Done, no_work: Callable[[], None]
) -> None:
    rerank = ("--reranker", classifier, "--denoise-threshold", 0.5, *DRAWN)
    plan = mine(done, store, *rerank, "--plan")
    assert "40 queries x 2 sources x 30: up to 2,400 pairs" in plan
    assert "in 6 parts of" in plan
    assert "160 pairs at least" in plan
    assert "up to 360 negatives" in plan
    assert Store(store).keys("candidates") == Store(store).incomplete_keys() == []
    told = mine(done, store, *rerank)
    stages = ["find copies", "pool", "rerank", "sample"]
    assert [line.partition(":")[0] for line in told.splitlines()[:4]] == stages, told
    before = files_of(Path(store), but=())
    no_work()
    again = mine(done, store, *rerank)
    assert told.endswith(again)
    assert not {line.partition(":")[0] for line in again.splitlines()} & {*stages}
    assert files_of(Path(store), but=()) == before


def test_another_seed_draws_others_and_a_limit_takes_the_first_questions(store: str, done: Done) -> None:
    """The order of a query's candidates does not depend on other queries: a limit changes no negatives."""
    ask = ("mine_negatives", "--store", store, "--sources", "bm25", "--depth", 30, "--pool-negatives", 5, *NUMBER)
    seeds = {}
    for seed in (0, 1):
        done(*ask, "--name", f"seed{seed}", "--seed", seed)
        seeds[seed] = pa.concat_tables(tables(store, "negatives", f"seed{seed}")).to_pylist()
    differ = [a["negatives"] != b["negatives"] for a, b in zip(seeds[0], seeds[1], strict=True)]
    assert sum(differ) > 30
    done(*ask, "--candidates", "nine", "--name", "nine", "--limit", 9)
    limited = [part.to_pylist() for part in tables(store, "negatives", "nine")]
    assert [len(part) for part in limited] == [7, 2]
    assert [*limited[0], *limited[1]] == seeds[0][:9]
    assert {*Store(store).names("candidates")} == {"asked-train-bm25", "nine"}


def test_a_reranker_of_one_half_denoises_the_other_half(store: str, model: str, done: Done) -> None:
    """Cross-fitting: each re-ranker scores the queries that it was not trained on, and the halves make the whole."""
    ask = ("mine_negatives", "--store", store, "--sources", "bm25", "--depth", 30, *NUMBER)
    train = ("train_reranker", "--store", store, "--backbone", model, "--steps", 1, "--batch", 8, "--max-length", 48)
    opened = Store(store)
    done(*ask, "--pool-negatives", 5, "--name", "whole")
    whole = pa.concat_tables(tables(store, "negatives", "whole")).to_pylist()
    trained_on: dict[int, list[str]] = {}
    for half in (1, 2):
        done(*ask, "--half", half, "--pool-negatives", 5, "--name", f"half{half}")
        part = pa.concat_tables(tables(store, "negatives", f"half{half}")).to_pylist()
        trained_on[half] = [row["query_id"] for row in part]
        assert part == [row for row in whole if row["query_id"] in trained_on[half]]
        done(*train, "--negatives", f"half{half}", "--name", f"ce{half}", "--cpus", 1)
        notes = opened.open("models", f"ce{half}").notes
        assert notes["queries"] <= len(trained_on[half]) < notes["asked"] == 40
    assert sorted(trained_on[1] + trained_on[2]) == sorted(row["query_id"] for row in whole)
    assert min(map(len, trained_on.values())) >= 10
    for half in (1, 2):
        rerank = ("--reranker", f"models/ce{3 - half}", "--denoise-threshold", 0.9, *DRAWN)
        done(*ask, "--half", half, *rerank, "--name", f"hard{half}")
        [name] = (each for each in opened.names("scores") if each.startswith(f"asked-train-half{half}-"))
        [scores] = opened.generations("scores", name)
        assert scores.inputs["candidates"]["artifact"] == f"candidates/asked-train-half{half}-bm25"
        assert scores.inputs["reranker"]["artifact"] == f"models/ce{3 - half}"
        hard = pa.concat_tables(tables(store, "negatives", f"hard{half}"))
        assert hard["query_id"].to_pylist() == trained_on[half]
    assert {*opened.names("candidates")} == {"asked-train-bm25", "asked-train-half1-bm25", "asked-train-half2-bm25"}
    also = ("--negatives", "hard1", "--also-train", "queries=asked,negatives=hard2")
    plan = done(
        "train_retriever", "--store", store, "--task", "t", "--train", "prompts", "--backbone", model, *also, "--plan"
    )
    assert "queries   40 of train in queries/asked, with negatives in negatives/hard1; " in plan


def test_questions_with_few_candidates_or_none_are_listed(store: str, classifier: str, done: Done) -> None:
    """Parts of one query: those of a query of stop words and of an empty query have no candidates."""
    told = done(
        "mine_negatives",
        "--store",
        store,
        "--sources",
        "bm25",
        "--depth",
        3,
        "--part-queries",
        1,
        "--reranker",
        classifier,
        "--denoise-threshold",
        0.5,
        "--pool-negatives",
        1,
        "--denoised-negatives",
        1,
        "--name",
        "few",
    )
    [line] = [line for line in told.splitlines() if "fewer than 1 negatives" in line]
    parts = tables(store, "negatives", "few")
    assert [len(part) for part in parts] == [1] * 40
    counts = {line["query_id"]: len(line["negatives"]) for part in parts for line in part.to_pylist()}
    drawn = [line for part in parts for line in part.to_pylist()]
    few = [line["query_id"] for line in drawn if not any(line["is_from_pool"]) or not any(line["is_denoised"])]
    assert counts["q3"] == counts["q5"] == 0
    more = f" and {len(few) - 10} more" if len(few) > 10 else ""
    told = "have fewer than 1 negatives from the pool, or fewer than 1 denoised ones"
    assert line == f"  {len(few)} queries {told}: {', '.join(few[:10])}{more}"
    assert 2 <= len(few) < 40


def test_a_model_of_the_store_is_an_input_of_the_scores(store: str, classifier: str, done: Done, refused: Done) -> None:
    with Store(store).create("models", "cross", config={"made": "by hand"}) as draft:
        commit_files(draft, Path(classifier))
    mine(done, store, "--reranker", "models/cross", "--denoise-threshold", 0.5, *DRAWN)
    [name] = Store(store).names("scores")
    [scores] = Store(store).generations("scores", name)
    assert name == f"pool-cross-{fingerprint_of(scores.config['reranker'])[:6]}"
    assert scores.inputs["reranker"]["artifact"] == "models/cross"
    line = refused("store", "remove", "models/cross", "--store", store)
    assert f"{store}/models/cross is needed by scores/{name}/g0000: remove those first" in line


def test_answers_in_another_form_are_refused_where_they_are_needed(
    store: str, source: Path, done: Done, refused: Done, tmp_path: Path
) -> None:
    """Answers as in Hugging Face's SQuAD: a dictionary of lists."""
    queries = [json.loads(line) for line in (source / "queries.jsonl").read_text().splitlines()]
    for query in queries:
        query["metadata"]["answers"] = {"text": query["metadata"]["answers"], "answer_start": [0, 0]}
    judged = [line.split("\t") for line in (source / "qrels" / "train.tsv").read_text().splitlines()[1:]]
    squad = write_queries(tmp_path / "squad", queries, {"train": [(q, p, int(score)) for q, p, score in judged]})
    done("import_queries", "--store", store, "--source", squad)
    ask = ("mine_negatives", "--store", store, "--queries", "squad", "--sources", "bm25", "--depth", 5)
    line = refused(*ask, "--drop-answers")
    assert "--drop-answers: queries/squad q0: its metadata's answers hold {" in line
    assert 'expected texts, {"answers": ["a", "b"]}' in line
    assert Store(store).keys("candidates") == Store(store).incomplete_keys() == []
    done(*ask)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--split", "dev"), "no split 'dev' with qrels"),
        (("--split", "all"), "no split 'all' with qrels"),
        (("--sources", "bm52"), "source 'bm52': expected a mode"),
        (("--sources", "bm25", "bm25"), "each once"),
        (("--sources", "exact:other"), "there is no such artifact"),
        (("--depth", "0"), "--depth 0: expected at least 1"),
        (("--part-queries", "0"), "--part-queries 0: expected at least 1"),
        (("--denoise-threshold", "0"), "--denoise-threshold 0.0: expected a probability"),
        (("--denoise-threshold", "1.5"), "--denoise-threshold 1.5: expected a probability"),
        (("--pool-negatives", "-1"), "--pool-negatives -1: expected 0 or more"),
    ],
)
def test_bad_options(store: str, refused: Done, options: tuple[str, ...], told: str) -> None:
    assert told in refused("mine_negatives", "--store", store, *options)
    assert Store(store).keys("candidates") == []


def test_a_split_without_questions_is_refused_before_anything_is_begun(
    store: str, source: Path, done: Done, refused: Done, tmp_path: Path
) -> None:
    queries = [json.loads(line) for line in (source / "queries.jsonl").read_text().splitlines()]
    late = write_queries(tmp_path / "late", queries, {"train": [(queries[-1]["_id"], "p0", 1)]})
    done("import_queries", "--store", store, "--source", late, "--limit", 3)  # none of which is judged
    line = refused("mine_negatives", "--store", store, "--queries", "late", "--report", tmp_path / "report")
    assert "queries/late: no split 'train' with qrels" in line
    assert Store(store).keys("candidates") == Store(store).incomplete_keys() == []


def test_what_does_not_fit_is_refused(
    store: str, world, model: str, refused: Done, done: Done, job, source: Path
) -> None:
    told = refused("mine_negatives", "--store", world.store, "--sources", "exact:enc", "--drop-answers")
    assert "has answers" in told
    for reranker, why in ((model, "no cross-encoder"), ("models/none", "there is no such artifact")):
        assert why in refused("mine_negatives", "--store", store, "--denoised-negatives", 1, "--reranker", reranker)
    assert Store(store).keys("candidates") == Store(store).incomplete_keys() == []  # told before the search
    for option in ("--candidates", "--name"):
        line = refused("mine_negatives", "--store", world.store, "--sources", "exact:enc", option, "a/b")
        assert "name 'a/b': expected a name without '/', as in " in line
    assert "name '../x': expected a name without '/'" in refused(
        "mine_negatives", "--store", store, "--sources", "bm25", "--name", "../x"
    )
    assert Store(store).keys("candidates") == Store(store).incomplete_keys() == []
    mine(done, store, "--denoised-negatives", 0)
    told = refused("mine_negatives", "--store", store, "--sources", "bm25", "--candidates", "pool")
    assert "was made otherwise: " in told
    assert refused("mine_negatives", "--store", store, "--sources", "bm25", "--candidates", "pool", "--plan") == told
    assert "sources [" in told
    ask = ("mine_negatives", "--store", store, "--sources", "bm25", "exact:enc", "--depth", 30, *NUMBER)
    told = refused(*ask, "--candidates", "pool", "--name", "drawn", "--pool-negatives", 7, "--seed", 2)
    assert f"{store}/negatives/drawn was made otherwise: --pool-negatives 30, now 7, --seed 0, now 2" in told
    more = write_beir(source.parent / "more", make_passages(30, seed=9, prefix="n"))
    done("import_corpus", "--store", store, "--source", more, "--append")
    assert "run riptide build-bm25" in refused("mine_negatives", "--store", store, "--sources", "bm25")
    assert "run riptide encode-corpus" in refused("mine_negatives", "--store", store, "--sources", "exact:enc")
    assert job("mine_negatives", "--store", store, "--deepness", 3).status == 2


def test_a_reranked_run_is_in_the_order_of_the_probabilities(store: str, classifier: str, done: Done) -> None:
    at = ("--store", store, "--mode", "bm25", "--split", "train", "--k", 20)
    done("search", *at, "--name", "plain")
    done("search", *at, "--name", "reranked", "--rerank", classifier, "--rerank-depth", 5)
    plain, ranked = (next(read_run(Store(store).open("runs", name))) for name in ("plain", "reranked"))
    corpus, model = Corpus.open(Store(store)), Reranker(classifier)
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


@pytest.fixture
def doubled(tmp_path: Path, done: Done) -> str:
    """20 passages of four words, each twice but for white space; a query of its words for each."""
    texts = [" ".join(WORDS[number : number + 4]) for number in range(20)]
    passages = [{"_id": f"p{n}", "title": "t", "text": text} for n, text in enumerate(texts)]
    passages += [{"_id": f"c{n}", "title": " t", "text": text.replace(" ", "  ")} for n, text in enumerate(texts)]
    queries = [{"_id": f"q{n}", "text": text} for n, text in enumerate(texts)]
    source = write_beir(tmp_path / "twice", passages, queries, {"train": [(f"q{n}", f"p{n}", 1) for n in range(20)]})
    store = tmp_path / "doubled"
    done("import_corpus", "--store", store, "--source", source)
    done("build_bm25", "--store", store)
    return str(store)


def test_a_passage_with_the_text_of_the_positive_is_no_negative(doubled: str, done: Done) -> None:
    """BM25 finds it with the positive, and training reads it as one that is no negative."""
    told = done("mine_negatives", "--store", doubled, "--depth", 5, "--pool-negatives", 5)
    assert "20 passages with the title and text of a positive are no negatives" in told
    [table] = tables(doubled, "negatives", "twice-train-bm25")
    for number, line in enumerate(table.to_pylist()):
        assert (line["positives"], line["copies"]) == ([number], [number + 20])
        assert line["negatives"]
        assert not {number, number + 20} & {*line["negatives"]}
    store = Store(doubled)
    negatives = store.open("negatives", "twice-train-bm25")
    data = read_training_data(Corpus.open(store), Queries.open(store), "train", negatives, None)
    assert [data.relevant_rows(number).tolist() for number in range(20)] == [[n, n + 20] for n in range(20)]


def test_margins_by_the_scores_of_the_source(
    doubled: str, done: Done, refused: Done, documented: Callable[..., None], tmp_path: Path
) -> None:
    """BM25 against a run of the same search: all above 40 % of the positive's score are dropped, and reported."""
    ask = ("mine_negatives", "--store", doubled, "--depth", 8, "--pool-negatives", 5)
    report = tmp_path / "report"
    told = done(*ask, "--relative-margin", 0.6, "--name", "near", "--report", report)
    done("search", "--store", doubled, "--mode", "bm25", "--split", "train", "--k", 8, "--name", "run")
    corpus, scores = Corpus.open(Store(doubled)), {}
    for block in read_run(Store(doubled).open("runs", "run")):
        for hit in block.to_pylist():
            [row] = corpus.rows_of([hit["id"]]).tolist()
            scores.setdefault(hit["query_id"], {})[row] = hit["score"]
    [table] = tables(doubled, "negatives", "near")
    dropped = 0
    for number, line in enumerate(table.to_pylist()):
        hits = scores[line["query_id"]]
        limit = hits[number] * 0.4
        mine = {row for row in hits if row not in (number, number + 20)}
        assert {*line["dropped"]} == {row for row in mine if hits[row] > limit}
        assert {*line["negatives"]} <= {row for row in mine if hits[row] <= limit}
        dropped += len(line["dropped"])
    assert 20 < dropped < sum(len(hits) - 2 for hits in scores.values())
    assert f"{dropped} candidates exceed --relative-margin by the scores of bm25" in told
    numbers = json.loads((report / "report.json").read_text())
    assert numbers["dropped"] == [{"limit": "relative_margin", "scorer": "bm25", "candidates": dropped}]
    line = refused(*ask, "--name", "near", "--relative-margin", 0.2)
    assert "--relative-margin 0.6, now 0.2" in line
    two = ("--sources", "bm25", "exact:enc", "--max-score", 3)
    done(
        "encode_corpus",
        "--store",
        doubled,
        "--encoder",
        save_tiny_bert(tmp_path / "tiny"),
        "--name",
        "enc",
        "--dtype",
        "float32",
        "--compile",
        "never",
    )
    line = refused(*ask, *two)
    assert "--max-score 3.0: the scores of 2 sources have different scales" in line
    documented("Mining", "a limit on the scores of two sources", line, 1)
    line = refused(*ask, "--relative-margin", -1)
    documented("Mining", "a negative margin", line, 1)
