"""int8: the kernel against exact arithmetic, its bytes on other CPUs, and the encoder against float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact_attention import exact_attention
from kernels import ARCHITECTURES, load_for
from transformers import AutoModel, BertConfig

from riptide.base.errors import InputError
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.forward import int8
from riptide.retriever.forward.int8 import Int8Layers, Int8Linear
from riptide.retriever.forward.numerics import expected_numerics
from riptide.retriever.forward.packing import KernelPrompts, PackedLayers
from riptide.retriever.forward.prompt_rows import PromptRows

Tiny = Callable[..., Path]
INT8 = EncoderOptions(dtype="int8")
WIDTH, HEADS = 128, 4


def make_layer(seed: int = 0, size: int = WIDTH) -> Any:
    """Returns a BERT layer with random weights."""
    torch.manual_seed(seed)
    config = BertConfig(
        hidden_size=size, num_attention_heads=HEADS, intermediate_size=3 * size, initializer_range=0.1, vocab_size=8
    )
    return AutoModel.from_config(config).eval().encoder.layer[0]


def attended(inward: torch.Tensor, lengths: list[int], prompt: PromptRows | None = None) -> torch.Tensor:
    """Returns what the kernel computes of queries, keys and values, [t, 3, heads, size]."""
    heads, size = inward.shape[2:]
    out = torch.full((len(inward), heads * size), -7.0)
    texts = torch.tensor(lengths)
    prompts = KernelPrompts.from_rows(prompt, len(lengths))  # holds the tensors while the kernel reads them
    int8.load_kernel().riptide_int8_attend(
        inward.data_ptr(), len(lengths), texts.data_ptr(), heads, size, *prompts.layer_arguments(0), out.data_ptr()
    )
    return out


@pytest.mark.parametrize("rows", [1, 5, 6, 50])
def test_a_product_is_that_of_the_quantised_numbers(rows: int) -> None:
    """Sums of integers are exact, so that only the last steps, in float32, round."""
    torch.manual_seed(rows)
    weight, bias = torch.randn(192, 80), torch.randn(192)
    weight[3] = 0  # an output without weights
    values = torch.randn(rows, 80) * 3 + 1
    values[0] = 0
    output = Int8Linear(weight, bias)(values)
    steps = weight.abs().amax(1, keepdim=True) / 127
    whole_weights = torch.nan_to_num(weight / steps).round()
    low, high = values.amin(1, keepdim=True).clamp(max=0), values.amax(1, keepdim=True).clamp(min=0)
    by = torch.nan_to_num(255 / (high - low), posinf=0)
    zero = (-low * by).round()
    whole = ((values * by).round() + zero).clamp(0, 255)
    exact = ((whole - zero).double() @ whole_weights.double().T) * ((high - low) / 255).double() * steps[:, 0].double()
    torch.testing.assert_close(output.double(), exact + bias.double(), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(output[0], bias)


@pytest.mark.parametrize("size", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("prompted", [False, True])
def test_attention_is_close_to_that_of_float64(size: int, prompted: bool) -> None:
    torch.manual_seed(size)
    lengths = [1, 2, 7, 8, 9, 16, 17, 31, 130, 1, 33, 600]
    inward = torch.randn(sum(lengths), 3, HEADS, size)
    prompt = None
    if prompted:  # of three prompts, one is empty; numbers lie as a table of all tasks has them
        columns = torch.arange(5) < torch.tensor([5, 0, 2])[:, None]
        table = torch.randn(5, 1, 2, 3, HEADS, size).permute(1, 2, 3, 4, 0, 5)
        prompt = PromptRows(table, torch.arange(len(lengths)) % 3, columns)
    expected = exact_attention(inward, lengths, prompt)
    torch.testing.assert_close(attended(inward, lengths, prompt).double(), expected, atol=6e-3, rtol=0)


def test_long_texts_do_not_overflow() -> None:
    """The sums of 8,192 equal weights and of the largest values fit into 32 bits."""
    inward = torch.zeros(8192, 3, 1, 16)
    inward[:, 2] = 5
    assert (attended(inward, [8192]) - 5).abs().max() < 1e-5
    inward[:, :2] = 100  # the largest products of queries and keys
    assert (attended(inward, [8192]) - 5).abs().max() < 1e-5


@pytest.mark.parametrize("size", [16, 64, 128])
def test_opposed_and_empty_keys_do_not_overflow(size: int) -> None:
    """The largest logits of both signs, and the largest one beside 0."""
    for other in (-1.0, 0.0):
        inward = torch.ones(2, 3, 1, size)
        inward[1, 1:] = other
        high, low = 1.0, float(np.exp((other - 1) * size**0.5))
        expected = (high + low * other) / (high + low)
        assert (attended(inward, [2]) - expected).abs().max() < 2e-4


@pytest.mark.parametrize("tokens", [256, 512, 1024, 8192])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.95])
def test_small_weights_beside_a_large_one_count(tokens: int, share: float) -> None:
    """One key has most of the weight, as the first token of a text often does, and all others have the rest."""
    inward = torch.zeros(tokens, 3, 1, 16)
    inward[:, 0] = 1
    inward[0, 1] = float(np.log(share / (1 - share) * (tokens - 1))) / 4
    inward[:, 2], inward[0, 2] = 1, -1
    assert (attended(inward, [tokens]) - (1 - 2 * share)).abs().max() < 0.03


@pytest.mark.parametrize("value", [-60.0, -1.0, 0.0, 2.0, 60.0])
def test_gelu_is_that_of_torch(value: float) -> None:
    """Of a layer whose first projection gives one number, and whose second one sums it."""
    layer = make_layer()
    with torch.no_grad():
        for linear in (layer.attention.output.dense, layer.intermediate.dense, layer.output.dense):
            linear.weight.zero_()
            linear.bias.zero_()
        layer.intermediate.dense.bias[0] = value
        layer.output.dense.weight[0, 0] = 1
        layer.attention.output.LayerNorm.weight.zero_()
        expected = layer.output.LayerNorm(torch.nn.functional.gelu(torch.eye(1, WIDTH) * value))
    output = run_layer(layer, torch.randn(1, WIDTH), [1])
    torch.testing.assert_close(output, expected, atol=2e-2, rtol=2e-2)


def test_a_number_that_is_not_finite_spoils_its_text_alone() -> None:
    inward = torch.randn(6, 3, 1, 16)
    for broken in (float("nan"), float("inf"), float("-inf")):
        for place in range(3):
            one = inward.clone()
            one[4, place, 0, 3] = broken
            output = attended(one, [3, 3])
            assert torch.isfinite(output[:3]).all()
            assert torch.isnan(output[3:]).all()
    inward[3:] *= 1e30  # the products of queries and keys are not finite
    output = attended(inward, [3, 3])
    assert torch.isfinite(output[:3]).all()
    assert torch.isnan(output[3:]).all()
    values = torch.randn(2, 32)
    values[1, 5] = float("nan")
    products = Int8Linear(torch.randn(64, 32), torch.zeros(64))(values)
    assert torch.isfinite(products[0]).all()
    assert torch.isnan(products[1]).all()


def run_layer(layer: Any, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return Int8Layers([layer])(hidden.clone(), torch.tensor(lengths), KernelPrompts.from_rows(None, len(lengths)))


def test_a_layer_is_close_to_that_of_transformers() -> None:
    layer, hidden = make_layer(), torch.randn(30, WIDTH)
    output = run_layer(layer, hidden, [30])
    with torch.no_grad():
        expected = layer(hidden[None])
    expected = (expected[0] if isinstance(expected, tuple) else expected).reshape(output.shape)
    assert torch.cosine_similarity(output, expected).min() > 0.9995


def test_every_layer_has_its_own_prompts() -> None:
    """Texts without a prompt, and with prompts of two lengths, in two layers; compared with float32."""
    layers, lengths = [make_layer(0), make_layer(1)], torch.tensor([3, 12, 60])
    columns = torch.arange(5) < torch.tensor([5, 0, 2])[:, None]
    table = torch.randn(5, 2, 2, 3, HEADS, WIDTH // HEADS).permute(1, 2, 3, 4, 0, 5)
    prompts = KernelPrompts.from_rows(PromptRows(table, torch.arange(3), columns), 3)
    hidden = torch.randn(75, WIDTH)
    with torch.no_grad():
        expected = PackedLayers(layers)(hidden.clone(), lengths, prompts)
    output = Int8Layers(layers)(hidden.clone(), lengths, prompts)
    assert torch.cosine_similarity(output, expected).min() > 0.999


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - {"x86-64"}))  # these fuse products and sums
def test_the_bytes_are_those_of_other_instruction_sets(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They multiply and sum in registers of other widths; one text has more keys than share a scale."""
    layer, hidden, lengths = make_layer(1), torch.randn(700, WIDTH), [1, 60, 39, 600]
    expected = run_layer(layer, hidden, lengths)
    library = int8.declare(load_for(architecture, int8.SOURCE))
    monkeypatch.setattr(int8, "load_kernel", lambda: library)
    assert run_layer(layer, hidden, lengths).numpy().tobytes() == expected.numpy().tobytes()


