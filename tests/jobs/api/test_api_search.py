"""An open search finds what a run with the same settings finds, from several threads and with a filter per call."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from riptide import InputError, Store
from riptide.indexing.corpus.filters import Filter
from riptide.indexing.dense import shard
from riptide.indexing.exact import OpenPart, exact_search

TOO_DEEP = "expected up to 100 levels of lists and dicts, found more, or a list or dict that contains itself"
SOURCES = ["bm25", "exact", "dense", "hybrid", "bm25+exact:enc"]


def make_cycle() -> dict:
    """Returns a filter that contains itself."""
    cycle: dict[str, Any] = {}
    cycle["not"] = cycle
    return cycle


def rows_of(results: list) -> list[tuple]:
    return [(hits.query, [(hit.id, hit.row, hit.score) for hit in hits]) for hits in results]


@pytest.mark.parametrize("source", SOURCES)
def test_the_hits_are_those_of_a_run(store: Store, source: str) -> None:
    run = store.search_queries(source, k=7, name="run").to_pandas()
    ids, texts = store.queries().split("test")
    with store.search(source) as search:
        together, alone = search(texts, 7), [search(text, 7) for text in texts]
    assert rows_of(alone) == rows_of(together)
    for id, hits in zip(ids, together, strict=True):
        expected = run[run["query_id"] == id]
        assert [hit.id for hit in hits] == expected["id"].tolist()
        assert [hit.row for hit in hits] == expected["row"].tolist()
        assert [hit.score for hit in hits] == pytest.approx(expected["score"].tolist(), abs=1e-6)
        assert [hit.rank for hit in hits] == expected["rank"].tolist() == list(range(1, len(hits) + 1))


@pytest.mark.parametrize("source", ["exact:enc", "index:flat"])
def test_the_vectors_of_an_open_search_are_converted_once(
    store: Store, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exact search and with a Flat index; many vectors do not stay in memory."""
    if source == "index:flat":
        store.build_index(name="flat", factory="Flat", shards=2)
    run = store.search_queries(source, k=7, name="run").to_pandas()
    ids, texts = store.queries().split("test")
    converted: list[int] = []

    def convert(vectors: np.ndarray, first_row: int, deleted: np.ndarray) -> OpenPart:
        converted.append(first_row)
        return OpenPart(vectors, first_row, deleted)

    monkeypatch.setattr(shard, "OpenPart", convert)
    monkeypatch.setattr(shard, "exact_search", lambda *_, **__: pytest.fail("converts the vectors again"))
    with store.search(source) as search:
        for text, id in zip(texts[:3], ids[:3], strict=True):
            expected = run[run["query_id"] == id]
            assert [hit.id for hit in search(text, 7)] == expected["id"].tolist()
        assert len(search(texts, 7)) == len(texts)
    assert converted
    assert len(converted) == len(set(converted))
    monkeypatch.setattr(shard, "OPEN_ROWS", 239)
    monkeypatch.setattr(shard, "exact_search", exact_search)
    converted.clear()
    with store.search(source) as search:
        assert [hit.id for hit in search(texts[0], 7)] == run[run["query_id"] == ids[0]]["id"].tolist()
    assert not converted, "more vectors than stay in memory"


def test_a_hit_has_its_passage(shared: Store) -> None:
    corpus = shared.corpus()
    hits = shared.search("bm25")("bama bamo", k=5)
    assert len(hits) == 5
    for hit in hits:
        passage = corpus[hit.id]
        assert (hit.row, hit.title, hit.text) == (passage.row, passage.title, passage.text)
        assert hit.metadata == {"year": 1900 + hit.row, "tags": ["a", "b"]}
    assert [hit.score for hit in hits] == sorted([hit.score for hit in hits], reverse=True)


def test_a_search_without_a_source_is_the_default_one(shared: Store) -> None:
    assert shared.search().source == "0.5*bm25+0.5*index:idx" == shared.search("hybrid").source
    assert shared.search("hybrid", embeddings="enc").source == "0.5*bm25+0.5*index:idx"
    assert shared.search("dense", index="idx").source == "index:idx"
    assert repr(shared.search("bm25")) == f"Search({shared.url!r}, 'bm25')"


@pytest.mark.parametrize("source", SOURCES)
def test_a_filter_is_of_a_call(shared: Store, source: str) -> None:
    text = shared.queries().split("test").texts[0]
    with shared.search(source) as search:
        every = search(text, 240)
        late = search(text, 240, filter="year >= 2100")
        assert {hit.id for hit in late} <= {f"p{number}" for number in range(200, 240)}
        assert len(late) == (40 if source != "bm25" else len([hit for hit in every if hit.row >= 200]))
        assert late == search(text, 240, filter={"year": {"gte": 2100}})
        assert search(text, 240, filter="year < 1900") == []
        assert search(text, 240) == every


