"""Finding out a corpus's format, and cutting it into chunks: compared with splitting the whole file at once."""

import csv
import gzip
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_files import DATA, write

from riptide.base.errors import InputError
from riptide.indexing.files import raw
from riptide.indexing.formats import chunking
from riptide.indexing.formats.beir import BEIR
from riptide.indexing.formats.chunking import cut_into_chunks
from riptide.indexing.formats.parquet import PARQUET
from riptide.indexing.formats.parse import parse_corpus
from riptide.indexing.formats.sources import ImportSource, detect_query_source, detect_source
from riptide.indexing.store.store import open_storage

BEIR_LINE = '{"_id": "a", "text": "x"}\n'


def beir(*files: Path) -> ImportSource:
    return ImportSource(BEIR, "x", tuple(map(str, files)), (), {})


def raw_lines(source: ImportSource, rows_per_chunk: int, limit: int | None = None) -> list[tuple[str, int, bytes]]:
    """(file, line number, line) of all chunks, after checking what a chunk promises."""
    found, first_row = [], 0
    for index, chunk in enumerate(cut_into_chunks(source, rows_per_chunk, limit=limit)):
        assert (chunk.index, chunk.first_row) == (index, first_row)
        assert chunk.rows == sum(piece.rows for piece in chunk.pieces) <= rows_per_chunk
        for piece in chunk.pieces:
            assert piece.data is not None
            lines = piece.data.split(b"\n")
            assert len(lines) == piece.rows
            found += [(piece.file, number, line) for number, line in enumerate(lines, piece.first_line)]
        first_row += chunk.rows
        assert chunk.first_row == index * rows_per_chunk
    return found


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64, 1 << 20])
def test_chunks_of_every_size_give_the_same_lines(tmp_path, monkeypatch, block):
    """Whatever the sizes of chunks and read blocks, and over the ends of files, plain or zipped, CRLF, BOM, U+2028."""
    monkeypatch.setattr(raw, "BLOCK", block)
    generator = random.Random(block)
    words = ["a", "\u2028", "\u0085", "é", "\x0b", "\x1c", "\r", "語", "🙂", " "]
    texts = ["x" + "".join(generator.choices(words, k=generator.randrange(9))) + "y" for _ in range(23)]
    first, second, third = texts[:9], texts[9:10], texts[10:]
    files = [
        write(tmp_path / "a.jsonl", "\ufeff" + "\r\n".join(first) + "\r\n\n\r\n"),
        write(tmp_path / "empty.jsonl", "\n\n"),
        write(tmp_path / "b.jsonl", second[0]),
        write(tmp_path / "c.jsonl.gz", "\n".join(third) + "\n"),
    ]
    expected = [
        (str(file), number, text)
        for file, lines in ((files[0], first), (files[2], second), (files[3], third))
        for number, text in enumerate(lines, 1)
    ]
    for size in range(1, 26):
        for limit in (None, 1, 9, 10, 22, 40):
            found = [
                (file, number, line.decode().removesuffix("\r"))
                for file, number, line in raw_lines(beir(*files), size, limit)
            ]
            assert found == expected[:limit]


def test_empty_lines_within_a_file_stay_for_the_parse_to_refuse(tmp_path):
    file = write(tmp_path / "a.jsonl", "\na\n\n\nb\n\n\n")
    assert [line for *_, line in raw_lines(beir(file), 2)] == [b"", b"a", b"", b"", b"b"]
    for size in range(1, 6):
        with pytest.raises(InputError, match=r"a\.jsonl:1: found an empty line"):
            [parse_corpus(BEIR, chunk) for chunk in cut_into_chunks(beir(file), size)]


def test_the_last_chunk_ends_at_the_limit_and_the_others_do_not_change(tmp_path):
    file = write(tmp_path / "a.jsonl", BEIR_LINE * 10)
    everything = list(cut_into_chunks(beir(file), 4))
    limited = list(cut_into_chunks(beir(file), 4, limit=6))
    assert limited[0] == everything[0]
    assert [chunk.rows for chunk in limited] == [4, 2]
    assert [chunk.rows for chunk in cut_into_chunks(beir(file), 4, limit=8)] == [4, 4]
    for bad in ((0, None), (4, 0)):
        with pytest.raises(InputError, match="expected at least 1"):
            list(cut_into_chunks(beir(file), bad[0], limit=bad[1]))


