"""Filtered search on the command line and over HTTP, in every kind of source, against a loop over the metadata."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from random_filters import as_text, matches, random_filter
from serving import query_texts
from splade_stores import run_of

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.store.store import Store
from riptide.serve.one_process import open_local
from riptide.serve.release.live import live_release_id, save_as_live
from riptide.serve.release.planning import plan_release
from riptide.serve.service.service import Service
from riptide.serve.service.service_options import ServiceOptions

Done = Callable[..., str]
SPLADE = "splade:impacts"
SOURCES = ["exact:enc", "index:idx", "bm25", SPLADE, "bm25+index:idx"]
VALUES = {"year": range(1900, 2140, 20), "lang": ("en", "de", "fr"), "tags": ("even", "third")}
TEXT = "year >= 1950 and not tags in (even, third) or lang = de and tags = third"
DOCUMENT = {
    "or": [
        {"year": {"gte": 1950}, "not": {"tags": ["even", "third"]}},
        {"lang": "de", "tags": "third"},
    ]
}


@pytest.fixture(scope="module")
def store(sparse_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store whose live release serves all sources."""
    store = Store(str(shutil.copytree(sparse_store, tmp_path_factory.mktemp("filtered") / "root") / "store"))
    before = live_release_id(store)
    assert before is not None
    release, missing = plan_release(store, index="idx", sources=[SPLADE])
    assert not missing
    assert save_as_live(store, release, before[1])
    return store


@pytest.fixture
def service(store: Store) -> Service:
    return open_local(store, ServiceOptions(threads=2), device="cpu")


def metadata_of(store: Store) -> dict[str, dict]:
    """Returns the metadata of all passages that are not deleted, by id."""
    corpus = Corpus.open(store)
    rows = [row for row in range(corpus.num_rows) if row not in corpus.deleted]
    return {passage.id: json.loads(passage.metadata_json) for passage in corpus.passages(rows)}


def test_runs_and_answers_hold_the_best_of_what_matches(store: Store, done: Done, client: TestClient) -> None:
    """In a run by the text, and over HTTP by the object; dense sources find every passage that matches."""
    at, texts = ("--store", store.url, "--k", 240), query_texts(Path(store.url).parent)
    metadata = metadata_of(store)
    matching = {id for id, fields in metadata.items() if matches(DOCUMENT, fields)}
    assert 20 < len(matching) < 100
    for number, source in enumerate(SOURCES):
        done("search", *at, "--source", source, "--filter", TEXT, "--name", f"filtered{number}")
        filtered = run_of(store, f"filtered{number}")
        body = {"queries": list(texts.values()), "source": source, "k": 240, "filter": DOCUMENT}
        answer = client.post("/v1/search", json=body).json()
        served = {id: result["hits"] for id, result in zip(texts, answer["results"], strict=True)}
        for id, hits in served.items():
            assert [hit["id"] for hit in hits] == [id for id, _ in filtered.get(id, [])], source
            assert [hit["score"] for hit in hits] == pytest.approx([score for _, score in filtered.get(id, [])], 1e-5)
            assert {hit["id"] for hit in hits} <= matching
            if source in ("exact:enc", "index:idx"):
                assert len(hits) == len(matching)
        if source in ("exact:enc", "bm25", SPLADE):
            done("search", *at, "--source", source, "--name", f"whole{number}")
            whole = run_of(store, f"whole{number}")
            for id in texts:
                assert filtered.get(id, []) == [hit for hit in whole.get(id, []) if hit[0] in matching]


def test_random_filters_over_http_match_as_a_plain_loop(store: Store, client: TestClient) -> None:
    draw, metadata = random.Random(4), metadata_of(store)
    for _ in range(25):
        document = random_filter(draw, values=VALUES)
        expected = {id for id, fields in metadata.items() if matches(document, fields)}
        for form in filter(None, (document, as_text(draw, document))):
            answer = client.post("/v1/search", json={"query": "bafa", "mode": "exact", "k": 240, "filter": form})
            assert answer.status_code == 200, answer.text
            assert {hit["id"] for hit in answer.json()["results"][0]["hits"]} == expected, form


def test_queries_and_the_reranker_see_only_what_matches(
    store: Store, done: Done, classifier: str, tmp_path: Path
) -> None:
    query = next(iter(query_texts(Path(store.url).parent).values()))
    command = ("search", "--store", store.url, "--mode", "exact", "--filter", TEXT)
    out = done(*command, "--query", query, "--k", 100, "--rerank", classifier, "--rerank-depth", 7)
    matching = [id for id, fields in metadata_of(store).items() if matches(DOCUMENT, fields)]
    assert f"filter   {len(matching):,} passages match" in out
    assert f"{len(matching)} hits" in out
    assert {word for word in out.split() if word[0] == "p" and word[1:].isdigit()} == set(matching)
    done(*command, "--k", 100, "--rerank", classifier, "--rerank-depth", 7, "--limit", 2, "--name", "reranked")
    assert {id for hits in run_of(store, "reranked").values() for id, _ in hits} == set(matching)


def test_a_filter_is_part_of_a_run(store: Store, done: Done, refused: Callable[..., str]) -> None:
    """It is in its default name and its configuration; another filter is refused under the same name."""
    command = ("search", "--store", store.url, "--source", "bm25", "--k", 5, "--limit", 3)
    plan = done(*command, "--filter", "lang = de", "--plan")
    assert "filter   42 passages match" in plan
    done(*command, "--filter", "lang = de")
    done(*command, "--filter", '{"lang": "de"}')  # the same filter
    [name] = [name for name in store.names("runs") if name.startswith("tiny-test-bm25-")]
    assert "-filter-" in name
    assert store.open("runs", name).config["filter"] == {"lang": "de"}
    assert "filter" in refused(*command, "--filter", "lang = en", "--name", name)


@pytest.mark.parametrize(
    ("case", "text", "message"),
    [
        (
            "a filter that does not parse",
            "year >= 2000 adn lang = de",
            "filter: at character 14: expected and, or, or the end, found 'adn'",
        ),
        (
            "a filter by a field that has no filter",
            "colour = red",
            "filter: 'colour' is no filter of this corpus; there are: year, lang, tags",
        ),
        (
            "a filter with a value of another type",
            '{"year": "2000"}',
            'filter: year: expected values of type int64, found "2000"',
        ),
    ],
)
def test_a_bad_filter_is_refused_in_one_line(
    store: Store,
    client: TestClient,
    refused: Callable[..., str],
    documented: Callable[..., None],
    case: str,
    text: str,
    message: str,
) -> None:
    for more in (("--query", "bafa"), ("--name", "none")):
        line = refused("search", "--store", store.url, "--mode", "exact", "--filter", text, *more)
        assert line == f"error: {message}"
    documented("Searching", case, line, 1)
    answer = client.post("/v1/search", json={"query": "bafa", "filter": text})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
