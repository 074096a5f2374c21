"""search --query: prints the hits of a run with the same settings and snippets; writes and starts nothing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable

import numpy as np
import pytest
from samples import brute_force, files_of

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.queries.queries import Queries
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.store import Store
from riptide.jobs import search
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.encoding.reranker import Reranker, RerankerOptions

Done = Callable[..., str]
HIT = re.compile(r" *(\d+) +(\S+) +(\S+) +(.*)")
FLOAT32 = RerankerOptions(dtype="float32")


@pytest.fixture(scope="module")
def lexical(_built, call_job, tmp_path_factory: pytest.TempPathFactory):
    """The complete store with BM25, of which five passages are deleted that queries would find first."""
    store = tmp_path_factory.mktemp("lexical") / "store"
    shutil.copytree(_built.store, store)
    first = [table.to_pylist()[0]["id"] for table in read_run(Store(str(store)).open("runs", "exact"))]
    gone = [*dict.fromkeys([*first, *(passage for _, passage, _ in _built.judged[:4])])][:5]
    (store.parent / "gone").write_text("".join(f"{id}\n" for id in gone))
    assert call_job("import_corpus", "--store", store, "--delete", store.parent / "gone") == 0
    assert call_job("build_bm25", "--store", store) == 0
    return store, gone


@pytest.fixture
def no_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a test fail that looks for a cluster or begins an artifact."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("not in this process")

    monkeypatch.setattr(search, "open_runner", never)
    monkeypatch.setattr(Store, "create", never)


def printed(out: str) -> dict[str, list[tuple[int, float, str, str, str]]]:
    """Returns (rank, score, id, title, snippet) of the printed hits of each query."""
    found: dict[str, list[tuple[int, float, str, str, str]]] = {}
    for block in out.rstrip("\n").split("\n\n"):
        head, *lines = block.split("\n")
        hits = found[head.rpartition("  (")[0]] = []
        for line, below in zip(lines[1::2], lines[2::2], strict=True):
            match = HIT.fullmatch(line)
            assert match is not None, line
            hits.append((int(match[1]), float(match[2]), match[3], match[4], below.strip()))
    return found


@pytest.mark.parametrize("source", ["bm25", "exact:enc", "index:idx", "bm25+exact:enc", "0.3*bm25+0.7*index:idx"])
def test_hits_are_those_of_a_run(lexical, done: Done, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, gone = lexical
    name = re.sub(r"\W", "-", f"run-{source}")
    done("search", "--store", store, "--source", source, "--k", 12, "--name", name)
    [table] = read_run(Store(str(store)).open("runs", name))
    texts = dict(zip(*Queries.open(Store(str(store))).split("test"), strict=True))
    expected: dict[str, list[tuple[str, float]]] = {text: [] for text in texts.values()}
    for hit in table.to_pylist():
        expected[texts[hit["query_id"]]].append((hit["id"], hit["score"]))
    before = files_of(store, but=())
    monkeypatch.setattr(search, "open_runner", lambda *_, **__: pytest.fail("a cluster is not needed"))
    out = done(
        "search", "--store", store, "--source", source, "--k", 12, *(p for t in expected for p in ("--query", t))
    )
    found = printed(out)
    assert files_of(store, but=()) == before
    assert list(found) == list(expected)
    for query, hits in found.items():
        assert [hit[2] for hit in hits] == [id for id, _ in expected[query]]
        assert [hit[1] for hit in hits] == pytest.approx([score for _, score in expected[query]], rel=1e-4)
        assert [hit[0] for hit in hits] == list(range(1, len(hits) + 1))
        assert not {hit[2] for hit in hits} & {*gone}


@pytest.mark.usefixtures("no_tasks")
def test_the_table_is_the_brute_force_order_with_titles_and_marked_words(world, done: Done, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    store, [query, other] = Store(str(world.store)), [world.queries[0]["text"], f"{world.queries[1]['text'].upper()}"]
    vectors = Embeddings.open(store, "enc", Corpus.open(store)).take(np.arange(240))
    encoder = Encoder(world.model, EncoderOptions(dtype="float32", compile="never"), threads=2)
    best = brute_force(encoder.encode([query, other], side="query"), vectors, 10)
    before = files_of(world.store, but=())
    found = printed(done("search", "--store", world.store, "--mode", "exact", "--query", query, "--query", other))
    assert files_of(world.store, but=()) == before
    assert list(found) == [query, other]
    for text, hits, expected in zip(found, found.values(), best, strict=True):
        assert [(id, float(f"{score:.6g}")) for _, score, id, _, _ in hits] == [
            (f"p{row}", pytest.approx(score, rel=1e-5)) for row, score in expected
        ]
        wanted = {*text.lower().split()}
        for _, _, id, title, below in hits:
            passage = world.passages[int(id[1:])]
            assert title == (passage["title"] or "-")
            assert below == " ".join(f"**{w}**" if w in wanted else w for w in passage["text"].split())
    assert "**" in found[query][0][4]


@pytest.mark.usefixtures("no_tasks")
def test_a_reranker_orders_more_hits_than_are_printed(world, classifier: str, done: Done) -> None:
    """The first 15 hits are re-ranked; 4 of them are printed, then also hits below the 15."""
    query = world.queries[0]["text"]
    at = ("search", "--store", world.store, "--mode", "exact", "--query", query)
    plain = [hit[2] for hit in printed(done(*at, "--k", 20))[query]]
    model = Reranker(classifier, FLOAT32)
    passages = {p["_id"]: f"{p['title']} {p['text']}" if p["title"] else p["text"] for p in world.passages}
    scores = {id: float(model.score([query], [passages[id]])[0]) for id in plain[:15]}
    order = sorted(scores, key=lambda id: (-scores[id], int(id[1:])))
    assert order[:4] != plain[:4]
    rerank = ("--rerank", classifier, "--rerank-depth", 15, "--rerank-dtype", "float32")
    found = printed(done(*at, *rerank, "--k", 4))[query]
    assert [hit[2] for hit in found] == order[:4]
    assert [hit[1] for hit in found] == pytest.approx([scores[id] for id in order[:4]], abs=1e-4)
    below = printed(done(*at, *rerank, "--k", 17))[query]
    assert [hit[1:3] for hit in below[15:]] == [(-16.0, plain[15]), (-17.0, plain[16])]


@pytest.mark.usefixtures("no_tasks")
def test_plan_and_a_query_without_hits(lexical, done: Done) -> None:
    at = ("search", "--store", lexical[0], "--mode", "bm25", "--query", "qqqq")
    assert done(*at) == "qqqq  (bm25, 0 hits)\n"
    assert done(*at, "--plan").splitlines() == [
        "queries  1, in this process",
        "source   bm25, over 240 passages",
        "hits     up to 10, printed only",
    ]


@pytest.mark.usefixtures("no_tasks")
@pytest.mark.parametrize(
    ("case", "arguments", "answer"),
    [
        ("search for an empty query", ["--query", " "], "--query ' ': the query is empty; expected some words"),
        (
            "search --query with --split",
            ["--query", "a", "--split", "test"],
            "--query with --split test: --query searches its own text and makes no run; leave one out",
        ),
        ("search --query with --queries", ["--query", "a", "--queries", "tiny"], "--query with --queries tiny: "),
        ("search --query with --run", ["--query", "a", "--run", "x.trec"], "--query with --run x.trec: "),
        ("search --query with --name", ["--query", "a", "--name", "x"], "--query with --name x: "),
        ("search --query with --limit", ["--query", "a", "--limit", "3"], "--query with --limit 3: "),
        ("search --query with --drop-self", ["--query", "a", "--drop-self"], "--query with --drop-self: "),
        (
            "search --query of a source that is not in the store",
            ["--query", "a", "--source", "exact:none"],
            "/embeddings/none: there is no such artifact (complete embeddings: enc)",
        ),
        (
            "search --query without BM25 in the store",
            ["--query", "a", "--mode", "bm25"],
            "/bm25: there is no such artifact (complete bm25: none)",
        ),
        ("search --query for no hits", ["--query", "a", "--k", "0"], "--k 0: expected at least 1"),
    ],
)
def test_bad_input_is_one_line(world, refused, documented, case: str, arguments: list[str], answer: str) -> None:
    before = files_of(world.store, but=())
    line = refused("search", "--store", world.store, *arguments)
    assert answer in line
    assert files_of(world.store, but=()) == before
    documented("Searching", case, line, 1)


def test_an_unknown_mode_is_bad_usage(world, job, documented) -> None:
    outcome = job("search", "--store", world.store, "--query", "a", "--mode", "bm26")
    assert outcome.status == 2
    assert outcome.err == "error: --mode bm26: expected dense, exact, bm25 or hybrid; did you mean bm25?\n"
    documented("Searching", "search with an unknown mode", outcome.err, 2)
