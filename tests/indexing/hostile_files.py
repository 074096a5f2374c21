"""Small files that would take all memory if they were split, parsed or decoded before they are measured."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

MIB = 1 << 20


class Hostile(NamedTuple):
    """A file that must be refused.

    Attributes:
        case: As tests/bad_input.md calls it.
        path: The file, or the folder that holds it.
        reader: What reads it: "corpus", "queries", "qrels", "run" or "delete".
        expected: A part of the message.
    """

    case: str
    path: Path
    reader: str
    expected: str


def zipped(path: Path, start: bytes, repeated: bytes, mib: int, end: bytes = b"\n") -> Path:
    """Writes a text of which the middle is repeated to so many MiB; a gzip member is copied, which takes no time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    step = repeated * (MIB // len(repeated))
    members = (gzip.compress(start), gzip.compress(step, 1) * mib, gzip.compress(end))
    path.write_bytes(b"".join(members))
    return path


TEXTS = [
    # case, file, reader, start, repeated, MiB, end, expected
    ("a CSV header of quotes", "a.csv", "corpus", b"", b'"', 40, b"", ":1: found a row of more than 32 MiB"),
    ("a CSV header of commas", "b.csv", "corpus", b"id,text", b",", 20, b"\n", ":1: found 20,971,522 columns"),
    ("a CSV row of commas", "c.csv", "corpus", b"id,text\na,b\n", b",", 30, b"\n", ":3: found 31,457,281 columns"),
    ("a CSV row that does not end", "d.csv", "corpus", b"id,text\na,b\n", b"0", 300, b"", ":3: found a row of more"),
    (
        "JSON lines with a list of empty lists",
        "e.jsonl",
        "corpus",
        b'{"docid": 1, "text": "x", "m": [[]',
        b",[]",
        10,
        b"]}\n",
        ":1: found JSON with 6,990,508",
    ),
    (
        "JSON lines with a field that comes a million times",
        "f.jsonl",
        "corpus",
        b'{"docid": 1, "text": "x"',
        b',"k":{}',
        30,
        b"}\n",
        ":1: found JSON with ",
    ),
    (
        "a line of JSON that does not end",
        "g.jsonl",
        "corpus",
        b'{"docid": 1, "text": "',
        b"0",
        300,
        b'"}\n',
        ":1: found a row of more than 32 MiB",
    ),
    (
        "a page of KILT with millions of paragraphs",
        "kilt_knowledgesource.json",
        "corpus",
        b'{"wikipedia_id": "1", "wikipedia_title": "t", "text": ["a"',
        b',"ab"',
        10,
        b"]}\n",
        ":1: found JSON with 2,097,",
    ),
    (
        "a line of MS MARCO with millions of columns",
        "collection.tsv",
        "corpus",
        b"1\tx\n2\t",
        b"\t",
        30,
        b"\n",
        ":2: found 31457282 columns",
    ),
    (
        "a line of DPR with millions of columns",
        "psgs_w100.tsv",
        "corpus",
        b"id\ttext\ttitle\n1\t",
        b"\t",
        30,
        b"\tx\n",
        ":2: found 31,457,283 columns",
    ),
    (
        "a query of BEIR with millions of fields",
        "queries.jsonl",
        "queries",
        b'{"_id": "1", "text": "x", "m": [{}',
        b",{}",
        10,
        b"]}\n",
        ":1: found JSON with 6,990,",
    ),
    (
        "judgements with millions of columns",
        "test.tsv",
        "qrels",
        b"q\td\t1\nq",
        b"\t",
        30,
        b"\n",
        ":2: found 31,457,281",
    ),
    ("a run with a line that does not end", "a.run", "run", b"", b"0 ", 300, b"\n", ":1: found a row of more than 32"),
    (
        "a file of ids with a line that does not end",
        "ids",
        "delete",
        b"p0\n",
        b"0",
        300,
        b"\n",
        ":2: found a row of more",
    ),
]


def write_texts(folder: Path) -> list[Hostile]:
    """Writes the text files, compressed. Returns them."""
    found = []
    for case, name, reader, start, repeated, mib, end, expected in TEXTS:
        path = zipped(folder / name.replace(".", "-") / f"{name}.gz", start, repeated, mib, end)
        found.append(Hostile(case, path, reader, expected))
    return found


def _lists(num_rows: int, num_values: int) -> pa.Array:
    """Lists of 0, of which the last is long and the others have one value."""
    offsets = np.append(np.arange(num_rows), num_values).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(num_values, np.int8)))


