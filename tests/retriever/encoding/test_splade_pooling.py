"""SPLADE's head alone: weights against a float64 loop over words and tokens, gradients by finite differences."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loss_checks import assert_gradient, random
from tiny import add_masked_head

from riptide.retriever.encoding import sparse_model as module
from riptide.retriever.encoding.backbones import open_pooled
from riptide.retriever.encoding.sparse_model import SpladePooled
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.options import EncoderOptions

Tiny = Callable[..., Path]
LENGTHS = [9, 4, 1, 7, 9]


def opened(folder: Path, dtype: torch.dtype = torch.float32, side: str = "right") -> SpladePooled:
    options = EncoderOptions(pooling="splade", padding_side=side)  # type: ignore[arg-type]
    pooled = open_pooled(read_recipe(folder, options), dtype).eval()
    assert isinstance(pooled, SpladePooled)
    return pooled


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("logits", [1, 1000, 1 << 23])
def test_the_largest_logit_of_the_unpadded_tokens_counts(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, side: str, logits: int
) -> None:
    """The same in blocks of one text, of several, and of all."""
    monkeypatch.setitem(module._LOGITS, "cpu", logits)
    pooled = opened(add_masked_head(tiny("bert"), spread=0.2), side=side)
    lengths = torch.tensor(LENGTHS)
    ids = torch.randint(5, pooled.vocabulary_size, (5, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        actual = pooled(ids, lengths)
        states, inside, _ = pooled.states(ids, lengths, None)
        head = copy.deepcopy(pooled.model_to_save).double().cls
        scores = head(states.double()).tolist()
    assert actual.dtype == torch.float32
    zeros = 0
    for text, length in enumerate(LENGTHS):
        columns = range(length) if side == "right" else range(9 - length, 9)
        assert [column for column in range(9) if inside[text, column]] == list(columns)
        for word in range(pooled.vocabulary_size):
            expected = max(math.log(1 + max(0.0, scores[text][column][word])) for column in columns)
            assert float(actual[text, word]) == pytest.approx(expected, abs=1e-6)
            zeros += expected == 0
    assert 0 < zeros < actual.numel()


def test_gradients_equal_finite_differences(tiny: Tiny) -> None:
    """By the last states, and by the rows of the tied table, through backbone and head."""
    pooled = opened(add_masked_head(tiny("bert"), spread=0.2), torch.float64)
    inside = torch.arange(5)[None] < torch.tensor([5, 3])[:, None]
    factors = random(2, pooled.vocabulary_size, seed=1)
    assert_gradient(lambda states: (pooled._largest(states, inside).relu().log1p() * factors).sum(), random(2, 5, 32))
    ids, lengths = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 0, 0]]), torch.tensor([5, 3])
    table = pooled.backbone.embeddings.word_embeddings  # type: ignore[union-attr]

    def loss(rows: torch.Tensor) -> torch.Tensor:
        """The loss with other rows of the words 6 and 7; the table is that of the head too."""
        weight = torch.cat([table.weight[:6].detach(), rows, table.weight[8:].detach()])  # type: ignore[index]
        named = {"backbone.embeddings.word_embeddings.weight": weight, "head.cls.predictions.decoder.weight": weight}
        return (torch.func.functional_call(pooled, named, (ids, lengths), tie_weights=False) * factors).sum()

    assert_gradient(loss, table.weight[6:8].detach())  # type: ignore[index]
