"""GTR's two stages over a T5 encoder: pairs of several stores, or of the corpus alone; then hard negatives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_sets import ForeignStore, make_foreign_store
from mined import weights
from sentence_transformers import SentenceTransformer
from t5_folders import save_t5

from riptide.indexing.store.model_artifacts import model_folder
from riptide.indexing.store.store import Store
from riptide.process.memory import format_bytes
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.stepping import trained_parameters

Done = Callable[..., str]
GTR = (
    "train_retriever",
    "--train",
    "all",
    "--loss",
    "symmetric-sum",
    "--temperature",
    "0.01",
    "--optimizer",
    "adafactor",
    "--no-dropout",
    "--clip",
    1000000,
    "--split",
    "train",
    "--batch",
    8,
    "--steps",
    4,
    "--cpus",
    1,
    "--dtype",
    "float32",
)
SHAPE = ("--projection", 48, "--pooling", "mean", "--normalize", "True", "--query-length", 16, "--passage-length", 32)
PLAIN = EncoderOptions(dtype="float32", compile="never")


@pytest.fixture
def t5(world, tmp_path: Path) -> str:
    """A random T5 encoder whose tokenizer is trained on the passages of the store."""
    return str(save_t5(tmp_path / "t5", texts=[passage["text"] for passage in world.passages]))


@pytest.fixture
def foreign(tmp_path: Path, world, done: Done) -> ForeignStore:
    return make_foreign_store(tmp_path, world.model, done)


def command(world, task: str, backbone: str, *more: object) -> tuple:
    return (*GTR, "--store", world.store, "--task", task, "--backbone", backbone, *more)


def record_starts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Returns a list to which each training run adds its weights before the first step, at which it has no moments."""
    starts: list[dict[str, torch.Tensor]] = []
    step = Trainer.step

    def record(trainer: Trainer, number: int) -> Any:
        if number == 0:
            assert not trainer.stepper.optimizer.state
            starts.append(
                {name: value.detach().clone() for name, value in trained_parameters(trainer.system.module).items()}
            )
        return step(trainer, number)

    monkeypatch.setattr(Trainer, "step", record)
    return starts


def test_the_second_stage_takes_the_weights_alone(
    world,
    mined: Store,
    t5: str,
    foreign: ForeignStore,
    done: Done,
    refused: Done,
    monkeypatch: pytest.MonkeyPatch,
    documented: Callable[..., None],
) -> None:
    starts = record_starts(monkeypatch)
    done(*command(world, "stage1", t5, *SHAPE, "--negatives", "none", *foreign.training_set()))
    first = mined.open("models", "stage1")
    assert len([role for role in first.inputs if "queries" in role]) == 2
    assert first.config["tuning"].items() >= {"projection": 48, "dropout": False, "negatives_per_query": 0}.items()
    size = 4 * sum(value.numel() for value in starts[0].values())  # W included
    for backbone, more in ((t5, (*SHAPE, "--negatives", "none")), ("models/stage1", ("--negatives", "hand"))):
        assert f"trains    {format_bytes(size)}, over" in done(*command(world, "planned", backbone, *more, "--plan"))

    done(*command(world, "stage2", "models/stage1", "--negatives", "hand"))
    second = mined.open("models", "stage2")
    assert "models/stage1" in [entry["artifact"] for entry in second.inputs.values()]
    # The second stage starts with the weights of the first, W included, and with neither its moments nor its schedule.
    folder = model_folder(first)
    peer = Encoder(str(folder), PLAIN)
    projection = [value for name, value in starts[1].items() if name.startswith("head.")]
    assert [value.shape for value in projection] == [(48, 32)]
    torch.testing.assert_close(projection[0], peer._head.steps[0][0].weight.data, atol=0, rtol=0)  # type: ignore[index]
    for name, value in peer._eager.backbone.state_dict().items():
        if (start := starts[1].get(f"backbone.backbone.{name}")) is not None:
            torch.testing.assert_close(start, value, atol=0, rtol=0)
    assert len(starts[1]) > 10
    assert [row[2] for row in second.notes["curve"]] == [row[2] for row in first.notes["curve"]]
    assert second.config["tuning"]["negatives_per_query"] == 1

    # A folder holds weights alone, and a training run over it gives the same bytes.
    exported = world.store.parent / "exported"
    done("store", "export", "models/stage1", "--store", world.store, "--to", exported)
    done(*command(world, "again", str(exported), "--negatives", "hand"))
    assert weights(mined, "models/again") == weights(mined, "models/stage2")
    assert weights(mined, "models/stage2") != weights(mined, "models/stage1")

    # Both open in sentence-transformers, and a corpus is encoded by them.
    saved = model_folder(second)
    texts = [passage["text"] for passage in world.passages[:20]]
    actual = SentenceTransformer(str(saved), device="cpu", local_files_only=True).encode(texts)
    assert actual.shape == (20, 48)
    np.testing.assert_allclose(Encoder(str(saved), PLAIN).encode(texts, side="passage"), actual, atol=1e-5)
    settings = json.loads((saved / "sentence_bert_config.json").read_text())
    assert settings.items() >= {"query_length": 16, "document_length": 32}.items()

    line = refused(*command(world, "x", "models/stage1", "--negatives", "hand", "--projection", 48))
    assert "has a layer after pooling already (2_Dense)" in line
    line = line.replace(str(folder), "…/stage1")
    documented("Training", "train_retriever --projection over a model that has a projection", line, 1)


@pytest.mark.parametrize("objective", ["pairs", "rip"])
def test_the_first_stage_can_take_pairs_of_the_corpus_alone(
    world, mined: Store, t5: str, done: Done, objective: str
) -> None:
    """Two spans of each passage. The second stage adds the projection, which the first one does not have."""
    pairs = ("--unit", "span", "--min-words", 2, "--max-length", 24, "--pooling", "mean", "--batch", 8)
    done(
        "pretrain_rip",
        "--store",
        world.store,
        "--backbone",
        t5,
        "--name",
        "spans",
        "--objective",
        objective,
        *pairs,
        "--steps",
        3,
        "--cpus",
        1,
        "--dtype",
        "float32",
        "--optimizer",
        "adafactor",
    )
    settings = mined.open("models", "spans").config["rip"]
    assert "temperature" not in settings, "models that were trained before the option existed keep their fingerprints"
    assert mined.open("models", "spans").notes["options"]["normalize"] == (objective == "pairs")
    folder = model_folder(mined.open("models", "spans"))
    before, after = Encoder(t5, PLAIN), Encoder(str(folder), PLAIN)
    texts = [passage["text"] for passage in world.passages[:20]]
    peer = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    np.testing.assert_allclose(after.encode(texts), peer.encode(texts), atol=1e-5)
    assert np.abs(after.encode(texts) - before.encode(texts)).max() > 1e-3
    done(*command(world, "stage2", "models/spans", *SHAPE, "--negatives", "hand"))
    assert Encoder(str(model_folder(mined.open("models", "stage2"))), PLAIN).dim == 48
