"""LoRA: only the adapter is trained and kept in checkpoints; merged, it gives the vectors that PEFT gives with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import save_bert
from training_cases import Checkpoints, dual_system, gradients, train, whole_and_resumed
from transformers import AutoModel

from riptide.base.errors import InputError
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options import SIDES
from riptide.retriever.options.lora import LoraOptions
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.systems.lora import add_adapter, is_adapter
from riptide.retriever.training.stepping import trained_parameters

LORA = LoraOptions(rank=4, alpha=8, dropout=0.1)
LAYERS = [f"encoder.layer.{layer}.attention.self.{name}" for layer in (0, 1) for name in ("query", "value")]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"), spread=0.2)


def lora_system(bert: Path, lora: LoraOptions = LORA, **options: Any) -> DualEncoderSystem:
    return dual_system(bert, method="lora", lora=lora, **options)


def saved(system: DualEncoderSystem, folder: Path) -> Path:
    folder.mkdir()
    system.save(folder)
    return folder


@pytest.mark.parametrize("targets", [None, ("all-linear",), ("key", "output.dense")])
def test_merged_vectors_equal_those_of_the_adapter(bert: Path, tmp_path: Path, targets: tuple[str, ...] | None) -> None:
    """Of the trained system, of the merged folder in riptide and sentence-transformers, of the adapter in PEFT."""
    from peft import PeftModel
    from sentence_transformers import SentenceTransformer

    system = lora_system(bert, LoraOptions(rank=4, alpha=8, targets=targets))
    assert system.data is not None
    texts = list(system.data.queries[:9])
    before = system.encode(texts, "query")
    train(system, Checkpoints(tmp_path / "kept"))
    actual = system.encode(texts, "query")
    assert np.abs(actual - before).max() > 1e-2
    folder = saved(system, tmp_path / "model")
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} <= {".json", ".safetensors"}
    merged = Encoder(str(folder), EncoderOptions(dtype="float32", compile="never"))
    np.testing.assert_allclose(merged.encode(texts), actual, atol=1e-5)
    peer = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    np.testing.assert_allclose(peer.encode(texts, prompt_name="query"), actual, atol=1e-5)

    model = PeftModel.from_pretrained(AutoModel.from_pretrained(bert), folder / "adapter").eval()
    tokens = merged.tokenize(texts, side="query")
    for row, vector in enumerate(actual):
        ids = torch.from_numpy(tokens.ids[tokens.starts[row] :][: tokens.lengths[row]].astype(np.int64))[None]
        with torch.no_grad():
            hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        np.testing.assert_allclose(vector, hidden[0, 0].numpy(), atol=1e-5)


def test_untied_adapters_are_merged_into_a_model_of_each_side(bert: Path, tmp_path: Path) -> None:
    system = lora_system(bert, sides="untied")
    assert system.data is not None
    texts = list(system.data.queries[:9])
    train(system, Checkpoints(tmp_path / "kept"))
    vectors = {side: system.encode(texts, side) for side in SIDES}
    assert np.abs(vectors["query"] - vectors["passage"]).max() > 1e-3
    folder = saved(system, tmp_path / "model")
    for side in SIDES:
        assert (folder / side / "adapter" / "adapter_model.safetensors").is_file()
        merged = Encoder(str(folder / side), EncoderOptions(dtype="float32", compile="never"))
        np.testing.assert_allclose(merged.encode(texts, side=side), vectors[side], atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_reaches_the_adapter_only(bert: Path, tmp_path: Path, checkpointing: bool) -> None:
    """Activation checkpointing changes no gradient; training changes no weight of the backbone."""
    system = lora_system(bert)
    names = {name.removeprefix("backbone.backbone.") for name in trained_parameters(system.module)}
    assert names == {f"{layer}.lora_{side}.default.weight" for layer in LAYERS for side in "AB"}
    backbone = {name: value.clone() for name, value in system.pooled.backbone.state_dict().items()}
    train(system, Checkpoints(tmp_path / "kept"), steps=2)
    for name, value in system.pooled.backbone.state_dict().items():
        assert torch.equal(value, backbone[name]) == (not is_adapter(name)), name
    if checkpointing:
        from riptide.retriever.training.system import checkpoint_activations

        expected = gradients(system, 3)
        checkpoint_activations(system.pooled.backbone)
        actual = gradients(system, 3)
        assert actual.keys() == expected.keys()
        for name, value in actual.items():
            torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(expected[name]), atol=1e-6, rtol=1e-5)
            assert name == "loss" or float(torch.as_tensor(value).abs().max()) > 0


def test_a_run_that_was_killed_ends_with_the_same_files(bert: Path, tmp_path: Path) -> None:
    def run(checkpoints: Checkpoints) -> DualEncoderSystem:
        system = lora_system(bert)
        train(system, checkpoints)
        return system

    whole, resumed = whole_and_resumed(run, tmp_path)
    folders = [saved(system, tmp_path / name) for name, system in (("first", whole), ("second", resumed))]
    files = [
        {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in folders
    ]
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors", "model.safetensors"} <= files[0].keys()
    assert files[0] == files[1]


def test_a_checkpoint_holds_the_adapter_alone(bert: Path, tmp_path: Path) -> None:
    train(lora_system(bert), Checkpoints(tmp_path / "kept"))
    with safe_open(tmp_path / "kept" / "last", "pt") as file:
        assert {*file.keys()} == {
            f"{kind}.backbone.backbone.{layer}.lora_{side}.default.weight"
            for kind in ("weight", "exp_avg", "exp_avg_sq")
            for layer in LAYERS
            for side in "AB"
        }


def test_the_adapter_is_in_pefts_format(bert: Path, tmp_path: Path) -> None:
    """The same names and settings as PEFT writes itself for the same configuration."""
    from peft import LoraConfig, get_peft_model

    folder = saved(lora_system(bert), tmp_path / "model") / "adapter"
    config = LoraConfig(task_type="FEATURE_EXTRACTION", r=4, lora_alpha=8, lora_dropout=0.1)
    get_peft_model(AutoModel.from_pretrained(bert), config).save_pretrained(tmp_path / "peer")
    names = [sorted(load_file(each / "adapter_model.safetensors")) for each in (folder, tmp_path / "peer")]
    assert names[0] == names[1]
    ours, theirs = (json.loads((each / "adapter_config.json").read_text()) for each in (folder, tmp_path / "peer"))
    theirs |= {"base_model_name_or_path": None, "target_modules": sorted(theirs["target_modules"])}
    assert ours == theirs


def test_all_linear_layers_but_the_poolers(bert: Path) -> None:
    backbone = AutoModel.from_pretrained(bert)
    add_adapter(backbone, LoraOptions(targets=("all-linear",)))
    adapted = {name.partition(".lora_")[0] for name, value in backbone.named_parameters() if value.requires_grad}
    assert len(adapted) == 12
    assert not any("pooler" in name for name in adapted)


def test_a_backbone_in_bfloat16_has_an_adapter_in_float32(bert: Path, tmp_path: Path) -> None:
    system = lora_system(bert, dtype=torch.bfloat16)
    dtypes = {is_adapter(name): value.dtype for name, value in system.pooled.backbone.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    train(system, Checkpoints(tmp_path / "kept"), steps=2)
    merged = load_file(saved(system, tmp_path / "model") / "model.safetensors")
    assert {value.dtype for value in merged.values()} == {torch.float32}


def test_bad_options_are_one_line(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"rank": 0}, {"alpha": 0}, {"dropout": 1.0}, {"targets": ()}, {"targets": ("",)}):
        with pytest.raises(InputError, match="parameter lora_"):
            LoraOptions(**options)
    with pytest.raises(InputError, match=r"lora_targets q_proj: a BertModel .* some of dense, key, query, value"):
        lora_system(bert, LoraOptions(targets=("q_proj",)))
    with pytest.raises(InputError, match="expected options of an adapter for method lora alone"):
        TuneOptions(method="lora")
    with pytest.raises(InputError, match="expected options of an adapter for method lora alone"):
        TuneOptions(lora=LORA)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match="LoRA needs the package peft, which is not installed: pip install"):
        lora_system(bert)