def test_values_of_other_libraries_are_those_of_python(shared: Store) -> None:
    with shared.search("BM25", by=None) as search:
        assert search.source == "bm25"
        assert search("bama", np.int64(2)) == search("bama", np.int32(2)) == search("bama", 2)
        years = [2001, 2002]
        expected = search("bama", filter={"year": years})
        for values in (np.array(years), pd.Series(years), tuple(years), set(years), list(map(np.int16, years))):
            assert search("bama", filter={"year": values}) == expected
    index = shared.search("Dense", nprobe=np.int64(2), depth=np.int32(5))
    assert index("bama", 3) == shared.search("dense", nprobe=2, depth=5)("bama", 3)
    assert shared.search("HYBRID").source == shared.search("hybrid").source


def test_dates_and_times_filter_timestamps(tmp_path: Path) -> None:
    store = Store(tmp_path / "dated")
    days = [datetime(2020, 1, day, tzinfo=UTC) for day in range(1, 6)]
    rows = [{"id": f"d{day.day}", "text": "ship", "day": day} for day in days]
    store.import_corpus(rows, filters={"day": "timestamp"})
    store.build_bm25()
    search = store.search("bm25")
    for third in (
        date(2020, 1, 3),
        days[2],
        days[2].replace(tzinfo=None),
        pd.Timestamp(days[2]),
        np.datetime64("2020-01-03"),
    ):
        assert [hit.id for hit in search("ship", filter={"day": {"gt": third}})] == ["d4", "d5"]
        assert [hit.id for hit in search("ship", filter={"day": [third]})] == ["d3"]
    times = np.array(["2020-01-01", "2020-01-02"], "datetime64[ns]")
    assert [hit.id for hit in search("ship", filter={"day": times})] == ["d1", "d2"]
    with pytest.raises(InputError, match='expected values of type timestamp, found "NaT"'):
        search("ship", filter={"day": pd.NaT})


def test_hits_are_data_frames_of_polars(shared: Store) -> None:
    with shared.search("bm25") as search:
        results = search(["bama", "bamo bana"], k=3)
        frame, pandas = results.to_polars(), results.to_pandas()
        assert frame.columns == pandas.columns.tolist()
        assert frame.drop("metadata").rows() == [tuple(row) for row in pandas.drop(columns="metadata").to_numpy()]
        assert [json.loads(each) for each in frame["metadata"]] == pandas["metadata"].tolist()
        assert frame.filter(frame["query_number"] == 1)["id"].to_list() == results[1].to_polars()["id"].to_list()
        assert search("unknownword").to_polars().schema == results[0].to_polars().schema


def test_a_notebook_shows_hits_with_all_texts_escaped(tmp_path: Path) -> None:
    hostile = "<script>alert('x')</script>&\"$x$"
    store = Store(tmp_path / hostile.replace("/", ""))
    store.import_corpus([{"id": hostile, "title": hostile, "text": f"ship {hostile * 90}", "<i>": hostile}])
    store.build_bm25()
    query = f"ship {hostile}"
    for shown in (store.search("bm25")(query)._repr_html_(), store.search("bm25")([query])._repr_html_()):
        assert not re.findall(r"<(?!/?(?:div|table|caption|thead|tbody|tr|th|td)\b)", shown)
        assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;&amp;&quot;$x$" in shown
        assert 'class="tex2jax_ignore mathjax_ignore"' in shown
        assert len(shown) < 8_000  # the text is cut


def test_the_rows_of_a_filter_are_read_once(shared: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def rows(filter: Filter, *arguments: Any) -> Any:
        read.append(filter.text)
        return original(filter, *arguments)

    original = Filter.rows
    monkeypatch.setattr(Filter, "rows", rows)
    with shared.search("bm25") as search:
        for condition in ("year > 2000", "year > 2000", {"year": {"gt": 2000}}, "year > 2001"):
            search("bama", filter=condition)
    assert read == ['{"year":{"gt":2000}}', '{"year":{"gt":2001}}']


@pytest.mark.parametrize("source", SOURCES)
def test_threads_find_the_same_as_one(shared: Store, source: str) -> None:
    """Eight threads also load the models and indexes: nothing was searched before."""
    texts = shared.queries().split("test").texts * 4
    with shared.search(source) as one:
        expected = [one(text) for text in texts]
    with shared.search(source) as search, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(search, texts)) == expected


