"""tests/bad_input.md: every row names a test that exists, and no row stands elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_input import DESCRIPTION, PAGE, StatedRows, read_page


@pytest.mark.parametrize("row", read_page(), ids=lambda row: row.case[:60])
def test_the_test_of_each_row_exists(row) -> None:
    file, _, function = row.test.partition("::")
    assert f"def {function}(" in (Path(__file__).parent / file).read_text()


def test_the_description_has_no_rows_of_its_own() -> None:
    assert not read_page(DESCRIPTION), f"rows belong into {PAGE.name}: run their tests with RIPTIDE_WRITE_TABLES=1"


def test_a_row_that_no_item_of_its_test_states_is_stale() -> None:
    test = "jobs/test_convert_prompts.py::test_bad_input_is_one_line"
    rows = [row for row in read_page() if row.test == test]
    assert len(rows) > 2
    stated = StatedRows({test: 2})
    assert stated.add(test, {rows[0]}) == []
    assert stated.add(test, {rows[1]}) == rows[2:]
    assert StatedRows({test: 1}).add(test, set(rows)) == []
    assert StatedRows({}).add(test, {rows[0]}) == [], "only some items run"
