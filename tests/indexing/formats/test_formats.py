"""MS MARCO, DPR, KILT and Parquet: what is written in each comes back, and an unfit row is refused with its place."""

import csv
import io
import json
import random
import subprocess
import sys
from datetime import UTC, date, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_files import ODD, jsonl, odd_text, passages, refused, write

from riptide.base.errors import InputError
from riptide.indexing.files.parquet_rows import parquet_blocks
from riptide.indexing.formats.chunking import cut_into_chunks
from riptide.indexing.formats.parse import CORPUS_SCHEMA
from riptide.indexing.formats.sources import detect_source


def test_msmarco_round_trip(tmp_path):
    generator = random.Random(3)
    texts = [odd_text(generator, ("\r",)) + "." for _ in range(100)]
    data = "".join(f"{n}\t{text}\r\n" for n, text in enumerate(texts))
    for size in (1, 9, 1000):
        table = passages("msmarco", write(tmp_path / "collection.tsv", data), size)
        assert table["id"].to_pylist() == [str(n) for n in range(100)]
        assert table["text"].to_pylist() == texts
        assert set(table["title"].to_pylist()) == {""}


def test_bad_tsv_lines_are_named(tmp_path):
    file = tmp_path / "collection.tsv"
    good = "1\tx\n2\tx\n3\tx\n"
    refused(
        file,
        good + "4\tx\ty\n",
        "msmarco",
        r"collection\.tsv:4: found 3 columns \('4\\tx\\ty'\), expected 2: id<TAB>text",
    )
    refused(file, good + "4\n", "msmarco", r"collection\.tsv:4: found 1 columns")
    refused(file, good + "\n4\tx\n", "msmarco", r"collection\.tsv:4: found an empty line")
    refused(file, good + "\tx\n", "msmarco", r"collection\.tsv:4: found id ''")
    for size in (1, 2, 5):
        pattern = r":4: found invalid UTF-8 \(byte 0xe2 at byte offset 2 of"
        refused(file, good.encode() + b"4\t\xe2\x82\n5\tx\n6\tx", "msmarco", pattern, size)


def test_dpr_round_trip_with_the_csv_module(tmp_path):
    """Written by Python's csv writer and read as its reader reads, which is what DPR does; \\r within quotes only."""
    generator = random.Random(5)
    rows = [[str(n), odd_text(generator, ("\t", "\r")), odd_text(generator)] for n in range(100)]
    rows[30][1] = "".join(generator.choices(ODD, k=400_000))  # over csv's own limit of 128 KiB
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter="\t", lineterminator="\r\n")
    writer.writerows([["id", "text", "title"], *rows])
    file = write(tmp_path / "psgs_w100.tsv", text.getvalue())
    for size in (1, 13, 1000):
        table = passages("dpr", file, size)
        found = zip(*(table[name].to_pylist() for name in ("id", "text", "title")), strict=True)
        assert [list(row) for row in found] == rows


def test_bad_dpr_lines_are_named(tmp_path):
    file, header = tmp_path / "psgs_w100.tsv", "id\ttext\ttitle\n"
    refused(file, header + "1\tx\ty\n2\tx\n", "dpr", r"tsv:3: found 2 columns .*, expected 3: id<TAB>text<TAB>title")
    refused(
        file,
        header + '1\tx\ty\n2\t"x\n3\ty\tz\n',
        "dpr",
        r"tsv:3: found a quoted field that does not end in its line",
        5,
    )
    refused(
        file, header + '1\tx\ty\n2\tx\t"y\n', "dpr", r"tsv:3: found a quoted field that does not end in its line", 1
    )
    problem = "tsv:3: found a carriage return outside of quotes, expected none; remove it"
    refused(file, header + "1\tx\ty\n2\tx\rz\ty\n", "dpr", problem)


PAGES = [
    {
        "_id": "5",
        "wikipedia_id": "5",
        "wikipedia_title": "T",
        "text": ["T\n", "one\n", " \n", "Section::::S.\n", " two\u2028\n"],
        "anchors": [],
    },
    {"_id": "6", "wikipedia_id": 6, "wikipedia_title": "U", "text": ["U\n"], "categories": ""},
    {"_id": "7", "wikipedia_id": "7", "wikipedia_title": "V", "text": ["V\n", "BULLET::::- three"]},
]


