"""Words in scripts with and without spaces."""

from __future__ import annotations

import pytest

from riptide.base.unicode import word_runs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't  stop,\nnow.", ["Don't", "stop,", "now."]),
        ("私は B2 を", ["私", "は", "B2", "を"]),
        ("x漢y", ["x", "漢", "y"]),
        (" \n", []),
    ],
)
def test_words_are_runs_or_the_characters_of_scripts_without_spaces(text: str, words: list[str]) -> None:
    assert [run.group() for run in word_runs(text)] == words
