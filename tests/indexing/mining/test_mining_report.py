"""The report of a mining run: its numbers compared with loops over the pool's rows, its page read by a parser."""

from __future__ import annotations

import base64
import itertools
import json
import math
import random
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus, write_table
from riptide.indexing.exact import Hits
from riptide.indexing.formats.parse import CORPUS_SCHEMA
from riptide.indexing.mining import pools as mining
from riptide.indexing.mining import sampling
from riptide.indexing.mining.report import (
    THRESHOLDS,
    Histogram,
    PoolStatistics,
    ShownNegative,
    ShownQuery,
    read_examples,
    write_report,
)
from riptide.indexing.mining.sampling import NegativeOptions
from riptide.indexing.store.store import Store

SOURCES = ("bm25", "exact:$a_b$", "<i>c</i>")
NASTY = "<script>alert('x')</script> & \"é\" 語 $x$"


def pool(seed: int, questions: int = 12, depth: int = 30, scale: float = 1.0) -> pa.Table:
    draw = np.random.default_rng(seed)
    found = {}
    for number, source in enumerate(SOURCES):
        rows = np.stack([draw.choice(60, depth, replace=False) for _ in range(questions)])
        rows[draw.random(questions) < 0.2] = -1
        scores = np.sort(draw.normal(size=rows.shape) * scale * 10**number)[:, ::-1]
        found[source] = Hits(np.where(rows < 0, -np.inf, scores).astype(np.float32), rows)
    return mining.pool_hits([f"q{n}" for n in range(questions)], found, [np.array([3, 4])] * questions, depth)


def probabilities(table: pa.Table, seed: int) -> np.ndarray:
    """Some not scored, some exactly on a threshold or at the ends."""
    draw = np.random.default_rng(seed)
    known = draw.beta(0.3, 0.5, len(table)).astype(np.float32)
    special = draw.choice(np.array([*THRESHOLDS, 0.0, 1.0], np.float32), len(table))
    known = np.where(draw.random(len(table)) < 0.3, special, known)
    return np.where(draw.random(len(table)) < 0.4, np.float32(np.nan), known)


def gathered(order: list[int]) -> PoolStatistics:
    statistics = PoolStatistics()
    for seed in order:
        table = pool(seed, scale=3.0**seed)
        statistics.add(table, probabilities(table, seed) if seed else None)
    return statistics


def test_numbers_are_those_of_a_loop() -> None:
    numbers = gathered([0, 1, 2, 3]).numbers()
    rows = [fields for seed in range(4) for fields in pool(seed, scale=3.0**seed).to_pylist()]
    known = [float(p) for seed in range(1, 4) for p in probabilities(pool(seed, scale=3.0**seed), seed)]
    known = [p for p in known if not math.isnan(p)]
    assert numbers["candidates"] == len(rows)
    assert numbers["questions"] == sum(len(set(pool(seed)["query"].to_pylist())) for seed in range(4))
    assert numbers["scored"] == len(known)
    overlap = Counter(tuple(s for s in SOURCES if fields[f"rank:{s}"] is not None) for fields in rows)
    assert len(overlap) == 7
    assert {tuple(kind["sources"]): kind["candidates"] for kind in numbers["overlap"]} == overlap
    assert [k["candidates"] for k in numbers["overlap"]] == sorted(overlap.values(), reverse=True)
    assert list(numbers["sources"]) == list(SOURCES)
    for source, found in numbers["sources"].items():
        assert found["found"] == sum(source in kind for kind in overlap.elements())
        assert found["found_alone"] == overlap[(source,)]
        for what in ("rank", "score"):
            values = [fields[f"{what}:{source}"] for fields in rows if fields[f"{what}:{source}"] is not None]
            edges, counts = found[f"{what}s"]["edges"], found[f"{what}s"]["counts"]
            assert counts == [sum(a <= v < b for v in values) for a, b in itertools.pairwise(edges)]
            assert sum(counts) == len(values) == found["found"]
    assert numbers["sources"]["bm25"]["ranks"]["edges"] == list(range(1, 32))  # a bin for each rank
    counts = numbers["probabilities"]["counts"]
    edges = np.array(numbers["probabilities"]["edges"], np.float32).tolist()  # as probabilities and thresholds are
    assert counts == [sum(a <= p < b or p == b == 1 for p in known) for a, b in itertools.pairwise(edges)]
    assert [row["threshold"] for row in numbers["removed"]] == list(THRESHOLDS)
    for row in numbers["removed"]:
        assert row["pairs"] == sum(p >= float(np.float32(row["threshold"])) for p in known)
        assert row["share"] == row["pairs"] / len(known)
    assert 0 < numbers["removed"][-1]["share"] < numbers["removed"][0]["share"] < 1


