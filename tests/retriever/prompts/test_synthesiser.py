"""The synthesiser against a slow float64 reference written from the equations, its gradients, and its kept form."""

from __future__ import annotations

import math

import pytest
import torch
from loss_checks import finite_differences, random

from riptide.base.errors import InputError
from riptide.retriever.forward.prompt_rows import PromptShape
from riptide.retriever.options.synthesis import SynthesisOptions
from riptide.retriever.prompts.synthesiser import KeptSynthesiser, Synthesiser, max_embedding

SHAPE, WIDTH = PromptShape(layers=2, heads=2, head_dim=3), 5
MIXES = ["before", "after"]


def small(**changes: object) -> Synthesiser:
    torch.manual_seed(3)
    options: dict[str, object] = {"prompts": 3, "length": 4, "hidden": 6, "bottleneck": 2, **changes}
    return Synthesiser(SHAPE, WIDTH, SynthesisOptions(**options)).double()  # type: ignore[arg-type]


def gelu(value: float) -> float:
    return value * (1 + math.erf(value / math.sqrt(2))) / 2


def product(matrix: list[list[float]], vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def slow_weights(module: Synthesiser, words: list[float]) -> list[float]:
    """Eq. 1 and 2, number by number."""
    into, _, out = module.adapter
    mixed = product(out.weight.tolist(), [gelu(value) for value in product(into.weight.tolist(), words)])
    mean = sum(mixed) / len(mixed)
    variance = sum((value - mean) ** 2 for value in mixed) / len(mixed)
    scaled = [
        (value - mean) / math.sqrt(variance + module.norm.eps) * weight + bias
        for value, weight, bias in zip(mixed, module.norm.weight.tolist(), module.norm.bias.tolist(), strict=True)
    ]
    powers = []
    for basic in module.basic.tolist():
        largest = [max(column) for column in zip(*basic, strict=True)]
        powers.append(math.exp(product([largest], scaled)[0] / module.options.temperature))
    return [power / sum(powers) for power in powers]


def slow_prefix(module: Synthesiser, token: list[float]) -> list[float]:
    """Eq. 3 for one token."""
    return product(
        module.up.weight.tolist(), [math.tanh(value) for value in product(module.down.weight.tolist(), token)]
    )


def slow_prompt(module: Synthesiser, weights: list[float]) -> list[list[float]]:
    """The prompt of a query, [m, layers * 2 * heads * head_dim]."""
    result = []
    for place in range(module.options.length):
        tokens = [basic[place] for basic in module.basic.tolist()]
        if module.options.mix == "after":
            tokens = [slow_prefix(module, token) for token in tokens]
        mixed = [
            sum(w * value for w, value in zip(weights, column, strict=True)) for column in zip(*tokens, strict=True)
        ]
        result.append(mixed if module.options.mix == "after" else slow_prefix(module, mixed))
    return result


@pytest.mark.parametrize("mix", MIXES)
def test_it_is_the_equations(mix: str) -> None:
    module, words = small(mix=mix), random(6, WIDTH)
    with torch.no_grad():
        module.norm.weight.copy_(random(WIDTH, seed=1))
        module.norm.bias.copy_(random(WIDTH, seed=2))
    rows, weights = module(words)
    layers, heads, head_dim = SHAPE
    for row, query in enumerate(words.tolist()):
        expected = slow_weights(module, query)
        assert weights[row].tolist() == pytest.approx(expected, rel=1e-6)
        prompt = torch.tensor(slow_prompt(module, expected)).view(-1, layers, 2, heads, head_dim)
        for layer in range(layers):
            keys, values = rows.keys_and_values(layer, len(words))
            torch.testing.assert_close(keys[row], prompt[:, layer, 0].transpose(0, 1).double(), rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(values[row], prompt[:, layer, 1].transpose(0, 1).double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mix", MIXES)
def test_gradients_are_those_of_finite_differences(mix: str) -> None:
    module, words, direction = small(mix=mix), random(4, WIDTH), random(2, 2, 4, 2, 4, 3, seed=5)

    def loss() -> torch.Tensor:
        rows, weights = module(words)
        return (rows.table * direction).sum() + weights.square().sum()

    loss().backward()
    for name, parameter in module.named_parameters():
        start = parameter.detach().clone()

        def at(values: torch.Tensor, parameter: torch.Tensor = parameter) -> torch.Tensor:
            with torch.no_grad():
                parameter.copy_(values)
                return loss()

        expected = finite_differences(at, start)
        at(start)
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected, atol=1e-7, rtol=1e-5, msg=name)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("attention", ["learned", "uniform"])
def test_the_kept_form_gives_the_same_prompts(mix: str, attention: str) -> None:
    module, words = small(mix=mix, attention=attention).float(), random(6, WIDTH).float()
    trained, stored = module(words), KeptSynthesiser(module, torch.float32, torch.device("cpu"))(words)
    torch.testing.assert_close(stored.rows.table, trained.rows.table)
    torch.testing.assert_close(stored.weights, trained.weights)


def test_uniform_attention_takes_all_basic_prompts_alike() -> None:
    rows, weights = small(attention="uniform")(random(2, WIDTH))
    assert weights.tolist() == [[1 / 3] * 3] * 2
    assert torch.equal(rows.table[:, :, 0], rows.table[:, :, 1])


def test_padding_does_not_count_and_embeddings_get_no_gradient() -> None:
    embeddings = random(2, 3, WIDTH).requires_grad_()
    counts = torch.tensor([[True, True, False], [False, True, False]])
    largest = max_embedding(embeddings, counts)
    assert torch.equal(largest[0], embeddings[0, :2].amax(0).float())
    assert torch.equal(largest[1], embeddings[1, 1].float())
    assert not largest.requires_grad


@pytest.mark.parametrize("change", [{"prompts": 0}, {"length": 0}, {"temperature": 0.0}, {"mix": "between"}])
def test_values_out_of_range_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"parameter \w+ .*: expected"):
        SynthesisOptions(**change)  # type: ignore[arg-type]
