"""Reads tensors by name from safetensors files and torch state dicts; a pickle with other objects is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from riptide.base.errors import InputError
from riptide.retriever.model.failures import readable_errors
from riptide.retriever.model.weights import read_tensors

_GLOBAL = re.compile(r"\bGLOBAL ([\w.]+)")


def read_state(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Reads the tensors of one or several files onto the CPU, by name.

    Args:
        files: Files that end with .safetensors, or that torch.save has written.

    Raises:
        InputError: If a file is damaged, holds anything but tensors, or would run code when it is loaded.
    """
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state |= read_tensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
    return state


def _read_pickle(file: Path) -> dict[str, torch.Tensor]:
    with readable_errors(file):
        try:
            stored: Any = torch.load(file, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            if (name := _GLOBAL.search(str(error))) is None:
                raise InputError(
                    f"{file}: not a state dict that torch.save has written: save the tensors with safetensors"
                ) from error
            raise InputError(
                f"{file}: holds {name[1]} beside tensors; only a state dict is read, as a pickle can run code: save "
                "the tensors with safetensors"
            ) from error
    if not isinstance(stored, dict):
        raise InputError(f"{file}: holds a {type(stored).__name__}, expected tensors by name (a state dict)")
    for name, value in stored.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            kind = type(value).__name__
            raise InputError(f"{file}: {str(name)[:60]!r} is a {kind}, expected tensors by name (a state dict)")
    return stored
