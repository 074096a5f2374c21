"""MRR@10 on dev splits, by hand; vectors and scores of systems in training equal those of the saved models."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from reranker_cases import cross_system, scored
from rip_cases import add_mask, encoded, rip_system
from tiny import VOCABULARY, save_bert
from training_cases import CPU
from two_workers import TwoWorkers

from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.encoding.reranker import Reranker, RerankerOptions
from riptide.retriever.forward import batching
from riptide.retriever.options import EncoderOptions
from riptide.retriever.training import dev as evaluation
from riptide.retriever.training.dev import DevLists, DevSet, mean_reciprocal_rank
from riptide.retriever.training.dev_workers import share_items
from riptide.retriever.training.system import BatchChunk

TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9", "w1 w2 w3", "w7 w8"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT whose tokenizer has a mask token."""
    return add_mask(save_bert(tmp_path_factory.mktemp("bert"), spread=0.2), f"w{VOCABULARY - 1}")


def test_mean_reciprocal_rank_by_hand() -> None:
    """Ranks 1, 3 (two equal scores count against the positive), 2 (the better of two positives), and beyond depth."""
    scores = [np.array(line, np.float32) for line in ([3, 1, 2], [5, 5, 5, 1], [4, 3, 1], [4, 3, 2, 1])]
    positives = [np.array(own) for own in ([0], [1], [1, 2], [3])]
    assert mean_reciprocal_rank(scores, positives, 3) == pytest.approx((1 + 1 / 3 + 1 / 2 + 0) / 4)
    assert mean_reciprocal_rank([], [], 10) == 0
    assert math.isnan(mean_reciprocal_rank([np.array([1, math.inf])], [np.array([0])], 10))


def test_lists_are_ordered_by_their_own_scores() -> None:
    class Lengths:
        """Scores a pair by the length of its passage, and of its query."""

        def score(self, queries: Sequence[str], passages: Sequence[str], rank: int = 0, world: int = 1) -> np.ndarray:
            assert len(queries) == len(passages) == 5
            return np.array([len(passage) - len(query) for query, passage in zip(queries, passages, strict=True)])

    dev = DevLists(["a", "bb"], [np.array([0]), np.array([1])], [["xxx", "xx"], ["xxx", "xx", "x"]])
    assert dev.mrr(Lengths()) == pytest.approx((1 + 1 / 2) / 2)


@pytest.mark.parametrize("changes", [{}, {"pooling": "mean"}, {"objective": "cocondenser", "unit": "span"}])
def test_vectors_of_pretraining_are_those_of_the_saved_model(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict
) -> None:
    monkeypatch.setitem(batching.BATCH_TOKENS, "cpu", 40)  # several chunks, one of a single text
    system = rip_system(bert, **changes)
    system.module.train()
    vectors = system.encode(TEXTS, "query")
    assert system.module.training
    np.testing.assert_array_equal(vectors, system.encode(TEXTS, "passage"))
    system.save(tmp_path / "saved")
    options = EncoderOptions(pooling=system.options.pooling, normalize=False, dtype="float32", compile="never")
    expected = Encoder(str(tmp_path / "saved"), options).encode(TEXTS, side="query")
    np.testing.assert_allclose(vectors, expected, atol=1e-4)


def test_scores_of_a_reranker_are_those_of_the_saved_model(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(batching.BATCH_TOKENS, "cpu", 60)
    system = cross_system(bert)
    queries = [f"w{number}" for number in range(len(TEXTS))]
    logits = system.score(queries, TEXTS)
    system.save(tmp_path / "saved")
    expected = Reranker(str(tmp_path / "saved"), RerankerOptions(dtype="float32")).score(queries, TEXTS)
    np.testing.assert_allclose(1 / (1 + np.exp(-logits.astype(np.float64))), expected, atol=1e-4)


class WordWeights:
    """A text is a number, which seeds the few words of its vector."""

    dim = 20_000

    def encode(self, texts: Sequence[str], side: str, rank: int = 0, world: int = 1) -> np.ndarray:
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            draw = np.random.default_rng(int(text))
            vector[draw.integers(300 if side == "query" else 310, size=60)] = draw.random(60)
        return vectors


def test_vectors_of_many_words_are_dense_in_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quality is that of a product of dense vectors, which have 8 MB a side; blocks have 0.8 MB."""
    system, texts = WordWeights(), [str(number) for number in range(100)]
    positives = [np.array([(7 * number) % 100, number]) for number in range(100)]
    scores = system.encode(texts, "query") @ system.encode(texts, "passage").T
    expected = mean_reciprocal_rank(scores, positives, 10)
    assert 0.1 < expected < 0.9
    monkeypatch.setattr(evaluation, "_BLOCK", 200_000)
    tracemalloc.start()
    actual = DevSet(texts, positives, texts).mrr(system)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert actual == pytest.approx(expected)
    assert peak < 4_000_000
    full = np.ones((2, 3), np.float32)
    assert evaluation._compact(full) is full


def test_passages_have_the_topics_of_a_dev_set(monkeypatch: pytest.MonkeyPatch) -> None:
    class TopicWords(WordWeights):
        def encode(
            self, texts: Sequence[str], side: str, rank: int = 0, world: int = 1, topics: np.ndarray | None = None
        ) -> np.ndarray:
            if topics is not None:
                given.extend(zip(texts, topics.tolist(), strict=True))
            return super().encode(texts, side, rank, world)

    given: list[tuple[str, int]] = []
    monkeypatch.setattr(evaluation, "_BLOCK", 2 * WordWeights.dim)
    texts = [str(number) for number in range(5)]
    dev = DevSet(texts[:2], [np.array([0])] * 2, texts, prompt_numbers=np.array([4, 3, 2, 1, 0]))
    assert 0 <= dev.mrr(TopicWords()) <= 1
    assert given == [("0", 4), ("1", 3), ("2", 2), ("3", 1), ("4", 0)]  # those of queries are inferred


def test_a_better_model_has_the_higher_quality(bert: Path) -> None:
    """Each query is the text of its passage, so that an untrained model ranks it first."""
    system = rip_system(bert)
    distinct = [*TEXTS[:3], TEXTS[4]]
    dev = DevSet(distinct, [np.array([row]) for row in range(4)], distinct)
    dev_swapped = DevSet(distinct, [np.array([3 - row]) for row in range(4)], distinct)
    assert dev.mrr(system) > dev_swapped.mrr(system)


def test_items_without_a_chunk_give_no_rows() -> None:
    def make_chunks(rows: np.ndarray) -> list[BatchChunk]:
        assert not len(rows)
        return []

    module = torch.nn.Linear(1, 1)
    rows = share_items(module, make_chunks, lambda chunk: torch.zeros(0, 3), (0, 3), device=CPU, rank=0, world=1)
    assert rows.shape == (0, 3)
    assert module.training


@pytest.mark.parametrize("count", [1, 5])
def test_two_workers_share_texts_and_pairs(bert: Path, two_workers: TwoWorkers, count: int) -> None:
    """With one text the second worker has none; each worker gets all rows."""
    texts = TEXTS[:count]
    for case, alone in (
        (encoded, rip_system(bert).encode(texts, "query")),
        (scored, cross_system(bert).score(texts, texts)),
    ):
        first, second = two_workers.run(case, bert, texts)
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, alone, atol=1e-5)