def test_kilt_pages_become_paragraphs(tmp_path):
    file = jsonl(tmp_path / "kilt_knowledgesource.json", PAGES)
    assert [(chunk.first_row, chunk.rows) for chunk in cut_into_chunks(detect_source(str(file)), 2)] == [
        (None, 2),
        (None, 1),
    ]
    for size in (1, 2, 3):
        table = passages("kilt", file, size, paragraph="int64")
        assert table["filter.paragraph"].to_pylist() == [1, 4, 1]
        assert table.drop_columns("filter.paragraph").to_pylist() == [
            {"id": "5-1", "title": "T", "text": "one", "metadata": '{"wikipedia_id":"5","paragraph":1}'},
            {
                "id": "5-4",
                "title": "T",
                "text": " two\u2028",
                "metadata": '{"wikipedia_id":"5","paragraph":4,"section":"S."}',
            },
            {"id": "7-1", "title": "V", "text": "BULLET::::- three", "metadata": '{"wikipedia_id":"7","paragraph":1}'},
        ]


def test_bad_kilt_pages_are_named(tmp_path):
    good = json.dumps(PAGES[0])
    cases = {
        '{"wikipedia_title": "T", "text": []}': "no wikipedia_id",
        '{"wikipedia_id": "1", "text": []}': "no wikipedia_title",
        '{"wikipedia_id": "1", "wikipedia_title": "T", "text": "T"}': "text 'T', expected a list of strings",
        '{"wikipedia_id": "1", "wikipedia_title": "T", "text": ["T", 1]}': "text .*, expected a list of strings",
    }
    for line, pattern in cases.items():
        refused(tmp_path / "k.json", f"{good}\n{good}\n{line}\n", "kilt", rf"k\.json:3: found {pattern}")


def test_parquet_ranges_over_row_groups_and_files(tmp_path):
    """Any chunk size against any layout of row groups gives the rows, with the other columns as metadata."""
    generator = random.Random(11)
    rows = [
        {"id": n, "text": odd_text(generator), "year": n if n % 2 else None, "title": None if n % 5 else "t"}
        for n in range(61)
    ]
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    pq.write_table(pa.Table.from_pylist(rows[:37]), files[0], row_group_size=8)
    pq.write_table(pa.Table.from_pylist(rows[37:]), files[1], row_group_size=100)
    for size in (1, 5, 8, 20, 37, 61, 100):
        table = passages("parquet", files, size, year="int64")
        assert table.drop_columns("filter.year").schema == CORPUS_SCHEMA
        assert table["id"].to_pylist() == [str(row["id"]) for row in rows]
        assert table["text"].to_pylist() == [row["text"] for row in rows]
        assert table["title"].to_pylist() == [row["title"] or "" for row in rows]
        assert table["metadata"].to_pylist() == [
            "" if row["year"] is None else f'{{"year":{row["year"]}}}' for row in rows
        ]
        assert table["filter.year"].to_pylist() == [row["year"] for row in rows]


