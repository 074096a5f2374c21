"""CPU kernels for training: bfloat16 attention, dropout, and cross-entropy over a vocabulary.

torch's own versions are slow on a CPU. These compute the same up to rounding; random numbers depend on torch's seed
alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class _Attention(torch.autograd.Function):
    """softmax(query key^T) value; the backward pass recomputes the attention weights.

    The backward pass of torch's fused kernel has a sixth of the speed of five plain products in bfloat16; its forward
    pass is fast and is used here.
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
        with torch.enable_grad():
            weights = torch.softmax(logits.requires_grad_(), -1)
        to_value = torch.matmul(weights.transpose(-1, -2), gradient)
        inner = torch.matmul(gradient, value.transpose(-1, -2))
        [to_logits] = torch.autograd.grad(weights, logits, inner)
        to_query = torch.matmul(to_logits, key).mul_(ctx.scale)
        to_key = torch.matmul(to_logits.transpose(-1, -2), scaled)
        return to_query, to_key, to_value, None, None


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Computes the attention of queries over keys and values: [b, heads, n, d].

    Args:
        query: [b, heads, n, d].
        key: [b, heads, m, d].
        value: [b, heads, m, d].
        mask: bool, broadcast to [b, heads, n, m], True where a key is attended to; None: everywhere.
        scale: Factor of the products; None: 1 / sqrt(d).
    """
    return _Attention.apply(query, key, value, mask, scale or 1 / math.sqrt(query.shape[-1]))


def is_attention_faster(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether `attention` supports these tensors and is faster than torch's function."""
    return (
        query.device.type == "cpu"
        and query.dtype == torch.bfloat16
        and torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad)
        and query.shape[1] == key.shape[1]
        and (mask is None or mask.dtype == torch.bool)
    )


class _Drop(torch.autograd.Function):
    """Dropout of values that are broadcast to `shape`, with one random byte per element of the result."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, threshold: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        count = math.prod(shape)
        words = torch.empty((count + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
        keep = (words.view(torch.uint8)[:count] >= threshold).view(shape)
        ctx.save_for_backward(keep)
        ctx.scale, ctx.shape, ctx.dtype = 256 / (256 - threshold), values.shape, values.dtype
        return torch.where(keep, (values * ctx.scale).to(dtype), 0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [gradient], [keep] = gradients, ctx.saved_tensors
        masked = torch.where(keep, gradient, 0)
        if broadcast := [axis for axis, size in enumerate(ctx.shape) if size != masked.shape[axis]]:
            masked = masked.sum(broadcast, keepdim=True, dtype=ctx.dtype)
        return masked.to(ctx.dtype) * ctx.scale, None, None, None


def apply_dropout(values: torch.Tensor, probability: float, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Applies dropout with a separate mask for each row of a batch.

    The gradient of the values is summed over the rows in the dtype of the values.

    Args:
        values: Float [k, 1, ...], shared by all rows, or [k, rows, ...].
        probability: Fraction of the numbers that become 0, from 0 to less than 1. On a CPU it is rounded to a multiple
            of 1/256.
        rows: Number of rows.
        dtype: The dtype of the result.

    Returns:
        [k, rows, ...]; the remaining numbers are divided by the fraction that remains.
    """
    shape = (values.shape[0], rows, *values.shape[2:])
    threshold = _threshold(probability)
    if values.device.type == "cpu" and 0 < threshold < 256:
        dropped: torch.Tensor = _Drop.apply(values, threshold, shape, dtype)
        return dropped
    return functional.dropout(values.expand(shape).to(dtype), probability)


def _threshold(probability: float) -> int:
    """Returns how many of the 256 values of a random byte drop an element."""
    return round(256 * probability)


class Dropout(nn.Dropout):
    """Dropout with one random byte per element on a CPU, where torch's function draws one random number at a time.

    p is rounded to a multiple of 1/256 (0.1 to 0.1016); the remaining numbers are scaled accordingly.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        threshold = _threshold(self.p)
        if not self.training or threshold == 0:
            return input
        if input.device.type != "cpu" or threshold >= 256:
            return super().forward(input)
        return _Drop.apply(input, threshold, input.shape, input.dtype)


def attention_dropouts(config: Any) -> dict[str, float]:
    """Returns the dropout rates of attention weights in a transformers configuration, by field name.

    Training sets them to 0, because dropout of attention weights prevents fused kernels: a step on a CPU would take
    twice as long. Dropout of hidden states stays.
    """
    names = ("attention_probs_dropout_prob", "attention_dropout")
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def swap_dropout(module: nn.Module) -> None:
    """Replaces every nn.Dropout in a model by `Dropout`."""
    for name, child in [*module.named_modules(remove_duplicate=False)]:
        if type(child) is nn.Dropout:
            module.set_submodule(name, Dropout(child.p).train(child.training))


def remove_dropout(module: nn.Module) -> None:
    """Sets all dropout of a model to 0, including that of attention weights; its configuration does not change."""
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        for name in [name for name, value in vars(child).items() if "dropout" in name and isinstance(value, float)]:
            setattr(child, name, 0.0)  # T5 keeps the rate of its attention dropout in an attribute.


LOGITS = 1 << 23  # maximum number of logits in memory at a time: 32 MiB, which fit a CPU's cache


class _VocabularyLoss(torch.autograd.Function):
    """sum of -log softmax(hidden table^T + bias)[target]; the forward pass computes the gradients, block by block."""

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
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if saved is None else (saved * gradient).to(dtype) for saved, dtype in pairs), None


def vocabulary_loss(
    hidden: torch.Tensor, table: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Returns the summed cross-entropy over a vocabulary, a float32 scalar.

    Only a block of the k x v logits is in memory at a time, and each logit is computed once. The gradients, one of
    them as large as the table, are computed in the forward pass and kept until the backward pass; where torch computes
    no gradients (`torch.no_grad`), there are none. Under autocast the products have its dtype and the rest is float32;
    the gradients of table and bias are summed in float32.

    Args:
        hidden: Float [k, d].
        table: Float [v, d].
        bias: Float [v], or None.
        targets: int64 [k].
    """
    if not torch.is_grad_enabled():  # An autograd function would compute the gradients anyway.
        hidden, table, bias = hidden.detach(), table.detach(), None if bias is None else bias.detach()
    return _VocabularyLoss.apply(hidden, table, bias, targets)
