"""The one seam for prompts: an attention function that puts a prompt's keys and values in front of a layer's own.

transformers routes the attention of most models through a table of functions, and hands unknown arguments of
`model(...)` down to them. `reach` enters ours for one backbone; `backbone(ids, ..., prompt=PromptRows(...))` then has
every layer look at the prompt too. A prompt takes no positions: the text starts at its usual one. Masks, windows and
causality stay the model's own among the text's tokens; the prompt is always seen.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn

from retriever.errors import InputError
from retriever.kernels import attention, attention_pays

_NAME = "riptide"
_LAYER = "_riptide_layer"


class PromptShape(NamedTuple):
    """What a backbone takes: layers, heads of keys and values, numbers of a head."""

    layers: int
    heads: int
    head_dim: int


class PromptRows(NamedTuple):
    """The prompts of a batch, one for each of its b rows.

    table: [layers, 2, prompts, heads, l, head_dim], keys and values. rows: int64 [b], which of the prompts; None where
    there is one, which all rows share. inside: bool [prompts, l], False behind the end of a shorter one; None where
    all have l.
    """

    table: torch.Tensor
    rows: torch.Tensor | None = None
    inside: torch.Tensor | None = None

    def of(self, layer: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer: each [batch, heads, l, head_dim]."""
        both = self.table[layer]
        if self.rows is None:
            key, value = both.expand(2, batch, *both.shape[2:]).unbind()
            return key, value
        return both[0].index_select(0, self.rows), both[1].index_select(0, self.rows)

    def seen(self, batch: int) -> torch.Tensor:
        """Which columns are a row's prompt: bool [batch, 1, 1, l]."""
        if self.inside is None:
            return self.table.new_ones((batch, 1, 1, self.table.shape[4]), dtype=torch.bool)
        inside = self.inside.expand(batch, -1) if self.rows is None else self.inside.index_select(0, self.rows)
        return inside[:, None, None]


class _Probe:
    """Passed instead of a prompt, it collects the layers that are passed through, in their order."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.shapes: list[tuple[int, int]] = []


def reach(backbone: Any) -> PromptShape:
    """Lead a transformers model's attention through the seam; without a prompt it computes what sdpa does.

    Raises InputError for a model whose attention does not go through transformers' interface.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_NAME, attend)
    # A mask that is left out where it is not needed would make the shape of the work depend on its contents.
    whole = functools.partial(_mask, sdpa_mask)
    AttentionMaskInterface.register(_NAME, whole)
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
        raise InputError(f"{kind}: no prompts can be put in, as its attention does not go through transformers' "
                         "attention interface")  # fmt: skip
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
    """Attention over prompt and text: query, key, value [b, heads, n, head_dim]; the rest as transformers passes it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if isinstance(prompt, _Probe):
        prompt.modules.append(module)
        prompt.shapes.append((key.shape[1], key.shape[3]))
    elif prompt is not None:
        batch, tokens = key.shape[0], key.shape[2]
        own_key, own_value = prompt.of(getattr(module, _LAYER), batch)
        key = torch.cat([own_key.to(key.dtype), key], dim=2)
        value = torch.cat([own_value.to(value.dtype), value], dim=2)
        length = own_key.shape[2]
        if attention_mask is not None or prompt.inside is not None:
            attention_mask = _beside(prompt.seen(batch), attention_mask, batch, tokens)
        if position_bias is not None:
            position_bias = nn.functional.pad(position_bias, (length, 0))
    if position_bias is not None:
        kwargs["position_bias"] = position_bias
    elif (
        not kwargs.get("dropout")
        and (attention_mask is not None or not getattr(module, "is_causal", False))
        and attention_pays(query, key, attention_mask)
    ):
        found = attention(query, key, value, attention_mask, kwargs.get("scaling"))
        return found.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _beside(seen: torch.Tensor, mask: torch.Tensor | None, batch: int, tokens: int) -> torch.Tensor:
    """The mask over prompt and text. seen: bool [b, 1, 1, l]; mask: bool or added, up to [b, heads, n, tokens]."""
    if mask is None:
        mask = seen.new_ones((1, 1, 1, tokens))
    if mask.dtype != torch.bool:
        added = torch.zeros_like(seen, dtype=mask.dtype)
        seen = added.masked_fill(~seen, torch.finfo(mask.dtype).min)
    _, heads, rows, _ = mask.shape
    return torch.cat([seen.expand(batch, heads, rows, -1), mask.expand(batch, -1, -1, -1)], dim=3)


def _mask(function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return function(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
