"""The page in a real browser: hits, in one column and side by side."""

from __future__ import annotations

import json
from typing import Any

import pytest
from page import Page, PageServer
from selenium.webdriver.common.keys import Keys

from riptide.indexing.search.snippets import QueryWords, snippet
from riptide.serve.client import Client

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_columns_show_how_ranks_differ(browser: Any, page_server: PageServer) -> None:
    page, client = Page(browser, page_server.address), Client(page_server.address)
    page.ask(page_server.query)
    page.until_titles("default · Dense")
    page.all("#compare")[0].click()
    page.until_titles("default · Dense", "default · BM25")
    page.all("#compare")[0].click()
    page.until_titles("default · Dense", "default · BM25", "default · Hybrid")
    page.choose("#choices .task", "ours", 2)
    page.until_titles("default · Dense", "default · BM25", "ours · Hybrid")
    assert page.fields()[1:] == [
        *(("task", "default"), ("mode", "dense"), ("task", "default"), ("mode", "bm25")),
        *(("task", "ours"), ("mode", "hybrid")),
    ]
    dense, bm25, hybrid = (
        [hit.id for hit in client.search(page_server.query, task=task, mode=mode)]
        for task, mode in (("default", "dense"), ("default", "bm25"), ("ours", "hybrid"))
    )
    assert [page.hits(column) for column in range(3)] == [dense, bm25, hybrid]
    for column, ids in ((1, bm25), (2, hybrid)):
        marks = [each.text for each in page.columns()[column].find_elements("css selector", ".change")]
        assert marks == [change(dense, ids, id) for id in ids]
    assert {change(dense, ids, id)[0] for ids in (bm25, hybrid) for id in ids} >= {"n", "▼"}
    shared = next(id for id in hybrid if id in dense)
    page.columns()[2].find_elements("css selector", "button.change")[0].click()  # leads to the first column
    focused = browser.switch_to.active_element
    assert focused.find_element("css selector", ".id").get_attribute("title") == shared
    same = page.all("#columns li.same .id")
    assert {item.get_attribute("title") for item in same} == {shared}
    page.all("#choices fieldset button")[0].click()  # removes the first column
    page.until_titles("default · BM25", "ours · Hybrid")


def change(first: list[str], ids: list[str], id: str) -> str:
    """The mark of a passage in a column other than the first one."""
    if id not in first:
        return "new"
    up = first.index(id) - ids.index(id)
    return f"▲ {up}" if up > 0 else f"▼ {-up}" if up < 0 else "="


def test_a_column_that_fails_leaves_the_others(browser: Any, page_server: PageServer) -> None:
    query = page_server.query.split()[0]
    page = Page(browser, page_server.address, f"q={query}&task=default&mode=bm25&task=gone&mode=bm25")
    page.until_titles("default · BM25", "gone · BM25")
    assert len(page.hits(0)) > 0
    assert "gone" in page.columns()[1].find_element("css selector", ".wrong").text
    assert page.text("#error") == ""
    page = Page(browser, page_server.address, f"q={query}&task=gone&mode=bm25&mode=bm25&mode=hybrid&mode=dense")
    page.until_titles("gone · BM25", "default · BM25", "default · Hybrid", "default · Dense")
    assert page.all("#columns li.shared")
    assert not page.all("#columns .change")  # nothing to compare with


def test_a_search_without_hits_says_why(browser: Any, page_server: PageServer) -> None:
    query = page_server.query.split()[0]
    page = Page(browser, page_server.address, f"q={query}&mode=bm25&filter=year+%3E+5000")
    page.until_status("0 hits")
    assert "Nothing found" in page.text("#columns .empty")
    page.all("#columns .empty a")[0].click()
    page.until(lambda: page.hits())
    assert "filter" not in dict(page.fields())


def test_words_are_marked_as_by_the_command_line(browser: Any, page_server: PageServer) -> None:
    page, client = Page(browser, page_server.address), Client(page_server.address)
    script = """const [cases, stopWords, done] = arguments;
        import("/page/marks.js").then(({ wordsOf, spansOf }) => done(cases.map(([query, text]) => {
          let marked = "", at = 0;
          for (const [start, end] of spansOf(text, wordsOf(query, new Set(stopWords)))) {
            marked += `${text.slice(at, start)}**${text.slice(start, end)}**`;
            at = end;
          }
          return marked + text.slice(at);
        })));"""
    cases = [
        ("Who is the Count of DRACULA?", "Dracula is the Count who wrote; the end."),
        ("To be, or not to be", "It was not to be."),
        ("art", "The arts start with art, ART-house, art_1, ˈart."),
        ("straße Ωmega", "STRASSE und ωMEGA"),
        ("café", "Cafe\u0301 and cafe"),
        ("Москва", "В МОСКВЕ, москва; Москвасити"),
        ("ＡＢＣ", "abc"),
        ("東京の天気", "京都の天気は東京と違う"),
        ("猫 in", "黒猫がいる in"),
        ("don't", "I don’t, won't, t"),
        ("Dracula's", "Emma's Dracula’s s"),
        ("l'homme", "homme d'État"),
        ("?!", "what?! no"),
    ]
    marked = browser.execute_async_script(script, cases, client.info()["stop_words"])
    assert marked == [snippet(text, QueryWords(asked), 200) for asked, text in cases]
    page.ask(page_server.query)
    page.until_status("10 hits")
    words = {mark.get_property("textContent").lower() for mark in page.all("#columns li .text mark")}
    assert words
    assert words <= set(page_server.query.lower().split())


