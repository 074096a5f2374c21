"""The weights of basic prompts that an encoder reports: against HYPER's equations, query by query in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from synthesisers import SIZES, random_synthesis

from riptide.base.errors import InputError
from riptide.retriever.encoding import encoder as encoder_module
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.prompts.saved_synthesis import SavedSynthesis
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of


def plain_weights(words: np.ndarray, saved: SavedSynthesis) -> np.ndarray:
    """Returns softmax(LayerNorm(W2^T GELU(W1 x)) . p^ / tau), x the maximum of the embeddings of words [n, d]."""
    tensors = {name: tensor.double().numpy() for name, tensor in saved.tensors.items()}
    hidden = torch.nn.functional.gelu(torch.from_numpy(tensors["adapter.0.weight"] @ words.max(axis=0))).numpy()
    query = tensors["adapter.2.weight"] @ hidden
    query = (query - query.mean()) / np.sqrt(query.var() + 1e-5) * tensors["norm.weight"] + tensors["norm.bias"]
    scores = np.array([query @ prompt.max(axis=0) for prompt in tensors["basic"]]) / saved.options.temperature
    exponentials = np.exp(scores - scores.max())
    return exponentials / exponentials.sum()


def test_weights_equal_the_equations(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A block holds two texts. A text without words has no weights."""
    monkeypatch.setattr(encoder_module, "_WEIGHT_BLOCK", 2)
    encoder = Encoder(str(tiny("bert")), EncoderOptions(dtype="float32", compile="never"), tasks={})
    saved = random_synthesis()
    encoder.put_task("computed", TaskPrompt(backbone_of(encoder.config), encoder.options, None, None, synthesis=saved))
    texts = ["river bank", "money", "漢字 ???", "the water flows fast", "alpha beta gamma", ""]
    weights = encoder.prompt_weights(texts, task="computed")
    assert (weights.shape, weights.dtype) == ((6, SIZES["prompts"]), np.float32)
    assert np.isnan(weights).all(axis=1).tolist() == [False, False, True, False, False, True]
    table = encoder._eager.backbone.get_input_embeddings().weight.double().numpy()
    for text, row in zip(texts, weights, strict=True):
        if not np.isnan(row).any():
            ids = encoder.tokenize([text], side="query").ids[1:-1]  # without [CLS] and [SEP]
            np.testing.assert_allclose(row, plain_weights(table[ids], saved), atol=1e-5)
    assert np.abs(weights[0] - weights[4]).max() > 1e-3


def test_a_task_without_computed_prompts_is_refused(tiny: Callable[..., Path]) -> None:
    encoder = Encoder(str(tiny("bert")), EncoderOptions(dtype="float32", compile="never"), tasks={})
    matrix = torch.zeros(2, 2, 4, 3, 8)
    encoder.put_task("fixed", TaskPrompt(backbone_of(encoder.config), encoder.options, matrix, matrix))
    with pytest.raises(InputError, match="task 'fixed': all its queries have the same prompt"):
        encoder.prompt_weights(["river"], task="fixed")
    with pytest.raises(InputError, match="no such task"):
        encoder.prompt_weights(["river"], task="other")
