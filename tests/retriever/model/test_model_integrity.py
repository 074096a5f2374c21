"""A damaged model folder is refused in one line, or gives the vectors of a strict load of the same file."""

from __future__ import annotations

import json
import pickle
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import save_encoder, save_piece_tokenizer
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

from riptide.base.errors import InputError
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions, describe
from riptide.retriever.encoding.reranker import Reranker
from riptide.retriever.model import model_folder
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.options import DEFAULT_OPTIONS
from riptide.retriever.options.reranking import CrossEncoderOptions
from riptide.retriever.systems.cross import CrossSystem
from riptide.retriever.systems.masking import MaskedLanguageModel

Tiny = Callable[..., Path]
FLOAT32 = EncoderOptions(dtype="float32", compile="never")
TEXTS = ["the river bank", "money flows : a bank of water", "x"]
SENTENCE_FILES = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    ],
    "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
    "2_Dense/config.json": {
        "in_features": 32,
        "out_features": 8,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    },
    "sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": False},
    "config_sentence_transformers.json": {"prompts": {}},
}


def small(folder: Path, kind: str, layers: int = 1) -> Path:
    """Saves a model with few tensors; "bert" is in sentence-transformers' layout with a dense head."""
    save_encoder(folder, kind, layers=layers)
    if kind == "bert":
        with_dense(folder)
    return folder


def with_dense(folder: Path) -> Path:
    """Adds sentence-transformers' files, and a dense layer from 32 to 8 numbers."""
    for name, content in SENTENCE_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    generator = torch.Generator().manual_seed(1)
    layer = {"linear.weight": torch.randn(8, 32, generator=generator), "linear.bias": torch.zeros(8)}
    save_file(layer, folder / "2_Dense/model.safetensors")
    return folder


def strict_vectors(folder: Path) -> np.ndarray:
    """Vectors without this project's loader and without transformers': strict load_state_dict, one text at a time.

    Raises whatever the libraries raise if the files do not fit.
    """
    content = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    if content["model_type"] == "t5":
        model: torch.nn.Module = T5EncoderModel(T5Config(**content))
        state["encoder.embed_tokens.weight"] = state["shared.weight"]  # tied: the file holds it once
    else:
        config, kind = {"bert": (BertConfig, BertModel), "roberta": (RobertaConfig, RobertaModel)}[
            content["model_type"]
        ]
        model = kind(config(**content), add_pooling_layer=False)
        state = {name: tensor for name, tensor in state.items() if not name.startswith("pooler.")}
    model.load_state_dict(state, strict=True)
    head = torch.nn.Identity()
    if (folder / "2_Dense").exists():
        json.loads((folder / "1_Pooling/config.json").read_text())["pooling_mode_mean_tokens"]
        size = json.loads((folder / "2_Dense/config.json").read_text())["out_features"]
        linear = torch.nn.Linear(32, size)
        stored = load_file(folder / "2_Dense/model.safetensors")
        linear.load_state_dict({name.removeprefix("linear."): tensor for name, tensor in stored.items()}, strict=True)
        head = torch.nn.Sequential(linear, torch.nn.Tanh())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vectors = []
    with torch.no_grad():
        for text in TEXTS:
            ids = torch.tensor([tokenizer.encode(text).ids])
            hidden = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
            vectors.append(head(hidden.mean(1))[0].numpy())
    return np.stack(vectors)


def refused(action: Callable[[], object]) -> str | None:
    """The one line of a refusal, None if there is none; any other exception fails the test."""
    line = None
    try:
        action()
    except InputError as error:
        line = str(error)
    assert line is None or (line.strip() and "\n" not in line), line
    return line


def refusal(folder: Path) -> str | None:
    """The refusal of an encoder's folder, None if it gives vectors."""
    return refused(lambda: Encoder(str(folder), FLOAT32, threads=1).encode(TEXTS))


