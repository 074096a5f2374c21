"""Negatives mined by the model that is being trained are what a brute-force search by its vectors gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tiny import VOCABULARY, save_bert

from riptide.indexing.training import retriever_data
from riptide.indexing.training.retriever_data import RefreshedNegatives
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options import EncoderOptions
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.training.mixture_sets import TrainingSet, join_training_sets
from riptide.retriever.training.training_data import TrainingData

BERT = EncoderOptions(pooling="mean", dtype="float32", compile="never")


def make_system(folder: Path, data: TrainingData) -> DualEncoderSystem:
    bert = save_bert(folder / "bert", spread=0.2)
    return DualEncoderSystem(
        bert, BERT, TuneOptions(length=4, batch=4), data, device=torch.device("cpu"), dtype=torch.float32
    )


def random_texts(seed: int, count: int) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(f"w{n}" for n in draw.integers(VOCABULARY, size=20)) for _ in range(count)]


def test_they_are_the_nearest_but_for_positives_and_deleted(tmp_path: Path, monkeypatch) -> None:
    texts = random_texts(0, 50)
    positives = [np.array([number, *([49] if number % 2 else [])]) for number in range(12)]
    deleted = np.array([3, 20, 21])
    data = TrainingData(
        [texts[number][:30] for number in range(12)],
        positives,
        [np.array([40])] * 12,
        50,
        lambda rows: ([""] * len(rows), [texts[row] for row in rows]),
        deleted,
    )
    system = make_system(tmp_path, data)
    monkeypatch.setattr(retriever_data, "_BLOCK", 16)
    refresh = RefreshedNegatives(system, 7)
    mined = refresh.mine()
    scores = system.encode(data.queries, "query") @ system.encode(texts, "passage").astype(np.float16).T
    for query, found in enumerate(mined.numpy()):
        alive = np.setdiff1d(np.arange(50), [*positives[query], *deleted])
        expected = alive[np.argsort(-scores[query, alive], kind="stable")][:7]
        assert found.tolist() == expected.tolist()
    refresh.train_on(mined)
    assert system.data is not None
    assert system.data.negatives[0].tolist() == mined[0].tolist()
    everything = RefreshedNegatives(system, 60)
    everything.train_on(everything.mine())
    assert [len(rows) for rows in system.data.negatives[:2]] == [50 - 3 - 1, 50 - 3 - 2]


def test_they_are_of_the_corpus_of_their_query(tmp_path: Path, monkeypatch) -> None:
    sets, corpora = [], []
    for number, size in enumerate((30, 21)):
        texts = random_texts(number, size)

        def passages(rows: np.ndarray, texts: list[str] = texts) -> tuple[list[str], list[str]]:
            return [""] * len(rows), [texts[row] for row in rows]

        queries, positives = [text[:30] for text in texts[:8]], [np.array([n]) for n in range(8)]
        data = TrainingData(queries, positives, [np.array([9])] * 8, size, passages)
        sets.append(TrainingSet(str(number), data, corpus=str(number)))
        corpora.append(texts)
    system = make_system(tmp_path, join_training_sets(sets))
    monkeypatch.setattr(retriever_data, "_BLOCK", 16)
    mined = RefreshedNegatives(system, 5).mine().numpy()
    vectors = [system.encode(texts, "passage").astype(np.float16) for texts in corpora]
    queries = system.encode(system.data.queries, "query")
    for query, found in enumerate(mined):
        number, own = divmod(query, 8)
        nearest = np.argsort(-(queries[query] @ vectors[number].T), kind="stable")
        assert found.tolist() == (nearest[nearest != own][:5] + 30 * number).tolist()