def test_a_threshold_removes_what_mining_leaves_out() -> None:
    """The share at 0.1 against the denoised negatives of a draw that takes all."""
    table = pool(1)
    known = probabilities(table, 1)
    statistics = PoolStatistics()
    statistics.add(table, known)
    for threshold, row in zip(THRESHOLDS, statistics.numbers()["removed"], strict=True):
        drawn = sampling.sample_negatives(
            table,
            known,
            NegativeOptions(pool_negatives=0, denoised_negatives=1000, denoise_threshold=threshold, seed=0),
            query_ids=[f"q{n}" for n in range(12)],
            positives=[np.empty(0, np.int64)] * 12,
        )
        assert row["pairs"] == statistics.scored - sum(map(len, drawn["negatives"].to_pylist()))


def test_the_order_of_the_parts_does_not_matter() -> None:
    expected = gathered([0, 1, 2, 3]).numbers()
    for order in itertools.permutations(range(4)):
        assert gathered(list(order)).numbers() == expected


@pytest.mark.parametrize("min_width", [1.0, 2.0**-20])
def test_histogram_of_any_range_in_any_order(min_width: float) -> None:
    draw = random.Random(0)
    for case in range(200):
        scale, shift = 10 ** draw.uniform(-8, 14), draw.choice([0.0, 1.0, -1e3, 1e9])
        values = np.array([draw.gauss(0, 1) * scale + shift for _ in range(draw.randint(1, 80))])
        if case % 10 == 0:
            values[:] = values[0]
        found = []
        for _ in range(3):
            histogram = Histogram(min_width)
            order = draw.sample(range(len(values)), len(values))
            for start in range(0, len(values), 7):
                histogram.add(values[order[start : start + 7]])
            found.append(histogram.bins())
        edges, counts = found[0]
        assert found[1] == found[2] == (edges, counts)
        assert len(edges) == len(counts) + 1 <= 65
        half = histogram.width / 2
        assert histogram.width == min_width or (
            math.floor(values.max() / half) - math.floor(values.min() / half) >= 64 or abs(values).max() / half > 2**50
        ), "half as wide would do"
        assert counts == [int(((a <= values) & (values < b)).sum()) for a, b in itertools.pairwise(edges)]
        assert sum(counts) == len(values)
        assert min(counts[0], counts[-1]) > 0
    assert Histogram().bins() == ([], [])


def test_parts_of_other_sources() -> None:
    statistics = PoolStatistics()
    statistics.add(pool(0))
    other = pool(0).drop(["rank:bm25", "score:bm25"])
    before = statistics.numbers()
    with pytest.raises(InputError, match="a part with the sources"):
        statistics.add(other)
    assert statistics.numbers() == before


class Page(HTMLParser):
    """What a browser would show: the tags, the text, and the pictures' bytes."""

    def __init__(self, content: str):
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.words = ""
        self.pictures: list[bytes] = []
        self.feed(content)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag == "img":
            kind, _, data = (dict(attributes)["src"] or "").partition(",")
            assert kind == "data:image/png;base64"
            self.pictures.append(base64.b64decode(data, validate=True))

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_shows_everything_and_runs_nothing(tmp_path: Path) -> None:
    negatives = [
        ShownNegative(f"t{NASTY}", f"n1{NASTY}", {SOURCES[0]: 3, SOURCES[2]: None}, 0.0625, True),
        ShownNegative("", f"n2{NASTY}", {SOURCES[0]: None, SOURCES[2]: 17}, None, False),
    ]
    examples = [ShownQuery(f"q{NASTY}", [f"p1{NASTY}", f"p2{NASTY}"], negatives), ShownQuery("no negatives", [], [])]
    statistics = gathered([0, 1])
    folder = tmp_path / "new" / "report"
    path = write_report(str(folder), statistics, examples, title=f"T{NASTY}")
    assert path == folder / "report.html"
    assert sorted(file.name for file in folder.iterdir()) == ["report.html", "report.json"]
    assert json.loads((folder / "report.json").read_text()) == json.loads(json.dumps(statistics.numbers()))
    content = path.read_text(encoding="utf-8")
    page = Page(content)
    assert page.tags["script"] == page.tags["i"] == page.tags["link"] == 0
    assert "http" not in content.replace("http-equiv", "")  # nothing is fetched
    for text in ("T", "q", "p1", "p2", "n1", "n2"):
        assert f"{text}{NASTY}" in page.words
    assert f"t{NASTY}: n1{NASTY}" in page.words
    for text in ("0.0625", "not scored", "17", "–", *SOURCES, f"{statistics.candidates:,}"):
        assert text in page.words
    for row in statistics.numbers()["removed"]:
        assert f"{row['pairs']:,}" in page.words
        assert f"{row['share']:.1%}" in page.words
    assert page.tags["img"] == 4
    for picture in page.pictures:
        assert picture.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(picture) > 4000
    before = path.read_bytes()
    with pytest.raises(AttributeError):
        write_report(str(folder), statistics, [None], title="broken")  # type: ignore[list-item]
    assert path.read_bytes() == before
    assert sorted(file.name for file in folder.iterdir()) == ["report.html", "report.json"]
    with pytest.raises(InputError, match=r"report\.html: a file with other content is there, and is kept"):
        write_report(str(folder), statistics, examples, title="again")
    assert path.read_bytes() == before
    write_report(str(folder), statistics, examples, title="again", overwrite=True)
    assert "<title>again</title>" in path.read_text(encoding="utf-8")


