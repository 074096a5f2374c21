"""Writes rows in memory (dicts, or tables of pandas, polars and pyarrow) to files that an import reads.

Passages and queries become a Parquet file, judgements a file of BEIR's three columns.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from riptide.base.arguments import check_levels, plain_value
from riptide.base.errors import InputError
from riptide.indexing.storage.cache import file_sha256
from riptide.process.temporary_folders import PREFIX, SUFFIX, TemporaryFolder

NAME = "rows of a table"  # stands for the path of the file in messages and in the record of an import
QRELS_NAME = "rows of judgements"  # likewise
HASH_DIGITS = 16  # hexadecimal digits of the content hash in a file name
BLOCK_ROWS = 65_536  # dicts that are converted to columns at once
GROUP_ROWS = 16_384  # rows of a Parquet row group, the smallest piece that a worker reads
METADATA = "metadata"  # name of the column that holds an object per row
_PURPOSE = "rows"  # part of the name of the temporary folder
_QRELS_COLUMNS = ("query_id", "corpus_id", "score")


@contextlib.contextmanager
def source_path(source: Any) -> Iterator[str]:
    """Yields the path of an import source; rows are written to a temporary file that exists only within the block.

    The name of the file has a hash of its content, so the same rows are the same source.

    Args:
        source: A path or an address in a cloud, an iterable of dicts, or a table of pandas, polars or pyarrow.

    Raises:
        InputError: If it is no source, or if its rows make no table.
    """
    if isinstance(source, str | os.PathLike):
        yield os.fspath(source) if isinstance(source, str) else str(source)
        return
    table = _with_plain_types(_to_table(source))
    if not table.num_rows:
        raise InputError(f"{NAME}: found no rows, expected at least one")
    with TemporaryFolder(_PURPOSE) as folder:
        file = Path(folder) / "rows.parquet"
        try:
            pq.write_table(table, file, compression="zstd", row_group_size=GROUP_ROWS)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise InputError(f"{NAME}: {_one_line(error)}; expected columns that Parquet can hold") from None
        yield str(_name_by_content(file, NAME))


@contextlib.contextmanager
def qrels_path(qrels: Any) -> Iterator[str]:
    """Yields the path of a file of judgements. Rows are written to a temporary file, as by `source_path`.

    Args:
        qrels: A path or an address in a cloud; a dict, query id -> passage id -> integer grade; or rows with the
            columns query_id, corpus_id and score, as `source_path` takes them.

    Raises:
        InputError: If it is none of these.
    """
    if isinstance(qrels, str | os.PathLike):
        yield os.fspath(qrels) if isinstance(qrels, str) else str(qrels)
        return
    if isinstance(qrels, Mapping) and all(isinstance(grades, Mapping) for grades in qrels.values()):
        rows = [(query, passage, grade) for query, grades in qrels.items() for passage, grade in grades.items()]
    else:
        table = _to_table(qrels)
        if missing := [name for name in _QRELS_COLUMNS if name not in table.column_names]:
            raise InputError(
                f"{QRELS_NAME}: found the columns {', '.join(table.column_names)}, expected {missing[0]} too; rename "
                "the column, or give a dict, query id -> passage id -> grade"
            )
        rows = list(zip(*(table[name].to_pylist() for name in _QRELS_COLUMNS), strict=True))
    for number, row in enumerate(rows, 1):
        if any(value is None or "\n" in str(value) for value in row):
            raise InputError(f"{QRELS_NAME} row {number}: found {row!r}, expected two ids of one line and a grade")
    with TemporaryFolder(_PURPOSE) as folder:
        file = Path(folder) / "qrels.tsv"
        with open(file, "w", encoding="utf-8", newline="") as lines:
            csv.writer(lines, delimiter="\t", lineterminator="\n").writerows(rows)
        yield str(_name_by_content(file, QRELS_NAME))


def _name_by_content(file: Path, name: str) -> Path:
    """Renames a file to NAME plus a hash of its content, and returns the new path."""
    return file.rename(file.with_name(f"{name} {file_sha256(file)[:HASH_DIGITS]}{file.suffix}"))


def without_path(message: str) -> str:
    """Returns a message in which NAME or QRELS_NAME replaces each path of a temporary file, also of earlier calls."""
    folder = rf"(?:{re.escape(tempfile.gettempdir())}|\S*)/{PREFIX}{_PURPOSE}-\w+{re.escape(SUFFIX)}"
    return re.sub(rf"{folder}/({NAME}|{QRELS_NAME}) [0-9a-f]+\.\w+", r"\1", message)


def _to_table(source: Any) -> pa.Table:
    """Converts rows to a pyarrow table."""
    library = type(source).__module__.partition(".")[0]
    if library == "pandas" and hasattr(source, "columns"):
        _check_names([str(name) for name in source.columns])
        for name, kind in source.dtypes.items():
            if str(kind) == "object":
                _check_values(str(name), source[name], 1)
    try:
        if isinstance(source, pa.Table):
            return source
        if library == "pandas" and hasattr(source, "columns"):
            return pa.Table.from_pandas(source, preserve_index=False)
        if hasattr(source, "collect") and library == "polars":
            source = source.collect()
        # Pyarrow cannot cast polars categories, which have string views.
        if hasattr(source, "to_arrow") and library == "polars":
            return pa.table(source.to_arrow(compat_level=sys.modules["polars"].CompatLevel.oldest()))
        if library in ("polars", "pyarrow") and hasattr(source, "__arrow_c_stream__"):
            return pa.table(source)
        if isinstance(source, pa.RecordBatch):
            return pa.Table.from_batches([source])
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InputError(f"{NAME}: {_one_line(error)}; give all values of a column one type") from None
    if isinstance(source, Mapping | bytes) or not isinstance(source, Iterable):
        raise InputError(
            f"source: found {type(source).__name__}, expected a path, an iterable of dicts, or a table of pandas, "
            "polars or pyarrow"
        )
    return _dicts_to_table(source)


def _dicts_to_table(rows: Iterable[Any]) -> pa.Table:
    """Converts dicts to a table that has the columns of all dicts."""
    remaining, blocks, first = iter(rows), [], 1
    while block := list(itertools.islice(remaining, BLOCK_ROWS)):
        for number, row in enumerate(block, first):
            if isinstance(row, str | os.PathLike) and number == 1:
                raise InputError(f"source: found a list with the path {row}, expected one path: a file or a folder")
            if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
                raise InputError(f"{NAME} row {number}: found {row!r}, expected a dict of columns by name")
        names = dict.fromkeys(name for row in block for name in row)
        blocks.append(pa.table({name: _to_column(name, [row.get(name) for row in block], first) for name in names}))
        first += len(block)
    try:
        return pa.concat_tables(blocks, promote_options="permissive") if blocks else pa.table({})
    except pa.ArrowException as error:
        raise InputError(f"{NAME}: {_one_line(error)}; give all values of a column one type") from None


def _to_column(name: str, values: Sequence[Any], first_row: int) -> pa.Array:
    """Converts values to a column; metadata objects become JSON text. first_row: the number of the first row."""
    _check_values(name, values, first_row)
    try:
        if name == METADATA and any(isinstance(value, Mapping) for value in values):
            values = [
                json.dumps(plain_value(value), ensure_ascii=False) if isinstance(value, Mapping) else value
                for value in values
            ]
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        kinds = [type(value) for value in values]
        expected = next(kind for kind in kinds if kind is not type(None))
        number = next((n for n, kind in enumerate(kinds, first_row) if kind not in (expected, type(None))), first_row)
        raise InputError(
            f"{NAME} row {number}: column {name}: {_one_line(error)}; give all values of a column one type"
        ) from None


def _check_values(name: str, values: Iterable[Any], first_row: int) -> None:
    """Raises InputError for a deeply nested value, which would overflow the stack in pyarrow."""
    for number, value in enumerate(values, first_row):
        try:
            check_levels(value)
        except InputError as error:
            raise InputError(f"{NAME} row {number}: column {name}: {error}") from None


def _check_names(names: Sequence[str]) -> None:
    """Raises InputError if two columns have the same name."""
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{NAME}: found two columns {repeated}, expected one of each name; rename or drop one")


def _with_plain_types(table: pa.Table) -> pa.Table:
    """Converts a table to types that do not depend on the source library: no dictionaries, one string type."""
    _check_names(table.column_names)
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_struct(column.type) and not column.type.num_fields:
            continue  # an object without fields has no value, and Parquet cannot store it
        try:
            columns[name] = column.cast(_canonical_arrow_type(column.type))
        except pa.ArrowException as error:
            raise InputError(f"{NAME}: column {name}: {_one_line(error)}; expected another type of values") from None
    return pa.table(columns).combine_chunks()


def _canonical_arrow_type(arrow_type: Any) -> Any:
    """Returns the Arrow type that replaces all variants of a string, list or dictionary type."""
    if pa.types.is_dictionary(arrow_type):
        return _canonical_arrow_type(arrow_type.value_type)
    if pa.types.is_string(arrow_type) or pa.types.is_string_view(arrow_type):
        return pa.large_string()
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type):
        return pa.large_list(_canonical_arrow_type(arrow_type.value_type))
    if pa.types.is_struct(arrow_type):
        return pa.struct([(field.name, _canonical_arrow_type(field.type)) for field in arrow_type])
    return arrow_type


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