def agrees(folder: Path) -> bool:
    """Whether a folder is accepted; the vectors of an accepted one must be those of the strict load."""
    vectors: list[np.ndarray] = []
    if refused(lambda: vectors.append(Encoder(str(folder), FLOAT32, threads=1).encode(TEXTS))) is not None:
        return False
    np.testing.assert_allclose(vectors[0], strict_vectors(folder), atol=1e-5, rtol=1e-5)
    return True


def damaged_tensors(stored: dict[str, torch.Tensor]) -> Iterator[tuple[str, str, dict[str, torch.Tensor]]]:
    """(tensor, damage, tensors of the damaged file), each tensor in turn."""
    for name, tensor in stored.items():
        others = {key: value for key, value in stored.items() if key != name}
        yield name, "dropped", others
        yield name, "renamed", {**others, f"{name}_old": tensor}
        yield name, "truncated", {**others, name: tensor[:-1].clone()}
        yield name, "zeroed", {**others, name: torch.zeros_like(tensor)}


@pytest.mark.parametrize("kind", ["bert", "roberta", "t5"])
def test_each_tensor_damaged_in_turn(tmp_path: Path, kind: str) -> None:
    folder = small(tmp_path / kind, kind)
    assert agrees(folder)
    for file in sorted(folder.rglob("model.safetensors")):
        whole, stored = file.read_bytes(), load_file(file)
        for name, damage, tensors in damaged_tensors(stored):
            save_file(tensors, file, metadata={"format": "pt"})
            expected = damage == "zeroed" or (name.startswith("pooler.") and damage in ("dropped", "renamed"))
            assert agrees(folder) == expected, (file.parent.name, name, damage)
        file.write_bytes(whole)
    assert agrees(folder)


# Files without which a folder still says the same.
COMPLETE_WITHOUT = {"sentence_bert_config.json", "config_sentence_transformers.json"}


