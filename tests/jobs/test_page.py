"""The page in a real browser: searches, addresses, filters and forms."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from page import Page, PageServer
from serving import started, task_files

import riptide
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store
from riptide.serve.client import Client

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_search_by_hand_in_modes_tasks_and_sources(browser: Any, page_server: PageServer, tmp_path: Path) -> None:
    page, client = Page(browser, page_server.address), Client(page_server.address)
    page.ask(page_server.query)
    page.until_status("10 hits for task default")
    hits = client.search(page_server.query)
    assert page.hits() == [hit.id for hit in hits]
    assert f"score {hits[0].score:.4f}" in page.text("#columns li .from")
    page.choose("#choices .source", "mode=exact")
    page.until_titles("default · Exact")
    page.choose("#choices .task", "ours")
    page.until_titles("ours · Exact")
    assert page.hits() == [hit.id for hit in client.search(page_server.query, mode="exact", task="ours")]
    page.choose("#choices .source", "source=bm25")  # a source by its name
    page.until_titles("ours · bm25")
    assert page.hits() == [hit.id for hit in client.search(page_server.query, source="bm25", task="ours")]
    page.choose("#choices .source", "mode=hybrid")
    page.until_titles("ours · Hybrid")
    first = client.search(page_server.query, mode="hybrid", task="ours")[0]
    parts = " · ".join(f"{source} {score:.4f}" for source, score in first.scores.items())
    assert page.text("#columns li .from").endswith(f"from {parts}")
    page.all("#columns summary")[0].click()
    page.until(lambda: "2 of 2 shards" in page.text("#columns .facts"))
    assert "encode" in page.text("#columns .facts")
    [link] = page.all("#columns .facts a[download]")
    line = unquote(link.get_property("href").partition(",")[2])
    (tmp_path / "saved.jsonl").write_text(line, encoding="utf-8")
    replayed = riptide.Store(page_server.store).replay(tmp_path / "saved.jsonl", url=page_server.address)
    assert replayed.summary.endswith("1 requests, 1 equal, 0 with moved hits, 0 with lost hits")
    assert [(each.request["mode"], each.hits) for each in replayed.requests] == [("hybrid", page.hits())]


def test_an_address_repeats_its_search_and_the_history_goes_back_and_forward(
    browser: Any, page_server: PageServer
) -> None:
    page, client = Page(browser, page_server.address), Client(page_server.address)
    page.ask(page_server.query)
    page.until_titles("default · Dense")
    assert page.fields() == [("q", page_server.query), ("task", "default"), ("mode", "dense")]
    page.all("#filter")[0].send_keys("year >= 1950")
    page.all("#k")[0].clear()
    page.all("#k")[0].send_keys("4")
    page.choose("#choices .source", "mode=bm25")
    page.until_titles("default · BM25")
    expected = [("q", page_server.query), ("filter", "year >= 1950"), ("k", "4"), ("task", "default"), ("mode", "bm25")]
    assert page.fields() == expected
    ids = [hit.id for hit in client.search(page_server.query, mode="bm25", k=4, filter="year >= 1950")]
    assert page.hits() == ids
    browser.back()
    page.until_titles("default · Dense")
    assert page.all("#k")[0].get_property("value") == "10"
    assert page.all("#filter")[0].get_property("value") == ""
    browser.back()
    page.until(lambda: page.all("#start dl")[0].is_displayed())
    assert not page.columns()
    browser.forward()
    page.until_titles("default · Dense")
    browser.forward()
    page.until_titles("default · BM25")
    assert page.hits() == ids
    link = browser.current_url.partition("#")[2]
    page = Page(browser, page_server.address, link)
    page.until_titles("default · BM25")
    assert page.hits() == ids
    assert page_server.query in browser.title
    page = Page(browser, page_server.address, "q=bafa&source=0.4*bm25%2B0.6*exact:enc")  # a fusion, which no list has
    page.until_titles("default · 0.4*bm25+0.6*exact:enc")
    assert page.hits() == [hit.id for hit in client.search("bafa", source="0.4*bm25+0.6*exact:enc")]


def test_the_sources_are_those_of_the_chosen_task(
    browser: Any, page_server: PageServer, model: str, tmp_path: Path
) -> None:
    task_files(tmp_path, model, 6)
    client = Client(page_server.address)
    client.put_task("flat", tmp_path, index="enc")  # every vector is scored: no source index:idx
    try:
        page = Page(browser, page_server.address)
        sources = {task["name"]: task["sources"] for task in client.tasks()}
        assert "index:idx" in sources["default"]
        assert "index:idx" not in sources["flat"]
        page.choose("#choices .source", "source=index:idx")
        for task in ("default", "flat"):
            page.choose("#choices .task", task)
            page.until(lambda task=task: [each.text for each in page.all("#choices optgroup option")] == sources[task])
        assert page.all("#choices .source")[0].get_property("value") == "mode=dense"  # the chosen source is gone
        page.ask(page_server.query)
        page.until_status("10 hits for task flat")
    finally:
        client.drop_task("flat")


def test_a_filter_is_typed_and_its_mistakes_are_marked(browser: Any, page_server: PageServer) -> None:
    page, client = Page(browser, page_server.address), Client(page_server.address)
    text = "year >= 1950 and (lang = de or tags = third)"
    fields = [button.text for button in page.all("#fields button")]
    assert fields == ["yearint64", "langstring", "tagslist[string]"]
    page.all("#filter")[0].send_keys(text)
    page.ask(page_server.query)
    page.until_status("10 hits")
    ids = [hit.id for hit in client.search(page_server.query)]
    assert page.hits() == [hit.id for hit in client.search(page_server.query, filter=text)] != ids
    for wrong, place, message in (
        (" adn year < 2000", "adn", "filter: at character 46: expected and, or, or the end, found 'adn'"),
        (" and 🙂 = 1 and yaer = 2 adn", "adn", "at character 69"),  # one character, which is two units of JavaScript
        (" and yaer = 2", "yaer", "'yaer' is no filter of this corpus"),
        (" and year = word", "year", "filter: year: expected values of type int64"),
        (" and", "\u00a0", "expected a field"),
    ):
        page.all("#filter")[0].clear()
        page.all("#filter")[0].send_keys(text + wrong, "\n") if wrong.isascii() else browser.execute_script(
            "arguments[0].value = arguments[1]; arguments[0].form.requestSubmit()", page.all("#filter")[0], text + wrong
        )
        page.until(lambda message=message: message in page.text("#filter-error"))
        mark = page.all("#filter-error mark")[0]
        assert mark.get_property("textContent") == place
        assert page.all("#filter-error code")[0].get_property("textContent").startswith(text)
        assert page.all("#filter")[0].get_attribute("aria-invalid") == "true"
        assert not page.all("#columns li")
    page.all("#filter")[0].clear()
    page.all("#fields button")[0].click()
    assert page.all("#filter")[0].get_property("value") == "year = 2000"
    browser.switch_to.active_element.send_keys("1950")  # in place of the example, which is selected
    assert page.all("#filter")[0].get_property("value") == "year = 1950"
    page.all("#filter")[0].clear()
    page.ask(page_server.query)
    page.until_status("10 hits")
    assert not page.text("#filter-error")
    assert page.hits() == ids


def test_the_start_page_has_examples_and_what_is_served(browser: Any, page_server: PageServer) -> None:
    page, info = Page(browser, page_server.address), Client(page_server.address).info()
    queries = Queries.open(Store(str(page_server.store)), "tiny").table["text"].to_pylist()
    shown = page.text("#start .served")
    assert f"{info['passages']}" in shown
    assert info["encoder"] in shown
    assert "Task ours" in shown
    examples = page.all("#start .examples a")
    assert [example.text for example in examples] == info["examples"]
    assert len(examples) == 6
    assert set(info["examples"]) <= set(queries)
    examples[1].click()
    page.until_status("10 hits")
    assert page.all("#query")[0].get_property("value") == info["examples"][1]
    assert not page.all("#start")[0].is_displayed()


def test_an_error_is_shown_in_words(browser: Any, page_server: PageServer) -> None:
    page = Page(browser, page_server.address, "q=bafa&k=5000")
    page.until(lambda: "body.k" in page.text("#error"))
    assert page.columns() == []


@pytest.mark.parametrize("odd", ["columns=1", "__proto__=1&toString=1", "k=1e400&rerank=x", "%&=&&%E0%A4"])
def test_odd_fields_of_an_address_are_ignored(odd: str, browser: Any, page_server: PageServer) -> None:
    page = Page(browser, page_server.address, f"{odd}&q={page_server.query.replace(' ', '+')}")
    page.until_status("10 hits for task default")


def test_an_unknown_task_with_a_name_of_javascript_is_an_error(browser: Any, page_server: PageServer) -> None:
    page = Page(browser, page_server.address, "q=bafa&task=constructor&mode=toString")
    page.until(lambda: page.text("#error"))
    page.choose("#choices .task", "default")
    page.choose("#choices .source", "mode=dense")
    page.until_titles("default · Dense")


def test_a_query_is_searched_once_the_server_answers(browser: Any, page_server: PageServer) -> None:
    """For example if the page was opened while the server was starting."""
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/v1/info"]})
    try:
        browser.get("about:blank")
        browser.get(page_server.address)
        page = Page.__new__(Page)
        page.browser = browser
        page.until(lambda: "does not answer" in page.text("#error"))
    finally:
        browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    page.ask(page_server.query)
    page.until_status("10 hits for task default")
    assert page.text("#error") == ""


def test_the_tasks_are_listed(browser: Any, page_server: PageServer) -> None:
    page = Page(browser, page_server.address)
    page.all("nav a[data-page=tasks]")[0].click()
    page.until(lambda: len(page.all("#rows tr")) == 2 and page.all("#rows tr")[0].is_displayed())
    rows = [[cell.text for cell in row.find_elements("css selector", "td")] for row in page.all("#rows tr")]
    assert [row[0] for row in rows] == ["default", "ours"]
    assert [row[1] == "none" for row in rows] == [True, False]
    assert rows[1][2] == "3 (query)"
    browser.back()
    page.until(lambda: page.all("#query")[0].is_displayed())


def test_hits_are_re_ranked_by_a_release_with_a_re_ranker(
    browser: Any, page_server: PageServer, served: Path, classifier: str, tmp_path: Path
) -> None:
    store = shutil.copytree(served / "store", tmp_path / "store")
    with started("--store", store, "--port", 0, "--renew", "--rerank", classifier) as (_, address):
        page, client = Page(browser, address), Client(address)
        page.ask(page_server.query)
        page.until_status("10 hits")
        page.all("#depth")[0].clear()
        page.all("#depth")[0].send_keys("7")
        page.all("#rerank")[0].click()
        page.until(lambda: page.hits() == [hit.id for hit in client.search(page_server.query, rerank=7)])
        assert dict(page.fields())["rerank"] == "7"
        assert "reranker" in page.text("#columns li .from")
        page.all("#explain")[0].click()
        page.until(lambda: len(page.all("#columns li .why")) == 10)
        assert dict(page.fields())["explain"] == "1"
        page.all("#columns li .why summary")[0].click()
        page.until(lambda: "dense: score " in page.text("#columns li .why"))
        assert "re-ranker 0." in page.text("#columns li .why")
        page.all("#explain")[0].click()
        page.until(lambda: not page.all("#columns li .why"))
        page.all("#rerank")[0].click()
        page.until(lambda: page.hits() == [hit.id for hit in client.search(page_server.query)])
        assert "rerank" not in dict(page.fields())


def test_newer_artifacts_of_the_store_are_named(
    browser: Any, page_server: PageServer, tmp_path: Path, call_job: Callable[..., int]
) -> None:
    (tmp_path / "gone").write_text("p77\n")
    assert call_job("import_corpus", "--store", page_server.store, "--delete", tmp_path / "gone") == 0
    client, ends = Client(page_server.address), time.monotonic() + 240
    while not client.info()["newer"]:
        assert time.monotonic() < ends
        time.sleep(0.2)
    assert (
        Page(browser, page_server.address).text("#newer")
        == "The store has newer artifacts than this release: corpus/g0002."
    )
    client.switch()
    assert Page(browser, page_server.address).text("#newer") == ""  # a hidden element has no text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_telephone_and_both_colour_schemes(browser: Any, page_server: PageServer, scheme: str) -> None:
    sizes = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        columns = "&".join(f"task=default&mode={mode}" for mode in ("dense", "bm25", "hybrid"))
        page = Page(browser, page_server.address)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        page = Page(browser, page_server.address, f"q={page_server.query.replace(' ', '+')}&{columns}")
        page.until(lambda: len(page.columns()) == 3)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        page.all("#columns summary")[0].click()
        page.until(lambda: "encode" in page.text("#columns .facts"))
        paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_tokens_are_asked_for(browser: Any, page_server: PageServer, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text('{"user": ["user-0123456789abcdef"]}')
    with started("--store", page_server.store, "--port", 0, "--tokens", tokens) as (_, address):
        browser.get("about:blank")
        browser.get(f"{address}/#q=bafa&mode=bm25")
        page = Page.__new__(Page)
        page.browser = browser
        page.until(lambda: page.all("#secret")[0].is_displayed())
        page.all("#secret")[0].send_keys("user–0123456789abcdef", "\n")  # no header can have this dash
        assert browser.execute_script("return sessionStorage.length") == 0
        page.all("#secret")[0].clear()
        page.all("#secret")[0].send_keys("wrong-0123456789abcdef", "\n")
        page.until(lambda: page.all("#error")[0].is_displayed() and "token" in page.text("#error"))
        assert page.all("#secret")[0].is_displayed()
        page.all("#secret")[0].send_keys("user-0123456789abcdef", "\n")
        page.until(lambda: "passages" in page.text("#about"))
        page.until(lambda: "for task default" in page.text("#status"))  # the search of the address
