"""HTML pages of results load nothing and show every text as it is."""

from __future__ import annotations

import base64
import html
import re

from riptide.base.html_page import html_page, html_picture, html_table

HOSTILE = "</title></td><script>alert('1')</script> & \" '"


def test_every_text_is_escaped_and_the_page_can_load_nothing() -> None:
    table = html_table((HOSTILE, "b"), [(HOSTILE, "2"), ("3", HOSTILE)])
    page = html_page(HOSTILE, [table, html_picture(HOSTILE, b"png")])
    assert "<script" not in page
    assert "a\\x1b[31mb\n\tc\\u009b" in html_page("", ["a\x1b[31mb\n\tc\x9b"]), "a text may be copied to a terminal"
    assert page.count(html.escape(HOSTILE)) == 5
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\"" in page
    [data] = re.findall(r"src='data:image/png;base64,([^']*)'", page)
    assert base64.b64decode(data) == b"png"


def test_a_page_may_have_one_script_which_its_policy_allows_by_hash() -> None:
    page = html_page("", [], script='"use strict";')
    assert "script-src 'sha256-Xs8vTYPmJg2r1uxI522N3rzPlWVj80ByIhv5YNO4wlU='" in page
    assert page.count('<script>"use strict";</script>') == 1


def test_the_first_columns_of_a_table_may_hold_numbers() -> None:
    table = html_table(("n", "text"), [("1", "a")], numbers=1)
    assert table == (
        "<table><tr><th class='number'>n</th><th>text</th></tr>\n<tr><td class='number'>1</td><td>a</td></tr></table>"
    )
