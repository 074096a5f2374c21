"""Reads tensors by name from safetensors files and torch state dicts; a pickle with other objects is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from riptide.retriever.model.weights import read_tensors


def read_state(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Reads the tensors of one or several files onto the CPU, by name.

    Args:
        files: Files that end with .safetensors, or that torch.save has written.

    Raises:
        InputError: If a file is damaged, holds anything but tensors, or would run code when it is loaded.
    """
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state |= read_tensors(file)
    return state
