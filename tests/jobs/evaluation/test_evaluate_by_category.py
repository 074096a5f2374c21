"""`evaluate --relevance category`: values worked out by hand, measures of vectors against a loop, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import WORDS, write_beir, write_lines, write_queries

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions

Done = Callable[..., str]
CATEGORIES = [["a"], ["a", "b"], ["b"], ["c"], ["c", "d"], ["e"]]  # of passages d0 to d5


def passage(number: int, categories: Any) -> dict:
    text = " ".join(WORDS[(3 * number + place) % len(WORDS)] for place in range(4))
    return {"_id": f"d{number}", "text": text, **({"metadata": {"categories": categories}} if categories else {})}


def query(number: int, categories: Any = None) -> dict:
    text = f"{WORDS[number]} {WORDS[number + 5]}"
    return {"_id": f"q{number}", "text": text, **({"metadata": {"categories": categories}} if categories else {})}


@pytest.fixture
def store(tmp_path: Path, done: Done) -> Path:
    """q0 has category a: d0, d1. q1 has none, and d4 is judged: c, d, so d3, d4. q2 has e and z: d5. q3 has z: none."""
    queries = [query(0, ["a"]), query(1), query(2, ["e", "z"]), query(3, ["z"]), query(4, ["c"])]
    judged = [("q0", "d0", 1), ("q1", "d4", 1), ("q1", "d0", 0), ("q2", "d5", 1), ("q3", "d0", 1)]
    passages = [passage(number, categories) for number, categories in enumerate(CATEGORIES)]
    source = write_beir(tmp_path / "raw", passages, queries, {"test": judged})
    done("import_corpus", "--store", tmp_path / "s", "--source", source)
    return tmp_path / "s"


def write_run(path: Path, ranked: dict[str, str]) -> Path:
    lines = [
        f"{query} Q0 {id} {rank} {1 / rank} mine"
        for query, ids in ranked.items()
        for rank, id in enumerate(ids.split(), 1)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


RANKED = {"q0": "d5 d1 gone d0", "q1": "d3 d4", "q2": "d0 d1", "q3": "d0"}
# By hand: q0 finds both at ranks 2 and 4, q1 both at 1 and 2, q2 nothing, q3 has nothing relevant.
BY_HAND = {
    "Acc@1": [0, 1, 0, 0],
    "Acc@10": [1, 1, 0, 0],
    "MRR@100": [1 / 2, 1, 0, 0],
    "MAP@10": [(1 / 2 + 2 / 4) / 2, 1, 0, 0],
    "MAP@50": [(1 / 2 + 2 / 4) / 2, 1, 0, 0],
}


def test_values_are_those_worked_out_by_hand(store: Path, tmp_path: Path, done: Done, refused: Done) -> None:
    run, worse = write_run(tmp_path / "a.trec", RANKED), write_run(tmp_path / "b.trec", {"q0": "d5", "q1": "d0"})
    command = ("evaluate", "--store", store, "--run", run, worse, "--json", tmp_path / "e.json")
    out = done(*command, "--relevance", "category").splitlines()
    assert out[0] == "1 of the 4 queries have the categories of their judged passages"
    assert out[1] == ("warning: 1 of the 4 queries of queries/raw have no category of a passage, and count as 0")
    document = json.loads((tmp_path / "e.json").read_text())
    assert document["query_ids"] == ["q0", "q1", "q2", "q3"]
    values = document["per_query"][str(run)]
    assert list(values) == list(BY_HAND)
    for metric, expected in BY_HAND.items():
        assert values[metric] == pytest.approx(expected), metric
    assert document["p_against_first"]["MAP@10"][str(worse)] > 0.05
    assert document["relevance"] == {"category": "categories"}
    # One of 2, 2, 1 and 0 of 6 passages is first.
    assert document["random_ranking"]["Acc@1"] == pytest.approx((2 / 6 + 2 / 6 + 1 / 6) / 4)
    [row] = [line for line in out if line.startswith("random ranking")]
    assert row.split()[2] == f"{(2 / 6 + 2 / 6 + 1 / 6) / 4:.4f}"
    assert "a file with other content is there" in refused(*command)  # by judgements, with other metrics


def test_deleted_passages_are_not_relevant_and_all_queries_may_be_measured(
    store: Path, tmp_path: Path, done: Done, refused: Done
) -> None:
    """Without d0, q0 has one relevant passage. Query q4 is judged nowhere, and has categories of its own."""
    (tmp_path / "gone.txt").write_text("d0\n")
    more = write_lines(tmp_path / "more" / "corpus.jsonl", [passage(6, ["a"])]).parent
    done("import_corpus", "--store", store, "--source", more, "--append", "--delete", tmp_path / "gone.txt")
    run = write_run(tmp_path / "a.trec", {"q0": "d0 d1 d6", "q4": "d5 d4"})
    command = ("evaluate", "--store", store, "--run", run, "--relevance", "category", "--metrics", "MAP@2")
    done(*command, "--json", tmp_path / "e.json")
    document = json.loads((tmp_path / "e.json").read_text())
    assert document["per_query"][str(run)]["MAP@2"] == [pytest.approx(1 / 2 / 2), 0, 0, 0]
    line = refused(*command, "--split", "all")
    assert "queries/raw: the query 'q1' has no categories: it has no metadata" in line
    source = write_queries(tmp_path / "own", [query(0, ["a"]), query(4, ["c"])], {"test": [("q0", "d1", 1)]})
    done("import_queries", "--store", store, "--source", source)
    done(*command, "--split", "all", "--queries", "own", "--json", tmp_path / "all.json")
    document = json.loads((tmp_path / "all.json").read_text())
    assert "have the categories of their judged passages" not in done(
        *command, "--queries", "own", "--json", tmp_path / "own.json"
    )
    assert document["query_ids"] == ["q0", "q4"]
    assert document["per_query"][str(run)]["MAP@2"] == [pytest.approx(1 / 2 / 2), pytest.approx(1 / 2 / 2)]
    (tmp_path / "gone.txt").write_text("d4\n")  # the one judged passage of q1, whose metadata is empty
    done("import_corpus", "--store", store, "--delete", tmp_path / "gone.txt")
    out = done(*command, "--queries", "raw", "--json", tmp_path / "less.json")
    assert "warning: 2 of the 4 queries of queries/raw have no category of a passage, and count as 0" in out


def test_bad_input_is_one_line(store: Path, tmp_path: Path, done: Done, refused: Done, documented: Done) -> None:
    run = write_run(tmp_path / "a.trec", RANKED)
    command = ("evaluate", "--store", store, "--run", run, "--relevance", "category")
    line = refused(*command, "--metrics", "nDCG@10")
    assert "--metrics 'nDCG@10': expected Acc@K, MRR@K or MAP@K" in line
    assert "--metrics 'MAP@0': cutoff 0: expected 1 to 1,000,000,000" in refused(*command, "--metrics", "MAP@0")
    documented("Evaluating", "a metric of judgements, by category", line, 1)
    assert "give --relevance category" in refused(
        "evaluate", "--store", store, "--run", run, "--categories-field", "categories"
    )
    without = write_queries(tmp_path / "own", [query(0)], {"test": [("q0", "d0", 0)]})
    done("import_queries", "--store", store, "--source", without)
    line = refused(*command, "--queries", "own")
    assert "the query 'q0', which has no judged passage, has no categories: it has no metadata" in line
    command = (*command, "--queries", "raw")
    line = refused(*command, "--categories-field", "topics")
    assert "the passage 'd0' has no categories: its metadata has no field 'topics', but 'categories'" in line
    documented("Evaluating", "relevance by a metadata field that the passages lack", line, 1)
    more = write_lines(tmp_path / "more" / "corpus.jsonl", [passage(6, None)]).parent
    done("import_corpus", "--store", store, "--source", more, "--append")
    assert "the passage 'd6' has no categories: it has no metadata" in refused(*command)
    done("build_bm25", "--store", store)
    searching = ("evaluate", "--store", store, "--queries", "raw", "--source", "bm25", "--relevance", "category")
    assert "the passage 'd6' has no categories" in refused(*searching)
    assert not (store / "runs").exists()  # before a search, which may take long


@pytest.mark.parametrize("sample", [100, 4])
def test_vectors_are_measured_as_by_a_slow_loop(
    sample: int, store: Path, model: str, tmp_path: Path, done: Done
) -> None:
    """All pairs of the queries and the passages; with a sample of 4, of 4 passages that the numbers tell."""
    done(
        "encode_corpus",
        "--store",
        store,
        "--encoder",
        model,
        "--name",
        "enc",
        "--dtype",
        "float32",
        "--compile",
        "never",
    )
    out = done(
        "evaluate",
        "--store",
        store,
        "--embeddings",
        "enc",
        "--relevance",
        "category",
        "--sample",
        sample,
        "--json",
        tmp_path / "e.json",
    )
    found = json.loads((tmp_path / "e.json").read_text())["embeddings"]["enc"]
    passages = Embeddings.open(Store(str(store)), "enc", Corpus.open(Store(str(store)))).take(np.arange(6))
    texts = [query(number)["text"] for number in range(4)]
    queries = Encoder(model, EncoderOptions(dtype="float32", compile="never")).encode(texts)
    relevant = [{0, 1}, {3, 4}, {5}, set()]
    kept = [row for row in range(6) if sample > 6 or row in drawn_rows(4, 6)]
    raw, unit = {True: [], False: []}, {True: [], False: []}
    for number, own in enumerate(relevant):
        for row in kept:
            a, b = queries[number].astype(float), passages[row].astype(float)
            raw[row in own].append(((a - b) ** 2).sum())
            unit[row in own].append(a @ b / np.sqrt((a @ a) * (b @ b)))
    assert (found["pairs"], found["other_pairs"]) == (len(raw[True]), len(raw[False]))
    assert (found["queries"], found["passages"]) == (4, len(kept))
    assert found["raw"]["alignment"] == pytest.approx(np.mean(raw[True]), rel=1e-4)
    assert found["unit"]["alignment"] == pytest.approx(2 - 2 * np.mean(unit[True]), rel=1e-4)
    assert found["unit"]["cosine_relevant"] == pytest.approx(np.mean(unit[True]), rel=1e-4)
    assert found["unit"]["cosine_other"] == pytest.approx(np.mean(unit[False]), rel=1e-4)
    pairs = f"alignment of {len(raw[True])} pairs with a common category, of all {4 * len(kept)} of 4 queries"
    assert f"embeddings enc: {pairs} and {len(kept)} passages" in out


def drawn_rows(size: int, num_passages: int) -> list[int]:
    """Returns the passages of a sample by the default seed, if there are no more queries than `size`."""
    return sorted(np.random.default_rng(0).choice(np.arange(num_passages), size, replace=False).tolist())