def test_parquet_columns_of_many_types(tmp_path):
    table = pa.table(
        {
            "_id": pa.array(["a", "b"]).dictionary_encode(),
            "text": pa.array(["x", "y"], pa.large_string()),
            "day": [date(2020, 1, 2), None],
            "when": pa.array([datetime(2020, 1, 2), None], pa.timestamp("ns")),
            "tags": [["p", "q"], None],
            "metadata": ['{"lang": "é"}', ""],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    found = passages("parquet", tmp_path / "a.parquet", day="timestamp", when="timestamp", lang="string")
    metadata = [json.loads(text or "{}") for text in found["metadata"].to_pylist()]
    assert metadata[1] == {}
    assert (metadata[0]["lang"], metadata[0]["day"], metadata[0]["tags"]) == ("é", "2020-01-02", ["p", "q"])
    assert metadata[0]["when"].startswith("2020-01-02")
    assert (
        found["filter.day"].to_pylist() == found["filter.when"].to_pylist() == [datetime(2020, 1, 2, tzinfo=UTC), None]
    )


def test_bad_parquet_is_named(tmp_path):
    file = tmp_path / "a.parquet"
    cases = [
        ({"id": ["a"], "body": ["x"]}, r"a\.parquet: found the columns id, body, expected id or _id, and text"),
        ({"text": ["a"]}, r"found the column text, expected id or _id"),
        ({"id": ["a", "b", None], "text": ["x"] * 3}, r"a\.parquet row 3: found no id"),
        ({"id": ["a", "b", "c"], "text": ["x", "y", None]}, r"a\.parquet row 3: found no text"),
        ({"id": ["a"], "text": [5]}, r"a\.parquet row 1: found text 5, expected text to be a string"),
        ({"id": ["a"], "text": ["x"], "raw": [b"x"]}, r"a\.parquet row 1: found metadata that JSON cannot hold"),
        (
            {"id": ["a"], "text": ["x"], "metadata": ["m"]},
            r"a\.parquet row 1: found metadata 'm' .*, expected a JSON object",
        ),
    ]
    for columns, pattern in cases:
        pq.write_table(pa.table(columns), file)
        for size in (1, 5):
            with pytest.raises(InputError, match=pattern):
                passages("parquet", file, size)
    pq.write_table(pa.table({"id": ["a"], "text": [b"x"]}), file)
    with pytest.raises(InputError, match=r"row 1: found text .*, expected text to be a string"):
        passages("parquet", file)
    pq.write_table(pa.table({"id": ["a"], "text": pa.array([b"\xff"]).view(pa.string())}), file)
    with pytest.raises(InputError, match=r"a\.parquet row 1: found invalid UTF-8"):
        passages("parquet", file)
    whole = file.read_bytes()
    refused(file, whole[:-7], "parquet", r"a\.parquet: found no Parquet")
    refused(file, b"", "parquet", r"a\.parquet: found no Parquet")


LARGE = [f"{n:03d}" + "c" * 99_997 for n in range(400)]  # 40 MB, more than a row may have


@pytest.mark.parametrize(
    "column",
    [
        pa.array([LARGE[n % 400] for n in range(500)]).dictionary_encode(),
        pa.array([["token"] * 60_000, ["x" * 3_000], None] + [["a"]] * 497),
        pa.array([{"a": LARGE[n % 2], "b": [n, None]} for n in range(500)]),
        pa.array([[("key", LARGE[0])], None] * 250, pa.map_(pa.string(), pa.string())),
        pa.array(["short"] * 499 + ["x" * 5_000_000]),
    ],
    ids=["dictionary", "lists", "structs", "maps", "a long text"],
)
def test_values_that_are_large_together_and_not_in_a_row_are_read(tmp_path, column):
    """As pandas, Spark and Hugging Face write them; each row is small, and the longest values are in different rows."""
    table = pa.table({"id": [str(n) for n in range(500)], "text": ["a"] * 500, "more": column})
    pq.write_table(table, tmp_path / "a.parquet")
    [chunk] = cut_into_chunks(detect_source(str(tmp_path / "a.parquet")), 1_000)
    found = [row for piece in chunk.pieces for block in parquet_blocks(piece) for row in block.batch.to_pylist()]
    assert found == table.to_pylist()


PEAK = """
import sys
import pyarrow as pa
from riptide.indexing.files import parquet_rows
from riptide.indexing.formats import chunking
from riptide.indexing.formats.parquet import PARQUET
from riptide.indexing.formats.sources import detect_source
from riptide.indexing.formats.parse import parse_corpus
parquet_rows.WHOLE_BYTES = chunking.CHUNK_BYTES = 2_000_000
parquet_rows.BUFFER_BYTES = 1 << 20
found = list(chunking.cut_into_chunks(detect_source(sys.argv[1]), 1_000))
ids = [parse_corpus(PARQUET, found[index])["id"].to_pylist() for index in (0, 20, 31)]
print(len(found), ids, pa.default_memory_pool().max_memory())
"""


def test_long_rows_of_one_row_group_are_read_a_chunk_at_a_time(tmp_path):
    """Arrow holds some chunks of 2 MB, in a process of its own, not the row group of 64 MB, however many its rows."""
    table = pa.table(
        {"id": [str(n) for n in range(64)], "text": [random.Random(n).randbytes(500_000).hex() for n in range(64)]}
    )
    pq.write_table(table, tmp_path / "x.parquet", compression="none", use_dictionary=False, write_batch_size=1)
    assert pq.read_metadata(tmp_path / "x.parquet").num_row_groups == 1
    command = [sys.executable, "-c", PEAK, str(tmp_path / "x.parquet")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    start = "32 [['0', '1'], ['40', '41'], ['62', '63']] "
    assert printed.startswith(start)
    assert 2_000_000 < int(printed.removeprefix(start)) < 16_000_000
