"""Runs as tables and as files."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from riptide.base.errors import InputError
from riptide.indexing.exact import Hits
from riptide.indexing.search.run_files import read_run_file, strictly_falling, write_json_lines, write_trec
from riptide.indexing.search.runs import SCHEMA, hits_table, read_run, write_parquet
from riptide.indexing.store.store import Store


def table(rows: list[tuple[str, str, int, float]]) -> pa.Table:
    return pa.table([list(column) for column in zip(*rows, strict=True)], schema=SCHEMA)


def test_no_hit_is_no_row() -> None:
    hits = Hits(
        np.array([[3, 2, -np.inf], [1, -np.inf, -np.inf], [-np.inf] * 3], np.float32),
        np.array([[7, 5, -1], [0, -1, -1], [-1, -1, -1]]),
    )
    ids = np.array([["g", "e", ""], ["a", "", ""], ["", "", ""]], object)
    assert (
        hits_table(["x", "y", "z"], hits, ids).to_pylist()
        == table([("x", "g", 7, 3), ("x", "e", 5, 2), ("y", "a", 0, 1)]).to_pylist()
    )


def test_a_run_reads_back_block_by_block(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    blocks = [table([("q1", "é 語", 4, 0.5)]), table([("q2", "b", 1, 0.25), ("q2", "a", 0, -1e-30)])]
    with store.create("runs", "r") as draft:
        for number, block in enumerate(blocks):
            draft.commit(
                f"part-{number:05d}", ".parquet", lambda path, b=block: write_parquet(b, path), rows=len(block)
            )
    assert list(read_run(store.open("runs", "r"))) == blocks


def test_falling_keeps_the_order_and_changes_no_more_than_it_must() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        lengths = draw.integers(1, 30, 5)
        scores = np.concatenate([np.sort(draw.integers(-3, 3, n))[::-1] for n in lengths]).astype(np.float32) / 7
        ranks = np.concatenate([np.arange(n) for n in lengths])
        expected = scores.copy()
        for at in range(1, len(scores)):  # the specification, one by one
            if ranks[at] and expected[at] >= expected[at - 1]:
                expected[at] = np.nextafter(expected[at - 1], np.float32(-np.inf))
        found = strictly_falling(scores, ranks)
        assert found.dtype == np.float32
        assert found.tobytes() == expected.tobytes()
        for start in np.flatnonzero(ranks == 0):
            mine = found[start : start + 1 + int(np.argmin(np.append(ranks[start + 1 :], 0) > 0))]
            assert (np.diff(mine) < 0).all()
    assert strictly_falling(np.empty(0, np.float32), np.empty(0, np.int64)).tolist() == []


def test_printed_scores_read_back_as_they_are_and_in_order(tmp_path: Path) -> None:
    scores = np.array([0.1, 0.1, 1e-8, 0.0, -0.0, -3.4e38], np.float32)
    rows = [("q", f"p{n}", n, float(score)) for n, score in enumerate(scores)] + [("r", "p", 9, 5.0)]
    write_trec([table(rows)], str(tmp_path / "a/b/run.trec"), "tag")
    lines = (tmp_path / "a/b/run.trec").read_text().splitlines()
    assert lines[0] == f"q Q0 p0 1 {float(np.float32(0.1))} tag"
    assert lines[-1] == "r Q0 p 1 5.0 tag"
    found = read_run_file(str(tmp_path / "a/b/run.trec"))
    assert found["query_id"].to_pylist() == ["q"] * 6 + ["r"]
    assert found["id"].to_pylist() == [*(f"p{n}" for n in range(6)), "p"]
    printed = np.array(found["score"].to_pylist()[:6], np.float32)
    assert printed.tobytes() == strictly_falling(scores, np.arange(6)).tobytes()
    assert (np.diff(printed) < 0).all()
    assert [path.name for path in (tmp_path / "a/b").iterdir()] == ["run.trec"]


@pytest.mark.parametrize(
    "bad", [("two words", "p"), ("q", "p 1"), ("q", "tab\tbed"), ("", "p"), ("q", ""), ("q", "\u2028")]
)
def test_ids_that_trec_cannot_hold_leave_no_file(tmp_path: Path, bad: tuple[str, str]) -> None:
    rows = [("q0", "p0", 0, 1.0), (*bad, 1, 0.5)]
    with pytest.raises(
        InputError, match=r"run\.trec: the (query|passage) id .* is empty or has white space, which TREC"
    ):
        write_trec([table(rows)], str(tmp_path / "run.trec"), "tag")
    assert list(tmp_path.iterdir()) == []


def test_json_lines_hold_any_id_and_the_scores_of_a_trec_file(tmp_path: Path) -> None:
    rows = [
        ("two words", "p 1", 0, 0.1),
        ("two words", 'tab\t"', 1, 0.1),
        ("", "\u2028é", 2, -3.4e38),
        ("q", "p", 3, 1e-8),
    ]
    path = tmp_path / "run.jsonl"
    write_json_lines([table(rows)], str(path))
    assert (
        path.read_text().split("\n")[0]
        == '{"query_id": "two words", "id": "p 1", "rank": 1, "score": 0.10000000149011612}'
    )
    assert [json.loads(line)["rank"] for line in path.read_text().split("\n")[:-1]] == [1, 2, 1, 1]
    found = read_run_file(str(path))
    assert list(zip(found["query_id"].to_pylist(), found["id"].to_pylist(), strict=True)) == [row[:2] for row in rows]
    expected = strictly_falling(np.array([row[3] for row in rows], np.float32), np.array([0, 1, 0, 0]))
    assert np.array(found["score"], np.float32).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"query_id": "q", "id": "p", "score": 1}\n{"query_id": "q", "id": 7, "score": 1}\n', ":2: found '{"),
        ('{"query_id": "q", "id": "p", "score": "1"}\n', ":1: found '{"),
        ('{"query_id": "q", "id": "p"\n', ":1: "),
        ('{"query_id": "q", "id": "p", "score": 1}\n' * 2, ":2: passage 'p' comes a second time for query 'q'"),
    ],
)
def test_a_bad_file_of_json_lines_is_named_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_run_file(str(path))
    assert str(error.value).startswith(f"{path}{expected}")


def test_an_export_that_fails_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "run.trec"
    write_trec([table([("q", "p", 0, 1.0)])], str(path), "tag")
    with pytest.raises(InputError):
        write_trec([table([("q q", "p", 0, 1.0)])], str(path), "tag")
    assert path.read_text() == "q Q0 p 1 1.0 tag\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q Q0 p 1 0.5 tag\nq Q0 p\n", ":2: found 'q Q0 p', expected `query Q0 passage rank score tag`"),
        ("q Q0 p 1 high tag\n", ":1: found"),
        ("q Q0 p 1 nan tag\n", ":1: found"),
        ("q Q0 p 1 0.5 tag\n\nq Q0 r 1 0.5 tag\n", ":2: found an empty line"),
        ("q Q0 p 1 2 t\nq Q0 r 2 1 t\nq Q0 p 3 0 t\n", ":3: passage 'p' comes a second time for query 'q'"),
        ("", ": the run is empty"),
    ],
)
def test_a_bad_trec_file_is_named_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "run.trec"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_run_file(str(path))
    assert str(error.value).startswith(f"{path}{expected}")


def test_a_trec_file_may_be_zipped_end_with_crlf_and_separate_by_tabs(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "run.trec.gz").write_bytes(gzip.compress("q\tQ0\tp\t1\t-1e3\ttag\r\né Q0  語 1 2 tag\r\n".encode()))
    assert read_run_file(str(tmp_path / "run.trec.gz")).to_pylist() == [
        {"query_id": "q", "id": "p", "score": -1000.0},
        {"query_id": "é", "id": "語", "score": 2.0},
    ]


def test_a_device_is_not_replaced_and_a_link_keeps_pointing_to_its_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="a device or a pipe"):
        write_trec([table([("q", "p", 0, 1.0)])], str(pipe), "tag", overwrite=True)
    assert pipe.is_fifo()
    file, link = tmp_path / "run.trec", tmp_path / "latest.trec"
    link.symlink_to(file)
    for _ in range(2):
        write_trec([table([("q", "p", 0, 1.0)])], str(link), "tag")
    assert link.is_symlink()
    assert file.read_text() == "q Q0 p 1 1.0 tag\n"