def test_without_scores_and_without_candidates(tmp_path: Path) -> None:
    empty = PoolStatistics()
    assert Page(write_report(str(tmp_path / "a"), empty, [], title="x").read_text()).tags["img"] == 3
    nothing = pool(0).slice(0, 0)
    empty.add(nothing, np.empty(0, np.float32))
    empty.add(nothing)
    page = Page(write_report(str(tmp_path / "b"), empty, [], title="x").read_text())
    assert "Denoising" not in page.words
    assert "0 queries have 0 candidates; 0 of them were scored." in page.words
    unscored = gathered([0])
    assert "Denoising" not in Page(write_report(str(tmp_path / "c"), unscored, [], title="x").read_text()).words
    assert {row["share"] for row in unscored.numbers()["removed"]} == {None}


def test_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="no file can be written in"):
            write_report(str(folder), PoolStatistics(), [], title="x")


def test_examples_are_read_from_the_corpus(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    with store.create("corpus", "g0000", config={"limit": None}) as draft:
        titles = ["" if row % 2 else f"T{row}" for row in range(60)]
        table = pa.table(
            [[f"d{row}" for row in range(60)], titles, [f"text {row}" for row in range(60)], [""] * 60],
            schema=CORPUS_SCHEMA,
        )
        draft.commit("part-00000", ".arrow", lambda path: write_table(table, path), rows=60)
    made = pool(2)
    ids = [f"q{number}" for number in range(12)]
    drawn = sampling.sample_negatives(
        made,
        probabilities(made, 2),
        NegativeOptions(pool_negatives=3, denoised_negatives=2, denoise_threshold=0.1, seed=0),
        query_ids=ids,
        positives=[np.array([3, 4])] * 12,
    )
    drawn = pa.concat_tables(
        [
            drawn.slice(0, 1).set_column(3, "negatives", pa.array([[]], drawn.schema.field("negatives").type)),
            drawn.slice(1),
        ]
    )
    examples = read_examples(drawn, {id: f"question {id}" for id in ids}, Corpus.open(store), 3)
    assert [example.question for example in examples] == ["question q1", "question q2", "question q3"]
    for example, fields in zip(examples, drawn.slice(1, 3).to_pylist(), strict=True):
        assert example.positives == ["text 3", "T4 text 4"]
        for place, negative in enumerate(example.negatives):
            row = fields["negatives"][place]
            ranks = {source: fields[f"rank:{source}"][place] for source in SOURCES}
            assert negative == ShownNegative(
                titles[row], f"text {row}", ranks, fields["probability"][place], fields["is_denoised"][place]
            )
    assert len(read_examples(drawn, {id: id for id in ids}, Corpus.open(store), 100)) == 11


def test_the_report_counts_why_candidates_were_dropped(tmp_path: Path) -> None:
    made, ids = pool(1), [f"q{number}" for number in range(12)]
    margins = mining.ScoreMargins(relative_margin=0.1)
    drawn = sampling.sample_negatives(
        made,
        None,
        NegativeOptions(pool_negatives=3, denoised_negatives=0, denoise_threshold=0.1, seed=0, margins=margins),
        query_ids=ids,
        positives=[np.array([3, 4])] * 12,
    )
    statistics = PoolStatistics()
    statistics.add(made)
    statistics.add_dropped(drawn.slice(0, 5))
    statistics.add_dropped(drawn.slice(5))
    reasons = Counter(reason for line in drawn.to_pylist() for reason in line["dropped_by"])
    numbers = statistics.numbers()["dropped"]
    assert {f"{row['limit']}:{row['scorer']}": row["candidates"] for row in numbers} == reasons
    assert len(reasons) == 3
    words = Page(write_report(str(tmp_path / "a"), statistics, [], title="x").read_text()).words
    assert "Margins" in words
    assert f"relative_marginbm25{reasons['relative_margin:bm25']:,}" in words  # the cells of a row
    without = Page(write_report(str(tmp_path / "b"), gathered([0]), [], title="x").read_text()).words
    assert "Margins" not in without
