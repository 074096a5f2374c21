"""The grammar of sources: accepted and refused forms, their canonical form; and the fusion of hits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runners import InlineRunner
from small_stores import build_bm25, extend_corpus
from word_passages import Best, pairs

from riptide.base.errors import InputError
from riptide.indexing.exact import Hits
from riptide.indexing.hit_sources.fusion import FUSION_DEPTH, Fusion
from riptide.indexing.hit_sources.grammar import source_label
from riptide.indexing.hit_sources.index_source import INDEX
from riptide.indexing.hit_sources.modes import expand_mode, source_of_mode
from riptide.indexing.hit_sources.opened_sources import HitSources
from riptide.indexing.hit_sources.registry import find_index_kind, open_source
from riptide.indexing.hit_sources.search_options import Mode
from riptide.indexing.search.rescoring import reorder_hits
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.indexing.work.worker_tasks import Runner

HERE = InlineRunner()


@dataclass
class Listed:
    """A source whose hits for query n are the n-th list of (row, score)."""

    source_text: str
    lists: list[Best]
    search_parameters: dict[str, Any] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)

    def inputs(self) -> dict[str, Artifact]:
        return {}

    def search(self, texts: Sequence[str], k: int, runner: Runner, allowed_rows: np.ndarray | None = None) -> Hits:
        self.asked.append(k)
        rows = np.full((len(texts), k), -1, np.int64)
        scores = np.full((len(texts), k), -np.inf, np.float32)
        for query, best in enumerate(self.lists):
            for rank, (row, score) in enumerate(best[:k]):
                rows[query, rank], scores[query, rank] = row, score
        return Hits(scores, rows)


def fused_by_rank(lists: Sequence[Best], k: int) -> Best:
    """Reciprocal rank fusion (Cormack, Clarke and Buettcher, 2009), with dictionaries."""
    sums: dict[int, float] = {}
    for best in lists:
        for rank, (row, _) in enumerate(best, start=1):
            sums[row] = sums.get(row, 0) + 1 / (60 + rank)
    return sorted(sums.items(), key=lambda pair: (-pair[1], pair[0]))[:k]


def fused_by_weight(lists: Sequence[Best], weights: Sequence[float], k: int) -> Best:
    """The weighted sum of min-max normalised scores; a passage that a list lacks counts as 0 there."""
    sums: dict[int, float] = {}
    for best, weight in zip(lists, weights, strict=True):
        scores = [score for _, score in best]
        for row, score in best:
            share = (score - min(scores)) / (max(scores) - min(scores)) if max(scores) > min(scores) else 1
            sums[row] = sums.get(row, 0) + weight * share
    return sorted(sums.items(), key=lambda pair: (-pair[1], pair[0]))[:k]


def two_sources(queries: int = 5, count: int = 40) -> list[Listed]:
    rng = np.random.default_rng(0)
    made = []
    for name, scale in (("a", 10.0), ("b", 0.5)):
        lists = []
        for _ in range(queries):
            rows = rng.permutation(60)[:count].tolist()
            scores = np.sort(rng.random(count).astype(np.float32) * scale)[::-1].tolist()
            lists.append(list(zip(rows, scores, strict=True)))
        made.append(Listed(name, lists))
    return made


def close(found: Best, expected: Best) -> None:
    assert [row for row, _ in found] == [row for row, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-5)


def test_sources_are_fused_by_rank_or_by_weight_from_all_that_each_has() -> None:
    """A passage at rank 40 of both lists is considered although k is 3."""
    sources = two_sources()
    texts = [""] * 5
    by_rank = Fusion(sources, None, {"fusion_depth": FUSION_DEPTH}).search(texts, 3, HERE)  # type: ignore[arg-type]
    by_weight = Fusion(sources, [0.3, 0.7], {"fusion_depth": FUSION_DEPTH}).search(texts, 3, HERE)  # type: ignore[arg-type]
    for query in range(5):
        lists = [source.lists[query] for source in sources]
        close(pairs(by_rank, query), fused_by_rank(lists, 3))
        close(pairs(by_weight, query), fused_by_weight(lists, [0.3, 0.7], 3))
    assert sources[0].asked == [1_000, 1_000]
    Fusion(sources, None, {"fusion_depth": FUSION_DEPTH}).search(texts, 2_000, HERE)  # type: ignore[arg-type]
    assert sources[0].asked[-1] == 2_000


def test_a_fusion_writes_itself_in_the_grammar() -> None:
    sources = two_sources()
    assert Fusion(sources, None, {}).source_text == "a+b"  # type: ignore[arg-type]
    assert Fusion(sources, [0.4, 1.0], {}).source_text == "0.4*a+1*b"  # type: ignore[arg-type]


@pytest.fixture
def sources(tmp_path: Path) -> HitSources:
    """The sources of a store with two BM25 indexes, `bm25` and `wide`, and nothing else."""
    corpus = extend_corpus(tmp_path, [["w1 w2", "w2 w2 w3 w4", "w5", "w1 w3 w3 w3 w3 w3"]])
    build_bm25(corpus, tmp_path)
    build_bm25(corpus, tmp_path, "wide", k1=2.0, b=1.0)
    return HitSources(Store(str(tmp_path / "store")), corpus)


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("bm25", "bm25"),
        ("bm25:bm25", "bm25"),
        ("bm25:wide", "bm25:wide"),
        ("bm25:wide+bm25", "bm25:wide+bm25"),
        ("0.40*bm25:bm25+.6*bm25:wide", "0.4*bm25+0.6*bm25:wide"),
        ("1.*bm25+2*bm25:wide", "1*bm25+2*bm25:wide"),
    ],
)
def test_a_source_is_written_back_so_that_it_reads_the_same(sources: HitSources, given: str, written: str) -> None:
    opened = sources.open(given)
    assert opened.source_text == written
    assert sources.open(written).source_text == written
    names = {name for name in ("bm25", "wide") if name in given.replace("bm25:", "").replace("+", " ")}
    names = {"wide"} if given == "bm25:wide" else names
    keys = {artifact.key for artifact in opened.inputs().values()}
    assert keys == {f"bm25/{name}/g0000" for name in names}


def test_a_fusion_finds_what_its_sources_find_apart(sources: HitSources) -> None:
    texts = ["w1 w3", "w5", "nowhere", "w2"]
    apart = [sources.open(name).search(texts, 1_000, HERE) for name in ("bm25", "bm25:wide")]
    assert not np.array_equal(apart[0].scores, apart[1].scores)
    by_rank = sources.open("bm25+bm25:wide").search(texts, 4, HERE)
    by_weight = sources.open("2*bm25+0.5*bm25:wide").search(texts, 4, HERE)
    for query in range(4):
        lists = [pairs(hits, query) for hits in apart]
        close(pairs(by_rank, query), fused_by_rank(lists, 4))
        close(pairs(by_weight, query), fused_by_weight(lists, [2, 0.5], 4))
    assert pairs(by_rank, 2) == []


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("bm25+", "source 'bm25+': expected a source on both sides of each +"),
        ("0.4*bm25+ ", "source '0.4*bm25+': expected a source on both sides of each +"),
        ("splade", "source 'splade': expected bm25, bm25:NAME, exact:EMBEDDINGS, index:NAME, splade:NAME, or A+B"),
        ("colbert:x+bm25", "source 'colbert:x': expected"),
        ("exact", "embeddings: there is no such artifact (complete embeddings: none); riptide encode-corpus makes one"),
        ("dense", "index: there is no such artifact (complete index: none); riptide build-index makes one"),
        ("exact+bm25", "source 'exact': expected"),
        ("index:", "source 'index:': expected"),
        ("", "source '': expected"),
        ("0.4*bm25", "source '0.4*bm25': expected"),
        ("-1*bm25+1*bm25:wide", "give every one of the sources a weight, or none"),
        ("0.4*bm25+bm25:wide", "source '0.4*bm25+bm25:wide': give every one of the sources a weight, or none"),
        ("bm25+0.6*bm25:wide", "give every one of the sources a weight, or none"),
        ("bm25+bm25:bm25", "source 'bm25+bm25:bm25': a source is given twice"),
        ("1*bm25+2*bm25", "a source is given twice"),
        ("bm25:none", "bm25/none: there is no such artifact (complete bm25: bm25, wide)"),
        ("bm25:a b", "name 'a b'"),
        ("bm25+exact:enc", "embeddings/enc"),
        ("bm25+index:idx", "index/idx: there is no such artifact (complete index: none)"),
        ("0*bm25+0*bm25:wide", "every weight is 0"),
        ("1*bm25+2000000000*bm25:wide", "weight 2e+09: expected at most 1e+09"),
        (f"1*bm25+{'9' * 400}*bm25:wide", "weight inf: expected at most 1e+09"),
    ],
)
def test_what_is_not_in_the_grammar_or_the_store_is_named(sources: HitSources, source: str, told: str) -> None:
    with pytest.raises(InputError) as raised:
        sources.open(source)
    assert told in str(raised.value)


def store_of(folder: Path, **names: str) -> Store:
    """Returns a store of empty artifacts: embeddings, and indexes. names: of an index, its embeddings; otherwise ""."""
    store = Store(str(folder))
    for name, embeddings in names.items():
        config = {"embeddings": embeddings, "factory": "Flat"} if embeddings else {"encoder": {}}
        kind = "index" if embeddings else "embeddings"
        with store.create(kind, f"{name}/g0000", config=config):
            pass
    return store


def test_vectors_and_indexes_of_an_unknown_kind_are_named(tmp_path: Path) -> None:
    kinds = {pooling: find_index_kind({"pooling": pooling}).name for pooling in ("cls", "mean", "last", "splade")}
    assert kinds == {"cls": "index", "mean": "index", "last": "index", "splade": "splade"}
    with pytest.raises(InputError, match=r"makes tokens vectors, expected one of the kinds dense, sparse$"):
        find_index_kind({"pooling": "tokens"})
    store = Store(str(tmp_path))
    with store.create("index", "odd/g0000", config={"embeddings": "enc"}):
        pass
    with pytest.raises(
        InputError, match="index/odd is over vectors of an unknown kind: expected an index that is a FAISS"
    ):
        open_source(INDEX, SimpleNamespace(store=store), "odd")


def test_modes_stand_for_sources(tmp_path: Path) -> None:
    both, bare = store_of(tmp_path / "both", enc="", idx="enc"), store_of(tmp_path / "bare", enc="")
    modes: tuple[Mode, ...] = ("bm25", "exact", "dense", "hybrid")
    expected = ["bm25", "exact:enc", "index:idx", "0.5*bm25+0.5*index:idx"]
    assert [source_of_mode(mode, both) for mode in modes] == [expand_mode(mode, both) for mode in modes] == expected
    assert source_of_mode("hybrid", bare) == "0.5*bm25+0.5*exact:enc"
    assert source_of_mode("hybrid", both, embeddings="enc") == "0.5*bm25+0.5*index:idx"
    store_of(tmp_path / "both", more="", other="more", third="")
    assert source_of_mode("dense", both, embeddings="more") == "index:other"
    assert source_of_mode("hybrid", both, embeddings="more") == "0.5*bm25+0.5*index:other"
    assert source_of_mode("hybrid", both, embeddings="third") == "0.5*bm25+0.5*exact:third"
    assert source_of_mode("hybrid", both, index="other") == "0.5*bm25+0.5*index:other"
    with pytest.raises(InputError, match="index/other is over embeddings/more, not enc"):
        source_of_mode("dense", both, embeddings="enc", index="other")
    for mode, told in {
        "exact": "embeddings: enc, more, third; say which with exact:NAME",
        "dense": "indexes: idx, other; .* index:NAME",
    }.items():
        with pytest.raises(InputError, match=f"has several .*{told}$"):
            expand_mode(mode, both)


@pytest.mark.parametrize(
    ("source", "piece"),
    [
        ("bm25", "bm25"),
        ("index:minilm", "dense-minilm"),
        ("exact:mini.lm", "exact-mini.lm"),
        ("0.4*bm25+0.6*index:a_b", "0.4-bm25-0.6-dense-a-b"),
    ],
)
def test_a_source_is_part_of_a_runs_name(source: str, piece: str) -> None:
    assert source_label(source) == piece


@pytest.mark.parametrize("depth", [0, 1, 4, 7, 9])
def test_reranked_hits_are_in_the_order_of_a_plain_loop(depth: int) -> None:
    """With equal probabilities, missing hits, and hits below the re-ranked ones."""
    rng = np.random.default_rng(depth)
    rows = np.array([rng.permutation(50)[:9] for _ in range(6)])
    rows[1, 5:], rows[2, :] = -1, -1
    hits = Hits(rng.random(rows.shape).astype(np.float32), rows)
    probabilities = rng.choice(np.array([0.2, 0.5, 0.9], np.float32), (6, depth))
    probabilities[rows[:, :depth] < 0] = -np.inf
    found = reorder_hits(hits, probabilities)
    for query in range(6):
        top = sorted(zip(-probabilities[query], rows[query, :depth], strict=True), key=lambda pair: pair)
        expected = [(int(row), float(-score)) for score, row in top if row >= 0]
        expected += [(int(row), -float(rank)) for rank, row in enumerate(rows[query], 1) if rank > depth and row >= 0]
        assert pairs(found, query) == [(row, pytest.approx(score)) for row, score in expected]