@pytest.mark.parametrize("kind", ["bert", "roberta", "t5"])
def test_each_file_damaged_in_turn(tmp_path: Path, kind: str) -> None:
    folder = small(tmp_path / kind, kind)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        whole = file.read_bytes()
        for damage, content in {
            "dropped": None,
            "renamed": None,
            "emptied": b"",
            "truncated": whole[: len(whole) // 2],
            "zeroed": bytes(len(whole)),
        }.items():
            file.unlink()
            if damage == "renamed":
                file.with_name(f"old-{file.name}").write_bytes(whole)
            if content is not None:
                file.write_bytes(content)
            expected = content is None and file.name in COMPLETE_WITHOUT
            assert agrees(folder) == expected, (file.name, damage)
            file.with_name(f"old-{file.name}").unlink(missing_ok=True)
            file.write_bytes(whole)
    assert agrees(folder)


@pytest.mark.parametrize("name", [*SENTENCE_FILES, "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_json_of_the_wrong_kind_is_refused(tmp_path: Path, name: str) -> None:
    file = small(tmp_path / "bert", "bert") / name
    wrong = [b"5", b'"text"', b"null", b"\xff\xfe{}", b"{" * 5, b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"{} x"]
    wrong.append(b"{}" if name == "modules.json" else b"[]")
    for content in wrong:
        file.write_bytes(content)
        assert refusal(tmp_path / "bert"), content[:20]
    file.unlink()
    file.mkdir()
    assert refusal(tmp_path / "bert")
    file.rmdir()
    file.symlink_to(tmp_path / "nowhere")
    assert refusal(tmp_path / "bert")


WRONG_FIELDS: dict[str, list[dict[str, Any]]] = {
    "config.json": [
        *(
            {name: value}
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
            for value in ("abc", -1, 0, None, [32], {}, True, 32.5, 10**9)
        ),
        {"vocab_size": 10},
        {"num_attention_heads": 3},
        {"model_type": "nonsense"},
        {"model_type": 5},
        {"model_type": "clip"},
        {"architectures": "BertModel"},
        {"architectures": [1]},
        {"hidden_act": "nonsense"},
        {"max_position_embeddings": 0},
        {"max_position_embeddings": "x"},
        {"pad_token_id": 10**6},
        {"layer_norm_eps": "small"},
        {"type_vocab_size": 0},
        {"intermediate_size": 65},
    ],
    "modules.json": [],
    "1_Pooling/config.json": [
        {"pooling_mode": 5},
        {"pooling_mode": ["mean", 5]},
        {"pooling_mode_mean_tokens": "yes"},
        {"include_prompt": "no"},
    ],
    "2_Dense/config.json": [{"out_features": value} for value in ("abc", -1, 0, None, 9, True)]
    + [{"bias": "yes"}, {"bias": False}, {"activation_function": 5}, {"module_input_name": 5}],
    "sentence_bert_config.json": [{"max_seq_length": value} for value in ("abc", -1, 0, [1], True, 2.5)]
    + [{"do_lower_case": "no"}, {"modality_config": []}, {"query_length": 62}, {"document_length": "long"}],
    "config_sentence_transformers.json": [{"prompts": []}, {"prompts": {"query": 5}}, {"prompts": "x"}],
    "tokenizer_config.json": [
        {"model_max_length": "long"},
        {"padding_side": "up"},
        {"padding_side": 1},
        {"tokenizer_class": 5},
        {"added_tokens_decoder": {"x": {"content": "y"}}},
        {"extra_special_tokens": 7},
        {"unk_token": ""},
        {"unk_token": {"content": "", "__type": "AddedToken"}},
    ],
}


# Fields that nothing reads here: transformers accepts them, and the vectors are the same.
UNREAD_FIELDS = ({"architectures": "BertModel"}, {"architectures": [1]}, {"model_max_length": "long"})


@pytest.mark.parametrize("name", [name for name, cases in WRONG_FIELDS.items() if cases])
def test_fields_of_the_wrong_type_are_refused(tmp_path: Path, name: str) -> None:
    file = small(tmp_path / "bert", "bert") / name
    content = json.loads(file.read_text())
    for change in WRONG_FIELDS[name]:
        file.write_text(json.dumps({**content, **change}))
        if name == "1_Pooling/config.json" and "pooling_mode" not in change:
            file.write_text(json.dumps(change))
        assert agrees(tmp_path / "bert") == (change in UNREAD_FIELDS), change


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ({"path": "../.."}, "leaves the model folder"),
        ({"path": "/etc"}, "leaves the model folder"),
        ({"path": 5}, "expected a folder inside"),
        ({"path": None}, "expected a folder inside"),
        ({"path": "nowhere"}, "no such file"),
        ({"type": 5}, "expected modules with type and path"),
        ({}, "expected modules with type and path"),
    ],
)
def test_modules_without_a_path_inside_the_folder_are_refused(tmp_path: Path, module: dict, message: str) -> None:
    folder = small(tmp_path / "bert", "bert")
    for place in (0, 1, 2):
        modules = json.loads(json.dumps(SENTENCE_FILES["modules.json"]))
        if module:
            modules[place] |= module
        else:
            del modules[place]["path"]
        (folder / "modules.json").write_text(json.dumps(modules))
        assert message in str(refusal(folder))


def test_weight_files_that_are_damaged(tmp_path: Path) -> None:
    folder = small(tmp_path / "roberta", "roberta")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content in (
        b"",
        b"\0" * 8,
        whole[:7],
        whole[:-1],
        whole + b"\0",
        b"\xff" * 8 + whole[8:],
        whole[:8] + b"[" + whole[9:],
        whole[:20] + b"\xff" + whole[21:],
    ):
        file.write_bytes(content)
        assert str(folder) in str(refusal(folder))
    file.unlink()
    file.mkdir()
    assert "no model.safetensors" in str(refusal(folder))


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple:
        return Path.touch, (self.file,)


def test_pickled_weights_run_no_code(tmp_path: Path) -> None:
    folder = small(tmp_path / "bert", "bert")
    mark = tmp_path / "code-ran"
    for inner in (folder, folder / "2_Dense"):
        stored = load_file(inner / "model.safetensors")
        (inner / "model.safetensors").rename(inner / "kept")
        file = inner / "pytorch_model.bin"
        for content in (b"", b"no zip", pickle.dumps({"a": Payload(mark)}), pickle.dumps(5)):
            file.write_bytes(content)
            assert str(inner) in str(refusal(folder))
        torch.save({**stored, "a": Payload(mark)}, file)
        assert str(inner) in str(refusal(folder))
        assert not mark.exists()
        torch.save(stored, file)
        (inner / "kept").rename(inner / "model.safetensors")
        expected = strict_vectors(folder)
        (inner / "model.safetensors").unlink()
        np.testing.assert_allclose(Encoder(str(folder), FLOAT32).encode(TEXTS), expected, atol=1e-5)
        file.unlink()
        save_file(stored, inner / "model.safetensors", metadata={"format": "pt"})


def test_shards_that_are_missing(tmp_path: Path) -> None:
    folder = small(tmp_path / "roberta", "roberta")
    expected = strict_vectors(folder)
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(stored)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, tensors in shards.items():
        save_file({name: stored[name] for name in tensors}, folder / shard, metadata={"format": "pt"})
    assert "neither model.safetensors nor model.safetensors.index.json" in str(refusal(folder))
    index = folder / "model.safetensors.index.json"
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    for wrong in (
        [],
        {},
        {"weight_map": []},
        {"weight_map": {"a": 5}},
        {"weight_map": {"a": "../model.safetensors"}},
        {"weight_map": {**weight_map, "a": "model-00003-of-00003.safetensors"}},
    ):
        index.write_text(json.dumps(wrong))
        assert str(index) in str(refusal(folder))
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    np.testing.assert_allclose(Encoder(str(folder), FLOAT32).encode(TEXTS), expected, atol=1e-5)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "names model-00002-of-00002.safetensors, which is not in the folder" in str(refusal(folder))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["bert", "roberta", "t5"])
def test_layers_and_prefixes_that_differ(tmp_path: Path, kind: str) -> None:
    """The prefix that transformers itself maps stays accepted, as do a language-model head and a decoder."""
    original = small(tmp_path / "original", kind, layers=2)
    vectors = Encoder(str(original), FLOAT32).encode(TEXTS)
    layer = "encoder.block.1." if kind == "t5" else "encoder.layer.1."
    key = "num_layers" if kind == "t5" else "num_hidden_layers"

    def altered(name: str, change: Any = None, **config: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(original, folder)
        if change:
            rewrite(folder, change)
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | config))
        return folder

    lost = refusal(altered("lost", lambda stored: {n: t for n, t in stored.items() if not n.startswith(layer)}))
    assert f"the weights lack {layer}" in str(lost)
    assert "more, which a" in str(lost)
    other = refusal(altered("other", lambda stored: {f"x.{n}": t for n, t in stored.items()}))
    assert "the weights lack" in str(other)
    more = refusal(altered("more", **{key: 3}))
    assert f"the weights lack {layer.replace('1', '2')}" in str(more)
    fewer = refusal(altered("fewer", **{key: 1}))
    assert f"layers that config.json does not use: {layer}" in str(fewer)
    negative = refusal(altered("negative", **{key: -1}))
    assert "num_hidden_layers: expected an integer of at least 1, got -1" in str(negative)
    if kind != "t5":
        mapped = altered("mapped", lambda stored: {f"{kind}.{n}": t for n, t in stored.items()})
        np.testing.assert_array_equal(Encoder(str(mapped), FLOAT32).encode(TEXTS), vectors)
        mapped_fewer = altered("mapped-fewer", lambda s: {f"{kind}.{n}": t for n, t in s.items()}, **{key: 1})
        assert "layers that config.json does not use" in str(refusal(mapped_fewer))