def test_a_re_ranker_orders_the_first_hits(store: Store, classifier: str) -> None:
    run = store.search_queries("bm25", k=8, rerank=classifier, rerank_depth=4, name="ranked").to_pandas()
    ids, texts = store.queries().split("test")
    with store.search("bm25", rerank=classifier, rerank_depth=4) as search, ThreadPoolExecutor(4) as pool:
        for id, hits in zip(ids, pool.map(lambda text: search(text, 8), texts), strict=True):
            expected = run[run["query_id"] == id]
            assert [hit.id for hit in hits] == expected["id"].tolist()
            assert [hit.score for hit in hits] == pytest.approx(expected["score"].tolist(), abs=1e-5)


def test_several_texts_give_a_list_of_hits_each(shared: Store) -> None:
    with shared.search("bm25") as search:
        results = search(["bama", "bamo bana"], k=3)
        assert [hits.query for hits in results] == ["bama", "bamo bana"]
        assert list(results) == [search("bama", 3), search("bamo bana", 3)] == list(search(("bama", "bamo bana"), 3))
        assert search([]) == []
        assert search("unknownword") == []
        frame = results.to_pandas()
        assert frame.columns.tolist()[:4] == ["query_number", "query", "rank", "score"]
        assert frame["query_number"].tolist() == [0, 0, 0, 1, 1, 1]
        assert results[1].to_pandas()["id"].tolist() == [hit.id for hit in results[1]]
        assert search("unknownword").to_pandas().columns.tolist() == list(results[0][0]._fields)


def test_documents_are_the_hits_of_a_split_corpus(tmp_path: Path) -> None:
    store = Store(tmp_path / "split")
    words = [" ".join(f"t{number}w{word}" for word in range(30)) for number in range(5)]
    store.import_corpus([{"id": f"d{number}", "text": text} for number, text in enumerate(words)], split_words=10)
    store.build_bm25()
    [hit] = store.search("bm25")("t3w25 t3w2", k=2)
    assert (hit.id, hit.text.split()[0]) == ("d3", hit.text.split()[0])
    assert {each.id.partition("#")[0] for each in store.search("bm25", by="passage")("t3w25 t3w2")} == {"d3"}
    assert len(store.search("bm25", by="passage")("t3w25 t3w2")) == 2


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            ("nothing",),
            {},
            r"source 'nothing': expected a mode \(dense, exact, bm25, hybrid\) or a source \(bm25, bm25:NA",
        ),
        (("hybird",), {}, r"source 'hybird': expected a mode \(.*\); did you mean 'hybrid'\?"),
        ((), {"sorce": "bm25"}, "search: unknown parameter 'sorce'; did you mean 'source'?"),
        (("index:x",), {}, r"index/x: there is no such artifact \(complete index: idx\); store.build_index makes one"),
        (
            ("exact:x",),
            {},
            r"embeddings/x: there is no such artifact \(complete embeddings: enc\); store.encode_corpus",
        ),
        (("bm25",), {"nprobe": 3}, "nprobe=3: bm25 has no use for it, it goes with an index"),
        (("bm25",), {"task": "x"}, "task=x: bm25 has no use for it, it goes with vectors"),
        (("dense",), {"depth": 0}, "depth=0: expected an integer of at least 1"),
        (("bm25",), {"rerank_depth": 3}, "rerank_depth=3: it goes with rerank="),
        (("bm25",), {"rerank": "models/x"}, "models/x: there is no such artifact"),
        (("bm25",), {"by": "page"}, "by='page': expected document or passage"),
        ((5,), {}, "source=5: expected a text"),
        ((b"bm25",), {}, "source=b'bm25': expected a text"),
        (("exact",), {"embeddings": ["enc"]}, r"embeddings=\['enc'\]: expected a text"),
        (("exact",), {"task": 5}, "task=5: expected a text"),
        (("exact",), {"encoder": 5}, "encoder=5: expected a text"),
        (("bm25",), {"rerank": 5}, "rerank=5: expected a text"),
        (("index:idx",), {"index": "idx"}, "index=idx: the source 'index:idx' names what it searches; leave one out"),
        (("dense",), {"embeddings": "x"}, "index/idx is over embeddings/enc, not x"),
    ],
)
def test_a_search_that_cannot_be_opened_is_refused(
    shared: Store, arguments: tuple, options: dict, message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        shared.search(*arguments, **options)
    assert "\n" not in str(error.value)
    assert "--" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda search: search(""), "query 0: '' is empty; expected some words"),
        (lambda search: search(["bama", " "]), "query 1: ' ' is empty; expected some words"),
        (lambda search: search([1]), "query 0: expected a text, got int"),
        (lambda search: search(5), "found int, expected the text of a query, or a list of texts"),
        (lambda search: search(None), "found NoneType, expected the text of a query, or a list of texts"),
        (lambda search: search(b"bama"), "found bytes, expected the text of a query, or a list of texts"),
        (lambda search: search({"bama": 1}), "found dict, expected the text of a query, or a list of texts"),
        (lambda search: search(["a", "x\ud800"]), "query 1: found '\\ud800' at character 2, expected text in UTF-8"),
        (lambda search: search("bama", None), "k=None: expected an integer of at least 1"),
        (lambda search: search("bama", filter=5), "filter: expected a text or an object, found int"),
        (lambda search: search("bama", filter=["year"]), "filter: expected a text or an object, found list"),
        (lambda search: search("bama", filter={5: 1}), "filter: expected fields by name, found 5"),
        (lambda search: search("bama", filter={"year": 1j}), 'filter: year: expected values of type int64, found "1j"'),
        (lambda search: search("bama", topk=3), "search: unknown parameter 'topk'; did you mean 'k'?"),
        (
            lambda search: search("bama", where="x"),
            "search: unknown parameter 'where'; the parameters are query, k, filter",
        ),
        (lambda search: search("bama", np.float64(3)), "k=3.0: expected an integer of at least 1"),
        (lambda search: search("bama", filter=make_cycle()), f"filter: {TOO_DEEP}"),
        (lambda search: search("bama", filter={"and": [make_cycle()]}), f"filter: {TOO_DEEP}"),
        (
            lambda search: search("bama", filter={"year": date(1, 1, 1)}),
            'filter: year: expected values of type int64, found "0001-01-01"',
        ),
        (lambda search: search("bama", 0), "k=0: expected an integer of at least 1"),
        (lambda search: search("bama", "ten"), "k='ten': expected an integer of at least 1"),
        (
            lambda search: search("bama", filter="month = 3"),
            "filter: 'month' is no filter of this corpus; there are: year",
        ),
        (lambda search: search("bama", filter={"year": "x"}), 'filter: year: expected values of type int64, found "x"'),
    ],
)
def test_a_bad_call_is_refused_and_the_search_stays_open(shared: Store, call: Callable, message: str) -> None:
    with shared.search("bm25") as search:
        with pytest.raises(InputError) as error:
            call(search)
        assert str(error.value) == message
        assert search("bama")


