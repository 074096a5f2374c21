"""The attention function that prepends the keys and values of a prompt to those of a layer.

transformers looks the attention function of most models up in a table, and passes unknown arguments of `model(...)` on
to it. `enable_prompts` registers `attend` there for one backbone. Then `backbone(ids, ..., prompt=PromptRows(...))`
makes every layer attend to the prompt as well. Masks, windows and causality of the model apply among the tokens of the
text; the prompt is always attended to. The prompt itself has no positions: in T5 its columns have a relative bias of 0.
The text starts at its usual position; a caller that wants it to start after the prompt passes `position_ids`, see
`PromptRows.position_offsets`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from riptide.base.errors import InputError
from riptide.retriever.forward.kernels import attention, is_attention_faster
from riptide.retriever.forward.prompt_rows import PromptRows, PromptShape
from riptide.retriever.model.libraries import import_transformers

_NAME = "riptide"
_LAYER = "_riptide_layer"


class _Probe:
    """A stand-in for a prompt that records the attention layers of a forward pass in their order."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.shapes: list[tuple[int, int]] = []


def enable_prompts(backbone: Any) -> PromptShape:
    """Makes a transformers model use `attend`, which equals sdpa when there is no prompt.

    Returns:
        The shape of the keys and values of a prompt.

    Raises:
        InputError: If the model's attention does not go through transformers' attention interface, or if its layers
            share weights or differ in shape.
    """
    transformers = import_transformers()
    from transformers.masking_utils import sdpa_mask

    transformers.AttentionInterface.register(_NAME, attend)
    # transformers would omit a mask that masks nothing; then numerics would depend on the other texts of the batch.
    whole = functools.partial(_mask, sdpa_mask)
    transformers.AttentionMaskInterface.register(_NAME, whole)
    kind = type(backbone).__name__
    probe = _Probe()
    training = backbone.training
    device = next(backbone.parameters()).device
    ids = torch.zeros((1, 2), dtype=torch.int64, device=device)
    try:
        backbone.set_attn_implementation(_NAME)
        with torch.no_grad():
            backbone.eval()(input_ids=ids, attention_mask=torch.ones_like(ids), prompt=probe)
    except (ValueError, TypeError, AttributeError) as error:
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise InputError(f"{kind}: no prompts can be put in: {reason}") from error
    finally:
        backbone.train(training)
    if not probe.modules:
        raise InputError(
            f"{kind}: no prompts can be put in, as its attention does not go through transformers' attention interface"
        )
    if len(set(probe.shapes)) > 1 or len({id(module) for module in probe.modules}) < len(probe.modules):
        raise InputError(f"{kind}: no prompts can be put in, as its layers share weights or differ in shape")
    for layer, module in enumerate(probe.modules):
        setattr(module, _LAYER, layer)
    return PromptShape(len(probe.modules), *probe.shapes[0])


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    prompt: PromptRows | _Probe | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """Computes attention over prompt and text, with the signature of transformers' attention functions.

    Args:
        module: The attention layer.
        query: [b, heads, n, head_dim].
        key: [b, heads, n, head_dim].
        value: [b, heads, n, head_dim].
        attention_mask: bool, or a float tensor that is added, over the tokens of the text.
        prompt: The prompts of the rows.
        position_bias: T5's bias, [1, heads, n, n].
        **kwargs: Further arguments, passed on.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if isinstance(prompt, _Probe):
        prompt.modules.append(module)
        prompt.shapes.append((key.shape[1], key.shape[3]))
    elif prompt is not None:
        batch, tokens = key.shape[0], key.shape[2]
        own_key, own_value = prompt.keys_and_values(getattr(module, _LAYER), batch, key.dtype)
        key = torch.cat([own_key, key], dim=2)
        value = torch.cat([own_value, value], dim=2)
        length = own_key.shape[2]
        if attention_mask is not None or prompt.is_prompt_token is not None:
            attention_mask = _mask_with_prompt(prompt.prompt_columns(batch), attention_mask, batch, tokens)
        if position_bias is not None:
            position_bias = nn.functional.pad(position_bias, (length, 0))
    if position_bias is not None:
        kwargs["position_bias"] = position_bias
    elif (
        not kwargs.get("dropout")
        and (attention_mask is not None or not getattr(module, "is_causal", False))
        and is_attention_faster(query, key, attention_mask)
    ):
        output = attention(query, key, value, attention_mask, kwargs.get("scaling"))
        return output.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _mask_with_prompt(prompt_columns: torch.Tensor, mask: torch.Tensor | None, batch: int, tokens: int) -> torch.Tensor:
    """Returns the attention mask over prompt and text.

    Args:
        prompt_columns: As `PromptRows.prompt_columns` returns it, bool [b, 1, 1, l].
        mask: The mask over the text, bool or float [.., tokens]; None: all of it is seen.
        batch: Number of rows.
        tokens: Number of tokens of the text.
    """
    if mask is None:
        mask = prompt_columns.new_ones((1, 1, 1, tokens))
    if mask.dtype != torch.bool:
        added = torch.zeros_like(prompt_columns, dtype=mask.dtype)
        prompt_columns = added.masked_fill(~prompt_columns, torch.finfo(mask.dtype).min)
    _, heads, rows, _ = mask.shape
    return torch.cat([prompt_columns.expand(batch, heads, rows, -1), mask.expand(batch, -1, -1, -1)], dim=3)


def _mask(function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return function(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
