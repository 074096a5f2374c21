"""Model folders with hostile sizes, weights and tokenizers are refused in one line, or give the right vectors."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_classifier, save_encoder
from transformers import AlbertConfig, AlbertModel

from riptide.base.errors import InputError
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions, describe
from riptide.retriever.encoding.reranker import Reranker
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.model.weights import read_tensors
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options.lora import LoraOptions
from riptide.retriever.options.reranking import CrossEncoderOptions
from riptide.retriever.systems.cross import CrossSystem
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.systems.lora import adapter_bytes
from riptide.retriever.systems.masking import MaskedLanguageModel

FLOAT32 = EncoderOptions(dtype="float32", compile="never")
TEXTS = ["the river bank", "money flows : a bank of water", "x"]
QUERY = "encoder.layer.0.attention.self.query.weight"
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of small models of several kinds."""
    root = tmp_path_factory.mktemp("models")
    return {kind: save_encoder(root / kind, kind) for kind in ("bert", "t5", "qwen3")}


@pytest.fixture
def model(saved: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """model(change, kind) copies the folder of a small model and changes it."""

    def copied(change: Change, kind: str = "bert") -> Path:
        folder = Path(shutil.copytree(saved[kind], tmp_path / kind))
        change(folder)
        return folder

    return copied


def fields(name: str, **values: Any) -> Change:
    """Sets fields of a JSON file."""

    def change(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def config(**values: Any) -> Change:
    return fields("config.json", **values)


def tokenizer(**values: Any) -> Change:
    return fields("tokenizer.json", **values)


def tensors(make: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    """Replaces tensors."""

    def change(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        save_file(stored | make(stored), folder / "model.safetensors", metadata={"format": "pt"})

    return change


def sentence_files(pooling: dict[str, Any], package: str = "sentence_transformers.models") -> Change:
    """Adds sentence-transformers' files."""

    def change(folder: Path) -> None:
        kinds = {"Transformer": "", "Pooling": "1_Pooling"}
        modules = [{"type": f"{package}.{kind}", "path": path} for kind, path in kinds.items()]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))

    return change


def fifo(name: str) -> Change:
    """Replaces a file by a FIFO, from which a reader waits for a writer."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def sharded_twice(folder: Path) -> None:
    """Splits the weights into two files, of which the second holds another tensor of the same name too."""
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + (name > QUERY)}-of-00002.safetensors" for name in stored}
    for file in set(files.values()):
        part = {name: value for name, value in stored.items() if files[name] == file} | {QUERY: stored[QUERY] * 0}
        save_file(part if "00002-" in file else part | {QUERY: stored[QUERY]}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


# Before, these took memory or time in proportion to a number in the file, waited, or were read as other models.
DESCRIBED: dict[str, tuple[Change, str]] = {
    "a billion labels": (config(num_labels=10**9), "num_labels: 1,000,000,000 labels, expected at most 100,000"),
    "labels of a nested configuration": (config(text_config={"num_labels": 10**9}), "expected at most 100,000"),
    "causal attention": (config(is_causal=True), "is_causal is true"),
    "integers as weights": (tensors(lambda t: {QUERY: t[QUERY].long()}), f"{QUERY} is I64: expected F64"),
    "weights of 8 bits": (tensors(lambda t: {QUERY: t[QUERY].to(torch.float8_e4m3fn)}), "is F8_E4M3: expected F64"),
    "a tensor in two files": (sharded_twice, "which another file of the model holds too"),
    "a pipe as configuration": (fifo("config.json"), "not a file: expected a JSON file"),
    "no pooling": (sentence_files({"pooling_mode_mean_tokens": False}), "no pooling mode is true"),
    "a module of another package": (
        sentence_files({"pooling_mode": "mean"}, "sentence_transformers_evil"),
        "module sentence_transformers_evil.Transformer is not supported",
    ),
}
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}
SPECIAL = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}]
TEMPLATE = {
    "type": "TemplateProcessing",
    "pair": SPECIAL,
    "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}},
}
OPENED: dict[str, tuple[str, Change, str]] = {
    "more layers than tensors": ("bert", config(num_hidden_layers=99), "the weights lack"),
    "layers wider than the weights": ("bert", config(intermediate_size=10**9), "describes a model of 130,"),
    "more positions than the weights": ("bert", config(max_position_embeddings=10**9), "the weight files have"),
    "more token types than the weights": ("bert", config(type_vocab_size=10**9), "the weight files have"),
    "an attention that needs other settings": (
        "qwen3",
        config(layer_types=["full_attention", "chunked_attention"]),
        "config.json: cannot be loaded",
    ),
    "a window of 0 tokens": (
        "qwen3",
        config(sliding_window=0, use_sliding_window=True, layer_types=["sliding_attention"] * 2),
        "config.json: cannot be loaded",
    ),
    "a distance of 0": ("t5", config(relative_attention_max_distance=0), "config.json: cannot be loaded"),
    "replacements that grow": (
        "bert",
        tokenizer(normalizer={"type": "Sequence", "normalizers": [REPLACE] * 3}),
        "can make a text 2,500 times as long",
    ),
    "a normaliser that deletes all": (
        "bert",
        tokenizer(normalizer={**REPLACE, "pattern": {"Regex": "."}, "content": ""}),
        "gives a text only special tokens",
    ),
    "a template without the text": (
        "bert",
        tokenizer(post_processor={**TEMPLATE, "single": SPECIAL}),
        "gives a text only special tokens",
    ),
    "a pipe as settings of the tokenizer": ("bert", fifo("added_tokens.json"), "not a file: expected a JSON file"),
}
BACKTRACKING = tokenizer(normalizer={**REPLACE, "pattern": {"Regex": "^(([a-z ])+.)+[A-Z]([a-z])+$"}, "content": ""})


def transliterations(folder: Path) -> None:
    pairs = {"ä": "ae", "ö": "oe", "ü": "ue", "Ä": "Ae", "Ö": "Oe", "Ü": "Ue", "ß": "ss"}
    steps = [{**REPLACE, "pattern": {"String": one}, "content": other} for one, other in pairs.items()]
    tokenizer(normalizer={"type": "Sequence", "normalizers": steps})(folder)


def georgian(folder: Path) -> None:
    """Makes a vocabulary without Latin letters, and without a token for what it lacks."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "\u10d0": 5, "\u10d1": 6}
    tokenizer(model={"type": "BPE", "vocab": vocabulary, "merges": []})(folder)


# Unusual models that are right.
ACCEPTED: dict[str, Change] = {
    "the mask of a GPT-2": tensors(lambda t: {"h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)}),
    "one replacement for each letter": tokenizer(normalizer=REPLACE),
    "many replacements, none of what another one inserts": transliterations,
    "a vocabulary without Latin letters": georgian,
    "one pooling of the old form that is false": sentence_files({"pooling_mode_cls_token": False}),
}


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        action()
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("case", DESCRIBED)
def test_a_hostile_model_is_refused_before_it_is_loaded(model: Callable[..., Path], case: str) -> None:
    change, message = DESCRIBED[case]
    folder = model(change)
    assert message in refusal(lambda: describe(str(folder), FLOAT32))


@pytest.mark.parametrize("case", OPENED)
def test_a_hostile_model_is_refused_before_it_encodes(model: Callable[..., Path], case: str) -> None:
    kind, change, message = OPENED[case]
    folder = model(change, kind)
    assert message in refusal(lambda: Encoder(str(folder), FLOAT32, threads=1))


@pytest.mark.parametrize("case", ACCEPTED)
def test_an_unusual_model_is_opened(model: Callable[..., Path], case: str) -> None:
    assert np.isfinite(Encoder(str(model(ACCEPTED[case])), FLOAT32, threads=1).encode(["\u10d0", *TEXTS])).all()


def test_layers_that_share_weights_are_opened(saved: dict[str, Path], tmp_path: Path) -> None:
    """There are more layers than tensors."""
    folder = Path(shutil.copytree(saved["bert"], tmp_path / "albert"))
    shape = AlbertConfig(
        vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"],
        hidden_size=32,
        embedding_size=16,
        num_hidden_layers=40,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=61,
    )
    AlbertModel(shape).save_pretrained(folder)
    assert len(load_file(folder / "model.safetensors")) < 40
    assert np.isfinite(Encoder(str(folder), FLOAT32, threads=1).encode(TEXTS)).all()


def test_a_pattern_that_backtracks_ends_with_a_line(model: Callable[..., Path]) -> None:
    """The tokenizer's library gives up after a number of steps, with a panic that is no Exception."""
    encoder = Encoder(str(model(BACKTRACKING)), FLOAT32, threads=1)
    text = "a bank of water " * 8
    assert "the tokenizer fails at one of 1 texts" in refusal(lambda: encoder.encode([text]))


def test_a_pattern_that_backtracks_ends_the_re_ranker_with_a_line(model: Callable[..., Path]) -> None:
    reranker = Reranker(str(make_classifier(model(BACKTRACKING))), threads=1)
    text = "a bank of water " * 8
    assert "the tokenizer fails at one of 1 texts" in refusal(lambda: reranker.score(["a"], [text]))


@pytest.mark.parametrize("strategy", [{"Fixed": 10**9}, "BatchLongest"])
def test_padding_of_the_tokenizer_takes_no_memory(saved: dict[str, Path], tmp_path: Path, strategy: Any) -> None:
    """Before, the allocator ended the process. The vectors are those without padding."""
    padding = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
    multiple = 10**9 if strategy == "BatchLongest" else None
    folder = Path(shutil.copytree(saved["bert"], tmp_path / "bert"))
    tokenizer(padding={**padding, "strategy": strategy, "pad_to_multiple_of": multiple})(folder)
    vectors = [Encoder(str(each), FLOAT32, threads=1).encode(TEXTS) for each in (saved["bert"], folder)]
    np.testing.assert_array_equal(*vectors)


def test_a_dense_layer_wider_than_its_weights_takes_no_memory(model: Callable[..., Path]) -> None:
    folder = model(sentence_files({"pooling_mode": "mean"}))
    (folder / "2_Dense").mkdir()
    dense = {"in_features": 32, "out_features": 10**12, "bias": False}
    (folder / "2_Dense/config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": torch.zeros(8, 32)}, folder / "2_Dense/model.safetensors")
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"type": "sentence_transformers.models.Dense", "path": "2_Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    line = refusal(lambda: Encoder(str(folder), FLOAT32, threads=1))
    assert "expected tensors weight [1000000000000, 32], got weight [8, 32]" in line


def pickled(make: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    """Replaces tensors, and saves them as a state dict."""

    def change(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save(stored | make(stored), folder / "pytorch_model.bin")

    return change


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.float8_e4m3fn])
def test_a_state_dict_whose_weights_would_be_cast_is_refused(model: Callable[..., Path], dtype: torch.dtype) -> None:
    """Before, the first was cast with a warning, and the others without."""
    folder = model(pickled(lambda stored: {QUERY: stored[QUERY].to(dtype)}))
    assert f"{QUERY} is {dtype}: expected F64" in refusal(lambda: Encoder(str(folder), FLOAT32, threads=1))


def test_a_state_dict_with_the_mask_of_a_gpt_2_is_opened(model: Callable[..., Path]) -> None:
    folder = model(pickled(lambda stored: {"h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)}))
    assert np.isfinite(Encoder(str(folder), FLOAT32, threads=1).encode(TEXTS)).all()


TRAINED: dict[str, tuple[str, Change, str]] = {
    "causal attention": ("bert", *DESCRIBED["causal attention"]),
    "a pipe as configuration": ("bert", fifo("config.json"), "not a file: expected a"),
    **{name: OPENED[name] for name in ("an attention that needs other settings", "a window of 0 tokens")},
}


@pytest.mark.parametrize("case", TRAINED)
def test_a_hostile_re_ranker_is_refused_before_its_first_batch(model: Callable[..., Path], case: str) -> None:
    """Before, a causal one was trained, the pipe was waited for, and the others ended with a traceback."""
    kind, change, message = TRAINED[case]
    folder = make_classifier(model(lambda _: None, kind))
    change(folder)
    options = CrossEncoderOptions(max_length=32, batch=1, negatives_per_query=1)
    assert message in refusal(lambda: CrossSystem(folder, options, None, device=torch.device("cpu")))
    assert message in refusal(lambda: Reranker(str(folder), threads=1))


def test_a_distance_of_0_is_refused_before_pretraining(model: Callable[..., Path]) -> None:
    recipe = read_recipe(model(config(relative_attention_max_distance=0), "t5"), FLOAT32)
    assert "config.json: cannot be loaded" in refusal(lambda: MaskedLanguageModel(recipe, "mean"))


def test_the_size_of_an_adapter_of_wide_layers_takes_no_memory(model: Callable[..., Path]) -> None:
    recipe = read_recipe(model(config(intermediate_size=10**9)), FLOAT32)
    size = adapter_bytes(recipe, LoraOptions(rank=1, targets=("intermediate.dense",)))
    assert size == 4 * 2 * (32 + 10**9)  # A and B of two layers


def test_a_pipe_is_no_file_of_tensors(tmp_path: Path) -> None:
    for name in ("a.bin", "a.safetensors"):
        os.mkfifo(tmp_path / name)
        assert "not a file: expected tensors" in refusal(partial(read_tensors, tmp_path / name))


CHANGED = "files of the model changed while they were used"


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("opens", [Encoder, Reranker])
def test_a_file_that_is_replaced_while_a_model_is_opened_is_noticed(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, file: str, opens: type[Encoder] | type[Reranker]
) -> None:
    """Before, the vectors were those of the new file, and the settings beside them those of the former one."""
    folder = make_classifier(model(lambda _: None))
    module = importlib.import_module(opens.__module__)
    load = {Encoder: "open_pooled", Reranker: "_load_classifier"}[opens]
    original = getattr(module, load)

    def replace(*arguments: Any) -> Any:
        content = (folder / file).read_bytes()
        (folder / "new").write_bytes(content if file == "model.safetensors" else content + b"\n")
        os.replace(folder / "new", folder / file)
        if file == "model.safetensors":
            tensors(lambda stored: {f"bert.{QUERY}": stored[f"bert.{QUERY}"] * 2})(folder)
        return original(*arguments)

    monkeypatch.setattr(module, load, replace)
    assert CHANGED in refusal(lambda: opens(str(folder), threads=1))


@pytest.mark.parametrize("method", ["prompt", "lora"])
def test_a_backbone_that_is_replaced_while_it_is_trained_is_noticed(
    model: Callable[..., Path], tmp_path: Path, method: Literal["prompt", "lora"]
) -> None:
    """Before, the adapter was merged into the new weights, and the prompt was saved as one for them."""
    folder = model(lambda _: None)
    tuning = TuneOptions(method=method, lora=LoraOptions(rank=1) if method == "lora" else None)
    system = DualEncoderSystem(folder, EncoderOptions(), tuning, None, device=torch.device("cpu"), dtype=torch.float32)
    tensors(lambda stored: {QUERY: stored[QUERY] * 2})(folder)
    assert CHANGED in refusal(lambda: system.save(tmp_path / "saved"))


def test_special_tokens_that_fill_the_positions_are_named_with_the_folder(model: Callable[..., Path]) -> None:
    single = [*SPECIAL * 70, {"Sequence": {"id": "A", "type_id": 0}}]
    folder = model(tokenizer(post_processor={**TEMPLATE, "single": single}))
    line = refusal(lambda: Encoder(str(folder), FLOAT32, threads=1))
    assert line.startswith(f"{folder}: 61 positions leave no room beside 70 special tokens: use another model")
