"""SPLADE pooling over a masked language model: a vector has one weight per vocabulary word."""

from __future__ import annotations

from typing import Any

import torch

from riptide.retriever.encoding.language_model import extract_language_model_head
from riptide.retriever.forward.pooling import PooledBackbone, takes_positions
from riptide.retriever.forward.prompt_rows import PromptRows
from riptide.retriever.model.recipe import Recipe

# Maximum number of logits in memory at a time: about 32 MiB on a CPU.
_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 27}


class SpladePooled(PooledBackbone):
    """A masked language model with SPLADE pooling: arguments of `PooledBackbone` -> float32 [b, vocabulary].

    v_w = max over the tokens of a text, special tokens included, of log(1 + ReLU(logit_w)) (SPLADE v2). The logarithm
    does not fall, so only the largest logit of each word goes through it, and the backward pass needs no logits.

    Args:
        whole: A transformers model with a masked-language-model head.
        recipe: The recipe of the model folder.
    """

    def __init__(self, whole: Any, recipe: Recipe):
        backbone = whole.base_model
        super().__init__(
            backbone, recipe.pooling, recipe.padding_side, takes_positions(backbone), recipe.first_position
        )
        # Bypasses nn.Module, because the submodules are registered below; `model_to_save` returns the whole model.
        object.__setattr__(self, "_whole", whole)
        self.head = extract_language_model_head(whole)
        self.vocabulary_size = recipe.dim

    @property
    def model_to_save(self) -> Any:
        """The model to save: the backbone with its head."""
        return self._whole

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor, prompt: PromptRows | None = None) -> torch.Tensor:
        states, is_token, _ = self.states(ids, lengths, prompt)
        block = max(1, _LOGITS[states.device.type] // (states.shape[1] * self.vocabulary_size))
        largest = [
            self._largest(states[at : at + block], is_token[at : at + block]) for at in range(0, len(states), block)
        ]
        return torch.cat(largest).relu().log1p()

    def _largest(self, states: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
        """Returns the maximum logit of each word over the tokens of a text, float32 [b, vocabulary].

        Args:
            states: Last hidden states, [b, n, hidden].
            is_token: bool [b, n], False at padding.
        """
        # Padding becomes a copy of the first token, which changes no maximum: a mask over all logits would add a third
        # to the time of the product that makes them. In training, max stores the position of each maximum for the
        # backward pass, whereas amax would store all logits. Without gradients, amax takes an eighth of max's time.
        first = is_token.int().argmax(1)[:, None, None].expand(-1, 1, states.shape[2])
        logits = self.head(inputs_embeds=states.where(is_token[..., None], states.gather(1, first))).logits
        largest = logits.max(1).values if torch.is_grad_enabled() else logits.amax(1)
        return largest.to(torch.promote_types(largest.dtype, torch.float32))


def keep_largest(weights: torch.Tensor, count: int) -> torch.Tensor:
    """Keeps the `count` largest weights of each row, float [n, width], and sets the others to 0.

    Of equal weights, those of the first words are kept. NaN is kept too, so that a check for it finds it.
    """
    if count >= weights.shape[1]:
        return weights
    limit = weights.topk(count, 1).values[:, -1:]
    above, equal = ~(weights <= limit), weights == limit
    room = count - above.sum(1, keepdim=True)
    return weights.where(above | (equal & (equal.cumsum(1) <= room)), 0.0)
