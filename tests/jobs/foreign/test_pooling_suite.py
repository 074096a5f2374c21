"""sentence-transformers' tests of pooling: the vectors of given token vectors, padded on either side."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from riptide.retriever.forward.pooling import PooledBackbone

TOKENS = [[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [99.0, 99.0]], [[10.0, 20.0], [30.0, 40.0], [50.0, 60.0], [70.0, 80.0]]]
NUMBERS = [[[1.0], [2.0], [3.0], [4.0]], [[5.0], [6.0], [7.0], [8.0]]]
CASES = [
    ("cls", "right", TOKENS, [3, 4], [[1.0, 2.0], [10.0, 20.0]]),
    ("mean", "right", TOKENS, [3, 4], [[3.0, 4.0], [40.0, 50.0]]),
    ("last", "right", TOKENS, [3, 4], [[5.0, 6.0], [70.0, 80.0]]),
    ("cls", "right", NUMBERS, [3, 2], [[1.0], [5.0]]),
    ("cls", "left", NUMBERS, [2, 3], [[3.0], [6.0]]),
    ("last", "right", [[[0.0], [1.0], [2.0], [3.0]], NUMBERS[1]], [3, 2], [[2.0], [6.0]]),
    ("mean", "right", [[[1.0], [3.0], [5.0]]], [2], [[2.0]]),
]


class Given(nn.Module):
    """A backbone that returns given token vectors."""

    def __init__(self, tokens: list[list[list[float]]]) -> None:
        super().__init__()
        self.tokens = torch.tensor(tokens, requires_grad=True)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.tokens)


@pytest.mark.parametrize(("pooling", "side", "tokens", "lengths", "expected"), CASES)
def test_pooled_vectors_are_the_expected_ones(
    pooling: str, side: str, tokens: list[list[list[float]]], lengths: list[int], expected: list[list[float]]
) -> None:
    backbone = Given(tokens)
    pooled = PooledBackbone(backbone, pooling, side, takes_positions=False)
    vectors = pooled(torch.zeros(backbone.tokens.shape[:2], dtype=torch.int64), torch.tensor(lengths))
    assert vectors.tolist() == expected
    vectors.sum().backward()
    is_changed = backbone.tokens.grad.abs().sum(-1) > 0
    assert is_changed.sum(1).tolist() == (lengths if pooling == "mean" else [1] * len(lengths))