def cut(files: list[list[bytes]], most_rows: int, most_bytes: int) -> list[list[tuple[int, int, bytes]]]:
    """(file, 1-based first line, lines) of each chunk's pieces, line by line."""
    found, held, size = [[]], 0, 0
    for file, lines in enumerate(files):
        for number, line in enumerate(lines, 1):
            pieces = found[-1]
            if pieces and pieces[-1][0] == file:
                pieces[-1] = (*pieces[-1][:2], pieces[-1][2] + b"\n" + line)
                size += 1 + len(line)
            else:
                pieces.append((file, number, line))
                size += len(line)
            held += 1
            if held == most_rows or size >= most_bytes:
                found.append([])
                held = size = 0
    return [pieces for pieces in found if pieces]


@pytest.mark.parametrize("block", [1, 3, 7, 64, 1 << 20])
def test_a_chunk_of_long_rows_ends_with_the_row_that_makes_its_bytes(tmp_path, monkeypatch, block):
    """Wherever blocks and files end, as counted line by line; and what is below the bound is cut by rows alone."""
    monkeypatch.setattr(raw, "BLOCK", block)
    generator = random.Random(0)
    texts = [b"x" * generator.choice([0, 1, 5, 20, 100]) + b"y" for _ in range(40)]
    texts[7:9] = [b"", b""]
    files = [texts[:15], texts[15:16], texts[16:]]
    names = [str(write(tmp_path / f"{n}.jsonl.gz", b"\n".join(lines) + b"\n")) for n, lines in enumerate(files)]
    whole = list(cut_into_chunks(beir(*map(Path, names)), 6))
    for most_bytes in (1, 2, 21, 22, 50, 300, 10_000):
        monkeypatch.setattr(chunking, "CHUNK_BYTES", most_bytes)
        for most_rows in (1, 2, 6, 100):
            found = list(cut_into_chunks(beir(*map(Path, names)), most_rows))
            pieces = [[(names.index(p.file), p.first_line, p.data) for p in chunk.pieces] for chunk in found]
            assert pieces == cut(files, most_rows, most_bytes)
            assert [p.size for chunk in found for p in chunk.pieces] == [len(p[2]) for each in pieces for p in each]
            assert [chunk.first_row for chunk in found] == [sum(c.rows for c in found[:n]) for n in range(len(found))]
    assert list(cut_into_chunks(beir(*map(Path, names)), 6)) == whole


def test_parquet_is_cut_by_the_bytes_that_its_footer_tells(tmp_path, monkeypatch):
    """About CHUNK_BYTES each, every row once, over row groups and files; short rows by their number as before."""
    texts = [random.Random(n).randbytes(5_000 if n < 40 else 50).hex() for n in range(100)]
    for name, rows in (("a", slice(0, 60)), ("b", slice(60, 100))):
        table = pa.table({"id": [str(n) for n in range(100)][rows], "text": texts[rows]})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=20)
    assert [chunk.rows for chunk in cut_into_chunks(detect_source(str(tmp_path)), 30)] == [30, 30, 30, 10]
    monkeypatch.setattr(chunking, "CHUNK_BYTES", 70_000)
    found = list(cut_into_chunks(detect_source(str(tmp_path)), 30))
    assert [chunk.rows for chunk in found] == [7, 7, 7, 7, 7, 30, 30, 5]
    tables = [parse_corpus(PARQUET, chunk) for chunk in found]
    assert max(sum(map(len, table["text"].to_pylist())) for table in tables) < 80_000
    assert pa.concat_tables(tables)["id"].to_pylist() == [str(n) for n in range(100)]


def test_chunks_stream(tmp_path, monkeypatch):
    """The first chunk is there before more than a few blocks are read."""
    file = write(tmp_path / "a.jsonl.gz", BEIR_LINE * 200_000)
    read = []
    original = raw._read_block
    monkeypatch.setattr(raw, "_read_block", lambda stream, name: read.append(1) or original(stream, name))
    first = next(cut_into_chunks(beir(file), 1000))
    assert first.rows == 512
    assert len(read) == 1


def test_no_rows_and_unreadable_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="found no rows"):
        list(cut_into_chunks(beir(write(tmp_path / "a.jsonl", "\n")), 5))
    with pytest.raises(InputError, match=r"none\.jsonl: found nothing readable"):
        list(cut_into_chunks(beir(tmp_path / "none.jsonl"), 5))
    with pytest.raises(InputError, match=r"none: found nothing, expected a folder or a file"):
        detect_source(str(tmp_path / "none"))
    whole = gzip.compress(random.Random(0).randbytes(1000).hex().encode() + b"\n")
    broken = {"short": whole[:-12], "damaged": whole[:200] + b"\xff\xfe\xfd" + whole[203:], "plain": b"no gzip"}
    for name, data in broken.items():
        (tmp_path / f"{name}.jsonl.gz").write_bytes(data)
        with pytest.raises(InputError, match=rf"{name}\.jsonl\.gz: found (a gzip stream that breaks off|damaged gzip)"):
            list(cut_into_chunks(beir(tmp_path / f"{name}.jsonl.gz"), 5))


