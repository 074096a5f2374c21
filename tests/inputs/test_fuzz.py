"""Random contents of each input are read or refused in one line: there is no other error.

In the long form, RIPTIDE_WRITE_COUNTS names a file for the number of contents that were read and refused.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from input_registry import INPUTS
from kept_contents import KEPT
from linear_cost import Content, Input
from local_cluster import LONG

MAX_CPU_S = 5.0  # CPU seconds of a small content, in the long form; usual ones take milliseconds
EXAMPLES = 5_000 if LONG else 8  # of each input: about ten minutes of CPU time in the long form
PROFILE = settings(
    max_examples=EXAMPLES,
    derandomize=not LONG,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink] if LONG else [Phase.generate],
    suppress_health_check=list(HealthCheck),
)
TEXT = st.text(st.characters(codec=None), max_size=20)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63, -(2**63) - 1, 10**30, 10**400, 0, -1]),
    st.floats(),
    TEXT,
    st.sampled_from(["id", "text", "a" * 300, "\ud800", "\0", "/etc/x", "\x1b[31m", "2020-01-01", "\ue000[]\ue001"]),
)
NAMES = st.one_of(TEXT, st.sampled_from(["", "id", "text", "and", "year", "gte", "idx", "type", "mean", "tensor"]))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=8
)
TYPES = st.sampled_from(
    [
        *(pa.string(), pa.large_string(), pa.binary(), pa.int8(), pa.uint64(), pa.float16(), pa.float64(), pa.bool_()),
        *(pa.timestamp("ns"), pa.timestamp("s", "UTC"), pa.date32(), pa.time64("ns"), pa.decimal128(5, 2), pa.null()),
        *(pa.list_(pa.string()), pa.list_(pa.list_(pa.int64())), pa.struct([("a", pa.int32())]), pa.binary(3)),
        *(pa.map_(pa.string(), pa.int32()), pa.dictionary(pa.int8(), pa.string()), pa.string_view(), pa.duration("s")),
    ]
)


@st.composite
def parquet_files(draw: st.DrawFn) -> bytes:
    """Draws a Parquet file whose columns have any type, nulls and odd names."""
    names = draw(st.lists(st.sampled_from(["id", "text", "title", "docid", "m", "", "a.b", "é", "\x1b"]), max_size=5))
    num_rows = draw(st.integers(0, 3))
    columns = []
    for name in names:
        kind = pa.string() if name in ("id", "text") and draw(st.booleans()) else draw(TYPES)
        if pa.types.is_string(kind):
            values = draw(
                st.lists(st.none() | st.sampled_from(["a", "b", "", "\0"]), min_size=num_rows, max_size=num_rows)
            )
            columns.append(pa.array(values, kind))
        else:
            columns.append(pa.nulls(num_rows, kind) if draw(st.booleans()) else _some(kind, num_rows))
    target = io.BytesIO()
    try:
        pq.write_table(pa.table(columns, names=names), target, data_page_version=draw(st.sampled_from(["1.0", "2.0"])))
    except (pa.ArrowException, pa.ArrowNotImplementedError):
        return b"PAR1PAR1"
    return target.getvalue()


def _some(kind: pa.DataType, num_rows: int) -> pa.Array:
    """Returns ones, or their like, of a type."""
    for value in (1, "a", b"abc", True, ["a"], [[1]], {"a": 1}, [("a", 1)]):
        try:
            return pa.array([value] * num_rows, kind)
        except (pa.ArrowException, TypeError, ValueError, AttributeError):
            continue
    return pa.nulls(num_rows, kind)


@st.composite
def contents(draw: st.DrawFn, tested: Input) -> Content:
    """Draws a content: random pieces, a random value of JSON in the frame, or a changed pattern."""
    start, end = tested.frame
    if tested.fields:
        start = start.replace("FIELD", draw(st.sampled_from(tested.fields)))
    pieces = st.lists(st.sampled_from(tested.pieces) | TEXT, max_size=30).map("".join)
    kind = draw(st.sampled_from(["pieces", "framed", "value", "changed", "changed"]))
    if tested.name == "passages of parquet" and kind != "changed":
        return draw(parquet_files())
    if kind == "pieces":
        return draw(pieces)
    if kind == "framed":
        return start + draw(pieces) + end
    if kind == "value":
        return start + json.dumps(draw(VALUES), ensure_ascii=draw(st.booleans())) + end
    pattern = draw(st.sampled_from(sorted(tested.patterns)))
    content = tested.patterns[pattern](draw(st.integers(1, 12)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        cut = draw(st.integers(0, 8))
        piece: Any = draw(st.sampled_from(tested.pieces))
        content = (
            content[:at]
            + (piece.encode("utf-8", "ignore") if isinstance(content, bytes) else piece)
            + content[at + cut :]
        )
    return content


def check(tested: Input, content: Content, folder: Path) -> bool:
    """Reads a content. Returns whether it was accepted."""
    value = tested.value_of(content, folder)
    start, refusal = time.process_time(), None
    try:
        tested.read(value)
    except tested.refusals as error:
        refusal = str(error)
    assert "\n" not in (refusal or "")
    assert not LONG or time.process_time() - start < MAX_CPU_S
    return refusal is None


@pytest.fixture(scope="module", autouse=True)
def _files_of_hypothesis(tmp_path_factory: pytest.TempPathFactory) -> None:
    set_hypothesis_home_dir(tmp_path_factory.mktemp("hypothesis"))


@pytest.mark.parametrize("name", INPUTS)
def test_a_random_content_is_read_or_refused(name: str, tmp_path: Path) -> None:
    tested = INPUTS[name]
    first = next(iter(tested.patterns.values()))(1)
    tested.is_read(tested.value_of(first, tmp_path))  # imports, and what is computed once, do not count
    for content in KEPT.get(name, ()):
        check(tested, content, tmp_path)
    counts: Counter[bool] = Counter()

    @PROFILE
    @given(contents(tested))
    def read(content: Content) -> None:
        counts[check(tested, content, tmp_path)] += 1

    read()
    if LONG and (file := os.environ.get("RIPTIDE_WRITE_COUNTS")):
        with open(file, "a", encoding="utf-8") as rows:
            rows.write(f"{name}\t{counts[True]}\t{counts[False]}\n")


def test_kept_contents_are_of_inputs() -> None:
    assert set(KEPT) <= set(INPUTS)