def test_weights_of_unused_parts_are_accepted(tmp_path: Path) -> None:
    size = save_piece_tokenizer(tmp_path / "bert")
    shape = {
        "vocab_size": size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 61,
    }
    for kind in (BertForMaskedLM, BertForSequenceClassification):
        kind(BertConfig(**shape)).save_pretrained(tmp_path / "bert")
        assert refusal(tmp_path / "bert") is None
    save_piece_tokenizer(tmp_path / "t5")
    config = T5Config(vocab_size=size, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, num_decoder_layers=3)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    assert refusal(tmp_path / "t5") is None


def test_heads_are_whole_or_absent_where_training_may_add_them(tmp_path: Path) -> None:
    """Masked language modelling and the re-ranker start from a backbone without a head; nothing else may be missing."""
    size = save_piece_tokenizer(tmp_path / "bert")
    shape = {
        "vocab_size": size,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 61,
        "num_labels": 1,
    }

    def reranker(folder: Path) -> None:
        CrossSystem(folder, CrossEncoderOptions(max_length=20), None, device=torch.device("cpu"))

    def masked(folder: Path) -> None:
        MaskedLanguageModel(read_recipe(folder, DEFAULT_OPTIONS))

    def outcome(load: Callable[[Path], None], model: Any, without: str | None) -> str | None:
        model.save_pretrained(tmp_path / "bert")
        if without is not None:
            rewrite(tmp_path / "bert", lambda stored: {n: t for n, t in stored.items() if without not in n})
        return refused(lambda: load(tmp_path / "bert"))

    plain, language, classifier = (
        kind(BertConfig(**shape)) for kind in (BertModel, BertForMaskedLM, BertForSequenceClassification)
    )
    for load in (reranker, masked):
        for model in (plain, language, classifier):
            assert outcome(load, model, None) is None
            assert "layer.0.output.dense.weight" in str(outcome(load, model, "layer.0.output.dense.weight"))
    assert outcome(reranker, plain, "pooler") is None
    assert "pooler.dense.bias" in str(outcome(reranker, plain, "pooler.dense.bias"))
    assert "classifier.bias" in str(outcome(reranker, classifier, "classifier.bias"))
    assert "transform.dense.bias" in str(outcome(masked, language, "transform.dense.bias"))
    for lost in ("classifier", "pooler", "layer.0.output.dense.weight"):
        assert lost in str(outcome(lambda folder: Reranker(str(folder)) and None, classifier, lost))
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "bert") is not None  # transformers itself does not object