def test_a_vector_depends_on_its_text_alone() -> None:
    """Neither on the other texts of its batch nor on the number of threads, and it is close to that of float32."""
    texts = ["word " * count for count in range(1, 300, 7)] + ["what is a rip current ?"] * 20
    encoder = Encoder("all-MiniLM-L6-v2", INT8, threads=1)
    together = encoder.encode(texts)
    alone = np.concatenate([encoder.encode([text]) for text in texts])
    assert together.tobytes() == alone.tobytes()
    assert Encoder("all-MiniLM-L6-v2", INT8, threads=3).encode(texts).tobytes() == together.tobytes()
    exact = Encoder("all-MiniLM-L6-v2", EncoderOptions(dtype="float32"), threads=1).encode(texts)
    assert (together * exact).sum(1).min() > 0.99
    assert encoder.numerics == expected_numerics(INT8, "cpu", "bert")
    assert " int8 packed " in encoder.numerics


def test_int8_runs_on_the_cpu_of_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Encoder("all-MiniLM-L6-v2", INT8, threads=1).device.type == "cpu"
    assert expected_numerics(INT8, None, "bert").startswith("cpu ")


def test_models_and_options_without_int8_are_refused(tiny: Tiny) -> None:
    minilm = "all-MiniLM-L6-v2"
    for folder, options, device, message in (
        (tiny("t5"), {}, None, "config.json: model_type t5: int8 is for bert, camembert, electra"),
        (tiny("bert"), {}, None, "config.json: hidden_size 32: int8 needs a multiple of 64"),
        (minilm, {"compile": "always"}, None, "parameter compile always: parameter dtype int8 is not compiled"),
        (
            minilm,
            {"pooling": "splade"},
            None,
            "parameter pooling splade: expected a dense pooling with parameter dtype int8",
        ),
        (minilm, {}, "cuda", "parameter dtype int8: expected device cpu, found cuda"),
    ):
        with pytest.raises(InputError, match=message):
            Encoder(folder, EncoderOptions(dtype="int8", **options), device=device)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="parameter trust_remote_code: code of a model folder does not run with"):
        Encoder(minilm, INT8, trust_remote_code=True)
    wide = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    folder = tiny("bert", "relu", config=wide | {"hidden_act": "relu"})
    with pytest.raises(InputError, match='hidden_act "relu": int8 needs gelu'):
        Encoder(folder, INT8)
