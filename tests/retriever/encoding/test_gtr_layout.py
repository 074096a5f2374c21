"""T5 encoders and the layout of the published gtr-t5 folders: vectors, further training, and refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from t5_folders import LENGTH, save_gtr, save_t5
from transformers import AutoModel, OPTConfig, OPTModel, T5EncoderModel

from riptide.base.errors import InputError
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions, describe
from riptide.retriever.model.weights import load_model

FLOAT32 = EncoderOptions(dtype="float32", compile="never")


@pytest.mark.parametrize("size", [48, 32])
def test_a_published_layout_gives_the_vectors_of_sentence_transformers(
    tmp_path: Path, texts: list[str], size: int
) -> None:
    """Also if the projection keeps the number of dimensions."""
    folder = save_gtr(tmp_path / "gtr", size=size)
    settings = describe(folder)
    assert (settings["pooling"], settings["query_length"], settings["dim"]) == ("mean", LENGTH, size)
    assert [step if isinstance(step, str) else step["activation"] for step in settings["head"]] == [
        "Identity",
        "normalize",
    ]
    encoder = Encoder(str(folder), FLOAT32)
    assert encoder.similarity == "cosine"
    peer = SentenceTransformer(str(folder), device="cpu")
    expected = np.concatenate([peer.encode([text]) for text in texts])
    np.testing.assert_allclose(encoder.encode(texts), expected, atol=1e-5, rtol=0)


def test_the_projection_is_float32_over_a_backbone_in_bfloat16(tmp_path: Path, texts: list[str]) -> None:
    """The pooled vectors are those of the backbone in bfloat16; the product with W is not rounded to bfloat16."""
    folder = save_gtr(tmp_path / "gtr")
    found = Encoder(str(folder), EncoderOptions(dtype="bfloat16", compile="never")).encode(texts)
    plain = EncoderOptions(dtype="bfloat16", compile="never", pooling="mean", query_length=LENGTH)
    (folder / "modules.json").unlink()
    for file in ("config_sentence_transformers.json", "1_Pooling/config.json"):
        (folder / file).unlink()
    (folder / "1_Pooling").rmdir()
    pooled = Encoder(str(folder), plain).encode(texts).astype(np.float64)
    weight = torch.load(folder / "2_Dense" / "pytorch_model.bin")["linear.weight"].double().numpy()
    expected = pooled @ weight.T
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_t5_with_both_halves_opens_by_its_encoder(tmp_path: Path, texts: list[str]) -> None:
    folder = save_t5(tmp_path / "both", decoder=True)
    found = Encoder(str(folder), FLOAT32)
    alone = tmp_path / "alone"
    shutil.copytree(folder, alone)
    T5EncoderModel.from_pretrained(folder).save_pretrained(alone)
    assert not any("decoder" in name for name in load_file(alone / "model.safetensors"))
    np.testing.assert_array_equal(found.encode(texts), Encoder(str(alone), FLOAT32).encode(texts))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_t5_with_a_decoder_only_is_refused_in_one_line(
    tmp_path: Path, kind: str, documented: Callable[..., None]
) -> None:
    folder = save_t5(tmp_path / "decoder", decoder=True)
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("encoder.")}
    assert any(name.startswith("decoder.") for name in kept)
    (folder / "model.safetensors").unlink()
    if kind == "safetensors":
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(kept, folder / "pytorch_model.bin")
    with pytest.raises(InputError) as caught:
        Encoder(str(folder), FLOAT32)
    message = str(caught.value)
    assert message == (
        f"{folder}: the weights hold a decoder without its encoder, which computes the vectors: give a folder with the "
        "encoder, or with both"
    )
    documented("Models", "a T5 folder with a decoder only", message, 1)


def test_a_missing_tensor_of_a_decoder_that_has_no_encoder_is_named(tmp_path: Path) -> None:
    """OPT's tensors are all of a decoder."""
    config = OPTConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=2,
        ffn_dim=16,
        num_attention_heads=2,
        max_position_embeddings=32,
        word_embed_proj_dim=16,
    )
    OPTModel(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    [name] = [name for name in weights if name.endswith("layers.1.fc1.weight")]
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"the weights lack decoder\.layers\.1\.fc1\.weight"):
        load_model(AutoModel, tmp_path, dtype=torch.float32)