def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    for kind in ("bert", "roberta", "t5"):
        folder = small(tmp_path / kind, kind)
        (folder / "tokenizer.json").unlink()
        assert str(folder) in str(refusal(folder))
    folder = small(tmp_path / "special", "bert")
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {token: number for token, number in vocabulary.items() if number < 5}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert "holds special tokens only" in str(refusal(folder))
    content["model"]["vocab"] = {**vocabulary, "far": 5_000}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert "ids reach 5000, and the model has" in str(refusal(folder))
    content["model"]["vocab"] = {token: number for token, number in vocabulary.items() if token != "[UNK]"}
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "[UNK]"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert refusal(folder)


def test_a_token_without_an_embedding_is_named_with_its_text(tmp_path: Path) -> None:
    folder = small(tmp_path / "bert", "bert")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<later>"])
    tokenizer.save_pretrained(folder)
    encoder = Encoder(str(folder), FLOAT32)
    assert np.isfinite(encoder.encode(TEXTS)).all()
    with pytest.raises(InputError, match=r"text 1 of 2: token id \d+ has no embedding"):
        encoder.encode(["the river", "a <later> bank"])


def test_unknown_tokens_are_counted_without_special_ones(tiny: Tiny) -> None:
    encoder = Encoder(str(tiny("bert")), FLOAT32)
    for texts, expected in [(["the river", "é bank"], (1, 4)), (["é ü", ""], (2, 2)), ([], (0, 0)), ([""], (0, 0))]:
        assert encoder.unknown_tokens(encoder.tokenize(texts, side="passage")) == expected


def test_a_token_that_ends_texts_does_not_count_as_unknown(tiny: Tiny) -> None:
    """Qwen2 and GPT-2 name their end of text as the unknown token, and know all text."""
    folder = tiny("bert")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "[UNK]"}))
    encoder = Encoder(str(folder), EncoderOptions(dtype="float32", compile="never", append_eos=True))
    for texts, expected in [(["the river"], (0, 2)), (["", ""], (0, 0))]:
        assert encoder.unknown_tokens(encoder.tokenize(texts, side="passage")) == expected


