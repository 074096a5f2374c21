"""The page in a real browser: headless Chromium, driven as a person would."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import query_texts, started, task_files

from serve.client import Client

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, served: Path) -> Path:
    return Path(shutil.copytree(served, tmp_path_factory.mktemp("page") / "root"))


@pytest.fixture(scope="module")
def address(root: Path, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    prompt = tmp_path_factory.mktemp("prompt")
    task_files(prompt, model, 5)
    with started("--store", root / "store", "--port", 0) as (_, address):
        Client(address).put_task("ours", prompt)
        yield address


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver

    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.fail("chromium and chromedriver are not installed: make browser")
    options = webdriver.ChromeOptions()
    options.binary_location = str(programs[0])
    profile = tmp_path_factory.mktemp("profile")
    for argument in (
        "--headless=new",
        "--window-size=1200,900",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # which Chromium does not start with as root
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    yield driver
    driver.quit()


class Page:
    def __init__(self, browser: Any, address: str):
        self.browser = browser
        browser.get(address)
        self.until(lambda: self.text("#about"))

    def until(self, met: Any) -> Any:
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        # An element may be replaced between the call that finds it and the one that reads it.
        replaced = [StaleElementReferenceException]
        return WebDriverWait(self.browser, 240, ignored_exceptions=replaced).until(lambda _: met())

    def all(self, selector: str) -> list[Any]:
        return list(self.browser.find_elements("css selector", selector))

    def text(self, selector: str) -> str:
        return str(self.all(selector)[0].text)

    def choose(self, selector: str, value: str) -> None:
        from selenium.webdriver.support.ui import Select

        Select(self.all(selector)[0]).select_by_value(value)

    def ask(self, query: str) -> None:
        self.all("#query")[0].clear()
        self.all("#query")[0].send_keys(query, "\n")

    def hits(self, column: int = 0) -> list[str]:
        """The ids that a column shows."""
        boxes = self.all("#columns > section")
        return [item.text.split(" · ")[0] for item in boxes[column].find_elements("css selector", "li .from")]


def test_search_by_hand_in_every_mode_and_task(browser: Any, address: str, root: Path) -> None:
    page, client = Page(browser, address), Client(address)
    query = next(iter(query_texts(root).values()))
    page.ask(query)
    page.until(lambda: page.text("#status").startswith("10 hits for task default"))
    assert page.hits() == [hit.id for hit in client.search(query)]
    assert "1 of 1 shards" in page.text("#columns .facts")
    page.choose("#mode", "side")
    page.until(lambda: len(page.all("#columns > section")) == 3)
    for column, mode in enumerate(("dense", "bm25", "hybrid")):
        assert page.hits(column) == [hit.id for hit in client.search(query, mode=mode)]
    page.choose("#mode", "exact")
    page.until(lambda: len(page.all("#columns > section")) == 1)
    page.choose("#task", "ours")
    page.until(lambda: "for task ours" in page.text("#status"))
    assert page.hits() == [hit.id for hit in client.search(query, mode="exact", task="ours")]
    page.choose("#mode", "source:bm25")  # a source by its name, and of each hit
    page.until(lambda: page.text("#columns h2") == "bm25")
    hits = client.search(query, source="bm25", task="ours")
    assert page.hits() == [hit.id for hit in hits]
    assert f"from bm25 {hits[0].score:.4f}" in page.text("#columns li .from")


def test_the_sources_are_those_of_the_chosen_task(
    browser: Any, address: str, root: Path, model: str, tmp_path: Path
) -> None:
    task_files(tmp_path, model, 6)
    client = Client(address)
    client.put_task("flat", tmp_path, index="enc")  # every vector is scored: no source index:idx
    try:
        page = Page(browser, address)
        sources = {task["name"]: task["sources"] for task in client.tasks()}
        assert "index:idx" in sources["default"]
        assert "index:idx" not in sources["flat"]
        page.choose("#mode", "source:index:idx")
        for task in ("default", "flat"):
            page.choose("#task", task)
            page.until(lambda task=task: [option.text for option in page.all("#sources option")] == sources[task])
        assert page.all("#mode")[0].get_attribute("value") == "dense"  # the chosen source is gone
        page.ask(next(iter(query_texts(root).values())))
        page.until(lambda: page.text("#status").startswith("10 hits for task flat"))
    finally:
        client.drop_task("flat")


def test_a_filter_is_typed_and_its_mistakes_are_shown(browser: Any, address: str, root: Path) -> None:
    page, client = Page(browser, address), Client(address)
    query, text = next(iter(query_texts(root).values())), "year >= 1950 and (lang = de or tags = third)"
    assert page.text("#fields").startswith("Fields: year (int64), lang (string), tags (list[string])")
    page.all("#filter")[0].send_keys(text)
    page.ask(query)
    page.until(lambda: page.text("#status").startswith("10 hits"))
    assert (
        page.hits() == [hit.id for hit in client.search(query, filter=text)] != [hit.id for hit in client.search(query)]
    )
    page.all("#filter")[0].send_keys(" adn year < 2000\n")
    page.until(lambda: page.text("#error"))
    assert page.text("#error") == "filter: at character 46: expected and, or, or the end, found 'adn'"
    assert not page.all("#columns li")
    page.all("#filter")[0].clear()
    page.ask(query)
    page.until(lambda: page.text("#status").startswith("10 hits"))
    assert not page.text("#error")
    assert page.hits() == [hit.id for hit in client.search(query)]


def test_hits_are_walked_through_with_the_keyboard(browser: Any, address: str, root: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    page = Page(browser, address)
    page.ask(next(iter(query_texts(root).values())))
    page.until(lambda: page.all("#columns li"))
    items = page.all("#columns li")
    browser.execute_script("arguments[0].focus()", items[0])
    browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert browser.switch_to.active_element == items[1]
    browser.switch_to.active_element.send_keys("/")
    assert browser.switch_to.active_element.get_attribute("id") == "query"


def test_an_error_is_shown_in_words(browser: Any, address: str) -> None:
    page = Page(browser, address)
    browser.execute_script("document.getElementById('k').setAttribute('max', 5000)")
    page.all("#k")[0].clear()
    page.all("#k")[0].send_keys("5000")
    page.ask("bafa")
    page.until(lambda: "body.k" in page.text("#error"))
    assert page.all("#columns > section") == []


def test_the_tasks_are_listed(browser: Any, address: str) -> None:
    page = Page(browser, address)
    page.all("nav button[data-page=tasks]")[0].click()
    page.until(lambda: len(page.all("#rows tr")) == 2)
    rows = [[cell.text for cell in row.find_elements("css selector", "td")] for row in page.all("#rows tr")]
    assert [row[0] for row in rows] == ["default", "ours"]
    assert [row[1] == "none" for row in rows] == [True, False]
    assert rows[1][2] == "3 (query)"


def test_newer_artifacts_of_the_store_are_named(
    browser: Any, address: str, root: Path, tmp_path: Path, call_job: Callable[..., int]
) -> None:
    (tmp_path / "gone").write_text("p77\n")
    assert call_job("import_corpus", "--store", root / "store", "--delete", tmp_path / "gone") == 0
    client, ends = Client(address), time.monotonic() + 240
    while not client.info()["newer"]:
        assert time.monotonic() < ends
        time.sleep(0.2)
    assert Page(browser, address).text("#newer") == "The store has newer artifacts than this release: corpus/g0002."
    client.switch()
    assert Page(browser, address).text("#newer") == ""  # a hidden element has no text


def test_it_fits_a_telephone(browser: Any, address: str, root: Path) -> None:
    page = Page(browser, address)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        page.choose("#mode", "side")
        page.ask(next(iter(query_texts(root).values())))
        page.until(lambda: len(page.all("#columns > section")) == 3)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        stages = page.all("#columns section:last-child .facts")[1]
        assert stages.is_displayed()
        assert "encode" in stages.text
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_tokens_are_asked_for(browser: Any, root: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text('{"user": ["user-0123456789abcdef"]}')
    with started("--store", root / "store", "--port", 0, "--tokens", tokens) as (_, address):
        browser.get(address)
        page = Page.__new__(Page)
        page.browser = browser
        page.until(lambda: page.all("#secret")[0].is_displayed())
        page.all("#secret")[0].send_keys("wrong-0123456789abcdef", "\n")
        page.until(lambda: page.all("#error")[0].is_displayed() and "token" in page.text("#error"))
        assert page.all("#secret")[0].is_displayed()
        page.all("#secret")[0].send_keys("user-0123456789abcdef", "\n")
        page.until(lambda: "passages" in page.text("#about"))
        page.ask("bafa")
        page.until(lambda: "hits for task default" in page.text("#status"))
