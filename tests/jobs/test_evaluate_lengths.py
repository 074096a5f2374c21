"""The median length of the hits: against a plain loop, without metrics, in the JSON and the plan, bad input."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from samples import make_passages, write_beir

Done = Callable[..., str]


@pytest.fixture
def passages() -> list[dict]:
    """60 passages of 3 to 30 words; every third one has no title. One is empty, one has tabs and line ends."""
    documents = make_passages(60)
    documents[0] |= {"title": "", "text": ""}
    documents[1] |= {"title": "Two words", "text": " three\tother\n\nwords "}
    return documents


@pytest.fixture
def store(passages: list[dict], tmp_path: Path, done: Done) -> Path:
    """The passages and 7 queries, the last one without judgements."""
    queries = [{"_id": f"q{n}", "text": "x"} for n in range(7)]
    judged = [(f"q{n}", f"p{n}", 1) for n in range(6)]
    source = write_beir(tmp_path / "raw", passages, queries, {"test": judged})
    done("import_corpus", "--store", tmp_path / "s", "--source", source)
    return tmp_path / "s"


def write_run(path: Path, ranked: Mapping[str, list[str]]) -> Path:
    lines = [f"{q} Q0 {id} {n} {1 / n} x\n" for q, ids in ranked.items() for n, id in enumerate(ids, 1)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def plain_median(passages: list[dict], ranked: Mapping[str, list[str]], depth: int) -> float:
    texts = {passage["_id"]: f"{passage['title']} {passage['text']}" for passage in passages}
    return statistics.median([len(texts[id].split()) for ids in ranked.values() for id in ids[:depth] if id in texts])


def test_the_median_is_that_of_a_plain_loop(store: Path, passages: list[dict], done: Done, tmp_path: Path) -> None:
    draw = random.Random(5)
    ids = [passage["_id"] for passage in passages]
    short = sorted(ids, key=lambda id: len(passages[int(id[1:])]["text"]))
    judged = [f"q{n}" for n in range(6)]
    runs = {
        "any.trec": {query: draw.sample(ids, 20) for query in judged},
        "short.trec": dict.fromkeys(judged, short[:20]),
        "few.trec": {"q0": ids[:3], "q1": ids[1:2], "q2": [], "q3": [], "q4": [], "q5": []},
    }
    files = {name: write_run(tmp_path / name, run) for name, run in runs.items()}
    command = ("evaluate", "--store", store, "--run", *files.values(), "--json", tmp_path / "e.json", "--overwrite")
    for depth in (10, 3):
        out = done(*command, "--median-length", depth)
        document = json.loads((tmp_path / "e.json").read_text())
        for name, run in runs.items():
            expected = plain_median(passages, run, depth)
            number = sum(len(ids[:depth]) for ids in run.values())
            length = {"depth": depth, "words": expected, "passages": number, "missing": 0}
            assert document["median_length"][str(files[name])] == length
            line = f"{files[name]}: median length {expected:g} words, of the {number} passages among the first {depth}"
            assert line in out
    lengths = document["median_length"]
    assert lengths[str(files["short.trec"])]["words"] < lengths[str(files["any.trec"])]["words"]
    assert set(document["mean"][str(files["any.trec"])]) == {"nDCG@10", "R@100", "RR@10"}
    done(*command)
    assert "median_length" not in json.loads((tmp_path / "e.json").read_text())


def test_only_the_queries_of_the_split_count_and_all_need_no_metric(
    store: Path, passages: list[dict], done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = {f"q{n}": [f"p{n + 1}", f"p{n + 20}"] for n in range(7)}
    file = write_run(tmp_path / "r.trec", run)
    command = ("evaluate", "--store", store, "--run", file, "--median-length", 1)
    assert "nDCG@10, R@100, RR@10, median length of 1" in done(*command, "--plan")
    done(*command)
    out = done(*command, "--split", "all", "--metrics", "")
    assert "warning" not in out
    assert out.splitlines()[0].startswith(f"{file}: median length ")
    documents = {path.name[:16]: json.loads(path.read_text()) for path in (tmp_path / "results").iterdir()}
    judged = {query: ids for query, ids in run.items() if query != "q6"}
    words = {name: d["median_length"][str(file)]["words"] for name, d in documents.items()}
    assert words == {
        "evaluation-test-": plain_median(passages, judged, 1),
        "evaluation-all-r": plain_median(passages, run, 1),
    }


def test_passages_that_the_corpus_lacks(store: Path, passages, done: Done, refused: Done, documented, tmp_path) -> None:
    run = {"q0": ["gone", "p1"], "q1": ["p2", "gone", "p3"]} | {f"q{n}": ["p4"] for n in range(2, 6)}
    file = write_run(tmp_path / "r.trec", run)
    command = ("evaluate", "--store", store, "--run", file, "--json", tmp_path / "e.json", "--median-length")
    warning = (
        f"warning: {file}: 2 of its first 10 passages per query are not in the corpus, and are left out of the median "
        "length"
    )
    assert warning in done(*command, 10).splitlines()
    length = json.loads((tmp_path / "e.json").read_text())["median_length"][str(file)]
    assert length == {"depth": 10, "words": plain_median(passages, run, 10), "passages": 7, "missing": 2}
    documented("Evaluating", "--median-length of a run with some passages that the corpus lacks", warning, 0)
    write_run(file, {"q0": ["gone"], "q1": ["lost"]})
    line = refused(*command, 10)
    assert f"--median-length 10: {file}: the corpus has none of its first 2 passages (such as 'gone')" in line
    documented("Evaluating", "--median-length of a run over another corpus", line, 1)


def test_bad_options_are_refused(store: Path, refused: Done, documented, tmp_path: Path) -> None:
    file = write_run(tmp_path / "r.trec", {"q0": ["p0"]})
    line = refused("evaluate", "--store", store, "--run", file, "--median-length", 0)
    assert line.startswith("error: --median-length 0: expected at least 1, and --run")
    documented("Evaluating", "--median-length 0", line, 1)
    line = refused("evaluate", "--store", store, "--embeddings", "enc", "--median-length", 10)
    assert "--median-length 10: expected at least 1, and --run" in line