# Shows a hit, which is JSON text, as an object would arrive with sorted names.
SHOW = """const [query, hit, done] = arguments;
    Promise.all([import("/page/hits.js"), import("/page/marks.js")]).then(([hits, marks]) => {
      const shards = { total: 2, successful: 1 };
      const answer = { took_ms: { total: 1 }, source: "bm25", results: [{ hits: [JSON.parse(hit)], shards }] };
      const state = { q: query, filter: "", by: "document", columns: [{ task: "default", mode: "bm25" }] };
      const columns = hits.columnsOf([answer], state, marks.wordsOf(query, new Set()), true);
      document.getElementById("columns").replaceChildren(...columns);
      hits.showMoreButtons();
      done();
    });"""
HIT = {
    "id": "d#2",
    "document": "d",
    "start": 1200,
    "end": 1300,
    "rank": 1,
    "score": 0.5,
    "title": "<b>T</b>",
    "text": "<img src=x onerror=alert(1)>",
    "metadata": None,
    "scores": {"bm25": 0.5},
}


def test_a_long_text_begins_with_the_words_of_the_query(browser: Any, page_server: PageServer) -> None:
    page = Page(browser, page_server.address)
    text = "tides of another kind, " + "waves and more waves " * 100 + "until rip tides end; " + "waves " * 300
    browser.execute_async_script(SHOW, "rip tides", json.dumps({**HIT, "text": text}))
    shown = page.all("#columns .text")[0]
    assert shown.text.startswith("… ")
    assert [mark.text for mark in page.all("#columns .text mark")] == ["", "rip", "tides"]  # the first one is hidden
    page.all("#columns li")[0].send_keys("\n")
    assert " ".join(shown.text.split()) == text.strip()
    assert page.all("#columns .more")[0].get_attribute("aria-expanded") == "true"
    page.all("#columns .more")[0].click()
    assert shown.text.startswith("… ")


def test_metadata_is_shown_and_collapsed_if_it_is_long(browser: Any, page_server: PageServer) -> None:
    page = Page(browser, page_server.address)
    values_left_out = {"none": None, "empty": []}
    metadata = {"year": 2004, **values_left_out, "tags": ["<i>a</i>", "b"], "deep": {"x": 1}, "long": "word " * 60}
    browser.execute_async_script(SHOW, "", json.dumps({**HIT, "metadata": metadata}))
    names = [name.get_property("textContent") for name in page.all("#columns .meta dt")]
    values = [value.get_property("textContent") for value in page.all("#columns .meta dd")]
    assert names == ["year", "tags", "deep", "long"]
    assert values == ["2004", "<i>a</i>, b", '{"x":1}', "word " * 60]
    assert [value.is_displayed() for value in page.all("#columns .meta dd")] == [True, True, True, False]
    page.all("#columns .meta summary")[0].click()
    page.until(lambda: page.all("#columns .meta dd")[3].is_displayed())
    assert page.text("#columns h3 .title") == "<b>T</b>"
    assert page.text("#columns .text") == "<img src=x onerror=alert(1)>"
    assert page.text("#columns .from") == "d, passage 2, characters 1,200–1,300 · score 0.5000"
    assert "1 of 2 shards did not answer" in page.text("#columns .wrong")


def test_the_keyboard_reaches_all_hits(browser: Any, page_server: PageServer) -> None:
    page = Page(
        browser,
        page_server.address,
        "q=" + page_server.query.replace(" ", "+") + "&task=default&mode=dense&task=default&mode=exact",
    )
    page.until_titles("default · Dense", "default · Exact")
    first, second = (column.find_elements("css selector", "li") for column in page.columns())
    browser.execute_script("arguments[0].focus()", first[0])
    for key, expected in ((Keys.ARROW_DOWN, first[1]), (Keys.ARROW_UP, first[0])):
        browser.switch_to.active_element.send_keys(key)
        assert browser.switch_to.active_element == expected
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert browser.switch_to.active_element in second
    key = browser.switch_to.active_element.get_attribute("data-key")
    browser.switch_to.active_element.send_keys(Keys.ARROW_LEFT)
    assert browser.switch_to.active_element == first[0]
    assert first[0].get_attribute("data-key") == key  # the same passage, if the other column has it
    for leaving in ("/", Keys.ESCAPE):
        browser.execute_script("arguments[0].focus()", first[0])
        browser.switch_to.active_element.send_keys(leaving)
        assert browser.switch_to.active_element.get_attribute("id") == "query"
    unnamed = """return [...document.querySelectorAll("main input, main select, main button")].filter((each) =>
        !each.labels?.length && !each.ariaLabel && !each.textContent.trim()).map((each) => each.outerHTML)"""
    assert browser.execute_script(unnamed) == []
