"""Attention over a packed batch in float64, as a reference for the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from riptide.retriever.forward.prompt_rows import PromptRows


def exact_attention(inward: torch.Tensor, lengths: Sequence[int], prompt: PromptRows | None) -> torch.Tensor:
    """Returns the outputs of attention, float64 [t, heads * size].

    Args:
        inward: Queries, keys and values, [t, 3, heads, size].
        lengths: Tokens of each text.
        prompt: The prompts of the texts; None: there are none.
    """
    outputs, start = [], 0
    for row, length in enumerate(lengths):
        query, key, value = inward[start : start + length].double().permute(1, 2, 0, 3)
        if prompt is not None and prompt.rows is not None and prompt.is_prompt_token is not None:
            which = int(prompt.rows[row])
            columns = int(prompt.is_prompt_token[which].sum())
            prompt_row = prompt.table[0, :, which, :, :columns].double()
            key, value = torch.cat([prompt_row[0], key], 1), torch.cat([prompt_row[1], value], 1)
        weights = torch.softmax(query @ key.transpose(1, 2) / inward.shape[-1] ** 0.5, -1)
        outputs.append((weights @ value).transpose(0, 1).flatten(1))
        start += length
    return torch.cat(outputs)
