"""The P-tuning v2 layout of DPTDR's authors and PEFT: one row per prompt token with its keys and values of all layers.

`prefix.view(l, 2 * layers, heads, head_dim).permute(1, 2, 0, 3)`: the key of layer i is at index 2i, its value at 2i+1.
"""

from __future__ import annotations

from pathlib import Path

import torch

from riptide.base.errors import InputError
from riptide.retriever.forward.prompt_rows import PromptShape
from riptide.retriever.interchange.backbone import REMEDY, Backbone

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def prompt_from_rows(rows: torch.Tensor, shape: PromptShape) -> torch.Tensor:
    """Converts P-tuning v2 rows to a prompt in riptide's layout, with the same dtype.

    Args:
        rows: Keys and values, [l, layers * 2 * heads * head_dim].
        shape: The shape of the backbone's keys and values.

    Returns:
        [layers, 2, heads, l, head_dim].
    """
    layers, heads, head_dim = shape
    return rows.view(len(rows), layers, 2, heads, head_dim).permute(1, 2, 3, 0, 4).contiguous()


def prompt_to_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Converts a prompt [layers, 2, heads, l, head_dim] to rows [l, layers * 2 * heads * head_dim]; same dtype."""
    return matrix.permute(3, 0, 1, 2, 4).reshape(matrix.shape[3], -1).contiguous()


def check_rows(rows: torch.Tensor, name: str, file: Path, backbone: Backbone) -> None:
    """Raises InputError unless a tensor contains finite prompt rows that fit the backbone.

    Args:
        rows: The tensor.
        name: Its name in the file.
        file: The file.
        backbone: The backbone.
    """
    check_numbers(rows, name, file)
    if rows.ndim != 2 or len(rows) < 1 or rows.shape[1] != backbone.num_columns:
        raise InputError(
            f"{file}: {name} is {list(rows.shape)}, and {backbone}, for which a prompt of l tokens is "
            f"[l, {backbone.num_columns}]: {REMEDY}"
        )


def check_numbers(tensor: torch.Tensor, name: str, file: Path) -> None:
    """Raises InputError unless a tensor is dense and finite and has a dtype that prompts may have."""
    if tensor.dtype not in _DTYPES or not tensor.is_contiguous():
        raise InputError(
            f"{file}: {name} is {tensor.dtype} {list(tensor.shape)}, expected contiguous float32, float16 or bfloat16"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise InputError(f"{file}: {name} holds numbers that are not finite: give another checkpoint")