def test_config_args_may_leave_out_the_last_layers(tmp_path: Path) -> None:
    folder = small(tmp_path / "bert", "bert", layers=2)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"config_args": {"num_hidden_layers": 1}}))
    assert refusal(folder) is None


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if a kernel, remote code or the network is reached; the package `kernels` counts as installed."""
    from huggingface_hub import constants
    from transformers import modeling_utils
    from transformers.integrations import hub_kernels
    from transformers.models.auto import auto_factory, configuration_auto, tokenization_auto
    from transformers.utils import hub

    def reached(name: str) -> Callable[..., None]:
        return lambda *arguments, **named: pytest.fail(f"{name} was reached with {arguments} {named}")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda *_: True)
    monkeypatch.setattr(modeling_utils, "is_offline_mode", lambda: False)
    for module, name in [
        (modeling_utils, "lazy_import_flash_attention"),
        (hub_kernels, "get_kernel"),
        (hub_kernels, "load_and_register_attn_kernel"),
        (hub_kernels, "lazy_load_kernel"),
        (auto_factory, "get_class_from_dynamic_module"),
        (configuration_auto, "get_class_from_dynamic_module"),
        (tokenization_auto, "get_class_from_dynamic_module"),
        (hub, "hf_hub_download"),
        (hub, "snapshot_download"),
        (socket.socket, "connect"),
        (socket, "getaddrinfo"),
        (model_folder, "find_model_folder"),
    ]:
        monkeypatch.setattr(module, name, reached(name))


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize(
    "place", ["config_args", "config_kwargs", "tokenizer_args", "processor_kwargs", "model_args", "model_kwargs"]
)
def test_arguments_that_load_code_are_refused_by_name(tmp_path: Path, place: str) -> None:
    folder = small(tmp_path / "bert", "bert")
    file = folder / "sentence_bert_config.json"
    for arguments in [
        {"attn_implementation": "evil/kernel", "allow_all_kernels": True},
        {"allow_all_kernels": True},
        {"attn_implementation": "evil/kernel"},
        {"trust_remote_code": True},
        {"code_revision": "main"},
        {"use_kernels": True},
        {"kernel_config": {"a": "evil/kernel"}},
        {"quantization_config": {"quant_method": "x"}},
        {"gguf_file": "x"},
        {"subfolder": ".."},
        {"cache_dir": "/"},
        {"proxies": {}},
        {"token": "x"},
        {"name_or_path": "evil/model"},
        {"tokenizer_file": "/etc/passwd"},
        {"vocab_file": "/etc/passwd"},
        {"config": {}},
        {"state_dict": {}},
        {"device_map": "auto"},
        {"_from_auto": True},
        {"init_inputs": ["x"]},
        {"auto_map": {"AutoConfig": "evil--x.Y"}},
        {"tokenizer_type": "rag"},
        {"mistral_format": True},
    ]:
        file.write_text(json.dumps({place: arguments}))
        message = refusal(folder)
        assert message is not None, arguments
        assert any(name in message for name in arguments), message
    for wrong in ([], "x", {"model_max_length": "x"}, {"num_hidden_layers": "x"}, {"add_pooling_layer": 5}):
        file.write_text(json.dumps({place: wrong}))
        assert refusal(folder)


@pytest.mark.usefixtures("sealed")
def test_known_arguments_still_count(tmp_path: Path) -> None:
    folder = small(tmp_path / "bert", "bert")
    settings = {
        "max_seq_length": 40,
        "config_args": {"hidden_dropout_prob": 0.2, "pad_token_id": 0},
        "tokenizer_args": {"model_max_length": 30, "padding_side": "left"},
        "model_args": {"attn_implementation": "flash_attention_2", "torch_dtype": "float32"},
    }
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    assert refusal(folder) is None
    recipe = read_recipe(folder, FLOAT32)
    assert (recipe.padding_side, recipe.query_length) == ("left", 40)
    assert recipe.config_args == settings["config_args"]
    assert recipe.tokenizer_args == settings["tokenizer_args"]
    settings["model_args"] |= {"trust_remote_code": True}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    assert "trust_remote_code" in (refusal(folder) or "")
    assert read_recipe(folder, FLOAT32, trust_remote_code=True).query_length == 40


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("kind", ["bert", "roberta", "t5"])
def test_no_field_of_config_json_loads_code_or_kernels(tmp_path: Path, kind: str) -> None:
    folder = small(tmp_path / kind, kind)
    content = json.loads((folder / "config.json").read_text())
    for change in [
        {"_attn_implementation": "evil/kernel"},
        {"attn_implementation": "evil/kernel:function"},
        {"attn_implementation": {"": "evil/kernel"}},
        {"_attn_implementation_internal": "evil/kernel"},
        {"attn_implementation": "flash_attention_2"},
        {"_experts_implementation": "evil/kernel"},
        {"text_config": {"_attn_implementation": "evil/kernel"}},
        {"use_kernels": True},
        {"kernel_config": {"kernel_mapping": {"a": "evil/kernel"}}},
        {"fusion_config": {"patch_embeddings": True}},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"transformers_weights": "x.safetensors"},
        {"configuration_files": ["config.1.0.0.json"]},
        {"gguf_file": "x.gguf"},
        {"use_timm_backbone": True, "backbone": "evil"},
        {"model_type": "evil", "auto_map": {"AutoConfig": "x.Y"}},
        {"tokenizer_class": "AutoModel"},
        {"tokenizer_class": "os.system"},
    ]:
        (folder / "config.json").write_text(json.dumps(content | change))
        message = refusal(folder)
        assert message is not None, change
        assert any(name in message for name in (*change, "_attn_implementation")), message
    # Remote code for an architecture that transformers has: transformers' own is used, and nothing is fetched.
    code = {"AutoConfig": "evil/code--x.Y", "AutoModel": "x.Y"}
    (folder / "config.json").write_text(json.dumps(content | {"auto_map": code}))
    (folder / "x.py").write_text("raise SystemExit('code of the model ran')")
    assert agrees(folder)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/base", "peft_type": "LORA"}')
    assert "adapters are not supported" in str(refusal(folder))


@pytest.mark.usefixtures("sealed")
def test_no_field_of_tokenizer_config_json_loads_code(tmp_path: Path) -> None:
    folder = small(tmp_path / "bert", "bert")
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text())
    for change in [
        {"fast_tokenizer_files": ["tokenizer.1.0.0.json"]},
        {"gguf_file": "x"},
        {"init_inputs": ["/etc/passwd"]},
        {"tokenizer_class": "AutoTokenizer"},
        {"tokenizer_class": "AutoModel"},
        {"tokenizer_class": "evil.Class"},
        {"tokenizer_class": "pipeline"},
    ]:
        file.write_text(json.dumps(content | change))
        message = refusal(folder)
        assert message is not None, change
        assert any(name in message for name in change), message
    (folder / "x.py").write_text("raise SystemExit('code of the model ran')")
    for auto_map in (
        {"AutoTokenizer": ["x.Slow", "x.Fast"]},
        ["x.Slow", "x.Fast"],
        {"AutoTokenizer": [None, "e--x.F"]},
    ):
        file.write_text(json.dumps(content | {"auto_map": auto_map}))
        assert refusal(folder) is not None or agrees(folder)
    for change in ({"tokenizer_file": "/etc/passwd"}, {"vocab_file": "/etc/passwd"}, {"name_or_path": "evil/model"}):
        file.write_text(json.dumps(content | change))
        assert agrees(folder)


def test_describing_a_model_refuses_before_weights_are_loaded(tmp_path: Path) -> None:
    """Jobs describe a model before they begin an artifact: files that are damaged are found then."""
    folder = small(tmp_path / "bert", "bert")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "unused.json"))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(InputError, match=r"model\.safetensors: cannot be loaded"):
        describe(folder)
