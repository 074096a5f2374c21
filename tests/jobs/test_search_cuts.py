"""Searching and re-ranking say how many queries and pairs were cut to a length limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from samples import WORDS, write_beir

from riptide.base.cuts import Cuts
from riptide.base.wording import LIBRARY
from riptide.indexing.search import retrieval
from riptide.indexing.search.runs import search_cuts
from riptide.indexing.store.store import Store

Done = Callable[..., str]
NUMERICS = ("--dtype", "float32", "--compile", "never")
# Queries have a token for each word and two special tokens; 3 of 12 are longer than 16 tokens.
QUERY_WORDS = [30 if number % 4 == 0 else 8 for number in range(12)]
QUERIES = Cuts(12, 3 * 32 + 9 * 10, 3, 3 * 16, 16)
QUERIES_LINE = (
    "warning: 3 of 12 queries were cut to 16 tokens; 74.2% of all tokens were kept; encode the corpus under another "
    "--name with a larger --query-length than enc has (the model allows at most 64), or shorten the queries"
)


@pytest.fixture(scope="module")
def long_store(tmp_path_factory: pytest.TempPathFactory, model: str, call_job: Callable[..., int]) -> Path:
    """Returns a store with 40 passages of 40 words, and queries of which some are too long for embeddings/enc."""
    root = tmp_path_factory.mktemp("long")
    passages = [{"_id": f"p{n}", "title": "", "text": " ".join(WORDS[n : n + 40])} for n in range(40)]
    queries = [{"_id": f"q{n}", "text": " ".join(WORDS[n : n + size])} for n, size in enumerate(QUERY_WORDS)]
    judged = [(f"q{n}", f"p{n}", 1) for n in range(12)]
    source = write_beir(root / "source", passages, queries, {"test": judged})
    at = ("--store", root / "store")
    assert call_job("import_corpus", *at, "--source", source) == 0
    encode = ("encode_corpus", *at, "--encoder", model, "--name", "enc", "--query-length", 16, *NUMERICS)
    assert call_job(*encode) == 0
    return root / "store"


def pairs(depth: int) -> Cuts:
    """Returns the counts of the pairs of all queries with a given number of passages.

    The fixture `classifier` reads 64 tokens, and puts no special tokens around pairs.
    """
    lengths = [words + 40 for words in QUERY_WORDS for _ in range(depth)]
    over = [length - 64 for length in lengths if length > 64]
    return Cuts(len(lengths), sum(lengths), len(over), sum(over), 64)


def test_a_search_counts_queries_and_pairs(
    long_store: Path, classifier: str, done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two parts, resumed after a loss of one; evaluate reads the counts of the run."""
    monkeypatch.setattr(retrieval, "QUERY_BLOCK", 8)
    pairs_line = LIBRARY.render(
        pairs(3).line("pairs of a query and a passage", "train a re-ranker with a larger --max-length")
    )
    assert pairs_line.startswith("warning: 9 of 36 pairs of a query and a passage were cut to 64 tokens; 97.")
    search = ("search", "--store", long_store, "--mode", "exact", "--k", 5, "--rerank", classifier, "--rerank-depth", 3)
    assert done(*search, "--name", "run").splitlines()[-2:] == [QUERIES_LINE, pairs_line]
    folder = long_store / "runs/run"
    for path in (folder / "manifest.json", folder / "part-00001.json"):
        path.unlink()
    assert done(*search, "--name", "run").splitlines()[-2:] == [QUERIES_LINE, pairs_line]
    run = Store(str(long_store)).open("runs", "run")
    assert search_cuts(part.facts for part in run.parts) == ({"enc": QUERIES}, pairs(3))
    shown = [line for line in done("store", "show", "runs/run", "--store", long_store).splitlines() if "cuts " in line]
    sentences = (QUERIES.sentence("queries of embeddings/enc"), pairs(3).sentence("pairs of a query and a passage"))
    assert shown == [f"cuts         {sentence}" for sentence in sentences]
    evaluate = ("evaluate", "--store", long_store, "--source", "exact:enc", "--split", "test")
    for number in range(2):  # the second time, the run is complete
        assert QUERIES_LINE in done(*evaluate, "--json", tmp_path / f"{number}.json").splitlines()
    bm25 = done("build_bm25", "--store", long_store) + done("search", "--store", long_store, "--mode", "bm25")
    assert "were cut" not in bm25


def test_printed_hits_come_with_the_counts(long_store: Path, classifier: str, done: Done) -> None:
    search = ("search", "--store", long_store, "--mode", "exact", "--k", 2)
    out = done(*search, "--query", " ".join(WORDS[:30]), "--rerank", classifier, "--rerank-depth", 1)
    assert "warning: 1 of 1 queries were cut to 16 tokens; 50% of all tokens were kept" in out
    assert "warning: 1 of 1 pairs of a query and a passage were cut to 64 tokens; 91.4% of all tokens were kept" in out
    assert "were cut" not in done(*search, "--query", WORDS[0])


def test_mining_counts_queries_and_pairs(long_store: Path, classifier: str, done: Done) -> None:
    """All candidates but the positive are scored, and a part holds five queries."""
    mine = (
        "mine_negatives",
        "--store",
        long_store,
        "--split",
        "test",
        "--sources",
        "exact:enc",
        "--depth",
        4,
        "--part-queries",
        5,
        "--reranker",
        classifier,
        "--score-all",
        "--name",
        "mined",
    )
    lines = done(*mine).splitlines()
    store = Store(str(long_store))
    candidates = store.open("candidates", store.names("candidates")[0])
    assert search_cuts(part.facts for part in candidates.numbered_parts("part")) == ({"enc": QUERIES}, Cuts())
    assert len(candidates.numbered_parts("part")) == 3
    assert QUERIES_LINE in lines
    [line] = [line for line in lines if "pairs of a query and a passage were cut to 64 tokens" in line]
    assert line.startswith("warning: ")
    scores = f"scores/{store.names('scores')[0]}/g0000"
    assert line.partition(";")[0].removeprefix("warning: ") in done("store", "show", scores, "--store", long_store)
    assert f"of {sum(part.rows for part in candidates.numbered_parts('part')):,} pairs" in line