def test_folders_are_recognised(tmp_path):
    write(tmp_path / "beir.v1/corpus.jsonl.gz", BEIR_LINE)
    write(tmp_path / "beir.v1/queries.jsonl", BEIR_LINE)
    write(tmp_path / "beir.v1/qrels/test.tsv", "query-id\tcorpus-id\tscore\n")
    write(tmp_path / "beir.v1/qrels/dev.tsv", "query-id\tcorpus-id\tscore\n")
    folder = str(tmp_path / "beir.v1")
    source = detect_source(folder + "/")
    assert source == ImportSource(
        BEIR,
        "beir.v1",
        (f"{folder}/corpus.jsonl.gz",),
        (f"{folder}/queries.jsonl",),
        {"dev": f"{folder}/qrels/dev.tsv", "test": f"{folder}/qrels/test.tsv"},
    )
    assert detect_query_source(folder) == ImportSource(BEIR, "beir.v1", (), source.queries, source.qrels)

    for name in ("collection.tsv", "queries.train.tsv", "queries.dev.small.tsv", "qrels.dev.small.tsv"):
        write(tmp_path / "marco" / name, "1\tx\n")
    source = detect_source(str(tmp_path / "marco"))
    assert (source.format.name, source.qrels) == ("msmarco", {"dev.small": f"{tmp_path}/marco/qrels.dev.small.tsv"})
    assert [Path(file).name for file in source.queries] == ["queries.dev.small.tsv", "queries.train.tsv"]

    write(tmp_path / "dpr/psgs_w100.tsv.gz", "id\ttext\ttitle\n1\tx\ty\n")
    assert detect_source(str(tmp_path / "dpr")).format.name == "dpr"
    write(tmp_path / "kilt/kilt_knowledgesource.json", "{}")
    assert detect_source(str(tmp_path / "kilt")).format.name == "kilt"
    (tmp_path / "parquet").mkdir()
    table = pa.table({"id": ["a"], "text": ["x"]})
    for name in ("part-1.parquet", "part-0.parquet"):
        pq.write_table(table, tmp_path / "parquet" / name)
    source = detect_source(str(tmp_path / "parquet"))
    assert [Path(file).name for file in source.corpus] == ["part-0.parquet", "part-1.parquet"]


def test_unknown_and_ambiguous_folders_are_refused(tmp_path):
    write(tmp_path / "corpus.rtf", "x")
    with pytest.raises(InputError, match=r"found no corpus among corpus\.rtf, expected one of the formats csv.*/FILE$"):
        detect_source(str(tmp_path))
    with pytest.raises(InputError, match=r"found no queries among corpus\.rtf, expected queries\.csv.*\(beir\)"):
        detect_query_source(str(tmp_path))
    with pytest.raises(InputError, match=r"ending \.rtf, expected \.csv"):
        detect_source(str(tmp_path / "corpus.rtf"))
    write(tmp_path / "shop.csv", "id,text")
    with pytest.raises(InputError, match=r"found no corpus .*; name the file itself, as .*/shop\.csv$"):
        detect_source(str(tmp_path))
    (tmp_path / "shop.csv").unlink()
    with pytest.raises(InputError, match=r"found format .xml., expected auto, csv, tsv, jsonl, parquet, beir"):
        detect_source(str(tmp_path), "xml")
    write(tmp_path / "corpus.jsonl", BEIR_LINE)
    write(tmp_path / "collection.tsv", "1\tx\n")
    with pytest.raises(InputError, match=r"several corpora .*beir.*msmarco"):
        detect_source(str(tmp_path))
    assert detect_source(str(tmp_path), "msmarco").format.name == "msmarco"
    write(tmp_path / "corpus.jsonl.gz", BEIR_LINE)
    with pytest.raises(InputError, match=r"corpus\.jsonl and corpus\.jsonl\.gz, expected one"):
        detect_source(str(tmp_path), "beir")