def test_models_are_named_by_paths_too(shared: Store, model: str, classifier: str) -> None:
    paths = shared.search("exact", encoder=Path(model), rerank=Path(classifier))
    texts = shared.search("exact", encoder=model, rerank=classifier)
    assert paths("bama", 3) == texts("bama", 3)


THREADS = """
import sys, threading
import riptide

found, start = [], threading.Barrier(4)

def search():
    start.wait()
    found.append(riptide.Store(sys.argv[1]).search("exact")("bama", 3))

threads = [threading.Thread(target=search) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(found) == 4
assert all(hits == found[0] for hits in found)
"""


def test_the_first_searches_of_a_program_may_be_in_threads(shared: Store) -> None:
    """All of them need transformers first, which replaces its module while it is imported."""
    done = subprocess.run([sys.executable, "-c", THREADS, shared.url], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_closed_search_is_refused(shared: Store) -> None:
    with shared.search("bm25") as search:
        search("bama")
    search.close()
    with pytest.raises(InputError, match=r"the search of bm25 is closed: open another one with store\.search"):
        search("bama")


@pytest.mark.parametrize("source", ["bm25", "exact", "dense"])
def test_a_corpus_that_was_removed_is_named(store: Store, source: str) -> None:
    search, corpus = store.search(source), store.corpus()
    shutil.rmtree(store.url)
    with pytest.raises(InputError) as error:
        search("bama bamo")
    assert str(error.value) == (
        f"{store.url}: the corpus was removed or replaced after this search was opened: open another one with "
        "store.search"
    )
    with pytest.raises(InputError, match="the file is missing"):
        corpus["p3"]


def test_a_search_stays_what_it_was_opened_with(store: Store) -> None:
    text = store.queries().split("test").texts[0]
    with store.search("exact") as search:
        before, encoder = search(text, 5), store.embeddings().encoder_name
        store.import_corpus([{"id": "new", "text": text, "year": 1}], append=True)
        store.encode_corpus(encoder, name="enc", dtype="float32", compile="never")
        assert search(text, 5) == before
        assert "new" in {hit.id for hit in store.search("exact")(text, 241)}
