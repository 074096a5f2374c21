"""Words of texts in any script, as runs between white space or as the characters of scripts without spaces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"  # scripts without spaces


def word_runs(text: str) -> Iterator[Any]:
    """Yields a match for each run of characters between white space, and each character of scripts without spaces."""
    import regex  # imported here, because encoding and the training of prompts do not need it

    runs: Iterator[Any] = regex.finditer(rf"[{UNSPACED}]|[^\s{UNSPACED}]+", text)
    return runs
