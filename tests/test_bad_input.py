"""tests/bad_input.md: every row names a test that exists, and no row stands elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_input import DESCRIPTION, PAGE, read_page


@pytest.mark.parametrize("row", read_page(), ids=lambda row: row.case[:60])
def test_the_test_of_each_row_exists(row) -> None:
    file, _, function = row.test.partition("::")
    assert f"def {function}(" in (Path(__file__).parent / file).read_text()


def test_the_description_has_no_rows_of_its_own() -> None:
    assert not read_page(DESCRIPTION), f"rows belong into {PAGE.name}: run their tests with RIPTIDE_WRITE_TABLES=1"
