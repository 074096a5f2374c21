"""Negatives mined by the model that is being trained are what a brute-force search by its vectors gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tiny import VOCABULARY, save_bert

from indexing import tuning
from indexing.tuning import RefreshedNegatives
from retriever.dual import DualSystem, TuneOptions
from retriever.options import EncoderOptions
from retriever.reranker_data import TrainingData


def test_they_are_the_nearest_but_for_positives_and_deleted(tmp_path: Path, monkeypatch) -> None:
    draw = np.random.default_rng(0)
    texts = [" ".join(f"w{n}" for n in draw.integers(VOCABULARY, size=20)) for _ in range(50)]
    positives = [np.array([number, *([49] if number % 2 else [])]) for number in range(12)]
    deleted = np.array([3, 20, 21])
    data = TrainingData([texts[number][:30] for number in range(12)], positives, [np.array([40])] * 12, 50,
                        lambda rows: ([""] * len(rows), [texts[row] for row in rows]), deleted)  # fmt: skip
    encoder = EncoderOptions(pooling="mean", dtype="float32", compile="never")
    bert = save_bert(tmp_path / "bert", spread=0.2)
    system = DualSystem(bert, encoder, TuneOptions(length=4, batch=4), data, device=torch.device("cpu"),
                        dtype=torch.float32)  # fmt: skip
    monkeypatch.setattr(tuning, "_BLOCK", 16)
    refresh = RefreshedNegatives(system, 7)
    mined = refresh.mine()
    scores = system.encode(data.queries, "query") @ system.encode(texts, "passage").astype(np.float16).T
    for query, found in enumerate(mined.numpy()):
        alive = np.setdiff1d(np.arange(50), [*positives[query], *deleted])
        expected = alive[np.argsort(-scores[query, alive], kind="stable")][:7]
        assert found.tolist() == expected.tolist()
    refresh.take(mined)
    assert system.data is not None
    assert system.data.negatives[0].tolist() == mined[0].tolist()
    everything = RefreshedNegatives(system, 60)
    everything.take(everything.mine())
    assert [len(rows) for rows in system.data.negatives[:2]] == [50 - 3 - 1, 50 - 3 - 2]
