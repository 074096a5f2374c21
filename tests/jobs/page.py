"""The page in headless Chromium: opens it, reads it, and uses its forms."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import pytest


class PageServer(NamedTuple):
    """A server for tests of the page: its address, its store, and a query of the query set that its examples are from.

    It serves the tasks `default` and `ours`, a random prompt.
    """

    address: str
    store: Path
    query: str


def open_browser(profile: Path) -> Any:
    """Returns a driver of headless Chromium. Fails the test if Chromium is not installed."""
    from selenium import webdriver

    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.fail("chromium and chromedriver are not installed: make browser")
    options = webdriver.ChromeOptions()
    options.binary_location = str(programs[0])
    for argument in (
        "--headless=new",
        "--window-size=1200,900",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # which Chromium does not start with as root
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))


class Page:
    def __init__(self, browser: Any, address: str, fragment: str = ""):
        self.browser, self.address = browser, address
        browser.get("about:blank")  # otherwise an address that differs in its fragment only is not loaded again
        browser.get(f"{address}/#{fragment}")
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

    def choose(self, selector: str, value: str, place: int = 0) -> None:
        from selenium.webdriver.support.ui import Select

        Select(self.all(selector)[place]).select_by_value(value)

    def ask(self, query: str) -> None:
        self.all("#query")[0].clear()
        self.all("#query")[0].send_keys(query, "\n")

    def until_status(self, start: str) -> None:
        self.until(lambda: self.text("#status").startswith(start))

    def until_titles(self, *titles: str) -> None:
        self.until(lambda: [heading.text for heading in self.all("#columns h2")] == list(titles))

    def hits(self, column: int = 0) -> list[str]:
        """The ids that a column shows."""
        return [id.get_attribute("title") for id in self.columns()[column].find_elements("css selector", "li .id")]

    def columns(self) -> list[Any]:
        return self.all("#columns > section")

    def fields(self) -> list[tuple[str, str]]:
        """The names and values of the address."""
        return parse_qsl(self.browser.current_url.partition("#")[2])