@pytest.mark.parametrize(
    ("name", "text", "corpus", "queries"),
    [
        ("a.jsonl", '{"_id": "1", "text": "x"}\n', "beir", "beir"),
        ("a.jsonl.gz", '{"_id": "1", "text": "x"}\n', "beir", "beir"),
        ("a.json", '{"wikipedia_id": "1", "wikipedia_title": "t", "text": []}\n', "kilt", None),
        ("a.jsonl", '{"id": "1", "input": "x", "output": []}\n', None, "kilt"),
        ("a.tsv", "1\tx\n", "msmarco", "msmarco"),
        ("a.tsv.gz", "id\ttext\ttitle\n1\tx\ty\n", "dpr", None),
        ("a.qa.csv", "who?\t['me', \"it's\"]\n", None, "dpr"),
        ("a.csv", 'who?\t"[""it\'s""]"\r\n', None, "dpr"),
    ],
)
def test_single_files_are_recognised(tmp_path, name, text, corpus, queries):
    file = str(write(tmp_path / name, text))
    if corpus:
        source = detect_source(file)
        assert (source.format.name, source.corpus, source.queries) == (corpus, (file,), ())
    if queries:
        source = detect_query_source(file)
        assert (source.format.name, source.corpus, source.queries) == (queries, (), (file,))


def test_a_long_first_line_is_recognised(tmp_path):
    """Longer than the fields that Python's csv takes unless told."""
    csv.field_size_limit(131_072)
    assert detect_source(str(write(tmp_path / "a.tsv", "1\t" + "x" * 200_000))).format.name == "msmarco"


def test_dpr_needs_its_header(tmp_path):
    file = write(tmp_path / "psgs_w100.tsv", "1\tx\ty\n")
    with pytest.raises(InputError, match=r"psgs_w100\.tsv:1: found '1\\tx\\ty', expected DPR's header"):
        list(cut_into_chunks(detect_source(str(tmp_path)), 5))
    write(file, "id\ttext\ttitle\n")
    with pytest.raises(InputError, match="found no rows"):
        list(cut_into_chunks(detect_source(str(tmp_path)), 5))


def test_scifact_has_its_published_counts():
    if not (DATA / "scifact").is_dir():
        pytest.skip(f"needs SciFact in BEIR's form in {DATA / 'scifact'}")
    source = detect_source(str(DATA / "scifact"))
    assert (source.format.name, source.name, sorted(source.qrels)) == ("beir", "scifact", ["test", "train"])
    sizes = [chunk.rows for chunk in cut_into_chunks(source, 1000)]
    assert sizes == [512] * 10 + [63]


def test_a_cloud_is_read_like_a_folder(tmp_path, cloud_url):
    put = open_storage(cloud_url).put
    text = "".join(f'{{"_id": "{n}", "text": "x"}}\n' for n in range(7))
    put("a/b/corpus.jsonl.gz", gzip.compress(text.encode()))
    put("a/b/qrels/test.tsv", b"query-id\tcorpus-id\tscore\n")
    put("a/b/deep/er/x.jsonl", b"{}")
    pq.write_table(pa.table({"id": ["p", "q", "r"], "text": ["x", "y", "z"]}), tmp_path / "x.parquet")
    put("c/x.parquet", (tmp_path / "x.parquet").read_bytes())

    source = detect_source(f"{cloud_url}/a/b/")
    assert source.corpus == (f"{cloud_url}/a/b/corpus.jsonl.gz",)
    assert (source.name, source.qrels) == ("b", {"test": f"{cloud_url}/a/b/qrels/test.tsv"})
    found = [parse_corpus(BEIR, chunk)["id"].to_pylist() for chunk in cut_into_chunks(source, 3)]
    assert found == [["0", "1", "2"], ["3", "4", "5"], ["6"]]
    tables = [parse_corpus(PARQUET, chunk) for chunk in cut_into_chunks(detect_source(f"{cloud_url}/c"), 2)]
    assert [table["id"].to_pylist() for table in tables] == [["p", "q"], ["r"]]
    put("d/corpus.csv.gz", gzip.compress(b'pid,body\np,"x\ny"\nq,z\n'))
    put("d/queries.dev.tsv", b"qid\tquery\tpid\n1\twho?\tq\n")
    source = detect_source(f"{cloud_url}/d")
    [table] = [parse_corpus(source.format, chunk) for chunk in cut_into_chunks(source, 10)]
    assert table.select(["id", "text"]).to_pylist() == [{"id": "p", "text": "x\ny"}, {"id": "q", "text": "z"}]
    assert source.query_source.qrels == {"dev": f"{cloud_url}/d/queries.dev.tsv"}
    with pytest.raises(InputError, match=f"{cloud_url}/none: found nothing"):
        detect_source(f"{cloud_url}/none")
