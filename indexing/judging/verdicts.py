"""Reads and writes verdicts of people or of a model: JSON lines with query_id, id and verdict."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.files.raw import Lines, short_repr
from riptide.indexing.files.rows import json_objects
from riptide.indexing.judging.difference import SKIPPED
from riptide.indexing.store.result_files import json_lines

LINES_AT_ONCE = 1 << 16
WORDS = {"relevant": 1.0, "not": 0.0, "skip": SKIPPED}

Pair = tuple[str, str]  # the ids of a query and of a passage


class Verdict(NamedTuple):
    """A verdict on a pair.

    Attributes:
        value: 1 for a relevant passage, 0 for another one, SKIPPED, or a probability of a model.
        place: Its file and line.
        is_skip: Whether it is a skip, which a probability of 0.5 is not.
    """

    value: float
    place: str
    is_skip: bool


def read_verdicts(files: Sequence[str], pairs: Mapping[Pair, int], *, by_model: bool = False) -> dict[Pair, Verdict]:
    """Reads files of verdicts. A verdict replaces a skip of the same pair.

    Args:
        files: The files.
        pairs: The pairs that may be judged.
        by_model: Whether a verdict may be a probability.

    Raises:
        InputError: With the line, for a bad line, an unknown pair, or two verdicts of a pair that differ.
    """
    verdicts: dict[Pair, Verdict] = {}
    for file in files:
        for pair, verdict in _read_lines(file, by_model=by_model):
            names = f"passage {short_repr(pair[1])} of query {short_repr(pair[0])}"
            if pair not in pairs:
                raise InputError(
                    f"{verdict.place}: {names} is no pair that these runs rank differently; remove the line, or name "
                    "the runs that were judged"
                )
            earlier = verdicts.get(pair)
            if earlier is None or earlier.is_skip:
                verdicts[pair] = verdict
            elif not verdict.is_skip and verdict.value != earlier.value:
                raise InputError(
                    f"{verdict.place}: the verdict on {names} contradicts that of {earlier.place}; remove one of the "
                    "two lines"
                )
    return verdicts


def write_lines(verdicts: Mapping[Pair, Verdict]) -> str:
    """Returns the verdicts as JSON lines, sorted by pair."""
    words = {1.0: "relevant", 0.0: "not"}
    return json_lines(
        {
            "query_id": pair[0],
            "id": pair[1],
            "verdict": "skip" if verdict.is_skip else words.get(verdict.value, verdict.value),
        }
        for pair, verdict in sorted(verdicts.items())
    )


def verdict_array(verdicts: Mapping[Pair, Verdict], pairs: Mapping[Pair, int]) -> np.ndarray:
    """Returns the value of the verdict on each pair: float64 [pairs], NaN without a verdict."""
    values = np.full(len(pairs), np.nan)
    for pair, verdict in verdicts.items():
        values[pairs[pair]] = verdict.value
    return values


def _read_lines(file: str, *, by_model: bool) -> Iterator[tuple[Pair, Verdict]]:
    """Yields the pair and the verdict of each line."""
    lines = Lines(file)
    expected = "a number from 0 to 1, relevant, not or skip" if by_model else "relevant, not or skip"
    while piece := lines.take(LINES_AT_ONCE):
        for number, row in json_objects(piece):
            query, id, verdict = (row.get(name) for name in ("query_id", "id", "verdict"))
            value = WORDS.get(verdict) if isinstance(verdict, str) else None
            if by_model and isinstance(verdict, int | float) and not isinstance(verdict, bool) and 0 <= verdict <= 1:
                value = float(verdict)
            if type(query) is not str or type(id) is not str or value is None:
                line = short_repr(json.dumps(row, ensure_ascii=False))
                raise InputError(
                    f"{file}:{number}: found {line}, expected an object with the texts query_id and id and as verdict "
                    f"{expected}; fix the line"
                )
            yield (query, id), Verdict(value, f"{file}:{number}", verdict == "skip")