def _nested(depth: int) -> pa.Array:
    kind: pa.DataType = pa.int8()
    for _ in range(depth):
        kind = pa.struct([("a", kind)])
    return pa.nulls(1, kind)


def _same(num_rows: int, text: str) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int32)), pa.array([text]))


def _ids(num_rows: int) -> pa.Array:
    return pa.array([str(number) for number in range(num_rows)])


def _long(num_rows: int, size: int) -> pa.Array:
    return pa.array(["x" * size] * num_rows, pa.large_string())


PARQUET: list[tuple[str, Callable[[], pa.Table], dict, str]] = [
    (
        "Parquet with one text of 100 MiB",
        lambda: pa.table({"id": _ids(1), "text": _long(1, 100 * MIB)}),
        {"use_dictionary": False},
        "row group 1, column 'text': found a row of 104,857,610 bytes, more than 32 MiB",
    ),
    (
        "Parquet whose rows share a text of 1 MiB",
        lambda: pa.table({"id": _ids(5_000), "text": _same(5_000, "x" * MIB)}),
        {},
        "bytes of text and metadata in the part that begins in",
    ),
    (
        "Parquet whose texts repeat the beginning of the one before",
        lambda: pa.table({"id": _ids(100), "text": _long(100, MIB)}),
        {"use_dictionary": False, "column_encoding": {"id": "PLAIN", "text": "DELTA_BYTE_ARRAY"}},
        "bytes of text and metadata in the part that begins in",
    ),
    (
        "Parquet with a page of 150 MiB",
        lambda: pa.table({"id": _ids(150), "text": _long(150, MIB)}),
        {"use_dictionary": False, "write_batch_size": 1024, "data_page_size": 1 << 30},
        "row group 1, column 'text': found a page of 157,2",
    ),
    (
        "Parquet with a list of 30 million values",
        lambda: pa.table({"id": _ids(500), "text": _ids(500), "m": _lists(500, 30_000_000)}),
        {},
        "column 'm.list.element': found a list of 29,999,501 values, expected at most 1,048,576",
    ),
    (
        "Parquet in pages of version 2 with a list of 5 million values",
        lambda: pa.table({"id": _ids(500), "text": _ids(500), "m": _lists(500, 5_000_000)}),
        {"data_page_version": "2.0"},
        "column 'm.list.element': found a list of 4,999,501 values, expected at most 1,048,576",
    ),
    (
        "Parquet with a schema of 300 levels",
        lambda: pa.table({"id": _ids(1), "text": _ids(1), "m": _nested(300)}),
        {},
        "found a Parquet schema too deeply nested",
    ),
    (
        "Parquet with 10,002 columns",
        lambda: pa.table({"id": _ids(1), "text": _ids(1), **{f"c{number}": [1] for number in range(10_000)}}),
        {},
        "found too many columns, expected at most 10,000",
    ),
]


def write_parquet(folder: Path) -> list[Hostile]:
    """Writes the Parquet files. Returns them."""
    found = []
    for number, (case, table, options, expected) in enumerate(PARQUET):
        path = folder / f"{number}.parquet"
        pq.write_table(table(), path, compression="zstd", **options)
        found.append(Hostile(case, path, "corpus", expected))
    return found


def large_footer(path: Path) -> Path:
    """Writes a Parquet file of 3 MB whose footer has a million columns in a thousand row groups, of three bytes each.

    The schema has one column, so the file is damaged; Arrow notices that after it has allocated all of them.
    """
    struct_list, end = 0x19, b"\0"  # a field that is a list, and the end of a struct, in Thrift's compact protocol
    schema = bytes([struct_list, 0x2C]) + bytes([0x48, 1]) + b"r" + bytes([0x15, 2]) + end
    schema += bytes([0x15, 12, 0x25, 0, 0x18, 1]) + b"a" + end
    sizes = bytes([0x16, 0, 0x16, 0])
    group = bytes([struct_list, 0xFC, 0xE8, 0x07]) + bytes([0x26, 0, 0]) * 1000 + sizes + end
    footer = bytes([0x15, 2]) + schema + bytes([0x16, 0]) + bytes([struct_list, 0xFC, 0xE8, 0x07]) + group * 1000 + end
    path.write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    return path


def wide_rows(path: Path) -> Path:
    """Writes CSV whose metadata repeats long names in every row."""
    text = io.StringIO()
    text.write(",".join(["id", "text", *(f"{number}{'n' * 1000}" for number in range(5000))]) + "\n")
    for number in range(100):
        text.write(f"{number},x{',ab' * 5000}\n")
    path.write_bytes(gzip.compress(text.getvalue().encode(), 1))
    return path
