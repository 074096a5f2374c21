"""Three things that torch trains slowly on a processor, done otherwise: bfloat16 attention, dropout, loss over words.

All are exact in what they compute up to rounding, and a function of torch's seed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class _Attention(torch.autograd.Function):
    """softmax(query key^T) value, its weights computed again for the way back.

    torch's fused kernel goes forward well in bfloat16, but back at a sixth of the speed of the five plain products.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scale = scale
        return functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [gradient] = gradients
        query, key, value, mask = ctx.saved_tensors
        scaled = query * ctx.scale
        logits = torch.matmul(scaled, key.transpose(-1, -2))
        if mask is not None:
            logits.masked_fill_(~mask, torch.finfo(logits.dtype).min)
        weights = torch.softmax(logits, -1)
        to_value = torch.matmul(weights.transpose(-1, -2), gradient)
        inner = torch.matmul(gradient, value.transpose(-1, -2))
        to_logits = torch._softmax_backward_data(inner, weights, -1, weights.dtype)
        to_query = torch.matmul(to_logits, key).mul_(ctx.scale)
        to_key = torch.matmul(to_logits.transpose(-1, -2), scaled)
        return to_query, to_key, to_value, None, None


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """query [b, heads, n, d], key and value [b, heads, m, d]; mask bool, broadcast to [b, heads, n, m], True: seen."""
    return _Attention.apply(query, key, value, mask, scale or 1 / math.sqrt(query.shape[-1]))


def attention_pays(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether `attention` computes this, and faster than torch's own."""
    return (
        query.device.type == "cpu"
        and query.dtype == torch.bfloat16
        and torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad)
        and query.shape[1] == key.shape[1]
        and (mask is None or mask.dtype == torch.bool)
    )


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, threshold: int) -> torch.Tensor:
        words = torch.empty((values.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
        kept = (words.view(torch.uint8)[: values.numel()] >= threshold).view(values.shape)
        ctx.save_for_backward(kept)
        ctx.scale = 256 / (256 - threshold)
        return torch.where(kept, values * ctx.scale, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        [gradient], [kept] = gradients, ctx.saved_tensors
        return torch.where(kept, gradient * ctx.scale, 0), None


class Dropout(nn.Dropout):
    """Dropout that draws a byte for each number, where torch draws one number after the other on a processor.

    p is rounded to 256ths (0.1 to 0.1016), what is left is scaled by just that.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        threshold = round(256 * self.p)
        if not self.training or threshold == 0:
            return input
        if input.device.type != "cpu" or threshold >= 256:
            return super().forward(input)
        return _Drop.apply(input, threshold)


def attention_dropouts(config: Any) -> dict[str, float]:
    """What a configuration of transformers says of dropout of attention's weights, as its family calls it.

    Training puts 0 in its place: it keeps attention from the fused kernels, a step on a processor would take twice as
    long. Dropout of the hidden states stays.
    """
    names = ("attention_probs_dropout_prob", "attention_dropout")
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def swap_dropout(module: nn.Module) -> None:
    """Put `Dropout` in the place of every nn.Dropout of a model."""
    for child in module.modules():
        if type(child) is nn.Dropout:
            child.__class__ = Dropout


LOGITS = 1 << 23  # numbers of logits held at a time: 32 MiB, which stay in a processor's cache


class _VocabularyLoss(torch.autograd.Function):
    """sum of -log softmax(hidden table^T + bias)[target]; its gradients are made on the way forward, block by block."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, table: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        device = hidden.device
        low = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else hidden.dtype
        wanted = ctx.needs_input_grad
        words, states = table.to(low), hidden.to(low)
        to_hidden = torch.empty_like(states) if wanted[0] else None
        to_table = torch.zeros_like(table, dtype=torch.float32) if wanted[1] else None
        to_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
        total = torch.zeros((), dtype=torch.float32, device=device)
        step = max(1, LOGITS // len(table))
        for at in range(0, len(states), step):
            block, target = states[at : at + step], targets[at : at + step, None]
            odds = torch.mm(block, words.t()).float()
            if bias is not None:
                odds += bias
            highest = odds.amax(1, keepdim=True)
            total -= (odds.gather(1, target) - highest).sum()
            odds.sub_(highest).exp_()
            sums = odds.sum(1, keepdim=True)
            total += sums.log().sum()
            if not any(wanted):
                continue
            odds.div_(sums).scatter_add_(1, target, torch.full_like(sums, -1))
            if to_bias is not None:
                to_bias += odds.sum(0)
            rounded = odds.to(low)
            if to_hidden is not None:
                torch.mm(rounded, words, out=to_hidden[at : at + step])
            if to_table is not None:
                to_table += torch.mm(rounded.t(), block)
        ctx.save_for_backward(to_hidden, to_table, to_bias)
        ctx.dtypes = hidden.dtype, table.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [gradient] = gradients
        found = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if saved is None else (saved * gradient).to(dtype) for saved, dtype in found), None


def vocabulary_loss(
    hidden: torch.Tensor, table: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Cross-entropy of words, summed, float32 []: hidden [k, d], table [v, d], bias [v], targets int64 [k].

    Of the k x v logits only a block is held at a time, and each is made once; what is held until the way back are the
    gradients, one as large as the table among them. Under autocast the products are made in its dtype, the rest in
    float32; the gradients to table and bias are summed in float32.
    """
    return _VocabularyLoss.apply(hidden, table, bias, targets)
