"""The big list of naughty strings, as ids, titles, texts, metadata, queries and filters: all of them come back."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from foreign_suites import load_suite, parse_source, refusal
from samples import write_beir, write_lines
from selectolax.lexbor import LexborHTMLParser

from riptide.base.wording import printable
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.filters import Filter, filter_columns
from riptide.indexing.files.columns import PassageNames
from riptide.indexing.formats.sources import detect_source
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store

STRINGS = list(dict.fromkeys(filter(None, load_suite("naughty_strings"))))
ROWS = [{"id": text, "title": text, "text": text, "field": text} for text in STRINGS]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, call_job: Callable[..., int]) -> Path:
    """A folder with a store of a passage and a query for each string, and two runs of them."""
    folder = tmp_path_factory.mktemp("naughty")
    passages = [{"_id": text, "title": text, "text": text, "metadata": {"field": text}} for text in STRINGS]
    queries = [{"_id": text, "text": text} for text in STRINGS]
    source = write_beir(folder / "raw", passages, queries)
    arguments = ("--store", folder / "store", "--source", source, "--part-size", 100, "--filters", "field", "string")
    assert call_job("import_corpus", *arguments) == 0
    return folder


def test_a_store_returns_each_string(root: Path) -> None:
    store = Store(str(root / "store"))
    passages = Corpus.open(store).passages(range(len(STRINGS)))
    stored = [(each.id, each.title, each.text, each.metadata) for each in passages]
    assert stored == [(text, text, text, {"field": text}) for text in STRINGS]
    queries = Queries.open(store, "raw").table.to_pylist()
    assert {row["id"]: row["text"] for row in queries} == {text: text for text in STRINGS}


def write_csv(file: Path) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(ROWS[0]))
    writer.writeheader()
    writer.writerows(ROWS)
    file.write_text(text.getvalue(), encoding="utf-8", newline="")


WRITERS: dict[str, Callable[[Path], object]] = {
    "csv": write_csv,
    "jsonl": lambda file: write_lines(file, ROWS),
    "parquet": lambda file: pq.write_table(pa.Table.from_pylist(ROWS), file),
}


@pytest.mark.parametrize("ending", WRITERS)
def test_a_table_returns_each_string(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"table.{ending}"
    WRITERS[ending](file)
    rows = parse_source(detect_source(str(file), names=PassageNames(metadata=("field",)))).to_pylist()
    assert [{**row, "metadata": json.loads(row["metadata"])} for row in rows] == [
        {"id": text, "title": text, "text": text, "metadata": {"field": text}} for text in STRINGS
    ]


def test_a_filter_finds_each_string(root: Path) -> None:
    corpus = Corpus.open(Store(str(root / "store")))
    columns = filter_columns(corpus)
    for row, text in enumerate(STRINGS):
        document = {"field": text}
        assert Filter.parse(document, columns).rows(corpus).tolist() == [row]
        for form in (json.dumps(document), "field = '{}'".format(re.sub(r"([\\'])", r"\\\1", text))):
            assert Filter.parse(form, columns) == Filter.parse(document, columns)
        assert refusal(Filter.parse, text, columns)


def test_the_page_of_a_comparison_shows_texts_and_runs_none(
    tmp_path: Path, call_job: Callable[..., int], done: Callable[..., str]
) -> None:
    passages = [{"_id": f"p{n}", "title": text, "text": text} for n, text in enumerate(STRINGS)]
    queries = [{"_id": f"q{n}", "text": text} for n, text in enumerate(STRINGS)]
    judged = [(f"q{n}", f"p{n}", 1) for n in range(len(STRINGS))]
    source = write_beir(tmp_path / "raw", passages, queries, {"test": judged})
    done("import_corpus", "--store", tmp_path / "store", "--source", source)
    for name, shift in (("a", 0), ("b", 1)):
        lines = [f"q{n} Q0 p{(n + shift) % len(STRINGS)} 1 1 {name}\n" for n in range(len(STRINGS))]
        (tmp_path / f"{name}.trec").write_text("".join(lines))
    at = ("--store", tmp_path / "store", "--html", tmp_path / "page.html", "--examples", len(STRINGS))
    done("compare", tmp_path / "a.trec", tmp_path / "b.trec", *at)
    page = LexborHTMLParser((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert not page.css("script, img, link, iframe, object, use, image, a, base, form")
    assert not [name for node in page.css("*") for name in node.attributes if name.startswith(("on", "src", "href"))]
    shown = {node.text() for node in page.css("details span.query")}
    assert shown == {printable(text) for text in STRINGS}


@pytest.fixture(scope="module")
def store(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(str(shutil.copytree(served / "store", tmp_path_factory.mktemp("served") / "store")))


def test_a_service_answers_each_string(client: TestClient) -> None:
    for mode in ("exact", "bm25"):
        for first in range(0, len(STRINGS), 64):
            queries = STRINGS[first : first + 64]
            answer = client.post("/v1/search", json={"queries": queries, "mode": mode, "k": 1})
            assert answer.status_code == 200, answer.text
            assert [result["query"] for result in answer.json()["results"]] == queries
    for first in range(0, len(STRINGS), 256):
        answer = client.post("/v1/embeddings", json={"input": STRINGS[first : first + 256]})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("field", ["filter", "task", "source", "mode"])
def test_a_service_refuses_strings_that_are_no_options(field: str, client: TestClient) -> None:
    for text in STRINGS[:: len(STRINGS) // 100]:
        answer = client.post("/v1/search", json={"query": "bafa", field: text})
        assert answer.status_code in (400, 404, 422), answer.text
        message = answer.json()["error"]["message"]
        assert message == printable(message)
