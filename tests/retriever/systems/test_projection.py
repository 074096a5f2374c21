"""The projection W of GTR: new, trained further, saved, and opened by sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from t5_folders import save_gtr, save_t5
from tiny import save_encoder
from training_cases import CPU, make_data

from riptide.base.errors import InputError
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options import SIDES
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.training.loop import Trainer

ENCODER = EncoderOptions(
    pooling="mean", normalize=True, query_length=24, passage_length=24, dtype="float32", compile="never"
)


def system_over(folder: Path, encoder: EncoderOptions = ENCODER, **tuning: Any) -> DualEncoderSystem:
    defaults: dict[str, Any] = {"method": "finetune", "batch": 8, "loss": "symmetric", "temperature": 0.01}
    return DualEncoderSystem(
        folder, encoder, TuneOptions(**{**defaults, **tuning}), make_data(20), device=CPU, dtype=torch.float32
    )


def train(system: DualEncoderSystem, steps: int = 3) -> None:
    loop = LoopOptions(steps=steps + 1, lr=1e-2, optimizer="adafactor", weight_decay=0.0)
    trainer = Trainer(system, loop, device=CPU, dtype=torch.float32)
    system.module.train()
    for step in range(steps):
        trainer.step(step)
    system.module.eval()


@pytest.mark.parametrize("size", [48, 32])
def test_a_new_projection_is_trained_and_opens_in_sentence_transformers(
    tmp_path: Path, texts: list[str], size: int
) -> None:
    """Also where the backbone has as many numbers. The layout is that of gtr-t5."""
    system = system_over(save_t5(tmp_path / "t5"), projection=size)
    start = system.head.steps[0][0].weight.detach().clone()  # type: ignore[index]
    assert start.shape == (size, 32)
    assert start.dtype == torch.float32
    assert start.std() == pytest.approx(32**-0.5, rel=0.1)
    train(system)
    system.save(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "2_Dense" / "model.safetensors")
    assert set(saved) == {"linear.weight"}
    assert (saved["linear.weight"] - start).abs().max() > 1e-3
    texts = [text for text in texts if text.strip()]
    expected = system.encode(texts, "query")
    peer = SentenceTransformer(str(tmp_path / "saved"), device="cpu", local_files_only=True)
    assert [type(module).__name__ for module in peer] == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert isinstance(peer[2].activation_function, torch.nn.Identity)
    assert peer[2].linear.bias is None
    np.testing.assert_allclose(peer.encode(texts), expected, atol=1e-5)
    own = EncoderOptions(dtype="float32", compile="never")
    np.testing.assert_allclose(Encoder(str(tmp_path / "saved"), own).encode(texts), expected, atol=1e-5)
    again = system_over(tmp_path / "saved")  # a second stage
    torch.testing.assert_close(again.module.state_dict(), system.module.state_dict(), atol=0, rtol=0)


def test_a_published_model_is_trained_further_with_its_projection(tmp_path: Path, texts: list[str]) -> None:
    folder = save_gtr(tmp_path / "gtr")
    system = system_over(folder, EncoderOptions(dtype="float32", compile="never"))
    peer = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    texts = [text for text in texts if text.strip()]
    before = peer.encode(texts)
    system.module.eval()
    np.testing.assert_allclose(system.encode(texts, "passage"), before, atol=1e-5)
    train(system)
    system.save(tmp_path / "saved")
    dense = torch.load(folder / "2_Dense" / "pytorch_model.bin")["linear.weight"]
    saved = load_file(tmp_path / "saved" / "2_Dense" / "model.safetensors")["linear.weight"]
    assert (saved - dense).abs().max() > 1e-3
    assert not (tmp_path / "saved" / "2_Dense" / "pytorch_model.bin").exists()
    after = SentenceTransformer(str(tmp_path / "saved"), device="cpu", local_files_only=True).encode(texts)
    np.testing.assert_allclose(after, system.encode(texts, "passage"), atol=1e-5)
    assert np.abs(after - before).max() > 0.01


def test_both_sides_start_with_the_same_projection(tmp_path: Path) -> None:
    """Vectors of different projections would have random similarities."""
    system = system_over(save_t5(tmp_path / "t5"), projection=48, sides="untied")
    query, passage = (system.encoders[side][1] for side in SIDES)
    assert query is not passage
    torch.testing.assert_close(query.state_dict(), passage.state_dict(), atol=0, rtol=0)


def test_the_projection_runs_in_float32_under_autocast(tmp_path: Path) -> None:
    folder = save_t5(tmp_path / "t5")
    options = TuneOptions(method="finetune", batch=4, projection=48)
    system = DualEncoderSystem(folder, ENCODER, options, make_data(8), device=CPU, dtype=torch.bfloat16)
    inputs: list[torch.dtype] = []

    def record(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        inputs.extend((arguments[0].dtype, output.dtype))
        exact = arguments[0].double() @ module.weight.double().T  # type: ignore[operator,union-attr]
        torch.testing.assert_close(output.double(), exact, atol=1e-5, rtol=1e-5)

    system.head.steps[0][0].register_forward_hook(record)  # type: ignore[index]
    system.encode(["the river bank", "money"], "query")
    assert set(inputs) == {torch.float32}


@pytest.mark.parametrize("kind", ["t5", "bert"])
def test_training_without_dropout(tmp_path: Path, kind: str) -> None:
    """Two passes of a batch in training give the same vectors; the saved configuration keeps its dropout."""
    folder = save_t5(tmp_path / "model") if kind == "t5" else save_encoder(tmp_path / "model")

    def passes(**tuning: Any) -> list[torch.Tensor]:
        system = system_over(folder, projection=48, **tuning)
        system.module.train()
        chunks = system.batch(0, 0, 1).chunks
        vectors = [system.forward(chunks[0])[0]["dense"] for _ in range(2)]
        system.save(tmp_path / f"saved{tuning}")
        return vectors

    one, two = passes(dropout=False)
    torch.testing.assert_close(one, two, atol=0, rtol=0)
    one, two = passes()
    assert (one - two).abs().max() > 1e-3
    name = "dropout_rate" if kind == "t5" else "hidden_dropout_prob"
    saved = json.loads((tmp_path / "saved{'dropout': False}" / "config.json").read_text())
    assert saved[name] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("tuning", "encoder", "message"),
    [
        ({"method": "prompt"}, {}, "projection 48: found method prompt and sides tied, expected method finetune"),
        ({"sides": "query"}, {}, "projection 48: found method finetune and sides query, expected method finetune"),
        ({"projection": 0}, {}, "parameter projection 0: expected at least 1"),
        ({}, {"dimension": 8}, "projection 48, parameter dimension 8: vectors of a new layer are not cut"),
    ],
)
def test_options_that_contradict_a_projection_are_refused(
    tmp_path: Path, tuning: dict[str, Any], encoder: dict[str, Any], message: str
) -> None:
    folder = save_t5(tmp_path / "t5")
    with pytest.raises(InputError, match=message):
        system_over(folder, EncoderOptions(dtype="float32", compile="never", **encoder), **{"projection": 48, **tuning})


def test_a_backbone_that_has_a_projection_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"projection 48: .* has a layer after pooling already \(2_Dense\)"):
        system_over(save_gtr(tmp_path / "gtr"), EncoderOptions(), projection=48)
