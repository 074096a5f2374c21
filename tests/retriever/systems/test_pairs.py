"""Pretraining on pairs of a corpus alone: Eq. 4 over cosines, without masked words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loss_checks import log_sum_exp
from rip_cases import CPU, TEXTS, options, rip_system
from sentence_transformers import SentenceTransformer
from t5_folders import save_t5
from tiny import add_masked_head, save_bert

from riptide.base.errors import InputError
from riptide.retriever.encoding.backbones import open_pooled
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.options import EncoderOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.systems.rip import RipSystem, draw_pair, passages_at
from riptide.retriever.training.loop import Trainer


@pytest.fixture(params=["t5", "bert"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_t5(tmp_path / "t5") if request.param == "t5" else save_bert(tmp_path / "bert", spread=0.2)


def pairs_system(folder: Path, **changes: Any) -> RipSystem:
    return rip_system(folder, objective="pairs", unit="span", pooling="mean", **changes)


def loss_of(system: RipSystem, step: int) -> float:
    batch = system.batch(step, 0, 1)
    vectors = torch.zeros(2 * system.options.batch, system.recipe.hidden)
    for chunk in batch.chunks:
        outputs, part = system.forward(chunk)
        assert part is None
        vectors[chunk.rows["dense"]] = outputs["dense"].detach()
    return float(system.loss({"dense": vectors}, batch))


@pytest.mark.parametrize("temperature", [None, 0.5])
def test_the_loss_equals_a_loop_over_cosines(folder: Path, temperature: float | None) -> None:
    """Each of the 2m spans retrieves its partner among the other spans; none is masked."""
    system = pairs_system(folder, temperature=temperature)
    rows = np.arange(len(TEXTS))
    passages, epochs = passages_at(system.options, rows, 1)
    assert len(set(passages)) == len(passages)
    spans = [
        span
        for passage, epoch in zip(passages, epochs, strict=True)
        for span in draw_pair(TEXTS[passage], system.options, int(epoch), int(passage))
    ]
    vectors = system.encode(spans, "passage").astype(np.float64)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    total = 0.0
    for row, vector in enumerate(vectors):
        partner = row ^ 1
        others = [
            place
            for place in range(len(spans))
            if place == partner or (place != row and spans[place] not in (spans[row], spans[partner]))
        ]
        scores = [float(vector @ vectors[place]) / (temperature or 0.01) for place in others]
        total += log_sum_exp(scores) - scores[others.index(partner)]
    assert loss_of(system, 1) == pytest.approx(total / len(spans), rel=1e-4)


def test_training_changes_the_backbone_alone_and_the_model_opens_elsewhere(folder: Path, tmp_path: Path) -> None:
    """The head for masked words gets no gradient, and is no trained weight that could decay."""
    system = pairs_system(folder)
    head = {name: value.clone() for name, value in system.model.head.state_dict().items()}
    table = system.model.whole.get_input_embeddings().weight
    before = table.detach().clone()
    trainer = Trainer(system, LoopOptions(steps=4, lr=1e-2, weight_decay=0.1), device=CPU, dtype=torch.float32)
    system.module.train()
    losses = [trainer.step(step) for step in range(3)]
    assert np.isfinite(losses).all()
    assert (table - before).abs().max() > 1e-4
    for name, value in system.model.head.state_dict().items():
        if value.shape != table.shape:  # not the table, which it shares with the backbone
            torch.testing.assert_close(value, head[name], atol=0, rtol=0)
    system.module.eval()
    system.save(tmp_path / "saved")
    texts = ["w1 w2 w3", "w4", "w5 w6 w7 w8"]
    peer = SentenceTransformer(str(tmp_path / "saved"), device="cpu", local_files_only=True)
    assert [type(module).__name__ for module in peer] == ["Transformer", "Pooling", "Normalize"]
    np.testing.assert_allclose(peer.encode(texts), system.encode(texts, "passage"), atol=1e-5)


def test_a_head_that_was_not_trained_is_not_saved(tmp_path: Path) -> None:
    """Otherwise SPLADE would train on its random weights; the backbone's own head is saved."""
    bare, sparse = save_bert(tmp_path / "bare", spread=0.2), EncoderOptions(pooling="splade")
    whole = add_masked_head(save_bert(tmp_path / "whole", spread=0.2))
    for folder in (bare, whole):
        system = pairs_system(folder)
        assert system.model.fresh_head == (folder == bare)
        system.save(tmp_path / "saved" / folder.name)
    open_pooled(read_recipe(tmp_path / "saved/whole", sparse), torch.float32)
    with pytest.raises(InputError, match="needs a masked-language-model head, and the weights lack it"):
        open_pooled(read_recipe(tmp_path / "saved/bare", sparse), torch.float32)


@pytest.mark.parametrize(("objective", "temperature"), [("rip", 0.01), ("pairs", 0.0), ("pairs", float("inf"))])
def test_a_temperature_that_does_not_fit_is_refused(objective: str, temperature: float) -> None:
    message = f"parameter temperature {temperature} parameter objective {objective}: expected more than 0"
    with pytest.raises(InputError, match=message):
        options(objective=objective, temperature=temperature)


@pytest.mark.parametrize("change", [{"mask": "word"}, {"mlm_probability": 0.3}])
def test_settings_of_masks_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"objective pairs: no token is masked"):
        options(objective="pairs", **change)
