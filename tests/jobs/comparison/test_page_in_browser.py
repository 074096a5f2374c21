"""The page of a comparison in headless Chromium: rows open, nothing overflows, and colours follow the system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from riptide.jobs.comparison.comparison import Comparison
from riptide.jobs.comparison.comparison_page import render_page
from riptide.jobs.comparison.shown_passages import ShownPassage
from riptide.jobs.comparison.values import ComparedQuery, MetricComparison, RunResult

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LONG = "a-name-of-a-run-that-is-longer-than-any-column-" * 4


@pytest.fixture
def page(tmp_path: Path) -> str:
    """The address of a page with four won and four lost queries, whose names and texts are long."""
    rows = []
    for number in range(8):
        passages = [ShownPassage(f"p{number}-{n}", 1 - n, LONG, f"{LONG} text {n} of {number} " * 40) for n in (0, 1)]
        results = [RunResult({"RR@10": 1 / rank}, rank, passages[rank > 1]) for rank in (2, 1)]
        if number >= 4:
            results.reverse()
        difference = results[1].values["RR@10"] - results[0].values["RR@10"]
        rows.append(ComparedQuery(f"q{number}", f"query {number} {LONG}", difference, *results, (passages[0],)))
    metric = MetricComparison("RR@10", 0.75, 0.75, 0.0, -0.1, 0.1, 1.0, 1.0, 4, 0, 4)
    comparison = Comparison(
        "queries/x", "test", f"first{LONG}", f"second{LONG}", (metric,), tuple(rows), (0.5, 1), (0.5, 1)
    )
    file = tmp_path / "page.html"
    file.write_text(render_page(comparison, 4), encoding="utf-8")
    return file.as_uri()


def colour(browser: Any, name: str) -> str:
    return str(browser.execute_script(f"return getComputedStyle(document.body).{name}"))


def test_the_page_in_a_browser(browser: Any, page: str) -> None:
    browser.get(page)
    rows = browser.find_elements("css selector", "details")
    assert [row.get_attribute("open") is not None for row in rows] == [True, False, False, False] * 2
    passage = rows[1].find_element("css selector", ".passages")
    assert not passage.is_displayed()
    rows[1].find_element("css selector", "summary").click()
    assert passage.is_displayed()
    assert "text 0 of 1" in passage.text
    for width in (1_400, 800, 420):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert browser.get_log("browser") == []


def test_colours_are_those_of_the_system(browser: Any, page: str) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        browser.get(page)
        curve = browser.execute_script("return getComputedStyle(document.querySelector('.curve.second')).stroke")
        colours[scheme] = (colour(browser, "backgroundColor"), colour(browser, "color"), curve)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert all(light != dark for light, dark in zip(colours["light"], colours["dark"], strict=True))
    assert colours["light"][0] == "rgb(255, 255, 255)"
