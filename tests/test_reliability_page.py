"""docs/reliability.md: every row names a test that exists."""

from __future__ import annotations

from pathlib import Path

import pytest
from reliability import read_page


@pytest.mark.parametrize("row", read_page(), ids=lambda row: row.case[:60])
def test_the_test_of_each_row_exists(row) -> None:
    file, _, function = row.test.partition("::")
    assert f"def {function}(" in (Path(__file__).parent / file).read_text()
